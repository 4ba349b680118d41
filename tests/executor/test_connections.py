"""If this fails, a thread that waits for a stopped peer waits on, or a stranger's call is cut off."""

import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from executor.connections import Connections

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


def is_open(connection: socket.socket, peer: socket.socket) -> bool:
    """Whether what the peer sends arrives."""
    try:
        peer.sendall(b"x")
        return connection.recv(1) == b"x"
    except OSError:
        return False


def test_connections_that_were_collected_end_and_others_go_on(listener: socket.socket, pair: Pair):
    connections = Connections()
    older = pair(listener)
    with connections.collect(), socket.create_server((HOST, 0)) as own:
        ours = pair(own)
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
    connections = Connections()
    with connections.collect(), socket.create_server((HOST, 0)) as own:
        caller, accepted = pair(own)
    numbers = {caller.fileno(), accepted.fileno()}
    caller.close()
    accepted.close()
    later = pair(listener)
    assert numbers & {end.fileno() for end in later}, "the kernel hands out the lowest that is free"
    connections.shut_down()
    assert is_open(*later)


def test_several_threads_may_end_the_same_connections_at_once(pair: Pair):
    """A group is closed by the thread whose step failed, and by the one that was told to leave."""
    connections = Connections()
    with connections.collect(), socket.create_server((HOST, 0)) as own:
        pairs = [pair(own) for _ in range(20)]
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
