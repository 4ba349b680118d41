"""Process groups through which executors exchange rows: gloo on the CPU, NCCL between GPUs.

              joins                       for                              CUDA      CPU
    world     every executor              experts, split dense MLPs        NCCL      gloo
    attn_tp   executors of one DP rank    attention heads, logits          NCCL      gloo
    host      every executor              set-up                           gloo      is world

Groups belong to one epoch: a new epoch closes them and makes others in the same process, so nothing
here registers itself anywhere.
"""

import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from executor.errors import PeerLost
from executor.parallel.gloo_sockets import Connections
from executor.parallel.layout import Topology

_c10d: Any = distributed_c10d  # its process groups, stores and options carry no types
CPU = torch.device("cpu")

# All are called to join at the same time, and who comes too late is called again. Until then others
# wait, unless their router gives up before (epochs.py).
FORM_TIMEOUT_S = 15.0

WAIT_SLICE = timedelta(milliseconds=20)  # in which a thread looks whether its group was closed


class RankGroup(ABC):
    """Some executors of one epoch, joined by one of PyTorch's backends.

    Every one must make the same calls, in the same order, with tensors of the same sizes. All
    tensors are contiguous. A call returns when the result is there for what this thread, or the
    current CUDA stream, runs next; over NCCL it may be captured.

    Args:
        rank: This process's rank.
        world_size: Ranks in it.
        backend: Runs the collectives. PyTorch publishes no types for it.
    """

    def __init__(self, rank: int, world_size: int, backend: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self._backend: list[Any] = [backend]  # empty after close()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Lays every rank's ``x`` end to end in ``out``, [world_size * len(x), ...]."""
        self._run("_allgather_base", out, x, options=_c10d.AllgatherOptions())

    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, scratch: torch.Tensor) -> None:
        """Adds up the ranks' ``x`` and puts this rank's part of the sum, [n, ...], in ``out``.

        Args:
            out: [n, ...].
            x: [world_size * n, ...]; part r goes to rank r.
            scratch: [at least x.numel()] of the same dtype, which gloo overwrites.
        """

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replaces ``x`` by its sum over the ranks."""
        self._run("allreduce", [x], options=_c10d.AllreduceOptions())

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        """Sends the r-th part of ``x`` to rank r; ``out`` gets this rank's parts, in rank order.

        Args:
            out: Rows received.
            x: Rows sent.
            out_splits: Rows from each rank, any of which may be 0. None: equal parts.
            in_splits: Rows to each rank. None: equal parts.
        """
        splits = (out_splits or [], in_splits or [])
        self._run("alltoall_base", out, x, *splits, options=_c10d.AllToAllOptions())

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Replaces ``x`` by what rank ``root`` has."""
        options = _c10d.BroadcastOptions()
        options.rootRank = root
        self._run("broadcast", [x], options=options)

    @abstractmethod
    def close(self) -> None:
        """Drops the connections. A peer that is in a collective gets an error, not a hang."""

    @abstractmethod
    def _run(self, method: str, *arguments: Any, options: Any) -> None:
        """Runs a collective of the backend."""


class GlooGroup(RankGroup):
    """A group over TCP. Its collectives block.

    Args:
        rank: This process's rank.
        world_size: Ranks in it.
        backend: Runs the collectives. PyTorch publishes no types for it. Nobody else may refer to
            it, since its connections stay open for as long as it lives: its abort() leaves them.
        connections: To its peers; None leaves them to it.
    """

    def __init__(
        self, rank: int, world_size: int, backend: Any, connections: Connections | None = None
    ) -> None:
        super().__init__(rank, world_size, backend)
        self._connections = connections or Connections()
        self._num_pending = 0  # collectives that were begun and have not ended well

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, scratch: torch.Tensor) -> None:
        # Half the time of gloo's own. Adds in rank order, and rounds once.
        received = scratch[: x.numel()].view(self.world_size, *out.shape)
        self.all_to_all(received, x)
        torch.sum(received, dim=0, out=out)

    def close(self) -> None:
        """Drops the connections, in a thread; ends them now if a collective has not ended well."""
        held = _take(self._backend)  # first: what has begun by now is pending, and no more begins
        if self._num_pending:
            self._connections.shut_down()
        _end(held, exit_waits=True)

    def _run(self, method: str, *arguments: Any, options: Any) -> None:
        self._num_pending += 1  # first: close() may come, in another thread, while it begins
        work = getattr(_live(self._backend), method)(*arguments, options)
        try:
            self._wait(work)
        except PeerLost:
            raise
        except RuntimeError as error:
            raise PeerLost(f"another executor left the group: {error}") from error
        self._num_pending -= 1

    def _wait(self, work: Any) -> None:
        """Waits until a collective has ended, or the group was closed.

        When a connection ends, gloo fails what waits for a message, but forgets a message of which
        it has received a part: it waits for the rest of that until its time-out. What the kernel
        had received by then may still be written into the tensors, at once, and nothing later.
        """
        while True:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or ended just now
                    work.wait()
                    return
            _live(self._backend)


class NcclGroup(RankGroup):
    """A group between GPUs. Its collectives run on the current stream and never stop the host."""

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, scratch: torch.Tensor) -> None:
        self._run("_reduce_scatter_base", out, x, options=_c10d.ReduceScatterOptions())

    def close(self) -> None:
        """Stops kernels that wait for peers. Returns before the connections are gone.

        NCCL's abort first tells its kernels to stop, and then waits until no captured graph holds
        one of them. The thread that would let go of those graphs may be the one that calls this.

        Source: NCCL, init.cc, commDestroySync, which waits for persistentRefs.
        """
        _end(_take(self._backend), exit_waits=False)  # it may wait for graphs that live until then

    def _run(self, method: str, *arguments: Any, options: Any) -> None:
        # Spares the detour over NCCL's own stream, which is for collectives that are not awaited.
        options.asyncOp = False
        getattr(_live(self._backend), method)(*arguments, options).wait()


@dataclass(frozen=True, slots=True)
class EpochGroups:
    """The groups of one executor in one epoch.

    Attributes:
        epoch: The epoch they were formed for.
        world: Every executor, by world rank.
        attn_tp: The executors of this DP rank; None if there is one.
        host: Every executor, through tensors on the host.
    """

    epoch: int
    world: RankGroup
    attn_tp: RankGroup | None
    host: GlooGroup

    def close(self) -> None:
        """Leaves all of them. A peer that is in a collective of any gets an error."""
        for group in _distinct(self.host, self.attn_tp, self.world):
            group.close()


def join_group(
    host: str,
    port: int,
    *,
    epoch: int,
    topology: Topology,
    device: torch.device = CPU,
    bind_host: str | None = None,
    timeout_s: float = 60.0,
) -> EpochGroups:
    """Forms the groups of an epoch. Returns when every executor has joined.

    Args:
        host: Where the store of the first rank listens (rendezvous.py).
        port: Its port.
        epoch: Keeps these groups' keys apart from those of a store's earlier ones.
        topology: This executor's place.
        device: Where the tensors live that the groups move: the CPU, or one GPU by its index.
        bind_host: This executor's own address as peers see it; the host name's if None.
        timeout_s: How long to wait for peers in every collective; now at most FORM_TIMEOUT_S.

    Raises:
        RuntimeError: The store or a peer did not answer in time. No group is left.
    """
    timeout = timedelta(seconds=timeout_s)
    form_timeout = min(timeout, timedelta(seconds=FORM_TIMEOUT_S))
    store = PrefixStore(
        f"epoch-{epoch}",
        TCPStore(host, port, is_master=False, timeout=form_timeout, wait_for_workers=False),
    )
    everyone = range(topology.world_size)
    first = topology.dp_rank * topology.attn_tp_size
    same_dp_rank = range(first, first + topology.attn_tp_size)
    with ExitStack() as formed:

        def form(name: str, members: range) -> RankGroup:
            keys, rank = PrefixStore(name, store), topology.world_rank - members.start
            group: RankGroup
            if device.type == "cpu":
                group = _gloo_group(keys, rank, len(members), bind_host, timeout)
            else:
                group = _nccl_group(keys, rank, members, device, timeout, f"{name}-{epoch}")
            formed.callback(group.close)
            return group

        keys = PrefixStore("host", store)
        on_host = _gloo_group(keys, topology.world_rank, len(everyone), bind_host, timeout)
        formed.callback(on_host.close)
        world = on_host if device.type == "cpu" else form("world", everyone)
        attn_tp: RankGroup | None = None
        if same_dp_rank == everyone:
            attn_tp = world
        elif len(same_dp_rank) > 1:
            attn_tp = form(f"attn-tp-{topology.dp_rank}", same_dp_rank)
        formed.pop_all()
    return EpochGroups(epoch, world, attn_tp, on_host)


def _gloo_group(
    store: PrefixStore, rank: int, world_size: int, bind_host: str | None, timeout: timedelta
) -> GlooGroup:
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = min(timeout, timedelta(seconds=FORM_TIMEOUT_S))
    connections = Connections()
    with connections.collect():  # the device too: it listens, and who calls it is a peer
        if bind_host is None:
            options._devices = [gloo.create_default_device()]
        else:
            options._devices = [gloo.create_device(hostname=bind_host)]
        backend = gloo(store, rank, world_size, options)
    backend._set_default_timeout(timeout)
    return GlooGroup(rank, world_size, backend, connections)


def _nccl_group(
    store: PrefixStore,
    rank: int,
    members: range,
    device: torch.device,
    timeout: timedelta,
    name: str,
) -> NcclGroup:
    """Forms an NCCL group now, not at its first collective, which may be in a capture.

    Args:
        members: World ranks, for PyTorch's own reports.
        name: For those reports.

    Source: torch.distributed.distributed_c10d, _new_process_group_helper.
    """
    nccl = _c10d.ProcessGroupNCCL  # CPU builds of PyTorch do not have it
    options = nccl.Options()
    options.is_high_priority_stream = False
    options._timeout = timeout
    options.global_ranks_in_group = list(members)
    options.group_name = name
    backend = nccl(store, rank, len(members), options)
    backend.eager_connect_single_device(device)
    return NcclGroup(rank, len(members), backend)


def _live(backend: list[Any]) -> Any:
    if not backend:
        raise PeerLost("this executor has left the group")
    return backend[0]


def _take(backend: list[Any]) -> list[Any]:
    """Returns what the list holds, and empties it: of several threads one gets it."""
    with suppress(IndexError):
        return [backend.pop()]
    return []


def _end(held: list[Any], *, exit_waits: bool) -> None:
    """Aborts and destroys what a group held, if it still held it. Does not wait for either.

    Args:
        held: From ``_take``. Nobody else may keep it.
        exit_waits: Whether the process may not exit before. A thread that comes out of PyTorch
            while the interpreter ends takes the process down with SIGABRT.
    """

    def end() -> None:
        held.pop().abort()

    if held:
        threading.Thread(target=end, daemon=not exit_waits).start()


def _distinct(*groups: RankGroup | None) -> list[RankGroup]:
    return list({id(group): group for group in groups if group is not None}.values())
