"""Groups of executors on fake GPUs, over NCCL that returns nothing and has no peers."""

from pathlib import Path
from typing import Any

import pytest

from tests.together.cuda.support.fake_cell import FakeCell
from tests.together.cuda.support.fake_gpu import FakeGpu
from tests.together.cuda.support.requests import ASKS, PLANNING, SMALL
from tests.together.speculation.speculative_cell import Router, serve

GROUPS: dict[str, dict[str, Any]] = {
    "dp2": {"dp_size": 2},
    "tp2": {"attn_tp_size": 2},
    "dp2 flashinfer": {"dp_size": 2, "moe_a2a": "flashinfer", "quantized_dispatch": "off"},
    "dp2 mxfp8": {"dp_size": 2, "moe_a2a": "flashinfer", "quantized_dispatch": "mxfp8"},
    "dp2 ep1": {"dp_size": 2, "ep_size": 1},
    "dp3": {"dp_size": 3},  # of 8 experts
    "dp3 flashinfer": {"dp_size": 3, "moe_a2a": "flashinfer", "quantized_dispatch": "off"},
    "dp2 torch": {"dp_size": 2, "moe_a2a": "torch", "decode_graphs": "off"},
}
COUNTING = "TorchAllToAllDispatcher.dispatch"  # of rows, which is why no graph may have it


@pytest.mark.parametrize("settings", GROUPS.values(), ids=GROUPS)
def test_ranks_make_the_same_collectives_and_wait_for_their_tokens_only(
    settings: dict[str, Any], gpu: FakeGpu, two_layers: Path
) -> None:
    cell = FakeCell(gpu, model=two_layers, **SMALL | settings)
    loaded = list(gpu.modules)
    router = Router(cell)
    assert gpu.num_meetings == len(gpu.graphs), "before each warm-up run"
    serve(router, ASKS)
    assert gpu.modules == loaded, "a peer would wait for what is loaded or built this late"
    sent = {None: set(), "off": {2 * 128 + 16}, "mxfp8": {128 + 128 // 32 + 16}}
    assert gpu.row_bytes == sent[settings.get("quantized_dispatch")], (
        "of a row, its ids and weights"
    )
    first, *others = cell.steps
    counts_rows = settings.get("moe_a2a") == "torch"
    assert any(COUNTING in step.waits for step in first) == counts_rows
    for one, other in (pair for second in others for pair in zip(first, second, strict=True)):
        assert one.collectives == other.collectives
        allowed = {PLANNING, COUNTING} if counts_rows else {PLANNING}
        assert {*one.waits, *other.waits} <= allowed
        assert {*one.read_waits, *other.read_waits} <= {"ReadBack.wait"}
