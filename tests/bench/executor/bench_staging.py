"""Times how a decode step's columns become a batch, staged against field by field, in one process.

    python -m tests.bench.executor.bench_staging [--rounds 200] [--steps 50] [--require 1]

Both start from checked columns, on the CPU with one thread: every sequence runs its last token, and
one in 16 gets a block. Field by field makes each input on its own: an array, a tensor of it, a copy
to where the batch runs. Staged writes all of them into a slot of the staging buffer, whose views
it keeps; `views anew` makes them at each step. They take turns, so that neighbours on the same
cores slow all alike. Columns: the fastest round of each, the ratio of field by field to staged,
the median of the ratios of neighbouring rounds. Last, the whole of `Worker.execute` around a
runner that does nothing, greedy and random.

On the CPU nothing is copied. On CUDA the copies of field by field each wait for the device.
"""

import gc
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool, KVShape
from executor.batch.read_step import StepColumns, StepLimits, read_step
from executor.budget.token_budget import TokenBudget
from executor.model.sampling.sampler import Sampler
from executor.parallel.layout import Place
from executor.worker import Worker
from protos.executor.v1 import executor_pb2 as pb
from tests.bench.support.options import parse_options
from tests.bench.support.timing import in_turns, median_ratio
from tests.executor.support.kv import batch_of
from tests.executor.support.steps import decodes_part, prompts_part, step

BLOCK_SIZE = 16
BLOCKS_PER_ROW = 64
VOCAB_SIZE = 32  # the logits' width is the sampler's cost, not this bench's
SIZES = (64, 256)
NUM_EXECUTED = 300  # steps of a round of the whole worker


class NoModel:
    """A runner that answers at once."""

    def __init__(self, most: int) -> None:
        self._logits = torch.zeros(most, VOCAB_SIZE)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        return self._logits[: batch.batch_size]

    def capture(self) -> None:
        pass


def make_worker(size: int) -> Worker:
    num_blocks = size * BLOCKS_PER_ROW + 1
    shape = KVShape.of_heads(
        num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK_SIZE, dtype=torch.float32
    )
    model: Any = NoModel(size)
    worker = Worker(
        limits=StepLimits(
            place=Place(),
            budget=TokenBudget(
                max_num_batched_tokens=4096, max_num_seqs=size, max_num_logits=size + 256
            ),
            num_kv_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            max_model_len=BLOCKS_PER_ROW * BLOCK_SIZE,
        ),
        kv_pool=KVPool(
            shape, num_blocks=num_blocks, num_rows=size, max_blocks_per_row=BLOCKS_PER_ROW
        ),
        sampler=Sampler(size, VOCAB_SIZE),
        runner=model,
        members=[],
        form_group=None,
        device=torch.device("cpu"),
    )
    worker.join(1, "")
    return worker


def requests(size: int, temperature: float) -> Iterator[pb.StepRequest]:
    """Yields a step that starts every row, then decode steps in which 1 row in 16 gets a block."""
    free = iter(np.random.default_rng(0).permutation(size * BLOCKS_PER_ROW) + 1)
    lens = 1 + np.arange(size) % BLOCK_SIZE
    rows, ones, blocks = range(size), [1] * size, [next(free) for _ in range(size)]
    prompts = [1] * int(lens.sum())
    part = prompts_part(rows, lens, prompts, ones, blocks, temperature=[temperature] * size)
    yield step(1, part, num_tokens=[int(lens.sum())], num_logits=[size])
    for step_id in range(2, NUM_EXECUTED + 2):
        new = (lens % BLOCK_SIZE == 0).astype(np.int64)
        blocks = [next(free) for _ in range(int(new.sum()))]
        columns = {"token_ids": [-1] * size, "num_new_blocks": new, "new_block_ids": blocks}
        part = decodes_part(rows, lens, **columns)
        yield step(step_id, part, num_tokens=[size])
        lens = lens + 1


def by_field(worker: Worker, columns: StepColumns) -> ForwardBatch:
    """Returns the batch of a step, each input made on its own."""
    pool, device = worker._kv_pool, worker._device
    rows, computed, num_tokens = columns.rows, columns.num_computed_tokens, columns.num_tokens
    pool.append_blocks(rows, columns.num_kept_blocks, columns.num_new_blocks, columns.new_block_ids)
    input_ids = torch.from_numpy(columns.token_ids.copy()).to(device)
    unknown = np.flatnonzero(columns.token_ids < 0)
    row_of = np.repeat(rows, num_tokens)[unknown]
    last = worker._sampler.last_tokens[torch.from_numpy(row_of).to(device)]
    input_ids[torch.from_numpy(unknown).to(device)] = last
    return batch_of(
        pool, rows, computed, num_tokens, input_ids, columns.layout, columns.logits_indices
    )


def staged(worker: Worker, columns: StepColumns) -> ForwardBatch:
    """Returns the batch of a step as the worker builds it."""
    slot = worker._stager.stage(columns)
    worker._update_rows(columns, slot)
    return worker._build_batch(columns, slot)


def with_views_anew(worker: Worker, columns: StepColumns) -> ForwardBatch:
    for slot in worker._stager._staging._slots:
        slot.views.clear()
    return staged(worker, columns)


def check_same(worker: Worker, columns: StepColumns) -> None:
    one, other = by_field(worker, columns), staged(worker, columns)
    for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.logits_indices, other.logits_indices)
    assert one.forward_mode is other.forward_mode


def compare(size: int, rounds: int, steps: int) -> float:
    """Prints the row of a size. Returns the ratio of the fastest rounds."""
    worker = make_worker(size)
    stream = requests(size, 0.0)
    worker.execute(next(stream))
    columns = read_step(next(stream), worker._limits, worker._rows)
    check_same(worker, columns)
    ways = (by_field, staged, with_views_anew)
    calls = {way: partial(way, worker, columns) for way in ways}
    times = in_turns(calls, rounds, repeats=steps)
    field, ours, anew = (min(column) * 1e6 for column in times.values())
    median = median_ratio(times[by_field], times[staged])
    print(
        f"{size:>9} {field:9.1f} {ours:7.1f} {field / ours:6.2f}x {median:6.2f}x {anew:11.1f}",
        flush=True,
    )
    return field / ours


def execute(size: int, temperature: float, rounds: int) -> float:
    """Returns the microseconds of a whole decode step in the fastest round."""
    first, *rest = requests(size, temperature)
    best = float("inf")
    for _ in range(rounds):
        worker = make_worker(size)
        worker.execute(first)
        started = time.perf_counter()
        for request in rest:
            worker.execute(request)
        best = min(best, time.perf_counter() - started)
    return best / NUM_EXECUTED * 1e6


def main() -> int:
    options = parse_options(__doc__, rounds=200, steps=50, require=0.0)  # steps of a round
    torch.set_num_threads(1)
    gc.disable()
    print("columns to batch, CPU, 1 thread; us per decode step, fastest round; GC off")
    print(f"sequences {'by field':>9} {'staged':>7} {'ratio':>7} {'median':>7} {'views anew':>11}")
    with torch.inference_mode():
        ratios = [compare(size, options.rounds, options.steps) for size in SIZES]
    print("Worker.execute around a runner that does nothing; us per decode step")
    print(f"sequences {'greedy':>9} {'random':>9}")
    for size in SIZES:
        greedy, random = (execute(size, temperature, 5) for temperature in (0.0, 1.0))
        print(f"{size:>9} {greedy:9.1f} {random:9.1f}", flush=True)
    return int(min(ratios) < options.require)


if __name__ == "__main__":
    sys.exit(main())
