"""Reads the rows that begin with a step: their sampling parameters, and what they saw before."""

import numpy as np

from executor.batch.columns import INT32, UINT64, ColumnReader, Int64Array
from executor.model.sampling.sampler import RowStarts
from protos.executor.v1 import executor_pb2 as pb


def read_starts(message: pb.RowStarts, *, num_rows: int, vocab_size: int) -> RowStarts:
    """Reads and checks the columns of the rows that begin.

    Args:
        message: The columns.
        num_rows: Rows are below this.
        vocab_size: Token ids are below this.

    Raises:
        InvalidStep: With the field at fault, its value and what fits.
    """
    read = ColumnReader(message, "ranks[0].starts")
    rows = read.ids("rows", len(message.rows) // INT32.itemsize, below=num_rows)
    count = len(rows)
    read.unique("rows", rows, num_rows)

    def ragged(lengths_name: str, ids_name: str) -> tuple[Int64Array, Int64Array]:
        lengths = read.counts(lengths_name, count, default=0)
        return lengths, read.ids(ids_name, int(lengths.sum()), below=vocab_size)

    num_suppressed_ids, suppressed_ids = ragged("num_suppressed_ids", "suppressed_ids")
    num_biases, bias_ids = ragged("num_biases", "bias_ids")
    num_prompt_ids, prompt_ids = ragged("num_prompt_ids", "prompt_ids")
    num_output_ids, output_ids = ragged("num_output_ids", "output_ids")
    return RowStarts(
        rows=rows,
        temperature=read.floats("temperature", count, default=0.0, least=0.0),
        top_k=read.counts("top_k", count, default=0),
        top_p=read.floats("top_p", count, default=1.0, above=0.0, most=1.0),
        min_p=read.floats("min_p", count, default=0.0, least=0.0, most=1.0),
        repetition_penalty=read.floats("repetition_penalty", count, default=1.0, above=0.0),
        presence_penalty=read.floats("presence_penalty", count, default=0.0),
        frequency_penalty=read.floats("frequency_penalty", count, default=0.0),
        seed=read.column("seed", UINT64, count, default=0).astype(np.uint64).view(np.int64),
        scores_output=read.flags("scores_output", count, default=False),
        num_top_logprobs=read.counts("num_top_logprobs", count, default=0, most=vocab_size),
        suppressed_until=read.counts("suppressed_until", count, default=0),
        num_suppressed_ids=num_suppressed_ids,
        suppressed_ids=suppressed_ids,
        num_biases=num_biases,
        bias_ids=bias_ids,
        biases=read.floats("biases", len(bias_ids)),
        num_prompt_ids=num_prompt_ids,
        prompt_ids=prompt_ids,
        num_output_ids=num_output_ids,
        output_ids=output_ids,
    )
