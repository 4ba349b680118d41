"""An executor lies in every way; the router names it, and the other group's calls are answered."""

import asyncio

import pytest

from deploy.local.launch import LocalStack
from tests.attack.honest import KINDS, SCORED, honest_calls
from tests.attack.hostile_executor import LIES, HostileExecutor, nothing
from tests.e2e.support.logs import records

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", LIES)
async def test_the_router_names_an_executor_that_says(
    name: str, stack: LocalStack, hostile: HostileExecutor, hostile_address: str
) -> None:
    lie = LIES[name]
    kinds = ((SCORED,) * 3 if lie.is_scored else KINDS) * 2  # so many that both groups get some
    pause_s = 0.2 if lie.answers is nothing else 0.0
    async with honest_calls(stack.address, stack.token, kinds, pause_s) as calls:
        num_named = len(named(stack, hostile_address, lie.word))
        hostile.tell(lie)
        while len(named(stack, hostile_address, lie.word)) == num_named:
            assert not stack.router.has_ended, stack.router.log_tail
            await asyncio.sleep(0.05)
    assert calls.failures == []
    assert not stack.router.has_ended


def named(stack: LocalStack, address: str, word: str) -> list[str]:
    """Returns the problems in the router's log that name the executor and the word."""
    lost = [
        *records(stack.router.log_path, "executor_lied"),
        *records(stack.router.log_path, "group_lost"),
        *records(stack.router.log_path, "group_not_formed"),
    ]
    return [r["problem"] for r in lost if address in r["problem"] and word in r["problem"]]
