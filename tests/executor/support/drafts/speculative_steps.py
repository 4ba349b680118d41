"""Steps for an executor with a draft model, and what they are read with. For tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from executor.batch.read_step import RowProgress, StepLimits
from executor.budget.speculation import SpeculationPlan
from executor.budget.token_budget import TokenBudget
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.steps import limits_of, row_starts, sequences, step

NUM_ROWS = 6
CHAIN = SpeculationPlan(algorithm="eagle", num_draft_steps=3)
LAYERS = SpeculationPlan(algorithm="multi_layer_eagle", num_draft_steps=3)
FROZEN = SpeculationPlan(algorithm="frozen_kv_mtp", num_draft_steps=3)


def limits(plan: SpeculationPlan | None, **budget: Any) -> StepLimits:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": NUM_ROWS, "max_num_logits": 24, **budget}
    width = 1 if plan is None else plan.num_rows_per_sequence
    budget = TokenBudget(dp_size=2, num_tokens_per_bs=width, **sizes)
    return limits_of(budget, speculation=plan)


def progress(num_tokens: dict[int, int], num_blocks: dict[int, int]) -> RowProgress:
    """Returns rows that have sampled: the tokens that each has, its last included, and blocks."""
    rows = RowProgress.empty(np.zeros(NUM_ROWS, dtype=np.int64))
    for row, count in num_tokens.items():
        rows.is_live[row] = rows.has_sampled[row] = True
        rows.num_tokens[row] = count
        rows.num_blocks[row] = num_blocks[row]
    return rows


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence of a step that is not speculative.

    Attributes:
        row: Of the block table.
        num_computed: Tokens that have run.
        token_ids: To run; empty for a decode, which runs its last token.
        samples: Whether it samples after them.
        num_scored: Tokens whose log probabilities are asked for.
    """

    row: int
    num_computed: int
    token_ids: Sequence[int] = ()
    samples: bool = True
    num_scored: int = 0


def mixed_step(runs: Sequence[Run], *, extends: bool = True) -> pb.StepRequest:
    """Returns a step that starts every row which is not a decode, each with blocks of its own."""
    counts = [max(len(run.token_ids), 1) for run in runs]
    fresh = [run.row for run in runs if run.token_ids]
    is_fresh = [bool(run.token_ids) for run in runs]
    blocks = [
        -(-(run.num_computed + count) // 4) if new else 0
        for run, count, new in zip(runs, counts, is_fresh, strict=True)
    ]
    num_sampled = sum(run.samples for run in runs)
    part = pb.RankStep(
        dp_rank=1,
        forward_mode=pb.FORWARD_MODE_EXTEND if runs else pb.FORWARD_MODE_IDLE,
        starts=row_starts(rows=fresh) if fresh else None,
        sequences=sequences(
            rows=[run.row for run in runs],
            num_tokens=counts,
            num_computed_tokens=[run.num_computed for run in runs],
            token_ids=[i for run in runs for i in (run.token_ids or [-1])],
            num_new_blocks=blocks,
            new_block_ids=range(1, sum(blocks) + 1),
            samples=[run.samples for run in runs],
            num_scored=[run.num_scored for run in runs],
            scored_ids=[1] * sum(run.num_scored for run in runs),
        ),
    )
    total = sum(counts)
    num_logits = num_sampled + sum(run.num_scored for run in runs)
    request = step(1, part, num_tokens=[9, total], num_logits=[2, num_logits], has_extend=True)
    if extends:
        num_decodes = sum(not run.token_ids for run in runs)
        drafted = total + num_sampled - num_decodes
        request.agreement.global_num_tokens_for_draft.extend([10, drafted])
        request.agreement.global_num_sampled.extend([2, num_sampled])
    return request


def speculative_step(
    rows: Sequence[int],
    num_computed: Sequence[int],
    num_tokens: Sequence[int] | None = None,
    *,
    width: int = 4,
    num_new_blocks: Sequence[int] | None = None,
) -> pb.StepRequest:
    """Returns a step in which rows verify ``width`` tokens each; the other rank has two."""
    columns: dict[str, Sequence[int]] = {"rows": rows, "num_computed_tokens": num_computed}
    if num_tokens is not None:
        columns["num_tokens"] = num_tokens
    if num_new_blocks is not None:
        columns["num_new_blocks"] = num_new_blocks
        columns["new_block_ids"] = range(1, sum(num_new_blocks) + 1)
    mode = pb.FORWARD_MODE_DECODE if len(rows) else pb.FORWARD_MODE_IDLE
    part = pb.RankStep(dp_rank=1, forward_mode=mode, sequences=sequences(**columns))
    request = step(1, part, num_tokens=[2 * width, len(rows) * width])
    request.agreement.num_draft_tokens = width
    return request
