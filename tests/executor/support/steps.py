"""Builds step messages from plain lists, as a router would send them. For tests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from executor.batch.read_step import RowProgress, StepLimits, read_step
from executor.budget.capture_sizes import GraphSizes
from executor.budget.token_budget import TokenBudget
from executor.errors import InvalidStep
from executor.parallel.layout import Place, Topology
from protos.executor.sampling_fields import SAMPLING_FIELDS, SEED
from protos.executor.v1 import executor_pb2 as pb

DTYPES: Mapping[str, Any] = {
    **{field.name: field.dtype for field in (SEED, *SAMPLING_FIELDS)},
    **dict.fromkeys(("scores_output", "samples"), "u1"),
    "biases": "<f4",
}
Change = Callable[[pb.StepRequest], object]


def limits_of(budget: TokenBudget, **changes: Any) -> StepLimits:
    """Returns what a small executor reads steps with: DP rank 1 of 2 unless told otherwise."""
    limits: dict[str, Any] = {
        "place": Place(Topology(dp_rank=1, dp_size=2)),
        "num_kv_blocks": 64,
        "block_size": 4,
        "vocab_size": 100,
        "max_model_len": 40,
        "graph_sizes": GraphSizes(decode=(1, 2, 4), extend=(4, 8, 16)),
    }
    return StepLimits(budget=budget, **(limits | changes))


def refusal(
    request: pb.StepRequest, limits: StepLimits, progress: Callable[[], RowProgress]
) -> InvalidStep:
    """Asserts that a step is refused and changes nothing. Returns the error."""
    rows, expected = progress(), progress()
    with pytest.raises(InvalidStep) as caught:
        read_step(request, limits, rows)
    for name in ("is_live", "has_sampled", "num_blocks", "num_tokens"):
        assert (getattr(rows, name) == getattr(expected, name)).all(), name
    return caught.value


def row_starts(**columns: Sequence[float]) -> pb.RowStarts:
    return pb.RowStarts(**_to_bytes(columns))


def sequences(**columns: Sequence[float]) -> pb.SequenceColumns:
    return pb.SequenceColumns(**_to_bytes(columns))


def step(
    step_id: int,
    part: pb.RankStep,
    *,
    num_tokens: Sequence[int],
    num_logits: Sequence[int] | None = None,
    epoch: int = 1,
    padding_mode: pb.DpPaddingMode = pb.DP_PADDING_MODE_MAX_LEN,
    has_extend: bool | None = None,
    graph_size: int | None = None,
) -> pb.StepRequest:
    """Returns the request that carries ``part``; one row of logits per token if not said."""
    is_extend = part.forward_mode == pb.FORWARD_MODE_EXTEND
    return pb.StepRequest(
        epoch=epoch,
        step_id=step_id,
        agreement=pb.StepAgreement(
            global_num_tokens=num_tokens,
            global_num_tokens_for_logprob=num_tokens if num_logits is None else num_logits,
            has_extend=is_extend if has_extend is None else has_extend,
            padding_mode=padding_mode,
            graph_size=graph_size,
        ),
        ranks=[part],
    )


def change_sequences(**columns: Sequence[float]) -> Change:
    """Returns what puts columns into a step's sequences."""
    return lambda request: request.ranks[0].sequences.MergeFrom(sequences(**columns))


def change_agreement(**fields: object) -> Change:
    """Returns what puts fields into a step's agreement, in place of those there."""

    def change(request: pb.StepRequest) -> None:
        for name in fields:
            request.agreement.ClearField(name)  # type: ignore[arg-type]
        request.agreement.MergeFrom(pb.StepAgreement(**fields))  # type: ignore[arg-type]

    return change


def change_mode(mode: pb.ForwardMode) -> Change:
    """Returns what gives a step's part another forward mode."""
    return lambda request: setattr(request.ranks[0], "forward_mode", mode)


BadStep = tuple[Change, str, str]  # with the field that is refused, and part of the message


def bad_columns(cases: Sequence[tuple[str, Sequence[float], str]]) -> list[BadStep]:
    """Returns steps that are refused for the one column of their sequences that is changed."""
    return [
        (change_sequences(**{name: values}), f"ranks[0].sequences.{name}", problem)
        for name, values, problem in cases
    ]


def bad_agreements(cases: Sequence[tuple[str, object, str]]) -> list[BadStep]:
    """Returns steps that are refused for the one field of their agreement that is changed."""
    return [
        (change_agreement(**{name: value}), f"agreement.{name}", problem)
        for name, value, problem in cases
    ]


def each_bad(cases: Sequence[BadStep]) -> pytest.MarkDecorator:
    """Parametrises a test that takes spoil, field and problem."""
    ids = [f"{i}-{field.rpartition('.')[2]}" for i, (_, field, _) in enumerate(cases)]
    return pytest.mark.parametrize(("spoil", "field", "problem"), cases, ids=ids)


def prompts_part(
    rows: Sequence[int],
    num_tokens: Sequence[int],
    token_ids: Sequence[int],
    num_blocks: Sequence[int],
    block_ids: Sequence[int],
    dp_rank: int = 0,
    **starts: Any,
) -> pb.RankStep:
    """Returns a part that starts rows and runs their whole prompts, one behind the other."""
    return pb.RankStep(
        dp_rank=dp_rank,
        forward_mode=pb.FORWARD_MODE_EXTEND,
        starts=row_starts(rows=rows, **starts),
        sequences=sequences(
            rows=rows,
            num_tokens=num_tokens,
            num_computed_tokens=[0] * len(rows),
            token_ids=token_ids,
            num_new_blocks=num_blocks,
            new_block_ids=block_ids,
        ),
    )


def prompt_part(
    row: int, prompt: Sequence[int], block_ids: Sequence[int], dp_rank: int = 0, **starts: Any
) -> pb.RankStep:
    """Returns a part that starts one row and runs its whole prompt."""
    blocks = ([len(block_ids)], block_ids)
    return prompts_part([row], [len(prompt)], prompt, *blocks, dp_rank, **starts)


def decodes_part(
    rows: Sequence[int],
    num_computed: Sequence[int],
    dp_rank: int = 0,
    **columns: Sequence[float],
) -> pb.RankStep:
    """Returns a part that runs one token of each row."""
    return pb.RankStep(
        dp_rank=dp_rank,
        forward_mode=pb.FORWARD_MODE_DECODE,
        sequences=sequences(rows=rows, num_computed_tokens=num_computed, **columns),
    )


def decode_part(
    row: int, num_computed: int, token: int = -1, block_ids: Sequence[int] = (), dp_rank: int = 0
) -> pb.RankStep:
    """Returns a part that runs one token of one row."""
    blocks = {"num_new_blocks": [len(block_ids)], "new_block_ids": block_ids}
    return decodes_part([row], [num_computed], dp_rank, token_ids=[token], **blocks)


def idle_part(dp_rank: int = 0) -> pb.RankStep:
    return pb.RankStep(dp_rank=dp_rank, forward_mode=pb.FORWARD_MODE_IDLE)


def tokens_of(response: pb.StepResponse) -> list[int]:
    return np.frombuffer(response.ranks[0].next_token_ids, "<i4").tolist()


def floats_of(column: bytes) -> list[float]:
    return np.frombuffer(column, "<f4").tolist()


def ints_of(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()


def _to_bytes(columns: Mapping[str, Sequence[float]]) -> dict[str, bytes]:
    return {
        name: np.asarray(values, DTYPES.get(name, "<i4")).tobytes()
        for name, values in columns.items()
    }
