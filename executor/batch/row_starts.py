"""Rows that begin with a step: their sampling parameters, and the tokens that they start from."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from executor.batch.columns import (
    UINT8,
    BoolArray,
    Column,
    ColumnReader,
    Float32Array,
    Int64Array,
    check_unique,
)
from executor.batch.limits import StepLimits
from protos.executor.sampling_fields import FLOAT32, SAMPLING_FIELDS, SEED
from protos.executor.v1 import executor_pb2 as pb

# A row's sampling parameters as the device keeps them: the seed, then four bytes each.
PARAMETERS = np.dtype([(field.name, field.dtype) for field in (SEED, *SAMPLING_FIELDS)], align=True)
PARAMETER_WIDTH = PARAMETERS.itemsize // 8  # int64 entries

_TABLE = (
    Column("rows", most="row"),
    Column("scores_output", most=1, default=0, dtype=UINT8),
    Column("num_top_logprobs", most="vocab_size", default=0),
    Column("suppressed_until", default=0),
    Column("num_suppressed_ids", default=0),
    Column("suppressed_ids", length="num_suppressed_ids", most="token_id"),
    Column("num_biases", default=0),
    Column("bias_ids", length="num_biases", most="token_id"),
    Column("num_prompt_ids", default=0),
    Column("prompt_ids", length="num_prompt_ids", most="token_id"),
    Column("num_output_ids", default=0),
    Column("output_ids", length="num_output_ids", most="token_id"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStarts:
    """Rows that begin, A of them: RowStarts of executor.proto, checked.

    Attributes:
        parameters: PARAMETERS [A].
        num_suppressed_ids, num_biases, num_prompt_ids, num_output_ids: [A] entries of each row in
            the columns after them, end to end.
    """

    rows: Int64Array
    parameters: npt.NDArray[Any]
    scores_output: BoolArray
    num_top_logprobs: Int64Array
    suppressed_until: Int64Array
    num_suppressed_ids: Int64Array
    suppressed_ids: Int64Array
    num_biases: Int64Array
    bias_ids: Int64Array
    biases: Float32Array
    num_prompt_ids: Int64Array
    prompt_ids: Int64Array
    num_output_ids: Int64Array
    output_ids: Int64Array

    @property
    def is_penalized(self) -> BoolArray:
        """bool [A], rows whose logits depend on the tokens that they have."""
        penalties = [field for field in SAMPLING_FIELDS if field.is_penalty]
        differs = [self.parameters[field.name] != field.default for field in penalties]
        is_penalized: BoolArray = np.logical_or.reduce(differs)
        return is_penalized

    @property
    def packed_parameters(self) -> Int64Array:
        """int64 [A * PARAMETER_WIDTH], the bytes of ``parameters``."""
        return self.parameters.view(np.int64)


def read_starts(message: pb.RowStarts, limits: StepLimits) -> RowStarts:
    """Reads and checks the rows that begin.

    Raises:
        InvalidStep: With the field at fault, its value and what fits.
    """
    read = ColumnReader(message, "ranks[0].starts", _TABLE, limits.bounds)
    check_unique(read, "rows")
    columns = read.columns
    parameters = np.zeros(len(columns["rows"]), PARAMETERS)
    for field in (SEED, *SAMPLING_FIELDS):
        if not getattr(message, field.name):
            parameters[field.name] = field.default
            continue
        values = read.entries(field.name, field.dtype, len(parameters))
        is_valid = field.contains(values)
        if not is_valid.all():
            raise read.error(field.name, f"has {values[~is_valid][0]}; it must be {field.range}")
        parameters[field.name] = values
    biases = read.entries("biases", FLOAT32, len(columns["bias_ids"])).astype(np.float32)
    if not np.isfinite(biases).all():
        raise read.error("biases", f"has {biases[~np.isfinite(biases)][0]}; it must be finite")
    return RowStarts(
        parameters=parameters,
        biases=biases,
        scores_output=columns.pop("scores_output").astype(np.bool_),
        **columns,
    )
