"""A stale or missing input of a graph replays an older batch's answer to a new request."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.graph.cuda_graph_buffer_registry import FillContext, GraphSlot, PaddingPolicy
from executor.graph.input_buffers import INDEX_SEMANTIC_BUFFERS
from tests.executor.graph.registry_cases import (
    INT64,
    P,
    bs_slot,
    content,
    decode_registry,
    fill,
    full_batch,
    full_decode_registry,
    make_registry,
    numbers,
    token_slot,
    view_of,
)

# Fills, policy by policy.


@pytest.mark.parametrize(
    ("policy", "tail"),
    [
        (P.KEEP_PAD, [13, 14]),
        (P.FOREACH_COPY, [13, 14]),
        (P.FILL_SENTINEL, [5, 5]),
        (P.ZERO, [0, 0]),
        (P.FILL_ONCE, [13, 14]),
    ],
)
@pytest.mark.parametrize("axis", ["bs", "tokens"])
def test_after_a_large_batch_a_small_one_finds_the_tail_its_policy_promises(
    policy: PaddingPolicy, tail: list[int], axis: Any
):
    """Rows past the graph size are never touched, whatever the policy."""
    registry = make_registry(
        bs_slot(axis=axis, padding_policy=policy, pad_value=5), max_bs=8, max_num_tokens=8
    )
    fill(registry, SimpleNamespace(x=numbers(8, first=11)), 8, 8)
    fill(registry, SimpleNamespace(x=numbers(2, first=21)), 2, 4)
    assert content(registry, "x") == [21, 22, *tail, 15, 16, 17, 18]


def test_the_two_axes_are_padded_independently():
    registry = make_registry(
        bs_slot("rows", padding_policy=P.ZERO), token_slot("ids", padding_policy=P.ZERO)
    )
    full = SimpleNamespace(rows=numbers(8), ids=numbers(16))
    fill(registry, full, 8, 8, raw_num_tokens=16, padded_num_tokens=16)

    small = SimpleNamespace(rows=numbers(2), ids=numbers(5))
    fill(registry, small, 2, 2, raw_num_tokens=5, padded_num_tokens=6)
    assert content(registry, "rows") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert content(registry, "ids") == [1, 2, 3, 4, 5, 0, *range(7, 17)]


def test_a_sentinel_slot_without_a_value_fails_only_when_it_must_pad():
    registry = make_registry(bs_slot("seq_lens", padding_policy=P.FILL_SENTINEL))
    assert content(registry, "seq_lens") == [0] * 8
    fill(registry, SimpleNamespace(seq_lens=numbers(4)), 4, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"slot 'seq_lens': FILL_SENTINEL without a pad_val"):
            fill(registry, SimpleNamespace(seq_lens=numbers(3)), 3, 4)


def test_the_tail_of_a_slot_whose_rows_are_not_the_first_axis_is_reset():
    registry = make_registry(
        GraphSlot(
            "hidden",
            lambda b, t: (2, t, 3),
            INT64,
            padding_policy=P.ZERO,
            slice_fn=lambda buffer, n: buffer[:, :n],
        )
    )
    registry.get_slot("hidden").slice_for(0, 16).fill_(7)
    fill(registry, SimpleNamespace(hidden=numbers(2, 2, 3)), 2, 5)
    buffer = registry.get_slot("hidden").buffer
    assert buffer is not None
    assert torch.equal(buffer[:, :2], numbers(2, 2, 3))
    assert not buffer[:, 2:5].any()
    assert bool((buffer[:, 5:] == 7).all())


def test_a_slice_fn_that_gives_several_rows_per_count_is_padded_by_its_own_rows():
    registry = make_registry(
        GraphSlot(
            "topk",
            lambda b, t: (b * 2,),
            INT64,
            axis="bs",
            padding_policy=P.ZERO,
            slice_fn=lambda buffer, n: buffer[: n * 2],
        ),
        max_bs=4,
    )
    registry.get_slot("topk").slice_for(4, 0).fill_(7)
    fill(registry, SimpleNamespace(topk=numbers(2)), 1, 3)
    assert content(registry, "topk") == [1, 2, 0, 0, 0, 0, 7, 7]


def test_a_slice_fn_that_slices_nothing_is_named():
    registry = make_registry(
        token_slot("x", padding_policy=P.ZERO, slice_fn=lambda buffer, n: buffer)
    )
    with pytest.raises(ValueError, match="slot 'x': its slice_fn"):
        fill(registry, SimpleNamespace(x=None), 1, 2)


@pytest.mark.parametrize("source", [None, [1, 2], "absent"])
def test_a_source_that_is_no_tensor_leaves_the_head_and_resets_the_tail(source: Any):
    registry = make_registry(bs_slot(padding_policy=P.ZERO))
    fill(registry, SimpleNamespace(x=numbers(4)), 4, 4)
    batch = SimpleNamespace() if source == "absent" else SimpleNamespace(x=source)
    fill(registry, batch, 2, 4)
    assert content(registry, "x")[:4] == [1, 2, 0, 0]


def test_a_field_that_appears_or_goes_between_fills_of_a_size_is_noticed():
    registry = make_registry()
    for name in ("a", "b"):
        registry.register_slot(bs_slot(name))
    for batch, expected in (
        (SimpleNamespace(a=numbers(2)), [[1, 2], [0, 0]]),
        (SimpleNamespace(a=numbers(2), b=numbers(2, first=5)), [[1, 2], [5, 6]]),
        (SimpleNamespace(b=numbers(2, first=7)), [[1, 2], [7, 8]]),
        (SimpleNamespace(a="no tensor", b=numbers(2, first=9)), [[1, 2], [9, 10]]),
        (SimpleNamespace(a=numbers(2, first=3), b=[1, 2]), [[3, 4], [9, 10]]),
        (SimpleNamespace(), [[3, 4], [9, 10]]),
    ):
        for _ in range(2):
            fill(registry, batch, 2, 2)
            assert [content(registry, name)[:2] for name in ("a", "b")] == expected


def test_a_source_fn_is_called_once_a_fill_and_skips_the_slot_where_it_has_no_tensor():
    calls: list[int] = []

    def source(batch: Any, context: FillContext) -> torch.Tensor | None:
        calls.append(1)
        return batch.other

    registry = make_registry(bs_slot("a"), bs_slot("b", source_fn=source))
    for a, other in (
        (numbers(2), numbers(2)),
        (numbers(2), numbers(4)),
        (None, numbers(3, first=7)),
        (numbers(2), None),
        (numbers(2), [1, 2]),  # no tensor
    ):
        fill(registry, SimpleNamespace(a=a, other=other), 2, 4)
    assert len(calls) == 5
    assert content(registry, "b")[:4] == [7, 8, 9, 4]


def test_sources_of_other_types_are_converted_also_when_the_type_changes_between_fills():
    registry = make_registry(bs_slot("a"), bs_slot("b", dtype=torch.float32))
    for dtype in (torch.int32, INT64, torch.float64, torch.int32):
        batch = SimpleNamespace(a=numbers(3, dtype=dtype), b=numbers(3, first=5, dtype=dtype))
        fill(registry, batch, 3, 3)
        assert content(registry, "a")[:3] == [1, 2, 3]
        assert content(registry, "b")[:3] == [5.0, 6.0, 7.0]


@pytest.mark.parametrize("shape", [(1,), (3,), (5,), (4, 1), ()])
def test_a_source_of_another_length_is_refused_by_the_slots_name(shape: tuple[int, ...]):
    """A single row would be broadcast over all sequences, silently."""
    registry = make_registry(bs_slot("seq_lens"))
    fill(registry, SimpleNamespace(seq_lens=numbers(4)), 4, 4)
    for _ in range(2):
        with pytest.raises(ValueError, match="slot 'seq_lens': the source has shape"):
            fill(registry, SimpleNamespace(seq_lens=numbers(*shape)), 4, 4)
    assert content(registry, "seq_lens")[:4] == [1, 2, 3, 4]


def test_a_slot_registered_after_a_fill_takes_part_in_the_next():
    registry = make_registry(bs_slot("a"))
    batch = SimpleNamespace(batch_size=2, a=numbers(2), b=numbers(2, first=5))
    fill(registry, batch, 2, 2)
    view_of(registry, batch, 2)
    registry.register_slot(bs_slot("b"))
    fill(registry, batch, 2, 2)
    view = view_of(registry, batch, 2)
    assert view.b is not batch.b
    assert view.b.tolist() == [5, 6]


# Test mode.


def test_poison_is_gone_after_a_fill_where_the_policy_resets_and_harmless_elsewhere():
    registry = full_decode_registry()
    registry.poison_tails({"encoder_lens": 77})
    fill(registry, full_batch(3), 3, 5)
    for name in INDEX_SEMANTIC_BUFFERS:
        slot = registry.get_slot(name)
        assert not slot.slice_for(5, 5).narrow(slot.row_axis(), 3, 2).any(), name
    assert content(registry, "seq_lens") == [1, 2, 3, 1, 1, 1, 1, 1]
    assert content(registry, "input_ids") == [1, 2, 3, 1, 1, 0, 0, 0]
    assert content(registry, "encoder_lens") == [1, 2, 3, 77, 77, 0, 0, 0]


def test_poison_shows_a_tail_that_a_skipped_reset_would_leave(monkeypatch: pytest.MonkeyPatch):
    registry = full_decode_registry()
    registry.poison_tails()
    monkeypatch.setattr(torch, "_foreach_zero_", lambda tails: None)
    fill(registry, full_batch(3), 3, 4)
    assert content(registry, "out_cache_loc")[3] == torch.iinfo(INT64).max
    assert content(registry, "mamba_track_mask")[3] is True


def test_poison_leaves_skipped_slots_and_real_rows_alone():
    registry = make_registry(bs_slot("staged"), bs_slot("hidden", dtype=torch.float32))
    registry.get_slot("staged").allocated().fill_(7)
    registry.poison_tails()
    batch = SimpleNamespace(hidden=torch.ones(2))
    fill(registry, batch, 2, 4, skip_slots=frozenset({"staged"}))
    assert content(registry, "staged") == [7] * 8
    assert content(registry, "hidden")[:2] == [1, 1]
    assert registry.get_slot("hidden").slice_for(4, 0)[2:].isnan().all()
    assert content(registry, "hidden")[4:] == [0] * 4


@pytest.mark.parametrize("name", ["out_cache_loc", "nothing"])
def test_a_poison_that_would_have_no_effect_is_refused(name: str):
    with pytest.raises(ValueError, match=f"slot '{name}' is no enabled slot whose tail"):
        decode_registry().poison_tails({name: 3})


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_batches_leaves_every_view_as_if_it_were_the_first(seed: int):
    """Only rows that the policy leaves alone may remember an earlier batch."""
    rng = random.Random(seed)
    registry = full_decode_registry(share_pool=True)
    registry.poison_tails()
    for step in range(30):
        raw = rng.randint(0, 8)
        padded = rng.randint(max(raw, 1), 8)
        batch = full_batch(raw, first=100 * step + 1)
        fresh = full_decode_registry(share_pool=False)
        for one in (registry, fresh):
            fill(one, batch, raw, padded)
        for name in registry.slot_names():
            slot, expected = registry.get_slot(name), fresh.get_slot(name)
            rows = raw if name in ("input_ids", "encoder_lens") else padded
            assert torch.equal(slot.slice_for(rows, rows), expected.slice_for(rows, rows)), name
