"""The process group through which ranks exchange hidden states.

A process group belongs to one epoch: a new epoch closes it and makes
another in the same process, so nothing here registers itself anywhere.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_c10d: Any = dist  # its process groups, stores and options carry no types


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The process group of one epoch. Its collectives block, and every rank must call them.

    Attributes:
        epoch: The epoch it was formed for.
        rank: This process's rank in it.
        world_size: Ranks in it.
        backend: Runs the collectives. PyTorch publishes no types for it.
    """

    epoch: int
    rank: int
    world_size: int
    backend: Any

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Lays every rank's ``x`` end to end in ``out``, [world_size * len(x), ...]."""
        self.backend._allgather_base(out, x).wait()

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replaces ``x`` by its sum over the ranks."""
        self.backend.allreduce([x], _c10d.AllreduceOptions()).wait()

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Sends the n-th of ``world_size`` equal parts of ``x`` to rank n.

        ``out``, of the same size, gets this rank's part of every rank's ``x``, in rank order.
        """
        self.backend.alltoall_base(out, x, [], []).wait()

    def close(self) -> None:
        """Drops the connections. A peer that is in a collective gets an error, not a hang."""
        self.backend.abort()


def open_store(host: str, *, port: int = 0, timeout_s: float = 60.0) -> TCPStore:
    """Opens the store where the ranks of an epoch find one another.

    It lives as long as the returned object; ``store.port`` tells where it listens.

    Args:
        host: Address that the other ranks can reach.
        port: 0 picks a free one.
        timeout_s: How long a rank waits for its peers.
    """
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def join_group(
    host: str,
    port: int,
    *,
    epoch: int,
    rank: int,
    world_size: int,
    bind_host: str | None = None,
    timeout_s: float = 60.0,
) -> RankGroup:
    """Forms the group of an epoch over gloo. Returns when every rank has joined.

    Args:
        host: Where the store of ``open_store`` listens.
        port: Its port.
        epoch: Keeps this group's keys apart from those of a store's earlier groups.
        rank: This process's rank.
        world_size: Ranks that must join.
        bind_host: This rank's own address as peers see it; the host name's if None.
        timeout_s: How long to wait for peers, now and in every collective.

    Raises:
        RuntimeError: The store or a peer did not answer in time.
    """
    gloo = _c10d.ProcessGroupGloo
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    options = gloo._Options()
    options._timeout = timeout
    if bind_host is None:
        options._devices = [gloo.create_default_device()]
    else:
        options._devices = [gloo.create_device(hostname=bind_host)]
    prefixed = PrefixStore(f"epoch-{epoch}", store)
    backend = gloo(prefixed, rank, world_size, options)
    return RankGroup(epoch, rank, world_size, backend)
