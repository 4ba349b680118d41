"""Addresses, host:port, as settings name them."""

import ipaddress
import socket


def is_loopback(address: str) -> bool:
    """Returns whether host:port is on this machine, as far as its name shows."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def try_to_bind(address: str) -> None:
    """Binds a socket to an address for a moment, since gRPC does not say why it cannot.

    Raises:
        OSError: None of the name's addresses can be bound.
        UnicodeError: It is no name that can have one.
    """
    host, _, number = address.rpartition(":")
    problem = OSError("the name has no address")
    for family, kind, _, _, where in socket.getaddrinfo(
        host.strip("[]"), int(number), type=socket.SOCK_STREAM
    ):
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                return
        except OSError as error:
            problem = error
    raise problem
