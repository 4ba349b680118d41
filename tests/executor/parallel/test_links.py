"""If this fails, an executor reads another's message wrongly, or waits for one that has gone.

Each executor is a thread here. Timeouts are ten minutes where nothing should time out, and every
test that waits gives up long before.
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from select import select
from typing import Any

import pytest
from torch.distributed import HashStore

from executor.links import Links, connect_all

HOST = "127.0.0.1"
TIMEOUT_S = 600.0
TEST_TIMEOUT_S = 120.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def link(pool: ThreadPoolExecutor, cleanup: ExitStack, world_size: int) -> list[Links]:
    """Returns each executor's connections to all others."""
    store = HashStore()
    calls = [
        pool.submit(connect_all, store, rank, world_size, HOST, TIMEOUT_S)
        for rank in range(world_size)
    ]
    linked = [call.result(TEST_TIMEOUT_S) for call in calls]
    for links in linked:
        cleanup.callback(links.close)
    return linked


def on_each(
    pool: ThreadPoolExecutor, linked: list[Links], act: Callable[[int, Links], object]
) -> list[object]:
    calls = [pool.submit(act, rank, links) for rank, links in enumerate(linked)]
    return [call.result(TEST_TIMEOUT_S) for call in calls]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_executor_gets_the_messages_of_all_in_order_of_rank(
    pool: ThreadPoolExecutor, cleanup: ExitStack, world_size: int
):
    def say(rank: int, links: Links) -> list[list[bytes]]:
        said = []
        for letter in b"ab":
            links.send(bytes([letter, rank]))
            said.append(links.receive())
        return said

    linked = link(pool, cleanup, world_size)
    expected = [[bytes([letter, rank]) for rank in range(world_size)] for letter in b"ab"]
    assert on_each(pool, linked, say) == [expected] * world_size


def test_a_message_that_comes_in_pieces_is_read_whole(pool: ThreadPoolExecutor, cleanup: ExitStack):
    ours, theirs = map(cleanup.enter_context, socket.socketpair())
    links = Links(0, {1: ours}, TIMEOUT_S)
    links.send(b"12345678")
    theirs.send(b"abc")
    receiving = pool.submit(links.receive)
    while select([ours], [], [], 0)[0]:  # until the first piece was read
        assert not receiving.done()
    theirs.send(b"defgh" + b"next")
    assert receiving.result(TEST_TIMEOUT_S) == [b"12345678", b"abcdefgh"]


def test_who_waits_for_an_executor_that_leaves_is_told_which_one(
    pool: ThreadPoolExecutor, cleanup: ExitStack
):
    first, second, third = link(pool, cleanup, 3)
    first.send(b"x")
    second.send(b"x")
    waiting: Future[list[bytes]] = pool.submit(first.receive)
    third.close()
    with pytest.raises(ConnectionError, match="world rank 2: "):
        waiting.result(TEST_TIMEOUT_S)


def test_what_an_executor_sent_before_it_left_is_still_received(
    pool: ThreadPoolExecutor, cleanup: ExitStack
):
    """Else it would depend on luck which of the others learn that it was told otherwise."""
    first, second = link(pool, cleanup, 2)
    first.send(b"x")
    second.send(b"y")
    assert second.receive() == [b"x", b"y"]
    second.close()
    assert first.receive() == [b"x", b"y"]
    with pytest.raises(ConnectionError, match="world rank 1: "):
        first.receive()


def test_closing_frees_a_thread_that_waits_for_a_silent_executor(
    pool: ThreadPoolExecutor, cleanup: ExitStack
):
    first, _ = link(pool, cleanup, 2)
    first.send(b"x")
    waiting: Future[list[bytes]] = pool.submit(first.receive)
    while not first._in_use.locked():
        assert not waiting.done()
    first.close()
    with pytest.raises(ConnectionError, match="world rank 1: "):
        waiting.result(TEST_TIMEOUT_S)
    first.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        first.send(b"x")


class SlowConnection:
    """A connection whose shutdown takes as long as a test wants, the first time."""

    def __init__(self) -> None:
        self.is_ending = threading.Event()
        self.may_end = threading.Event()
        self.was_closed_too_early = False

    def settimeout(self, timeout_s: float) -> None:
        pass

    def shutdown(self, how: int) -> None:
        if not self.is_ending.is_set():
            self.is_ending.set()
            assert self.may_end.wait(TEST_TIMEOUT_S)

    def close(self) -> None:
        self.was_closed_too_early |= not self.may_end.is_set()


def test_of_two_threads_that_close_none_closes_what_the_other_is_shutting_down(
    pool: ThreadPoolExecutor,
):
    """Its number could be another file's before the other thread uses it."""
    connection: Any = SlowConnection()
    links = Links(0, {1: connection}, TIMEOUT_S)
    first = pool.submit(links.close)
    assert connection.is_ending.wait(TEST_TIMEOUT_S)
    second = pool.submit(links.close)
    wait([second], timeout=0.2)  # for one that does not wait for the other
    connection.may_end.set()
    for closing in (first, second):
        closing.result(TEST_TIMEOUT_S)
    assert not connection.was_closed_too_early


def test_an_executor_that_says_nothing_is_named_after_the_timeout(cleanup: ExitStack):
    ours, _theirs = map(cleanup.enter_context, socket.socketpair())
    links = Links(0, {1: ours}, 0.2)
    links.send(b"x")
    with pytest.raises(TimeoutError, match=re.escape("world rank 1 sent nothing for 0.2 s")):
        links.receive()


def test_an_executor_that_does_not_come_is_named_and_the_port_is_closed():
    store = HashStore()
    with pytest.raises(RuntimeError, match=r"world ranks \[1, 2\] did not connect"):
        connect_all(store, 0, 3, HOST, TIMEOUT_S, form_timeout_s=0.2)
    _, port, address = store.get("0").decode().split()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, int(port)))


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(RuntimeError, match=re.escape("no address of 192.0.2.1 can be listened on")):
        connect_all(HashStore(), 0, 2, "192.0.2.1", TIMEOUT_S)


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param(lambda token: b"", id="nothing"),
        pytest.param(lambda token: b"GET / HTTP/1.1\r\n\r\nmore", id="another protocol"),
        pytest.param(lambda token: bytes(16) + b"\1\0\0\0", id="another token"),
        pytest.param(lambda token: token + b"\0\0\0\0", id="the listener's own rank"),
        pytest.param(lambda token: token + b"\7\0\0\0", id="a rank that is none"),
    ],
)
def test_who_comes_upon_the_port_is_not_taken_for_an_executor(
    pool: ThreadPoolExecutor, cleanup: ExitStack, hello: Callable[[bytes], bytes]
):
    store = HashStore()
    listening = pool.submit(connect_all, store, 0, 2, HOST, TIMEOUT_S)
    token, port, address = store.get("0").decode().split()
    with socket.create_connection((address, int(port)), TEST_TIMEOUT_S) as stranger:
        stranger.sendall(hello(bytes.fromhex(token)))
        with suppress(ConnectionResetError):  # if it was told more than it read
            with suppress(OSError):  # that is known already
                stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    calling = connect_all(store, 1, 2, HOST, TIMEOUT_S)
    for links in (listening.result(TEST_TIMEOUT_S), calling):
        cleanup.callback(links.close)
        links.send(b"x")
    assert calling.receive() == [b"x", b"x"]
