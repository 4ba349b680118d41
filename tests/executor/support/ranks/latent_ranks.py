"""Executor of a model with latent attention. Imports no Transformers: processes start here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.budget.capture_sizes import GraphSizes
from executor.graph.backend import EagerBackend
from tests.executor.support.ranks.ranks import join, topology_of
from tests.executor.support.ranks.runner_ranks import RanksStep
from tests.executor.support.runner_cases import RunnerCase, captured

GRAPH_SIZES = GraphSizes((8,), (16,))


def serve_latents(
    rank: int,
    port: int,
    path: Path,
    shape: tuple[int, int],
    prefill_graphs: str,
    steps: Sequence[RanksStep],
) -> list[list[Any]]:
    """Runs steps with dense MLPs whole on each executor.

    Args:
        rank: World rank.
        port: Of the ranks' store.
        path: Checkpoint.
        shape: DP ranks, and executors of each.
        prefill_graphs: Kind of prefill runner.
        steps: To run.

    Returns:
        What ``RunnerCase.run`` returns of each step, as arrays.
    """
    topology = topology_of(rank, *shape)
    case = RunnerCase(path, topology=topology, moe_dense_tp_size=1)
    runner = case.build(GRAPH_SIZES, EagerBackend, prefill_graphs)
    groups = join(port, topology)
    for member in case.members:
        member.join(groups)
    captured(runner)
    outcomes = [case.run(runner, step.batch(case, topology.dp_rank)) for step in steps]
    for member in case.members:
        member.leave()
    groups.close()
    return [[x.numpy() for x in outcome] for outcome in outcomes]
