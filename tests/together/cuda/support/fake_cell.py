"""A group's executors on fake GPUs, all in one thread: the ranks of a step run one after another."""

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from executor.parallel.layout import Topology
from executor.parallel.process_groups import EpochGroups, NcclGroup
from tests.together.cuda.support.fake_gpu import FakeGpu, Fault
from tests.together.speculation.speculative_cell import Cell


class FakeNccl:
    """ProcessGroupNCCL without peers: as the real one, it returns nothing if asyncOp is False."""

    def __init__(self, gpu: FakeGpu, size: int) -> None:
        self._gpu = gpu
        self._size = size

    def abort(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def collect(*args: Any) -> Any:
            *given, options = args
            tensors = [x for y in given for x in (y if isinstance(y, list) else [y])]
            tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
            for x in tensors:
                if not x.is_contiguous():
                    raise Fault(f"{name} is given a tensor with gaps, {list(x.shape)}")
            self._check(name, tensors)
            self._gpu.call(name, tensors)
            sizes = tuple((tuple(x.shape), x.dtype) for x in tensors)
            self._gpu.collectives.append((name, *sizes))
            return SimpleNamespace(wait=lambda: None) if options.asyncOp else None

        return collect

    def _check(self, name: str, tensors: list[torch.Tensor]) -> None:
        if name in ("_allgather_base", "_reduce_scatter_base"):
            out, x = tensors if name == "_allgather_base" else tensors[::-1]
            assert out.dtype == x.dtype
            assert out.numel() == self._size * x.numel(), f"{name}: {out.shape} of {x.shape}"


class FakeHost:
    """The group of the hosts, in which every rank has what this one has."""

    def __init__(self, gpu: FakeGpu, rank: int, world_size: int) -> None:
        self._gpu = gpu
        self.rank, self.world_size = rank, world_size

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out.view(self.world_size, -1).copy_(x.view(1, -1).expand(self.world_size, -1))

    def all_reduce(self, x: torch.Tensor) -> None:
        self._gpu.refuse("the hosts meet")
        self._gpu.num_meetings += 1

    def close(self) -> None:
        pass


def joining(gpu: FakeGpu) -> Callable[..., EpochGroups]:
    """Returns what forms groups without peers."""

    def join_group(*address: Any, epoch: int, topology: Topology, **options: Any) -> EpochGroups:
        rank, world_size, size = topology.world_rank, topology.world_size, topology.attn_tp_size
        world = NcclGroup(rank, world_size, FakeNccl(gpu, world_size), None)
        attn_tp: NcclGroup | None = None
        if size > 1:
            attn_tp = NcclGroup(topology.attn_tp_rank, size, FakeNccl(gpu, size), None)
        if size == world_size:
            attn_tp = world
        host: Any = FakeHost(gpu, rank, world_size)
        return EpochGroups(epoch, world, attn_tp, host)

    return join_group


class _InTurn:
    """An executor of calls that runs them one after another, in the thread that asks."""

    def map(self, run: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return iter([run(item) for item in items])

    def shutdown(self) -> None:
        pass


class Step:
    """What one executor did to launch a step: see FakeGpu.

    Attributes:
        is_ahead: Whether the one before had not been read.
        read_waits: Where the host has waited to finish it.
    """

    def __init__(self, gpu: FakeGpu, *, is_ahead: bool) -> None:
        self.number, self.is_ahead = gpu.num_steps, is_ahead
        self.launched, self.waits, self.collectives = gpu.launched, gpu.waits, gpu.collectives
        self.read_waits: list[str] = []


class FakeCell(Cell):
    """Executors on fake GPUs.

    Attributes:
        steps: Of each executor, in order.
    """

    def __init__(self, gpu: FakeGpu, **settings: Any) -> None:
        super().__init__(**{"dtype": "bfloat16", "device": "cuda", **settings})
        self._pool: Any = _InTurn()  # type: ignore[assignment]
        self.steps: list[list[Step]] = []
        for worker in self.workers:
            self._watch(gpu, worker)

    def _watch(self, gpu: FakeGpu, worker: Any) -> None:
        steps: list[Step] = []
        unread: list[Step] = []
        launch, finish = worker.launch, worker.finish

        def watched_launch(request: Any) -> Any:
            with gpu.step():
                pending = launch(request)
            steps.append(Step(gpu, is_ahead=bool(unread)))
            unread.append(steps[-1])
            return pending

        def watched_finish(pending: Any) -> Any:
            step = unread.pop(0)
            with gpu.reading(step.number):
                response = finish(pending)
            assert not gpu.launched
            step.read_waits = gpu.waits
            return response

        worker.launch, worker.finish = watched_launch, watched_finish
        self.steps.append(steps)
