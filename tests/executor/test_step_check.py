"""If this fails, one wrong step ends all executors, or makes them wait for each other for minutes.

Real executors behind real sockets, two in this process, each with its own compute thread. Their
timeout for a lost peer is a minute; every test ends, and fails, long before.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protos.executor.v1 import executor_pb2 as pb
from tests.executor.servers import Client, error_of, form_group, group_of
from tests.executor.steps import decode_part, prompt_part, step, tokens_of

PEER_TIMEOUT_S = 60.0
TEST_TIMEOUT_S = 20.0
PROMPTS = [[5, 17, 33, 2, 90, 41, 8, 8, 60], [7, 3, 44]]
COUNTS = [len(prompt) for prompt in PROMPTS]

Change = Callable[[pb.StepRequest], object]


def prompts_step() -> list[pb.StepRequest]:
    """Returns each rank's step 1, in which it runs its prompt."""
    return [
        step(
            1,
            prompt_part(0, prompt, [1, 2, 3][: -(-len(prompt) // 4)], dp_rank=rank),
            num_tokens=COUNTS,
            num_logits=[1, 1],
            padding_mode=pb.DP_PADDING_MODE_SUM_LEN,
        )
        for rank, prompt in enumerate(PROMPTS)
    ]


def decode_step() -> list[pb.StepRequest]:
    """Returns each rank's step 2, which replays a graph of 2 rows."""
    requests = []
    for rank, count in enumerate(COUNTS):
        requests.append(step(2, decode_part(0, count, dp_rank=rank), num_tokens=[1, 1]))
        requests[-1].agreement.graph_size = 2
    return requests


async def send(calls: list[Any], epoch: int, requests: list[pb.StepRequest]) -> None:
    for call, request in zip(calls, requests, strict=True):
        request.epoch = epoch
        await call.write(request)


async def run_prompts(clients: list[Client], epoch: int) -> tuple[list[Any], list[list[int]]]:
    """Returns each rank's stream and first token, in a group formed anew."""
    await form_group(clients, epoch)
    calls = [client.executor.Step() for client in clients]
    await send(calls, epoch, prompts_step())
    return calls, [tokens_of(await call.read()) for call in calls]


def other_count(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens[0] = 8


def other_num_logits(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens_for_logprob[0] = 2


def other_padding(request: pb.StepRequest) -> None:
    request.agreement.padding_mode = pb.DP_PADDING_MODE_MAX_LEN


def other_graph(request: pb.StepRequest) -> None:
    request.agreement.graph_size = 4


def no_graph(request: pb.StepRequest) -> None:
    request.agreement.ClearField("graph_size")


def own_count(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens[1] = 4


def over_budget(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens[0] = 33


@pytest.mark.parametrize(
    ("requests", "change", "by_rank"),
    [
        (prompts_step, other_count, ["global_num_tokens=[9, 3]", "global_num_tokens=[8, 3]"]),
        (prompts_step, other_num_logits, ["for_logprob=[1, 1]", "for_logprob=[2, 1]"]),
        (prompts_step, other_padding, ["MODE_SUM_LEN", "MODE_MAX_LEN"]),
        (decode_step, other_graph, ["graph_size=2", "graph_size=4"]),
        (decode_step, no_graph, ["graph_size=2", "graph_size=None"]),
    ],
)
async def test_executors_that_were_told_different_things_all_say_who_was_told_what(
    tiny_checkpoint: Path,
    requests: Callable[[], list[pb.StepRequest]],
    change: Change,
    by_rank: list[str],
):
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        calls, tokens = await run_prompts(clients, 1)
        epoch = 1
        if requests is prompts_step:
            await form_group(clients, epoch := 2)
            calls = [client.executor.Step() for client in clients]
        wrong = requests()
        change(wrong[1])
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await send(calls, epoch, wrong)
            errors = [await error_of(call) for call in calls]
        assert errors[0] == errors[1]
        reason, message = errors[0]
        assert reason == "STEP_DISAGREEMENT"
        for rank, told in enumerate(by_rank):
            said = message.partition(f"world rank {rank}: ")[2].partition(";")[0]
            assert told in said, message
        assert (await run_prompts(clients, 3))[1] == tokens


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (own_count, "global_num_tokens says 4 for this executor's part, which has 3"),
        (over_budget, "global_num_tokens has 33; the budget is 32"),
    ],
)
async def test_a_step_that_one_executor_refuses_fails_on_the_other_at_once(
    tiny_checkpoint: Path, change: Change, problem: str, first: int
):
    """Whichever gets it first: one waits for the other, or finds that it has left."""
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        await form_group(clients, 1)
        requests = prompts_step()
        change(requests[1])
        calls = [client.executor.Step() for client in clients]
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await calls[first].write(requests[first])
            if first == 1:
                refused = await error_of(calls[1])
                await calls[0].write(requests[0])
            else:
                await calls[1].write(requests[1])
                refused = await error_of(calls[1])
            reason, message = await error_of(calls[0])
        assert refused == ("INVALID_STEP", problem)
        assert reason == "STEP_FAILED"
        assert "PeerLost: an executor of the group left it" in message
        _, tokens = await run_prompts(clients, 2)
        assert [len(own) for own in tokens] == [1, 1]


async def test_a_step_over_budget_is_refused_by_every_executor_with_the_same_words(
    tiny_checkpoint: Path,
):
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        await form_group(clients, 1)
        requests = prompts_step()
        for request in requests:
            over_budget(request)
        calls = [client.executor.Step() for client in clients]
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await send(calls, 1, requests)
            errors = [await error_of(call) for call in calls]
    assert errors == [("INVALID_STEP", "global_num_tokens has 33; the budget is 32")] * 2


def other_tokens(request: pb.StepRequest) -> None:
    [part] = request.ranks
    part.sequences.token_ids = part.sequences.token_ids[4:] + part.sequences.token_ids[:4]


def other_sampling(request: pb.StepRequest) -> None:
    """As many rows of logits, but of a scored token instead of a sampled one."""
    [part] = request.ranks
    part.sequences.samples = b"\0"
    part.sequences.num_scored = (1).to_bytes(4, "little")
    part.sequences.scored_ids = (7).to_bytes(4, "little")


@pytest.mark.parametrize("change", [other_tokens, other_sampling])
async def test_executors_of_a_dp_rank_that_were_given_different_parts_both_say_so(
    tiny_checkpoint: Path, change: Change
):
    """Else one would compute heads of other tokens, or wait for logits that nobody gathers."""
    prompt = PROMPTS[0]
    requests = [
        step(1, prompt_part(0, prompt, [1, 2, 3]), num_tokens=[len(prompt)], num_logits=[1])
        for _ in range(2)
    ]
    change(requests[1])
    async with group_of(tiny_checkpoint, 1, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        await form_group(clients, 1)
        calls = [client.executor.Step() for client in clients]
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await send(calls, 1, requests)
            errors = [await error_of(call) for call in calls]
    assert errors[0] == errors[1]
    reason, message = errors[0]
    assert reason == "STEP_DISAGREEMENT"
    assert "world ranks 0 and 1 share DP rank 0" in message
