"""Attacks by strangers at the other ports: executors, rendezvous store, members, probes, metrics."""

import contextlib
import os
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1 import executor_pb2_grpc
from tests.attack.frames import STRANGER
from tests.attack.target import Outcome, Target

LEAP = 1 << 32  # the furthest that an executor's epoch was let go at once
# PyTorch's TCPStore speaks so: a query's number, then lengths and bytes (TCPStoreBackend.hpp).
VALIDATE, SET, COUNT_KEYS = 0, 1, 7
STORE_MAGIC = 0x3C85F7CE
VALUE_BYTES = 1 << 20
SECRET = bytes(32)  # of an epoch
READY, LOST = '"event": "group_ready"', '"event": "group_lost"'
FORMING_S = 1.5  # in which one member of a group that forms stands still
LIMIT_S = 25.0  # for what should take a second or two


def epoch_leaps(target: Target) -> Outcome:
    """A2: an executor's epoch is moved out of the reach of the others."""
    return _leap(target, None)


def epoch_leaps_with_the_token(target: Target) -> Outcome:
    """A2: the same by one who may call an executor."""
    return _leap(target, target.executor_token)


def _leap(target: Target, token: str | None) -> Outcome:
    outcomes = []
    with _executor(target, 0, token) as ask:
        for leap in (LEAP, 2 * LEAP):
            outcomes.append(
                "Prepare " + ask("Prepare", pb.PrepareRequest(epoch=leap, secret=SECRET))
            )
        join = _join(2 * LEAP, "127.0.0.1:9")
        outcomes.append("Join " + ask("Join", join))
    target_end = time.monotonic() + 2 * target.hold_s
    while time.monotonic() < target_end:
        time.sleep(0.05)
    is_heard = token is None and any(outcome.endswith("OK") for outcome in outcomes)
    return Outcome(", ".join(outcomes), "a stranger is heard" * is_heard)


def joins_of_a_stranger(target: Target) -> Outcome:
    """A3: an executor is told to join a group of the attacker's."""
    with socket.create_server((STRANGER, 0)) as store, _executor(target, 0, None) as ask:
        store.settimeout(0.5)
        host, port = store.getsockname()
        outcomes = {ask("Join", _join(1000 + number, f"{host}:{port}")) for number in range(5)}
        fault = ""
        with contextlib.suppress(TimeoutError):
            store.accept()[0].close()
            fault = "the executor came to the stranger's store"
    return Outcome(f"5 Joins: {', '.join(sorted(outcomes))}", fault)


def store_filled(target: Target) -> Outcome:
    """A5: values for the rendezvous store of a group that has formed, and connections to it."""
    num_keys, num_bytes, num_connections = 0, 0, 0
    ports = list(target.inner_ports())
    value = struct.pack("Q", VALUE_BYTES) + bytes(VALUE_BYTES)
    for address in ports:
        with contextlib.suppress(OSError), _store(address) as store:
            store.sendall(bytes((COUNT_KEYS,)))
            num_keys += int.from_bytes(store.recv(8), "little")
            for number in range(target.share(200)):
                key = f"stranger-{number}".encode()
                store.sendall(bytes((SET,)) + struct.pack("Q", len(key)) + key + value)
                num_bytes += VALUE_BYTES
    for address in ports:
        with contextlib.suppress(OSError):  # of a port that is closed, or that nobody reads
            for _ in range(target.share(200)):
                socket.create_connection(address, 1, source_address=(STRANGER, 0)).close()
                num_connections += 1
    return Outcome(
        f"{len(ports)} inner ports, {num_connections} connections to them, {num_bytes / 1e6:.0f} MB",
        f"{num_keys} keys of the store" if num_keys else "",
    )


@contextlib.contextmanager
def _store(address: tuple[str, int]) -> Iterator[socket.socket]:
    """Yields a connection to a store, or to what may be one."""
    with socket.create_connection(address, 0.5, source_address=(STRANGER, 0)) as store:
        store.sendall(bytes((VALIDATE,)) + struct.pack("I", STORE_MAGIC))
        yield store


def silent_strangers(target: Target) -> Outcome:
    """A9: what listens while a group forms hears from strangers who then say nothing."""
    alone_s, _ = _forming_s(target, num_strangers=0)
    beset_s, num_met = _forming_s(target, num_strangers=4)
    sent = (
        f"the group formed in {alone_s:.2f} s alone, in {beset_s:.2f} s among {num_met} strangers"
    )
    if not num_met:
        return Outcome(sent, "not shown: no stranger got in")
    return Outcome(sent, "delayed" if beset_s > alone_s + 0.5 else "")


def _forming_s(target: Target, num_strangers: int) -> tuple[float, int]:
    """Has the group form again, and calls all of its ports meanwhile.

    Returns how long the last member took from when it could, as it stands still until strangers
    came, and how many were let in.
    """
    num_met, called = 0, Counter[tuple[str, int]]()

    def meet() -> None:
        nonlocal num_met
        for address in target.inner_ports():
            if called[address] < num_strangers:
                called[address] += 1
                with contextlib.suppress(OSError):
                    strangers.enter_context(socket.create_connection(address, 0.02))
                    num_met += 1

    num_ready, num_losses = _num_logged(target, READY), _num_logged(target, LOST)
    with contextlib.ExitStack() as strangers:
        os.kill(target.pids[-1], signal.SIGSTOP)
        try:
            end = time.monotonic() + LIMIT_S
            while _num_logged(target, LOST) == num_losses and time.monotonic() < end:
                time.sleep(0.01)  # the longer, the longer it was silent before
            end = time.monotonic() + FORMING_S
            while time.monotonic() < end:
                meet()
                time.sleep(0.01)
        finally:
            os.kill(target.pids[-1], signal.SIGCONT)
        begun = time.monotonic()
        while _num_logged(target, READY) == num_ready and time.monotonic() < begun + LIMIT_S:
            # The store, and what members listen on, are there only now, and for as long as one is slow.
            os.kill(target.pids[-1], signal.SIGSTOP)
            meet()
            os.kill(target.pids[-1], signal.SIGCONT)
            time.sleep(0.0005)
        return time.monotonic() - begun, num_met


def _num_logged(target: Target, event: str) -> int:
    """Returns how often the router's log tells of an event."""
    return (target.log_dir / "router.log").read_text().count(event)


def half_scrapes(target: Target) -> Outcome:
    """B3: scrapes that are asked for by half, and given up all at once."""
    host, _, port = target.metrics.rpartition(":")
    num_open = 0
    with contextlib.ExitStack() as stack:
        for _ in range(target.share(1000)):
            with contextlib.suppress(OSError):  # its backlog may be full
                scrape = socket.create_connection((host, int(port)), 0.1, (STRANGER, 0))
                stack.enter_context(scrape)
                scrape.sendall(b"GET /metrics HTTP/1.1\r\n")
                num_open += 1
            time.sleep(0.001)
        time.sleep(target.hold_s)
    time.sleep(target.hold_s)
    return Outcome(f"{num_open} half requests, closed all at once")


def _outcome(call: Callable[..., Any], *args: Any, **settings: Any) -> str:
    """Makes a call, and returns how it ended."""
    try:
        call(*args, timeout=1, **settings)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def _join(epoch: int, store_address: str) -> pb.JoinRequest:
    """Returns a Join that has all that one needs."""
    host = store_address.rpartition(":")[0]
    return pb.JoinRequest(
        epoch=epoch, store_address=store_address, secret=SECRET, peer_hosts=[host]
    )


@contextlib.contextmanager
def _executor(target: Target, number: int, token: str | None) -> Iterator[Callable[..., str]]:
    """Yields a function that calls a method of an executor, and returns how the call ended."""
    with _channel(target, number, token) as (stub, metadata):
        yield lambda method, request: _outcome(getattr(stub, method), request, metadata=metadata)


@contextlib.contextmanager
def _channel(target: Target, number: int, token: str | None) -> Iterator[tuple[Any, Any]]:
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(target.executors[number]) as channel:
        yield executor_pb2_grpc.ExecutorServiceStub(channel), metadata
