"""Inputs that no attribute of a batch fills alone: computed ones, and parts of structures."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.graph.cuda_graph_buffer_registry import FillContext
from executor.graph.input_buffers import INDEX_SEMANTIC_BUFFERS
from executor.graph.slots import local_num_token_non_padded
from executor.parallel.layout import DpLayout
from tests.executor.graph.registry_cases import (
    COUNT_SLOTS,
    P,
    bs_slot,
    content,
    fill,
    full_batch,
    full_decode_registry,
    make_registry,
    numbers,
    prefill_registry,
    view_of,
)

# Hooks, computed and structured slots.


def test_tails_are_reset_before_sources_are_asked_and_hooks_run_last_in_order():
    seen: list[tuple[str, list[int]]] = []
    registry = make_registry()

    def source(batch: Any, context: FillContext) -> torch.Tensor:
        seen.append(("source", content(registry, "x")[:4]))
        return numbers(2, first=5)

    def hook(name: str) -> Any:
        def run(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
            assert buffer is registry.get_slot(name).buffer
            assert batch.tag == "batch"
            assert context == FillContext(2, 4, 2, 4, "proxies")
            seen.append((name, content(registry, "x")[:4]))

        return run

    registry.register_slot(bs_slot("late", post_fill=hook("late"), copy_from_fb=False))
    registry.register_slot(
        bs_slot("x", padding_policy=P.ZERO, source_fn=source, post_fill=hook("x"))
    )
    registry.get_slot("x").slice_for(8, 0).fill_(7)
    fill(registry, SimpleNamespace(tag="batch"), 2, 4, pp_proxy_tensors="proxies")
    assert seen == [("source", [7, 7, 0, 0]), ("late", [5, 6, 0, 0]), ("x", [5, 6, 0, 0])]


def test_a_source_fn_replaces_the_attribute_and_fills_as_many_rows_as_it_gives():
    registry = make_registry(
        bs_slot("x", source_fn=lambda batch, context: batch.other[: context.raw_bs + 1])
    )
    fill(registry, SimpleNamespace(x=numbers(2, first=90), other=numbers(8)), 2, 4)
    assert content(registry, "x") == [1, 2, 3, 0, 0, 0, 0, 0]


def test_a_computed_slot_ignores_the_batchs_attribute():
    registry = make_registry(bs_slot("x", copy_from_fb=False, padding_policy=P.ZERO))
    registry.get_slot("x").slice_for(8, 0).fill_(7)
    fill(registry, SimpleNamespace(x=numbers(2)), 2, 4)
    assert content(registry, "x") == [7, 7, 0, 0, 7, 7, 7, 7]


# Counts.


@pytest.mark.parametrize("seed", range(20))
def test_real_rows_are_split_as_the_layout_splits_them(seed: int):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 4, 8])
    padded = size * rng.randint(1, 200)
    real = rng.randint(0, padded)
    for rank in range(size):
        layout = replace(DpLayout.single(real, padded), attn_tp_rank=rank, attn_tp_size=size)
        count = local_num_token_non_padded(real, padded, size, rank)
        assert count == layout.shard_num_tokens


def test_rows_that_do_not_divide_among_the_ranks_are_refused():
    with pytest.raises(ValueError, match=r"num_token_non_padded.*1023 rows.*attn_tp_size=2"):
        local_num_token_non_padded(1018, 1023, 2, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_attention_tp_rank_outside_its_group_is_refused(rank: int):
    with pytest.raises(ValueError, match=f"attn_tp_rank={rank}, attn_tp_size=2"):
        full_decode_registry(attn_tp_size=2, attn_tp_rank=rank)


@pytest.mark.parametrize("build", [full_decode_registry, prefill_registry])
@pytest.mark.parametrize(("rank", "expected"), [(0, 512), (1, 506)])
def test_1018_real_rows_of_1024_on_two_ranks(build: Any, rank: int, expected: int):
    registry = build(
        max_bs=1024,
        max_num_token=1024,
        enable_num_token_non_padded=True,
        require_gathered_buffer=True,
        attn_tp_size=2,
        attn_tp_rank=rank,
    )
    fill(registry, full_batch(1018), 1018, 1024)
    assert content(registry, "num_token_non_padded") == [expected]


def test_rows_that_are_not_split_are_all_this_ranks():
    registry = full_decode_registry(require_gathered_buffer=False, attn_tp_size=2, attn_tp_rank=1)
    fill(registry, full_batch(3), 3, 5)
    assert content(registry, "num_token_non_padded") == [3]


def test_an_idle_rank_after_a_busy_one_has_no_real_rows_left():
    """The graph must not take padding for the last step's tokens, nor miss a peer's count."""
    registry = full_decode_registry()
    fill(registry, full_batch(8, first=50), 8, 8)
    batch = full_batch(0)
    fill(registry, batch, 0, 4)
    view = view_of(registry, batch, 4)
    for name in INDEX_SEMANTIC_BUFFERS:
        assert not getattr(view, name).any(), name
    assert view.seq_lens is not None
    assert view.seq_lens.tolist() == [1] * 4
    assert content(registry, "num_token_non_padded") == [0]
    assert content(registry, "global_num_tokens_gpu") == [4] * 4


@pytest.mark.parametrize(("gather_all", "length"), [(True, 4), (False, 1)])
def test_counts_are_written_again_though_the_sizes_are_the_same(gather_all: bool, length: int):
    registry = full_decode_registry(require_mlp_tp_gather=gather_all)
    for _ in range(2):
        for name in COUNT_SLOTS:
            registry.get_slot(name).allocated().fill_(-1)
        fill(registry, full_batch(3), 3, 4)
        assert content(registry, "num_token_non_padded") == [3]
        for name in COUNT_SLOTS[1:]:
            assert content(registry, name) == [4] * length


def test_without_a_gathered_buffer_global_counts_stay_as_they_are():
    registry = full_decode_registry(require_gathered_buffer=False)
    fill(registry, full_batch(3), 3, 6)
    assert content(registry, "global_num_tokens_gpu") == [0] * 4
    view = view_of(registry, full_batch(3), 6)
    assert view.global_num_tokens_gpu is not None
