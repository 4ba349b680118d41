"""FlashInfer's all-to-all between ranks that are streams of one GPU.

Its kernels take any memory that all ranks reach, so an ordinary tensor stands in for what several
GPUs share. A rank's kernels wait on the device for those of all others, so that the blocks of all
must fit the GPU at once: at most one row per multiprocessor, over all ranks. And while some wait,
nothing may make the host wait: all kernels are loaded, and each stream's memory is allocated,
by ranks without peers beforehand.

What several GPUs add is not tested here: NVLink, memory mapped from peers, ranks out of step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pytest
import torch

from executor.budget.token_budget import a2a_workspace_size_per_rank
from executor.model.flashinfer.all_to_all import AllToAll, AllToAllSizes
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.dispatch_flashinfer import FlashInferDispatcher
from executor.parallel.layout import DpLayout
from tests.executor.support.flashinfer.cpu_all_to_all import run_threads
from tests.executor.support.flashinfer.expert_rows import (
    Rows,
    dense,
    experts,
    fitting,
    layouts_of,
    places_of,
    random_rows,
)
from tests.gpu.support.cases import largest_error
from tests.gpu.support.machine import IS_STAND_IN, Machine

T = TypeVar("T")

MOST_ROWS = 12  # of a rank; eight ranks have 96 blocks, an H100 or H200 runs 132
OFF = 0.01  # of a row's length: results are rounded to bfloat16 on each rank, and their sum again
# ep_size, top_k, hidden size, experts: a kernel for every top_k, another one for 4 ranks.
SHAPES = [(1, 2, 64, 8), (2, 1, 40, 8), (3, 4, 64, 12), (4, 8, 128, 32), (8, 8, 2048, 128)]
SHAPES += [(3, 2, 64, 8), (5, 8, 64, 128)]  # with ghosts
if IS_STAND_IN:
    SHAPES = [(1, 2, 8, 8), (2, 1, 5, 8), (4, 6, 8, 16), (3, 2, 8, 8)]


def sizes_of(ep_size: int, top_k: int, hidden_size: int, num_experts: int) -> AllToAllSizes:
    return fitting(
        ep_size=ep_size,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        dtype=torch.bfloat16,
        max_num_tokens=MOST_ROWS,
    )


class Ranks:
    """All ranks of a group, on one device."""

    def __init__(self, machine: Machine, ops: FlashInferOps, sizes: AllToAllSizes) -> None:
        self.sizes = sizes
        self._machine = machine
        self._streams: list[torch.cuda.Stream] = []
        self.dispatchers = self._dispatchers(ops, sizes)
        if machine.device.type == "cuda":
            self._streams = [torch.cuda.Stream(machine.device) for _ in range(sizes.ep_size)]
            self._warm_up(ops)

    def run(
        self, rows: Sequence[Rows], layouts: Sequence[DpLayout], *, in_place: bool = True
    ) -> list[torch.Tensor]:
        """Returns each rank's results, from and to the CPU."""
        own = [self.on_device(part) for part in rows]
        dispatched = self._together(
            [
                partial(dispatcher.dispatch, x, ids, weights, layout)
                for dispatcher, (x, ids, weights), layout in zip(
                    self.dispatchers, own, layouts, strict=True
                )
            ]
        )
        ys = []
        for rank, part in enumerate(dispatched):
            y = experts(part, rank, self.sizes)
            ys.append(part.place_for_results().copy_(y) if in_place else y)
        results = self._together(
            [
                partial(dispatcher.combine, y, part)
                for dispatcher, y, part in zip(self.dispatchers, ys, dispatched, strict=True)
            ]
        )
        return [y.cpu() for y in results]

    def on_device(self, rows: Rows) -> Rows:
        x, ids, weights = rows
        device = self._machine.device
        return x.to(device), ids.to(device), weights.to(device)

    def _together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Runs one call per rank, all at once."""
        if not self._streams:
            return run_threads(calls)
        self._machine.synchronize()
        answers = []
        for stream, call in zip(self._streams, calls, strict=True):
            with torch.cuda.stream(stream):
                answers.append(call())
        self._machine.synchronize()
        return answers

    def _dispatchers(self, ops: FlashInferOps, sizes: AllToAllSizes) -> list[FlashInferDispatcher]:
        shape = (sizes.ep_size, sizes.bytes_per_rank)
        workspace = torch.zeros(shape, dtype=torch.uint8, device=self._machine.device)
        dispatchers = []
        for rank in range(sizes.ep_size):
            all_to_all = AllToAll(ops, sizes, rank)
            all_to_all.attach(workspace)
            places = places_of(sizes, rank, self._machine.device)
            dispatchers.append(
                FlashInferDispatcher(all_to_all, places, device=self._machine.device)
            )
        return dispatchers

    def _warm_up(self, ops: FlashInferOps) -> None:
        sizes = self.sizes
        alone = sizes_of(1, sizes.top_k, sizes.hidden_size, sizes.num_experts)
        layout = DpLayout.single(MOST_ROWS)
        x, ids, weights = self.on_device(random_rows(MOST_ROWS, alone, 0))
        for stream in self._streams:
            [dispatcher] = self._dispatchers(ops, alone)
            for in_place in (True, False):
                with torch.cuda.stream(stream):
                    part = dispatcher.dispatch(x, ids, weights, layout)
                    y = part.place_for_results()
                    dispatcher.combine(y if in_place else torch.zeros_like(y), part)
                self._machine.synchronize()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_reach_their_experts_and_come_back(
    machine: Machine, ops: FlashInferOps, shape: tuple[int, int, int, int], in_place: bool
) -> None:
    """Steps of changing sizes, some ranks without rows, over what the last step left behind."""
    sizes = sizes_of(*shape)
    ranks = Ranks(machine, ops, sizes)
    for step, most in enumerate((MOST_ROWS, 1, 5, MOST_ROWS)):
        counts = [(most * (rank + step)) % (most + 1) for rank in range(sizes.ep_size)]
        counts[step % sizes.ep_size] = most
        rows = [random_rows(count, sizes, 100 * step + i) for i, count in enumerate(counts)]
        results = ranks.run(rows, layouts_of(counts), in_place=in_place)
        for rank, (got, sent) in enumerate(zip(results, rows, strict=True)):
            error = largest_error(got, dense(sent, sizes))
            assert error <= OFF, f"step {step}, rank {rank}: off by {error:.4f}"


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_reaches_no_expert(
    machine: Machine, ops: FlashInferOps, shape: tuple[int, int, int, int]
) -> None:
    sizes = sizes_of(*shape)
    ranks = Ranks(machine, ops, sizes)
    size = 8
    counts = [(3 * rank) % (size + 1) for rank in range(sizes.ep_size)]
    rows = [random_rows(size, sizes, seed) for seed in range(sizes.ep_size)]
    for count, (x, ids, weights) in zip(counts, rows, strict=True):
        x[count:] = torch.nan
        ids[count:] = sizes.num_experts
        weights[count:] = torch.nan
    results = ranks.run(rows, layouts_of([size] * sizes.ep_size, graph_size=size))
    for count, got, sent in zip(counts, results, rows, strict=True):
        assert largest_error(got[:count], dense(sent, sizes)[:count]) <= OFF
        assert not got[count:].any()


def test_one_rank_can_be_captured_and_replayed(machine: Machine, ops: FlashInferOps) -> None:
    """One, because a replay that uploads its graph may make the host wait for its peers."""
    sizes = sizes_of(*SHAPES[0])
    ranks = Ranks(machine, ops, sizes)
    [dispatcher], [layout] = ranks.dispatchers, layouts_of([6], graph_size=6)
    inputs = ranks.on_device(random_rows(6, sizes, 0))

    def step() -> torch.Tensor:
        x, ids, weights = inputs
        dispatched = dispatcher.dispatch(x, ids, weights, layout)
        return dispatcher.combine(experts(dispatched, 0, sizes), dispatched)

    step()
    replay = step
    if machine.device.type == "cuda":
        machine.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return captured

    for seed in range(1, 4):
        rows = random_rows(6, sizes, seed)
        for buffer, x in zip(inputs, rows, strict=True):
            buffer.copy_(x)
        assert largest_error(replay().cpu(), dense(rows, sizes)) <= OFF


def test_the_workspace_has_the_size_that_the_library_says(ops: FlashInferOps) -> None:
    comm = AllToAll(ops, sizes_of(*SHAPES[0]), 0)._comm
    for ep_size in (1, 2, 8, 64):
        for tokens in (1, 7, 1024, 4097):
            for hidden_size, top_k in ((2048, 8), (4096, 6), (7168, 22)):
                ours = a2a_workspace_size_per_rank(
                    ep_size=ep_size,
                    max_num_tokens=tokens,
                    dispatch_payload_size_per_token=2 * hidden_size + 8 * top_k,
                    combine_payload_size_per_token=2 * hidden_size,
                )
                assert ours == comm.moe_a2a_get_workspace_size_per_rank(
                    ep_size=ep_size,
                    max_num_tokens=tokens,
                    total_dispatch_payload_size_per_token=2 * hidden_size + 8 * top_k,
                    combine_payload_size_per_token=2 * hidden_size,
                    eplb_stats_num_experts=0,
                    backend="trtllm",
                )
