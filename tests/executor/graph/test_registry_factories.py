"""Which inputs each kind of graph has, and whose storage they are in."""

from typing import Any

import pytest
import torch

from executor.graph import cuda_graph_buffer_registry as registry_module
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry, build_eager_registry
from executor.graph.input_buffers import INDEX_SEMANTIC_BUFFERS
from tests.executor.graph.registry_cases import (
    COUNT_SLOTS,
    INT64,
    P,
    content,
    decode_registry,
    fill,
    full_batch,
    full_decode_registry,
    prefill_registry,
    token_slot,
)

# Sharing.


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_runners_of_one_size_share_storage_whoever_comes_first(order: tuple[int, int]):
    sizes: dict[str, Any] = {"device": "cpu", "max_bs": 8, "cache_loc_dtype": INT64}
    builders = [
        lambda: decode_registry(share_pool=True),
        lambda: build_eager_registry(max_num_token=32, **sizes),
    ]
    built = {i: builders[i]() for i in order}
    decode, eager = (
        {name: built[i].get_slot(name).allocated().data_ptr() for name in built[1].slot_names()}
        for i in range(2)
    )
    shared = {name for name in eager if decode[name] == eager[name]}
    assert shared == {"req_pool_indices", "seq_lens", "seq_lens_cpu"}  # 8 sequences each


def test_a_registry_that_does_not_share_has_storage_of_its_own():
    first, second = decode_registry(share_pool=False), decode_registry(share_pool=False)
    first.get_slot("seq_lens").slice_for(8, 8).fill_(7)
    assert content(second, "seq_lens") == [1] * 8


def assert_sentinels(registry: CudaGraphBufferRegistry) -> None:
    assert content(registry, "seq_lens") == content(registry, "seq_lens_cpu") == [1] * 8
    assert content(registry, "encoder_lens") == [3] * 8


def test_a_new_registry_sets_its_sentinels_and_reset_for_capture_all_that_another_has_left():
    busy, batch = full_decode_registry(share_pool=True), full_batch(8, first=90)
    fill(busy, batch, 8, 8)
    registry = full_decode_registry(share_pool=True, encoder_len_fill_value=3)
    assert_sentinels(registry)
    fill(busy, batch, 8, 8)
    assert content(registry, "out_cache_loc")[0] == 90
    registry.reset_for_capture()
    assert_sentinels(registry)
    for name in INDEX_SEMANTIC_BUFFERS:
        assert not registry.get_slot(name).slice_for(8, 8).any(), name
    assert content(registry, "input_ids")[0] == 90  # any valid id will do


# The factories' tables.


ZERO, SENTINEL, COPY, ONCE = P.ZERO, P.FILL_SENTINEL, P.FOREACH_COPY, P.FILL_ONCE

DECODE_TABLE = {
    "input_ids": ("tokens", (16,), INT64, COPY),
    "positions": ("tokens", (16,), INT64, ZERO),
    "out_cache_loc": ("tokens", (16,), torch.int32, ZERO),
    "req_pool_indices": ("bs", (8,), INT64, ZERO),
    "seq_lens": ("bs", (8,), INT64, SENTINEL),
    "seq_lens_cpu": ("bs", (8,), INT64, SENTINEL),
    "mrope_positions": ("tokens", (3, 16), INT64, ZERO),
    "window_cache_loc": ("tokens", (16,), torch.int32, ZERO),
    "mamba_track_indices": ("bs", (8,), INT64, ZERO),
    "mamba_track_mask": ("bs", (8,), torch.bool, ZERO),
    "encoder_lens": ("bs", (8,), torch.int32, ONCE),
    "num_token_non_padded": ("none", (1,), torch.int32, COPY),
    "global_num_tokens_gpu": ("none", (4,), torch.int32, COPY),
    "global_num_tokens_for_logprob_gpu": ("none", (4,), torch.int32, COPY),
}

PREFILL_TABLE = {
    "input_ids": ("tokens", (16,), INT64, ZERO),
    "positions": ("tokens", (16,), INT64, ZERO),
    "out_cache_loc": ("tokens", (16,), torch.int32, ZERO),
    "window_cache_loc": ("tokens", (16,), torch.int32, ZERO),
    "mrope_positions": ("tokens", (3, 16), INT64, ZERO),
    "input_embeds": ("tokens", (16, 6), torch.bfloat16, ZERO),
    "mamba_track_indices": ("bs", (4,), INT64, ZERO),
    "mamba_track_mask": ("bs", (4,), torch.bool, ZERO),
    "mamba_track_seqlens": ("bs", (4,), torch.int32, ZERO),
    "num_token_non_padded": ("none", (1,), torch.int32, COPY),
}


def table_of(registry: CudaGraphBufferRegistry) -> dict[str, Any]:
    slots = [registry.get_slot(name) for name in registry.slot_names()]
    return {s.name: (s.axis, tuple(s.allocated().shape), s.dtype, s.padding_policy) for s in slots}


def test_the_decode_table():
    registry = full_decode_registry(max_num_token=16, cache_loc_dtype=torch.int32)
    assert table_of(registry) == DECODE_TABLE


def test_the_prefill_table():
    registry = prefill_registry(
        is_multimodal=True,
        hidden_size=6,
        embed_dtype=torch.bfloat16,
        enable_mamba_track=True,
        enable_num_token_non_padded=True,
        has_window=True,
    )
    assert table_of(registry) == PREFILL_TABLE


def test_the_eager_table_is_the_decode_table_at_the_prefill_ceiling_without_counts():
    registry = build_eager_registry(
        device="cpu",
        max_bs=8,
        max_num_token=16,
        cache_loc_dtype=torch.int32,
        enable_mamba_track=True,
        is_encoder_decoder=True,
        has_window=True,
    )
    uncounted = {k: v for k, v in DECODE_TABLE.items() if k not in COUNT_SLOTS}
    assert table_of(registry) == uncounted


def test_slots_that_were_not_asked_for_are_not_there():
    decode = decode_registry(register_global_num_tokens=False)
    assert decode.slot_names() == [*DECODE_TABLE][:7]
    assert prefill_registry().slot_names() == ["input_ids", "positions", "out_cache_loc"]
    text_embeds = prefill_registry(is_multimodal=True, register_input_embeds=False)
    assert "input_embeds" not in text_embeds.slot_names()


def test_extends_count_the_rows_of_every_dp_rank_if_asked():
    registry = prefill_registry(
        register_global_num_tokens=True,
        require_gathered_buffer=True,
        require_mlp_tp_gather=True,
        num_dp_ranks=3,
    )
    fill(registry, full_batch(1, 3), 1, 1, raw_num_tokens=3, padded_num_tokens=8)
    for name in ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"):
        assert content(registry, name) == [8] * 3


@pytest.mark.parametrize(
    ("build", "slots"), [(decode_registry, "decode_slots"), (prefill_registry, "prefill_slots")]
)
def test_a_factory_that_forgot_to_zero_an_index_does_not_start(
    build: Any, slots: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry_module, slots, lambda **_: [token_slot("out_cache_loc")])
    with pytest.raises(AssertionError, match="padded rows of out_cache_loc"):
        build()


@pytest.mark.parametrize("build", [full_decode_registry, prefill_registry])
def test_only_the_host_mirror_is_on_the_host(build: Any):
    registry = build(device="meta")
    for name in registry.slot_names():
        is_on_host = registry.get_slot(name).allocated().device.type == "cpu"
        assert is_on_host == (name == "seq_lens_cpu"), name


@pytest.mark.parametrize("value", [0, 1, 7])
def test_padded_sequences_have_the_length_that_the_attention_backend_asks_for(value: int):
    registry = decode_registry(seq_len_fill_value=value)
    fill(registry, full_batch(8, first=50), 8, 8)
    fill(registry, full_batch(2), 2, 4)
    expected = [1, 2, value, value, 54, 55, 56, 57]
    assert content(registry, "seq_lens") == content(registry, "seq_lens_cpu") == expected


def test_a_small_extend_after_a_large_one_finds_every_padded_row_zeroed():
    """Every padded row of a prefill graph runs, from the embedding on."""
    registry = prefill_registry(
        is_multimodal=True, hidden_size=2, embed_dtype=torch.float32, enable_mamba_track=True
    )
    fill(registry, full_batch(4, 16), 4, 4, raw_num_tokens=16, padded_num_tokens=16)
    registry.get_slot("input_embeds").allocated().fill_(7)
    fill(registry, full_batch(1, 5), 1, 3, raw_num_tokens=5, padded_num_tokens=8)
    for name in registry.slot_names():
        slot = registry.get_slot(name)
        axis = slot.row_axis()
        raw, padded, end = (1, 3, 4) if slot.axis == "bs" else (5, 8, 16)
        whole = slot.allocated()
        assert whole.narrow(axis, 0, raw).all(), name
        assert not whole.narrow(axis, raw, padded - raw).any(), name
        assert whole.narrow(axis, padded, end - padded).all(), name
