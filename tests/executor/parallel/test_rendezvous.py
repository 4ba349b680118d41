"""The store that executors of an epoch meet at must be open to them, and to nobody else."""

import errno
import hmac
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from executor.__main__ import _keep_in, _spare_survivors
from executor.parallel import rendezvous
from executor.parallel.rendezvous import (
    MemberStore,
    RendezvousStore,
    StoreLost,
    StorePort,
    open_store,
)
from tests.executor.support.ranks.ranks import HOST, SECRET, TIMEOUT_S
from tests.support.listening import listening_at

Member = Callable[..., MemberStore]


class Strangers:
    """Those that the store has turned away."""

    def __init__(self) -> None:
        self.num_refused = 0
        self._came = threading.Condition()

    def count(self) -> None:
        with self._came:
            self.num_refused += 1
            self._came.notify_all()

    def wait_for(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: self.num_refused >= count, TIMEOUT_S)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def strangers() -> Strangers:
    return Strangers()


@pytest.fixture
def store(cleanup: ExitStack, strangers: Strangers) -> RendezvousStore:
    store = open_store(HOST, SECRET, on_refused=strangers.count)
    cleanup.callback(store.close)
    return store


@pytest.fixture
def member(store: RendezvousStore, cleanup: ExitStack) -> Member:
    """Lets a member of the group in."""

    def enter(secret: bytes = SECRET, timeout_s: float = TIMEOUT_S) -> MemberStore:
        entered = MemberStore(HOST, store.port, secret, timeout_s)
        cleanup.callback(entered.close)
        return entered

    return enter


@pytest.fixture
def stranger(store: RendezvousStore, cleanup: ExitStack) -> Callable[[bytes], socket.socket]:
    """Connects to the store and sends it some bytes."""

    def call(sent: bytes = b"") -> socket.socket:
        connection = cleanup.enter_context(socket.create_connection((HOST, store.port)))
        connection.settimeout(TIMEOUT_S)
        connection.sendall(sent)
        return connection

    return call


def addresses_at(port: int) -> set[str]:
    return {address for address, number in listening_at(os.getpid()) if number == port}


def entry(secret: bytes, key: bytes, value: bytes, size: int | None = None) -> bytes:
    """Builds an entry as the wire has it, independently of the product."""
    mac = hmac.digest(secret, b"store %d of 1 " % len(key) + key + value, "sha256")
    return struct.pack("!I32sHH", size or len(key + value), mac, len(key), 1) + key + value


def test_what_a_member_writes_every_other_reads_also_those_that_come_later(member: Member):
    first, second = member(), member()
    PrefixStore("epoch-1", first).set("host/0", "address 0")
    second.set("epoch-1/host/1", b"address 1")
    for each in (first, second, member()):
        assert PrefixStore("epoch-1", each).get("host/0") == b"address 0"
        assert each.get("epoch-1/host/1") == b"address 1"


def test_what_all_members_say_in_a_round_each_hears_when_all_have(member: Member):
    """Also when one says it twice, which counts once."""
    first, second = member(), member()
    first.set("host/address/0", b"too early", 2)
    first.set("host/address/0", b"A", 2)
    first.set("later", b"")
    second.wait(["later"])
    assert not second.check(["host/address/0"])
    assert second.tell_all("host/address", b"B", 1, 2) == [b"A", b"B"]
    assert [first.get(f"host/address/{rank}") for rank in range(2)] == [b"A", b"B"]
    assert member().get("host/address/1") == b"B"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: executor-0\r\nAccept: text/html\r\n\r\n",
        bytes(1000),
        entry(b"another secret of this length", b"member/0", b""),
        entry(SECRET, b"member/0", b"", size=1 << 31),
        entry(SECRET, b"member/0", b"address")[:-1] + b"X",
    ],
)
def test_who_does_not_know_the_secret_is_cut_off_and_reads_nothing(
    member: Member, stranger: Any, strangers: Strangers, sent: bytes
):
    member().set("host/0", b"address 0")
    assert stranger(sent).recv(1) == b""
    strangers.wait_for(1)
    assert member().get("host/0") == b"address 0"


@pytest.mark.parametrize("sent", [b"", entry(SECRET, b"member/0", b"address")[:-1]])
def test_who_says_nothing_or_half_an_entry_is_cut_off(
    stranger: Any, strangers: Strangers, monkeypatch: pytest.MonkeyPatch, sent: bytes
):
    monkeypatch.setattr(rendezvous, "HELLO_TIMEOUT_S", 0.01)
    assert stranger(sent).recv(1) == b""
    assert strangers.num_refused == 1


def test_any_number_of_silent_strangers_leave_room_for_a_member(
    member: Member, stranger: Any, strangers: Strangers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rendezvous, "MAX_STRANGERS", 4)
    monkeypatch.setattr(rendezvous, "HELLO_TIMEOUT_S", TIMEOUT_S)
    silent = [stranger() for _ in range(20)]
    assert silent[0].recv(1) == b""
    member().set("host/0", b"address 0")
    assert member().get("host/0") == b"address 0"
    strangers.wait_for(16)


class Full(socket.socket):
    """Listens in a process that may open no more files, until it has tried some times."""

    num_tries = 0

    def accept(self) -> Any:
        self.num_tries += 1
        if self.num_tries in (2, 3, 4):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_store_that_can_open_no_more_files_turns_strangers_away_and_lets_members_in_once_it_can(
    cleanup: ExitStack, strangers: Strangers, monkeypatch: pytest.MonkeyPatch
):
    """And does not spin meanwhile: who waits to be let in would have it try again at once."""
    monkeypatch.setattr(rendezvous, "HELLO_TIMEOUT_S", TIMEOUT_S)
    slept, sleep = list[float](), time.sleep
    monkeypatch.setattr(rendezvous.time, "sleep", lambda s: (slept.append(s), sleep(s)))
    with socket.create_server((HOST, 0)) as listening:
        silent = cleanup.enter_context(socket.create_connection(listening.getsockname()))
        store = RendezvousStore(Full(fileno=listening.detach()), SECRET, strangers.count)
        cleanup.callback(store.close)
    silent.settimeout(TIMEOUT_S)
    assert silent.recv(1) == b""
    with closing(MemberStore(HOST, store.port, SECRET, TIMEOUT_S)) as member:
        member.set("host/0", b"address 0")
        assert member.get("host/0") == b"address 0"
    assert strangers.num_refused == 1
    assert slept.count(rendezvous.NO_FILES_DELAY_S) == 2


def test_what_a_store_says_that_does_not_know_the_secret_is_not_believed(cleanup: ExitStack):
    listener = cleanup.enter_context(socket.create_server((HOST, 0)))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(entry(b"another secret of this length", b"host/0", b"address"))
            connection.recv(1)

    threading.Thread(target=answer, daemon=True).start()
    member = MemberStore(HOST, listener.getsockname()[1], SECRET, TIMEOUT_S)
    with pytest.raises(StoreLost, match="not sealed with the epoch's secret"):
        member.set("host/1", b"")


def test_a_member_is_told_what_it_has_waited_for_in_vain(
    store: RendezvousStore, member: Member, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rendezvous, "NOT_OPEN_S", 0.01)
    waiting = member(timeout_s=0.05)
    with pytest.raises(StoreLost, match=f"port {store.port} for host/1: timed out"):
        waiting.get("host/1")
    with pytest.raises(StoreLost, match="it has closed"):
        member(b"another secret of this length", timeout_s=0.3).set("host/1", b"")
    patient = member()
    patient.set("host/0", b"address 0")
    store.close()
    with pytest.raises(StoreLost, match="for host/1: it has closed"):
        patient.get("host/1")
    with pytest.raises(StoreLost, match="Connection refused"):
        member().get("host/0")


def test_a_store_whose_host_can_be_none_is_lost():
    member = MemberStore("a..b", 1, SECRET, TIMEOUT_S)
    with pytest.raises(StoreLost, match=r"store at a\.\.b, port 1: "):
        member.set("host/0", b"address 0")


def test_a_member_that_has_left_keeps_what_it_has_read(member: Member):
    """NCCL goes on asking its store whether a peer has failed, in threads of its own."""
    first = member()
    first.set("host/0", b"address 0")
    assert first.get("host/0") == b"address 0"
    first.close()
    first.clone().set("exception_dump", b"1")
    assert first.check(["host/0", "exception_dump"])
    assert not first.check(["host/0", "remote_error"])
    with pytest.raises(StoreLost, match="has left it"):
        first.get("host/1")


def test_stores_of_one_executor_have_one_address_which_is_closed_between_them(cleanup: ExitStack):
    """A member may come before the store is there."""
    stores = StorePort(HOST)
    cleanup.callback(stores.close)
    port = int(stores.address.rpartition(":")[2])
    opened: list[RendezvousStore] = []
    for secret in (SECRET, b"the secret of the epoch that follows"):
        assert addresses_at(port) == set()
        opening = threading.Timer(0.05, lambda secret=secret: opened.append(stores.open(secret)))
        opening.start()
        member = MemberStore(HOST, port, secret, TIMEOUT_S)
        member.set("host/0", b"address 0")
        assert member.get("host/0") == b"address 0"
        member.close()
        opening.join()
        cleanup.callback(opened[-1].close)
        with pytest.raises(OSError, match=f"cannot listen on {HOST}, port {port}"):
            stores.open(secret)
        opened[-1].close()


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])  # another machine's, and none that can be
def test_an_executor_whose_host_is_not_this_machines_keeps_no_port(host: str):
    stores = StorePort(host)
    assert stores.address == ""
    with pytest.raises(OSError, match=rf"cannot listen on {re.escape(host)}, port any"):
        stores.open(SECRET)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_the_store_listens_at_its_host_alone(host: str, cleanup: ExitStack) -> None:
    store = open_store(host, SECRET)
    cleanup.callback(store.close)
    with closing(MemberStore(host, store.port, SECRET, TIMEOUT_S)) as member:
        member.set("host/0", b"address 0")
    assert addresses_at(store.port) == {socket.gethostbyname(host)}


def test_it_can_listen_on_every_address_and_be_reached_at_one(cleanup: ExitStack) -> None:
    store = open_store("127.0.0.1", SECRET, bind_host="0.0.0.0")
    cleanup.callback(store.close)
    with closing(MemberStore("127.0.0.2", store.port, SECRET, TIMEOUT_S)) as member:
        member.set("host/0", b"address 0")
    assert addresses_at(store.port) == {"0.0.0.0"}


def test_the_port_is_free_when_the_store_has_closed(store: RendezvousStore, member: Member) -> None:
    member()
    store.close()
    store.close()
    assert addresses_at(store.port) == set()


def test_a_host_of_another_machine_or_a_port_that_is_taken_is_named(store: RendezvousStore) -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1.*set advertised_host"):
        open_store("192.0.2.1", SECRET)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {store.port}: "):
        open_store(HOST, SECRET, port=store.port)


@pytest.mark.parametrize(
    ("peer_host", "given", "expected"),
    [
        ("127.0.0.1", None, "lo"),
        ("::1", None, "lo"),
        (None, None, None),  # any but the first may listen on every address and advertise none
        ("10.0.0.7", None, None),
        ("executor-0.test", None, None),
        ("127.0.0.1", "eth0", "eth0"),
    ],
)
def test_nccl_stays_on_this_machine_where_all_peers_do(
    peer_host: str | None, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that it is put back afterwards
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    if given is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
    _keep_in(peer_host)
    assert os.environ.get("NCCL_SOCKET_IFNAME") == expected


def test_nccl_of_a_lost_peer_ends_no_process_unless_the_operator_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING")]
    for name in (*names, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    _spare_survivors()
    assert [os.environ[name] for name in (*names, "TORCH_NCCL_DUMP_ON_TIMEOUT")] == ["0", "0", "1"]
