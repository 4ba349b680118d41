"""If this fails, GPU executors never get to share memory, or write into memory of a dead peer.

Every rank is a process, over TCP; the library's own code runs, without a GPU under it.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from executor.model.flashinfer.all_to_all import AllToAll
from executor.model.flashinfer.bootstrap import GroupCommunicator, MnnvlWorkspace
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.dispatch_flashinfer import FlashInferDispatcher
from executor.parallel.process_groups import EpochGroups
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer
from tests.executor.support.flashinfer.cpu_mnnvl import PAGE, FileMemory, shared_through_files
from tests.executor.support.flashinfer.expert_rows import (
    dense,
    experts,
    fitting,
    layouts_of,
    places_of,
    random_rows,
)
from tests.executor.support.ranks.ranks import join, run_ranks, topology_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"),
    pytest.mark.usefixtures(
        "real"
    ),  # without the library, its processes would say an import failed
]


@contextmanager
def joined(port: int, epoch: int, rank: int, world_size: int) -> Iterator[EpochGroups]:
    groups = join(port, topology_of(rank, world_size, 1), epoch)
    yield groups
    groups.close()


def import_flashinfer() -> Any:
    """Returns the real library, with the modules that take part."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"FLASHINFER_WORKSPACE_BASE": folder}),
    ):
        import_module("flashinfer.comm")
    return sys.modules["flashinfer"]


@contextmanager
def library_on_files() -> Iterator[tuple[FlashInferOps, FileMemory]]:
    """The library, with its kernels computed on the CPU and its memory in files."""
    real = import_flashinfer()
    library = CpuFlashInfer(real)
    with shared_through_files(real.comm.mnnvl) as memory, library.installed():
        yield FlashInferOps(enable_pdl=True), memory


# What the library asks of a communicator.


def talk(rank: int, port: int, world_size: int) -> dict[str, Any]:
    library = import_flashinfer().comm
    with joined(port, 0, rank, world_size) as groups:
        communicator = GroupCommunicator(groups.host)
        split = communicator.Split(5, rank)
        answers: dict[str, Any] = {
            "is one": isinstance(communicator, library.abstractions.CommBackend),
            "place": (split.Get_rank(), split.Get_size()),
            "gathered": split.allgather(("x" * rank, b"\0" * (100 * rank))),
            "broadcast": [split.bcast(f"from {rank}", root) for root in range(world_size)],
            "agreed": library.mnnvl.all_ranks_agree(split, rank != 1),
            "has a default group": dist.is_initialized(),
            "has MPI": "mpi4py" in sys.modules,
        }
        answers["received"] = _exchange_files(library.fd_exchange, split)
        for wrong, color, key in (("color", rank, rank), ("order", 0, -rank)):
            try:
                communicator.Split(color, key)
            except ValueError as error:
                answers[wrong] = str(error)
        communicator.barrier()
    return answers


def _exchange_files(exchange: Any, communicator: GroupCommunicator) -> list[str]:
    """Returns what each rank wrote into the file that it handed over, and then rank 0's again."""
    with tempfile.TemporaryFile() as own:
        own.write(f"file of {communicator.Get_rank()}".encode())
        own.flush()
        received = exchange.exchange_fds(communicator, os.dup(own.fileno()))
        is_root = communicator.Get_rank() == 0
        root = exchange.broadcast_fd(communicator, os.dup(own.fileno()) if is_root else None, 0)
        content = [os.pread(descriptor, 100, 0).decode() for descriptor in [*received, root]]
        for descriptor in {*received, root}:
            os.close(descriptor)
        return content


def test_the_library_can_talk_through_our_groups() -> None:
    everyone = range(3)
    for rank, answer in enumerate(run_ranks(talk, 3, 3)):
        assert answer["is one"]
        assert answer["place"] == (rank, 3)
        assert answer["gathered"] == tuple(("x" * n, b"\0" * (100 * n)) for n in everyone)
        assert answer["broadcast"] == [f"from {n}" for n in everyone]
        assert answer["agreed"] is False
        assert answer["received"] == [f"file of {n}" for n in [*everyone, 0]]
        assert not answer["has a default group"]
        assert not answer["has MPI"]
        for wrong in ("color", "order"):
            assert "stay together and in order" in answer[wrong]


# Memory that all ranks see.

SIZES = fitting(ep_size=2)


def step(dispatcher: FlashInferDispatcher, rank: int, seed: int) -> bool:
    """Returns whether a dispatch and a combine give what they should, on this rank."""
    counts = (3, 5)
    rows = random_rows(counts[rank], SIZES, seed + rank)
    dispatched = dispatcher.dispatch(*rows, layouts_of(counts)[rank])
    got = dispatcher.combine(experts(dispatched, rank, SIZES), dispatched)
    return torch.allclose(got, dense(rows, SIZES), atol=1e-4)


def serve(process: int, port: int, plan: list[tuple[int | None, ...]]) -> list[tuple[bool, bool]]:
    """Plays a rank in each epoch of a plan. Returns whether memory moved, and steps were right.

    Args:
        process: Which of the plan's processes.
        port: Of the store.
        plan: The rank of each process in each epoch; None where it is not there.
    """
    answers = []
    with library_on_files() as (ops, memory):
        made: dict[int, FlashInferDispatcher] = {}
        workspace = MnnvlWorkspace(ops, SIZES.bytes_per_rank)
        for epoch, ranks in enumerate(plan):
            rank = ranks[process]
            if rank is None:
                continue
            if rank not in made:
                all_to_all = AllToAll(ops, SIZES, rank)
                all_to_all._shared = workspace  # one per process, also if its rank changes
                made[rank] = FlashInferDispatcher(
                    all_to_all,
                    places_of(SIZES, rank),
                    device=torch.device("cpu"),
                    payload_in_workspace=False,
                )
            before = workspace.tensor
            with joined(port, epoch, rank, 2) as groups:
                made[rank].join(groups)
                were_right = [step(made[rank], rank, 10 * seed) for seed in range(3)]
                GroupCommunicator(groups.host).barrier()
            made[rank].leave()
            assert len(memory.mapped) == 2, "one mapping of each rank's part, however many epochs"
            answers.append((workspace.tensor is not before, all(were_right)))
    return answers


def test_memory_stays_mapped_exactly_while_the_same_processes_keep_their_ranks() -> None:
    """The third process takes the place of the second, whose memory the first has still mapped."""
    plan = [(0, 1, None), (0, 1, None), (0, None, 1), (0, None, 1), (1, None, 0)]
    first, second, third = run_ranks(serve, 3, plan)
    assert [moved for moved, _ in first] == [True, False, True, False, True]
    assert [moved for moved, _ in second] == [True, False]
    assert [moved for moved, _ in third] == [True, False, True]
    assert all(is_right for _, is_right in [*first, *second, *third])


def fail_to_share(rank: int, port: int) -> list[str]:
    """Returns what a rank is told when sizes differ, on another host, without memory, and after that."""
    messages = []
    with library_on_files() as (ops, memory):
        same = MnnvlWorkspace(ops, PAGE)
        workspaces = [MnnvlWorkspace(ops, PAGE * (1 + rank)), same, same, same]
        for epoch, workspace in enumerate(workspaces):
            host = f"host {rank}" if epoch == 1 else "one host"
            with (
                patch.object(socket, "gethostname", lambda host=host: host),
                patch.object(memory, "cuMemCreate", side_effect=RuntimeError("out of memory")),
                joined(port, epoch, rank, 2) as groups,
                pytest.raises(RuntimeError) as refused,
            ):
                workspace.join(GroupCommunicator(groups.host))
            messages.append(str(refused.value))
    return messages


def test_ranks_are_told_why_they_cannot_share_memory() -> None:
    """File descriptors do not cross hosts. The library leaves half done what it had begun."""
    for other_sizes, other_host, no_memory, afterwards in run_ranks(fail_to_share, 2):
        assert f"want [{PAGE}, {2 * PAGE}] bytes" in other_sizes
        assert "same token budget" in other_sizes
        assert "on the hosts host 0, host 1, and no NVLink fabric" in other_host
        assert "set moe_a2a=none" in other_host
        assert "out of memory" in no_memory
        assert "EP ranks [0, 1] failed to map shared memory before" in afterwards
        assert "restart them" in afterwards
