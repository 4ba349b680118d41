"""A slot that is sized, named or padded wrongly must be refused before a graph is captured."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.graph.cuda_graph_buffer_registry import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
)
from tests.executor.graph.registry_cases import (
    INT64,
    P,
    bs_slot,
    content,
    fill,
    full_batch,
    full_decode_registry,
    make_registry,
    numbers,
    token_slot,
    view_of,
)

# Slots: specs and slices.


def test_an_unknown_axis_is_refused_by_the_slots_name():
    with pytest.raises(ValueError, match=r"slot 'seq_lens': axis='batch'"):
        GraphSlot("seq_lens", lambda b, t: (b,), INT64, axis="batch")  # type: ignore[arg-type]


def test_a_slice_fn_without_an_axis_is_refused_by_the_slots_name():
    with pytest.raises(ValueError, match=r"slot 'counts'.*slice_fn"):
        GraphSlot("counts", lambda b, t: (1,), INT64, axis="none", slice_fn=lambda b, n: b)


def parameters(function: Any) -> dict[str, Any]:
    """Returns parameters and defaults, in order; REQUIRED is the sign of none."""
    signature = inspect.signature(function).parameters
    return {name: p.default for name, p in signature.items() if name != "self"}


REQUIRED = inspect.Parameter.empty


def required(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, REQUIRED)


def test_slots_and_sizes_take_what_people_of_the_field_expect_in_that_order():
    policies = {"padding_policy": P.FOREACH_COPY, "pad_value": None}
    switches = {"enabled": True, "copy_from_fb": True}
    hooks = dict.fromkeys(("post_fill", "slice_fn", "source_fn"))
    spec = required("name", "shape_fn", "dtype") | {"axis": "tokens", "device": None}
    expected = spec | policies | switches | hooks
    assert list(parameters(GraphSlot).items()) == list(expected.items())
    sizes = required("raw_bs", "padded_bs", "raw_num_tokens", "padded_num_tokens")
    more = {"pp_proxy_tensors": None, "skip_slots": frozenset()}
    view = required("padded_bs", "padded_num_tokens", "forward_batch_template")
    registry = CudaGraphBufferRegistry
    assert parameters(FillContext) == sizes | {"pp_proxy_tensors": None}
    assert parameters(registry.fill_from) == required("forward_batch") | sizes | more
    assert parameters(registry.register_slot) == {"slot": REQUIRED, "bind": None}
    assert list(parameters(registry.extract_buffer)) == list(view)
    assert parameters(registry) == required("device", "max_bs", "max_num_tokens") | {
        "share_pool": False
    }


def test_the_decode_factory_takes_what_people_of_the_field_expect():
    off = ("enable_mamba_track", "is_encoder_decoder", "enable_num_token_non_padded")
    off += ("require_gathered_buffer", "require_mlp_tp_gather")
    on = ("register_global_num_tokens", "share_pool")
    expected = required("device", "max_bs", "max_num_token", "seq_len_fill_value")
    expected |= required("cache_loc_dtype") | dict.fromkeys(off, False) | dict.fromkeys(on, True)
    expected |= {"encoder_len_fill_value": 0, "num_dp_ranks": 1, "source": None}
    assert expected.items() <= parameters(build_decode_registry).items()


def test_slices_follow_the_slots_own_axis():
    registry = make_registry(
        bs_slot("rows"),
        token_slot("ids"),
        GraphSlot("counts", lambda b, t: (5,), INT64, axis="none"),
        GraphSlot("mrope", lambda b, t: (3, t), INT64, slice_fn=lambda buffer, n: buffer[:, :n]),
    )
    shapes = {name: registry.get_slot(name).slice_for(2, 7).shape for name in registry.slot_names()}
    assert shapes == {"rows": (2,), "ids": (7,), "counts": (5,), "mrope": (3, 7)}


@pytest.mark.parametrize("enabled", [True, False])
def test_slicing_before_allocation_says_which_slot_has_no_buffer(enabled: bool):
    slot = bs_slot("seq_lens", enabled=enabled)
    if not enabled:
        make_registry().register_slot(slot)
    with pytest.raises(RuntimeError, match=r"slot 'seq_lens' has no buffer"):
        slot.slice_for(1, 1)


@pytest.mark.parametrize(
    ("slot", "use"),
    [
        ("x", lambda registry: registry.get_slot("x").slice_for(9, 0)),
        ("x", lambda registry: fill(registry, SimpleNamespace(x=numbers(2)), 2, 9)),
        ("sourced", lambda registry: fill(registry, SimpleNamespace(nine=numbers(9)), 2, 4)),
        ("x", lambda registry: view_of(registry, SimpleNamespace(), 9)),
        ("x", lambda registry: registry.copy_slots({"x": numbers(9)})),
    ],
    ids=["slice", "fill", "source", "view", "copy"],
)
def test_more_rows_than_a_buffer_has_are_refused_by_the_slots_name(slot: str, use: Any):
    sourced = bs_slot("sourced", source_fn=lambda batch, context: getattr(batch, "nine", None))
    with pytest.raises(ValueError, match=f"slot '{slot}': 9 rows"):
        use(make_registry(bs_slot(padding_policy=P.ZERO), sourced))


@pytest.mark.parametrize("sizes", [(3, 2, 1, 1), (-1, 2, 1, 1), (1, 1, 5, 4)])
def test_sizes_that_do_not_fit_one_another_are_refused(sizes: tuple[int, int, int, int]):
    with pytest.raises(ValueError, match="need 0 <= raw <= padded"):
        FillContext(*sizes)


# Registration.


def test_a_name_is_taken_once_even_by_a_disabled_slot():
    registry = make_registry(bs_slot("x", enabled=False))
    with pytest.raises(ValueError, match="slot 'x' is registered already"):
        registry.register_slot(bs_slot("x"))


def test_a_slot_belongs_to_one_registry():
    slot = bs_slot("x")
    make_registry().register_slot(slot)
    with pytest.raises(ValueError, match="slot 'x' belongs to another registry"):
        make_registry().register_slot(slot)


def test_a_disabled_slot_keeps_its_spec_and_takes_part_in_nothing():
    registry = make_registry(bs_slot("on"), off := bs_slot("off", enabled=False))

    assert registry.get_slot("off") is off
    assert off.buffer is None
    assert (registry.has_slot("on"), registry.has_slot("off")) == (True, False)
    assert registry.slot_names() == ["on"]
    batch = SimpleNamespace(batch_size=2, on=numbers(2), off=numbers(2))
    fill(registry, batch, 2, 4)
    view = view_of(registry, batch, 4)
    assert view.off is batch.off
    assert len(view.on) == 4


def test_an_unknown_slot_is_named_with_those_there_are():
    registry = make_registry(bs_slot("seq_lens"))
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
    registry = make_registry(bs_slot(padding_policy=policy, pad_value=5))
    assert content(registry, "x") == [expected] * 8


def test_a_slot_lives_on_its_own_device_if_it_names_one():
    make_registry(on_device := bs_slot("a"), on_host := bs_slot("b", device="cpu"), device="meta")
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
    fill(other, full_batch(3, first=5), 3, 4)
    assert content(other, "seq_lens")[:4] == [5, 6, 7, 1]
    with torch.inference_mode():
        fill(registry, full_batch(3, first=8), 3, 4)
    assert content(registry, "seq_lens")[:4] == [8, 9, 10, 1]
