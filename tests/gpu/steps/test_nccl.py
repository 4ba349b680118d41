"""Collectives of a group of one executor over NCCL, as an epoch forms it: all that one GPU can show.

A group of several runs the same calls. The stand-in's group is one over gloo.
"""

from collections.abc import Iterator

import pytest
import torch

from executor.graph.backend import ShapeKey
from executor.parallel.layout import Topology
from executor.parallel.process_groups import EpochGroups, NcclGroup, join_group
from executor.parallel.rendezvous import open_store
from tests.gpu.support.machine import Machine

HOST, SECRET = "127.0.0.1", bytes(range(32))
NUM_ROWS, WIDTH = 6, 64
COLLECTIVES = (
    *("all_gather", "reduce_scatter", "reduce_scatter with counts", "all_reduce", "all_to_all"),
    *("all_to_all with splits", "broadcast"),
)


def form(machine: Machine, epoch: int) -> EpochGroups:
    store = open_store(HOST, SECRET)
    try:
        return join_group(
            HOST, store.port, SECRET, epoch=epoch, topology=Topology(), device=machine.device
        )
    finally:
        store.close()


@pytest.fixture
def groups(machine: Machine) -> Iterator[EpochGroups]:
    groups = form(machine, 1)
    yield groups
    machine.discard()  # first: NCCL ends when no graph holds it
    groups.close()


class Buffers:
    """What collectives read and write, where graphs find it."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.bfloat16, device=device)
        self.work, self.scratch = self.x.clone(), self.x.clone()
        self.out = torch.zeros(len(COLLECTIVES), NUM_ROWS, WIDTH, dtype=self.x.dtype, device=device)

    def run(self, groups: EpochGroups) -> None:
        """Makes each collective once, of ``x``."""
        group, outs = groups.world, dict(zip(COLLECTIVES, self.out, strict=True))
        group.all_gather(outs["all_gather"], self.x)
        group.reduce_scatter(outs["reduce_scatter"], self.x, self.scratch)
        self.work.copy_(self.x)
        counts = [NUM_ROWS]
        group.reduce_scatter(
            outs["reduce_scatter with counts"], self.work, self.scratch, counts=counts
        )
        outs["all_reduce"].copy_(self.x)
        group.all_reduce(outs["all_reduce"])
        group.all_to_all(outs["all_to_all"], self.x)
        group.all_to_all(outs["all_to_all with splits"], self.x, counts, counts)
        outs["broadcast"].copy_(self.x)
        group.broadcast(outs["broadcast"], 0)

    def fill(self, seed: int) -> None:
        x = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(seed))
        self.x.copy_(x.to(self.x.dtype))
        self.out.fill_(torch.nan)

    def check(self) -> None:
        for name, out in zip(COLLECTIVES, self.out, strict=True):
            assert torch.equal(out, self.x), name


def test_collectives_of_one_rank_give_back_what_they_got(
    machine: Machine, groups: EpochGroups
) -> None:
    assert isinstance(groups.world, NcclGroup) == (machine.device.type == "cuda")
    buffers = Buffers(machine.device)
    for seed in range(3):
        buffers.fill(seed)
        with machine.waiting_refused():
            buffers.run(groups)
        buffers.check()


def test_captured_collectives_run_again_with_each_replay(
    machine: Machine, groups: EpochGroups
) -> None:
    """Between eager ones, as steps outside graphs lie between replays."""
    backend, key, buffers = (
        machine.new_backend(calls_library=True),
        ShapeKey(1),
        Buffers(machine.device),
    )
    with torch.inference_mode(), backend.session(label="collectives", num_captures=1):
        backend.warm_up(lambda: buffers.run(groups))
        backend.capture(key, lambda: buffers.run(groups))
    for seed in range(3):
        buffers.fill(seed)
        with machine.waiting_refused():
            backend.replay(key)
        buffers.check()
        buffers.fill(100 + seed)
        buffers.run(groups)
        buffers.check()


def test_a_group_is_left_with_its_graphs_and_the_next_epoch_captures_anew(machine: Machine) -> None:
    buffers = Buffers(machine.device)
    for epoch in (1, 2, 3):
        groups = form(machine, epoch)
        backend = machine.new_backend(calls_library=True)
        with torch.inference_mode(), backend.session(label="collectives", num_captures=1):
            backend.warm_up(lambda groups=groups: buffers.run(groups))
            backend.capture(ShapeKey(1), lambda groups=groups: buffers.run(groups))
        buffers.fill(epoch)
        backend.replay(ShapeKey(1))
        buffers.check()
        groups.close()  # as a worker does: graphs go when the next epoch captures
        machine.discard()
