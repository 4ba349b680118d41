"""The CUDA path on a fake GPU: whatever would crash, wait or read rubbish on the first real one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import DEMO_DRAFTS, DEMO_MODEL
from tests.together.cuda.support.fake_cell import FakeCell
from tests.together.cuda.support.fake_gpu import FakeGpu
from tests.together.cuda.support.requests import ASKS, PENALISED, SAMPLED, SMALL
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
def test_a_step_waits_for_its_own_tokens_and_for_nothing_else(
    settings: dict[str, Any], gpu: FakeGpu, two_layers: Path
) -> None:
    model = DEMO_MODEL if "draft_model" in settings else two_layers
    cell = FakeCell(gpu, model=model, **SMALL | settings)
    serve(Router(cell), [replace(ASKS[0], sampling=SAMPLED), *ASKS[1:]])
    [steps] = cell.steps
    for step in steps:
        assert step.waits == ["ReadBack.wait"], step.launched


def test_scored_tokens_come_in_one_copy(gpu: FakeGpu, two_layers: Path) -> None:
    cell = FakeCell(gpu, model=two_layers, **SMALL)
    asks = [
        replace(ASKS[0], logprobs=True, prompt_logprobs=True, sampling=PENALISED),
        replace(ASKS[1], sampling=PENALISED),
    ]
    serve(Router(cell), asks)
    [steps] = cell.steps
    waits = {tuple(step.waits) for step in steps}
    assert waits == {("ReadBack.wait",), ("ReadBack.wait", "score")}
