"""Executors with real models behind real sockets: groups that form, fail and form again."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from executor.parallel import process_groups as parallel
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.servers import HOST, Client, connected, form_group, group_of, reason_of
from tests.executor.support.steps import decode_part, idle_part, prompt_part, step, tokens_of

PROMPT = [5, 17, 33, 2, 90, 41, 8, 8, 60]


async def generate(
    clients: list[Client], prompts: list[list[int]], count: int, epoch: int
) -> list[list[int]]:
    """Returns greedy tokens of one sequence per rank. Rank r begins r steps late."""
    calls = [client.executor.Step() for client in clients]
    tokens: list[list[int]] = [[] for _ in prompts]
    for step_id in range(1, count + len(prompts)):
        parts = [
            part_of(rank, prompt, step_id - 1 - rank, count) for rank, prompt in enumerate(prompts)
        ]
        num_tokens = [sum_of_tokens(part) for part in parts]
        is_extend = any(part.forward_mode == pb.FORWARD_MODE_EXTEND for part in parts)
        for call, part in zip(calls, parts, strict=True):
            await call.write(
                step(
                    step_id,
                    part,
                    num_tokens=num_tokens,
                    num_logits=[min(number, 1) for number in num_tokens],
                    epoch=epoch,
                    has_extend=is_extend,
                    padding_mode=(
                        pb.DP_PADDING_MODE_SUM_LEN if is_extend else pb.DP_PADDING_MODE_MAX_LEN
                    ),
                )
            )
        for call, own in zip(calls, tokens, strict=True):
            own += tokens_of(await call.read())
    for call in calls:
        await call.done_writing()
    return tokens


def part_of(rank: int, prompt: list[int], own_step: int, count: int) -> pb.RankStep:
    if not 0 <= own_step < count:
        return idle_part(rank)
    if own_step == 0:
        return prompt_part(0, prompt, list(range(1, -(-len(prompt) // 4) + 1)), dp_rank=rank)
    computed = len(prompt) + own_step - 1
    new = [computed // 4 + 1] if computed % 4 == 0 else []
    return decode_part(0, computed, -1, new, dp_rank=rank)


def sum_of_tokens(part: pb.RankStep) -> int:
    return len(part.sequences.token_ids) // 4


async def generate_alone(path: Path, prompts: Iterable[list[int]]) -> list[list[int]]:
    async with group_of(path, 1) as clients:
        tokens = []
        for epoch, prompt in enumerate(prompts, start=1):
            await form_group(clients, epoch)
            tokens += await generate(clients, [prompt], 8, epoch)
        return tokens


async def test_two_ranks_answer_as_one_does_and_form_again(tiny_checkpoint: Path):
    prompts = [PROMPT, [7, 3, 44]]
    alone = await generate_alone(tiny_checkpoint, prompts)
    async with group_of(tiny_checkpoint, 2) as clients:
        for epoch in (1, 2):
            await form_group(clients, epoch)
            assert await generate(clients, prompts, 8, epoch) == alone


async def test_a_member_that_does_not_come_fails_the_join_and_not_the_next(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    async with group_of(tiny_checkpoint, 2) as clients:
        prepared = await clients[0].executor.Prepare(pb.PrepareRequest(epoch=1))
        with monkeypatch.context() as impatient:
            impatient.setattr(parallel, "FORM_TIMEOUT_S", 0.3)
            assert await reason_of(clients[0].join(1, prepared.store_address)) == "JOIN_FAILED"
        await form_group(clients, 2)
        assert len(await generate(clients, [PROMPT, [1]], 2, 2)) == 2


async def test_a_rank_that_waits_for_a_lost_peer_joins_the_next_epoch(tiny_checkpoint: Path):
    """Rank 0 runs a step that rank 1 never gets; the router then forms the group again."""
    async with group_of(tiny_checkpoint, 2) as clients:
        await form_group(clients, 1)
        call = clients[0].executor.Step()
        part = prompt_part(0, PROMPT, [1, 2, 3])
        await call.write(step(1, part, num_tokens=[9, 0], num_logits=[1, 0]))
        await form_group(clients, 2)
        assert await reason_of(call) in ("STEP_FAILED", "STALE_EPOCH")
        tokens = await generate(clients, [PROMPT, [7, 3, 44]], 8, 2)
    assert tokens == await generate_alone(tiny_checkpoint, [PROMPT, [7, 3, 44]])


async def test_the_process_listens_loads_and_stops_when_told(tiny_checkpoint: Path):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "executor",
        env=os.environ
        | {
            "LOCKSTEP_EXECUTOR_MODEL": str(tiny_checkpoint),
            "LOCKSTEP_EXECUTOR_LISTEN": f"{HOST}:0",
            "LOCKSTEP_EXECUTOR_NUM_THREADS": "1",
            "LOCKSTEP_EXECUTOR_KV_CACHE_BYTES": "1000000",
            "LOCKSTEP_EXECUTOR_BLOCK_SIZE": "4",
        },
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    lines = []
    try:
        async with asyncio.timeout(300):
            while not lines or '"event": "ready_to_join"' not in lines[-1]:
                line = (await process.stderr.readline()).decode()
                assert line, lines
                lines.append(line)
        [listening] = [line for line in lines if '"event": "listening"' in line]
        port = int(listening.partition(f'"address": "{HOST}:')[2].partition('"')[0])
        async with connected(port) as client:
            await form_group([client], 1)
            assert len((await generate([client], [PROMPT], 3, 1))[0]) == 3
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            await process.communicate()
    assert process.returncode == 0
