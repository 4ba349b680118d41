"""Uploads: weights on their way to a GPU, through pinned buffers.

    mapped file ─▶ read, dequantised, converted ─▶ pinned buffer ─▶ GPU
                                                   └ its event: copied, so that it may be filled again

A copy from any other memory makes the thread wait, and runs at a fraction of the speed; from a pinned
buffer it runs while threads fill the next ones. The buffers have ``PINNED_BYTES`` in all, whatever
the size of a tensor. PyTorch keeps them, for pinned memory that is asked for later.
"""

from queue import SimpleQueue
from typing import NamedTuple

import torch

READERS = 4  # threads that fill buffers
BUFFER_BYTES = 8 << 20
NUM_BUFFERS = 2 * READERS  # one is filled while another is copied
PINNED_BYTES = NUM_BUFFERS * BUFFER_BYTES


class _Buffer(NamedTuple):
    memory: torch.Tensor
    copied: torch.cuda.Event


class Uploads:
    """Fills parameters on any device, from several threads."""

    def __init__(self) -> None:
        # Those whose copies began first come first; each is made when it is first needed.
        self._buffers: SimpleQueue[_Buffer | None] = SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._buffers.put(None)

    def fill(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copies values on the host to a parameter; on a GPU it may return before they are there.

        Args:
            target: Any view; what runs on the current stream later sees the values.
            values: Of any type that converts, in a shape that broadcasts to the target's.
        """
        if target.device.type == "cuda":
            self.send(target, values.expand(target.shape))
        else:
            target.copy_(values)

    def send(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copies values, shaped like the target, as many rows at a time as a buffer holds."""
        row_bytes = target[0].nbytes
        if row_bytes > BUFFER_BYTES:
            for row, row_values in zip(target, values, strict=True):
                self.send(row, row_values)
            return
        step = BUFFER_BYTES // row_bytes
        for start in range(0, len(target), step):
            rows = slice(start, start + step)
            self._send_rows(target[rows], values[rows])

    def wait(self) -> None:
        """Returns once all that was sent is on the GPU. The buffers are given up."""
        for _ in range(NUM_BUFFERS):
            buffer = self._buffers.get()
            if buffer is not None:
                buffer.copied.synchronize()

    def _send_rows(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        buffer = self._take()
        try:
            staged = buffer.memory[: rows.nbytes].view(rows.dtype).view(rows.shape)
            staged.copy_(values)
            rows.copy_(staged, non_blocking=True)
            buffer.copied.record(torch.cuda.current_stream(rows.device))
        finally:
            self._buffers.put(buffer)

    def _take(self) -> _Buffer:
        buffer = self._buffers.get()
        if buffer is None:
            memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8).pin_memory()
            # A thread that waits leaves its core to those that dequantise.
            return _Buffer(memory, torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        buffer.copied.synchronize()
        return buffer
