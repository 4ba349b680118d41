"""Measurement for benchmarks: times, bytes, and a large model without a checkpoint."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.model.decoder.sizes import attention_of, kv_shape
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.layer import Dispatched
from executor.model.spec import ModelSpec
from tests.gpu.support.cases import Case, device_kernels, flashinfer_attention, torch_attention
from tests.gpu.support.machine import IS_STAND_IN, Machine
from tests.gpu.support.shapes import CONTEXT, LARGE
from tests.gpu.support.weights import flat_weights

GIB = 1 << 30
_COPIED_BYTES = 1 << 20 if IS_STAND_IN else 2 << 30
_ROUNDS, _ROUND_S = (1, 0.0) if IS_STAND_IN else (5, 0.3)
_SPARE_BYTES = 8 * GIB  # for graphs, logits and workspaces


def seconds(machine: Machine, run: Callable[[], object]) -> float:
    """Returns how long a call takes, its work on the device included: the median of some rounds.

    Calls of a round follow one another without a wait, as steps do.
    """

    def timed(count: int) -> float:
        machine.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            run()
        machine.synchronize()
        return (time.perf_counter() - started) / count

    timed(2)
    count = max(1, min(100, round(_ROUND_S / max(timed(1), 1e-6))))
    return statistics.median(timed(count) for _ in range(_ROUNDS))


def host_seconds(machine: Machine, run: Callable[[], object], count: int = 20) -> float:
    """Returns how long the host is busy with a call; the device may go on. The fastest round."""
    best = float("inf")
    for _ in range(_ROUNDS):
        machine.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, (time.perf_counter() - started) / count)
    return best


def copy_bandwidth(machine: Machine) -> float:
    """Returns the bytes per second that a copy on the device reads and writes."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / seconds(machine, lambda: target.copy_(source))


def layer_bytes(config: ModelSpec) -> int:
    """Returns the bytes of a layer's weights, all experts included."""
    experts = config.num_experts * expert_numbers(config)
    return (_attention_numbers(config) + _router_numbers(config) + experts) * config.dtype.itemsize


def expert_numbers(config: ModelSpec) -> int:
    """Returns how many weights an expert has."""
    assert config.moe is not None
    return 3 * config.hidden_size * config.moe.intermediate_size


def step_bytes(config: ModelSpec, num_seqs: int, context: int, experts_hit: list[int]) -> int:
    """Returns what a decode step must at least read from memory, weights and keys and values.

    Args:
        config: The model.
        num_seqs: Sequences, one token each.
        context: Keys of each.
        experts_hit: Of each layer, how many experts some token goes to.
    """
    heads = attention_of(config).num_kv_heads * attention_of(config).head_dim
    kv = 2 * num_seqs * context * heads
    layers = sum(
        _attention_numbers(config) + _router_numbers(config) + hit * expert_numbers(config) + kv
        for hit in experts_hit
    )
    head = config.vocab_size * config.hidden_size
    return (layers + head) * config.dtype.itemsize


def count_experts(case: Case, batch: ForwardBatch) -> list[int]:
    """Returns how many experts the tokens of a batch go to, layer by layer."""
    counts: list[int] = []
    runners = []
    for layer in case.model.layers:
        moe: Any = layer.mlp
        runner = moe._layer.runner
        runners.append((moe._layer, runner))
        moe._layer.runner = _Counting(runner, case.config.num_experts, counts)
    try:
        with torch.inference_mode():
            case.eager().run(replace(batch, layout=replace(batch.layout, graph_size=None)))
    finally:
        for moe_layer, runner in runners:
            moe_layer.runner = runner
    return counts


class _Counting:
    """Runs experts, and counts those that have a row."""

    def __init__(self, runner: Any, num_experts: int, counts: list[int]) -> None:
        self._runner = runner
        self._num_experts = num_experts
        self._counts = counts

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        ids = dispatched.topk_ids_RK
        self._counts.append(len(set(ids[ids < self._num_experts].tolist())))
        y: torch.Tensor = self._runner.run(dispatched)
        return y


class Kernel(NamedTuple):
    """Launches of one kernel in a step.

    Attributes:
        launches: How many.
        total_s: How long all of them take.
    """

    name: str
    launches: float
    total_s: float


def traced(machine: Machine, run: Callable[[], object], count: int = 3) -> list[Kernel]:
    """Returns the kernels of a call, those first that take longest; on a CPU, operators."""
    activity = torch.profiler.ProfilerActivity
    is_gpu = machine.device.type == "cuda"
    activities = [activity.CUDA] if is_gpu else [activity.CPU]
    run()
    machine.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            run()
        machine.synchronize()
    attribute = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    kernels = [
        Kernel(event.key, event.count / count, getattr(event, attribute) / 1e6 / count)
        for event in profile.key_averages()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.total_s)


def layers_that_fit(machine: Machine, config: ModelSpec) -> int:
    """Returns how many of a model's layers the device has room for, with their KV pool."""
    embeddings = 2 * config.vocab_size * config.hidden_size * config.dtype.itemsize
    shape = kv_shape(replace(config, layers=config.layers[:1]), LARGE.block_size, config.dtype)
    kv = shape.bytes_per_block * LARGE.num_rows * LARGE.max_len // LARGE.block_size
    room = machine.free_bytes() - embeddings - _SPARE_BYTES
    return max(0, min(len(config.layers), room // (layer_bytes(config) + kv)))


@contextmanager
def large_case(
    machine: Machine,
    config: ModelSpec,
    *,
    ops: FlashInferOps | None = None,
    moe_runner: str | None = None,
    has_triton: bool = True,
) -> Iterator[Case]:
    """Gives the block a model with random weights, made on the device.

    Its kernels are production's, unless told otherwise. Afterwards frees
    it, and all graphs.
    """
    ops = ops or machine.ops
    moe_runner = moe_runner or machine.moe_runner
    triton = machine.triton if ops is not None and has_triton else None
    case = Case(
        config,
        LARGE,
        device_kernels(config, LARGE, machine.device, ops, moe_runner=moe_runner, triton=triton),
        torch_attention if ops is None else flashinfer_attention(ops, triton=triton),
        flat_weights(config, machine.device),
        device=machine.device,
        made_on=machine.device,
    )
    try:
        yield case
    finally:
        machine.discard()
        vars(case).clear()  # whoever still has the case keeps nothing alive
        gc.collect()
        machine.free_bytes()  # which gives back what nobody uses


def decodes(case: Case, num_seqs: int) -> ForwardBatch:
    """Returns sequences that have CONTEXT keys each, the new one included."""
    return case.batch(
        [(CONTEXT - 1, 1)] * num_seqs,
        graph_size=num_seqs,
        has_extend=False,
        rng=np.random.default_rng(num_seqs),
    )


def prompts(case: Case, num_tokens: int) -> ForwardBatch:
    """Returns new prompts of at most half of CONTEXT, with so many tokens in all."""
    most = CONTEXT // 2
    counts = [most] * (num_tokens // most)
    if num_tokens % most:
        counts.append(num_tokens % most)
    return case.batch(
        [(0, count) for count in counts],
        graph_size=num_tokens,
        has_extend=True,
        rng=np.random.default_rng(num_tokens),
    )


def _attention_numbers(config: ModelSpec) -> int:
    heads = 2 * attention_of(config).num_heads + 2 * attention_of(config).num_kv_heads
    return heads * attention_of(config).head_dim * config.hidden_size


def _router_numbers(config: ModelSpec) -> int:
    return config.num_experts * config.hidden_size
