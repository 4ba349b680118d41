"""Batches, slots and registries for the tests of graph inputs."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from executor.graph.cuda_graph_buffer_registry import (
    CudaGraphBufferRegistry,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
    build_prefill_registry,
)

INT64 = torch.int64
P = PaddingPolicy
COUNT_SLOTS = ("num_token_non_padded", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")


def numbers(*shape: int, first: int = 1, dtype: torch.dtype = INT64) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count).reshape(shape).to(dtype)


def full_batch(size: int, num_tokens: int | None = None, first: int = 1) -> SimpleNamespace:
    """Returns a batch with every field that a slot of the factories mirrors.

    Those that are copied hold entries from ``first`` up; the others are None.
    """
    tokens = size if num_tokens is None else num_tokens
    of_tokens = ("input_ids", "positions", "out_cache_loc", "window_cache_loc")
    of_sequences = ("req_pool_indices", "seq_lens", "seq_lens_cpu", "mamba_track_indices")
    int32s = ("mamba_track_seqlens", "encoder_lens")
    return SimpleNamespace(
        batch_size=size,
        forward_mode="decode",
        **{name: numbers(tokens, first=first) for name in of_tokens},
        **{name: numbers(size, first=first) for name in of_sequences},
        **{name: numbers(size, first=first, dtype=torch.int32) for name in int32s},
        mrope_positions=numbers(3, tokens, first=first),
        mamba_track_mask=torch.ones(size, dtype=torch.bool),
        **dict.fromkeys(("input_embeds", *COUNT_SLOTS)),
    )


def make_registry(*slots: GraphSlot, **changes: Any) -> CudaGraphBufferRegistry:
    options: dict[str, Any] = {"device": "cpu", "max_bs": 8, "max_num_tokens": 16}
    registry = CudaGraphBufferRegistry(**(options | changes))
    for slot in slots:
        registry.register_slot(slot)
    return registry


_CPU: dict[str, Any] = {"device": "cpu", "share_pool": False}
_EIGHT: dict[str, Any] = {**_CPU, "max_bs": 8, "max_num_token": 8, "cache_loc_dtype": INT64}
_FOUR: dict[str, Any] = {**_CPU, "max_bs": 4, "max_num_token": 16, "cache_loc_dtype": torch.int32}
prefill_registry: Any = partial(build_prefill_registry, **_FOUR)
decode_registry: Any = partial(build_decode_registry, **_EIGHT, seq_len_fill_value=1)
full_decode_registry: Any = partial(
    decode_registry,
    enable_mamba_track=True,
    is_encoder_decoder=True,
    enable_num_token_non_padded=True,
    require_gathered_buffer=True,
    require_mlp_tp_gather=True,
    num_dp_ranks=4,
    has_window=True,
)


def bs_slot(name: str = "x", **changes: Any) -> GraphSlot:
    options: dict[str, Any] = {"dtype": INT64, "axis": "bs"}
    return GraphSlot(name, lambda max_bs, _: (max_bs,), **(options | changes))


def token_slot(name: str = "x", **changes: Any) -> GraphSlot:
    return GraphSlot(name, lambda _, max_num_tokens: (max_num_tokens,), INT64, **changes)


def fill(
    registry: CudaGraphBufferRegistry, batch: Any, raw: int, padded: int, **changes: Any
) -> None:
    """Fills as a decode does, one token per sequence."""
    sizes = {"raw_bs": raw, "padded_bs": padded, "raw_num_tokens": raw, "padded_num_tokens": padded}
    registry.fill_from(batch, **(sizes | changes))


def view_of(registry: CudaGraphBufferRegistry, template: Any, padded: int) -> Any:
    """Returns the batch that a decode graph of ``padded`` sequences runs."""
    return registry.extract_buffer(
        padded_bs=padded, padded_num_tokens=padded, forward_batch_template=template
    )


def content(registry: CudaGraphBufferRegistry, name: str) -> list[Any]:
    buffer = registry.get_slot(name).buffer
    assert buffer is not None
    return buffer.tolist()


def bound_buffers() -> dict[str, Any]:
    """Returns what a decode registry of 8 adopts at least."""
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    buffers = {name: torch.zeros(8, dtype=INT64) for name in (*names, "seq_lens_cpu")}
    return buffers | {"mrope_positions": torch.zeros(3, 8, dtype=INT64)}
