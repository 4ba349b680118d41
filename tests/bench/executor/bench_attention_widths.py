"""Times attention of a few new tokens per sequence on the CPU, in one process, in turns.

    python -m tests.bench.executor.bench_attention_widths [--threads 1] [--rounds 20] [--widths 1,2,4,8,16]

B sequences of 20 to 500 tokens, of which the last Q are new, with the demo model's heads and layers:

    together    in groups, as the executor runs them
    one by one  each sequence by itself, as prompts run
    plan        what the host prepares, once for all layers

The numbers are microseconds of the fastest round, of one layer but for ``plan``, and ``together`` as a
ratio to that of Q = 1 and to ``one by one``. One thread is timed in CPU seconds. With ``--require R``
it exits with 1 if 32 sequences of 4 tokens take more than R times as long as of one.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from executor.batch.kv_pool import KVShape
from executor.model.layers import attention_torch
from executor.model.layers.attention_torch import TorchAttention
from tests.bench.support.options import parse_options
from tests.bench.support.timing import in_turns
from tests.executor.support.kv import batch_of, full_pool

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 4, 2, 128, 16, 4  # deploy/demo_model
SHORTEST, LONGEST = 20, 500
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SECONDS = 0.02  # shorter rounds are repeated


class Case:
    """Random sequences of one width.

    Args:
        num_sequences: B.
        width: Q.
        dtype: Of queries, keys and values.
        num_threads: Of the attention's worker pool.
    """

    def __init__(
        self, num_sequences: int, width: int, dtype: torch.dtype, num_threads: int
    ) -> None:
        lens = np.linspace(SHORTEST, LONGEST, num_sequences).astype(np.int64)
        lens = np.random.default_rng(0).permutation(lens)
        shape = KVShape.of_heads(
            num_layers=NUM_LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        self.pool = full_pool(shape, num_sequences, LONGEST)
        rows = np.arange(num_sequences)
        for cache in self.pool.tensors:
            cache.normal_()
        new_lens = np.full(num_sequences, width)
        self.batch = batch_of(self.pool, rows, lens - width, new_lens)
        size = (num_sequences * width, HEADS + 2 * KV_HEADS, HEAD_DIM)
        self.q, self.k, self.v = torch.split_with_sizes(
            torch.randn(size, dtype=dtype), (HEADS, KV_HEADS, KV_HEADS), dim=1
        )
        new = partial(
            TorchAttention, HEADS, KV_HEADS, HEAD_DIM, dtype=dtype, num_workers=num_threads
        )
        self.together, self.one_by_one = new(), new()

    def plan(self, attention: TorchAttention) -> None:
        attention.init_forward_metadata_out_graph(self.batch, self.pool)

    def run(self, attention: TorchAttention) -> None:
        for layer_id in range(NUM_LAYERS):
            attention.forward(self.q, self.k, self.v, layer_id)


@torch.inference_mode()
def measure(
    num_sequences: int, dtype: torch.dtype, options: argparse.Namespace
) -> dict[int, float]:
    """Prints a table, and returns the time of each width as a ratio to that of the first."""
    widths = options.widths
    calls: dict[tuple[int, str], Callable[[], None]] = {}
    for width in widths:
        case = Case(num_sequences, width, dtype, options.threads)
        case.plan(case.together)
        with patch.object(attention_torch, "MAX_GROUPED_WIDTH", 1):
            case.plan(case.one_by_one)
        calls[width, "together"] = partial(case.run, case.together)
        calls[width, "one by one"] = partial(case.run, case.one_by_one)
        calls[width, "plan"] = partial(case.plan, case.together)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rounds = in_turns(calls, options.rounds, clock=clock, least_s=SECONDS)
    times = {key: min(column) * 1e6 for key, column in rounds.items()}
    first = times[widths[0], "together"]
    ratios = {width: times[width, "together"] / first for width in widths}
    for width in widths:
        together, alone = times[width, "together"], times[width, "one by one"]
        print(
            f"  B {num_sequences:3}  Q {width:3}  together {together / NUM_LAYERS:7.0f}  "
            f"one by one {alone / NUM_LAYERS:7.0f}  plan {times[width, 'plan']:6.0f}  "
            f"to Q = {widths[0]}: {ratios[width]:5.2f}  to one by one: {together / alone:5.2f}",
            flush=True,
        )
    return ratios


def main() -> None:
    lists = {"sequences": (1, 8, 32), "widths": (1, 2, 4, 8, 16), "dtypes": tuple(DTYPES)}
    options = parse_options(__doc__, threads=1, rounds=20, require=float, **lists)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    missed = []
    for name in options.dtypes:
        print(f"{name}, {options.threads} threads", flush=True)
        for num_sequences in options.sequences:
            ratios = measure(num_sequences, DTYPES[name], options)
            ratio = ratios.get(4, 0.0) if num_sequences == 32 else 0.0
            if options.require is not None and ratio > options.require:
                missed.append(f"{name}: {ratio:.2f}")
    if missed:
        sys.exit(f"32 sequences of 4 tokens take too long: {', '.join(missed)}")


if __name__ == "__main__":
    main()
