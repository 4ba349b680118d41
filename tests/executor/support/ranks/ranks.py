"""Ranks of a test: one process each, forked off a server that has imported PyTorch once."""

import functools
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

from executor.parallel import process_groups as parallel
from executor.parallel.layout import Topology
from executor.parallel.process_groups import EpochGroups, join_group
from executor.parallel.rendezvous import open_store

HOST = "127.0.0.1"
SECRET = b"a test's epochs all have this one"
TIMEOUT_S = 300.0  # of waits that should not end this way, on a machine that is busy
# Some operators of a capture import torch._dynamo at their first call, for more than a second.
PRELOADED = ["torch", "torch._dynamo", "pytest", "executor.build.executor", __name__]
PRELOADED += [f"{__package__}.preloaded_world"]


def be_patient() -> None:
    """Has this process wait for peers while a group forms for as long as for anything else here.

    A router asks again where a busy peer came too late; nobody does here.
    """
    parallel.FORM_TIMEOUT_S = TIMEOUT_S


def topology_of(rank: int, dp_size: int, attn_tp_size: int) -> Topology:
    """Returns the place of a world rank."""
    dp_rank, attn_tp_rank = divmod(rank, attn_tp_size)
    return Topology(
        dp_rank=dp_rank, dp_size=dp_size, attn_tp_rank=attn_tp_rank, attn_tp_size=attn_tp_size
    )


def join(port: int, topology: Topology, epoch: int = 0) -> EpochGroups:
    """Returns the groups of an executor once all have joined at the store of this port."""
    return join_group(
        HOST, port, SECRET, epoch=epoch, topology=topology, bind_host=HOST, timeout_s=TIMEOUT_S
    )


@functools.cache
def fork_server() -> ForkServerContext:
    """Returns what forks ranks, the same for all tests of a run; no rank outlives its call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Returns ``function(rank, store_port, *args)`` of every rank.

    The function must be importable by name. It runs on one thread: ranks that each spin on
    every core make each other wait.
    """
    context = fork_server()
    store = open_store(HOST, SECRET)
    ends, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(function, rank, store.port, args, sender), daemon=True
        )
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    answers = []
    for receiver, process in zip(ends, processes, strict=True):
        answers.append(receiver.recv() if receiver.poll(TIMEOUT_S) else (False, "no answer"))
        process.join(TIMEOUT_S)
        receiver.close()
    store.close()
    errors = {rank: value for rank, (ok, value) in enumerate(answers) if not ok}
    assert not errors, f"by rank: {errors}"
    return [value for _, value in answers]


def _run_rank(
    function: Callable[..., Any], rank: int, port: int, args: tuple[Any, ...], sender: Connection
) -> None:
    torch.set_num_threads(1)
    be_patient()
    try:
        sender.send((True, function(rank, port, *args)))
    except Exception as error:
        sender.send((False, repr(error)))
