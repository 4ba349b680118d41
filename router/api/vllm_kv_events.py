"""Feed of the prefix caches' blocks: SubscribeKvEvents of vllm.grpc.engine.

A subscriber gets a snapshot, and from then on what is stored and removed, so that its table is what
the caches hold, a tenth of a second ago. Batches of each rank have numbers of their own, without
gaps; ranks are numbered on from group to group, as GetLoads does. When an executor is lost, blocks of
its rank are removed, and the others' stay. Who reads too slowly gets a new snapshot instead of what it
missed, and so does everybody when a group forms for the first time, or with other ranks or pools:

            ┌────────────── slow, epoch ──────────────┐
            ▼                                         │
    snapshot: chunk 0, "cleared" first, ... ──▶ stored, removed ...

A subscriber is told of blocks of its own cache scope only, since their tokens are prompts.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from operator import is_
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import structlog
from smg_grpc_proto.generated import common_pb2 as pb

from router.requests.request import Int32Array
from router.scheduling.kv.block_log import BlockEvent, BlockLog, BlockRun

log = structlog.stdlib.get_logger(__name__)

Message = Any

FLUSH_S = 0.1  # between two looks at the logs
CHUNK_BLOCKS = 512  # of a snapshot in one message
MAX_PENDING_BLOCKS = 65_536  # that a subscriber has not read; beyond, it gets a new snapshot
FIRST_NUMBER = 1 << 32  # of a rank's batches; a snapshot's chunks end at the last batch's number

# Fields on the wire: of KvEventBatch, of KvCacheEvent, of KvBlocksStored and of KvBlock.
_EVENT, _STORED, _CLEARED = b"\x1a", b"\x12", b"\x22\x00"
_BLOCK, _PARENT = b"\x0a", b"\x10"
_HASH, _TOKENS, _BLOCK_SIZE = b"\x08", b"\x12", b"\x18"
_HASH_BYTES, _TOKEN_BYTES = 10, 5  # of a number of 64 and of 32 bits, however small


class _Subscriber:
    """One call.

    Attributes:
        salt: Of the blocks that it is told of.
        lack: Why it needs a snapshot, if it does: new, epoch or slow.
        ranks: Whose events it gets.
        batches: What it has not read.
        has_news: Set when there is something to do for it.
    """

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.lack: str | None = None
        self.ranks: set[int] = set()
        self.batches: deque[tuple[Message, int]] = deque()
        self.has_news = asyncio.Event()
        self._num_pending = 0
        self.start_over("new")

    def start_over(self, why: str | None) -> None:
        """Drops what it has not read. It needs a snapshot unless one is begun: `why` is None."""
        self.lack, self._num_pending = why, 0
        self.ranks.clear()
        self.batches.clear()
        self.has_news.set()

    def add(self, batch: Message, num_blocks: int) -> None:
        self.batches.append((batch, num_blocks))
        self._num_pending += num_blocks
        self.has_news.set()
        if self._num_pending > MAX_PENDING_BLOCKS:
            self.start_over("slow")

    def take(self) -> Message:
        batch, num_blocks = self.batches.popleft()
        self._num_pending -= num_blocks
        return batch


class BlockFeed:
    """Tells subscribers what the prefix caches of a router hold.

    Args:
        block_logs: Returns the log of each rank, None for a group that has not formed.
        snapshots: Counts snapshots that were begun, by why.
    """

    def __init__(
        self, block_logs: Callable[[], list[BlockLog | None]], snapshots: Counter[str]
    ) -> None:
        self._block_logs = block_logs
        self._snapshots = snapshots
        self._logs: list[BlockLog | None] = []
        self._subscribers: list[_Subscriber] = []
        self._numbers: dict[tuple[int, bytes], int] = defaultdict(lambda: FIRST_NUMBER)
        self._flushing: asyncio.Task[None] | None = None

    async def serve(self, salt: bytes, write: Callable[[Message], Awaitable[None]]) -> NoReturn:
        """Tells one subscriber of a salt's blocks, until it is cancelled."""
        subscriber = _Subscriber(salt)
        self._subscribers.append(subscriber)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._keep_flushing())
        try:
            while True:
                await subscriber.has_news.wait()
                if subscriber.lack is not None:
                    await self._write_snapshot(subscriber, write)
                elif subscriber.batches:
                    await write(subscriber.take())
                else:
                    subscriber.has_news.clear()
        finally:
            self._subscribers.remove(subscriber)
            if not self._subscribers:
                self._flushing.cancel()
                self._flushing = None
                self._attach([])

    # ---- what happens

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                self.flush()
            except Exception:  # else subscribers would believe for ever what they were told last
                log.exception("kv_events_failed")
                for subscriber in self._subscribers:
                    subscriber.start_over("epoch")

    def flush(self) -> None:
        """Gives subscribers what the logs have noted."""
        logs = self._block_logs()
        if len(logs) != len(self._logs) or not all(map(is_, logs, self._logs)):
            self._attach(logs)
            for subscriber in self._subscribers:
                subscriber.start_over(subscriber.lack or "epoch")
        for rank, rank_log in enumerate(self._logs):
            if rank_log is not None and (events := rank_log.take()):
                for salt in {subscriber.salt for subscriber in self._subscribers}:
                    self._send(rank, salt, events)

    def _attach(self, logs: list[BlockLog | None]) -> None:
        for rank_log in self._logs:
            if rank_log is not None:
                rank_log.end()
        self._logs = logs
        for rank_log in logs:
            if rank_log is not None:
                rank_log.begin()

    def _send(self, rank: int, salt: bytes, events: Sequence[BlockEvent]) -> None:
        events = [event for event in events if event.salt == salt]
        if not events:
            return
        self._numbers[rank, salt] += 1
        batch, num_blocks = _batch(rank, self._numbers[rank, salt], events)
        for subscriber in self._subscribers:
            if subscriber.salt == salt and rank in subscriber.ranks:
                subscriber.add(batch, num_blocks)

    # ---- what there is

    async def _write_snapshot(
        self, subscriber: _Subscriber, write: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Writes what all ranks hold; gives up if that is to begin anew."""
        self.flush()
        assert subscriber.lack is not None
        self._snapshots[subscriber.lack] += 1
        subscriber.start_over(None)
        chunks: list[tuple[int, int, list[BlockRun]]] = []
        for rank, rank_log in enumerate(self._logs):
            if rank_log is not None:
                self.flush()
                subscriber.ranks.add(rank)  # it gets the rank's events from now on
                parts = _pack(rank_log.runs(subscriber.salt)) or [[]]
                first = self._numbers[rank, subscriber.salt] - len(parts) + 1
                chunks += [(rank, number, part) for number, part in enumerate(parts, first)]
                await asyncio.sleep(0)  # the engines go on between two ranks
            if subscriber.lack is not None:
                return
        chunks = chunks or [(0, self._numbers[0, subscriber.salt], [])]
        num_blocks = sum(len(run.block_ids) for _, _, runs in chunks for run in runs)
        for index, (rank, number, runs) in enumerate(chunks):
            batch, _ = _batch(rank, number, runs, is_cleared=index == 0)
            batch.snapshot.index, batch.snapshot.count = index, len(chunks)
            batch.snapshot.blocks = num_blocks
            await write(batch)
            if subscriber.lack is not None:
                return


def _pack(runs: list[BlockRun]) -> list[list[BlockRun]]:
    """Returns runs in order, so many of them together that they have `CHUNK_BLOCKS` at most."""
    chunks: list[list[BlockRun]] = []
    num_left = 0
    for run in runs:
        for start in range(0, len(run.block_ids), CHUNK_BLOCKS):
            part = run.part(start, start + CHUNK_BLOCKS)
            if num_left < len(part.block_ids):
                chunks.append([])
                num_left = CHUNK_BLOCKS
            chunks[-1].append(part)
            num_left -= len(part.block_ids)
    return chunks


def _batch(
    rank: int, number: int, events: Sequence[BlockEvent], *, is_cleared: bool = False
) -> tuple[Message, int]:
    """Returns a batch, and of how many blocks it tells.

    Its events are put together as bytes and read once: as objects, each would be copied twice.
    """
    stored = _stored([event for event in events if isinstance(event, BlockRun)])
    parts = [_part(_EVENT, _CLEARED)] if is_cleared else []
    num_blocks = 0
    for event in events:
        if isinstance(event, BlockRun):
            parts.append(_part(_EVENT, _part(_STORED, next(stored))))
            num_blocks += len(event.block_ids)
        else:
            hashes = _numbers(b"".join(event.names)).tolist()
            removed = pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=hashes))
            parts.append(_part(_EVENT, removed.SerializeToString()))
            num_blocks += len(hashes)
    batch = pb.KvEventBatch.FromString(b"".join(parts))
    batch.sequence_number, batch.timestamp, batch.dp_rank = number, time.time(), rank
    return batch, num_blocks


def _stored(runs: Sequence[BlockRun]) -> Iterator[bytes]:
    """Yields a KvBlocksStored for each run, on the wire."""
    if not runs:
        return
    names = _numbers(b"".join(name for run in runs for name in run.names[1:]))
    parents = _numbers(b"".join(run.names[0] if run.place else bytes(16) for run in runs))
    fields = _varints(parents.view(np.uint64), _HASH_BYTES)
    data, start = _encode(names, np.concatenate([run.tokens for run in runs])), 0
    for run, parent in zip(runs, fields, strict=True):
        end = start + len(run.block_ids)
        yield data[start:end].tobytes() + (_PARENT + parent.tobytes() if run.place else b"")
        start = end


def _part(tag: bytes, data: bytes) -> bytes:
    """Returns a message's field that is a message itself."""
    return tag + _size(len(data)) + data


def _size(number: int) -> bytes:
    """Returns a number below 2^28 as _varints does, in four bytes."""
    low = (number | 0x80) & 0xFF, (number >> 7 | 0x80) & 0xFF, (number >> 14 | 0x80) & 0xFF
    return bytes((*low, number >> 21))


def _numbers(names: bytes) -> npt.NDArray[np.int64]:
    """Returns the first 64 of the 128 bits of each name."""
    return np.frombuffer(names, np.int64)[::2]


def _encode(names: npt.NDArray[np.int64], tokens: Int32Array) -> npt.NDArray[np.uint8]:
    """Returns each block as KvBlocksStored has it on the wire: a tenth of the time of objects.

    Numbers take the bytes of the longest, so that all blocks take the same.

    Args:
        names: [B].
        tokens: int32 [B, block_size].

    Returns:
        uint8 [B, bytes of a block].
    """
    num_blocks, block_size = tokens.shape
    between = _TOKENS + _size(block_size * _TOKEN_BYTES)
    after = _BLOCK_SIZE + _size(block_size)
    num_bytes = len(_HASH + between + after) + _HASH_BYTES + block_size * _TOKEN_BYTES
    columns = [
        np.frombuffer(_BLOCK + _size(num_bytes) + _HASH, np.uint8),
        _varints(names.view(np.uint64), _HASH_BYTES),
        np.frombuffer(between, np.uint8),
        _varints(tokens.view(np.uint32), _TOKEN_BYTES).reshape(num_blocks, -1),
        np.frombuffer(after, np.uint8),
    ]
    return np.hstack([np.broadcast_to(c, (num_blocks, c.shape[-1])) for c in columns])


def _varints(numbers: npt.NDArray[Any], num_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns numbers in seven bits of each byte, lowest first: uint8 [..., num_bytes]."""
    shifts = np.arange(0, 7 * num_bytes, 7, dtype=numbers.dtype)
    data = (numbers[..., None] >> shifts).astype(np.uint8)
    data |= 0x80
    data[..., -1] &= 0x7F
    return data
