"""Suite for GPUs on a fake one: what its stand-in on a CPU never calls."""

import pytest
import torch

from executor.graph.backend import ShapeKey
from executor.parallel import process_groups
from executor.parallel.process_groups import NcclGroup
from tests.gpu.support.collectives import Buffers, form
from tests.gpu.support.machine import Gpu
from tests.together.cuda.support.fake_cell import FakeNccl
from tests.together.cuda.support.fake_gpu import FakeGpu


def test_collectives_of_one_rank_over_nccl_never_wait_and_are_captured(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(store: object, place: process_groups.Place, *rest: object) -> NcclGroup:
        return NcclGroup(place.rank, place.world_size, FakeNccl(gpu, place.world_size), store)

    monkeypatch.setattr(process_groups, "_nccl_group", group)
    machine = Gpu()
    assert machine.ops is not None
    assert machine.triton is not None
    groups = form(machine, 1)
    assert isinstance(groups.world, NcclGroup)
    buffers, backend = Buffers(machine.device), machine.new_backend(calls_library=True)
    with gpu.step():
        buffers.run(groups)
    assert gpu.waits == []
    with torch.inference_mode(), backend.session(label="collectives", num_captures=1):
        backend.warm_up(lambda: buffers.run(groups))
        backend.capture(ShapeKey(1), lambda: buffers.run(groups))
    with gpu.step():
        backend.replay(ShapeKey(1))
    assert gpu.launched == ["graph"]
    [graph] = gpu.graphs
    eager = ["_allgather_base", "_reduce_scatter_base", "allreduce", "allreduce"]
    assert [name for name in graph if name != "copy"] == [
        *eager,
        *("alltoall_base", "alltoall_base", "broadcast"),
        *("zero_", "zero_", "allreduce"),
    ]
    machine.discard()
    groups.close()
