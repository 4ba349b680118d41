"""If this fails, a thread that waits for a stopped peer waits on, or a stranger's call is cut off."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from executor.parallel.gloo_sockets import Connections, Ends, _connection
from executor.parallel.layout import Topology
from executor.parallel.process_groups import FORM_ATTEMPTS, GlooGroup, Held, lead_to_members
from executor.parallel.rendezvous import MemberStore
from tests.executor.support.ranks.ranks import HOST, join, run_ranks
from tests.support.listening import listening_at

TCP_SYN_SENT = 2  # of Linux: called, and not answered

Pair = Callable[[socket.socket], tuple[socket.socket, socket.socket]]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found through /proc")


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def listener(cleanup: ExitStack) -> socket.socket:
    return cleanup.enter_context(socket.create_server((HOST, 0)))


@pytest.fixture
def pair(cleanup: ExitStack) -> Pair:
    """Makes a connection; returns both ends of it, the caller's and the listener's."""

    def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        caller = cleanup.enter_context(socket.create_connection(listener.getsockname()))
        return caller, cleanup.enter_context(listener.accept()[0])

    return connect


def collected(pair: Pair, count: int = 1) -> tuple[Connections, list[tuple[socket.socket, ...]]]:
    """Returns what has collected some new connections, and both ends of each."""
    connections = Connections()
    with connections.collect(), socket.create_server((HOST, 0)) as own:
        return connections, [pair(own) for _ in range(count)]


def is_open(connection: socket.socket, peer: socket.socket) -> bool:
    """Whether what the peer sends arrives."""
    try:
        peer.sendall(b"x")
        return connection.recv(1) == b"x"
    except OSError:
        return False


def test_connections_that_were_collected_end_and_others_go_on(listener: socket.socket, pair: Pair):
    older = pair(listener)
    connections, [ours] = collected(pair)
    newer = pair(listener)
    connections.shut_down()
    assert not is_open(*ours)
    assert is_open(*older)
    assert is_open(*newer)


def test_who_calls_a_server_that_was_there_before_is_not_cut_off(
    listener: socket.socket, pair: Pair
):
    connections = Connections()
    with connections.collect():
        _, accepted = pair(listener)
    found = {connection.number for connection in connections._by_inode.values()}
    assert accepted.fileno() not in found


def test_a_descriptor_that_is_another_socket_by_now_is_left_alone(
    listener: socket.socket, pair: Pair
):
    connections, [ends] = collected(pair)
    later = pair(listener)
    for end, other in zip(ends, later, strict=True):
        os.dup2(other.fileno(), end.fileno())  # as if it had been closed and handed out again
    connections.shut_down()
    assert is_open(*later)


def borrow(*ends: socket.socket) -> list[int]:
    """Gives each of them a second descriptor, which is found later than the first."""
    return [fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 500) for end in ends]


@pytest.mark.parametrize("when", ["collected", "ended"])
def test_connections_end_though_another_thread_borrows_them_for_a_moment(pair: Pair, when: str):
    """It looks at all sockets of the process, as a thread that forms another group does."""
    connections = Connections()
    with connections.collect(), socket.create_server((HOST, 0)) as own:
        ends = pair(own)
        borrowed = borrow(*ends) if when == "collected" else []
    if when == "ended":
        borrowed = borrow(*ends)
    else:
        for number in borrowed:
            os.close(number)
    connections.shut_down()
    assert not is_open(*ends)
    if when == "ended":
        for number in borrowed:
            os.close(number)


def test_a_descriptor_that_is_a_file_by_now_is_not_kept_open(tmp_path: Path):
    path = tmp_path / "file"
    with path.open("w") as file:
        assert _connection(file.fileno()) is None
        entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
        assert [os.path.realpath(entry) for entry in entries].count(str(path)) == 1


def test_several_threads_may_end_the_same_connections_at_once(pair: Pair):
    """A group is closed by the thread whose step failed, and by the one that was told to leave."""
    connections, pairs = collected(pair, 20)
    with ThreadPoolExecutor() as threads:
        for ended in [threads.submit(connections.shut_down) for _ in range(8)]:
            ended.result()
            assert not any(is_open(*ends) for ends in pairs), "it returns when all have ended"


def test_what_listens_goes_on_listening(pair: Pair):
    connections = Connections()
    with connections.collect():
        own = socket.create_server((HOST, 0))
    connections.shut_down()
    with own:
        assert is_open(*pair(own))


def test_of_sockets_that_listen_those_of_the_internet_have_ports(
    tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    connections = Connections()
    with connections.collect_listening():
        own = cleanup.enter_context(socket.create_server((HOST, 0)))
        local = cleanup.enter_context(socket.socket(socket.AF_UNIX))
        local.bind("a name that is longer than an address of the internet")
        local.listen()
    assert connections.ports() == {own.getsockname()[1]}


def test_what_will_listen_is_not_shut_down(pair: Pair):
    """Gloo ends the process when a socket on which it listens does."""
    connections = Connections()
    with connections.collect():
        own = socket.socket()
        own.bind((HOST, 0))
    with own:
        own.listen()
        connections.shut_down()
        assert is_open(*pair(own))


def num_collected(rank: int, port: int, world_size: int) -> int:
    """Returns how many connections of its own an executor has found; all look before any leaves."""
    groups = join(port, Topology(dp_rank=rank, dp_size=world_size))
    found = len(groups.host.connections._by_inode)
    groups.host.all_reduce(torch.zeros(1))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_executor_of_a_group_can_end_its_connections_to_all_others(world_size: int):
    """Those that it made and those that others made to it. In one process each finds all of them."""
    assert run_ranks(num_collected, world_size, world_size) == [world_size - 1] * world_size


def keys_written(rank: int, port: int, world_size: int) -> set[str]:
    """Returns what an executor has told its peers while they formed a group, and ran meanwhile."""
    keys, write = set(), MemberStore.set

    def note(store: MemberStore, key: str, value: bytes, num_in_round: int = 1) -> None:
        keys.add(key.split("/")[-2])
        write(store, key, value, num_in_round)

    def run(group: GlooGroup, method: str, *_: object, options: object) -> None:
        keys.add(method)

    with patch.object(MemberStore, "set", note), patch.object(GlooGroup, "_run", run):
        groups = join(port, Topology(dp_rank=rank, dp_size=world_size))
    groups.host.all_reduce(torch.zeros(1))
    groups.close()
    return keys


def test_members_between_whom_nobody_has_come_have_proven_themselves_by_the_ends_they_hold():
    for keys in run_ranks(keys_written, 3, 3):
        assert "held" in keys
        assert not keys & {"outcome", "alltoall_base"}


def held(ports: Sequence[int], *ends: tuple[int, int]) -> Held:
    """Returns what a member tells, by ports of this machine."""
    return Held({Ends(f"{HOST} {own}", f"{HOST} {peer}") for own, peer in ends}, list(ports))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            [held([1], (1, 10), (1, 11)), held([2], (10, 1), (2, 20)), held([3], (11, 1), (20, 2))],
            True,
        ),
        ([held([1], (1, 10)), held([2], (10, 1), (30, 443))], True),  # another thread's call
        ([held([1], (1, 10), (1, 40)), held([2], (10, 1))], False),  # a stranger's
        ([held([1], (1, 40)), held([2], (10, 1))], False),  # in the member's place
        ([held([1], (1, 10)), held([2])], False),
        ([held([1], (1, 10), (1, 11)), held([2], (10, 1), (11, 1))], False),  # one too many
        ([held([1, 2], (1, 10), (10, 1)), held([1, 2], (1, 10), (10, 1))], False),  # one process
        ([held([]), held([])], False),  # where none are found
    ],
)
def test_whether_nobody_has_come_between_members_follows_from_the_ends_they_hold(
    told: list[Held], expected: bool
):
    assert lead_to_members(told) == expected


# Strangers at gloo's port


def test_a_socket_that_takes_no_more_keeps_what_it_has_accepted_and_answers_no_caller(pair: Pair):
    connections = Connections()
    with connections.collect_listening():
        own = socket.create_server((HOST, 0))
    with own, socket.create_server((HOST, 0)) as other, socket.socket() as late:
        ends = pair(own)
        connections.take_no_more()
        assert is_open(*ends)
        assert is_open(*pair(other)), "it listened when none was collected"
        late.setblocking(False)
        assert late.connect_ex(own.getsockname()) == errno.EINPROGRESS
        assert late.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == bytes([TCP_SYN_SENT])


def test_connections_whose_other_end_no_member_holds_end_and_others_go_on(pair: Pair):
    connections = Connections()
    with connections.collect_listening():
        own = socket.create_server((HOST, 0))
        stranger = pair(own)
    with connections.collect():
        member = pair(own)
    with own:
        held = connections.ends()
        assert len(held) == 4, "both ends of each are in this process"
        calls = f"{HOST} {stranger[0].getsockname()[1]}"
        connections.keep_members({ends for ends in held if ends.own != calls})
        assert is_open(*member)
        assert not is_open(*stranger)


def test_calls_that_another_thread_made_for_a_group_of_its_own_go_on(
    listener: socket.socket, pair: Pair
):
    connections = Connections()
    with connections.collect():
        others = pair(listener)
    assert len(connections.ends()) == 1, "it may be of this group, as far as the kernel tells"
    connections.keep_members(set())
    connections.shut_down()
    assert is_open(*others)


# Calls the ports that answer as each rank of two, and tells how much it heard until they hung up.
STRANGER = """
import json, socket, struct, sys
calls = []
for address in json.loads(sys.argv[1]):
    for seat in (0, 1):
        try:
            calls.append(socket.create_connection(tuple(address), 0.5))
        except OSError:
            break
        calls[-1].settimeout(60)
        calls[-1].sendall(struct.pack("=q", seat))
print("seated" if calls else "no seats", flush=True)
print(sum(len(call.recv(1 << 16)) for call in calls), flush=True)
"""


def take_seats() -> subprocess.Popen[str]:
    """Calls every port of this process from another one."""
    addresses = json.dumps(sorted(listening_at(os.getpid())))
    stranger = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", STRANGER, addresses],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "seated\n"
    return stranger


def form_beside_strangers(rank: int, port: int, num_attempts: int) -> tuple[str, list[int]]:
    """Returns what became of a forming, and how much was heard in all seats of its first attempts."""
    strangers, write = [], MemberStore.set

    def write_late(store: MemberStore, key: str, value: bytes, num_in_round: int = 1) -> None:
        if key in [f"epoch-0/host/{attempt}/0/{rank}" for attempt in range(num_attempts)]:
            strangers.append(take_seats())
        write(store, key, value, num_in_round)

    outcome = "formed"
    with patch.object(MemberStore, "set", write_late):
        try:
            groups = join(port, Topology(dp_rank=rank, dp_size=2))
        except RuntimeError as error:
            outcome = str(error)
        else:
            total = torch.ones(1)
            groups.host.all_reduce(total)
            groups.close()
            assert total.item() == 2
    return outcome, [int(stranger.communicate()[0]) for stranger in strangers]


def test_a_stranger_that_takes_a_members_place_is_found_out_and_the_group_forms_without_it():
    formed = run_ranks(form_beside_strangers, 2, 1)
    assert formed == [("formed", [0])] * 2


def test_a_group_that_strangers_get_into_each_time_does_not_form():
    for problem, heard in run_ranks(form_beside_strangers, 2, FORM_ATTEMPTS):
        assert f"host: no connections in {FORM_ATTEMPTS} attempts" in problem
        assert heard == [0] * FORM_ATTEMPTS
