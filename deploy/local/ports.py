"""Ports of loopback, held for a process before it listens there.

A port that was only found free may be another process's by the time that it is listened at: that of
any connection which is made meanwhile, too. This matters most to a process that is started again at
the address that it had.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Keeps a port until the end of the block, for processes that are told to listen there.

    A socket that is bound and does not listen keeps the port, on Linux, from a process that asks
    for any free one, but not from a listener that names it and may reuse addresses, as gRPC's may.
    Elsewhere this is 0: the process that listens takes a free one.

    Args:
        host: Numeric address, IPv4 or IPv6.
    """
    if sys.platform != "linux":
        yield 0
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        port: int = holder.getsockname()[1]
        yield port
