"""Backend of graph runners: recording and replay, one seam for GPU and CPU, and the CPU's own.

    session ──▶ warm_up(run) ──▶ capture(key, run) ──▶ … ──▶ replay(key) ──▶ … ──▶ discard

What is recorded is a callable that reads and writes tensors which outlive it: the registry's
buffers, the KV pool, a runner's output. A graph's own memory belongs to whichever graph replays
next, so a runner that kept an intermediate result would read another size's.

A backend knows no batch, no phase and no model. ``cuda_graph_backend.py`` has the GPU's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """Key of one capture of a runner.

    Attributes:
        size: Sequences of a decode, token rows of an extend.
        piece: Its place among the pieces of one pass; None if a pass is one piece.
    """

    size: int
    piece: int | None = None

    def __str__(self) -> str:
        return f"size {self.size}" + (f", piece {self.piece}" if self.piece else "")


class RunnerBackend(Protocol):
    """Records callables and replays them. One per runner; its thread calls all of it."""

    @property
    def outlives_group(self) -> bool:
        """Whether captures stay valid when the process group is formed anew.

        A recorded collective belongs to the group it ran in. True only where a capture runs
        nothing: members that have captured do not do it again, so one that is new to the group
        would wait for them in its first collective.
        """
        ...

    def session(self, *, label: str, num_captures: int) -> AbstractContextManager[None]:
        """Goes around all captures of a runner.

        Args:
            label: The runner's name, for the log and for errors.
            num_captures: How many captures will follow, pieces included.
        """
        ...

    def warm_up(self, run: Callable[[], object]) -> None:
        """Calls ``run`` as often as it takes until a recording finds everything set up.

        That is twice on a GPU and never on a CPU, so ``run`` can be called again and does the
        same again. What only its first calls do, such as an upgrade of attention metadata, is
        undone by the caller before it captures.

        Raises:
            CaptureError: Memory ran out, or the device cannot record it.
        """
        ...

    def capture(self, key: ShapeKey, run: Callable[[], None]) -> None:
        """Records what ``run`` does with tensors that outlive it, by calling it once.

        A backend that records nothing need not call it.

        Every rank must call it, in the same order. A piece may read what an earlier piece of the
        same size made, if that is held until the last piece is captured. An exception leaves the
        backend without the key.

        Args:
            key: New to this backend.
            run: Warmed up before, alone or as part of a longer pass.

        Raises:
            CaptureError: Memory ran out, or the device cannot record it.
        """
        ...

    def capture_breakable(self, key: ShapeKey, run: Callable[[], None]) -> None:
        """Like ``capture``, but regions marked by ``eager_region`` break the recording."""
        ...

    def eager_region(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Marks a function of tensors to one tensor.

        Outside ``capture_breakable``, and inside another region, it is just called. Inside, the
        recording ends before it and goes on after it. Each replay calls it anew, host code
        included, with the captured tensors as arguments, and copies its result to where the rest
        of the recording reads it: the shape must be the one it had at capture. Arguments other
        than tensors stay as they were; tensors may lie in tuples, lists and dicts.
        """
        ...

    def replay(self, key: ShapeKey) -> None:
        """Does again what was recorded, on the same tensors.

        Raises:
            LookupError: The key was not captured.
        """
        ...

    def discard(self) -> None:
        """Drops all captures, for example before the group is formed anew."""
        ...


def copy_result(result: torch.Tensor, output: torch.Tensor) -> None:
    """Copies what an eager region returned to where the recording reads it.

    Raises:
        ValueError: It has another shape or dtype than at capture.
    """
    if result.shape != output.shape or result.dtype != output.dtype:
        raise ValueError(
            f"an eager region returned {list(result.shape)} {result.dtype}, but "
            f"{list(output.shape)} {output.dtype} when it was captured: it must return the same"
        )
    output.copy_(result)


class Captures(Generic[T]):
    """The captures of one backend, and the rules that all backends have for making them."""

    def __init__(self) -> None:
        self._by_key: dict[ShapeKey, T] = {}
        self._has_session = False
        self._under_way: ShapeKey | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[T]:
        return iter(self._by_key.values())

    def __getitem__(self, key: ShapeKey) -> T:
        """Raises LookupError with the keys that there are."""
        try:
            return self._by_key[key]
        except KeyError:
            known = "; ".join(map(str, self._by_key)) or "none"
            raise LookupError(f"{key} was not captured; captured are: {known}") from None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Captures are made within it."""
        if self._has_session:
            raise RuntimeError("this backend has a session already: one at a time")
        self._has_session = True
        try:
            yield
        finally:
            self._has_session = False

    def check_session(self) -> None:
        """Raises RuntimeError outside ``session``."""
        if not self._has_session:
            raise RuntimeError("warm-ups and captures are made within session()")

    @contextmanager
    def making(self, key: ShapeKey) -> Iterator[None]:
        """Goes around the making of one capture.

        Raises:
            RuntimeError: There is no session, another capture is under way, or the key is taken.
        """
        self.check_session()
        if self._under_way is not None:
            raise RuntimeError(
                f"capture of {key} while {self._under_way} is being captured: "
                f"captures do not nest, finish one first"
            )
        if key in self._by_key:
            raise RuntimeError(f"{key} was captured before: discard() first")
        self._under_way = key
        try:
            yield
        finally:
            self._under_way = None

    def add(self, key: ShapeKey, capture: T) -> None:
        self._by_key[key] = capture

    def take_all(self) -> list[T]:
        """Returns all captures and forgets them."""
        assert self._under_way is None, f"{self._under_way} is being captured"
        captures = list(self._by_key.values())
        self._by_key.clear()
        return captures


class EagerBackend:
    """Calls instead of replaying, host code included.

    A capture runs nothing: on a CPU a pass of every size would take as long as a long prompt, at each
    start. What is called may record itself when it runs first.

    Args:
        record: Takes what a capture runs to what replays call; None: they call just that. Captures
            that may break are not given to it, nor pieces, which go on from one another's Python.
    """

    def __init__(self, record: Callable[[Work], Work] | None = None) -> None:
        self._record = record
        self._captures: Captures[Work] = Captures()

    @property
    def outlives_group(self) -> bool:
        return True

    @contextmanager
    def session(self, *, label: str, num_captures: int) -> Iterator[None]:
        with self._captures.session():
            yield

    def warm_up(self, run: Callable[[], object]) -> None:
        """Nothing to warm up."""
        self._captures.check_session()

    def capture(self, key: ShapeKey, run: Callable[[], None]) -> None:
        record = self._record if key.piece is None else None
        self._keep(key, run if record is None else record(run))

    def capture_breakable(self, key: ShapeKey, run: Callable[[], None]) -> None:
        self._keep(key, run)

    def _keep(self, key: ShapeKey, run: Work) -> None:
        with self._captures.making(key):
            self._captures.add(key, run)

    def eager_region(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return function

    def replay(self, key: ShapeKey) -> None:
        self._captures[key]()

    def discard(self) -> None:
        self._captures.take_all()
