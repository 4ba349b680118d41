"""If this fails, a group cannot form again, or a lost peer is waited for.

Each rank of gloo's groups is a thread here, with connections of its own.
"""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, distributed_c10d

from executor.parallel import process_groups as parallel
from executor.parallel.gloo_sockets import still_open
from executor.parallel.layout import Topology
from executor.parallel.process_groups import (
    EpochGroups,
    GlooGroup,
    NcclGroup,
    Place,
    RankGroup,
    join_group,
)
from executor.parallel.rendezvous import open_store
from tests.executor.support.ranks.rank_threads import on_every_rank, topologies
from tests.executor.support.ranks.ranks import HOST, SECRET, TIMEOUT_S

# What gloo says of a connection that a peer ended: when it reads, and when it writes.
SO_MAX_PACING_RATE = 47  # of Linux; Python has no name for it
LOST = ("closed by peer", "reset by peer", "Broken pipe", "left the group")


@pytest.fixture
def store() -> Iterator[Any]:
    """Where the ranks of a test meet."""
    store = open_store(HOST, SECRET)
    yield store
    store.close()


def sums(place: Topology, groups: EpochGroups) -> list[int]:
    """Returns sums over the world and, if there is one, over the attention-TP group."""
    found = []
    for group in (groups.world, groups.attn_tp):
        if group is not None:
            x = torch.tensor([10**place.world_rank])
            group.all_reduce(x)
            found.append(int(x))
    return found


def test_groups_form_again_under_every_epoch_in_one_process(store: Any):
    for epoch, places in enumerate((topologies(2, 1), topologies(1, 2), topologies(2, 1))):
        seen = on_every_rank(store.port, epoch, places, sums)
        assert seen == [[11] * (1 + (places[0].attn_tp_size > 1))] * 2


def test_an_attention_tp_group_has_the_executors_of_one_dp_rank(store: Any):
    seen = on_every_rank(store.port, 1, topologies(2, 2), sums)
    assert seen == [[1111, 11]] * 2 + [[1111, 1100]] * 2


@pytest.mark.parametrize("waits_in", ["world", "attn_tp", "host"])
def test_a_rank_whose_peer_left_gets_an_error_and_can_join_the_next_epoch(
    waits_in: str, store: Any
):
    """Also while what failed is still referred to, as by an error that is on its way."""
    held = []

    def act(place: Topology, groups: EpochGroups) -> None:
        held.append(groups)
        if place.world_rank == 1:
            return
        group: RankGroup = getattr(groups, waits_in)
        if group is groups.attn_tp and place.dp_rank == 1:
            return  # no executor of its DP rank has left
        group.all_reduce(torch.zeros(3))

    seen = on_every_rank(store.port, 1, topologies(2, 2), act)
    for result in (result for result in seen if result is not None):
        assert any(words in str(result) for words in LOST), result
    waited = [True, False, False, False] if waits_in == "attn_tp" else [True, False, True, True]
    assert [isinstance(result, RuntimeError) for result in seen] == waited
    assert on_every_rank(store.port, 2, topologies(2, 2), sums)[0] == [1111, 11]


def test_a_group_that_has_formed_waits_as_long_as_it_was_told(store: Any):
    def act(place: Topology, groups: EpochGroups) -> float:
        timeout: timedelta = groups.host._backend[0].options._timeout
        return timeout.total_seconds()

    assert on_every_rank(store.port, 1, topologies(2, 1), act) == [TIMEOUT_S] * 2


def test_a_group_that_was_left_collects_nothing(store: Any):
    def act(place: Topology, groups: EpochGroups) -> None:
        groups.close()
        groups.close()
        groups.world.all_reduce(torch.zeros(1))

    for result in on_every_rank(store.port, 1, topologies(2, 1), act):
        assert "has left the group" in str(result)


def test_a_group_that_does_not_form_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, store: Any
):
    """Peers that did form it would else wait for this executor until their timeout."""
    closed = []
    host = SimpleNamespace(close=lambda: closed.append("host"))
    monkeypatch.setattr(parallel, "_gloo_group", lambda *args: host)

    def fail(*args: Any) -> NcclGroup:
        raise RuntimeError("no NCCL here")

    monkeypatch.setattr(parallel, "_nccl_group", fail)
    with pytest.raises(RuntimeError, match="no NCCL here"):
        join_group(
            HOST,
            store.port,
            SECRET,
            epoch=1,
            topology=Topology(dp_size=2),
            device=torch.device("cuda"),
        )
    assert closed == ["host"]


def test_a_member_whose_host_is_another_machines_says_so_and_does_not_wait_for_peers(store: Any):
    """They wait for its address, and it would wait for them."""
    place = Topology(dp_rank=1, dp_size=2)
    with pytest.raises(RuntimeError, match=r"cannot listen on 203\.0\.113\.7: .*advertised_host"):
        join_group(HOST, store.port, SECRET, epoch=1, topology=place, bind_host="203.0.113.7")


# NCCL, whose calls are checked against the signatures that every backend shares


class RecordingNccl:
    """Stands in for ProcessGroupNCCL. Takes only what gloo's binding of each method takes too.

    As that, it returns nothing for a collective that runs on the current stream.
    """

    class Options:
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.place = (rank, size)
        self.options = options
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.aborted_in: list[threading.Thread] = []
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.aborted_in.append(threading.current_thread())
        self.is_aborted.set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        assert hasattr(distributed_c10d.ProcessGroupGloo, name), f"no process group has {name}"

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return None

        return call


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> NcclGroup:
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", RecordingNccl, raising=False)
    store = PrefixStore("a", HashStore())
    device = torch.device("cuda", 3)
    place, board = Place("attn-tp-1", 1, 2), object()
    return parallel._nccl_group(store, place, range(2, 4), device, timedelta(seconds=7), board)


@pytest.fixture
def backend(nccl: NcclGroup) -> RecordingNccl:
    [backend] = nccl._backend
    return backend


def test_an_nccl_group_connects_before_its_first_collective(
    nccl: NcclGroup, backend: RecordingNccl
):
    assert (nccl.rank, nccl.world_size) == backend.place == (1, 2)
    assert backend.options._timeout == timedelta(seconds=7)
    assert backend.options.global_ranks_in_group == [2, 3]
    assert backend.calls == [("eager_connect_single_device", (torch.device("cuda", 3),))]


IN, OUT, SCRATCH = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(12)
DEALT = ([2], [2])  # rows from and to each rank
NAMES = {id(IN): "in", id(OUT): "out"}
# The method of a process group, its arguments but for the last, and what kind of options that is.
COLLECTIVES: list[tuple[Callable[[RankGroup], None], str, list[Any], str]] = [
    (lambda g: g.all_gather(OUT, IN), "_allgather_base", ["out", "in"], "Allgather"),
    (
        lambda g: g.reduce_scatter(OUT, IN, SCRATCH),
        "_reduce_scatter_base",
        ["out", "in"],
        "ReduceScatter",
    ),
    (lambda g: g.all_reduce(IN), "allreduce", [["in"]], "Allreduce"),
    (lambda g: g.all_to_all(OUT, IN), "alltoall_base", ["out", "in", [], []], "AllToAll"),
    (lambda g: g.all_to_all(OUT, IN, *DEALT), "alltoall_base", ["out", "in", *DEALT], "AllToAll"),
    (lambda g: g.broadcast(IN, g.rank), "broadcast", [["in"]], "Broadcast"),
]


def named(argument: Any) -> Any:
    if isinstance(argument, list):
        return [named(item) for item in argument]
    return NAMES.get(id(argument), argument)


@pytest.mark.parametrize(("collect", "method", "arguments", "options"), COLLECTIVES)
def test_nccl_collectives_run_on_the_current_stream(
    nccl: NcclGroup,
    backend: RecordingNccl,
    collect: Any,
    method: str,
    arguments: list[Any],
    options: str,
):
    backend.calls.clear()
    collect(nccl)
    [(called, (*given, last))] = backend.calls
    assert (called, named(given)) == (method, arguments)
    assert type(last).__name__ == f"{options}Options"
    assert last.asyncOp is False
    if options == "Broadcast":
        assert last.rootRank == 1
    if options in ("ReduceScatter", "Allreduce"):
        assert last.reduceOp == distributed_c10d.ReduceOp.SUM


def test_what_nccl_is_called_with_every_backend_takes():
    """Gloo's binding raises TypeError for arguments that ProcessGroupNCCL, too, would refuse."""
    kind = distributed_c10d.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=HOST)]
    alone = NcclGroup(0, 1, kind(PrefixStore("alone", HashStore()), 0, 1, options), None)
    for collect, *_ in COLLECTIVES:
        collect(alone)


def test_closing_an_nccl_group_aborts_it_once_and_from_a_thread_of_its_own(
    nccl: NcclGroup, backend: RecordingNccl
):
    """NCCL's abort waits until captured graphs are gone, which the caller holds."""
    nccl.close()
    nccl.close()
    assert backend.is_aborted.wait(TIMEOUT_S)
    [thread] = backend.aborted_in
    assert thread is not threading.current_thread()
    assert thread.daemon, "the process would wait for it while it holds the graphs"


def test_a_group_that_is_closed_as_the_interpreter_ends_is_aborted():
    script = """
import atexit
from types import SimpleNamespace
from executor.parallel.process_groups import GlooGroup

group = GlooGroup(0, 1, SimpleNamespace(abort=lambda: print("aborted")))
atexit.register(group.close)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (ended.stdout, ended.returncode) == ("aborted\n", 0), ended.stderr


def test_a_rank_whose_peer_stands_still_says_that_it_waits_and_the_other_does_not(store: Any):
    """A router takes whoever is waited for as lost."""
    is_waiting, said = threading.Event(), dict[int, bool]()

    def wait_or_stand_still(place: Topology, groups: EpochGroups) -> None:
        if place.world_rank == 0:
            with calling_after(lambda: groups.is_waiting, is_waiting.set):
                groups.world.all_reduce(torch.zeros(1))
        else:
            assert is_waiting.wait(TIMEOUT_S)
            said[1] = groups.is_waiting
            groups.world.all_reduce(torch.zeros(1))
        assert not groups.is_waiting

    assert on_every_rank(store.port, 0, topologies(2, 1), wait_or_stand_still) == [None, None]
    assert said == {1: False}


@pytest.mark.skipif(sys.platform != "linux", reason="connections are found through /proc")
def test_a_thread_that_waits_for_a_stopped_peer_is_freed_when_its_group_is_closed(store: Any):
    is_freed = threading.Event()

    def wait_or_stand_still(place: Topology, groups: EpochGroups) -> None:
        if place.world_rank == 1:
            is_freed.wait(TIMEOUT_S)
            return
        with closing_after(lambda: groups.host._num_pending > 0, groups):
            try:
                groups.world.all_reduce(torch.zeros(1))
            finally:
                is_freed.set()

    error, _ = on_every_rank(store.port, 0, topologies(2, 1), wait_or_stand_still)
    assert isinstance(error, RuntimeError)
    assert "Timed out" not in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="connections are found through /proc")
def test_a_thread_that_has_received_half_a_message_is_freed_when_its_group_is_closed(store: Any):
    """Gloo fails what waits for a message when its connection ends, but not what is receiving one."""
    is_freed = threading.Event()
    received = torch.zeros(2**26, dtype=torch.uint8)

    def send_slowly_or_receive(place: Topology, groups: EpochGroups) -> None:
        groups.host.wait_for_peers(timedelta(seconds=60))  # so long a thread outlives the test
        if place.world_rank == 1:
            set_pace(groups.host, len(received) / TIMEOUT_S)
            with closing_after(is_freed.is_set, groups):
                groups.world.broadcast(torch.ones_like(received), 1)
        else:
            with closing_after(lambda: bool(received[0]), groups):
                try:
                    groups.world.broadcast(received, 1)
                finally:
                    is_freed.set()

    errors = on_every_rank(store.port, 0, topologies(2, 1), send_slowly_or_receive)
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "Timed out" not in str(error)
    assert received[0], "some of it came"
    assert not received[-1], "not all of it came"


def set_pace(group: GlooGroup, bytes_per_s: float) -> None:
    """Has the kernel send so much at most through each of a group's connections."""
    found = {inode: found.number for inode, found in group.connections._by_inode.items()}
    for _, connection in still_open(found):
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(bytes_per_s))


@contextmanager
def closing_after(happened: Callable[[], bool], groups: EpochGroups) -> Iterator[None]:
    """Closes the groups, in another thread, when something has happened, and at the end."""
    with calling_after(happened, groups.close):
        yield


@contextmanager
def calling_after(happened: Callable[[], bool], call: Callable[[], object]) -> Iterator[None]:
    """Calls, in another thread, when something has happened or the block ends."""
    has_ended = threading.Event()

    def wait() -> None:
        while not happened() and not has_ended.wait(0.001):
            pass
        call()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
