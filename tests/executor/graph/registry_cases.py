"""Batches, slots and registries for the tests of graph inputs."""

import dataclasses
from dataclasses import dataclass
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


@dataclass(slots=True)
class FullBatch:
    """Every field that a slot of the factories mirrors."""

    batch_size: int
    input_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    out_cache_loc: torch.Tensor | None = None
    mrope_positions: torch.Tensor | None = None
    req_pool_indices: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    mamba_track_indices: torch.Tensor | None = None
    mamba_track_mask: torch.Tensor | None = None
    mamba_track_seqlens: torch.Tensor | None = None
    encoder_lens: torch.Tensor | None = None
    input_embeds: torch.Tensor | None = None
    num_token_non_padded: torch.Tensor | None = None
    global_num_tokens_gpu: torch.Tensor | None = None
    global_num_tokens_for_logprob_gpu: torch.Tensor | None = None
    forward_mode: str = "decode"


def numbers(*shape: int, first: int = 1, dtype: torch.dtype = INT64) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count).reshape(shape).to(dtype)


def full_batch(size: int, num_tokens: int | None = None, first: int = 1) -> FullBatch:
    """Returns a batch with every field that is copied, all entries from ``first`` up."""
    tokens = size if num_tokens is None else num_tokens
    return FullBatch(
        batch_size=size,
        input_ids=numbers(tokens, first=first),
        positions=numbers(tokens, first=first),
        out_cache_loc=numbers(tokens, first=first),
        mrope_positions=numbers(3, tokens, first=first),
        req_pool_indices=numbers(size, first=first),
        seq_lens=numbers(size, first=first),
        seq_lens_cpu=numbers(size, first=first),
        mamba_track_indices=numbers(size, first=first),
        mamba_track_mask=torch.ones(size, dtype=torch.bool),
        mamba_track_seqlens=numbers(size, first=first, dtype=torch.int32),
        encoder_lens=numbers(size, first=first, dtype=torch.int32),
    )


def make_registry(**changes: Any) -> CudaGraphBufferRegistry:
    options: dict[str, Any] = {"device": "cpu", "max_bs": 8, "max_num_tokens": 16}
    return CudaGraphBufferRegistry(**(options | changes))


def decode_registry(**changes: Any) -> CudaGraphBufferRegistry:
    options: dict[str, Any] = {
        "device": "cpu",
        "max_bs": 8,
        "max_num_token": 8,
        "seq_len_fill_value": 1,
        "cache_loc_dtype": INT64,
        "share_pool": False,
    }
    return build_decode_registry(**(options | changes))


def full_decode_registry(**changes: Any) -> CudaGraphBufferRegistry:
    options: dict[str, Any] = {
        "enable_mamba_track": True,
        "is_encoder_decoder": True,
        "enable_num_token_non_padded": True,
        "require_gathered_buffer": True,
        "require_mlp_tp_gather": True,
        "num_dp_ranks": 4,
    }
    return decode_registry(**(options | changes))


def prefill_registry(**changes: Any) -> CudaGraphBufferRegistry:
    options: dict[str, Any] = {
        "device": "cpu",
        "max_bs": 4,
        "max_num_token": 16,
        "cache_loc_dtype": torch.int32,
        "share_pool": False,
    }
    return build_prefill_registry(**(options | changes))


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


def content(registry: CudaGraphBufferRegistry, name: str) -> list[Any]:
    buffer = registry.get_slot(name).buffer
    assert buffer is not None
    return buffer.tolist()


def bound_buffers() -> dict[str, torch.Tensor]:
    """Returns what a decode registry of 8 adopts at least."""
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    buffers = {name: torch.zeros(8, dtype=INT64) for name in (*names, "seq_lens_cpu")}
    return buffers | {"mrope_positions": torch.zeros(3, 8, dtype=INT64)}


def vars_of(batch: FullBatch) -> dict[str, Any]:
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
