"""Times ways to run a layer's experts on the CPU, in one process, in turns.

    python -m tests.bench.executor.bench_moe_runners [--threads 1] [--rounds 20] [--shapes demo,256]

Columns are what the executor runs, and what it could have run:

    packed   each expert's products by themselves, their weights packed by oneDNN: TorchMoERunner
    all      every row through every expert in two packed products: SmallExpertsRunner
    grouped  PyTorch's grouped product over all experts, plain weights: GroupedMMRunner
    padded   rows of each expert padded to as many as one has at most, then two batched products

The numbers are microseconds of the fastest round, and ratios to ``packed``: above 1 it is slower; a
star marks what the executor runs. The fastest round is what is left when neighbours leave the core
alone. One thread is timed in CPU seconds. Before each call other layers have been through the caches,
as in a model.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from executor.model.layers.linear import Linear, WorkerPool
from executor.model.moe.layer import Dispatched, MoERunner
from executor.model.moe.runner_grouped import GroupedMMRunner
from executor.model.moe.runner_torch import SmallExpertsRunner, are_small
from tests.bench.support.options import parse_options
from tests.bench.support.timing import in_turns
from tests.executor.support.experts import one_by_one

CPU = torch.device("cpu")
ROWS = (1, 8, 32, 128, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BLOCK_SECONDS = 0.01  # calls shorter than this are repeated


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a layer: D, F, E and K, and how many layers fit in this machine's memory."""

    hidden: int
    expert_size: int
    experts: int
    top_k: int
    layers: int


SHAPES = {
    "demo": Shape(128, 128, 8, 2, 4),  # deploy/demo_model on one executor
    "256": Shape(256, 256, 16, 4, 4),
    "mid": Shape(1024, 512, 32, 4, 3),
    "large": Shape(2048, 768, 128, 8, 1),  # Qwen3-30B-A3B
}


class Padded:
    """Two batched products of [E, most rows of one, *]."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self._w13, self._w2 = w13.transpose(1, 2), w2.transpose(1, 2)

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        x_RD, ids_RK = dispatched.x_RD, dispatched.topk_ids_RK
        num_rows, top_k = ids_RK.shape
        ids = ids_RK.flatten()
        counts = torch.bincount(ids, minlength=len(self._w2))
        order = torch.argsort(ids, stable=True)
        starts = counts.cumsum(0) - counts
        places = torch.arange(len(ids)) - starts[ids[order]]
        most = int(counts.max())
        flat = ids[order] * most + places
        x_PD = x_RD.new_zeros(len(self._w2) * most, x_RD.shape[1])
        x_PD[flat] = x_RD.index_select(0, order // top_k)
        gate, up = torch.bmm(x_PD.view(len(self._w2), most, -1), self._w13).chunk(2, dim=-1)
        y_PD = torch.bmm(F.silu(gate).mul_(up), self._w2).flatten(0, 1)
        where = torch.empty_like(order)
        where[order] = flat
        y_RKD = y_PD.index_select(0, where).view(num_rows, top_k, -1)
        weights_R1K = dispatched.topk_weights_RK.to(x_RD.dtype).unsqueeze(1)
        return torch.bmm(weights_R1K, y_RKD).squeeze(1)


class All:
    """All experts on all rows, however many there are."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        num_experts, hidden, size = w2.shape
        wide13 = Linear(hidden, 2 * num_experts * size, dtype=w2.dtype, device=CPU)
        wide2 = Linear(num_experts * size, hidden, dtype=w2.dtype, device=CPU)
        self._runner = SmallExpertsRunner(wide13, wide2, num_experts, one_by_one=self)
        self.takes = self._runner.takes
        gate, up = w13.chunk(2, dim=1)
        wide13.finish(torch.cat((gate.flatten(0, 1), up.flatten(0, 1))))
        wide2.finish(w2.permute(1, 0, 2).reshape(hidden, -1))

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        return self._runner.run_all(dispatched)


def grouped(w13: torch.Tensor, w2: torch.Tensor) -> GroupedMMRunner:
    def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    return GroupedMMRunner(w13, w2, silu_and_mul)


def routed(shape: Shape, num_rows: int, dtype: torch.dtype) -> Dispatched:
    scores = torch.rand(num_rows, shape.experts)
    return Dispatched(
        torch.randn(num_rows, shape.hidden).to(dtype),
        scores.topk(shape.top_k).indices.to(torch.int32),
        torch.rand(num_rows, shape.top_k),
    )


def fastest(
    columns: dict[str, list[MoERunner]],
    dispatched: Dispatched,
    rounds: int,
    clock: Callable[[], float],
    share: Callable[[int], AbstractContextManager[None]],
) -> dict[str, float]:
    """Returns the seconds of each column's fastest round of one layer."""

    def run(layers: list[MoERunner]) -> None:
        with share(len(dispatched.x_RD)):
            for layer in layers:
                layer.run(dispatched)

    calls = {name: partial(run, layers) for name, layers in columns.items()}
    times = in_turns(calls, rounds, clock=clock, least_s=BLOCK_SECONDS)
    return {name: min(times[name]) / len(layers) for name, layers in columns.items()}


def main() -> None:
    lists = {"shapes": tuple(SHAPES), "rows": ROWS, "dtypes": tuple(DTYPES)}
    options = parse_options(__doc__, threads=1, rounds=20, **lists)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    workers = WorkerPool(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for name in options.shapes:
        shape = SHAPES[name]
        for dtype_name in options.dtypes:
            dtype = DTYPES[dtype_name]
            print(f"{name} {dtype_name}: {shape}, {options.threads} threads", flush=True)
            measure(shape, dtype, options, workers, clock)


@torch.inference_mode()
def measure(
    shape: Shape,
    dtype: torch.dtype,
    options: argparse.Namespace,
    workers: WorkerPool,
    clock: Callable[[], float],
) -> None:
    columns: dict[str, list[MoERunner]] = {}
    for _ in range(shape.layers):
        w13 = torch.randn(shape.experts, 2 * shape.expert_size, shape.hidden)
        w2 = torch.randn(shape.experts, shape.hidden, shape.expert_size)
        w13, w2 = (w13 * shape.hidden**-0.5).to(dtype), (w2 * shape.expert_size**-0.5).to(dtype)
        together = All(w13, w2)
        made: dict[str, MoERunner] = {
            "packed": one_by_one(w13, w2, workers),
            "all": together,
            "grouped": grouped(w13, w2),
            "padded": Padded(w13, w2),
        }
        for name, runner in made.items():
            columns.setdefault(name, []).append(runner)
    is_small = are_small(shape.experts, shape.hidden, shape.expert_size, dtype.itemsize)
    for num_rows in options.rows:
        dispatched = routed(shape, num_rows, dtype)
        expected = columns["packed"][0].run(dispatched).float()
        for name, layers in columns.items():
            error = (layers[0].run(dispatched).float() - expected).abs().max()
            assert error < 0.1, f"{name} computes something else: off by {error}"
        times = fastest(columns, dispatched, options.rounds, clock, workers.sharing)
        base = times["packed"]
        chosen = "all" if is_small and together.takes(num_rows) else "packed"
        cells = [
            f"{name:>8} {t * 1e6:9.1f} {t / base:5.2f}x{'*' if name == chosen else ' '}"
            for name, t in times.items()
        ]
        print(f"  R={num_rows:<4}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
