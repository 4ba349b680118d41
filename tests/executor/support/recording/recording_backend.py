"""A stand-in for CUDA graphs on the CPU, with their semantics.

While a capture runs, every operator is noted with its very tensors; a replay runs the noted
operators and puts their results where those of the capture lie. As with a graph:

* Host code does not run again. Whatever Python computed during the capture is frozen.
* What depends on values of tensors cannot be captured: reading one on the host, shapes that follow
  from values, tensors made from host data.
* Memory that a graph made is anybody's between replays: it is filled with NaN and huge numbers.
* Only what operators do is repeated. What happens on another thread, through NumPy or through a
  process group is unknown to the graph; ``kernel`` makes such a call part of it.

Stricter than a graph: old intermediate results turn to poison at each new pass. More lenient: a
capture really runs, memory is never taken twice within a graph, a host tensor looks like any other
unless it is named, and printing a tensor goes unnoticed.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from executor.graph.backend import Captures, ShapeKey, copy_result

P = ParamSpec("P")

_NUM_WARM_UPS = 2
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided")
_NEW_EMPTY = ("new_empty", "new_empty_strided")
_LEAVES_CONTENT = {f"aten::{name}" for name in (*_EMPTY, *_NEW_EMPTY)}
_TO_HOST = {getattr(torch.Tensor, x) for x in ("__array__", "cpu", "item", "numpy", "tolist")}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}


class CannotBeCaptured(RuntimeError):
    """A GPU could not record this, or would record something else."""


@dataclass(slots=True)
class Recording:
    """What one capture did, in order, and one tensor in each piece of memory that it made."""

    steps: list[Callable[[], object]] = field(default_factory=list)
    memory: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _poisons: list[tuple[torch.Tensor, Any]] = field(default_factory=list)

    def poison(self) -> None:
        """Fills all memory of its storages: NaN, or a number that indexes nothing."""
        with torch.inference_mode():
            for x in [*self.memory.values()][len(self._poisons) :]:
                whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                self._poisons.append((whole, _poison_of(x.dtype)))
            for whole, poison in self._poisons:
                whole.fill_(poison)

    def replay(self) -> None:
        for run_again in self.steps:
            run_again()


class RecordingBackend:
    """Records operators, and replays them as a CUDA graph would. Its tests are its manual.

    Args:
        host_tensors: Tensors that a GPU executor keeps on the host, such as ``seq_lens_cpu``: an
            operator on them cannot be captured.
    """

    def __init__(self, *, host_tensors: Sequence[torch.Tensor] = ()) -> None:
        self._captures: Captures[Recording] = Captures()
        self._host_memory = {_memory_of(x) for x in host_tensors}
        self._recorder: Recorder | None = None

    @property
    def outlives_group(self) -> bool:
        return False

    @contextmanager
    def session(self, *, label: str, num_captures: int) -> Iterator[None]:
        num_before = len(self._captures)
        with self._captures.session(), known_world():
            yield
        num_made = len(self._captures) - num_before
        assert num_made == num_captures, f"{label}: {num_captures} announced, {num_made} made"
        self._poison_all()

    def warm_up(self, run: Callable[[], object]) -> None:
        self._captures.check_session()
        with torch.inference_mode():
            for _ in range(_NUM_WARM_UPS):
                run()

    def capture(self, key: ShapeKey, run: Callable[[], None]) -> None:
        self._capture(key, run, is_breakable=False)

    def capture_breakable(self, key: ShapeKey, run: Callable[[], None]) -> None:
        self._capture(key, run, is_breakable=True)

    def eager_region(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(function)
        def region(*args: Any, **kwargs: Any) -> torch.Tensor:
            recorder = self._recorder
            if recorder is None or not recorder.is_breakable or recorder.is_paused:
                return function(*args, **kwargs)
            return recorder.break_for(function, args, kwargs)

        return region

    def kernel(self, function: Callable[P, None]) -> Callable[P, None]:
        """Makes calls that operators know nothing of part of what is recorded.

        For a process group's collectives, say, which NCCL launches like any kernel. The function
        reads and writes tensors that it is given, and returns nothing.
        """

        @wraps(function)
        def launch(*args: P.args, **kwargs: P.kwargs) -> None:
            if self._recorder is None or self._recorder.is_paused:
                function(*args, **kwargs)
            else:
                self._recorder.note_kernel(function, args, kwargs)

        return launch

    def replay(self, key: ShapeKey) -> None:
        recording = self._captures[key]
        if not key.piece:
            self._poison_all()
        else:  # earlier pieces of this very pass have left something for it
            recording.poison()
        with torch.inference_mode():
            recording.replay()

    def discard(self) -> None:
        for recording in self._captures.take_all():
            recording.poison()

    def _capture(self, key: ShapeKey, run: Callable[[], None], *, is_breakable: bool) -> None:
        recording = Recording()
        if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError(f"capture of {key} inside another capture: finish one first")
        with self._captures.making(key):
            self._recorder = Recorder(
                recording,
                living_memory(),
                host_memory=self._host_memory,
                is_breakable=is_breakable,
            )
            try:
                with (
                    torch.inference_mode(),
                    self._recorder,
                    _HostAccess(self._recorder),
                ):
                    run()
            finally:
                self._recorder = None
            self._captures.add(key, recording)

    def _poison_all(self) -> None:
        for recording in self._captures:
            recording.poison()


class Recorder(TorchDispatchMode):
    """Notes operators while it is entered, unless paused.

    Args:
        recording: Where to.
        older: All tensors from before. Kept, so that none of their addresses is taken again.
        host_memory: Storages that operators may not touch.
        is_breakable: Whether eager regions break it.
    """

    def __init__(
        self,
        recording: Recording,
        older: dict[int | None, torch.Tensor],
        *,
        host_memory: Collection[int | None] = (),
        is_breakable: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_breakable = is_breakable
        self.is_paused = False
        self._recording = recording
        self._older = older
        self._host_memory = host_memory

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return function(*args, **kwargs)
        if function._can_decompose():  # so that what it is composed of is seen
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        _refuse_what_depends_on_values(function, args)
        self._refuse_foreign(function, (args, kwargs))
        frozen = _frozen((args, kwargs))
        read = {_memory_of(x) for x in _tensors((args, kwargs))}
        result = function(*args, **kwargs)
        self._note(function, frozen, result, read)
        return result

    def note_kernel(
        self, function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Calls it without looking inside, and notes the call."""
        self._refuse_foreign(function, (args, kwargs))
        with self.paused():
            frozen_args, frozen_kwargs = _frozen_trees(args, kwargs)
            function(*args, **kwargs)
        self._recording.steps.append(partial(function, *frozen_args, **frozen_kwargs))

    def break_for(
        self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Calls an eager region, and returns the room for its result."""
        with self.paused():
            frozen_args, frozen_kwargs = _frozen_trees(args, kwargs)
            result = function(*args, **kwargs)
            room = torch.empty_like(result)
            room.copy_(result)
            kept = room.detach()
        self._recording.memory[_memory_of(kept)] = kept
        self._recording.steps.append(
            lambda: copy_result(function(*frozen_args, **frozen_kwargs), kept)
        )
        return room

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def _note(
        self, function: Any, arguments: tuple[Any, Any], result: Any, read: set[int | None]
    ) -> None:
        name = function._schema.name
        made: list[tuple[int, torch.Tensor]] = []  # results in memory of their own, by place
        for place, x in enumerate(_leaves(result)):
            if isinstance(x, torch.Tensor) and (memory := _memory_of(x)) not in read:
                if memory is None:
                    raise CannotBeCaptured(f"{name} makes a tensor without strides")
                if memory in self._older:
                    continue
                captured = x.detach()
                made.append((place, captured))
                self._recording.memory.setdefault(memory, captured)
        if name in _LEAVES_CONTENT or torch.Tag.inplace_view in function.tags:
            return
        if made or function._schema.is_mutable:
            self._recording.steps.append(partial(_repeat, function, *arguments, made))

    def _refuse_foreign(self, function: Any, arguments: Any) -> None:
        """Refuses tensors of the host, and those that no noted operator has made."""
        for x in _tensors(arguments):
            memory = _memory_of(x)
            if memory in self._host_memory:
                raise CannotBeCaptured(f"{function} cannot be captured: it uses a host tensor")
            if x.dim() == 0 or memory is None or memory in self._older:
                continue
            if memory not in self._recording.memory:
                raise CannotBeCaptured(
                    f"{function} cannot be captured: it reads a tensor of shape {list(x.shape)} "
                    f"that something else than an operator of this thread has made during the "
                    f"capture (a worker thread, NumPy or a collective outside kernel())"
                )


class _HostAccess(TorchFunctionMode):
    """Refuses to copy between host and device, which on the CPU no operator does."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._recorder.is_paused:
            if function in _TO_HOST:
                raise CannotBeCaptured(
                    f"Tensor.{function.__name__} cannot be captured: it reads values on the host"
                )
            if function in _FROM_HOST and not isinstance(args[0], torch.Tensor):
                raise CannotBeCaptured(
                    f"torch.{function.__name__} cannot be captured: it copies host data, make the "
                    f"tensor before the capture"
                )
        return function(*args, **(kwargs or {}))


def _repeat(
    function: Any, args: Any, kwargs: Any, made: Sequence[tuple[int, torch.Tensor]]
) -> None:
    results = _leaves(function(*args, **kwargs))
    for place, captured in made:
        captured.copy_(results[place])


def _refuse_what_depends_on_values(function: Any, args: tuple[Any, ...]) -> None:
    name = function._schema.name
    if torch.Tag.data_dependent_output in function.tags:
        raise CannotBeCaptured(f"{function} cannot be captured: it reads values on the host")
    if name in _INDEXED:
        if any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1])):
            raise CannotBeCaptured(
                f"{function} cannot be captured: a mask as index needs its values on the host, "
                f"use where or masked_fill"
            )
    elif torch.Tag.dynamic_output_shape in function.tags:
        raise CannotBeCaptured(
            f"{function} cannot be captured: the shape of its result depends on values"
        )
    if name == "aten::lift_fresh" and args[0].dim():  # a number that an index assigns has none
        raise CannotBeCaptured(
            f"{function} cannot be captured: it copies host data, make the tensor before the capture"
        )


def _leaves(x: Any) -> list[Any]:
    """Returns what lists, tuples and dicts hold, as tree_leaves does in ten times as long."""
    if isinstance(x, dict):
        x = list(x.values())
    if not isinstance(x, (list, tuple)):
        return [x]
    leaves = []
    for each in x:
        leaves += _leaves(each) if isinstance(each, (list, tuple, dict)) else [each]
    return leaves


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [x for x in _leaves(arguments) if isinstance(x, torch.Tensor)]


def _frozen_trees(*trees: Any) -> Any:
    """Returns arguments of any kind as they are now."""
    return tree_map_only(torch.Tensor, _frozen, trees)


def _frozen(x: Any) -> Any:
    """Returns arguments as they are now: a later in-place view must not change them."""
    if isinstance(x, torch.Tensor):
        return x if _memory_of(x) is None else x.detach()
    if type(x) is dict:
        return {name: _frozen(value) for name, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(_frozen, x))
    return x


def _memory_of(x: torch.Tensor) -> int | None:
    """Returns what tells the tensor's storage apart, or None if it has none (packed weights)."""
    try:
        return int(x.untyped_storage()._cdata)
    except NotImplementedError:
        return None


_known: dict[int | None, torch.Tensor] = {}  # within `known_world`
_is_known = False  # of a process without tensors, too


def know_world() -> None:
    """Does once and for all in this process, and in its forks, what `known_world` does in a block."""
    global _is_known
    gc.unfreeze()
    _known.update(living_memory())
    gc.freeze()
    _is_known = True


@contextmanager
def known_world() -> Iterator[None]:
    """Has tensors looked for once among all that a run has made, and then only among newer objects.

    Where something was frozen before, as `make test` has it, the older ones stay so behind it.
    """
    global _is_known
    if _is_known:  # from further out
        yield
        return
    was_frozen = gc.get_freeze_count() > 0
    know_world()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        _known.clear()
        _is_known = False


def living_memory() -> dict[int | None, torch.Tensor]:
    """Returns all tensors that there are, by storage, but for those that others hide by gc.freeze."""
    objects = gc.get_objects()  # hundreds of thousands: looked at by type
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    tensors = (x for x, kind in zip(objects, map(type, objects), strict=True) if kind in kinds)
    return _known | {_memory_of(x): x for x in tensors}


def _poison_of(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max // 2
