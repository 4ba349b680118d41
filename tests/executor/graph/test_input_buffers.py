"""Two graphs that read each other's buffers at the wrong moment, or a moved one, answer nonsense."""

import itertools
from contextlib import suppress

import pytest
import torch

from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.graph.input_buffers import (
    InputBufferPool,
    fresh_input_buffer_pool,
    share_input_buffer,
)
from executor.graph.slots import GraphSlot


def test_the_first_buffer_of_a_kind_is_everyones_from_then_on(pool: InputBufferPool):
    first = torch.zeros(8, dtype=torch.int64)
    assert share_input_buffer("seq_lens", first) is first
    second = share_input_buffer("seq_lens", torch.ones(8, dtype=torch.int64))
    second[3] = 7
    assert first.tolist() == [0, 0, 0, 7, 0, 0, 0, 0]
    assert len(pool) == 1


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("positions", torch.zeros(8, dtype=torch.int64)),
        ("seq_lens", torch.zeros(9, dtype=torch.int64)),
        ("seq_lens", torch.zeros(8, dtype=torch.int32)),
        ("seq_lens", torch.zeros(8, dtype=torch.int64, device="meta")),
    ],
)
def test_another_name_size_type_or_device_gets_its_own_storage(
    name: str, other: torch.Tensor, pool: InputBufferPool
):
    share_input_buffer("seq_lens", torch.zeros(8, dtype=torch.int64))
    assert share_input_buffer(name, other) is other
    assert len(pool) == 2


def test_a_later_buffer_keeps_its_own_shape_and_strides():
    first = share_input_buffer("hidden", torch.arange(12))
    rows = share_input_buffer("hidden", torch.zeros(3, 4, dtype=torch.int64))
    columns = share_input_buffer("hidden", torch.zeros(3, 4, dtype=torch.int64).t())
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert (columns.shape, columns.stride()) == ((4, 3), (1, 4))
    assert first.data_ptr() == rows.data_ptr() == columns.data_ptr()


def test_who_shares_does_not_depend_on_the_order():
    kinds = [("a", 4), ("b", 4), ("a", 8), ("a", 4), ("b", 4)]
    partitions = set()
    for order in itertools.permutations(range(len(kinds))):
        with fresh_input_buffer_pool():
            made = {i: share_input_buffer(kinds[i][0], torch.zeros(kinds[i][1])) for i in order}
        address = {i: tensor.data_ptr() for i, tensor in made.items()}
        together = frozenset(
            frozenset(j for j in address if address[j] == address[i]) for i in address
        )
        partitions.add(together)
    assert partitions == {frozenset({frozenset({0, 3}), frozenset({1, 4}), frozenset({2})})}


def test_an_address_that_a_graph_may_have_captured_never_moves():
    first = share_input_buffer("ids", torch.zeros(8))
    address = first.data_ptr()
    del first
    for size in (4, 8, 16, 8):
        share_input_buffer("ids", torch.ones(size))
    assert share_input_buffer("ids", torch.ones(8)).data_ptr() == address


def test_a_view_into_a_larger_tensor_shares_only_its_own_part():
    whole = torch.zeros(10, dtype=torch.int64)
    share_input_buffer("ids", whole[2:6])
    share_input_buffer("ids", torch.zeros(4, dtype=torch.int64)).fill_(1)
    assert whole.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(4, 6)[:, :3], torch.zeros(8)[::2], torch.zeros(1).expand(4)],
    ids=["gaps between rows", "gaps between elements", "overlapping"],
)
def test_a_buffer_with_gaps_or_overlaps_is_refused_by_name(buffer: torch.Tensor):
    """Its strides, laid over another's storage, would run past the end."""
    with pytest.raises(ValueError, match="buffer 'hidden': shape"):
        share_input_buffer("hidden", buffer)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1, 5), (5, 1)])
def test_odd_shapes_share_too(shape: tuple[int, ...]):
    first = share_input_buffer("x", torch.zeros(shape))
    second = share_input_buffer("x", torch.zeros(shape))
    assert second.shape == shape
    assert first.data_ptr() == second.data_ptr()


def test_a_single_row_of_a_wider_tensor_has_no_gaps():
    row = torch.zeros(4, 6)[:1, :3]
    assert share_input_buffer("x", row) is row


def test_a_constant_that_depends_on_a_runners_width_is_never_shared(pool: InputBufferPool):
    """Of two widths, the narrower graph would gather out of bounds."""
    narrow = share_input_buffer("select_index", torch.zeros(8))
    wide = share_input_buffer("select_index", torch.ones(8))
    assert narrow.data_ptr() != wide.data_ptr()
    assert len(pool) == 0

    registries = [
        CudaGraphBufferRegistry(device="cpu", max_bs=8, max_num_tokens=8, share_pool=True)
        for _ in range(2)
    ]
    for registry in registries:
        registry.register_slot(GraphSlot("select_index", lambda b, t: (b,), torch.int64, axis="bs"))
    addresses = {r.get_slot("select_index").allocated().data_ptr() for r in registries}
    assert len(addresses) == 2


def test_a_fresh_pool_ends_with_its_block_even_if_that_fails():
    outer = share_input_buffer("ids", torch.zeros(8))
    with suppress(RuntimeError), fresh_input_buffer_pool():
        assert share_input_buffer("ids", torch.ones(8)).data_ptr() != outer.data_ptr()
        raise RuntimeError
    assert share_input_buffer("ids", torch.ones(8)).data_ptr() == outer.data_ptr()
