"""CPU graph: a pass that its first call records, and further calls make again without its Python.

    recorded    kernel kernel kernel │ PyTorch's operator │ kernel kernel … kernel
    run again   one call of the library                     one call

What holds for a CUDA graph holds here: a pass reads and writes tensors that outlive it, and nothing
in it depends on numbers that the host reads. Where an operator does that all the same, or talks to
other executors, the pass is called each time.
"""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from executor.model.cpu_kernels.calls import Call, Replay, noting

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
        self._blocks: list[torch.Tensor] = []
        self._twins: dict[int, torch.Tensor] = {}  # by address: the same memory, of no storage

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of such a shape, strides and type in a block that no tensor has."""
        size = like.untyped_storage().nbytes()
        for block in self._blocks:
            if size <= block.nbytes <= 2 * size and _is_free(block):
                break
        else:
            block = torch.empty(max(size, 64), dtype=torch.uint8)
            address = block.data_ptr()
            memory = (ctypes.c_uint8 * block.nbytes).from_address(address)
            self._blocks.append(block)
            self._twins[address] = torch.frombuffer(memory, dtype=torch.uint8)
        return _strided_as(like, block)

    def noted(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x, which may lie in a block, as a graph refers to it: the block is not its own."""
        twin = self._twins.get(x.untyped_storage().data_ptr())
        return x if twin is None else _strided_as(x, twin)


def _strided_as(x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns what lies in bytes as x does in its storage."""
    numbers = memory[: memory.nbytes // x.itemsize * x.itemsize].view(x.dtype)
    return numbers.as_strided(x.shape, x.stride(), x.storage_offset())


def _is_free(block: torch.Tensor) -> bool:
    """Returns whether a block's storage is its own: views that are left would count."""
    count: int = torch._C._storage_Use_Count(block.untyped_storage()._cdata)
    return count == 2  # the block's, and that of the object which asks


class CpuGraph:
    """A pass, recorded by its first call.

    Args:
        kernels: Whose calls are recorded.
        memory: Of all graphs of the executor.
        run: The pass.
    """

    def __init__(self, kernels: ctypes.CDLL, memory: GraphMemory, run: Callable[[], None]) -> None:
        self._kernels = kernels
        self._memory = memory
        self._run = run
        self._parts: list[Part] = []

    def __call__(self) -> None:
        if not self._parts:
            self._parts = self._record()
            return
        for part in self._parts:
            part()

    def _record(self) -> list[Part]:
        """Runs the pass, and returns what runs it again."""
        recorder = _Recorder(self._memory)
        with noting(recorder.work.append), recorder, _ReadGuard(recorder):
            self._run()
        if recorder.problem is not None:
            log.info("cpu_graph_called", operator=recorder.problem)
            return [self._run]
        parts: list[Part] = []
        calls: list[Call] = []
        for work in [*recorder.work, None]:
            if isinstance(work, Call):
                calls.append(work)
                continue
            if calls:
                parts.append(Replay(self._kernels, calls))
            if work is not None:
                parts.append(work)
            calls = []
        return parts


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes PyTorch's operators, and puts what they make into memory that stays.

    Attributes:
        work: Calls of kernels and of operators, in order.
        problem: What is called that cannot be called again; None without.
    """

    def __init__(self, memory: GraphMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Call | Part] = []
        self.problem: str | None = None
        self._memory = memory

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
        elif isinstance(result, torch.Tensor):
            result = self._memory.take(result).copy_(result)
            to = noted(result)
            self.work.append(lambda: to.copy_(again()))
        else:
            result = type(result)(self._memory.take(x).copy_(x) for x in result)
            places = [noted(x) for x in result]
            self.work.append(lambda: [y.copy_(x) for y, x in zip(places, again(), strict=True)])
        return result


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
    [first, *_] = result if isinstance(result, list | tuple) else [result]
    storage = first.untyped_storage().data_ptr()
    return any(storage == arg.untyped_storage().data_ptr() for arg in args if torch.is_tensor(arg))
