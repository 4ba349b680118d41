"""The columns of a step on their way to the device: one buffer, one copy, views on both sides.

    host slot     input_ids | positions | out_cache_loc | req_pool_indices | ...   NumPy arrays
                  └────────────── one copy of the part in use ──────────────┘
    device slot   input_ids | positions | out_cache_loc | req_pool_indices | ...   tensors

Slots rotate, so that the host writes a step's columns while the device still reads the last one's.
Where the device is the host, a slot is one piece of memory and nothing is copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]
T = TypeVar("T")

ALIGNMENT = 8  # entries: every column begins on a cache line, and where a wide load may
MAX_CACHED_VIEWS = 128  # per slot: a decode's new blocks, 0 to some dozens, beside a steady batch


class StepInputs(NamedTuple, Generic[T]):
    """One thing for each column of a step, in the order in which they lie in a slot.

    Attributes:
        input_ids, positions, out_cache_loc: [T], as in ForwardBatch.
        req_pool_indices, seq_lens: [B], as in ForwardBatch.
        logits_indices: [L], as in ForwardBatch.
        sampled_rows, sampled_positions: [S] row of the block table that samples, and the
            position of its new token.
        sampled_at: [S] rows of logits to sample from; empty if these are all rows.
        unknown_rows: [U] whose last sampled token an input is.
        unknown_at: [U] places of these inputs; empty if these are all inputs, in order.
        block_places, block_ids: [N] what changes in the block table, laid flat.
        start_rows: [A] rows that begin.
        start_parameters: [A * PARAMETER_WIDTH] their sampling parameters, as the sampler packs
            them.
    """

    input_ids: T
    positions: T
    out_cache_loc: T
    req_pool_indices: T
    seq_lens: T
    logits_indices: T
    sampled_rows: T
    sampled_positions: T
    sampled_at: T
    unknown_rows: T
    unknown_at: T
    block_places: T
    block_ids: T
    start_rows: T
    start_parameters: T


class Event(Protocol):
    """A point in the device's work. ``torch.cuda.Event`` is one."""

    def record(self) -> Any:
        """Moves the point behind all work begun so far."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has come to the point; returns at once if there is none."""
        ...


class Copier(Protocol):
    """How numbers get to the device and back. The only thing here that knows what a device is.

    Attributes:
        is_shared: Whether host and device are one memory, so that ``copy`` is never needed.
    """

    @property
    def is_shared(self) -> bool: ...

    def host_buffer(self, size: int) -> torch.Tensor:
        """Returns int64 [size] on the host, which the device can read and write by itself."""
        ...

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        """Returns the device's counterpart of a host buffer; itself if memory is shared."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins a copy after all work begun so far; may return before it is done."""
        ...

    def event(self) -> Event:
        """Returns an event without a point."""
        ...


class SharedMemory:
    """The copier of the CPU, where there is nothing to copy and nothing to wait for."""

    is_shared = True

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Does nothing: the target is the source."""

    def event(self) -> Event:
        return _Passed()


class _Passed:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class PinnedMemory:
    """The copier of CUDA: pinned host memory, copies in the order of the current stream.

    Args:
        device: The current CUDA device; its current stream must stay the same.
    """

    is_shared = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(host, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        # Waits by spinning: a blocking wait wakes up later than a short step takes.
        return torch.cuda.Event()  # type: ignore[no-untyped-call]


def copier_for(device: torch.device) -> Copier:
    """Returns how numbers get to a device."""
    return PinnedMemory(device) if device.type == "cuda" else SharedMemory()


def to_device(values: Int64Array | npt.NDArray[np.float32], device: torch.device) -> torch.Tensor:
    """Returns an array as a tensor, without waiting for the device.

    For what few steps need. What every step needs goes through a ``StagingBuffer``.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    # Pinned memory comes from PyTorch's pool, which keeps it until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Staged:
    """The columns of one step, in one slot.

    Attributes:
        arrays: int64, to be written before ``StagingBuffer.send``.
        tensors: int64, the same columns on the device, valid after it.
        host: All columns and the gaps between them.
        device: Its counterpart.
    """

    arrays: StepInputs[Int64Array]
    tensors: StepInputs[torch.Tensor]
    host: torch.Tensor
    device: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Slot:
    """Memory for the columns of one step.

    Attributes:
        last_use: Behind all work that reads the slot's last step.
        views: Views by the lengths of their columns: they cost more than what is written
            through them (tests/bench/executor/bench_staging.py), and lengths repeat.
    """

    host: torch.Tensor
    device: torch.Tensor
    last_use: Event
    views: dict[StepInputs[int], Staged] = field(default_factory=dict)


class StagingBuffer:
    """Slots for the columns of a step, used in turn. Nothing is allocated after start but views.

    A step's arrays and tensors hold until ``num_slots - 1`` more steps have begun.

    Args:
        capacity: The most entries of each column.
        num_slots: Steps in flight at most, and one.
        copier: How columns get to the device.
    """

    def __init__(self, capacity: StepInputs[int], num_slots: int, copier: Copier) -> None:
        assert num_slots >= 1, f"num_slots={num_slots}: need at least 1"
        self._capacity = capacity
        self._copier = copier
        size = sum(map(_room, capacity))
        self._slots = [_new_slot(size, copier) for _ in range(num_slots)]
        self._turn = 0

    def begin(self, lengths: StepInputs[int]) -> Staged:
        """Returns a slot's columns, which hold anything.

        Waits until the device has done with the step that had the slot before.

        Args:
            lengths: Entries of each column, within capacity: whoever reads steps has checked.
        """
        # Only now has all work of the last step begun, its forward pass included.
        self._slots[self._turn].last_use.record()
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        slot.last_use.synchronize()
        return slot.views.get(lengths) or self._lay_out(slot, lengths)

    def send(self, staged: Staged) -> None:
        """Begins the copy to the device; work begun later finds the columns there."""
        if not self._copier.is_shared and len(staged.host):
            self._copier.copy(staged.device, staged.host)

    def _lay_out(self, slot: _Slot, lengths: StepInputs[int]) -> Staged:
        ends = []
        end = 0
        for name, length, capacity in zip(StepInputs._fields, lengths, self._capacity, strict=True):
            assert length <= capacity, f"{name} has {length} entries; the slot has {capacity}"
            ends.append((end, end + length))
            end += _room(length)
        values = slot.host.numpy()
        staged = Staged(
            arrays=_each(lambda at: values[slice(*at)], ends),
            tensors=_each(lambda at: slot.device[slice(*at)], ends),
            host=slot.host[:end],
            device=slot.device[:end],
        )
        if len(slot.views) == MAX_CACHED_VIEWS:
            slot.views.clear()
        slot.views[lengths] = staged
        return staged


class ReadBack:
    """The way of a step's tokens to the host: one copy, one wait, and other work begun between.

    Args:
        capacity: The most tokens.
        copier: How they get there.
    """

    def __init__(self, capacity: int, copier: Copier) -> None:
        self._copier = copier
        self._host = copier.host_buffer(capacity)
        self._done = copier.event()
        self._tokens = self._host[:0]

    def begin(self, tokens: torch.Tensor) -> None:
        """Begins the copy. Device work that begins later is not waited for.

        Args:
            tokens: int64 [S] on the device.
        """
        if self._copier.is_shared:
            self._tokens = tokens
            return
        self._tokens = self._host[: len(tokens)]
        if len(tokens):
            self._copier.copy(self._tokens, tokens)
            self._done.record()

    def wait(self) -> Int64Array:
        """Returns the tokens of the last ``begin``, [S], as soon as they are on the host.

        The next ``begin`` overwrites them, unless memory is shared. Without tokens nothing waits.
        """
        if len(self._tokens):
            self._done.synchronize()
        array: Int64Array = self._tokens.numpy()
        return array


def _new_slot(size: int, copier: Copier) -> _Slot:
    host = copier.host_buffer(size)
    return _Slot(host, copier.device_buffer(host), copier.event())


def _room(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _each(view: Callable[[tuple[int, int]], T], ends: list[tuple[int, int]]) -> StepInputs[T]:
    return StepInputs[T](*map(view, ends))
