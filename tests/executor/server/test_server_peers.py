"""If these fail, one executor that leaves a step lets the others wait in it, or lose their memory.

Real executors behind real sockets, in this process, each with its own compute thread. Their timeout
for a lost peer is ten minutes; every test ends, and fails, long before.
"""

import asyncio
from pathlib import Path

import pytest

from protos.executor.step_checksums import agreement_crc32, part_crc32
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.servers import Client, error_of, form_group, group_of
from tests.executor.support.steps import prompt_part, step, tokens_of

PEER_TIMEOUT_S = 600.0
TEST_TIMEOUT_S = 120.0
PROMPTS = [[5, 17, 33, 2, 90, 41, 8, 8, 60], [7, 3, 44]]
COUNTS = [len(prompt) for prompt in PROMPTS]


def prompts_step(epoch: int = 1) -> list[pb.StepRequest]:
    """Returns each rank's step 1, in which it runs its prompt."""
    return [
        step(
            1,
            prompt_part(0, prompt, [1, 2, 3][: -(-len(prompt) // 4)], dp_rank=rank),
            num_tokens=COUNTS,
            num_logits=[1, 1],
            epoch=epoch,
            padding_mode=pb.DP_PADDING_MODE_SUM_LEN,
        )
        for rank, prompt in enumerate(PROMPTS)
    ]


async def run_prompts(clients: list[Client], epoch: int) -> list[pb.StepResponse]:
    """Returns each rank's answer to step 1, in a group formed anew."""
    await form_group(clients, epoch)
    calls = [client.executor.Step() for client in clients]
    for call, request in zip(calls, prompts_step(epoch), strict=True):
        await call.write(request)
    answers = [await call.read() for call in calls]
    for call in calls:
        await call.done_writing()
    return answers


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ([9, 4], "global_num_tokens says 4 for this executor's part, which has 3"),
        ([33, 3], "global_num_tokens has 33; the budget is 32"),
    ],
)
async def test_a_step_that_one_executor_refuses_fails_on_the_other_at_once(
    tiny_checkpoint: Path, counts: list[int], problem: str, first: int
):
    """Whichever gets it first: one waits for the other, or finds that it has left."""
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        await form_group(clients, 1)
        requests = prompts_step()
        requests[1].agreement.global_num_tokens[:] = counts
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
        assert "PeerLost: another executor left the group" in message
        answers = await run_prompts(clients, 2)
        assert [len(tokens_of(answer)) for answer in answers] == [1, 1]


async def test_an_executor_that_waits_for_another_is_free_when_its_stream_is_cancelled(
    tiny_checkpoint: Path,
):
    """As when the router has heard of a loss: by then its own peers need not have left."""
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        tokens = [tokens_of(answer) for answer in await run_prompts(clients, 1)]
        await form_group(clients, 2)
        calls = [client.executor.Step() for client in clients]
        await calls[0].write(prompts_step(2)[0])
        async with asyncio.timeout(TEST_TIMEOUT_S):
            calls[0].cancel()
            answers = await run_prompts(clients, 3)
        assert [tokens_of(answer) for answer in answers] == tokens


async def test_answers_say_by_checksums_what_was_run(tiny_checkpoint: Path):
    """The router compares them with what it sent, and names who differs."""
    async with group_of(tiny_checkpoint, 2) as clients:
        answers = await run_prompts(clients, 1)
    sent = prompts_step()
    assert len({answer.agreement_crc32 for answer in answers}) == 1
    for answer, request in zip(answers, sent, strict=True):
        assert answer.agreement_crc32 == agreement_crc32(request)
        assert answer.part_crc32 == part_crc32(request)
