"""One GPU of fake tensors, so that the CUDA path runs on a machine without one.

    tensors on cuda:0      fake: a shape, a type, an address, no numbers (PyTorch's FakeTensorMode)
    tensors on the host    real
    torch.cuda             streams, events and graphs that take note of what is asked of them
    every operator         is seen: what would wait, copy or mix devices in a step or a capture is a Fault

It says nothing of numbers, kernels, memory, races between streams, NCCL, or of what else a real capture
refuses: that all of this passes is no evidence that any kernel is right.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from executor.graph import cuda_graph_backend

DEVICE = torch.device("cuda", 0)

# PyTorch for the CPU refuses to index a tensor on CUDA, fake or not, without one of these.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10 { namespace impl {
struct NoGuard final : public NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, NoGuard);
}}
"""

aten = torch.ops.aten
# Operators that launch nothing: they make or view tensors.
SILENT = {
    *(
        "view",
        "_unsafe_view",
        "slice",
        "select",
        "as_strided",
        "expand",
        "t",
        "transpose",
        "permute",
    ),
    *("unsqueeze", "squeeze", "detach", "alias", "split", "split_with_sizes", "unbind", "view_as"),
    *("_reshape_alias", "unfold", "diagonal", "set_", "empty", "empty_like", "new_empty"),
    *("empty_strided", "lift_fresh"),
}

NUM_FOUND = (
    2  # of what is searched for: one for each executor of a group of two, as counts are read
)


class Fault(AssertionError):
    """What would wait for the device, or crash, or read rubbish, on a GPU."""


class FakeGpu:
    """What is asked of the device.

    Attributes:
        launched: What has been launched outside graphs since the step began, by name.
        graphs: What each graph recorded since the process began, by name.
        waits: Where the host has waited for work of a step that is not read yet.
        collectives: Of the step, or of the captures before it.
        modules: Compiled modules that FlashInfer has loaded.
        num_meetings: How often the hosts of a group have met.
        row_bytes: What FlashInfer's all-to-all has been given to send of a row.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.graphs: list[list[str]] = []
        self.waits: list[str] = []
        self.collectives: list[tuple[Any, ...]] = []
        self.modules: list[str] = []
        self.pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that none is used twice
        self.num_steps = 0
        self.unread: set[int] = set()  # steps, by number
        self.num_meetings = 0
        self.row_bytes: set[int] = set()
        self.is_capturing = False
        self._in_step = False

    @property
    def is_watched(self) -> bool:
        """Whether nothing may wait."""
        return self._in_step or self.is_capturing

    @contextmanager
    def step(self) -> Iterator[None]:
        """Goes around the launch of a step of a worker."""
        self.num_steps += 1
        self.unread.add(self.num_steps)
        with self._watched():
            yield

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Goes around what finishes a step."""
        with self._watched():
            yield
        self.unread.discard(number)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.launched, self.waits, self.collectives = [], [], []
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def launch(self, name: str) -> None:
        (self.graphs[-1] if self.is_capturing else self.launched).append(name)

    def call(self, name: str, arguments: Iterable[Any]) -> None:
        """A kernel of a library is launched."""
        for x in _tensors(arguments):
            if not _is_fake(x):
                raise Fault(f"{name} is given a tensor of the host, {list(x.shape)}")
        self.launch(name)

    def refuse(self, what: str) -> None:
        """Raises Fault if nothing of the kind may happen now."""
        if self.is_watched:
            raise Fault(f"{what} {'in a capture' if self.is_capturing else 'in a step'}")

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_capturing:
            raise Fault("memory of the host is pinned in a capture")
        return self.pinned.setdefault(x.data_ptr(), x)

    def upload(self, x: torch.Tensor, *, non_blocking: bool) -> None:
        """Memory of the host is copied to the device."""
        if self.is_capturing:
            raise Fault(f"{list(x.shape)} of the host are copied in a capture")
        if not non_blocking:
            self.refuse(f"a copy of {list(x.shape)} to the device waits")
        is_pinned = not x.numel() or x.untyped_storage().data_ptr() in self.pinned
        if self._in_step and not is_pinned and _is_ours():
            raise Fault(f"{list(x.shape)} are copied from memory that is not pinned")
        self.launch("copy")

    def download(self, target: torch.Tensor | None, *, non_blocking: bool) -> None:
        """Memory of the device is copied to the host."""
        is_pinned = target is not None and target.untyped_storage().data_ptr() in self.pinned
        if self.is_capturing or not (non_blocking and is_pinned):
            self.wait("a copy to the host")
        self.launch("copy")

    def wait(self, what: str) -> None:
        """The host waits for all that was launched."""
        if self.is_capturing:
            raise Fault(f"{what} waits in a capture")
        self.waits.append(_caller())


class _Operators(TorchDispatchMode):
    """Sees every operator, and runs those on the device as fakes."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import all of it, to no purpose

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        if not to_gpu and not any(map(_is_fake, tensors)):
            return self._on_host(func, args, kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            self._gpu.wait("a number that the host reads")
            return _read(args[0].dtype)
        if func is aten.nonzero.default:
            self._gpu.wait("a count of what is not zero")
            with self._fake:
                return args[0].new_empty(NUM_FOUND, args[0].dim(), dtype=torch.int64)
        if not to_gpu:  # else it is made there, after the shape of any
            self._check(func, args, tensors)
        name = func.overloadpacket.__name__
        if name not in SILENT:
            self._gpu.launch(name)
        with self._fake:
            return func(*args, **kwargs)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.get("pin_memory")
        made = func(*args, **{**kwargs, "pin_memory": False} if is_pinned else kwargs)
        return self._gpu.pin(made) if is_pinned else made

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gpu, non_blocking = self._gpu, kwargs.get("non_blocking", False)
        if func is aten.copy_.default:
            target, source, *rest = args
            non_blocking = rest[0] if rest else non_blocking
            if not _is_fake(target):
                gpu.download(target, non_blocking=non_blocking)
                return target.fill_(_read(target.dtype))
            torch.broadcast_shapes(target.shape, source.shape)
            if not _is_fake(source):
                gpu.upload(source, non_blocking=non_blocking)
                return target
            if (target.data_ptr(), target.shape) == (source.data_ptr(), source.shape):
                return target  # for which PyTorch launches nothing
        else:
            [source] = args
            device, dtype = kwargs.get("device"), kwargs.get("dtype") or source.dtype
            if device is not None and torch.device(device).type == "cpu":
                gpu.download(None, non_blocking=non_blocking)
                return torch.full(source.shape, _read(dtype), dtype=dtype)
            if not _is_fake(source):
                gpu.upload(source, non_blocking=non_blocking)
                with self._fake:
                    return torch.empty(source.shape, dtype=dtype, device=DEVICE)
        gpu.launch("copy")
        with self._fake:
            return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """Raises Fault for what PyTorch would do and wait for. Fakes refuse most of it themselves."""
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            for index in args[1]:
                if index is not None and not _is_fake(index):
                    self._gpu.refuse(f"indices of the host, {list(index.shape)}, are copied")
                elif index is not None and index.dtype is torch.bool:
                    self._gpu.refuse("a mask, whose true entries are counted, waits")
            return
        for x in tensors:
            if x.dim() and not _is_fake(x):
                raise Fault(f"{func} mixes devices: {list(x.shape)} of the host")


def _read(dtype: torch.dtype) -> int:
    """Returns every number that the host reads: a token, or a number of tokens, and no bits of a float."""
    return 0 if dtype.is_floating_point else 1


def _is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, FakeTensor)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@cache
def _is_composite(func: Any) -> bool:
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return has_kernel


def _is_ours() -> bool:
    """Whether a function of ours called PyTorch, and not FlashInfer, which copies a few numbers so."""
    frame = sys._getframe(1)
    while not {"executor", "flashinfer"} & (parts := {*Path(frame.f_code.co_filename).parts}):
        assert frame.f_back is not None
        frame = frame.f_back
    return "executor" in parts


def _caller() -> str:
    """Returns the function of ours that is being called, and the function of its module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and "executor/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_qualname


# ---- torch.cuda


class _Stream:
    cuda_stream = 0
    device = DEVICE

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        self._gpu.wait("a stream")


class _Event:
    """Waits for the device only if its work belongs to a step that is not read yet."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._recorded_in = -1

    def record(self, stream: Any = None) -> None:
        if self._gpu.is_capturing:
            raise Fault("an event is recorded in a capture")
        self._recorded_in = self._gpu.num_steps

    def synchronize(self) -> None:
        if self._recorded_in in self._gpu.unread or self._gpu.is_capturing:
            self._gpu.wait("an event")

    def query(self) -> bool:
        return True


class _Graph:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert not self._gpu.is_capturing, "captures do not nest"
        self._gpu.graphs.append([])
        self._gpu.is_capturing = True

    def capture_end(self) -> None:
        self._gpu.is_capturing = False

    def replay(self) -> None:
        self._gpu.launch("graph")

    def reset(self) -> None:
        pass


def install(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> TorchDispatchMode:
    """Puts the device where PyTorch's is. Returns the mode under which the device exists."""
    _load_guard()
    stream = _Stream(gpu)
    properties = SimpleNamespace(
        name="Fake H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=140 << 30,
    )
    stubs: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "synchronize": lambda device=None: gpu.wait("synchronize"),
        "empty_cache": lambda: gpu.refuse("cached memory is given back"),
        "mem_get_info": lambda device=None: (120 << 30, 140 << 30),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "current_stream": lambda device=None: stream,
        "stream": lambda other: nullcontext(),
        "device": lambda device: nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda *args, **kwargs: _Stream(gpu),
        "Event": lambda *args, **kwargs: _Event(gpu),
        "CUDAGraph": lambda *args, **kwargs: _Graph(gpu),
    }
    for name, stub in stubs.items():
        patch.setattr(torch.cuda, name, stub)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.Tensor, "pin_memory", lambda self, *args: gpu.pin(self))
    new_tensor = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> torch.Tensor:
        made = new_tensor(data, dtype=dtype, **rest)
        return made if device is None else made.to(device)

    patch.setattr(torch, "tensor", tensor)
    _give_addresses(patch)
    patch.setattr(cuda_graph_backend, "weak_view", lambda x: x)
    patch.setattr(cuda_graph_backend, "_frozen_garbage", nullcontext)  # which takes longest here
    patch.setattr(cuda_graph_backend, "_NUM_WARM_UPS", 1)
    return _Operators(gpu)


def _give_addresses(patch: pytest.MonkeyPatch) -> None:
    """Gives fake storages addresses, far from one another."""
    numbers, addresses = count(1), dict[int, int]()
    of_real = torch.UntypedStorage.data_ptr

    def of_storage(storage: torch.UntypedStorage) -> int:
        if storage.device.type == "cpu":
            return of_real(storage)
        key = storage._cdata
        if key not in addresses:
            addresses[key] = next(numbers) << 40
        return addresses[key]

    def of_tensor(x: torch.Tensor) -> int:
        return of_storage(x.untyped_storage()) + x.storage_offset() * x.element_size()

    patch.setattr(torch.UntypedStorage, "data_ptr", of_storage)
    patch.setattr(FakeTensor, "data_ptr", of_tensor, raising=False)


@cache
def _load_guard() -> None:
    """Compiles the guard, for some seconds, unless a cache has it, and loads it for good."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "lockstep")
    library = folder / "tests" / f"cuda_guard-{torch.__version__}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        here = Path(torch.__file__).parent
        with TemporaryDirectory(dir=library.parent) as made_in:
            source, made = Path(made_in, "guard.cpp"), Path(made_in, "guard.so")
            source.write_text(GUARD)
            command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{here / 'include'}", source]
            command += ["-o", made, f"-L{here / 'lib'}", "-lc10"]
            subprocess.run(command, check=True)
            made.rename(library)
    ctypes.CDLL(str(library))
