"""If this fails, a draft's graph on a GPU attends as the batch did that it was captured with.

Graphs are whole here, as there: attention is captured, and what it reads must be refreshed in place.
"""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from executor.graph.input_buffers import fresh_input_buffer_pool
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from tests.executor.support.drafts.draft_cases import FILE_OF, DraftCase, Way, captured, registry_of
from tests.executor.support.drafts.draft_checkpoints import save_draft
from tests.executor.support.flashinfer.cpu_flashinfer import (
    WORKSPACE,
    CpuFlashInfer,
    real_flashinfer,
)
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.runner_cases import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZES = (1, 2, 4)
WAYS = [
    Way("draft", "eagle"),
    Way("draft", "eagle", 2),
    Way("draft", "moe", 4, num_draft_tokens=37),
    Way("extend", "moe", 2),
    Way("extend", "moe", 2, is_plain=True),
    Way("multi_layer", "multi_layer", is_drawn=True),
    Way("multi_layer", "multi_layer", is_drawn=True, is_plain=True),
    Way("frozen_kv", "frozen_kv"),
    Way("frozen_kv", "frozen_kv", 4),
]


@pytest.fixture
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuFlashInfer]:
    library = CpuFlashInfer(real_flashinfer(tmp_path_factory))
    with library.installed(), fresh_input_buffer_pool():
        yield library


def new_attention(case: DraftCase) -> FlashInferAttention:
    way = case.way
    ops = FlashInferOps(enable_pdl=True)
    workspace = AttentionWorkspace(case.pool.device, WORKSPACE[0])
    attention = FlashInferAttention(ops, case.pool, case.num_heads, workspace, max_num_tokens=64)
    if way.runner == "frozen_kv":
        attention.init_cuda_graph_state([size * way.topk for size in SIZES], 1)
    else:
        has_tree = way.runner == "draft" and way.topk > 1
        for width in way.widths:
            attention.init_cuda_graph_state(SIZES, width, has_tree=has_tree)
    return attention


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_whole_graph_drafts_as_the_torch_backend_does(
    library: CpuFlashInfer, target: Path, tmp_path: Path, way: Way
):
    save_draft(tmp_path, FILE_OF[way.draft])
    case = DraftCase(target, tmp_path, way, is_capturable=True, new_attention=new_attention)
    backends = [RecordingBackend() for _ in way.widths]
    library.launch = lambda kernel: reduce(lambda inner, b: b.kernel(inner), backends, kernel)
    runner = captured(case.build(SIZES, iter(backends).__next__))
    registry_of(runner, way).poison_tails()
    rng = np.random.default_rng(0)
    for size in (4, 1, 2, 4):
        batch = case.batch(rng, int(rng.integers(size // 2 + 1, size + 1)), size)
        assert_close(case.run(runner, batch), case.run_eagerly(batch), 1e-3)
