"""If this fails, executors that share a draft hang, or draft other tokens than one alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.parallel.layout import DpPaddingMode, Topology
from tests.executor.support.drafts.draft_checkpoints import HIDDEN, KINDS, VOCAB, save_draft
from tests.executor.support.drafts.drafting import DraftRank, entries_of
from tests.executor.support.ranks.draft_ranks import (
    Answer,
    Drafting,
    draft_on_ranks,
    run_passes,
)
from tests.executor.support.ranks.ranks import run_ranks

TOLERANCE = 1e-5
SIZES = [(2, 1), (1, 2), (2, 2)]  # DP ranks, and executors of each
MODES = [mode.name for mode in DpPaddingMode]

# Entries of each row in each pass, by DP rank. Each of both is idle in some pass.
_COUNTS: list[list[dict[int, int]]] = [
    [{0: 5}, {}],
    [{0: 1, 3: 4}, {1: 7}],
    [{0: 1, 3: 1}, {1: 1}],
    [{}, {1: 4}],
]
_PROMPTS = [{0: [5, 17, 33, 2, 90], 3: [8, 60]}, {1: [4, 41, 7, 13, 9, 22, 77]}]


def drafting(dp_size: int) -> Drafting:
    steps = [
        [entries_of(10 * i + r, counts[r], VOCAB, HIDDEN) for r in range(dp_size)]
        for i, counts in enumerate(_COUNTS)
    ]
    return Drafting(_PROMPTS[:dp_size], steps)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, path in paths.items():
        save_draft(path, kind)
    return paths


@pytest.fixture(scope="module")
def alone(target: Path, drafts: Mapping[str, Path]) -> dict[str, list[Answer]]:
    """Of each DP rank, what an executor answers that has no peers."""
    return {
        kind: [
            run_passes(DraftRank(target, path), Topology(), DpPaddingMode.MAX_LEN, _own(rank))
            for rank in range(2)
        ]
        for kind, path in drafts.items()
    }


def _own(dp_rank: int) -> Drafting:
    both = drafting(2)
    return Drafting([both.prompts[dp_rank]], [[step[dp_rank]] for step in both.steps])


@pytest.fixture(scope="module", params=SIZES, ids=lambda sizes: f"dp_{sizes[0]}-tp_{sizes[1]}")
def served(
    request: pytest.FixtureRequest, target: Path, drafts: Mapping[str, Path]
) -> tuple[tuple[int, int], list[Any]]:
    sizes: tuple[int, int] = request.param
    return sizes, run_ranks(
        draft_on_ranks, sizes[0] * sizes[1], target, drafts, sizes, drafting(sizes[0])
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_executors_together_draft_what_one_drafts_alone(
    served: tuple[tuple[int, int], list[Any]], alone: dict[str, list[Answer]], kind: str, mode: str
):
    (_, attn_tp_size), answers = served
    for world_rank, answer in enumerate(answers):
        expected = alone[kind][world_rank // attn_tp_size]
        peer = answers[world_rank - world_rank % attn_tp_size][kind, mode]
        assert len(answer[kind, mode]) == len(expected)
        for ours, theirs, of_peer in zip(answer[kind, mode], expected, peer, strict=True):
            assert ours.keys() == theirs.keys()
            for row, (hidden, logits) in theirs.items():
                np.testing.assert_allclose(ours[row][0], hidden, rtol=0, atol=TOLERANCE)
                np.testing.assert_allclose(ours[row][1], logits, rtol=0, atol=TOLERANCE)
                for own, peers in zip(ours[row], of_peer[row], strict=True):
                    assert own.tobytes() == peers.tobytes()
