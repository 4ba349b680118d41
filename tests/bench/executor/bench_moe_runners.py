"""Times ways to run a layer's experts on the CPU, in one process, in turns.

    python -m tests.bench.executor.bench_moe_runners [--threads 1] [--rounds 20] [--shapes demo,256]

    kernels  what a CPU runs in bfloat16: CpuMoERunner
    grouped  PyTorch's grouped product over all experts, plain weights: GroupedMMRunner

The numbers are microseconds of the fastest round, and ratios to the first column: above 1 it is
slower. The fastest round is what is left when neighbours leave the core alone. One thread is timed in
CPU seconds. Before each call other layers have been through the caches, as in a model.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from executor.model.cpu_kernels.library import load
from executor.model.moe.layer import Dispatched, MoERunner
from executor.model.moe.runner_cpu import CpuMoERunner
from executor.model.moe.runner_grouped import GroupedMMRunner
from tests.bench.support.options import parse_options
from tests.bench.support.timing import in_turns

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


def kernels(w13: torch.Tensor, w2: torch.Tensor) -> CpuMoERunner | None:
    """Returns what runs bfloat16, where this machine has kernels."""
    library = load()
    if library is None or w13.dtype is not torch.bfloat16:
        return None
    arrange, arrange_down = CpuMoERunner.arrange, CpuMoERunner.arrange_down
    w13, w2 = (torch.stack([*map(f, w)]) for f, w in ((arrange, w13), (arrange_down, w2)))
    return CpuMoERunner(w13, w2, library)


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
) -> dict[str, float]:
    """Returns the seconds of each column's fastest round of one layer."""

    def run(layers: list[MoERunner]) -> None:
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
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for name in options.shapes:
        shape = SHAPES[name]
        for dtype_name in options.dtypes:
            dtype = DTYPES[dtype_name]
            print(f"{name} {dtype_name}: {shape}, {options.threads} threads", flush=True)
            measure(shape, dtype, options, clock)


@torch.inference_mode()
def measure(
    shape: Shape,
    dtype: torch.dtype,
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> None:
    columns: dict[str, list[MoERunner]] = {}
    for _ in range(shape.layers):
        w13 = torch.randn(shape.experts, 2 * shape.expert_size, shape.hidden)
        w2 = torch.randn(shape.experts, shape.hidden, shape.expert_size)
        w13, w2 = (w13 * shape.hidden**-0.5).to(dtype), (w2 * shape.expert_size**-0.5).to(dtype)
        for name, runner in (("kernels", kernels(w13, w2)), ("grouped", grouped(w13, w2))):
            if runner is not None:
                columns.setdefault(name, []).append(runner)
    for num_rows in options.rows:
        dispatched = routed(shape, num_rows, dtype)
        expected = columns["grouped"][0].run(dispatched).float()
        for name, layers in columns.items():
            error = (layers[0].run(dispatched).float() - expected).abs().max()
            assert error < 0.1, f"{name} computes something else: off by {error}"
        times = fastest(columns, dispatched, options.rounds, clock)
        base = next(iter(times.values()))
        cells = [f"{name:>8} {t * 1e6:9.1f} {t / base:5.2f}x " for name, t in times.items()]
        print(f"  R={num_rows:<4}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
