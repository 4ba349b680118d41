"""The store that executors of an epoch meet at must be open to them, and on no other address."""

import gc
import os
import socket

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from executor.__main__ import _keep_in
from executor.parallel.rendezvous import open_store
from tests.support.listening import listening_at


def addresses_at(port: int) -> set[str]:
    return {address for address, number in listening_at(os.getpid()) if number == port}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_the_store_listens_at_its_host_alone(host: str) -> None:
    store = open_store(host)
    peer = TCPStore(host, store.port, is_master=False, wait_for_workers=False)
    peer.set("key", "value")

    assert store.get("key") == b"value"
    assert addresses_at(store.port) == {socket.gethostbyname(host)}


def test_it_can_listen_on_every_address_and_be_reached_at_one() -> None:
    store = open_store("127.0.0.1", bind_host="0.0.0.0")

    TCPStore("127.0.0.2", store.port, is_master=False, wait_for_workers=False).set("key", "value")
    assert store.get("key") == b"value"
    assert addresses_at(store.port) == {"0.0.0.0"}


def test_the_port_is_free_when_the_store_is_gone() -> None:
    store = open_store("127.0.0.1")
    port = store.port
    del store
    gc.collect()

    assert addresses_at(port) == set()
    open_store("127.0.0.1", port=port)


def test_a_host_of_another_machine_or_a_port_that_is_taken_is_named() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1.*set advertised_host"):
        open_store("192.0.2.1")
    store = open_store("127.0.0.1")
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {store.port}: "):
        open_store("127.0.0.1", port=store.port)


@pytest.mark.parametrize(
    ("peer_host", "given", "expected"),
    [
        ("127.0.0.1", None, "lo"),
        ("::1", None, "lo"),
        (None, None, "lo"),  # it has no peers
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
