"""Measurements of steps on a Qwen3-30B-A3B-shaped model with random weights.

A step is what a runner does with a batch that lies on the device already: inputs filled, attention
planned, the pass, logits. Sampling and the wire are not in it. Where the device has too little
memory the model has fewer layers, and the table says so.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from executor.graph.backend import RunnerBackend
from executor.graph.input_buffers import fresh_input_buffer_pool
from executor.model.decoder.sizes import attention_of
from tests.executor.support.experts import with_experts
from tests.gpu.figures.measure import (
    GIB,
    copy_bandwidth,
    count_experts,
    decodes,
    host_seconds,
    large_case,
    layers_that_fit,
    prompts,
    seconds,
    step_bytes,
    traced,
)
from tests.gpu.figures.period import measure_period
from tests.gpu.support.cases import PREFILL_RUNNERS, Case, largest_error
from tests.gpu.support.machine import Machine
from tests.gpu.support.results import Table
from tests.gpu.support.shapes import COMPARED_LAYERS, CONTEXT, LARGE, LARGE_MODEL, VARIANT_LAYERS
from tests.gpu.support.weights import fill_transformers, flat_weights

BANDWIDTH = ("Memory bandwidth", ("bandwidth", "value"))
DECODES = (
    "Decode steps",
    (
        *("sequences", "captured ms", "eager ms", "eager / captured", "read GiB"),
        *("limit by copies ms", "share", "nominal limit ms", "share", "experts hit", "layers"),
    ),
)
VARIANTS = ("Variants", ("kernels", "1 ms", "8 ms", "32 ms", "layers"))
KINDS = {  # of experts, whether kernels start early, whether Triton's are among them
    "cutlass, PDL on": ("cutlass", "on", True),
    "cutlass, PDL off": ("cutlass", "off", True),
    "grouped, PDL off": ("grouped", "off", True),
    "cutlass, PDL off, no Triton": ("cutlass", "off", False),
}
TRACE = ("Trace", ("sequences / place", "kernel", "launches", "us", "share"))
TRACED, NUM_TRACED = (LARGE.decode[0], LARGE.decode[2]), 8
PREFILLS = ("Prefill steps", ("tokens", "eager ms", "piecewise ms", "breakable ms", "layers"))
REGISTRY = ("Registry fill", ("real/captured", "host us", "until it is done us"))
TRANSFORMERS = (
    "Against Transformers",
    ("sequences", "captured ms", "Transformers ms", "logits differ by", "layers"),
)


class CannotMeasure(Exception):
    """Something that a measurement needs is not here; says what."""


def measure_steps(machine: Machine) -> list[Table]:
    """Times decode and prefill steps, captured and eager, and relates them to bandwidth."""
    layers = layers_that_fit(machine, LARGE_MODEL)
    if layers < 1:
        raise CannotMeasure(f"{machine.free_bytes() / GIB:.0f} GiB are too few for one layer")
    copied, nominal = copy_bandwidth(machine), machine.bandwidth()
    config = replace(LARGE_MODEL, layers=LARGE_MODEL.layers[:layers])
    depth = f"{layers} of {len(LARGE_MODEL.layers)}"
    decode_rows = {}
    with large_case(machine, config) as case, torch.inference_mode(), fresh_input_buffer_pool():
        backend = machine.new_backend()
        captured, eager = case.decode(backend), case.eager()
        for size in LARGE.decode:
            batch = decodes(case, size)
            hit = count_experts(case, batch)
            eager_s, captured_s = _both(machine, eager, captured, batch)
            num_bytes = step_bytes(config, size, CONTEXT, hit)
            decode_rows[str(size)] = (
                *(_ms(captured_s), _ms(eager_s), f"{eager_s / captured_s:.2f}"),
                *(f"{num_bytes / GIB:.2f}", *_limit(num_bytes, copied, captured_s)),
                *(*_limit(num_bytes, nominal, captured_s), f"{sum(hit) / len(hit):.1f}", depth),
            )
        backend.discard()  # so that prefills have its memory
        prefill_rows = _measure_prefills(machine, case, depth)
        del captured, eager, batch
    nominal_text = "unknown" if nominal is None else f"{nominal / 1e12:.2f} TB/s"
    bandwidth = {"device copy": (f"{copied / 1e12:.3f} TB/s",), "nominal": (nominal_text,)}
    return [
        Table(*BANDWIDTH, bandwidth),
        Table(*DECODES, decode_rows),
        Table(*PREFILLS, prefill_rows),
    ]


def measure_variants(machine: Machine) -> list[Table]:
    """Times captured decode steps of some layers by kernels of experts, with PDL and without."""
    config = replace(LARGE_MODEL, layers=LARGE_MODEL.layers[:VARIANT_LAYERS])
    if layers_that_fit(machine, config) < VARIANT_LAYERS:
        raise CannotMeasure(f"{machine.free_bytes() / GIB:.0f} GiB are too few")
    if machine.ops is None:
        raise CannotMeasure("FlashInfer is not installed")
    rows = {}
    for name, (moe_runner, pdl, has_triton) in KINDS.items():
        kind: Any = {
            "ops": machine.new_ops(pdl),
            "moe_runner": moe_runner,
            "has_triton": has_triton,
        }
        with (
            large_case(machine, config, **kind) as case,
            torch.inference_mode(),
            fresh_input_buffer_pool(),
        ):
            captured = case.decode(machine.new_backend())
            times = [
                seconds(machine, partial(captured.run, decodes(case, size)))
                for size in LARGE.decode[:3]
            ]
            del captured
        rows[name] = (*map(_ms, times), f"{VARIANT_LAYERS} of {len(LARGE_MODEL.layers)}")
    return [Table(*VARIANTS, rows)]


def measure_trace(machine: Machine) -> list[Table]:
    """Sums up the kernels of captured decode steps, those first that take longest."""
    config = replace(LARGE_MODEL, layers=LARGE_MODEL.layers[:VARIANT_LAYERS])
    rows = {}
    with large_case(machine, config) as case, torch.inference_mode(), fresh_input_buffer_pool():
        captured = case.decode(machine.new_backend())
        for size in TRACED:
            run = partial(captured.run, decodes(case, size))
            kernels = traced(machine, run)
            whole_s = sum(kernel.total_s for kernel in kernels)
            for place, kernel in enumerate(kernels[:NUM_TRACED], start=1):
                share = f"{kernel.total_s / whole_s:.0%}"
                cells = (kernel.name, f"{kernel.launches:g}", f"{kernel.total_s * 1e6:.1f}", share)
                rows[f"{size} / {place}"] = cells
        del captured, run
    return [Table(*TRACE, rows)]


def _measure_prefills(machine: Machine, case: Case, depth: str) -> dict[str, tuple[str, ...]]:
    """Captures with one runner after the other, since each holds a pool of memory."""
    times: dict[int, list[float]] = {}
    eager = case.eager()
    for size in LARGE.prefill:
        batch = prompts(case, size)
        layout = replace(batch.layout, graph_size=None)
        run = partial(eager.run, replace(batch, layout=layout))
        times[size] = [seconds(machine, run)]
    for kind in PREFILL_RUNNERS:
        backend: RunnerBackend = machine.new_backend()
        runner = case.prefill(kind, backend)
        for size in LARGE.prefill:
            times[size].append(seconds(machine, partial(runner.run, prompts(case, size))))
        backend.discard()
    return {str(size): (*map(_ms, row), depth) for size, row in times.items()}


def measure_registry(machine: Machine) -> list[Table]:
    """Times one fill of a decode registry from tensors on the device."""
    config = with_experts(
        replace(LARGE_MODEL, layers=LARGE_MODEL.layers[:1], vocab_size=64), num_experts=8
    )
    rows = {}
    with large_case(machine, config) as case, torch.inference_mode(), fresh_input_buffer_pool():
        registry = case.decode_registry()
        for size in LARGE.decode:
            for real in sorted({size, max(1, size - 3)}):
                batch = decodes(case, real)
                sequences = {"raw_bs": real, "padded_bs": size}
                tokens = {"raw_num_tokens": real, "padded_num_tokens": size}
                fill = partial(registry.fill_from, batch, **sequences, **tokens)
                fill()
                host_s, done_s = host_seconds(machine, fill), seconds(machine, fill)
                rows[f"{real}/{size}"] = (f"{host_s * 1e6:.1f}", f"{done_s * 1e6:.1f}")
        del batch, fill, registry
    return [Table(*REGISTRY, rows)]


def measure_transformers(machine: Machine) -> list[Table]:
    """Times decode steps of both on the same weights, keys and values, at a few layers."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError:
        raise CannotMeasure("Transformers is not installed") from None
    config = replace(LARGE_MODEL, layers=LARGE_MODEL.layers[:COMPARED_LAYERS])
    both = replace(config, layers=config.layers * 2)
    if layers_that_fit(machine, both) < 2 * COMPARED_LAYERS:
        raise CannotMeasure(f"{machine.free_bytes() / GIB:.0f} GiB are too few for both models")
    theirs: Any = _transformers_model(machine, Qwen3MoeConfig, Qwen3MoeForCausalLM)
    rows = {}
    with large_case(machine, config) as case, torch.inference_mode(), fresh_input_buffer_pool():
        captured = case.decode(machine.new_backend())
        for size in LARGE.decode:
            batch = decodes(case, size)
            cache = _transformers_cache(case, batch)
            ids = batch.input_ids.view(-1, 1)

            def step(cache: Any = cache, ids: torch.Tensor = ids) -> torch.Tensor:
                logits: torch.Tensor = theirs(ids, past_key_values=cache, use_cache=True).logits
                cache.crop(-1)
                return logits[:, 0]

            error = _typical_error(captured.run(batch), step())
            theirs_s = seconds(machine, step)
            ours_s = seconds(machine, partial(captured.run, batch))
            rows[str(size)] = (_ms(ours_s), _ms(theirs_s), f"{error:.1%}", str(COMPARED_LAYERS))
            del cache, step
        del captured
    return [Table(*TRANSFORMERS, rows)]


def _transformers_model(machine: Machine, new_config: Any, new_model: Any) -> Any:
    c = LARGE_MODEL
    assert c.moe is not None
    config = new_config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=COMPARED_LAYERS,
        num_attention_heads=attention_of(c).num_heads,
        num_key_value_heads=attention_of(c).num_kv_heads,
        head_dim=attention_of(c).head_dim,
        num_experts=c.num_experts,
        num_experts_per_tok=c.top_k,
        moe_intermediate_size=c.moe.intermediate_size,
        intermediate_size=c.hidden_size,
        max_position_embeddings=c.max_position_embeddings,
        norm_topk_prob=c.moe.router.renormalise,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.ropes[0].theta},
        tie_word_embeddings=c.tied,
        dtype=c.dtype,
    )
    with torch.device(machine.device):
        model = new_model(config).to(c.dtype).eval()
    fill_transformers(model, flat_weights(c, machine.device))
    return model


def _transformers_cache(case: Case, batch: Any) -> Any:
    """Returns the keys and values that our pool holds for a batch's sequences, without the newest."""
    from transformers import DynamicCache

    pool, size = case.pool, case.sizes.block_size
    num_keys = CONTEXT - 1
    table = pool.tables[0][batch.req_pool_indices].long()
    places = torch.arange(num_keys, device=case.device)
    slots = table[:, places // size] * size + places % size
    cache: Any = DynamicCache()
    for layer_id in range(len(case.config.layers)):
        keys, values = (cache[slots].transpose(1, 2) for cache in pool.caches[layer_id])
        cache.update(keys, values, layer_id)
    return cache


def _typical_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Returns how far a row of logits is off, as a part of its length: the median over rows.

    Not the largest: router logits of random weights are so close that a token may go to another
    expert.
    """
    errors = [
        largest_error(a.unsqueeze(0), b.unsqueeze(0)) for a, b in zip(ours, theirs, strict=True)
    ]
    return sorted(errors)[len(errors) // 2]


def _both(machine: Machine, eager: Any, captured: Any, batch: Any) -> tuple[float, float]:
    layout = replace(batch.layout, graph_size=None)
    eager_s = seconds(machine, partial(eager.run, replace(batch, layout=layout)))
    return eager_s, seconds(machine, partial(captured.run, batch))


def _ms(value: float) -> str:
    return f"{value * 1e3:.3f}"


def _limit(num_bytes: int, bandwidth: float | None, step_s: float) -> tuple[str, str]:
    """Returns the time that the bytes take, and which part of the step that is."""
    if bandwidth is None:
        return "unknown", "unknown"
    limit_s = num_bytes / bandwidth
    return _ms(limit_s), f"{limit_s / step_s:.0%}"


MEASUREMENTS: dict[str, Callable[[Machine], list[Table]]] = {
    "steps": measure_steps,
    "variants": measure_variants,
    "trace": measure_trace,
    "period": measure_period,
    "registry": measure_registry,
    "transformers": measure_transformers,
}
