"""A fill runs before every replay: what it dispatches and allocates is time that a GPU waits."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.graph import cuda_graph_buffer_registry as buffer_registry
from executor.graph.cuda_graph_buffer_registry import (
    CudaGraphBufferRegistry,
    GraphSlot,
    PaddingPolicy,
)
from tests.executor.graph.registry_cases import (
    content,
    decode_registry,
    fill,
    full_batch,
    full_decode_registry,
    make_registry,
    numbers,
)


class Operations(TorchDispatchMode):
    """Collects the names of operations that compute, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def on_device(batch: SimpleNamespace) -> SimpleNamespace:
    """Moves all but the host mirror to a device that, like a GPU, is not the host."""
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor) and name != "seq_lens_cpu":
            setattr(batch, name, value.to("meta"))
    return batch


def operations_of(
    registry: CudaGraphBufferRegistry, batch: Any, raw: int, padded: int
) -> list[str]:
    """Returns what a fill runs that is not the first of its kind."""
    fill(registry, batch, raw, padded)
    with Operations() as operations:
        fill(registry, batch, raw, padded)
    return sorted(operations.names)


@pytest.mark.parametrize(
    ("device", "raw", "padded", "has_other_type", "num_copies", "num_resets"),
    [
        # int64, bool, int32; tails of int64 and bool; mrope_positions [:, :3] is not dense.
        # And the host mirror's head; its tail needs none.
        ("meta", 3, 4, False, 3 + 1 + 1, 2 + 1),
        ("meta", 8, 8, False, 3 + 1, 0),  # the host mirror
        ("meta", 8, 8, True, 4 + 1, 0),
        # An idle rank: sentinels and counts; tails as above. The host mirror's tail needs none.
        ("meta", 0, 4, False, 2, 3),
        # On the host nothing is fused, and a call costs as much as two copies.
        ("cpu", 3, 4, True, 1, 1),
        ("cpu", 0, 4, False, 0, 1),  # nor do constants need one
    ],
    ids=["padded", "exact", "another type", "idle", "host", "idle host"],
)
def test_a_fill_is_one_operation_per_pair_of_types_and_one_per_type_of_tail(
    device: str, raw: int, padded: int, has_other_type: bool, num_copies: int, num_resets: int
):
    """Each operation is a kernel launch on a GPU, several microseconds apiece."""
    batch = full_batch(raw)
    if has_other_type:
        batch.input_ids = numbers(raw, dtype=torch.int32)
    batch = batch if device == "cpu" else on_device(batch)
    names = operations_of(full_decode_registry(device=device), batch, raw, padded)
    assert names == ["_foreach_copy_"] * num_copies + ["_foreach_zero_"] * num_resets


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
    # int64, bool, int32, to int64, strided, on the host
    assert [len(group) for group in groups] == [1] * 6
    assert len(set.union(*groups)) == 6


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.bfloat16, -2.5), (torch.float64, float("inf")), (torch.int16, -7), (torch.bool, True)],
)
@pytest.mark.parametrize("is_strided", [False, True])
def test_a_constant_is_written_whatever_its_type_and_layout(
    dtype: torch.dtype, value: float, is_strided: bool
):
    registry = make_registry(
        GraphSlot(
            "x",
            (lambda _, most: (2, most)) if is_strided else (lambda _, most: (most, 2)),
            dtype,
            padding_policy=PaddingPolicy.FILL_SENTINEL,
            pad_value=value,
            slice_fn=(lambda buffer, n: buffer[:, :n]) if is_strided else None,
        )
    )
    buffer = registry.get_slot("x").allocated()
    for _ in range(2):
        buffer.zero_()
        fill(registry, SimpleNamespace(), 3, 5)
        rows = buffer.T if is_strided else buffer
        assert rows[3:5].tolist() == [[value] * 2] * 2
        assert not rows[:3].any()
        assert not rows[5:].any()


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


def test_what_a_steady_batchs_tensors_become_is_noticed():
    """A fill may remember sizes of sources, never which tensors they were or what these held."""
    registry = full_decode_registry()
    batch = full_batch(3)
    for _ in range(2):
        fill(registry, batch, 3, 4)
    batch.positions = numbers(3, first=7)  # another tensor of the same size
    batch.input_ids.add_(10)  # the same tensor, written to
    fill(registry, batch, 3, 4)
    assert content(registry, "positions")[:4] == [7, 8, 9, 0]
    assert content(registry, "input_ids")[:3] == [11, 12, 13]

    batch.positions = numbers(1, first=5)  # would be broadcast
    with pytest.raises(ValueError, match=r"'positions'.*\(1,\).*\(3,\)"):
        fill(registry, batch, 3, 4)
    batch.positions = numbers(3)
    batch.input_ids.resize_(1)  # the same tensor, of another size
    with pytest.raises(ValueError, match=r"'input_ids'.*\(1,\).*\(3,\)"):
        fill(registry, batch, 3, 4)
    assert content(registry, "positions")[:4] == [7, 8, 9, 0]


def test_a_second_fill_of_a_seen_size_allocates_nothing_lasting():
    registry = full_decode_registry(max_bs=64, max_num_token=64)
    sizes = [(raw, raw + raw % 2) for raw in range(1, 64)]
    batches = [full_batch(raw) for raw, _ in sizes]

    def step() -> None:
        for (raw, padded), batch in zip(sizes, batches, strict=True):
            fill(registry, batch, raw, padded)

    def allocated() -> int:
        """Returns bytes that fills have allocated and not freed: threads of others allocate too."""
        fills = tracemalloc.Filter(True, str(Path(buffer_registry.__file__).parent / "*"))
        traces = tracemalloc.take_snapshot().filter_traces([fills]).traces
        return sum(trace.size for trace in traces)

    step()
    step()
    tracemalloc.start()
    try:
        step()
        before = allocated()
        for _ in range(20):
            step()
        after = allocated()
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
