"""If these fail, a graph reads inputs of another size than its own, or at a moved address."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.parallel.layout import DpLayout
from tests.executor.graph.registry_cases import (
    bs_slot,
    fill,
    full_batch,
    full_decode_registry,
    make_registry,
    numbers,
    view_of,
)


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
    view = view_of(registry, batch, 4)

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
        view = view_of(registry, batch, padded)
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
    view = view_of(registry, batch, 4)
    assert view.mrope_positions is None
    assert view.input_ids is not None


def test_computed_slots_are_exposed_though_the_template_has_none():
    registry = make_registry(
        bs_slot("hooked", post_fill=lambda *_: None),
        bs_slot("written", copy_from_fb=False),
        bs_slot("sourced", source_fn=lambda *_: numbers(2)),
        bs_slot("plain"),
    )
    template = SimpleNamespace(batch_size=2, hooked=None, written=None, plain=None)
    view = view_of(registry, template, 4)
    assert [len(view.hooked), len(view.written), len(view.sourced)] == [4, 4, 4]
    assert view.plain is None
    assert vars(template) == {"batch_size": 2, "hooked": None, "written": None, "plain": None}


def test_frozen_templates_work_too():
    @dataclass(frozen=True, slots=True)
    class Frozen:
        batch_size: int
        x: torch.Tensor

    registry = make_registry(bs_slot("x"))
    template = Frozen(2, numbers(2))
    view = view_of(registry, template, 4)
    assert (view.batch_size, len(view.x), template.batch_size) == (4, 4, 2)
