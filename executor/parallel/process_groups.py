"""Process groups through which executors exchange rows: gloo on the CPU, NCCL between GPUs.

              joins                       for                              CUDA      CPU
    world     every executor              experts, split dense MLPs        NCCL      gloo
    attn_tp   executors of one DP rank    attention heads, logits          NCCL      gloo
    host      every executor              set-up                           gloo      is world

Groups belong to one epoch: a new epoch closes them and makes others in the same process, so nothing
here registers itself anywhere.

A group over gloo has formed when members have told one another, under the epoch's secret, both ends
of the same connections. Where somebody else has called, or ends do not tell, each shows over its
connections that it knows the secret; where a stranger has taken a member's place, all drop the
connections and make others. NCCL's are as good as the 64-bit number in the id of its communicator,
which goes through the store.
"""

import hmac
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from executor.errors import PeerLost
from executor.parallel.gloo_sockets import Connections, Ends
from executor.parallel.layout import Topology
from executor.parallel.rendezvous import MemberStore, RoundStore, StoreLost
from executor.parallel.threads import ReusedThreads

_c10d: Any = distributed_c10d  # its process groups, stores and options carry no types
CPU = torch.device("cpu")

# All are called to join at the same time, and who comes too late is called again. Until then others
# wait, unless their router gives up before (epochs.py).
FORM_TIMEOUT_S = 15.0
FORM_ATTEMPTS = 5  # of a group over gloo, into whose connections strangers may have got
CONNECT_TIMEOUT = timedelta(seconds=3)  # of one of them, once all members are there
PROOF_BYTES = 32

# Ends groups over gloo. The process waits for its threads when it exits: one that comes out of PyTorch
# while the interpreter ends takes the process down with SIGABRT.
_ENDING = ReusedThreads("end")

WAIT_SLICE = timedelta(milliseconds=20)  # in which a thread looks whether its group was closed
WAITING_SLICES = 5  # after which it says that it waits


class CannotListen(RuntimeError):
    """This machine has no address at which peers could call this member."""


class RankGroup(ABC):
    """Some executors of one epoch, joined by one of PyTorch's backends.

    Every one must make the same calls, in the same order, with tensors of the same sizes. All
    tensors are contiguous. A call returns when the result is there for what this thread, or the
    current CUDA stream, runs next; over NCCL it may be captured.

    Args:
        rank: This process's rank.
        world_size: Ranks in it.
        backend: Runs the collectives. PyTorch publishes no types for it.

    Attributes:
        is_waiting: Whether a thread of this process has been in one collective for 100 ms. Never,
            where collectives do not stop the host.
    """

    def __init__(self, rank: int, world_size: int, backend: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_waiting = False
        self._backend: list[Any] = [backend]  # empty after close()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Lays every rank's ``x`` end to end in ``out``, [world_size * len(x), ...]."""
        self._run("_allgather_base", out, x, options=_c10d.AllgatherOptions())

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
            scratch: [at least world_size * out.numel()] of the same dtype, which gloo overwrites.
            counts: Rows of each rank's part; None: n each.
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
        self.connections = connections or Connections()
        self._num_pending = 0  # collectives that were begun and have not ended well

    def reduce_scatter(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        scratch: torch.Tensor,
        counts: Sequence[int] | None = None,
    ) -> None:
        # Half the time of gloo's own, which adds in another order for each part.
        received = scratch[: self.world_size * out.numel()].view(self.world_size, *out.shape)
        parts = list(counts or [len(out)] * self.world_size)
        self.all_to_all(received.flatten(0, 1), x, [len(out)] * self.world_size, parts)
        add_up(received, out)

    def wait_for_peers(self, timeout: timedelta) -> None:
        """Sets how long a collective waits for the others."""
        _live(self._backend)._set_default_timeout(timeout)

    def close(self) -> None:
        """Drops the connections, in a thread; ends them now if a collective has not ended well."""
        held = _take(self._backend)  # first: what has begun by now is pending, and no more begins
        if self._num_pending:
            self.connections.shut_down()
        if held:
            try:
                _ENDING.submit(_abort, held)
            except RuntimeError:  # there are no more threads, as the interpreter ends
                _abort(held)

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
        num_slices = 0
        try:
            while True:
                try:
                    work.wait(WAIT_SLICE)
                    return
                except RuntimeError:
                    if work.is_completed():  # it failed, or ended just now
                        work.wait()
                        return
                _live(self._backend)
                num_slices += 1
                self.is_waiting = num_slices >= WAITING_SLICES
        finally:
            self.is_waiting = False


class NcclGroup(RankGroup):
    """A group between GPUs. Its collectives run on the current stream and never stop the host.

    Args:
        rank: This process's rank.
        world_size: Ranks in it.
        backend: Runs the collectives. PyTorch publishes no types for it.
        store: What the backend was given; it is asked for as long as that lives.
    """

    def __init__(self, rank: int, world_size: int, backend: Any, store: object) -> None:
        super().__init__(rank, world_size, backend)
        self._store = store

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

    def close(self) -> None:
        """Stops kernels that wait for peers. Returns before the connections are gone.

        NCCL's abort first tells its kernels to stop, and then waits until no captured graph holds
        one of them. The thread that would let go of those graphs may be the one that calls this.

        Source: NCCL, init.cc, commDestroySync, which waits for persistentRefs.
        """
        if held := _take(self._backend):  # it may wait for graphs that live until the process exits
            threading.Thread(target=_abort, args=(held, self._store), daemon=True).start()

    def _run(self, method: str, *arguments: Any, options: Any) -> None:
        # Spares the detour over NCCL's own stream, which is for collectives that are not awaited.
        options.asyncOp = False
        work = getattr(_live(self._backend), method)(*arguments, options)
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
    timeout = timedelta(seconds=timeout_s)
    rank, everyone = topology.world_rank, range(topology.world_size)
    first = topology.dp_rank * topology.attn_tp_size
    same_dp_rank = range(first, first + topology.attn_tp_size)
    board = MemberStore(host, port, secret, min(timeout_s, FORM_TIMEOUT_S))
    with ExitStack() as formed, closing(board):

        def form(name: str, members: range, over: torch.device) -> RankGroup:
            place, prefix = Place(name, rank - members.start, len(members)), f"epoch-{epoch}/{name}"
            group: RankGroup
            if over.type == "cpu":
                store = RoundStore(board, prefix, place.rank, place.world_size)
                group = _gloo_group(store, place, secret, bind_host, timeout)
            else:
                keys = PrefixStore(prefix, board)
                group = _nccl_group(keys, place, members, over, timeout, board)
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
            all_groups = RoundStore(board, f"epoch-{epoch}", rank, len(everyone))
            all_groups.tell_all("joined", b"")  # nobody waits for the store any more
        formed.pop_all()
    return EpochGroups(epoch, world, attn_tp, on_host)


class Place(NamedTuple):
    """A rank of a group that forms."""

    group: str
    rank: int
    world_size: int


def _gloo_group(
    store: RoundStore, place: Place, secret: bytes, bind_host: str | None, timeout: timedelta
) -> GlooGroup:
    """Forms a group of members that know the secret.

    Raises:
        StoreLost: A member did not come.
        CannotListen: Nobody could call this one.
        RuntimeError: Connections failed, or were a stranger's, each time.
    """
    for attempt in range(FORM_ATTEMPTS):
        keys, outcome = store.under(str(attempt)), b"formed"
        with ExitStack() as left:
            try:
                group = _connect(keys, place, bind_host, timeout)
                left.callback(group.close)
                left.callback(group.connections.shut_down)  # for peers that wait for this member
                is_proven = lead_to_members(_exchange_ends(group, keys))
                if not is_proven:
                    _prove(group, place, secret)
            except (StoreLost, CannotListen):
                raise
            except RuntimeError as error:
                is_proven, outcome = False, str(error).encode()
                left.close()  # first: those peers have an outcome then, too
                keys.tell("held", b"[[], []]")  # and so have those that wait for this
            # All members find the same, in the same ends. Where these prove all, a peer that is lost
            # from here on fails its own Join or the first step: no round need tell.
            if not is_proven:
                outcomes = keys.tell_all("outcome", outcome)
            if is_proven or outcomes == [b"formed"] * place.world_size:
                group.wait_for_peers(timeout)
                left.pop_all()
                return group
    problems = [problem.decode() for problem in outcomes if problem != b"formed"]
    raise RuntimeError(f"{place.group}: no connections in {FORM_ATTEMPTS} attempts: {problems[0]}")


def _connect(
    store: RoundStore, place: Place, bind_host: str | None, timeout: timedelta
) -> GlooGroup:
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = min(timeout, CONNECT_TIMEOUT)
    options._threads = 1  # as collectives run one at a time: each is one more to start and to end
    connections = Connections()
    with connections.collect_listening():
        try:
            if bind_host is None:
                options._devices = [gloo.create_default_device()]
            else:
                options._devices = [gloo.create_device(hostname=bind_host)]
        except RuntimeError as error:
            raise CannotListen(
                f"gloo cannot listen on {bind_host or 'the host of this name'}: {error}; each executor "
                f"of a group needs a host of its own machine: set advertised_host"
            ) from error
    with connections.collect():  # also who has called the device by now: it is a peer
        backend = gloo(store, place.rank, place.world_size, options)
    return GlooGroup(place.rank, place.world_size, backend, connections)


class Held(NamedTuple):
    """What a member tells of its connections: their ends, and the ports on which gloo listens."""

    ends: set[Ends]
    ports: list[int]


def _exchange_ends(group: GlooGroup, store: RoundStore) -> list[Held]:
    """Drops strangers' connections. Returns what each member held before, by rank."""
    connections = group.connections
    told = store.tell_all(  # hence all have connected
        "held", json.dumps([sorted(connections.ends()), sorted(connections.ports())]).encode()
    )
    held = [Held({Ends(*each) for each in ends}, ports) for ends, ports in map(json.loads, told)]
    connections.take_no_more()
    connections.keep_members({end for member in held for end in member.ends})
    return held


def lead_to_members(held: Sequence[Held]) -> bool:
    """Whether the members hold one connection between each two of them, and nobody else called.

    False also where that cannot be told: where sockets are not found, or a process holds several ranks.

    Args:
        held: By rank.
    """
    for rank, (ends, ports) in enumerate(held):
        peers = list[int]()
        for end in ends:
            back = Ends(end.peer, end.own)
            found = [other for other, member in enumerate(held) if back in member.ends]
            if not found and int(end.own.rpartition(" ")[2]) in ports:
                return False
            peers += found
        if sorted(peers) != [other for other in range(len(held)) if other != rank]:
            return False
    return True


def _prove(group: GlooGroup, place: Place, secret: bytes) -> None:
    """Shows each member that this one knows the secret.

    Raises:
        RuntimeError: Some connection does not lead to the member that it should.
    """

    def proofs(of: Callable[[int], tuple[int, int]]) -> torch.Tensor:
        ranks = range(place.world_size)
        texts = [b"%s %d %d" % (place.group.encode(), *of(rank)) for rank in ranks]
        macs = b"".join(hmac.digest(secret, text, "sha256") for text in texts)
        return torch.frombuffer(bytearray(macs), dtype=torch.uint8)

    received = torch.empty(place.world_size * PROOF_BYTES, dtype=torch.uint8)
    group.all_to_all(received, proofs(lambda peer: (place.rank, peer)))
    if not torch.equal(received, proofs(lambda peer: (peer, place.rank))):
        raise RuntimeError("a peer does not know the epoch's secret")


def _nccl_group(
    store: PrefixStore,
    place: Place,
    members: range,
    device: torch.device,
    timeout: timedelta,
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
    options._timeout = timeout
    options.global_ranks_in_group = list(members)
    options.group_name = place.group
    backend = nccl(store, place.rank, len(members), options)
    backend.eager_connect_single_device(device)
    return NcclGroup(place.rank, len(members), backend, board)


def _live(backend: list[Any]) -> Any:
    if not backend:
        raise PeerLost("this executor has left the group")
    return backend[0]


def _take(backend: list[Any]) -> list[Any]:
    """Returns what the list holds, and empties it: of several threads one gets it."""
    with suppress(IndexError):
        return [backend.pop()]
    return []


def _abort(held: list[Any], store: object = None) -> None:
    """Aborts and destroys what a group held.

    Args:
        held: From ``_take``, and not empty. Nobody else may keep it.
        store: Kept until then.
    """
    held.pop().abort()


def _distinct(*groups: RankGroup | None) -> list[RankGroup]:
    return list({id(group): group for group in groups if group is not None}.values())
