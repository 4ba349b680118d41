"""Sampled output with drafts: token for token that of plain decoding, or distributed like it.

With ``draft_sampling=match`` a seed gives the same text with and without drafts. With ``rejection``
only the distribution is the same: chi-square over 4,000 answers to one prompt, and over a quarter of
them with a rule that is broken on purpose.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.speculative import verifier
from executor.speculative.accept import Accepted, reject_chain
from protos.executor.v1 import executor_pb2 as pb
from router.requests.request import SamplingParams
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.chi_square import two_sample_p_value
from tests.executor.support.drafts.broken_rules import always_accept, draw_from_all_of_p
from tests.executor.support.drafts.draft_checkpoints import VOCAB, save_draft
from tests.executor.support.steps import ints_of, row_starts, sequences, step
from tests.support.paths import DEMO_DRAFTS as DRAFTS
from tests.together.speculation.speculative_cell import (
    CHAINS,
    FAR_WAYS,
    NEWLINE,
    WAYS,
    Ask,
    Cell,
    Router,
    cell_of,
    expect_alike,
    expect_plain,
    mixed_asks,
    serve,
    settings_of,
)

NUM_DRAWS = 4000
SIGNIFICANCE = 0.01
NUM_ROWS = 1000


def sampled(asks: list[Ask], first_seed: int) -> list[Ask]:
    """Returns requests that sample, each with a seed of its own."""
    ways = ({"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9})
    return [
        replace(ask, sampling=SamplingParams(ways[i % 3], seed=first_seed + i * 7919))
        for i, ask in enumerate(asks)
    ]


@pytest.mark.parametrize(("name", "topk"), FAR_WAYS)
def test_a_seed_gives_the_same_text_with_drafts_as_without(name: str, topk: int):
    """Rows that start over after a preemption, and several answers to one prompt, among them."""
    seed = 400 + WAYS.index((name, topk))
    asks = sampled(mixed_asks(seed, 8), seed)
    asks += sampled([Ask(prompt=(NEWLINE,), max_tokens=20, n=2)] * 3, 2**63 + seed)
    few = {"max_num_seqs": 6, "max_num_batched_tokens": 42, "num_kv_blocks": 17}
    with cell_of(max_model_len=64, **few, **settings_of(name, topk)) as cell:
        router = Router(cell)
        expect_plain(router, asks)
    assert router.tokens_per_step > 1.1


@pytest.mark.parametrize("name", CHAINS)
def test_greedy_rows_among_rows_that_draw_their_drafts_are_those_of_plain_decoding(name: str):
    greedy = mixed_asks(500, 5)
    drawn = sampled([Ask(prompt=(NEWLINE,), max_tokens=20)] * 3, 1)
    with cell_of(draft_sampling="rejection", draft_model=DRAFTS / name) as cell:
        router = Router(cell)
        answers = serve(router, [*drawn, *greedy])
        again = serve(Router(cell), [*drawn, *greedy])
        expect_plain(Router(cell), greedy)
        mixed = answers[3:]
        alone = serve(Router(cell), greedy)
    for got, wanted, ask in zip(mixed, alone, greedy, strict=True):
        expect_alike(got, wanted, str(ask))
    assert answers == again, "the same seeds give the same text in the same steps"
    assert len({answer.tokens for [answer] in answers[:3]}) == 3


# ---- rejection sampling, in distribution

# Small random models: their next token is far from sure, and a draft is right every other time.
WAYS_TO_DRAW = [
    ("eagle3", {"temperature": 0.7}),  # its vocabulary is part of the target's
    ("nextn_three_layers", {"temperature": 1.0, "top_p": 0.9}),
    ("frozen_kv", {"temperature": 0.7}),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a target, and drafts of three kinds."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("target", *dict(WAYS_TO_DRAW))}
    save_qwen3_moe(paths["target"], "wide")
    for name, path in paths.items():
        if name != "target":
            save_draft(path, name)
    return paths


@cache
def plain_draws(model: Path, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    return draw_many(model, None, temperature=temperature, top_p=top_p)


def draw_many(
    model: Path, draft_model: Path | None, num_draws: int = NUM_DRAWS, **parameters: float
) -> torch.Tensor:
    """Returns int64 [num_draws, 3], the first tokens behind one prompt, of as many seeds."""
    how = {} if draft_model is None else {"draft_sampling": "rejection"}
    cell = Cell(
        model=model,
        draft_model=draft_model,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=4 * NUM_ROWS,
        max_model_len=16,
        block_size=8,
        num_kv_blocks=2 * NUM_ROWS + 1,
        decode_graphs="off",
        **how,
    )
    seeds = range(0, num_draws, NUM_ROWS)
    drawn = [_draw_rows(cell, first + np.arange(NUM_ROWS), parameters) for first in seeds]
    return torch.from_numpy(np.concatenate(drawn))


def _draw_rows(cell: Cell, seeds: np.ndarray, parameters: dict[str, float]) -> np.ndarray:
    """Lets every row begin with the same prompt, and step until each has three tokens."""
    worker, speculation = cell.workers[0], cell.shape.speculation
    count = len(seeds)
    rows, tokens = np.arange(count), np.zeros((count, 3 + 4), dtype=np.int64)
    starts = row_starts(
        rows=rows,
        seed=seeds * 104729,
        **{name: [value] * count for name, value in parameters.items()},
    )
    num_blocks = 1 if speculation is None else 2
    part = pb.RankStep(
        forward_mode=pb.FORWARD_MODE_EXTEND,
        starts=starts,
        sequences=sequences(
            rows=rows,
            num_computed_tokens=[0] * count,
            token_ids=[5] * count,
            num_new_blocks=[num_blocks] * count,
            new_block_ids=range(1, num_blocks * count + 1),
        ),
    )
    request = step(1, part, num_tokens=[count])
    if speculation is not None and speculation.extends:
        request.agreement.global_num_tokens_for_draft.append(2 * count)
        request.agreement.global_num_sampled.append(count)
    lens = np.zeros(count, dtype=np.int64)
    width = 0
    while rows.size:
        [result] = worker.execute(request).ranks
        gained, counts = np.array(ints_of(result.next_token_ids)), np.ones(len(rows), dtype=int)
        if result.num_next_tokens:
            counts = np.array(ints_of(result.num_next_tokens))
        place = np.arange(len(gained)) - np.repeat(counts.cumsum() - counts, counts)
        of = np.repeat(rows, counts)
        tokens[of, lens[of] + place] = gained
        lens[rows] += counts
        rows = np.flatnonzero(lens < 3)
        width = 0 if speculation is None else speculation.num_draft_tokens
        columns = sequences(rows=rows, num_computed_tokens=lens[rows])
        part = pb.RankStep(forward_mode=pb.FORWARD_MODE_DECODE, sequences=columns)
        request = step(1, part, num_tokens=[len(rows) * max(width, 1)])
        request.agreement.num_draft_tokens = width
    return tokens[:, :3]


def p_values(drawn: torch.Tensor, plain: torch.Tensor) -> list[float]:
    """Returns how likely it is that both differ so much, if they are distributed alike.

    Of the second token, the third, and two after one another, in groups of eight tokens each.
    """

    def pair(tokens: torch.Tensor, place: int) -> torch.Tensor:
        return tokens[:, place] // 8 * VOCAB + tokens[:, place + 1] // 8

    values = [two_sample_p_value(drawn[:, place], plain[:, place]) for place in (1, 2)]
    return values + [two_sample_p_value(pair(drawn, i), pair(plain, i)) for i in (0, 1)]


@pytest.mark.parametrize(("name", "parameters"), WAYS_TO_DRAW)
def test_what_rejection_sampling_gives_is_distributed_as_plain_decoding(
    name: str, parameters: dict[str, float], checkpoints: dict[str, Path]
):
    drawn = draw_many(checkpoints["target"], checkpoints[name], **parameters)
    plain = plain_draws(checkpoints["target"], **parameters)
    assert drawn.shape == plain.shape == (NUM_DRAWS, 3)
    assert min(p_values(drawn, plain)) > SIGNIFICANCE


def mistake_q(p, q, *rest) -> Accepted:
    """Drafts are taken as drawn from what they were not drawn from."""
    return reject_chain(p, q.roll(1, dims=2), *rest)


@pytest.mark.parametrize("rule", [always_accept, draw_from_all_of_p, mistake_q])
def test_a_broken_rule_is_noticed(
    rule: Callable[..., Accepted], checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verifier, "reject_chain", rule)
    name, parameters = WAYS_TO_DRAW[1]
    drawn = draw_many(checkpoints["target"], checkpoints[name], NUM_DRAWS // 4, **parameters)
    plain = plain_draws(checkpoints["target"], **parameters)
    assert min(p_values(drawn, plain)) < SIGNIFICANCE
