"""Executor of the draft runners' tests. Imports no Transformers: processes start here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from executor.graph.backend import EagerBackend
from executor.parallel.layout import DpPaddingMode
from executor.speculative.draft_batch import DraftBatch, ExtendBatch
from tests.executor.support.drafts.draft_cases import DraftCase, Way, captured
from tests.executor.support.ranks.ranks import join, topology_of
from tests.executor.support.ranks.runner_ranks import recorded
from tests.executor.support.recording.recording_backend import RecordingBackend, known_world

SIZES = (2, 4)


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A step of two DP ranks.

    Attributes:
        num_requests: Sequences of each.
        graph_requests: Sequences of the graph that both replay; None runs eagerly.
        padding_mode: How their rows are gathered.
    """

    num_requests: tuple[int, int]
    graph_requests: int | None
    padding_mode: DpPaddingMode = DpPaddingMode.MAX_LEN

    def batch(self, case: DraftCase, dp_rank: int) -> DraftBatch | ExtendBatch:
        """Returns a DP rank's part of it, for an executor of it or for one that has no peers."""
        is_alone = case.topology.world_size == 1
        return case.batch(
            np.random.default_rng(dp_rank),
            self.num_requests[dp_rank] if is_alone else self.num_requests,
            None if is_alone else self.graph_requests,
            self.padding_mode,
        )


@known_world()
def draft_on_ranks(
    rank: int,
    port: int,
    paths: Mapping[str, str],
    attn_tp_size: int,
    ways: Sequence[Way],
    steps: Sequence[DraftStep],
) -> dict[tuple[str, bool], list[Any]]:
    """Runs steps in each way, on each backend.

    Args:
        rank: World rank.
        port: Of the ranks' store.
        paths: Checkpoints: the target's ("float32"), and each draft's.
        attn_tp_size: Executors of each of the two DP ranks.
        ways: To draft.
        steps: To run.

    Returns:
        What ``DraftCase.run`` returns of each step, as arrays, by way and by whether graphs are
        recorded.
    """
    topology = topology_of(rank, 2, attn_tp_size)
    results = {}
    for epoch, (way, is_recorded) in enumerate((w, r) for w in ways for r in (False, True)):
        groups = join(port, topology, epoch)
        case = DraftCase(
            Path(paths["float32"]),
            Path(paths[way.draft]),
            way,
            is_capturable=is_recorded,
            topology=topology,
        )
        results[str(way), is_recorded] = _run(case, groups, steps)
        groups.close()
    return results


def _run(case: DraftCase, groups: Any, steps: Sequence[DraftStep]) -> list[Any]:
    backends: list[Any] = [EagerBackend() for _ in case.way.widths]
    if case.is_capturable:
        backends = [RecordingBackend() for _ in case.way.widths]
        groups = recorded(groups, backends)
    for member in case.target.members:
        member.join(groups)
    runner = captured(case.build(SIZES, iter(backends).__next__))
    batches = [step.batch(case, case.topology.dp_rank) for step in steps]
    results = [[x.numpy() for x in case.run(runner, batch)] for batch in batches]
    for member in case.target.members:
        member.leave()
    return results
