"""Times the graph runners on the CPU against the eager runner, in one process, interleaved.

    python -m tests.bench.executor.bench_runners [--threads 2] [--rounds 9]

The model is the one of bench_cpu_model. On a CPU a replay is a call, so a runner gains nothing: the
table says what filling buffers, padding and cutting the pass cost. The last two rows decide the
default of --prefill-graphs here; on a GPU, tests/gpu does.
"""

import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.graph.backend import EagerBackend
from executor.graph.cuda_graph_buffer_registry import (
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from executor.model.families import load_model
from executor.model.families.config import ModelConfig
from executor.model.families.kernels import cpu_kernels
from executor.model.layers.attention_torch import TorchAttention
from executor.parallel.layout import DpLayout
from executor.runners import GraphRunner, Runner
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import (
    BreakablePrefillRunner,
    DecodeRunner,
    EagerRunner,
    PiecewisePrefillRunner,
)
from tests.bench.executor.bench_cpu_model import BLOCK_SIZE, PROMPT_LEN, clock, make_checkpoint
from tests.bench.support.options import parse_options
from tests.bench.support.timing import in_turns
from tests.executor.support.kv import out_cache_loc

MAX_ROWS = 32
MAX_TOKENS = 640
DECODES = ((1, 1), (8, 8), (5, 8), (32, 32), (25, 32))  # sequences, and the graph that runs them
PREFILLS = ((512, 512), (450, 480))  # tokens, and the graph


def make_forward_pass(path: Path) -> ForwardPass:
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, kernels=cpu_kernels(config, dtype=config.dtype, num_workers=1))
    blocks_per_row = MAX_TOKENS // BLOCK_SIZE
    pool = KVPool(
        config.kv_shape(BLOCK_SIZE, config.dtype),
        num_blocks=1 + MAX_ROWS * blocks_per_row,
        num_rows=MAX_ROWS,
        max_blocks_per_row=blocks_per_row,
    )
    blocks = (torch.randperm(pool.num_blocks - 1) + 1).tolist()
    pool.append_blocks(range(MAX_ROWS), [0] * MAX_ROWS, [blocks_per_row] * MAX_ROWS, blocks)
    for cache in (*pool.key_cache, *pool.value_cache):
        cache.normal_()
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return ForwardPass(
        stages=model.stages,
        compute_logits=model.compute_logits,
        attention=TorchAttention(*heads, dtype=config.dtype, num_workers=1),
        kv_pool=pool,
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=config.dtype,
    )


def make_runners(forward_pass: ForwardPass) -> tuple[Runner, GraphRunner, dict[str, GraphRunner]]:
    """Returns the eager runner, the decode runner, and the prefill runners; all have captured."""
    options = {"device": "cpu", "max_bs": MAX_ROWS, "cache_loc_dtype": torch.int64}
    eager = EagerRunner(forward_pass, build_eager_registry(max_num_token=MAX_TOKENS, **options))
    decode = DecodeRunner(
        forward_pass,
        build_decode_registry(
            max_num_token=MAX_ROWS,
            seq_len_fill_value=1,
            enable_num_token_non_padded=True,
            register_global_num_tokens=False,
            **options,
        ),
        EagerBackend(),
        sorted({size for _, size in DECODES}),
    )
    sizes = sorted({size for _, size in PREFILLS})
    prefill: dict[str, GraphRunner] = {}
    kinds = {"breakable": BreakablePrefillRunner, "piecewise": PiecewisePrefillRunner}
    for name, kind in kinds.items():
        registry = build_prefill_registry(
            max_num_token=sizes[-1], enable_num_token_non_padded=True, **options
        )
        prefill[name] = kind(forward_pass, registry, EagerBackend(), sizes)
    for runner in (decode, *prefill.values()):
        runner.capture()
    return eager, decode, prefill


def make_batch(pool: KVPool, num_computed: int, num_tokens: list[int], size: int) -> ForwardBatch:
    rows = np.arange(len(num_tokens))
    computed = np.full(len(rows), num_computed)
    total = sum(num_tokens)
    return ForwardBatch.from_columns(
        rows=rows,
        num_computed=computed,
        num_tokens=num_tokens,
        input_ids=torch.randint(0, 1000, (total,)),
        out_cache_loc=out_cache_loc(pool, rows, computed, num_tokens),
        layout=DpLayout.single(total, size, has_extend=total > len(rows)),
    )


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
        del make_checkpoint(Path(directory)).model
        forward_pass = make_forward_pass(Path(directory))
    eager, decode, prefill = make_runners(forward_pass)
    pool = forward_pass.kv_pool
    print(f"{'':<24} {'eager ms':>9} {'decode':>11}")
    for count, size in DECODES:
        batch = make_batch(pool, PROMPT_LEN, [1] * count, size)
        print_row(f"decode {count} in {size}", batch, [eager, decode], options.rounds)
    print(f"{'':<24} {'eager ms':>9}", *(f"{name:>11}" for name in prefill))
    for count, size in PREFILLS:
        batch = make_batch(pool, 0, [count // 2, count - count // 2], size)
        print_row(f"prefill {count} in {size}", batch, [eager, *prefill.values()], options.rounds)


if __name__ == "__main__":
    main()
