"""Executors with real models behind real sockets: groups that form, fail and form again."""

from pathlib import Path

import pytest

from executor.parallel import process_groups as parallel
from tests.executor.support.ranks.generated import generate
from tests.executor.support.servers import form_group, group_of, reason_of
from tests.executor.support.steps import prompt_part, step

PROMPTS = [[5, 17, 33, 2, 90, 41, 8, 8, 60], [7, 3, 44]]


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
