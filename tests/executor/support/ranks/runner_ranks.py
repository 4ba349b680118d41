"""Executor of the replay tests. Imports no Transformers: processes start here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.budget.capture_sizes import GraphSizes
from executor.graph.backend import EagerBackend
from executor.parallel.process_groups import RankGroup
from executor.runners.target import RunnerSelection
from tests.executor.support.ranks.ranks import join, topology_of
from tests.executor.support.recording.recording_backend import RecordingBackend, known_world
from tests.executor.support.runner_cases import PREFILL_GRAPHS, RunnerCase, captured

GRAPH_SIZES = GraphSizes((2, 4), (4, 8))
RANKS_AUX_LAYERS = (0, 2, 1)  # of those whose graphs are recorded, which so leave features
COUNTS = ("num_token_non_padded", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")


@dataclass(frozen=True, slots=True)
class RanksStep:
    """A step of two DP ranks.

    Attributes:
        num_tokens: Of each DP rank, tokens of each sequence.
        graph_size: Token rows that both run; None runs eagerly.
        has_extend: Whether it is a step with prompt tokens.
    """

    num_tokens: tuple[Sequence[int], Sequence[int]]
    graph_size: int | None
    has_extend: bool

    def batch(self, case: RunnerCase, dp_rank: int) -> ForwardBatch:
        """Returns a DP rank's part of it, for an executor of it or for one that has no peers."""
        is_alone = case.forward_pass.place.topology.world_size == 1
        return case.batch(
            np.random.default_rng(dp_rank),
            self.num_tokens[dp_rank],
            None if is_alone else self.graph_size,
            has_extend=self.has_extend,
            global_num_tokens=None if is_alone else [sum(x) for x in self.num_tokens],
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """What an executor saw in one epoch.

    Attributes:
        outcomes: What ``RunnerCase.run`` returns of each step, as arrays.
        counts: The counts on the device after each step; empty after one that ran eagerly.
        counts_at_capture: Of prefill and decode, after the capture, which ends with the smallest.
    """

    outcomes: list[list[Any]]
    counts: list[dict[str, list[int]]]
    counts_at_capture: list[dict[str, list[int]]]


@known_world()
def replay_on_ranks(
    rank: int, port: int, path: Path, attn_tp_size: int, num_epochs: int, steps: list[RanksStep]
) -> dict[tuple[bool, str], list[Replayed]]:
    """Runs steps in each of some epochs, on each backend and with each prefill runner.

    Args:
        rank: World rank.
        port: Of the ranks' store.
        path: Checkpoint.
        attn_tp_size: Executors of each of the two DP ranks.
        num_epochs: Groups to form one after the other.
        steps: To run.

    Returns:
        What was seen in each epoch, by whether graphs are recorded and by kind of prefill runner.
    """
    topology = topology_of(rank, 2, attn_tp_size)
    results = {}
    epochs = count()
    # What is called shows nothing by kind of prefill that a rank alone does not show.
    for is_recorded, kinds in ((False, PREFILL_GRAPHS[:1]), (True, PREFILL_GRAPHS)):
        aux_layers = RANKS_AUX_LAYERS if is_recorded else None
        case = RunnerCase(path, is_capturable=is_recorded, topology=topology, aux_layers=aux_layers)
        for prefill_graphs in kinds:
            new_backend = RecordingBackend if is_recorded else EagerBackend
            backends: list[Any] = [new_backend(), new_backend()]
            runner = case.build(GRAPH_SIZES, iter(backends).__next__, prefill_graphs)
            results[is_recorded, prefill_graphs] = [
                _replay_in_epoch(next(epochs), port, case, runner, backends, steps)
                for _ in range(num_epochs)
            ]
    return results


def _replay_in_epoch(
    epoch: int,
    port: int,
    case: RunnerCase,
    runner: RunnerSelection,
    backends: Sequence[Any],
    steps: list[RanksStep],
) -> Replayed:
    topology = case.forward_pass.place.topology
    groups: Any = join(port, topology, epoch)
    if not backends[0].outlives_group:
        groups = recorded(groups, backends)
    for member in case.members:
        member.join(groups)
    replayed = Replayed([], [], _capture(runner))
    for step in steps:
        batch = step.batch(case, topology.dp_rank)
        replayed.outcomes.append([x.numpy() for x in case.run(runner, batch)])
        of_graph = runner._prefill if step.has_extend else runner._decode
        replayed.counts.append({} if step.graph_size is None else _counts(of_graph))
    for member in case.members:
        member.leave()
    groups.close()
    return replayed


def _capture(runner: RunnerSelection) -> list[dict[str, list[int]]]:
    """Captures, and looks at each graph runner's counts before the next one overwrites them."""
    seen: list[dict[str, list[int]]] = []
    graph_runners: list[Any] = [runner._decode, runner._prefill]
    for graph_runner in graph_runners:

        def capture(graph_runner: Any = graph_runner) -> None:
            type(graph_runner).capture(graph_runner)
            seen.append(_counts(graph_runner))

        graph_runner.capture = capture
    captured(runner)
    for graph_runner in graph_runners:
        del graph_runner.capture
    return seen


def _counts(runner: Any) -> dict[str, list[int]]:
    return {name: runner.graphs.registry.get_slot(name).allocated().tolist() for name in COUNTS}


class RecordedGroup:
    """A group whose collectives each of the backends records, as a GPU does NCCL's."""

    def __init__(self, group: RankGroup, backends: Sequence[RecordingBackend]) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        for name in ("all_gather", "all_gather_rows", "all_to_all", "reduce_scatter"):
            setattr(self, name, self._as_kernel(getattr(group, name), backends))
        self._group = group
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self._group.close()

    def _as_kernel(
        self, launch: Callable[..., None], backends: Sequence[RecordingBackend]
    ) -> Callable[..., None]:
        def checked(*tensors: torch.Tensor) -> None:
            # A group might still answer, if all ranks call the closed one alike.
            assert not self._is_closed, "a graph of an earlier group is replayed"
            launch(*tensors)

        kernel: Callable[..., None] = checked
        for backend in backends:
            kernel = backend.kernel(kernel)
        return kernel


def recorded(groups: Any, backends: Sequence[RecordingBackend]) -> Any:
    """Returns groups whose collectives each of the backends records."""
    world, attn_tp = (x and RecordedGroup(x, backends) for x in (groups.world, groups.attn_tp))
    return replace(groups, world=world, attn_tp=attn_tp)
