"""Executors with real models behind real sockets: groups that form, fail and form again."""

from pathlib import Path
from typing import Any

import pytest

from executor.parallel import process_groups as parallel
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.servers import Client, form_group, group_of, reason_of
from tests.executor.support.steps import decode_part, idle_part, prompt_part, step, tokens_of

PROMPTS = [[5, 17, 33, 2, 90, 41, 8, 8, 60], [7, 3, 44]]
MODES = {True: pb.DP_PADDING_MODE_SUM_LEN, False: pb.DP_PADDING_MODE_MAX_LEN}  # by has_extend


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
        is_extend = any(part.forward_mode == pb.FORWARD_MODE_EXTEND for part in parts)
        agreed: dict[str, Any] = {
            "num_tokens": [len(part.sequences.token_ids) // 4 for part in parts],
            "num_logits": [min(len(part.sequences.token_ids), 1) for part in parts],
            "has_extend": is_extend,
            "padding_mode": MODES[is_extend],
        }
        for call, part in zip(calls, parts, strict=True):
            await call.write(step(step_id, part, epoch=epoch, **agreed))
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


async def generate_alone(path: Path) -> list[list[int]]:
    async with group_of(path, 1) as clients:
        tokens = []
        for epoch, prompt in enumerate(PROMPTS, start=1):
            await form_group(clients, epoch)
            tokens += await generate(clients, [prompt], 8, epoch)
        return tokens


async def test_two_ranks_answer_as_one_does_and_again_after_one_has_waited_for_a_lost_peer(
    tiny_checkpoint: Path,
):
    """Rank 0 runs a step that rank 1 never gets; the router then forms the group again."""
    alone = await generate_alone(tiny_checkpoint)
    async with group_of(tiny_checkpoint, 2) as clients:
        await form_group(clients, 1)
        assert await generate(clients, PROMPTS, 8, 1) == alone
        await form_group(clients, 2)
        call = clients[0].executor.Step()
        part = prompt_part(0, PROMPTS[0], [1, 2, 3])
        await call.write(step(1, part, num_tokens=[9, 0], num_logits=[1, 0], epoch=2))
        await form_group(clients, 3)
        assert await reason_of(call) in ("STEP_FAILED", "STALE_EPOCH")
        assert await generate(clients, PROMPTS, 8, 3) == alone


async def test_a_member_that_does_not_come_fails_the_join_and_not_the_next(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nor is it waited for as long as a peer in a collective."""
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=10_000.0) as clients:
        store_address = await clients[0].prepare(1)
        with monkeypatch.context() as impatient:
            impatient.setattr(parallel, "FORM_TIMEOUT_S", 0.3)
            assert await reason_of(clients[0].join(1, store_address)) == "JOIN_FAILED"
        await form_group(clients, 2)
        assert len(await generate(clients, [PROMPTS[0], [1]], 2, 2)) == 2
