"""Executor of the feature tests. Imports no Transformers: processes start here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.graph.backend import EagerBackend
from tests.executor.support.ranks.ranks import join, topology_of
from tests.executor.support.ranks.runner_ranks import GRAPH_SIZES, RanksStep
from tests.executor.support.runner_cases import PREFILL_GRAPHS, RunnerCase, captured


def features_on_ranks(
    rank: int,
    port: int,
    path: Path,
    attn_tp_size: int,
    aux_layers: Sequence[int],
    steps: Sequence[RanksStep],
) -> dict[str, list[Any]]:
    """Runs steps on executors of two DP ranks.

    Args:
        rank: World rank.
        port: Of the ranks' store.
        path: Checkpoint.
        attn_tp_size: Executors of each DP rank.
        aux_layers: Of the case.
        steps: To run.

    Returns:
        By kind of prefill runner, the features of this DP rank's rows after each step, as arrays.
    """
    topology = topology_of(rank, 2, attn_tp_size)
    case = RunnerCase(path, topology=topology, aux_layers=aux_layers)
    groups = join(port, topology)
    for member in case.members:
        member.join(groups)
    features = {}
    for prefill_graphs in PREFILL_GRAPHS:
        runner = captured(case.build(GRAPH_SIZES, EagerBackend, prefill_graphs))
        features[prefill_graphs] = [
            case.run(runner, step.batch(case, topology.dp_rank))[-1].numpy() for step in steps
        ]
    groups.close()
    return features
