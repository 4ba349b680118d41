"""Staging: the columns of a step on their way to the device, in one buffer and one copy.

    host slot     input_ids | positions | out_cache_loc | req_pool_indices | ...   NumPy arrays
                  └────────────── one copy of the part in use ──────────────┘
    device slot   input_ids | positions | out_cache_loc | req_pool_indices | ...   tensors

Slots rotate, so that the host writes a step's columns while the device still reads the last one's.
Where the device is the host, a slot is one piece of memory and nothing is copied.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.columns import Int64Array
from executor.batch.kv_pool import KVPool
from executor.batch.read_step import PARAMETER_WIDTH, StepColumns, StepLimits

T = TypeVar("T")

_NOTHING = np.zeros(0, np.int64)

ALIGNMENT = 8  # entries: every column begins on a cache line, and where a wide load may
MAX_CACHED_VIEWS = 128  # per slot: a decode's new blocks, 0 to some dozens, beside a steady batch
NUM_SLOTS = 3  # the router's steps in flight, 2, and one


class StepInputs(NamedTuple, Generic[T]):
    """One item for each column of a step, in the order in which they lie in a slot.

    Attributes:
        input_ids, positions, out_cache_loc: [T], as in ForwardBatch.
        window_cache_loc: [T], likewise; empty if the KV pool has one group.
        req_pool_indices, seq_lens: [B], as in ForwardBatch.
        logits_indices: [L], as in ForwardBatch.
        sampled_rows, sampled_positions: [S] row of the block table that samples, and the
            position of its new token.
        sampled_at: [S] rows of logits to sample from; empty if these are all rows.
        unknown_rows: [U] whose last sampled token an input is.
        unknown_at: [U] indices of these inputs; empty if these are all inputs, in order.
        block_places, block_ids: [N] what changes in the block table, laid flat.
        start_rows: [A] rows that begin.
        start_parameters: [A * PARAMETER_WIDTH] their sampling parameters.
    """

    input_ids: T
    positions: T
    out_cache_loc: T
    window_cache_loc: T
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


class Copier:
    """Buffers of numbers on the host and on the device, and the copies between them.

    On CUDA the host's memory is pinned and copies run in the order of the current stream, which must
    stay the same. On the CPU both are one memory: there is nothing to copy and nothing to wait for.

    Attributes:
        is_shared: Whether they are one memory, so that ``copy`` is never needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_shared = device.type != "cuda"

    def host_buffer(self, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Returns zeros on the host, which the device can read and write by itself."""
        return torch.zeros(size, dtype=dtype, pin_memory=not self.is_shared)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        """Returns the device's counterpart of a host buffer; itself if memory is shared."""
        return host if self.is_shared else torch.zeros_like(host, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins a copy after all work begun so far; may return before it is done."""
        target.copy_(source, non_blocking=True)

    def event(self) -> "torch.cuda.Event | NoEvent":
        """Returns a point in the device's work, which its first ``record`` sets."""
        if self.is_shared:
            return NoEvent()
        # Waits by spinning: a blocking wait wakes up later than a short step takes.
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Makes the device this thread's: a wait would set up the first one's context beside it."""
        torch.cuda.set_device(self._device)


class NoEvent:
    """The event of a device whose work is done when the host goes on."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def to_device(
    values: Int64Array | npt.NDArray[np.floating[Any]], device: torch.device
) -> torch.Tensor:
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
        arrays: int64, on the host.
        tensors: int64, the same columns on the device.
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
    last_use: torch.cuda.Event | NoEvent
    views: dict[tuple[int, ...], Staged] = field(default_factory=dict)


class StagingBuffer:
    """Slots for the columns of a step, used in turn. Nothing is allocated after start but views.

    A step's columns hold until ``num_slots - 1`` more steps have been sent.

    Args:
        capacity: The most entries of each column.
        num_slots: Steps in flight at most, and one.
        copier: How columns get to the device.
    """

    def __init__(self, capacity: StepInputs[int], num_slots: int, copier: Copier) -> None:
        assert num_slots >= 1, f"num_slots={num_slots}: need at least 1"
        self._capacity = capacity
        self._copier = copier
        hosts = [copier.host_buffer(sum(map(_aligned, capacity))) for _ in range(num_slots)]
        self._slots = [_Slot(host, copier.device_buffer(host), copier.event()) for host in hosts]
        self._next = 0

    def send(self, inputs: StepInputs[Int64Array]) -> Staged:
        """Writes a step's columns to a slot and begins their copy to the device.

        Waits until the device has done with the step that had the slot before.

        Args:
            inputs: int64, within capacity.
        """
        # Only now has all work of the last step begun, its forward pass included.
        self._slots[self._next].last_use.record()
        self._next = (self._next + 1) % len(self._slots)
        slot = self._slots[self._next]
        slot.last_use.synchronize()
        lengths = tuple(map(len, inputs))
        staged = slot.views.get(lengths) or self._lay_out(slot, lengths)
        for array, values in zip(staged.arrays, inputs, strict=True):
            if values.size:
                array[:] = values
        if not self._copier.is_shared and len(staged.host):
            self._copier.copy(staged.device, staged.host)
        return staged

    def _lay_out(self, slot: _Slot, lengths: tuple[int, ...]) -> Staged:
        for name, length, most in zip(StepInputs._fields, lengths, self._capacity, strict=True):
            assert length <= most, f"{name} has {length} entries; the slot has {most}"
        *firsts, end = accumulate(map(_aligned, lengths), initial=0)
        at = [slice(first, first + length) for first, length in zip(firsts, lengths, strict=True)]
        values = slot.host.numpy()
        if len(slot.views) == MAX_CACHED_VIEWS:
            slot.views.clear()
        slot.views[lengths] = Staged(
            arrays=StepInputs(*(values[column] for column in at)),
            tensors=StepInputs(*(slot.device[column] for column in at)),
            host=slot.host[:end],
            device=slot.device[:end],
        )
        return slot.views[lengths]


class ReadBack:
    """Numbers of a step on their way to the host: one copy, begun at once, and one wait.

    Each has pinned memory of its own, out of PyTorch's pool: with two steps in flight, two pieces take
    turns, and nothing overwrites what has not been read.

    Args:
        numbers: On the device. Work that begins later may write to them, unless memory is shared.
        copier: How they get there.
    """

    def __init__(self, numbers: torch.Tensor, copier: Copier) -> None:
        self._copier = copier
        self._host = numbers
        self._done: torch.cuda.Event | NoEvent | None = None
        if copier.is_shared:
            return
        self._host = copier.host_buffer(*numbers.shape, dtype=numbers.dtype)
        if len(numbers):
            copier.copy(self._host, numbers)
            self._done = copier.event()
            self._done.record()

    def wait(self) -> npt.NDArray[Any]:
        """Returns the numbers as soon as they are on the host, to any thread, as often as asked.

        Device work that began behind them is not waited for; without numbers, nothing is.
        """
        if self._done is not None:
            self._copier.enter_thread()
            self._done.synchronize()
        return self._host.numpy()


class StepStager:
    """Computes what follows from a step's columns, and sends it in one copy.

    Args:
        limits: What a step fits in.
        kv_pool: Keeps the block tables.
        copier: How columns get to the device.
    """

    def __init__(self, limits: StepLimits, kv_pool: KVPool, copier: Copier) -> None:
        self._kv_pool = kv_pool
        self._has_drafts = limits.speculation is not None
        self._has_window = kv_pool.shape.window is not None
        self._capacity = _capacity(limits)
        self._staging = StagingBuffer(self._capacity, NUM_SLOTS, copier)

    def stage(self, columns: StepColumns) -> Staged:
        """Writes the host's block tables, then all columns to a slot, and sends it."""
        rows, starts, is_sampled = columns.rows, columns.starts, columns.is_sampled
        if starts is not None and self._has_drafts:
            self._kv_pool.clear_rows(starts.rows)
        row_of, positions = _flatten(rows, columns.num_computed_tokens, columns.num_query_tokens)
        seq_lens = columns.num_computed_tokens + columns.num_query_tokens
        unknown = np.flatnonzero(columns.token_ids < 0)
        sequences = columns.logits_sequence[is_sampled]
        is_all = len(sequences) == len(is_sampled)
        places = self._write_blocks(columns)
        out_cache_loc, window_cache_loc = np.empty_like(positions), _NOTHING
        self._kv_pool.locate(row_of, positions, out=out_cache_loc)
        if self._has_window:
            window_cache_loc = np.empty_like(positions)
            self._kv_pool.locate(row_of, positions, out=window_cache_loc, group=1)
        return self._staging.send(
            StepInputs(
                input_ids=columns.token_ids,
                positions=positions,
                out_cache_loc=out_cache_loc,
                window_cache_loc=window_cache_loc,
                req_pool_indices=rows,
                seq_lens=seq_lens,
                logits_indices=columns.logits_indices,
                sampled_rows=rows[sequences],
                sampled_positions=seq_lens[sequences],
                sampled_at=_NOTHING if is_all else np.flatnonzero(is_sampled),
                unknown_rows=row_of[unknown],
                unknown_at=unknown if len(unknown) < len(row_of) else _NOTHING,
                block_places=places,
                block_ids=columns.new_block_ids if places.size else _NOTHING,
                start_rows=_NOTHING if starts is None else starts.rows,
                start_parameters=_NOTHING if starts is None else starts.packed_parameters,
            )
        )

    def _write_blocks(self, columns: StepColumns) -> Int64Array:
        """Writes the host's block tables. Returns the places to stage for the device's."""
        pool = self._kv_pool
        kept, new, ids = columns.num_kept_blocks, columns.num_new_blocks, columns.new_block_ids
        if not ids.size and (kept == pool.row_num_blocks[columns.rows]).all():
            return _NOTHING
        places = pool.append_blocks_on_host(columns.rows, kept, new, ids)
        if pool.is_table_shared:
            return _NOTHING
        if len(places) > self._capacity.block_places:
            pool.write_blocks(to_device(places, pool.device), to_device(ids, pool.device))
            return _NOTHING
        return places


def _capacity(limits: StepLimits) -> StepInputs[int]:
    """Returns the most entries of each column of a step."""
    budget = limits.budget
    num_tokens, num_seqs = budget.max_step_tokens, budget.max_num_seqs
    # Blocks for all of a step's tokens, and one each. Prefixes found in the cache bring more; a
    # step with that many goes another way.
    num_blocks = num_tokens // limits.block_size + 2 * num_seqs
    if limits.kv_window:
        num_blocks *= 2
    return StepInputs(
        input_ids=num_tokens,
        positions=num_tokens,
        out_cache_loc=num_tokens,
        window_cache_loc=num_tokens if limits.kv_window else 0,
        req_pool_indices=num_seqs,
        seq_lens=num_seqs,
        logits_indices=max(budget.max_num_logits, num_seqs * budget.num_tokens_per_bs),
        sampled_rows=num_seqs,
        sampled_positions=num_seqs,
        sampled_at=num_seqs,
        unknown_rows=num_tokens,
        unknown_at=num_tokens,
        block_places=num_blocks,
        block_ids=num_blocks,
        start_rows=num_seqs,
        start_parameters=num_seqs * PARAMETER_WIDTH,
    )


def _flatten(
    rows: Int64Array, num_computed: Int64Array, num_tokens: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Returns each token's row and its position in the sequence."""
    ends = np.cumsum(num_tokens)
    total = int(ends[-1]) if ends.size else 0
    if total == len(rows):
        return rows, num_computed
    shift = num_computed - (ends - num_tokens)
    return np.repeat(rows, num_tokens), np.arange(total) + np.repeat(shift, num_tokens)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
