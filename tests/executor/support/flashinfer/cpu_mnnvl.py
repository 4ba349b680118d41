"""CUDA's virtual memory on the CPU, for the library's own code that shares it between processes.

``MnnvlMemory`` runs as it is, with this in place of the driver: memory is a file in RAM, a handle
its descriptor, mapping is ``mmap``. So what one process writes its peers see, exactly if they
exchanged their handles rightly, and a part that nobody mapped ends the process as it would a kernel.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

PAGE = 1 << 16
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000  # Linux; Python names them not


class FileMemory:
    """The driver's functions that the library calls. Its types are the real ones.

    Attributes:
        mapped: Bytes that are mapped, by address.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self.mapped: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cuCtxGetDevice(self) -> int:
        return 0

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        return 0  # no fabric handles

    def cuMemGetAllocationGranularity(self, *, prop: Any, option: Any) -> int:
        return PAGE

    def cuMemCreate(self, size: int, prop: Any, *, flags: int) -> int:
        assert not self.mapped, "an earlier mapping still takes memory"
        memory = os.memfd_create("lockstep")
        os.ftruncate(memory, size)
        return memory

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> int:
        return os.dup(handle)

    def cuMemImportFromShareableHandle(self, handle: int, kind: Any) -> int:
        return os.dup(handle)

    def cuMemRelease(self, handle: int) -> None:
        os.close(handle)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        return self._mmap(None, size, _PROT_NONE, mmap.MAP_PRIVATE, None)

    def cuMemAddressFree(self, address: Any, size: int) -> None:
        assert not self.mapped, "addresses are freed while something is mapped there"
        assert _LIBC.munmap(int(address), size) == 0

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert address not in self.mapped
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._mmap(address, size, access, mmap.MAP_SHARED | _MAP_FIXED, handle)
        self.mapped[address] = size

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> None:
        assert self.mapped[address] == size

    def cuMemUnmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size
        self._mmap(address, size, _PROT_NONE, mmap.MAP_PRIVATE | _MAP_FIXED, None)

    def _mmap(self, at: int | None, size: int, access: int, kind: int, handle: int | None) -> int:
        if handle is None:
            kind |= mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _LIBC.mmap(at, size, access, kind, -1 if handle is None else handle, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        return int(address)


def tensor_over(
    pointer: int, segment: int, stride: int, count: int, dtype: torch.dtype, device: int
) -> torch.Tensor:
    """Takes the place of pack_strided_memory."""
    total = stride * (count - 1) + segment
    memory = (ctypes.c_uint8 * total).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided((count, segment), (stride, 1))


@contextmanager
def shared_through_files(mnnvl: Any) -> Iterator[FileMemory]:
    """Within it, the library shares memory between processes without a GPU.

    Args:
        mnnvl: The module ``flashinfer.comm.mnnvl``.
    """
    driver = FileMemory(mnnvl.cuda)
    with ExitStack() as stack:
        for target, name, value in (
            (mnnvl, "cuda", driver),
            (mnnvl, "checkCudaErrors", lambda result: result),
            (mnnvl, "pack_strided_memory", tensor_over),
            (mnnvl.MnnvlMemory, "initialized", True),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "current_device", lambda: 0),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield driver
