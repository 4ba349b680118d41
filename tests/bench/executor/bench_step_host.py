"""Times what a decode step costs the host beside its kernels, part by part, on the CPU.

    python -m tests.bench.executor.bench_step_host [--batches 1,8,32] [--steps 300]

The model is a random Qwen3-MoE of 12 layers in bfloat16, like that of bench_cpu_model but for its
widths: its kernels cost little, so that the rest can be seen. `worker` is a whole step from message to
message, `bare` planning, forward pass, logits and arg-max without worker, runner and registry; they
take turns, in one thread and with the garbage collector off. The other columns are the parts of a
worker's step, timed apart: a part's time is without that of the parts that it calls. `host` is all of
them but the kernels.
"""

import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from executor import worker as worker_module
from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.model.cpu_kernels.library import load
from executor.model.layers.linear import LMHead
from executor.worker import Worker
from protos.executor.v1 import executor_pb2 as pb
from tests.bench.executor.bench_cpu_model import make_checkpoint
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.executor.support.kv import batch_of
from tests.executor.support.steps import decodes_part, prompts_part, step

PROMPT_LEN, BLOCK_SIZE = 16, 16
NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}
PARTS = (
    *("read", "stage", "batch", "fill", "plan", "runner", "layers", "sample", "answer", "rest"),
    "kernels",
)


class Timers:
    """Nanoseconds of each part: those of a call without the calls to other parts in it."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)
        self._inner = [0]

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            started = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - started
                self.spent[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed

    @contextmanager
    def on(self, *places: tuple[Any, str, str]) -> Iterator[None]:
        """Times attributes of objects: each an object, a name and the part that it belongs to."""
        with ExitStack() as stack:
            for owner, name, part in places:
                timed = self.around(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            yield


class Stream:
    """The steps of some sequences: their prompts, then one token of each again and again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_computed = PROMPT_LEN
        self._next = 1

    def prompts(self) -> pb.StepRequest:
        size, blocks = self._size, range(1, 1 + self._size)
        count = size * PROMPT_LEN
        lens, ids = [PROMPT_LEN] * size, [i % 100 for i in range(count)]
        part = prompts_part(range(size), lens, ids, [1] * size, list(blocks))
        return self._step(part, num_tokens=[count], num_logits=[size])

    def decode(self) -> pb.StepRequest:
        size, column = self._size, self._num_computed // BLOCK_SIZE
        new: dict[str, Any] = {}
        if self._num_computed % BLOCK_SIZE == 0:
            blocks = range(1 + column * size, 1 + (column + 1) * size)
            new = {"num_new_blocks": [1] * size, "new_block_ids": list(blocks)}
        part = decodes_part(range(size), [self._num_computed] * size, **new)
        self._num_computed += 1
        return self._step(part, num_tokens=[size], graph_size=size)

    def _step(self, part: pb.RankStep, **sizes: Any) -> pb.StepRequest:
        self._next += 1
        return step(self._next, part, **sizes)


def make_worker(folder: str, size: int, steps: int) -> Worker:
    length = PROMPT_LEN + steps + 2 * BLOCK_SIZE
    config = ExecutorConfig(
        model=Path(folder),
        max_num_seqs=size,
        max_num_batched_tokens=size * PROMPT_LEN,
        max_model_len=length,
        num_kv_blocks=1 + size * -(-length // BLOCK_SIZE),
        decode_graph_sizes=(size,),
        prefill_graphs="off",
    )
    worker, _ = build_worker(config)
    worker.join(1, "")
    return worker


def bare_step(worker: Any, size: int) -> Callable[[], object]:
    """Returns what runs a decode step of these sequences without worker, runner and registry."""
    forward_pass = worker._runner._decode._pass
    ones, computed = [1] * size, [PROMPT_LEN - 1] * size
    pool, ids = forward_pass.kv_pool, torch.arange(size)
    batch = batch_of(pool, range(size), computed, ones, ids)

    def run() -> torch.Tensor:
        forward_pass.plan(batch)
        logits = forward_pass.compute_logits(forward_pass.run(batch))
        tokens: torch.Tensor = worker._sampler._likeliest(logits)
        return tokens

    return run


def places(worker: Any) -> list[tuple[Any, str, str]]:
    """Returns what is timed for the parts, but for ``rest``."""
    forward_pass = worker._runner._decode._pass
    attention = forward_pass.attention
    return [
        (worker_module, "read_step", "read"),
        (worker._stager, "stage", "stage"),
        (worker, "_update_rows", "batch"),
        (worker, "_build_batch", "batch"),
        (worker._runner, "run", "runner"),
        (worker._runner._decode.graphs.registry, "fill_from", "fill"),
        (attention, "init_forward_metadata_out_graph", "plan"),
        (type(forward_pass), "run", "layers"),
        (LMHead, "__call__", "layers"),
        (worker, "_sample", "sample"),
        (worker, "_results", "answer"),
        (load(), "replay", "kernels"),
    ]


def measure(folder: str, size: int, steps: int) -> None:
    """Prints the row of a batch size, in microseconds per step."""
    worker, stream = make_worker(folder, size, 3 * steps), Stream(size)
    worker.execute(stream.prompts())
    bare, timers = torch.inference_mode()(bare_step(worker, size)), Timers()
    took: dict[str, list[int]] = {"worker": [], "bare": []}
    for _ in range(steps):
        request = stream.decode()
        for name, run in (("worker", partial(worker.execute, request)), ("bare", bare)):
            started = time.perf_counter_ns()
            run()
            took[name].append(time.perf_counter_ns() - started)
    spent: dict[str, list[int]] = {part: [] for part in PARTS}
    with timers.on(*places(worker)):
        execute = timers.around("rest", worker.execute)
        for _ in range(steps):
            timers.spent.clear()
            execute(stream.decode())
            for part, column in spent.items():
                column.append(timers.spent[part])
    host = [sum(parts) for parts in zip(*(spent[part] for part in PARTS[:-1]), strict=True)]
    columns = [*took.values(), host, *spent.values()]
    print(f"{size:>5}", *(f"{statistics.median(x) / 1e3:8.1f}" for x in columns), flush=True)


def main() -> None:
    quiet()
    options = parse_options(__doc__, batches=(1, 8, 32), steps=300)
    torch.set_num_threads(1)
    gc.disable()
    print("us per decode step, medians, 1 thread; GC off")
    names = ("worker", "bare", "host", *PARTS)
    print("batch", *(f"{name:>8}" for name in names))
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), **NARROW)
        for size in options.batches:
            measure(folder, size, options.steps)


if __name__ == "__main__":
    main()
