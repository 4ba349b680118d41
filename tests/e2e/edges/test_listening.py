"""Listening sockets: by default none is open to others. The kernel is asked, not the settings."""

import ipaddress
import sys

import pytest

from deploy.local.demo import ask, draw_requests
from deploy.local.launch import LocalStack
from router.client import Client
from tests.support.listening import listening_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


async def test_no_process_of_a_stack_listens_off_loopback(stack: LocalStack, client: Client):
    """A group of two, which has formed: neither the rendezvous store nor any member listens any more."""
    [request] = draw_requests(1, 1)
    assert (await ask(client, request)).is_right
    open_ports = [listening_at(p.pid) for p in (stack.router, *stack.executors)]

    assert [len(ports) > 0 for ports in open_ports] == [True] * 3
    assert len(open_ports[1]) == 1  # gRPC's
    for ports in open_ports:
        hosts = {host for host, _ in ports}
        assert all(ipaddress.ip_address(host).is_loopback for host in hosts), ports
