"""If this fails, a stranger gets into a group, or keeps members from forming one.

Each rank is a thread here, and a stranger is this process.
"""

import errno
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from executor.errors import PeerLost
from executor.parallel import mesh as parallel
from executor.parallel.mesh import NUMBER_BYTES, Mesh, Place, bind, connect_all
from tests.executor.support.ranks.ranks import HOST, SECRET, TIMEOUT_S
from tests.support.listening import listening_at

OTHER_SECRET = b"another secret of this length...."

Address = tuple[str, int]


class Members:
    """Members of a group that is to form.

    Args:
        world_size: How many.
        cleanup: Closes what they open.
    """

    def __init__(self, world_size: int, cleanup: ExitStack) -> None:
        self.world_size = world_size
        self._cleanup = cleanup
        self.listening = [cleanup.enter_context(bind(HOST)) for _ in range(world_size)]
        for each in self.listening:
            each.listen(parallel.QUEUED_CONNECTIONS)
        self.addresses: list[Address] = [each.getsockname() for each in self.listening]

    def connect(
        self, rank: int, *, secret: bytes = SECRET, timeout_s: float = TIMEOUT_S
    ) -> Mesh | OSError:
        """Returns one's connections to all others, or why it has none. Then it listens no more."""
        place = Place("epoch-1/host", rank, self.world_size)
        try:
            with self.listening[rank]:
                found = connect_all(self.listening[rank], self.addresses, place, secret, timeout_s)
        except OSError as error:
            return error
        formed = Mesh(rank, found, timeout_s)
        self._cleanup.callback(formed.close)
        return formed

    def connect_all(self, ranks: Sequence[int] | None = None) -> list[Mesh]:
        """Connects all of them, or those that are left, at the same time."""
        with ThreadPoolExecutor(self.world_size) as threads:
            found = list(
                threads.map(self.connect, range(self.world_size) if ranks is None else ranks)
            )
        return [each for each in found if isinstance(each, Mesh)]

    def connect_beside(self, rank: int, others: Sequence[int], timeout_s: float) -> Mesh | OSError:
        """Returns what `connect` does, while others connect, too."""
        with ThreadPoolExecutor(1 + len(others)) as threads:
            found = threads.submit(self.connect, rank, timeout_s=timeout_s)
            for other in others:
                threads.submit(self.connect, other, timeout_s=timeout_s)
            return found.result()


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def stranger(cleanup: ExitStack) -> Callable[[Address], socket.socket]:
    """Calls an address as anybody can."""

    def call(address: Address) -> socket.socket:
        called = cleanup.enter_context(socket.create_connection(address))
        called.settimeout(TIMEOUT_S)
        return called

    return call


def exchanged(formed: Sequence[Mesh]) -> list[list[bytes]]:
    """Returns what each rank receives, each having sent its own and the other's number to the other."""

    def exchange(rank: int) -> list[bytes]:
        sent = [memoryview(bytes((rank, other))) for other in range(len(formed))]
        received = [memoryview(bytearray(2)) for _ in formed]
        formed[rank].exchange(sent, received)
        return [bytes(each) for each in received]

    with ThreadPoolExecutor(len(formed)) as threads:
        return list(threads.map(exchange, range(len(formed))))


def to_each(world_size: int) -> list[list[bytes]]:
    """Returns the same where all is right."""
    return [
        [bytes((other, rank)) if other != rank else bytes(2) for other in range(world_size)]
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_member_is_connected_to_all_others_and_nobody_listens_any_more(
    cleanup: ExitStack, world_size: int
):
    members = Members(world_size, cleanup)
    formed = members.connect_all()
    assert exchanged(formed) == to_each(world_size)
    assert not set(members.addresses) & listening_at(os.getpid())


def test_strangers_are_not_let_in_and_hear_a_number_at_most(
    cleanup: ExitStack, stranger: Callable[[Address], socket.socket]
):
    members = Members(2, cleanup)
    sent = [b"", b"\0", bytes(50), bytes(1000), b"GET / HTTP/1.1\r\nHost: executor-0\r\n\r\n" * 2]
    calls = [stranger(members.addresses[0]) for _ in sent]
    for call, text in zip(calls, sent, strict=True):
        call.sendall(text)
    assert exchanged(members.connect_all()) == to_each(2)
    for call in calls:
        assert len(heard(call)) <= NUMBER_BYTES


def heard(call: socket.socket) -> bytes:
    """Returns all that is received until the connection ends."""
    data = b""
    with suppress(ConnectionResetError):
        while received := call.recv(1000):
            data += received
    return data


@contextmanager
def overhearing(address: Address) -> Iterator[tuple[Address, list[bytearray]]]:
    """Passes one call on to an address. Gives where, and what each side has said."""
    said = [bytearray(), bytearray()]

    def pass_on(source: socket.socket, target: socket.socket, log: bytearray) -> None:
        with suppress(OSError):  # who is refused may reset the connection
            while data := source.recv(1000):
                log += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def run() -> None:
        caller, _ = listening.accept()
        with caller, socket.create_connection(address) as called:
            back = threading.Thread(target=pass_on, args=(called, caller, said[1]))
            back.start()
            pass_on(caller, called, said[0])
            back.join()

    with bind(HOST) as listening:
        listening.listen()
        thread = threading.Thread(target=run)
        thread.start()
        yield listening.getsockname(), said
        thread.join()


def test_what_was_overheard_lets_nobody_in(
    cleanup: ExitStack, stranger: Callable[[Address], socket.socket]
):
    """Neither as the caller, nor as who is called; in the same epoch, where the secret is the same."""
    members = Members(2, cleanup)
    with overhearing(members.addresses[0]) as (members.addresses[0], said):
        for each in members.connect_all():
            each.close()
    call, answers = said
    assert len(call) == parallel._CALL.size, "the caller's side was heard"

    again = Members(2, cleanup)
    caller = stranger(again.addresses[0])
    caller.sendall(call)
    assert exchanged(again.connect_all()) == to_each(2)
    assert len(heard(caller)) == NUMBER_BYTES

    alone = Members(2, cleanup)

    def answer() -> None:
        called, _ = alone.listening[0].accept()
        with called:
            called.sendall(answers)
            heard(called)

    thread = threading.Thread(target=answer)
    thread.start()
    error = alone.connect(1)
    thread.join()
    assert "rank 0 at 127.0.0.1, port" in str(error)
    assert "does not know the epoch's secret" in str(error)


def test_what_a_member_shows_one_rank_is_worth_nothing_to_another(cleanup: ExitStack):
    """A stranger at the address of rank 1 passes on to rank 0 what rank 2 says, and all that comes back."""
    members = Members(3, cleanup)
    right = members.addresses
    with overhearing(right[0]) as (wrong, _):
        members.addresses = [right[0], wrong, right[2]]
        found = members.connect_beside(2, [0], timeout_s=0.3)
        cleanup.close()
    assert "rank 1" in str(found)


def test_a_member_with_another_secret_is_not_let_in(cleanup: ExitStack):
    members = Members(2, cleanup)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(members.connect, 0, timeout_s=0.3)
        second = threads.submit(members.connect, 1, secret=OTHER_SECRET, timeout_s=0.3)
        assert str(first.result()) == "no connection to rank 1 in time"
        assert "rank 0" in str(second.result())


def test_any_number_of_silent_strangers_leave_room_for_members(
    cleanup: ExitStack,
    stranger: Callable[[Address], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
):
    """Also where one comes between a member's call and its proof, whose call ends then."""
    monkeypatch.setattr(parallel, "MAX_STRANGERS", 4)
    members = Members(3, cleanup)
    silent = [stranger(members.addresses[0]) for _ in range(20)]
    show = parallel._Forming._show
    beset = list[int]()

    def show_late(forming: parallel._Forming, call: parallel._Call, peer: int) -> None:
        if peer == 0 and len(beset) < 2:
            beset.append(forming._place.rank)
            silent.extend(stranger(members.addresses[0]) for _ in range(20))
            heard(silent[-20])
        show(forming, call, peer)

    monkeypatch.setattr(parallel._Forming, "_show", show_late)
    assert exchanged(members.connect_all()) == to_each(3)
    assert beset


def test_strangers_that_go_on_calling_keep_no_member_beyond_its_time(
    cleanup: ExitStack,
    stranger: Callable[[Address], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
):
    members, accept = Members(2, cleanup), parallel._Forming._accept
    calls = [stranger(members.addresses[0])]

    def accept_and_be_called(forming: parallel._Forming) -> None:
        accept(forming)
        if len(calls) < 100:  # else a failure would not end
            calls.append(stranger(members.addresses[0]))

    monkeypatch.setattr(parallel._Forming, "_accept", accept_and_be_called)
    assert str(members.connect(0, timeout_s=0)) == "no connection to rank 1 in time"
    assert len(calls) < 100


def test_a_member_says_who_did_not_come_and_who_is_gone(cleanup: ExitStack):
    members = Members(4, cleanup)
    members.listening[0].close()
    error = members.connect(2)
    host, port = members.addresses[0]
    assert str(error) == f"rank 0 at {host}, port {port}: Connection refused"
    members = Members(4, cleanup)
    error = members.connect(1, timeout_s=0.05)
    assert str(error) == "no connection to rank 0, 2, 3 in time"


class Full(socket.socket):
    """Listens in a process that may open no more files."""

    def accept(self) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_member_that_can_open_no_more_files_says_so_and_not_that_others_did_not_come(
    cleanup: ExitStack, stranger: Callable[[Address], socket.socket]
):
    members = Members(2, cleanup)
    stranger(members.addresses[0])
    members.listening[0] = Full(fileno=members.listening[0].detach())
    assert "Too many open files" in str(members.connect(0, timeout_s=0.3))


def test_a_peer_that_does_not_answer_in_time_is_lost_and_with_it_the_group(cleanup: ExitStack):
    """What comes later is of no use: it would be taken for the next message's."""
    members = Members(2, cleanup)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(members.connect, 0, timeout_s=0.3)
        second = threads.submit(members.connect, 1)
        one, other = first.result(), second.result()
    assert isinstance(one, Mesh)
    assert isinstance(other, Mesh)
    sent, place = [memoryview(b"late")] * 2, [memoryview(bytearray(4)) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(PeerLost, match=r"has not answered within 0\.3 s"):
            one.exchange(sent, place)
    many = [memoryview(bytes(2**24))] * 2
    with pytest.raises(PeerLost, match="another executor left the group"):
        other.exchange(many, place)


def test_a_message_of_an_exchange_that_failed_is_not_taken_for_the_next_ones(cleanup: ExitStack):
    """It has come from one peer before another was lost, and nobody has read it."""
    one, lost, other = Members(3, cleanup).connect_all()
    none = memoryview(b"")
    other.exchange([memoryview(b"old"), none, none], [none] * 3)
    lost.close()
    place = [memoryview(bytearray(3)) for _ in range(3)]
    with pytest.raises(PeerLost):
        one.exchange([none] * 3, place)
    with pytest.raises(PeerLost):
        one.exchange([none] * 3, [none, none, place[2]])
    assert bytes(place[2]) == bytes(3)


def exchange_parts(formed: Sequence[Mesh]) -> None:
    """Exchanges messages of two ranks that are longer than what the kernel holds."""
    size = 2**24
    received = [memoryview(bytearray(size)) for _ in formed]

    def exchange(rank: int) -> None:
        sent = memoryview(bytes((rank + 1,)) * size)
        formed[rank].exchange([sent] * 2, [received[rank]] * 2)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(exchange, range(2)))
    assert [set(each) for each in received] == [{2}, {1}]


def test_members_that_wait_for_years_exchange_messages_of_many_parts(cleanup: ExitStack):
    formed = Members(2, cleanup).connect_all()
    exchange_parts([Mesh(rank, dict(each._peers), 1e9) for rank, each in enumerate(formed)])


def test_members_that_may_open_no_more_files_exchange_messages_of_many_parts(cleanup: ExitStack):
    """Strangers that call other ports of a process may use them up."""
    formed = Members(2, cleanup).connect_all()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cleanup.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    exchange_parts(formed)
