"""Topologies: answers do not depend on how executors share the model.

A single executor answers first, in float32. Every other way to share the model must give the same
tokens, with the same log probabilities but for the order of sums.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local.demo import OPTIONS, SEED, draw_requests, idle_group
from deploy.local.demo_tasks import text_of, token_ids
from router.client import Client, Completion
from tests.e2e.conftest import FLOAT32_ARGS
from tests.e2e.support.stacks import served

NUM_REQUESTS = 44
NUM_ALONE = 2  # are sent one by one, so that other DP ranks have nothing to do
LONG_PROMPTS = ("\n17+25=", "\nrev lockstep=\nsort 31415926=")
LONG_TOKENS = 32  # past the answer: the model goes on with problems of its own
TOLERANCE = 1e-4

EP_OFF = ("--ep-size", "1")
A2A = ("--moe-a2a", "torch")
A2A_EXTENDS = (*A2A, "--moe-a2a-extend", "all-to-all")
NO_GRAPHS = ("--decode-graphs", "off", "--prefill-graphs", "off")

# Other pairs of sizes and ways are in tests/together/test_family_parity.py, without processes, and
# all-gathers in every other test of this folder.
MATRIX = [
    pytest.param(4, 1, A2A, id="dp4 tp1, all-to-all"),
    pytest.param(2, 2, A2A_EXTENDS, id="dp2 tp2, all-to-all, prompts too"),
    # Three, three and two of the experts.
    pytest.param(3, 1, (), id="dp3 tp1"),
    pytest.param(3, 1, A2A_EXTENDS, id="dp3 tp1, all-to-all, prompts too"),
    pytest.param(1, 2, EP_OFF, id="dp1 tp2, no ep"),
    # Two parts of the experts, each on two executors; and no graph, so that steps have odd lengths.
    pytest.param(2, 2, ("--ep-size", "2", *NO_GRAPHS), id="dp2 tp2, ep2, no graphs"),
]


@dataclass(frozen=True, slots=True)
class Told:
    """What a stack answered.

    Attributes:
        short: Completions of the demo's problems.
        long: Completions that go on and on, scored.
    """

    short: list[Completion]
    long: list[Completion]


async def ask_everything(client: Client) -> Told:
    """Asks many problems at once, and then some one by one."""
    requests = draw_requests(SEED, NUM_REQUESTS)
    long = [
        asyncio.create_task(
            client.complete(prompt, max_tokens=LONG_TOKENS, ignore_eos=True, logprobs=True)
        )
        for prompt in map(token_ids, LONG_PROMPTS)
    ]
    at_once = requests[:-NUM_ALONE]
    short = await asyncio.gather(*(client.complete(r.prompt, **OPTIONS) for r in at_once))
    told = Told(list(short), await asyncio.gather(*long))
    for request in requests[-NUM_ALONE:]:
        told.short.append(await client.complete(request.prompt, **OPTIONS))
    return told


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone() -> Told:
    """What a single executor answers."""
    async with served(None, dp_size=1, executor_args=FLOAT32_ARGS) as (_, client):
        told = await ask_everything(client)
    requests = draw_requests(SEED, NUM_REQUESTS)
    for request, completion in zip(requests, told.short, strict=True):
        assert request.problem.is_answered_by(text_of(completion.token_ids)), request.problem
    return told


def assert_same(told: Told, alone: Told) -> None:
    assert [c.token_ids for c in told.short] == [c.token_ids for c in alone.short]
    for given, expected in zip(told.long, alone.long, strict=True):
        assert given.token_ids == expected.token_ids
        for score, right in zip(given.logprobs, expected.logprobs, strict=True):
            assert score.token_id == right.token_id
            assert abs(score.logprob - right.logprob) < TOLERANCE


@pytest.mark.parametrize(("dp_size", "attn_tp_size", "way"), MATRIX)
async def test_every_way_to_share_the_model_gives_the_tokens_of_one_executor(
    dp_size: int, attn_tp_size: int, way: Sequence[str], alone: Told, tmp_path: Path
):
    sizes = {"dp_size": dp_size, "attn_tp_size": attn_tp_size}
    executor_args = (*FLOAT32_ARGS, *way)
    async with served(tmp_path, **sizes, executor_args=executor_args) as (_, client):
        told = await ask_everything(client)
        group = await idle_group(client)
    assert_same(told, alone)
    assert len(group.ranks) == dp_size
    assert all(rank.total_tokens > 0 for rank in group.ranks)
    assert group.epoch == 1


async def test_an_attention_tp_peer_that_dies_costs_a_pause_and_no_token(
    alone: Told, tmp_path: Path
):
    settings = {"attn_tp_size": 2, "executor_args": FLOAT32_ARGS}
    async with served(tmp_path, dp_size=1, **settings) as (stack, client):
        telling = asyncio.create_task(ask_everything(client))
        while (await client.get_status())[0].step < 4:
            await asyncio.sleep(0.001)
        await stack.restart_executor(0, attn_tp_rank=1)
        assert_same(await telling, alone)
        await client.complete("\n17+25=", max_tokens=4)  # by the executor that was started again
        group = await idle_group(client)
    assert group.epoch > 1
    assert [process.name for process in stack.executors] == ["executor-0.0", "executor-0.1"]
