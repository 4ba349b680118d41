"""Executors as a GPU has them, with FlashInfer's kernels for experts and its all-to-all, end to end.

``build_worker`` makes all of it; the library is the stand-in that computes on the CPU, and one tensor
takes the place of the memory that GPUs share. What a setting or a budget hands to a kernel is
thereby seen by one: with a wrong size it fails, or gives other tokens than one plain executor.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from executor.build import executor as build
from executor.build.devices import Cuda
from executor.config import ExecutorConfig
from executor.graph.backend import EagerBackend, RunnerBackend
from executor.model.flashinfer import bootstrap
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.model.moe.dispatch_all_gather import AllGatherDispatcher
from executor.model.sampling.fixed_shape import FlashInferFilters
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer, real_flashinfer
from tests.support.paths import DEMO_DRAFTS
from tests.together.speculation.speculative_cell import Ask, Router, cell_of, demo_prompts, serve

SMALL: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "num_kv_blocks": 4 * 18 + 1,
    "decode_graph_sizes": (2, 4),
}
ASKS = [Ask(prompt=prompt, max_tokens=7) for prompt in demo_prompts(5, 6)]


class CpuCuda(Cuda):
    """A GPU's device whose tensors are on the CPU and whose graphs are called."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.torch_device = torch.device("cpu")
        self._config = config
        self.ops = FlashInferOps(enable_pdl=False)
        self._workspace = AttentionWorkspace("cpu")
        self.filters = FlashInferFilters(self.ops)

    def new_backend(self) -> RunnerBackend:
        return EagerBackend()


@pytest.fixture
def library(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CpuFlashInfer]:
    """The stand-in, with shared memory among this process's executors."""
    shared: dict[int, torch.Tensor] = {}

    def join(self: bootstrap.MnnvlWorkspace, group: bootstrap.GroupCommunicator) -> bool:
        if group.Get_rank() == 0 and not shared:
            shared[0] = torch.zeros(group.Get_size(), self.bytes_per_rank, dtype=torch.uint8)
        group.barrier()
        has_moved, self.tensor = self.tensor is not shared[0], shared[0]
        return has_moved

    monkeypatch.setattr(bootstrap.MnnvlWorkspace, "join", join)
    monkeypatch.setattr(build, "open_device", lambda config, dtype: CpuCuda(config))
    library = CpuFlashInfer(real_flashinfer(tmp_path_factory))
    with library.installed():
        yield library


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What one executor answers, on the CPU's own kernels and without drafts."""
    answers = {}
    for dtype in ("float32", "bfloat16"):
        with cell_of(**SMALL, dtype=dtype) as cell:
            answers[dtype] = serve(Router(cell), ASKS)
    return answers


def handed(library: CpuFlashInfer) -> dict[str, set[int]]:
    """Returns the largest pass that each kernel was told of, and the largest that came."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for name, call in library.calls:
        if name == "cutlass_fused_moe_workspace_size":
            sizes["cutlass"].add(call["max_num_tokens"])
        elif name == "moe_a2a_initialize":
            sizes["a2a"].add(call["max_num_tokens"])
        elif name == "moe_a2a_dispatch":
            sizes["sent"].add(call["runtime_max_tokens_per_rank"])
        elif name in ("cutlass_fused_moe", "cutedsl.run"):
            sizes["rows"].add(len(call["input" if name == "cutlass_fused_moe" else "x"]))
    return sizes


WIDTH = 4  # of a sequence of "mtp" in verify: three drafts and its last token
MTP = {"moe_runner": "cutlass", "draft_model": DEMO_DRAFTS / "mtp"}
ALL = {"moe_a2a_extend": "all-to-all"}
GRID = {"dp_size": 2, "attn_tp_size": 2}
DSL = {"moe_runner": "cutedsl", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("settings", "cap", "rows"),
    [
        ({"moe_runner": "cutlass", "dp_size": 2}, 4, 2 * 32),
        ({"moe_runner": "cutlass", "dp_size": 3}, 4, 3 * 32),  # of 8 experts
        ({**DSL, "dp_size": 3}, 4, 3 * 32),
        ({"moe_runner": "cutlass", "attn_tp_size": 2}, 2, 32),
        ({"moe_runner": "cutlass", **GRID}, 2, 2 * 32),
        ({"moe_runner": "cutlass", "dp_size": 2, "quantized_dispatch": "mxfp8"}, 4, 2 * 32),
        ({"moe_runner": "cutlass", "dp_size": 2, "quantized_dispatch": "nvfp4"}, 4, 2 * 32),
        ({**DSL, "dp_size": 2}, 4, 2 * 32),
        ({**DSL, "attn_tp_size": 2}, 2, 32),
        ({**MTP, "dp_size": 2}, 4 * WIDTH, 2 * (32 + 4)),
        ({**MTP, "attn_tp_size": 2}, 2 * WIDTH, 32 + 4),
        ({"moe_runner": "cutlass", "dp_size": 2, "max_dispatch_tokens_per_rank": 50}, 50, 2 * 50),
        ({**MTP, "dp_size": 2, **ALL}, 4096, 2 * 4096),
        ({**ALL, **GRID, "moe_runner": "grouped", "max_dispatch_tokens_per_rank": 16}, 16, None),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_tokens_are_those_of_one_plain_executor(
    settings: dict[str, Any],
    cap: int,
    rows: int | None,
    library: CpuFlashInfer,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    gathers: list[bool] = []
    gather = AllGatherDispatcher.dispatch

    def dispatch(self: AllGatherDispatcher, *args: Any) -> Any:
        gathers.append(args[-1].has_extend)
        return gather(self, *args)

    monkeypatch.setattr(AllGatherDispatcher, "dispatch", dispatch)
    with cell_of(**SMALL | {"moe_a2a": "flashinfer"} | settings) as cell:
        assert serve(Router(cell), ASKS) == expected[settings.get("dtype", "float32")]
    sizes = handed(library)
    assert sizes["a2a"] == {cap}
    assert max(sizes["sent"]) <= cap
    assert sizes["cutlass"] == ({rows} if settings["moe_runner"] == "cutlass" else set())
    assert rows is None or max(sizes["rows"]) <= rows
    by_gather = settings.get("moe_a2a_extend") != "all-to-all"
    assert set(gathers) == ({True} if by_gather else set()), "which steps go by all-gather"
