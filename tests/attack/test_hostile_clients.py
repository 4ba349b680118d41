"""Callers and strangers attack every port; beside each, honest calls are all answered."""

import asyncio

import pytest

from deploy.local.launch import LocalStack
from tests.attack import callers, ports, strangers
from tests.attack.besieged import watched
from tests.attack.honest import honest_calls
from tests.attack.target import Attack, Target

pytestmark = pytest.mark.slow

PAUSE_S = 0.2  # between honest calls: this is no benchmark
MOST_MORE_MIB = 150  # of any process, by the limits of the ports


@pytest.mark.parametrize(
    "attack",
    [
        callers.header_bombs,
        callers.unfinished_calls,
        callers.watches,
        callers.half_sent_messages,
        callers.rapid_resets,
        callers.unread_answers,
        callers.others_requests,
        strangers.epoch_leaps,
        strangers.epoch_leaps_with_the_token,
        strangers.joins_of_a_stranger,
        strangers.store_filled,
        strangers.half_scrapes,
        ports.every_port,
    ],
    ids=lambda attack: attack.__name__,
)
async def test_honest_calls_are_answered_beside(
    attack: Attack, stack: LocalStack, target: Target
) -> None:
    pids = [process.pid for process in (stack.router, *stack.executors)]
    async with (
        watched(*pids) as memories,
        honest_calls(stack.address, stack.token, pause_s=PAUSE_S) as calls,
    ):
        outcome = await asyncio.to_thread(attack, target)
    assert calls.failures == []
    assert calls.num_calls > 0
    assert outcome.fault == "", outcome.sent
    assert [m for m in memories if m.peak > m.before + MOST_MORE_MIB] == [], outcome.sent
    assert not any(process.has_ended for process in (stack.router, *stack.executors))
