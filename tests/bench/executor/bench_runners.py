"""Times the graph runners on the CPU against the eager runner, in one process, interleaved.

    python -m tests.bench.executor.bench_runners [--threads 2] [--rounds 9]

The model is the one of bench_cpu_model. Here a replay is a call, as on a CPU in float32, with peers or
of a prefill, so a runner gains nothing: the table says what filling buffers, padding and cutting the
pass cost. bench_step_host times decodes from recorded graphs. The last two rows decide the default of
--prefill-graphs here; on a GPU, tests/gpu does.
"""

import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.graph.backend import EagerBackend
from executor.model.decoder.kernels import cpu_kernels
from executor.model.families import read_spec
from executor.parallel.layout import DpLayout
from executor.runners import Runner
from tests.bench.executor.bench_cpu_model import PROMPT_LEN, clock, make_checkpoint
from tests.bench.support.options import parse_options
from tests.bench.support.timing import in_turns
from tests.gpu.support.cases import CPU, Case, torch_attention
from tests.gpu.support.shapes import Sizes
from tests.gpu.support.weights import flat_weights

SIZES = Sizes(block_size=16, num_rows=32, max_len=640, decode=(1, 8, 32), prefill=(480, 512))
DECODES = ((1, 1), (8, 8), (5, 8), (32, 32), (25, 32))  # sequences, and the graph that runs them
PREFILLS = ((512, 512), (450, 480))  # tokens, and the graph


def print_row(name: str, batch: ForwardBatch, runners: list[Runner], rounds: int) -> None:
    """Prints the first runner's time, and every other's as a multiple of it."""
    eager_batch = replace(batch, layout=DpLayout.single(len(batch.input_ids)))
    calls = {
        i: partial(runner.run, batch if i else eager_batch) for i, runner in enumerate(runners)
    }
    times = in_turns(calls, rounds, clock=clock())
    eager, *others = map(statistics.median, times.values())
    print(f"{name:<24} {eager * 1e3:9.1f}", *(f"{other / eager:10.3f}x" for other in others))


@torch.inference_mode()
def main() -> None:
    options = parse_options(__doc__, threads=2, rounds=9)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory))
        config = read_spec(directory)
    kernels = cpu_kernels(config, dtype=config.dtype)
    case = Case(config, SIZES, kernels, torch_attention, flat_weights(config, CPU), device=CPU)
    eager, decode = case.eager(), case.decode(EagerBackend())
    prefill = {kind: case.prefill(kind, EagerBackend()) for kind in ("breakable", "piecewise")}
    new_batch = partial(case.batch, rng=np.random.default_rng(0))
    print(f"{'':<24} {'eager ms':>9} {'decode':>11}")
    for count, size in DECODES:
        decodes = [(PROMPT_LEN, 1)] * count
        batch = new_batch(decodes, graph_size=size, has_extend=False)
        print_row(f"decode {count} in {size}", batch, [eager, decode], options.rounds)
    print(f"{'':<24} {'eager ms':>9}", *(f"{name:>11}" for name in prefill))
    for count, size in PREFILLS:
        prompts = [(0, count // 2), (0, count - count // 2)]
        batch = new_batch(prompts, graph_size=size, has_extend=True)
        print_row(f"prefill {count} in {size}", batch, [eager, *prefill.values()], options.rounds)


if __name__ == "__main__":
    main()
