"""CPU graph: a pass that its first call records, and further calls make again without its Python.

    recorded    kernel kernel kernel │ PyTorch's operator │ kernel kernel … kernel
    run again   one call of the library                     one call

What holds for a CUDA graph holds here: a pass reads and writes tensors that outlive it, and nothing
in it depends on numbers that the host reads. Where an operator does that all the same, or talks to
other executors, the pass is called each time.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import structlog
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from executor.model.cpu_kernels.library import Library

log = structlog.stdlib.get_logger(__name__)

Part = Callable[[], object]

_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)
_TAGS = (  # of operators that give something else each time, or wait for numbers
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)  # by no operator


class GraphMemory:
    """Memory of what graphs compute on the way. They run one after another, so all share it."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.UntypedStorage] = {}  # by address

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of such a shape, strides and type in a block that no tensor has."""
        size = like.untyped_storage().nbytes()
        for block in self._blocks.values():
            is_free = torch._C._storage_Use_Count(block._cdata) == 1
            if is_free and size <= block.nbytes() <= 2 * size:
                break
        else:
            block = torch.empty(max(size, 64), dtype=torch.uint8).untyped_storage()
            self._blocks[block.data_ptr()] = block
        return _placed_as(like, block)

    def has(self, x: torch.Tensor) -> bool:
        """Returns whether x lies in a block."""
        return x.untyped_storage().data_ptr() in self._blocks

    def noted(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x as a graph refers to it: if it lies in a block, that is not its own."""
        if not self.has(x):
            return x
        block = self._blocks[x.untyped_storage().data_ptr()]
        memory = (ctypes.c_uint8 * block.nbytes()).from_address(block.data_ptr())
        return _placed_as(x, torch.frombuffer(memory, dtype=torch.uint8).untyped_storage())


def _placed_as(x: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
    """Returns what lies in memory as x does in its own."""
    return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride())


class CpuGraph:
    """A pass, recorded by its first call.

    Args:
        kernels: Whose calls are recorded.
        memory: Of all graphs of the executor.
        run: The pass.
    """

    def __init__(self, kernels: Library, memory: GraphMemory, run: Callable[[], None]) -> None:
        self._kernels = kernels
        self._memory = memory
        self._run = run
        self._parts: list[Part] = []
        self._kept: list[torch.Tensor] = []

    def __call__(self) -> None:
        if not self._parts:
            self._parts = self._record()
            return
        for part in self._parts:
            part()

    def _record(self) -> list[Part]:
        """Runs the pass, and returns what runs it again."""
        recorder = _Recorder(self._memory)
        with self._kernels.noting(recorder.note), recorder, _ReadGuard(recorder):
            self._run()
        self._kept = recorder.kept
        if recorder.problem is not None:
            log.info("cpu_graph_called", operator=recorder.problem)
            return [self._run]
        parts: list[Part] = []
        for are_calls, group in groupby(recorder.work, key=lambda one: isinstance(one, bytes)):
            work = [*group]
            parts += [self._replayed(work)] if are_calls else work
        return parts

    def _replayed(self, calls: list[bytes]) -> Part:
        """Returns what makes calls of kernels again."""
        joined, count = b"".join(calls), len(calls)
        return lambda: self._kernels.replay(joined, count)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes PyTorch's operators, and puts what they make into memory that stays.

    Attributes:
        work: Calls of kernels, as bytes, and of operators, in order.
        kept: What kernels read besides: a batch may be forgotten once it has run.
        problem: What is called that cannot be called again; None without.
    """

    def __init__(self, memory: GraphMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Any] = []
        self.kept: list[torch.Tensor] = []
        self.problem: str | None = None
        self._memory = memory

    def note(self, call: bytes, arguments: tuple[Any, ...]) -> None:
        """Notes a kernel's call."""
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        self.work.append(call)
        self.kept += [x for x in tensors if not self._memory.has(x)]

    def __torch_dispatch__(
        self,
        operator: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = operator(*args, **kwargs or {})
        if operator.is_view and _shares_memory(result, args):
            return result
        if operator in _EMPTY:
            return self._memory.take(result)
        if operator.namespace != "aten" or any(tag in operator.tags for tag in _TAGS):
            self.problem = str(operator)
            return result
        noted = self._memory.noted
        given, named = tree_map_only(torch.Tensor, noted, (args, kwargs or {}))
        again = partial(operator, *given, **named)
        if operator._schema.is_mutable:
            self.work.append(again)
            return result
        made = [self._memory.take(x).copy_(x) for x in _tensors(result)]
        places = [noted(x) for x in made]
        self.work.append(
            lambda: [y.copy_(x) for y, x in zip(places, _tensors(again()), strict=True)]
        )
        return made[0] if isinstance(result, torch.Tensor) else type(result)(made)


class _ReadGuard(TorchFunctionMode):
    """Tells a recorder of numbers that the host takes from memory, which no operator does."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _READS:
            self._recorder.problem = function.__name__
        return function(*args, **kwargs or {})


def _shares_memory(result: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a view is one: ``reshape``, ``to`` and the like copy where they must."""
    storage = _tensors(result)[0].untyped_storage().data_ptr()
    return any(storage == arg.untyped_storage().data_ptr() for arg in args if torch.is_tensor(arg))


def _tensors(result: Any) -> Sequence[torch.Tensor]:
    """Returns what an operator makes, one tensor or some."""
    return (result,) if isinstance(result, torch.Tensor) else result
