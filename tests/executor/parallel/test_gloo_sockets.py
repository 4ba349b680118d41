"""If this fails, a thread that waits for a stopped peer waits on, or a stranger's call is cut off."""

import fcntl
import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from executor.parallel.gloo_sockets import Connections, _address
from executor.parallel.layout import Topology
from tests.executor.support.ranks.ranks import join, run_ranks

HOST = "127.0.0.1"

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
    assert accepted.fileno() not in connections._by_name.values()


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
        assert _address(file.fileno()) == (None, False)
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


def num_collected(rank: int, port: int, world_size: int) -> int:
    """Returns how many connections of its own an executor has found; all look before any leaves."""
    groups = join(port, Topology(dp_rank=rank, dp_size=world_size))
    found = len(groups.host._connections._by_name)
    groups.host.all_reduce(torch.zeros(1))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_executor_of_a_group_can_end_its_connections_to_all_others(world_size: int):
    """Those that it made and those that others made to it. In one process each finds all of them."""
    assert run_ranks(num_collected, world_size, world_size) == [world_size - 1] * world_size
