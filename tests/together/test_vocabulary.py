"""Tokens that a request allows and sequences that it bans hold however it is served."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from router.requests.request import SamplingParams
from tests.together.speculation.speculative_cell import (
    EXACT_DTYPE,
    Answer,
    Ask,
    LosingRouter,
    Router,
    cell_of,
    demo_prompts,
    plain_answers,
    serve,
    settings_of,
)

LETTERS = tuple(ord(letter) + 3 for letter in "aeiou")
MAX_LEN = 48
FEW_BLOCKS: dict[str, Any] = {"max_num_seqs": 6, "num_kv_blocks": MAX_LEN // 4 + 4}


def limited_asks() -> tuple[Ask, ...]:
    """Requests that would answer otherwise: they ban what they would answer, or allow else."""
    asks = tuple(
        Ask(prompt=prompt, max_tokens=16, delay=place)
        for place, prompt in enumerate(demo_prompts(3, 6))
    )
    limited = []
    for place, (ask, [free]) in enumerate(zip(asks, plain_answers(asks, EXACT_DTYPE), strict=True)):
        values = {"temperature": 1.0} if place % 3 == 0 else {}
        if place % 2:
            pairs = tuple(dict.fromkeys(pairwise(free.tokens)))
            sampling = SamplingParams(values, seed=place, banned=(*pairs, free.tokens[:3]))
        else:
            sampling = SamplingParams(values, seed=place, allowed_ids=LETTERS)
        limited.append(replace(ask, sampling=sampling))
    return tuple(limited)


def expect_limited(asks: tuple[Ask, ...], answers: list[list[Answer]]) -> None:
    for ask, [answer] in zip(asks, answers, strict=True):
        assert len(answer.tokens) == ask.max_tokens
        if ask.sampling.allowed_ids:
            assert set(answer.tokens) <= set(LETTERS)
        assert not set(pairwise(answer.tokens)) & set(ask.sampling.banned)


def test_drafts_preemptions_and_losses_change_no_answer():
    asks = limited_asks()
    plain = plain_answers(asks, EXACT_DTYPE)
    expect_limited(asks, plain)
    with cell_of(
        dtype=EXACT_DTYPE, max_model_len=MAX_LEN, **FEW_BLOCKS, **settings_of("mtp", 1)
    ) as cell:
        router = Router(cell)
        assert serve(router, asks) == plain
        assert router.num_preemptions
        allowed = [each for each in router.ended if each.request.sampling.allowed_ids]
        assert sum(each.progress.num_drafts for each in allowed) > 0
        losing = LosingRouter(cell)
        assert serve(losing, asks) == plain
        assert losing.num_lost


def test_executors_that_share_a_rank_hold_to_them_too():
    """Their sums are of another order, so their answers may be others."""
    asks = limited_asks()
    with cell_of(dtype=EXACT_DTYPE, attn_tp_size=2, max_num_seqs=8) as cell:
        expect_limited(asks, serve(LosingRouter(cell), asks))
