"""Each collective of a group of one executor, in buffers where graphs find them."""

import torch

from executor.parallel.layout import Topology
from executor.parallel.process_groups import EpochGroups, join_group
from executor.parallel.rendezvous import open_store
from tests.gpu.support.machine import Machine

HOST, SECRET = "127.0.0.1", bytes(range(32))
NUM_ROWS, WIDTH = 6, 64
COLLECTIVES = (
    *("all_gather", "reduce_scatter", "reduce_scatter with counts", "all_reduce", "all_to_all"),
    *("all_to_all with splits", "broadcast", "all_gather_rows"),
)


def form(machine: Machine, epoch: int) -> EpochGroups:
    store = open_store(HOST, SECRET)
    try:
        return join_group(
            HOST,
            store.port,
            SECRET,
            epoch=epoch,
            topology=Topology(),
            device=machine.device,
            bind_host=HOST,  # a machine without a network may have no address for its name
        )
    finally:
        store.close()


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
        outs["all_gather_rows"].copy_(self.x)
        group.all_gather_rows(outs["all_gather_rows"].view(torch.int32), counts)

    def fill(self, seed: int) -> None:
        x = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(seed))
        self.x.copy_(x.to(self.x.dtype))
        self.out.fill_(torch.nan)

    def check(self) -> None:
        for name, out in zip(COLLECTIVES, self.out, strict=True):
            assert torch.equal(out, self.x), name
