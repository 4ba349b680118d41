"""Collectives of a group of one executor over NCCL, as an epoch forms it: all that one GPU can show.

A group of several runs the same calls. The stand-in's group is one over TCP.
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from executor.graph.backend import ShapeKey
from executor.parallel.process_groups import EpochGroups, NcclGroup
from tests.gpu.support.collectives import Buffers, form
from tests.gpu.support.machine import Machine


@pytest.fixture
def groups(machine: Machine) -> Iterator[EpochGroups]:
    groups = form(machine, 1)
    yield groups
    machine.discard()  # first: NCCL ends when no graph holds it
    groups.close()


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
            backend.warm_up(partial(buffers.run, groups))
            backend.capture(ShapeKey(1), partial(buffers.run, groups))
        buffers.fill(epoch)
        backend.replay(ShapeKey(1))
        buffers.check()
        groups.close()  # as a worker does: graphs go when the next epoch captures
        machine.discard()
