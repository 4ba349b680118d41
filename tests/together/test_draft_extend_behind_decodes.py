"""If these fail, decodes that do not draft pay for a draft model that is launched kernel by kernel,
or some ranks replay what others run."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.parallel.layout import DpLayout
from executor.speculative.draft_batch import ExtendBatch
from tests.together.speculation.speculative_cell import (
    Cell,
    Router,
    cell_of,
    demo_prompts,
    settings_of,
    speculator_of,
    state_of,
)

PROMPT, OTHER = demo_prompts(21, 2, 20)
NUM_STEPS = 6
GROUPS: list[dict[str, Any]] = [{}, {"dp_size": 2}, {"attn_tp_size": 2}]

# What draft-extend is given: rows of a graph on each DP rank, and of each sequence.
Given = tuple[int | None, int | None]


def note_extends(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> list[list[Given]]:
    """Returns, for each executor, a list that its draft-extends are noted in."""
    noted: list[list[Given]] = []
    for worker in cell.workers:
        extender: Any = speculator_of(worker)._extender
        given: list[Given] = []

        def extend(batch: ExtendBatch, inner: Any = extender.extend, given: Any = given) -> Any:
            given.append((batch.layout.graph_size, batch.width))
            return inner(batch)

        monkeypatch.setattr(extender, "extend", extend)
        noted.append(given)
    return noted


def run_plainly(cell: Cell, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Runs steps of sequences that are too short to draft. Returns a row of each."""
    router = Router(cell)
    requests = [router.submit(p, NUM_STEPS + 2, min_tokens=NUM_STEPS + 1) for p in prompts]
    for _ in range(NUM_STEPS):
        router.plan()
        router.commit()
    assert router.widths == [0] * NUM_STEPS
    return [request.sequences[0].row for request in requests]


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize(("name", "topk"), [("eagle", 2), ("mtp", 1), ("mtp3", 1)])
def test_behind_a_graph_of_decodes_draft_extend_is_a_graph_on_every_rank(
    name: str, topk: int, group: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """With two DP ranks, one of them is idle all the time."""
    sizes = {"decode_graph_sizes": (2, 8)}
    width = 3 if name == "mtp3" else 1
    with cell_of(**sizes, **group, **settings_of(name, topk)) as cell:
        noted = note_extends(cell, monkeypatch)
        [row] = run_plainly(cell, [PROMPT])
        replayed = state_of(cell, row)
    assert noted == [[(None, None)] + (NUM_STEPS - 1) * [(2 * width, width)]] * len(noted)
    with cell_of(decode_graphs="off", **group, **settings_of(name, topk)) as cell:
        noted = note_extends(cell, monkeypatch)
        run_plainly(cell, [PROMPT])
        eager = state_of(cell, row)
    assert noted == [[(None, None)] * NUM_STEPS] * len(noted)
    torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-4)


def test_a_step_that_runs_a_prompt_as_well_has_no_graph_of_decodes_behind_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """Also where a rank has nothing but decodes, or nothing at all."""
    with cell_of(dp_size=2, **settings_of("mtp", 1)) as cell:
        noted = note_extends(cell, monkeypatch)
        router = Router(cell)
        for prompt in (PROMPT, OTHER):
            router.submit(prompt, 9, min_tokens=8)
            router.plan()
            router.commit()
        assert router.widths == [0, 0]
        assert noted == [[(None, None)] * 2] * 2
        router.plan()
        assert noted[0][-1] == noted[1][-1] == (4, 1)


def test_more_decodes_than_the_largest_graph_holds_run_eagerly(monkeypatch: pytest.MonkeyPatch):
    with cell_of(decode_graph_sizes=(1,), **settings_of("mtp", 1)) as cell:
        noted = note_extends(cell, monkeypatch)
        run_plainly(cell, [PROMPT, OTHER])
    assert noted == [[(None, None)] * NUM_STEPS]


def test_behind_a_graph_of_a_prompt_draft_extend_runs_eagerly(monkeypatch: pytest.MonkeyPatch):
    """Of a chunk that is not the last, the draft runs as many rows as the target, as of decodes."""
    sizes = {"max_num_batched_tokens": 16, "prefill_graph_sizes": (16,)}
    with cell_of(prefill_graphs="breakable", **sizes, **settings_of("mtp", 1)) as cell:
        noted = note_extends(cell, monkeypatch)
        router = Router(cell)
        router.submit((PROMPT * 2)[:40], 4)
        plan = router.plan()
        assert plan is not None
        assert plan.agreement.graph_size == 16
        assert plan.agreement.global_num_tokens_for_draft == plan.agreement.global_num_tokens
        router.commit()
    assert noted == [[(None, None)]]


def test_behind_a_decode_that_brings_its_token_draft_extend_runs_eagerly() -> None:
    """The draft model has not run that token, and so has a row more than the graph."""
    with cell_of(**settings_of("mtp", 1)) as cell:
        [worker] = cell.workers
        speculator: Any = speculator_of(worker)
        layout = DpLayout.single(2, graph_size=4)
        found = []
        for draft_counts in ((2,), (3,)):
            columns = SimpleNamespace(layout=layout, draft_counts=draft_counts, num_sampled=(2,))
            behind = speculator._plain_layout(columns)
            found.append((behind.graph_size, behind.global_num_tokens_cpu))
    assert found == [(4, (2,)), (None, (3,))]
