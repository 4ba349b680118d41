"""Pool of input buffers: one storage per kind, shared by all graph runners of a process.

Runners replay one after another, and each fills its inputs right before it replays, so they can
read the same memory. A captured graph holds raw addresses, so a storage in the pool never moves and
is never freed.

A runner that shares finds what another one left: refill sentinels and zero index-like buffers
before a capture (``CudaGraphBufferRegistry.reset_for_capture``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

# Buffers that address KV, the block table or the rope table. Kernels follow what is in a padded
# row of one of them, so it must be a valid index: zero, the scratch block's.
INDEX_SEMANTIC_BUFFERS = frozenset(
    {
        "positions",
        "mrope_positions",
        "out_cache_loc",
        "window_cache_loc",
        "req_pool_indices",
        "mamba_track_indices",
        "mamba_track_mask",
    }
)

# Constants whose content depends on a runner's width (tokens per sequence) while their size does
# not: two widths would read each other's, the narrower one out of bounds.
WIDTH_DEPENDENT_BUFFERS = frozenset({"select_index"})


# Storages by (name, numel, dtype, device). A pool never forgets one.
InputBufferPool = dict[tuple[str, int, torch.dtype, torch.device], torch.Tensor]

_PROCESS_POOL: InputBufferPool = {}
_pool: ContextVar[InputBufferPool] = ContextVar("input_buffer_pool")


def share_input_buffer(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Returns a buffer like the one given, in storage that all of its kind share.

    A kind is (name, numel, dtype, device). The first buffer of a kind is returned as it is, and
    its storage is everyone's from then on; what later buffers hold is dropped. Who shares with
    whom does not depend on the order. Names in WIDTH_DEPENDENT_BUFFERS are never shared.

    Args:
        name: What the buffer is for.
        buffer: Any shape, dense: without gaps and overlaps.

    Returns:
        A tensor of the buffer's shape and strides. Its address never changes.

    Raises:
        ValueError: The buffer is not dense.
    """
    if name in WIDTH_DEPENDENT_BUFFERS:
        return buffer
    if not _is_dense(buffer):
        raise ValueError(
            f"buffer {name!r}: shape {tuple(buffer.shape)} with strides {buffer.stride()} "
            f"leaves gaps or overlaps: share the tensor that it is a view of"
        )
    key = (name, buffer.numel(), buffer.dtype, buffer.device)
    first = _pool.get(_PROCESS_POOL).setdefault(key, buffer)
    return buffer if first is buffer else first.as_strided(buffer.shape, buffer.stride())


@contextmanager
def fresh_input_buffer_pool() -> Iterator[InputBufferPool]:
    """Gives the block an empty pool of its own, in this thread. The old pool is back afterwards.

    A worker builds its runners in one: two workers in one process run at the same time, so they
    cannot share.
    """
    token = _pool.set({})
    try:
        yield _pool.get()
    finally:
        _pool.reset(token)


def _is_dense(buffer: torch.Tensor) -> bool:
    """Returns whether the elements fill one run of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected and buffer.numel():
            return False
        expected *= size
    return True
