"""Times this executor's model against Transformers on the CPU, in one process, interleaved.

    python -m tests.bench.executor.bench_cpu_model [--threads 2] [--batches 1,8,32]

Both run the same random Qwen3-MoE of 703 M parameters in bfloat16. Prefill is one prompt of 512
tokens; decode takes greedy steps of that many sequences, each after 512 tokens of random keys and
values: forward, logits, argmax; both are fed the same tokens. They take turns of 16 steps, the first
two of which are left out: they find the caches full of the other's weights. Transformers uses its
defaults (grouped_mm experts, SDPA attention, KV cache) in inference mode.

The first ratio is forward against forward, the stricter one. The second is against a new token of
Transformers' ``generate``, which is what a user of it waits for: greedy, from as full a cache, the
median between two calls of its stopping criteria. It runs after the others, not interleaved.

Absolute numbers depend on the machine and its neighbours, the ratio of two runs a moment apart less
so. One thread is timed in CPU seconds, which leave out the time that neighbours held the core. With
several threads the machine must be quiet: a thread that waits for a core makes all others wait.

Both share this process's OMP_WAIT_POLICY. Unset, waiting threads spin: both are fastest then, so
that is the ratio to quote. The executor itself sets PASSIVE.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM, StoppingCriteria

from executor.graph.backend import EagerBackend
from executor.graph.cpu_graph import CpuGraph, GraphMemory
from executor.graph.cuda_graph_buffer_registry import build_decode_registry
from executor.model.cpu_kernels.library import load
from executor.model.decoder.kernels import cpu_kernels
from executor.model.decoder.sizes import attention_of, kv_shape
from executor.model.families import Model, load_model, read_spec
from executor.model.layers.attention import run_stages
from executor.model.layers.attention_cpu import cpu_attention
from executor.model.spec import ModelSpec
from executor.parallel.layout import DpLayout
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import DecodeRunner
from tests.bench.support.options import parse_options
from tests.executor.support.kv import batch_of, full_pool

PROMPT_LEN = 512
BLOCK_SIZE = 16
TURN_STEPS = 16
NUM_LEFT_OUT = 2


class Ours:
    """Prompts in a paged KV pool, one row each. Decodes run as an executor's do: from a graph."""

    def __init__(self, model: Model, config: ModelSpec, batch_size: int, max_len: int) -> None:
        self._model = model
        attention = attention_of(config)
        shape = kv_shape(config, BLOCK_SIZE, model.embed_tokens.weight.dtype)
        self._attention = cpu_attention(attention.num_heads, shape, scale=attention.scale)
        self._pool = full_pool(shape, batch_size, max_len)
        forward_pass = ForwardPass(
            stages=model.stages,
            compute_logits=model.compute_logits,
            attention=self._attention,
            kv_pool=self._pool,
            num_heads=attention.num_heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=config.dtype,
        )
        kernels = load()
        record = None if kernels is None else partial(CpuGraph, kernels, GraphMemory())
        registry = build_decode_registry(
            device="cpu",
            max_bs=batch_size,
            max_num_token=batch_size,
            seq_len_fill_value=1,
            cache_loc_dtype=torch.int64,
            share_pool=False,
        )
        sizes = range(1, batch_size + 1)
        self._decode = DecodeRunner(forward_pass, registry, EagerBackend(record), sizes)
        self._decode.capture()

    def fill(self) -> None:
        """Puts random keys and values everywhere, in place of a prefill."""
        for cache in self._pool.tensors:
            cache.normal_()

    def run(self, rows: list[int], num_computed: int, ids: torch.Tensor) -> torch.Tensor:
        """Returns the next token of each row after ids [B, T]."""
        num_tokens, computed = [ids.shape[1]] * len(rows), [num_computed] * len(rows)
        is_decode = ids.shape[1] == 1
        layout = DpLayout.single(ids.numel(), len(rows) if is_decode else None)
        batch = batch_of(self._pool, rows, computed, num_tokens, ids.flatten(), layout)
        if is_decode:
            return self._decode.run(batch).argmax(-1, keepdim=True)
        self._attention.init_forward_metadata_out_graph(batch, self._pool)
        hidden = run_stages(self._model.stages(batch), self._attention.forward)
        last = hidden.index_select(0, batch.logits_indices)
        return self._model.compute_logits(last).argmax(-1, keepdim=True)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Returns float32 logits [T, V] of a prompt in row 0."""
        batch = batch_of(self._pool, [0], [0], [len(ids)], torch.tensor(ids))
        self._attention.init_forward_metadata_out_graph(batch, self._pool)
        return self._model.compute_logits(
            run_stages(self._model.stages(batch), self._attention.forward)
        )


class Theirs:
    """Prompts in one dynamic cache, as ``generate`` keeps them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)

    def fill(self, batch_size: int) -> None:
        """Puts random keys and values of PROMPT_LEN tokens into the cache."""
        config = self._model.config
        size = (batch_size, config.num_key_value_heads, PROMPT_LEN, config.head_dim)
        for layer_id in range(config.num_hidden_layers):
            k, v = (torch.randn(size).to(self._model.dtype) for _ in range(2))
            self._cache.update(k, v, layer_id)

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        out = self._model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        next_ids: torch.Tensor = out.logits[:, -1].float().argmax(-1, keepdim=True)
        return next_ids

    def generate(self, ids: torch.Tensor, num_tokens: int) -> list[float]:
        """Returns the seconds of each new token but the first, for ids [B, T] of a full cache."""
        stamps = Stamps()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self._cache,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[stamps],
        )
        return [later - earlier for earlier, later in pairwise(stamps.times)]


class Stamps(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing, but notes the time after each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(clock()())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def make_checkpoint(path: Path, **changes: Any) -> Any:
    """Saves a random model, of other sizes if these are given; returns it as Transformers loads it."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32768,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "dtype": "bfloat16",
        **changes,
    }
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    model = model.to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return model


def clock() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def seconds(run: Callable[[], object]) -> float:
    now = clock()
    started = now()
    run()
    return now() - started


def time_prefill(model: Model, config: ModelSpec, peer: Any, rounds: int) -> list[list[float]]:
    ids = torch.randint(0, config.vocab_size, (1, PROMPT_LEN))
    times: list[list[float]] = [[], []]
    ours = Ours(model, config, 1, PROMPT_LEN)
    for _ in range(rounds + 1):
        theirs = Theirs(peer)
        times[0].append(seconds(lambda: ours.run([0], 0, ids)))
        times[1].append(seconds(partial(theirs.run, ids)))
    return [column[1:] for column in times]


def time_decode(
    model: Model, config: ModelSpec, peer: Any, batch_size: int, steps: int
) -> list[list[float]]:
    ours = Ours(model, config, batch_size, PROMPT_LEN + steps)
    theirs = Theirs(peer)
    rows = list(range(batch_size))
    fed = torch.randint(0, config.vocab_size, (steps, batch_size, 1))
    ours.fill()
    theirs.fill(batch_size)
    times: list[list[float]] = [[], []]
    for first in range(0, steps, TURN_STEPS):
        turn = range(first, min(first + TURN_STEPS, steps))
        for column, step in (
            (times[0], lambda i: ours.run(rows, PROMPT_LEN + i, fed[i])),
            (times[1], lambda i: theirs.run(fed[i])),
        ):
            column += [seconds(partial(step, i)) for i in turn][NUM_LEFT_OUT:]
    return times


def time_generate(config: ModelSpec, peer: Any, batch_size: int, steps: int) -> list[float]:
    theirs = Theirs(peer)
    theirs.fill(batch_size)
    ids = torch.randint(0, config.vocab_size, (batch_size, PROMPT_LEN + 1))
    return theirs.generate(ids, steps + 2)[1:]


def print_row(name: str, num_tokens: int, times: list[list[float]]) -> None:
    ours, theirs, *generate = (statistics.median(column) for column in times)
    print(
        f"{name:<12} {ours * 1e3:9.1f} {theirs * 1e3:9.1f} {num_tokens / ours:9.1f} "
        f"{num_tokens / theirs:9.1f} {theirs / ours:7.2f}x",
        *(f"{seconds * 1e3:11.1f} {seconds / ours:7.2f}x" for seconds in generate),
        flush=True,
    )


def main() -> None:
    counts = {"threads": 2, "steps": 48, "rounds": 3}  # rounds of the prefill
    options = parse_options(__doc__, batches=(1, 8, 32), **counts)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        peer = make_checkpoint(Path(directory))
        config = read_spec(directory)
        kernels = cpu_kernels(config, dtype=config.dtype)
        model = load_model(directory, config, kernels=kernels)
        kind = "CPU" if options.threads == 1 else "wall"
        print(f"{options.threads} threads, bfloat16, {kind} time, medians over the whole batch")
        print(
            f"{'':<12} {'ours ms':>9} {'peer ms':>9} {'ours t/s':>9} {'peer t/s':>9} {'ratio':>8} "
            f"{'generate ms':>11} {'ratio':>8}"
        )
        times = time_prefill(model, config, peer, options.rounds)
        print_row("prefill 512", PROMPT_LEN, times)
        for batch_size in options.batches:
            times = time_decode(model, config, peer, batch_size, options.steps)
            times.append(time_generate(config, peer, batch_size, options.steps))
            print_row(f"decode B={batch_size}", batch_size, times)


if __name__ == "__main__":
    main()
