"""A stale or missing input of a graph replays an older batch's answer to a new request."""

import dataclasses
import inspect
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.forward_batch import DpLayout, ForwardBatch, ForwardMode
from executor.graph import buffer_registry
from executor.graph import cuda_graph_buffer_registry as registry_module
from executor.graph.cuda_graph_buffer_registry import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from executor.graph.input_buffers import INDEX_SEMANTIC_BUFFERS, fresh_input_buffer_pool
from executor.graph.slot_tables import local_num_token_non_padded

INT64 = torch.int64
P = PaddingPolicy


@pytest.fixture(autouse=True)
def pool() -> Iterator[None]:
    with fresh_input_buffer_pool():
        yield


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
    sizes = {
        "raw_bs": raw,
        "padded_bs": padded,
        "raw_num_tokens": raw,
        "padded_num_tokens": padded,
    }
    registry.fill_from(batch, **(sizes | changes))


def content(registry: CudaGraphBufferRegistry, name: str) -> list[Any]:
    buffer = registry.get_slot(name).buffer
    assert buffer is not None
    return buffer.tolist()


# Slots: specs and slices.


def test_an_unknown_axis_is_refused_by_the_slots_name():
    with pytest.raises(ValueError, match=r"slot 'seq_lens': axis='batch'"):
        GraphSlot("seq_lens", lambda b, t: (b,), INT64, axis="batch")  # type: ignore[arg-type]


def test_a_slice_fn_without_an_axis_is_refused_by_the_slots_name():
    with pytest.raises(ValueError, match=r"slot 'counts'.*slice_fn"):
        GraphSlot("counts", lambda b, t: (1,), INT64, axis="none", slice_fn=lambda b, n: b)


def test_a_slot_copies_rows_of_tokens_unless_told_otherwise():
    slot = GraphSlot("x", lambda b, t: (t,), INT64)
    assert (slot.axis, slot.padding_policy) == ("tokens", P.FOREACH_COPY)
    assert (slot.enabled, slot.copy_from_fb, slot.buffer) == (True, True, None)


def parameters(function: Any) -> dict[str, Any]:
    """Returns parameters and defaults, in order; REQUIRED is the sign of none."""
    signature = inspect.signature(function).parameters
    return {name: p.default for name, p in signature.items() if name != "self"}


REQUIRED = inspect.Parameter.empty


def test_slots_and_sizes_take_what_people_of_the_field_expect_in_that_order():
    assert list(parameters(GraphSlot).items()) == [
        ("name", REQUIRED),
        ("shape_fn", REQUIRED),
        ("dtype", REQUIRED),
        ("axis", "tokens"),
        ("device", None),
        ("padding_policy", P.FOREACH_COPY),
        ("pad_value", None),
        ("enabled", True),
        ("copy_from_fb", True),
        ("post_fill", None),
        ("slice_fn", None),
        ("source_fn", None),
    ]
    sizes = dict.fromkeys(("raw_bs", "padded_bs", "raw_num_tokens", "padded_num_tokens"), REQUIRED)
    assert parameters(FillContext) == sizes | {"pp_proxy_tensors": None}
    more = {"pp_proxy_tensors": None, "skip_slots": frozenset()}
    assert parameters(CudaGraphBufferRegistry.fill_from) == (
        {"forward_batch": REQUIRED} | sizes | more
    )
    assert parameters(CudaGraphBufferRegistry.register_slot) == {"slot": REQUIRED, "bind": None}
    assert list(parameters(CudaGraphBufferRegistry.extract_buffer)) == [
        "padded_bs",
        "padded_num_tokens",
        "forward_batch_template",
    ]
    assert parameters(CudaGraphBufferRegistry) == {
        "device": REQUIRED,
        "max_bs": REQUIRED,
        "max_num_tokens": REQUIRED,
        "share_pool": False,
    }


def test_the_decode_factory_takes_what_people_of_the_field_expect():
    expected = {
        **dict.fromkeys(("device", "max_bs", "max_num_token", "seq_len_fill_value"), REQUIRED),
        "cache_loc_dtype": REQUIRED,
        "enable_mamba_track": False,
        "is_encoder_decoder": False,
        "encoder_len_fill_value": 0,
        "enable_num_token_non_padded": False,
        "require_gathered_buffer": False,
        "require_mlp_tp_gather": False,
        "num_dp_ranks": 1,
        "register_global_num_tokens": True,
        "share_pool": True,
        "source": None,
    }
    assert expected.items() <= parameters(build_decode_registry).items()


def test_slices_follow_the_slots_own_axis():
    registry = make_registry()
    registry.register_slot(bs_slot("rows"))
    registry.register_slot(token_slot("ids"))
    registry.register_slot(GraphSlot("counts", lambda b, t: (5,), INT64, axis="none"))
    registry.register_slot(
        GraphSlot("mrope", lambda b, t: (3, t), INT64, slice_fn=lambda buffer, n: buffer[:, :n])
    )
    shapes = {name: registry.get_slot(name).slice_for(2, 7).shape for name in registry.slot_names()}
    assert shapes == {"rows": (2,), "ids": (7,), "counts": (5,), "mrope": (3, 7)}


def test_a_slice_is_a_view_of_the_buffer():
    registry = make_registry()
    registry.register_slot(slot := bs_slot())
    assert slot.buffer is not None
    slot.slice_for(3, 0)[2] = 9
    assert slot.buffer[2] == 9


@pytest.mark.parametrize("enabled", [True, False])
def test_slicing_before_allocation_says_which_slot_has_no_buffer(enabled: bool):
    slot = bs_slot("seq_lens", enabled=enabled)
    if not enabled:
        make_registry().register_slot(slot)
    with pytest.raises(RuntimeError, match=r"slot 'seq_lens' has no buffer"):
        slot.slice_for(1, 1)


def test_a_slice_larger_than_the_buffer_is_refused_instead_of_cut_short():
    registry = make_registry(max_bs=8)
    registry.register_slot(slot := bs_slot("seq_lens"))
    with pytest.raises(ValueError, match=r"slot 'seq_lens': 9 rows"):
        slot.slice_for(9, 0)


@pytest.mark.parametrize("sizes", [(3, 2, 1, 1), (-1, 2, 1, 1), (1, 1, 5, 4)])
def test_sizes_that_do_not_fit_one_another_are_refused(sizes: tuple[int, int, int, int]):
    with pytest.raises(ValueError, match="need 0 <= raw <= padded"):
        FillContext(*sizes)


# Registration.


def test_a_name_is_taken_once_even_by_a_disabled_slot():
    registry = make_registry()
    registry.register_slot(bs_slot("x", enabled=False))
    with pytest.raises(ValueError, match="slot 'x' is registered already"):
        registry.register_slot(bs_slot("x"))


def test_a_slot_belongs_to_one_registry():
    slot = bs_slot("x")
    make_registry().register_slot(slot)
    with pytest.raises(ValueError, match="slot 'x' belongs to another registry"):
        make_registry().register_slot(slot)


def test_a_disabled_slot_keeps_its_spec_and_takes_part_in_nothing():
    registry = make_registry()
    registry.register_slot(bs_slot("on"))
    registry.register_slot(off := bs_slot("off", enabled=False))

    assert registry.get_slot("off") is off
    assert off.buffer is None
    assert (registry.has_slot("on"), registry.has_slot("off")) == (True, False)
    assert registry.slot_names() == ["on"]
    batch = SimpleNamespace(batch_size=2, on=numbers(2), off=numbers(2))
    fill(registry, batch, 2, 4)
    view = registry.extract_buffer(padded_bs=4, padded_num_tokens=4, forward_batch_template=batch)
    assert view.off is batch.off
    assert len(view.on) == 4


def test_an_unknown_slot_is_named_with_those_there_are():
    registry = make_registry()
    registry.register_slot(bs_slot("seq_lens"))
    assert not registry.has_slot("seq_len")
    with pytest.raises(KeyError, match=r"'seq_len' is not registered.*'seq_lens'"):
        registry.get_slot("seq_len")


@pytest.mark.parametrize(("max_bs", "max_num_tokens"), [(0, 4), (4, 0)])
def test_a_registry_without_room_is_refused(max_bs: int, max_num_tokens: int):
    with pytest.raises(ValueError, match=f"max_bs={max_bs}, max_num_tokens={max_num_tokens}"):
        make_registry(max_bs=max_bs, max_num_tokens=max_num_tokens)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(7, dtype=INT64), r"shape \(7,\).*\(8,\)"),
        (torch.zeros(8, dtype=torch.int32), "dtype torch.int32.*torch.int64"),
        (torch.zeros(8, dtype=INT64, device="meta"), "device meta.*cpu"),
    ],
)
def test_a_bound_tensor_must_match_the_slot(tensor: torch.Tensor, what: str):
    registry = make_registry()
    with pytest.raises(ValueError, match=f"slot 'x': bound tensor has {what}"):
        registry.register_slot(bs_slot("x"), bind=tensor)
    assert not registry.has_slot("x")


@pytest.mark.parametrize("policy", list(PaddingPolicy))
@pytest.mark.parametrize("share_pool", [False, True])
def test_binding_adopts_the_tensor_without_writing_to_it(policy: PaddingPolicy, share_pool: bool):
    registry = make_registry(share_pool=share_pool)
    registry.register_slot(
        slot := bs_slot(padding_policy=policy, pad_value=5), bind=(t := numbers(8))
    )
    assert slot.buffer is t
    assert t.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(P.KEEP_PAD, 0), (P.FOREACH_COPY, 0), (P.FILL_SENTINEL, 5), (P.ZERO, 0), (P.FILL_ONCE, 5)],
)
def test_a_new_buffer_starts_as_its_policy_says(policy: PaddingPolicy, expected: int):
    registry = make_registry()
    registry.register_slot(bs_slot(padding_policy=policy, pad_value=5))
    assert content(registry, "x") == [expected] * 8


def test_a_slot_lives_on_its_own_device_if_it_names_one():
    registry = make_registry(device="meta")
    registry.register_slot(on_device := bs_slot("a"))
    registry.register_slot(on_host := bs_slot("b", device="cpu"))
    assert on_device.buffer is not None
    assert on_host.buffer is not None
    assert (on_device.buffer.device.type, on_host.buffer.device.type) == ("meta", "cpu")


def test_buffers_made_in_inference_mode_can_be_filled_outside_of_it():
    """The executor captures in inference mode; a warm-up may not."""
    with torch.inference_mode():
        registry = full_decode_registry(share_pool=True)
        other = full_decode_registry(share_pool=True)
        fill(other, full_batch(3), 3, 4)
    fill(registry, full_batch(3), 3, 4)
    fill(other, full_batch(3), 3, 4)
    assert content(other, "seq_lens")[:4] == [1, 2, 3, 1]


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
    registry = make_registry(max_bs=8, max_num_tokens=8)
    registry.register_slot(bs_slot(axis=axis, padding_policy=policy, pad_value=5))
    fill(registry, SimpleNamespace(x=numbers(8, first=11)), 8, 8)
    fill(registry, SimpleNamespace(x=numbers(2, first=21)), 2, 4)
    assert content(registry, "x") == [21, 22, *tail, 15, 16, 17, 18]


def test_the_two_axes_are_padded_independently():
    registry = make_registry()
    registry.register_slot(bs_slot("rows", padding_policy=P.ZERO))
    registry.register_slot(token_slot("ids", padding_policy=P.ZERO))
    full = SimpleNamespace(rows=numbers(8), ids=numbers(16))
    sizes = {"raw_bs": 8, "padded_bs": 8, "raw_num_tokens": 16, "padded_num_tokens": 16}
    registry.fill_from(full, **sizes)

    small = SimpleNamespace(rows=numbers(2), ids=numbers(5))
    sizes = {"raw_bs": 2, "padded_bs": 2, "raw_num_tokens": 5, "padded_num_tokens": 6}
    registry.fill_from(small, **sizes)
    assert content(registry, "rows") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert content(registry, "ids") == [1, 2, 3, 4, 5, 0, *range(7, 17)]


def test_a_sentinel_slot_without_a_value_fails_only_when_it_must_pad():
    registry = make_registry()
    registry.register_slot(bs_slot("seq_lens", padding_policy=P.FILL_SENTINEL))
    assert content(registry, "seq_lens") == [0] * 8
    fill(registry, SimpleNamespace(seq_lens=numbers(4)), 4, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"slot 'seq_lens': FILL_SENTINEL without a pad_val"):
            fill(registry, SimpleNamespace(seq_lens=numbers(3)), 3, 4)


def test_the_tail_of_a_slot_whose_rows_are_not_the_first_axis_is_reset():
    registry = make_registry()
    registry.register_slot(
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
    registry = make_registry(max_bs=4)
    registry.register_slot(
        GraphSlot(
            "topk",
            lambda b, t: (b * 2,),
            INT64,
            axis="bs",
            padding_policy=P.ZERO,
            slice_fn=lambda buffer, n: buffer[: n * 2],
        )
    )
    registry.get_slot("topk").slice_for(4, 0).fill_(7)
    fill(registry, SimpleNamespace(topk=numbers(2)), 1, 3)
    assert content(registry, "topk") == [1, 2, 0, 0, 0, 0, 7, 7]


def test_a_slice_fn_that_slices_nothing_is_named():
    registry = make_registry()
    registry.register_slot(
        token_slot("x", padding_policy=P.ZERO, slice_fn=lambda buffer, n: buffer)
    )
    with pytest.raises(ValueError, match="slot 'x': its slice_fn"):
        fill(registry, SimpleNamespace(x=None), 1, 2)


@pytest.mark.parametrize("source", [None, [1, 2], "absent"])
def test_a_source_that_is_no_tensor_leaves_the_head_and_resets_the_tail(source: Any):
    registry = make_registry()
    registry.register_slot(bs_slot(padding_policy=P.ZERO))
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


def test_a_source_fn_is_called_once_a_fill_whatever_else_the_batch_has():
    calls: list[int] = []

    def source(batch: Any, context: FillContext) -> torch.Tensor | None:
        calls.append(1)
        return batch.other

    registry = make_registry()
    registry.register_slot(bs_slot("a"))
    registry.register_slot(bs_slot("b", source_fn=source))
    for a, other in (
        (numbers(2), numbers(2)),
        (numbers(2), numbers(4)),
        (None, numbers(3, first=7)),
        (numbers(2), None),
    ):
        fill(registry, SimpleNamespace(a=a, other=other), 2, 4)
    assert len(calls) == 4
    assert content(registry, "b")[:4] == [7, 8, 9, 4]


def test_a_field_that_comes_back_is_copied_again():
    registry = make_registry()
    registry.register_slot(bs_slot())
    for value in (numbers(2, first=5), None, numbers(2, first=8)):
        fill(registry, SimpleNamespace(x=value), 2, 2)
    assert content(registry, "x")[:2] == [8, 9]


def test_sources_of_other_types_are_converted_also_when_the_type_changes_between_fills():
    registry = make_registry()
    registry.register_slot(bs_slot("a"))
    registry.register_slot(bs_slot("b", dtype=torch.float32))
    for dtype in (torch.int32, INT64, torch.float64, torch.int32):
        batch = SimpleNamespace(a=numbers(3, dtype=dtype), b=numbers(3, first=5, dtype=dtype))
        fill(registry, batch, 3, 3)
        assert content(registry, "a")[:3] == [1, 2, 3]
        assert content(registry, "b")[:3] == [5.0, 6.0, 7.0]


@pytest.mark.parametrize("shape", [(1,), (3,), (5,), (4, 1), ()])
def test_a_source_of_another_length_is_refused_by_the_slots_name(shape: tuple[int, ...]):
    """A single row would be broadcast over all sequences, silently."""
    registry = make_registry()
    registry.register_slot(bs_slot("seq_lens"))
    fill(registry, SimpleNamespace(seq_lens=numbers(4)), 4, 4)
    for _ in range(2):
        with pytest.raises(ValueError, match="slot 'seq_lens': the source has shape"):
            fill(registry, SimpleNamespace(seq_lens=numbers(*shape)), 4, 4)
    assert content(registry, "seq_lens")[:4] == [1, 2, 3, 4]


def test_a_graph_larger_than_the_buffers_is_refused_by_the_slots_name():
    registry = make_registry(max_bs=8)
    registry.register_slot(bs_slot("seq_lens", padding_policy=P.ZERO))
    with pytest.raises(ValueError, match="slot 'seq_lens': 9 rows asked for"):
        fill(registry, SimpleNamespace(seq_lens=numbers(2)), 2, 9)


def test_skipped_slots_are_neither_reset_nor_copied_nor_hooked():
    calls: list[str] = []
    registry = make_registry()
    for name in ("a", "b"):
        registry.register_slot(
            bs_slot(name, padding_policy=P.ZERO, post_fill=lambda *_, n=name: calls.append(n))
        )
        registry.get_slot(name).slice_for(8, 0).fill_(7)
    fill(registry, SimpleNamespace(a=numbers(2), b=numbers(2)), 2, 4, skip_slots={"a"})
    assert content(registry, "a") == [7] * 8
    assert content(registry, "b") == [1, 2, 0, 0, 7, 7, 7, 7]
    assert calls == ["b"]


def test_a_slot_registered_after_a_fill_takes_part_in_the_next():
    registry = make_registry()
    registry.register_slot(bs_slot("a"))
    batch = SimpleNamespace(batch_size=2, a=numbers(2), b=numbers(2, first=5))
    fill(registry, batch, 2, 2)
    registry.extract_buffer(padded_bs=2, padded_num_tokens=2, forward_batch_template=batch)
    registry.register_slot(bs_slot("b"))
    fill(registry, batch, 2, 2)
    view = registry.extract_buffer(padded_bs=2, padded_num_tokens=2, forward_batch_template=batch)
    assert view.b is not batch.b
    assert view.b.tolist() == [5, 6]


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
    registry = make_registry()
    registry.register_slot(
        bs_slot("x", source_fn=lambda batch, context: batch.other[: context.raw_bs + 1])
    )
    fill(registry, SimpleNamespace(x=numbers(2, first=90), other=numbers(8)), 2, 4)
    assert content(registry, "x") == [1, 2, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("result", [None, [1, 2]])
def test_a_source_fn_without_a_tensor_skips_the_slot(result: Any):
    registry = make_registry()
    registry.register_slot(bs_slot("x", source_fn=lambda batch, context: result))
    registry.get_slot("x").slice_for(8, 0).fill_(7)
    fill(registry, SimpleNamespace(x=numbers(2)), 2, 4)
    assert content(registry, "x") == [7] * 8


def test_a_source_fn_that_gives_more_rows_than_fit_is_named():
    registry = make_registry(max_bs=8)
    registry.register_slot(bs_slot("x", source_fn=lambda batch, context: numbers(9)))
    with pytest.raises(ValueError, match="slot 'x': 9 rows asked for"):
        fill(registry, SimpleNamespace(), 2, 4)


def test_a_computed_slot_ignores_the_batchs_attribute():
    registry = make_registry()
    registry.register_slot(bs_slot("x", copy_from_fb=False, padding_policy=P.ZERO))
    registry.get_slot("x").slice_for(8, 0).fill_(7)
    fill(registry, SimpleNamespace(x=numbers(2)), 2, 4)
    assert content(registry, "x") == [7, 7, 0, 0, 7, 7, 7, 7]


@pytest.mark.parametrize("wrap", [dict, lambda **tensors: SimpleNamespace(tensors=tensors)])
def test_pipeline_proxies_are_copied_by_key_and_an_absent_key_is_skipped(wrap: Any):
    buffers = {"hidden": torch.full((8, 2), 7.0), "residual": torch.full((8, 2), 7.0)}
    source = SimpleNamespace(**bound_buffers(), pp_proxy_tensors=wrap(**buffers))
    registry = decode_registry(register_global_num_tokens=False, source=source)
    slot = registry.get_slot("pp_proxy_tensors.hidden")
    assert slot.buffer is buffers["hidden"]
    assert (slot.axis, slot.dtype, slot.padding_policy) == ("none", torch.float32, P.KEEP_PAD)

    sent = wrap(hidden=torch.ones(3, 2))
    fill(registry, full_batch(3), 3, 4, pp_proxy_tensors=sent)
    assert buffers["hidden"].tolist() == [[1, 1]] * 3 + [[7, 7]] * 5
    assert bool((buffers["residual"] == 7).all())
    fill(registry, full_batch(3), 3, 4)
    assert buffers["hidden"][0].tolist() == [1, 1]


def test_structured_fields_are_filled_from_the_batchs_path_and_never_put_back():
    info = SimpleNamespace(column_starts=torch.zeros(8, dtype=torch.int32))
    source = SimpleNamespace(**bound_buffers(), ngram_info=info)
    registry = decode_registry(
        register_global_num_tokens=False,
        source=source,
        structured_fields=["ngram_info.column_starts"],
    )
    slot = registry.get_slot("ngram_info.column_starts")
    assert (slot.axis, slot.padding_policy) == ("none", P.KEEP_PAD)

    batch = SimpleNamespace(
        **vars_of(full_batch(2)), ngram_info=SimpleNamespace(column_starts=numbers(2))
    )
    fill(registry, batch, 2, 4)
    assert info.column_starts.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    view = registry.extract_buffer(padded_bs=4, padded_num_tokens=4, forward_batch_template=batch)
    assert view.ngram_info is batch.ngram_info
    assert "ngram_info.column_starts" not in vars(view)

    batch.ngram_info = None
    fill(registry, batch, 2, 4)
    assert info.column_starts[:2].tolist() == [1, 2]


@pytest.mark.parametrize("path", ["ngram_info.missing", "input_ids"])
def test_a_structured_field_that_the_source_lacks_is_named(path: str):
    source = SimpleNamespace(**bound_buffers())
    with pytest.raises(ValueError, match=f"slot '{path}': need a dotted path"):
        decode_registry(register_global_num_tokens=False, source=source, structured_fields=[path])


def bound_buffers() -> dict[str, torch.Tensor]:
    """Returns what a decode registry of 8 adopts at least."""
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    buffers = {name: torch.zeros(8, dtype=INT64) for name in (*names, "seq_lens_cpu")}
    return buffers | {"mrope_positions": torch.zeros(3, 8, dtype=INT64)}


def vars_of(batch: FullBatch) -> dict[str, Any]:
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}


# Views.


def forward_batch(num_sequences: int) -> ForwardBatch:
    """Returns a decode batch of sequences that have 1, 2, 3, ... tokens in the pool."""
    return ForwardBatch.from_columns(
        rows=range(num_sequences),
        num_computed=range(1, num_sequences + 1),
        num_tokens=[1] * num_sequences,
        input_ids=numbers(num_sequences, first=100),
        out_cache_loc=numbers(num_sequences, first=200),
        layout=DpLayout.single(num_sequences),
    )


def test_a_forward_batch_comes_back_padded_and_the_template_stays_as_it_was():
    registry = full_decode_registry()
    batch = forward_batch(3)
    before = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    fill(registry, batch, 3, 4)
    view = registry.extract_buffer(padded_bs=4, padded_num_tokens=4, forward_batch_template=batch)

    assert isinstance(view, ForwardBatch)
    assert view.batch_size == 4
    assert view.input_ids.tolist() == [100, 101, 102, 0]
    assert view.out_cache_loc.tolist() == [200, 201, 202, 0]
    assert view.positions.tolist() == [1, 2, 3, 0]
    assert view.req_pool_indices.tolist() == [0, 1, 2, 0]
    assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [2, 3, 4, 1]
    assert (view.forward_mode, view.layout) == (ForwardMode.DECODE, batch.layout)
    assert view.logits_indices is batch.logits_indices
    after = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    assert all(after[name] is value for name, value in before.items())


def test_every_view_starts_at_its_buffers_address_whatever_the_size():
    registry = full_decode_registry()
    for raw, padded in ((8, 8), (1, 1), (3, 4)):
        batch = full_batch(raw)
        fill(registry, batch, raw, padded)
        view = registry.extract_buffer(
            padded_bs=padded, padded_num_tokens=padded, forward_batch_template=batch
        )
        for name in registry.slot_names():
            buffer = registry.get_slot(name).buffer
            assert buffer is not None
            assert getattr(view, name).data_ptr() == buffer.data_ptr(), name


def test_a_field_that_the_batch_lacks_stays_none_after_a_batch_that_had_it():
    """Else the graph would rotate text by an image's positions."""
    registry = full_decode_registry()
    fill(registry, full_batch(3), 3, 4)
    batch = full_batch(3)
    batch.mrope_positions = None
    fill(registry, batch, 3, 4)
    view = registry.extract_buffer(padded_bs=4, padded_num_tokens=4, forward_batch_template=batch)
    assert view.mrope_positions is None
    assert view.input_ids is not None


def test_computed_slots_are_exposed_though_the_template_has_none():
    registry = make_registry()
    registry.register_slot(bs_slot("hooked", post_fill=lambda *_: None))
    registry.register_slot(bs_slot("written", copy_from_fb=False))
    registry.register_slot(bs_slot("sourced", source_fn=lambda *_: numbers(2)))
    registry.register_slot(bs_slot("plain"))
    template = SimpleNamespace(batch_size=2, hooked=None, written=None, plain=None)
    view = registry.extract_buffer(
        padded_bs=4, padded_num_tokens=4, forward_batch_template=template
    )
    assert [len(view.hooked), len(view.written), len(view.sourced)] == [4, 4, 4]
    assert view.plain is None
    assert vars(template) == {"batch_size": 2, "hooked": None, "written": None, "plain": None}


def test_frozen_templates_work_too():
    @dataclass(frozen=True, slots=True)
    class Frozen:
        batch_size: int
        x: torch.Tensor

    registry = make_registry()
    registry.register_slot(bs_slot("x"))
    template = Frozen(2, numbers(2))
    view = registry.extract_buffer(
        padded_bs=4, padded_num_tokens=4, forward_batch_template=template
    )
    assert (view.batch_size, len(view.x), template.batch_size) == (4, 4, 2)


def test_a_view_larger_than_the_buffers_is_refused_by_the_slots_name():
    registry = make_registry()
    registry.register_slot(bs_slot("seq_lens"))
    with pytest.raises(ValueError, match="slot 'seq_lens': 9 rows"):
        registry.extract_buffer(
            padded_bs=9, padded_num_tokens=9, forward_batch_template=SimpleNamespace()
        )


# copy_slots.


def test_copy_slots_refreshes_the_first_rows_and_leaves_the_rest():
    registry = full_decode_registry()
    fill(registry, full_batch(8), 8, 8)
    registry.copy_slots(
        {
            "input_ids": numbers(2, first=50),
            "mrope_positions": numbers(3, 2, first=50),
            "global_num_tokens_gpu": numbers(4, dtype=torch.int32),
            "positions": None,
        }
    )
    assert content(registry, "input_ids") == [50, 51, 3, 4, 5, 6, 7, 8]
    assert [row[:3] for row in content(registry, "mrope_positions")] == [
        [50, 51, 3],
        [52, 53, 11],
        [54, 55, 19],
    ]
    assert content(registry, "global_num_tokens_gpu") == [1, 2, 3, 4]
    assert content(registry, "positions") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_copy_slots_skips_the_slots_own_view(monkeypatch: pytest.MonkeyPatch):
    registry = full_decode_registry()
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, _: copied.extend(to))
    own = registry.get_slot("input_ids").slice_for(4, 4)
    registry.copy_slots({"input_ids": own, "positions": numbers(4)})
    assert [tensor.data_ptr() for tensor in copied] == [
        registry.get_slot("positions").slice_for(1, 1).data_ptr()
    ]


def test_copy_slots_names_a_slot_that_it_cannot_fill():
    registry = make_registry()
    registry.register_slot(bs_slot("x"))
    registry.register_slot(bs_slot("off", enabled=False))
    with pytest.raises(KeyError, match="'y' is not registered"):
        registry.copy_slots({"y": numbers(1)})
    with pytest.raises(RuntimeError, match="slot 'off' has no buffer: it is disabled"):
        registry.copy_slots({"off": numbers(1)})
    with pytest.raises(ValueError, match="slot 'x': 9 rows"):
        registry.copy_slots({"x": numbers(9)})
    with pytest.raises(ValueError, match="slot 'x': the source has shape"):
        registry.copy_slots({"x": numbers(2, 2)})


# How it copies.


class Operations(TorchDispatchMode):
    """Collects the names of operations that compute, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def on_device(batch: FullBatch) -> FullBatch:
    """Moves all but the host mirror to a device that, like a GPU, is not the host."""
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor) and field.name != "seq_lens_cpu":
            setattr(batch, field.name, value.to("meta"))
    return batch


def operations_of(
    registry: CudaGraphBufferRegistry, batch: Any, raw: int, padded: int
) -> list[str]:
    """Returns what a fill runs that is not the first of its kind."""
    fill(registry, batch, raw, padded)
    with Operations() as operations:
        fill(registry, batch, raw, padded)
    return sorted(operations.names)


def test_a_padded_fill_is_one_operation_per_pair_of_types_and_one_per_type_of_tail():
    """Each operation is a kernel launch on a GPU, several microseconds apiece."""
    registry = full_decode_registry(device="meta")
    names = operations_of(registry, on_device(full_batch(3)), 3, 4)
    # int64, bool, int32; tails of int64 and bool; mrope_positions [:, :3] is not dense.
    of_the_device = ["_foreach_copy_"] * (3 + 1) + ["_foreach_zero_"] * (2 + 1)
    assert names == [*of_the_device, "copy_", "fill_"]  # and the host mirror's


def test_an_exact_fill_is_one_operation_per_pair_of_types():
    registry = full_decode_registry(device="meta")
    names = operations_of(registry, on_device(full_batch(8)), 8, 8)
    assert names == ["_foreach_copy_"] * 3 + ["copy_"]


def test_no_group_of_a_device_mixes_types_or_strided_with_dense_tensors():
    """The fused kernel takes one type per side; a call with two copies one by one."""
    registry = full_decode_registry(device="meta")
    batch = on_device(full_batch(3))
    batch.input_ids = numbers(3, dtype=torch.int32).to("meta")
    groups: list[set[Any]] = []

    def copy(to: Any, of: Any) -> None:
        pairs = zip(to, of, strict=True)
        groups.append({(a.dtype, b.dtype, a.is_contiguous(), a.device) for a, b in pairs})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", copy)
        fill(registry, batch, 3, 4)
    assert [len(group) for group in groups] == [1] * 5  # int64, bool, int32, to int64, strided
    assert len(set.union(*groups)) == 5


def test_on_the_host_all_copies_are_one_operation_and_all_tails_another():
    """Nothing is fused there, and a call costs as much as two copies."""
    batch = full_batch(3)
    batch.input_ids = numbers(3, dtype=torch.int32)
    names = operations_of(full_decode_registry(), batch, 3, 4)
    assert names == ["_foreach_copy_", "_foreach_zero_"]


def test_an_idle_ranks_fill_copies_its_sentinels_and_counts_only():
    registry = full_decode_registry(device="meta")
    names = operations_of(registry, on_device(full_batch(0)), 0, 4)
    # Sentinels and counts; tails as above; the host mirror's.
    assert names == ["_foreach_copy_"] * 2 + ["_foreach_zero_"] * 3 + ["fill_"]


def test_sources_of_another_type_get_a_group_of_their_own():
    batch = full_batch(8)
    batch.input_ids = numbers(8, dtype=torch.int32)
    names = operations_of(full_decode_registry(device="meta"), on_device(batch), 8, 8)
    assert names == ["_foreach_copy_"] * 4 + ["copy_"]


def test_counts_that_touch_in_memory_are_copied_as_one_and_others_are_left_alone():
    registry = full_decode_registry(num_dp_ranks=2)
    copied: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda to, _: copied.extend(to))
        fill(registry, SimpleNamespace(), 4, 4)
    assert [tensor.numel() for tensor in copied] == [1 + 2 + 2]

    fill(registry, full_batch(3), 3, 4)
    counts = [content(registry, name) for name in DECODE_TABLE if "num_token" in name]
    assert counts == [[3], [4, 4], [4, 4]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_counts_are_right_though_only_some_are_shared(order: tuple[int, int]):
    """Of the decode runner's counts, a prefill runner has one, and here it may have it first."""
    builders = [
        lambda: full_decode_registry(share_pool=True, num_dp_ranks=2),
        lambda: prefill_registry(share_pool=True, enable_num_token_non_padded=True),
    ]
    built = {i: builders[i]() for i in order}
    fill(built[0], full_batch(3), 3, 4)
    sizes = {"raw_bs": 1, "padded_bs": 1, "raw_num_tokens": 6, "padded_num_tokens": 8}
    built[1].fill_from(full_batch(1, num_tokens=6), **sizes)
    counts = [content(built[0], name) for name in DECODE_TABLE if "num_token" in name]
    assert counts == [[6], [4, 4], [4, 4]]


def test_counts_bound_from_one_tensor_leave_its_other_rows_alone():
    whole = torch.full((5,), -1, dtype=torch.int32)
    source = SimpleNamespace(
        **bound_buffers(),
        global_num_tokens_gpu=whole[0:1],
        global_num_tokens_for_logprob_gpu=whole[3:4],
    )
    registry = decode_registry(source=source, require_gathered_buffer=True)
    fill(registry, full_batch(3), 3, 4)
    assert whole.tolist() == [4, -1, -1, 4, -1]


def test_host_mirrors_and_strided_tensors_of_a_device_are_copied_one_by_one():
    """One of them in a group would send the whole group through the slow path."""
    registry = decode_registry(device="meta", register_global_num_tokens=False)
    batch = on_device(full_batch(3))
    registry.get_slot("seq_lens_cpu").allocated().fill_(9)
    copied: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda to, _: copied.append(len(to)))
        fill(registry, batch, 3, 4)
    # The sentinel's tail and five heads at once; mrope_positions [:, :3] by itself.
    assert sorted(copied) == [1, 6]
    assert content(registry, "seq_lens_cpu")[:5] == [1, 2, 3, 1, 9]


@pytest.mark.parametrize("raw", [250, 256])
@pytest.mark.parametrize("inference", [True, False])
def test_a_fill_of_a_seen_size_makes_no_tensor(raw: int, inference: bool):
    """Not even a view: a slice costs more than the copy that it is for."""
    registry = full_decode_registry(max_bs=256, max_num_token=256)
    with torch.inference_mode(inference):
        batches = [full_batch(raw, first=first) for first in (1, 2)]
        fill(registry, batches[0], raw, 256)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            for batch in batches * 2:
                fill(registry, batch, raw, 256)
    events = profile.events()
    assert events is not None
    names = {event.name for event in events}
    assert "aten::copy_" in names
    assert not names & {"aten::empty", "aten::slice", "aten::as_strided", "aten::empty_strided"}
    assert [event.name for event in events if event.self_cpu_memory_usage] == []


def test_a_second_fill_of_a_seen_size_allocates_nothing_lasting():
    registry = full_decode_registry(max_bs=64, max_num_token=64)
    sizes = [(raw, raw + raw % 2) for raw in range(1, 64)]
    batches = [full_batch(raw) for raw, _ in sizes]

    def step() -> None:
        for (raw, padded), batch in zip(sizes, batches, strict=True):
            fill(registry, batch, raw, padded)

    step()
    step()
    tracemalloc.start()
    try:
        step()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            step()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2000  # 1,260 fills; one kept view each would be over 100,000


def test_sizes_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffer_registry, "MAX_CACHED_SIZES", 4)
    registry = decode_registry()
    for raw in (1, 2, 3, 4, 5, 6, 7, 8, 1):
        fill(registry, full_batch(raw), raw, raw)
        assert content(registry, "input_ids")[:raw] == list(range(1, raw + 1))
    assert registry._plan.cache_info().currsize == 4


# Sharing.


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_runners_of_one_size_share_storage_whoever_comes_first(order: tuple[int, int]):
    builders = [
        lambda: decode_registry(share_pool=True),
        lambda: build_eager_registry(
            device="cpu", max_bs=8, max_num_token=32, cache_loc_dtype=INT64
        ),
    ]
    built = {i: builders[i]() for i in order}
    decode, eager = built[0], built[1]

    def is_shared(name: str) -> bool:
        return (
            decode.get_slot(name).slice_for(1, 1).data_ptr()
            == eager.get_slot(name).slice_for(1, 1).data_ptr()
        )

    shared = {name for name in eager.slot_names() if is_shared(name)}
    assert shared == {"req_pool_indices", "seq_lens", "seq_lens_cpu"}  # 8 sequences each


def test_a_registry_that_does_not_share_has_storage_of_its_own():
    first, second = decode_registry(share_pool=False), decode_registry(share_pool=False)
    first.get_slot("seq_lens").slice_for(8, 8).fill_(7)
    assert content(second, "seq_lens") == [1] * 8


def test_reset_for_capture_takes_away_what_another_runner_left():
    busy = full_decode_registry(share_pool=True)
    registry = full_decode_registry(share_pool=True, encoder_len_fill_value=3)
    fill(busy, full_batch(8, first=90), 8, 8)
    assert content(registry, "out_cache_loc")[0] == 90
    registry.reset_for_capture()
    for name in INDEX_SEMANTIC_BUFFERS:
        assert not registry.get_slot(name).slice_for(8, 8).any(), name
    assert content(registry, "seq_lens") == content(registry, "seq_lens_cpu") == [1] * 8
    assert content(registry, "encoder_lens") == [3] * 8
    assert content(registry, "input_ids")[0] == 90  # any valid id will do


def test_a_new_registry_sets_its_sentinels_in_storage_that_another_has_used():
    busy = full_decode_registry(share_pool=True)
    fill(busy, full_batch(8, first=90), 8, 8)
    registry = full_decode_registry(share_pool=True, encoder_len_fill_value=3)
    assert content(registry, "seq_lens") == content(registry, "seq_lens_cpu") == [1] * 8
    assert content(registry, "encoder_lens") == [3] * 8
    assert content(registry, "out_cache_loc")[0] == 90  # see reset_for_capture


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
    )
    counted = [name for name in DECODE_TABLE if "num_token" in name]
    assert table_of(registry) == {k: v for k, v in DECODE_TABLE.items() if k not in counted}


def test_slots_that_were_not_asked_for_are_not_there():
    decode = decode_registry(register_global_num_tokens=False)
    assert set(decode.slot_names()) == {
        "input_ids",
        "positions",
        "out_cache_loc",
        "req_pool_indices",
        "seq_lens",
        "seq_lens_cpu",
        "mrope_positions",
    }
    assert prefill_registry().slot_names() == ["input_ids", "positions", "out_cache_loc"]
    text_embeds = prefill_registry(is_multimodal=True, register_input_embeds=False)
    assert "input_embeds" not in text_embeds.slot_names()


@pytest.mark.parametrize("build", [full_decode_registry, prefill_registry])
def test_everything_used_as_an_index_is_zeroed(build: Any):
    registry = build(enable_mamba_track=True)
    for name in INDEX_SEMANTIC_BUFFERS.intersection(registry.slot_names()):
        assert registry.get_slot(name).padding_policy is ZERO, name


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
    on_host = {
        name
        for name in registry.slot_names()
        if registry.get_slot(name).allocated().device.type == "cpu"
    }
    assert on_host == {"seq_lens_cpu"}.intersection(registry.slot_names())


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
        is_multimodal=True,
        hidden_size=2,
        embed_dtype=torch.float32,
        enable_mamba_track=True,
    )
    sizes = {"raw_bs": 4, "padded_bs": 4, "raw_num_tokens": 16, "padded_num_tokens": 16}
    registry.fill_from(full_batch(4, num_tokens=16), **sizes)
    registry.get_slot("input_embeds").allocated().fill_(7)
    sizes = {"raw_bs": 1, "padded_bs": 3, "raw_num_tokens": 5, "padded_num_tokens": 8}
    registry.fill_from(full_batch(1, num_tokens=5), **sizes)
    for name in registry.slot_names():
        slot = registry.get_slot(name)
        axis = slot.row_axis()
        raw, padded, end = (1, 3, 4) if slot.axis == "bs" else (5, 8, 16)
        whole = slot.allocated()
        assert whole.narrow(axis, 0, raw).all(), name
        assert not whole.narrow(axis, raw, padded - raw).any(), name
        assert whole.narrow(axis, padded, end - padded).all(), name


def test_input_embeds_is_written_by_the_model_and_only_its_tail_is_reset():
    registry = prefill_registry(is_multimodal=True, hidden_size=2, embed_dtype=torch.float32)
    registry.get_slot("input_embeds").slice_for(0, 16).fill_(7)
    batch = full_batch(1, num_tokens=3)
    batch.input_embeds = torch.ones(3, 2)
    registry.fill_from(batch, raw_bs=1, padded_bs=1, raw_num_tokens=3, padded_num_tokens=4)
    assert content(registry, "input_embeds")[:5] == [[7, 7], [7, 7], [7, 7], [0, 0], [7, 7]]


def test_input_embeds_without_a_width_is_refused():
    with pytest.raises(ValueError, match="slot 'input_embeds': hidden_size=0"):
        prefill_registry(is_multimodal=True, embed_dtype=torch.bfloat16)


def test_padded_encoder_lengths_keep_the_first_value():
    registry = full_decode_registry(encoder_len_fill_value=9)
    fill(registry, full_batch(3), 3, 4)
    assert content(registry, "encoder_lens") == [1, 2, 3, 9, 9, 9, 9, 9]
    fill(registry, full_batch(2, first=5), 2, 4)
    assert content(registry, "encoder_lens") == [5, 6, 3, 9, 9, 9, 9, 9]


# Adopting a runner's own buffers.


def test_the_factory_adopts_every_tensor_of_the_source_as_it_is():
    source = SimpleNamespace(
        **(
            bound_buffers()
            | {"seq_lens": torch.full((8,), 6, dtype=torch.int32)}
            | {"seq_lens_cpu": torch.full((8,), 6, dtype=torch.int32)}
        ),
        global_num_tokens_gpu=torch.zeros(1, dtype=torch.int32),
        global_num_tokens_for_logprob_gpu=torch.zeros(1, dtype=torch.int32),
    )
    registry = decode_registry(source=source, share_pool=True)
    for name in registry.slot_names():
        assert registry.get_slot(name).buffer is getattr(source, name), name
    assert registry.get_slot("seq_lens").dtype is torch.int32
    assert registry.get_slot("seq_lens_cpu").dtype is torch.int32
    assert source.seq_lens.tolist() == [6] * 8


@pytest.mark.parametrize("name", ["positions", "mrope_positions", "global_num_tokens_gpu"])
def test_a_tensor_that_the_source_lacks_is_named(name: str):
    counts = {
        "global_num_tokens_gpu": torch.zeros(1, dtype=torch.int32),
        "global_num_tokens_for_logprob_gpu": torch.zeros(1, dtype=torch.int32),
    }
    buffers: dict[str, Any] = {**bound_buffers(), **counts}
    buffers[name] = None
    with pytest.raises(ValueError, match=f"slot '{name}': source has no tensor"):
        decode_registry(source=SimpleNamespace(**buffers))


def test_the_prefill_factory_adopts_a_source_too():
    ids = torch.zeros(16, dtype=INT64)
    source = SimpleNamespace(
        input_ids=ids, positions=ids.clone(), out_cache_loc=torch.zeros(16, dtype=torch.int32)
    )
    assert prefill_registry(source=source).get_slot("input_ids").buffer is ids
    with pytest.raises(ValueError, match="slot 'positions': source has no tensor"):
        prefill_registry(source=SimpleNamespace(input_ids=ids))


# Counts.


@pytest.mark.parametrize(
    ("real", "padded", "size", "expected"),
    [
        (1018, 1024, 2, [512, 506]),
        (1024, 1024, 2, [512, 512]),
        (512, 1024, 2, [512, 0]),
        (100, 1024, 4, [100, 0, 0, 0]),  # split by the padded rows, not by the real ones
        (0, 8, 2, [0, 0]),
        (5, 8, 1, [5]),
    ],
)
def test_real_rows_are_split_as_the_padded_rows_are(
    real: int, padded: int, size: int, expected: list[int]
):
    counts = [local_num_token_non_padded(real, padded, size, rank) for rank in range(size)]
    assert counts == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_ranks_real_rows_add_up_and_none_exceeds_its_share(seed: int):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 4, 8])
    padded = size * rng.randint(1, 200)
    real = rng.randint(0, padded)
    counts = [local_num_token_non_padded(real, padded, size, rank) for rank in range(size)]
    assert sum(counts) == real
    assert counts == sorted(counts, reverse=True)
    assert counts[0] <= padded // size


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
    view = registry.extract_buffer(padded_bs=4, padded_num_tokens=4, forward_batch_template=batch)
    for name in INDEX_SEMANTIC_BUFFERS:
        assert not getattr(view, name).any(), name
    assert view.seq_lens is not None
    assert view.seq_lens.tolist() == [1] * 4
    assert content(registry, "num_token_non_padded") == [0]
    assert content(registry, "global_num_tokens_gpu") == [4] * 4


def test_counts_are_written_again_though_the_sizes_are_the_same():
    registry = full_decode_registry()
    for _ in range(2):
        for name in DECODE_TABLE:
            if "num_token" in name:
                registry.get_slot(name).allocated().fill_(-1)
        fill(registry, full_batch(3), 3, 4)
        assert content(registry, "num_token_non_padded") == [3]
        assert content(registry, "global_num_tokens_gpu") == [4] * 4
        assert content(registry, "global_num_tokens_for_logprob_gpu") == [4] * 4


@pytest.mark.parametrize(("gather_all", "length"), [(True, 4), (False, 1)])
def test_every_rank_of_a_gather_runs_the_padded_size(gather_all: bool, length: int):
    registry = full_decode_registry(require_mlp_tp_gather=gather_all)
    fill(registry, full_batch(3), 3, 6)
    for name in ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"):
        assert content(registry, name) == [6] * length


def test_without_a_gathered_buffer_global_counts_stay_as_they_are():
    registry = full_decode_registry(require_gathered_buffer=False)
    fill(registry, full_batch(3), 3, 6)
    assert content(registry, "global_num_tokens_gpu") == [0] * 4
    view = registry.extract_buffer(
        padded_bs=6, padded_num_tokens=6, forward_batch_template=full_batch(3)
    )
    assert view.global_num_tokens_gpu is not None


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
    registry = make_registry()
    registry.register_slot(bs_slot("staged"))
    registry.register_slot(bs_slot("hidden", dtype=torch.float32))
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
