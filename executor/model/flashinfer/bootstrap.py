"""Shared memory of an all-to-all: every EP rank's GPU writes to it, agreed on over a process group.

FlashInfer allocates it with CUDA's virtual memory (``MnnvlMemory``) and hands it from process to
process as a handle: a fabric handle where every GPU has one, as those that one NVLink fabric joins with
the service IMEX, across hosts too; else a file descriptor over a Unix socket, which needs all ranks
on one host. Each process sees every rank's part, one after another:

    rank 0's part │ gap │ rank 1's part │ gap │ ...         gaps up to multiples of 512 MiB
    └─ on GPU 0         └─ on GPU 1, written over NVLink

What the library talks through is ``GroupCommunicator``: it needs neither MPI nor a default process
group of PyTorch's.

The library keeps its state in the class, so **per process** there is one device and one
communicator, and all ranks must map the same sizes in the same order. Only ``MnnvlWorkspace`` may
use it. A new epoch finds one of these:

same processes, same ranks    The memory is still shared: it is kept, at its addresses.
a process or a rank is new    Peers of a restarted process still see the memory of the old one, which
                              nobody reads. Every rank unmaps all parts and maps them anew, at
                              addresses that may differ: captured graphs must be captured again.
a mapping failed half-way     The library keeps what it had done by then and does not undo it.
                              That process must be restarted; every rank says so.

None of it helps a rank whose kernels wait for a peer that died: they spin for 150 to 300 s and then
trap, which ends that process's CUDA context. Such a rank must be restarted as well, so after a
death in the middle of a step all ranks usually are.
"""

import socket
from typing import Any, Protocol
from uuid import uuid4

import torch

from executor.model.flashinfer.operators import FlashInferOps
from executor.model.flashinfer.values import decode, encode


class HostGroup(Protocol):
    """A process group whose tensors are on the CPU."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Lays every rank's ``x`` end to end in ``out``."""
        ...


class GroupCommunicator:
    """What FlashInfer calls a CommBackend: small values between the ranks of a group (values.py).

    Its methods have the library's names. All but the first two must be called by every rank.

    Args:
        group: Carries the bytes.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.world_size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """Returns what each rank gave, in order of rank.

        Raises:
            TypeError: The data is of a type that the library told nobody when this was written.
            ValueError: What came is no value.
        """
        sent = torch.frombuffer(bytearray(encode(data)), dtype=torch.uint8)
        lens = torch.empty(self.Get_size(), dtype=torch.int64)
        self._group.all_gather(lens, torch.tensor([len(sent)]))
        padded = torch.zeros(int(lens.max()), dtype=torch.uint8)
        padded[: len(sent)] = sent
        received = torch.empty(self.Get_size() * len(padded), dtype=torch.uint8)
        self._group.all_gather(received, padded)
        parts = zip(received.view(self.Get_size(), -1).numpy(), lens.tolist(), strict=True)
        return tuple(decode(part[:length].tobytes()) for part, length in parts)

    def bcast(self, data: Any, root: int) -> Any:
        """Returns what ``root`` gave."""
        return self.allgather(data if self.Get_rank() == root else None)[root]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.allgather(None)

    def Split(self, color: int, key: int) -> "GroupCommunicator":
        """Returns this communicator: EP ranks are never split, and stay in order.

        Raises:
            ValueError: Colors differ, or keys ask for another order.
        """
        asked = self.allgather((color, key))
        if len({color for color, _ in asked}) > 1 or list(asked) != sorted(asked):
            raise ValueError(
                f"colors and keys by rank {list(asked)}: the ranks of a group stay together and in "
                f"order; use one color, and each rank's own number as its key"
            )
        return self


class MnnvlWorkspace:
    """This process's view of every EP rank's part of the shared memory. One per process.

    Args:
        ops: The library.
        bytes_per_rank: Of each rank's part, the same on all ranks. The GPU gives whole pages (2 MiB).

    Attributes:
        tensor: uint8 [ep_size, bytes_per_rank], row n on rank n's GPU; None before ``join``.
    """

    def __init__(self, ops: FlashInferOps, bytes_per_rank: int) -> None:
        self._library = comm_of(ops)
        self.bytes_per_rank = bytes_per_rank
        self.tensor: torch.Tensor | None = None
        self._memory: Any = None
        self._marks: tuple[str, ...] = ()  # of the mapping that is in place, by rank
        self._mark = ""  # this rank's among them
        self._has_failed = False

    def join(self, communicator: GroupCommunicator) -> bool:
        """Shares memory of the current device with exactly the ranks of an epoch. All must call it.

        Nothing may be running on the GPU that uses it, on any rank, from then on.

        Returns:
            Whether it was mapped anew, so that graphs captured before are void.

        Raises:
            RuntimeError: Ranks want other sizes, are on several hosts without a fabric, an earlier
                mapping failed on one of them, or this one fails.
        """
        torch.cuda.synchronize()
        reports = communicator.allgather(
            (self.bytes_per_rank, self._mark, self._marks, self._has_failed, *self._place())
        )
        sizes, marks, mappings, failures, hosts, have_fabric = zip(*reports, strict=True)
        if any(failures):
            ranks = [rank for rank, failed in enumerate(failures) if failed]
            raise RuntimeError(
                f"EP ranks {ranks} failed to map shared memory before, which cannot be undone: "
                f"restart them"
            )
        if len(set(sizes)) > 1:
            raise RuntimeError(
                f"EP ranks want {list(sizes)} bytes of shared memory, by rank: start them with the "
                f"same token budget"
            )
        if len(set(hosts)) > 1 and not all(have_fabric):
            raise RuntimeError(
                f"EP ranks are on the hosts {', '.join(dict.fromkeys(hosts))}, and no NVLink fabric "
                f"joins the GPUs of all: moe_a2a=flashinfer needs one, with IMEX, to write into another "
                f"host's memory; set moe_a2a=none"
            )
        if all(mapping == marks for mapping in mappings):
            return False
        self._has_failed = True
        self._unmap()
        self._map(communicator)
        self._has_failed = False
        return True

    def _place(self) -> tuple[str, bool]:
        """Returns this rank's host, and whether its GPU can share memory with other hosts."""
        mnnvl = self._library.mnnvl.MnnvlMemory
        return socket.gethostname(), mnnvl._probe_fabric_supported(torch.cuda.current_device())

    def _map(self, communicator: GroupCommunicator) -> None:
        library = self._library
        rank, size = communicator.Get_rank(), communicator.Get_size()
        # Pure expert parallelism. The library wants tp_size to be all ranks.
        mapping = library.Mapping(
            world_size=size, rank=rank, gpus_per_node=size, tp_size=size, moe_ep_size=size
        )
        mnnvl = library.mnnvl.MnnvlMemory
        mnnvl.initialize()
        # Kept in the class once found out. A process that just started asks its peers, so all must.
        mnnvl._fabric_supported = None
        mnnvl.set_comm_from_config(
            mapping=mapping, config=library.mnnvl.MnnvlConfig(comm_backend=communicator)
        )
        self._memory = mnnvl(mapping=mapping, size=self.bytes_per_rank)
        self.tensor = self._memory.as_torch_strided_tensor(dtype=torch.uint8)
        mark = uuid4().hex
        self._marks = communicator.allgather(mark)
        self._mark = mark

    def _unmap(self) -> None:
        self._marks, self._mark, self.tensor = (), "", None
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        pointer = memory.ptr
        del memory.ptr  # or its __del__ would close it again
        self._library.mnnvl.MnnvlMemory.close_mnnvl_memory(ptr=pointer)


def comm_of(ops: FlashInferOps) -> Any:
    """Returns the library's collectives, which its package does not import by itself."""
    if not hasattr(ops.library, "comm"):
        import flashinfer.comm  # noqa: F401  (becomes an attribute of the package)
    return ops.library.comm
