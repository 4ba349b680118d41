"""Rendezvous store, where the executors of an epoch find one another; one of them opens it.

It asks nobody who they are and encrypts nothing, so it listens where it was told to and nowhere
else. Left to itself, PyTorch's listens on every address of the machine.
"""

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def open_store(
    host: str, *, bind_host: str | None = None, port: int = 0, timeout_s: float = 60.0
) -> TCPStore:
    """Opens the store where the ranks of an epoch find one another.

    It lives as long as the returned object; ``store.port`` tells where it listens.

    Args:
        host: Address that the other ranks can reach.
        bind_host: Address of this machine to listen on; None is that of `host`.
        port: 0 picks a free one.
        timeout_s: How long a rank waits for its peers.

    Raises:
        OSError: This machine has no such address, or the port is taken; says which.
    """
    listening = _listen(bind_host or host, port)
    return TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store's from here on
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise OSError(
            f"the rendezvous store cannot listen on {host}, port {port or 'any'}: {error}; the "
            f"first executor of a group needs a host of its own machine: set advertised_host, or "
            f"listen on every address, such as 0.0.0.0"
        ) from error
    return listening
