"""Process groups through which executors exchange rows: TCP on the CPU, NCCL between GPUs.

              joins                       for                              CUDA      CPU
    world     every executor              experts, split dense MLPs        NCCL      TCP
    attn_tp   executors of one DP rank    attention heads, logits          NCCL      TCP
    host      every executor              set-up                           TCP       is world

Groups belong to one epoch: a new epoch closes them and makes others in the same process, so nothing
here registers itself anywhere.

Over TCP, members know one another by the epoch's secret (mesh.py). NCCL's are as good as the 64-bit number
in the id of its communicator, which goes through the store.
"""

import math
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from executor.errors import PeerLost
from executor.parallel.epochs import join_address, split_address
from executor.parallel.layout import Topology
from executor.parallel.mesh import QUEUED_CONNECTIONS, Mesh, Place, bind, connect_all
from executor.parallel.rendezvous import MemberStore

_c10d: Any = distributed_c10d  # its process groups, stores and options carry no types
CPU = torch.device("cpu")

# All are called to join at the same time, and who comes too late is called again. Until then others
# wait, unless their router gives up before (epochs.py).
FORM_TIMEOUT_S = 15.0


class CannotListen(RuntimeError):
    """This machine has no address at which peers could call this member."""


class RankGroup(ABC):
    """Some executors of one epoch.

    Every one must make the same calls, in the same order, with tensors of the same sizes. All
    tensors are contiguous. A call returns when the result is there for what this thread, or the
    current CUDA stream, runs next; over NCCL it may be captured.

    Args:
        rank: This process's rank.
        world_size: Ranks in it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @property
    def is_waiting(self) -> bool:
        """Whether a thread of this process has been in one collective for 100 ms.

        Never, where collectives do not stop the host.
        """
        return False

    @abstractmethod
    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Lays every rank's ``x`` end to end in ``out``, [world_size * len(x), ...]."""

    @abstractmethod
    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> None:
        """Fills in every other rank's rows of ``x``, of which this rank has filled in its own.

        Over NCCL it is an all-reduce over zeros, exact for words.

        Args:
            x: int32 [sum of counts, ...].
            counts: Rows of each rank, in their order.
        """

    @abstractmethod
    def reduce_scatter(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        scratch: torch.Tensor,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Adds up the ranks' ``x`` and puts this rank's part of the sum, [n, ...], in ``out``.

        Args:
            out: [n, ...].
            x: [sum of counts, ...], which NCCL overwrites if there are counts.
            scratch: [at least world_size * out.numel()] of the same dtype, overwritten over TCP.
            counts: Rows of each rank's part; None: n each.
        """

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> None:
        """Replaces ``x`` by its sum over the ranks, the same bits on each."""

    @abstractmethod
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

    @abstractmethod
    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Replaces ``x`` by what rank ``root`` has."""

    @abstractmethod
    def close(self) -> None:
        """Drops the connections. A peer that is in a collective gets an error, not a hang."""


class TcpGroup(RankGroup):
    """A group over TCP, of tensors on the host. Its collectives block.

    Args:
        rank: This process's rank.
        mesh: Its connections to the others.
        world_size: Ranks in it.
    """

    def __init__(self, rank: int, world_size: int, mesh: Mesh) -> None:
        super().__init__(rank, world_size)
        self._mesh = mesh

    @property
    def is_waiting(self) -> bool:
        return self._mesh.is_waiting

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        sent, received = bytes_of(x), bytes_of(out)
        self._exchange([sent] * self.world_size, _cut(received, [len(sent)] * self.world_size))

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> None:
        parts = _cut(bytes_of(x), [count * _row_bytes(x) for count in counts])
        self._exchange([parts[self.rank]] * self.world_size, parts)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        scratch: torch.Tensor,
        counts: Sequence[int] | None = None,
    ) -> None:
        received = scratch[: self.world_size * out.numel()].view(self.world_size, *out.shape)
        parts = list(counts or [len(out)] * self.world_size)
        self.all_to_all(received.flatten(0, 1), x, [len(out)] * self.world_size, parts)
        add_up(received, out)

    def all_reduce(self, x: torch.Tensor) -> None:
        parts = x.new_empty(self.world_size, *x.shape)
        self.all_gather(parts, x)
        x.copy_(parts[0])
        for part in parts[1:]:
            x += part

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        width = _row_bytes(x)
        sizes = [
            [width * count for count in splits or [len(rows) // self.world_size] * self.world_size]
            for rows, splits in ((x, in_splits), (out, out_splits))
        ]
        self._exchange(_cut(bytes_of(x), sizes[0]), _cut(bytes_of(out), sizes[1]))

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        data, nothing = bytes_of(x), memoryview(b"")
        to_all, from_root = [nothing] * self.world_size, [nothing] * self.world_size
        if self.rank == root:
            to_all = [data] * self.world_size
        else:
            from_root[root] = data
        self._mesh.exchange(to_all, from_root)

    def close(self) -> None:
        self._mesh.close()

    def _exchange(self, sent: list[memoryview], received: list[memoryview]) -> None:
        self._mesh.exchange(sent, received)
        received[self.rank][:] = sent[self.rank]


def bytes_of(x: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host."""
    return x.view(-1).view(torch.uint8).numpy().data


def _row_bytes(x: torch.Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


def _cut(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Returns parts of so many bytes, end to end."""
    return [data[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


class NcclGroup(RankGroup):
    """A group between GPUs. Its collectives run on the current stream and never stop the host.

    Args:
        rank: This process's rank.
        world_size: Ranks in it.
        backend: Runs the collectives. PyTorch publishes no types for it.
        store: What the backend was given; it is asked for as long as that lives.
    """

    def __init__(self, rank: int, world_size: int, backend: Any, store: object) -> None:
        super().__init__(rank, world_size)
        self._backend: list[Any] = [backend]  # empty after close()
        self._store = store

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._run("_allgather_base", out, x, options=_c10d.AllgatherOptions())

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> None:
        first = sum(counts[: self.rank])
        x[:first].zero_()
        x[first + counts[self.rank] :].zero_()
        self.all_reduce(x)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        scratch: torch.Tensor,
        counts: Sequence[int] | None = None,
    ) -> None:
        if counts is None:
            self._run("_reduce_scatter_base", out, x, options=_c10d.ReduceScatterOptions())
            return
        self.all_reduce(x)
        out.copy_(x[sum(counts[: self.rank]) :][: len(out)])

    def all_reduce(self, x: torch.Tensor) -> None:
        self._run("allreduce", [x], options=_c10d.AllreduceOptions())

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        splits = (out_splits or [], in_splits or [])
        self._run("alltoall_base", out, x, *splits, options=_c10d.AllToAllOptions())

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank = root
        self._run("broadcast", [x], options=options)

    def close(self) -> None:
        """Stops kernels that wait for peers. Returns before the connections are gone.

        NCCL's abort first tells its kernels to stop, and then waits until no captured graph holds
        one of them. The thread that would let go of those graphs may be the one that calls this.

        Source: NCCL, init.cc, commDestroySync, which waits for persistentRefs.
        """
        with suppress(IndexError):  # of several threads one gets it
            held = [self._backend.pop()]
            # It may wait for graphs that live until the process exits.
            threading.Thread(target=_abort, args=(held, self._store), daemon=True).start()

    def _run(self, method: str, *arguments: Any, options: Any) -> None:
        # Spares the detour over NCCL's own stream, which is for collectives that are not awaited.
        options.asyncOp = False
        if not self._backend:
            raise PeerLost("this executor has left the group")
        work = getattr(self._backend[0], method)(*arguments, options)
        if work is not None:  # as NCCL returns none, while other backends do
            work.wait()


def add_up(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Adds ranks' parts [world_size, ...] in order of rank, in float32, and rounds once.

    A number's bits do not depend on where it stands, as those of PyTorch's sum over a dimension do,
    which takes longer. May overwrite the parts.
    """
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    out.copy_(total)


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
    host: RankGroup

    @property
    def is_waiting(self) -> bool:
        """Whether a thread has been in one collective of theirs for 100 ms."""
        return any(
            group is not None and group.is_waiting
            for group in (self.world, self.attn_tp, self.host)
        )

    def close(self) -> None:
        """Leaves all of them. A peer that is in a collective of any gets an error."""
        for group in _distinct(self.host, self.attn_tp, self.world):
            group.close()


def join_group(
    host: str,
    port: int,
    secret: bytes,
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
        secret: The epoch's, which every member has and nobody else.
        epoch: Keeps these groups' keys apart from those of a store's earlier ones.
        topology: This executor's place.
        device: Where the tensors live that the groups move: the CPU, or one GPU by its index.
        bind_host: This executor's own address as peers see it; the host name's if None.
        timeout_s: How long to wait for peers in every collective; now at most FORM_TIMEOUT_S.

    Raises:
        RuntimeError: The store or a peer did not answer in time. No group is left.
    """
    rank, everyone = topology.world_rank, range(topology.world_size)
    first = topology.dp_rank * topology.attn_tp_size
    same_dp_rank = range(first, first + topology.attn_tp_size)
    board = MemberStore(host, port, secret, min(timeout_s, FORM_TIMEOUT_S))
    with ExitStack() as formed, closing(board):

        def form(name: str, members: range, over: torch.device) -> RankGroup:
            place = Place(f"epoch-{epoch}/{name}", rank - members.start, len(members))
            group: RankGroup
            if over.type == "cpu":
                group = _tcp_group(board, place, secret, bind_host, timeout_s)
            else:
                keys = PrefixStore(place.group, board)
                group = _nccl_group(keys, place, members, over, timeout_s, board)
            formed.callback(group.close)
            return group

        on_host = form("host", everyone, CPU)
        world = on_host if device.type == "cpu" else form("world", everyone, device)
        attn_tp: RankGroup | None = None
        if same_dp_rank == everyone:
            attn_tp = world
        elif len(same_dp_rank) > 1:
            attn_tp = form(f"attn-tp-{topology.dp_rank}", same_dp_rank, device)
        if len(_distinct(on_host, world, attn_tp)) > 1:  # else all have said that theirs is formed
            # Nobody waits for the store any more.
            board.tell_all(f"epoch-{epoch}/joined", b"", rank, len(everyone))
        formed.pop_all()
    return EpochGroups(epoch, world, attn_tp, on_host)


def _tcp_group(
    board: MemberStore, place: Place, secret: bytes, bind_host: str | None, timeout_s: float
) -> TcpGroup:
    """Forms a group of members that know the secret.

    Raises:
        StoreLost: A member did not come.
        CannotListen: Nobody could call this one.
        RuntimeError: Members did not connect.
    """
    with closing(_listen(bind_host)) as listening:
        own = join_address(*listening.getsockname()[:2])
        told = board.tell_all(f"{place.group}/address", own.encode(), place.rank, place.world_size)
        addresses = [
            (host, int(port)) for host, port in map(split_address, map(bytes.decode, told))
        ]
        try:
            connections = connect_all(
                listening, addresses, place, secret, min(timeout_s, FORM_TIMEOUT_S)
            )
        except OSError as error:
            raise RuntimeError(f"{place.group}: {error}") from error
    return TcpGroup(place.rank, place.world_size, Mesh(place.rank, connections, timeout_s))


def _listen(host: str | None) -> socket.socket:
    listening = None
    try:
        listening = bind(host or socket.gethostname())
        listening.listen(QUEUED_CONNECTIONS)
    except (OSError, ValueError) as error:
        if listening is not None:
            listening.close()
        raise CannotListen(
            f"no member of a group can call this one on {host or 'the host of this name'}: {error}; "
            f"each executor of a group needs a host of its own machine: set advertised_host"
        ) from error
    return listening


def _nccl_group(
    store: PrefixStore,
    place: Place,
    members: range,
    device: torch.device,
    timeout_s: float,
    board: MemberStore,
) -> NcclGroup:
    """Forms an NCCL group now, not at its first collective, which may be in a capture.

    Args:
        members: World ranks, for PyTorch's own reports.
        board: What `store` is part of.

    Source: torch.distributed.distributed_c10d, _new_process_group_helper.
    """
    nccl = _c10d.ProcessGroupNCCL  # CPU builds of PyTorch do not have it
    options = nccl.Options()
    options.is_high_priority_stream = False
    options._timeout = timedelta(seconds=timeout_s)
    options.global_ranks_in_group = list(members)
    options.group_name = place.group
    backend = nccl(store, place.rank, len(members), options)
    backend.eager_connect_single_device(device)
    return NcclGroup(place.rank, len(members), backend, board)


def _abort(held: list[Any], store: object = None) -> None:
    """Aborts and destroys what a group held.

    Args:
        held: The backend. Nobody else may keep it.
        store: Kept until then.
    """
    held.pop().abort()


def _distinct(*groups: RankGroup | None) -> list[RankGroup]:
    return list({id(group): group for group in groups if group is not None}.values())
