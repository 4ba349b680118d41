"""The CUDA path on a fake GPU: whatever would crash, wait or read rubbish on the first real one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import DEMO_DRAFTS, DEMO_MODEL
from tests.together.cuda.support.fake_cell import FakeCell
from tests.together.cuda.support.fake_gpu import FakeGpu
from tests.together.cuda.support.requests import ASKS, PENALISED, PLANNING, SAMPLED, SMALL
from tests.together.speculation.speculative_cell import Router, serve

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without graphs": {"decode_graphs": "off"},
    "grouped": {"moe_runner": "grouped"},
    "piecewise": {"prefill_graphs": "piecewise", "prefill_graph_sizes": (16,)},
    "breakable": {"prefill_graphs": "breakable", "prefill_graph_sizes": (16,)},
    "chain": {"draft_model": DEMO_DRAFTS / "eagle"},
    "tree": {"draft_model": DEMO_DRAFTS / "eagle", "draft_topk": 2},
    "tree without graphs": {
        "draft_model": DEMO_DRAFTS / "frozen_kv",
        "draft_topk": 2,
        "decode_graphs": "off",
    },
    "mtp": {"draft_model": DEMO_DRAFTS / "mtp"},
    "mtp3": {"draft_model": DEMO_DRAFTS / "mtp3", "draft_sampling": "rejection"},
    "frozen kv": {"draft_model": DEMO_DRAFTS / "frozen_kv"},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read_unless_it_drafted(
    settings: dict[str, Any], gpu: FakeGpu, two_layers: Path
) -> None:
    """A sequence's length follows from the drafts that were accepted, and planning wants to know it."""
    model = DEMO_MODEL if "draft_model" in settings else two_layers
    cell = FakeCell(gpu, model=model, **SMALL | settings)
    router = Router(cell)
    serve(router, [replace(ASKS[0], sampling=SAMPLED), *ASKS[1:]])
    [steps] = cell.steps
    assert any(step.is_ahead for step in steps)
    for step, drafted in zip(steps, [0, *router.widths], strict=False):
        expected = {"ReadBack.wait"} if drafted and step.is_ahead else set()
        assert {*step.waits} - {PLANNING} == expected, step.launched
        assert step.read_waits == ["ReadBack.wait"]


def test_scores_come_in_one_copy_that_the_next_step_does_not_wait_for(
    gpu: FakeGpu, two_layers: Path
) -> None:
    cell = FakeCell(gpu, model=two_layers, **SMALL)
    asks = [
        replace(ASKS[0], logprobs=True, prompt_logprobs=True, sampling=PENALISED),
        replace(ASKS[1], sampling=PENALISED),
    ]
    serve(Router(cell), asks)
    [steps] = cell.steps
    assert {wait for step in steps for wait in step.waits} <= {PLANNING}
    assert {len(step.read_waits) for step in steps} == {1, 2}
