"""If this fails, a draft's graph on a GPU attends as the batch did that it was captured with.

Graphs are whole here, as there: attention is captured, and what it reads must be refreshed in place.
"""

from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from tests.executor.support.drafts.draft_cases import FILE_OF, DraftCase, Way, captured, registry_of
from tests.executor.support.drafts.draft_checkpoints import save_draft
from tests.executor.support.flashinfer.attention import flashinfer_attention
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer
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


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_whole_graph_drafts_as_the_torch_backend_does(
    library: CpuFlashInfer, target: Path, tmp_path: Path, way: Way
):
    save_draft(tmp_path, FILE_OF[way.draft])
    case = DraftCase(target, tmp_path, way, is_capturable=True, new_attention=flashinfer_attention)
    backends = [RecordingBackend() for _ in way.widths]
    library.launch = lambda kernel: reduce(lambda inner, b: b.kernel(inner), backends, kernel)
    runner = captured(case.build(SIZES, iter(backends).__next__))
    registry_of(runner, way).poison_tails()
    rng = np.random.default_rng(0)
    for size in (4, 1, 2, 4):
        batch = case.batch(rng, int(rng.integers(size // 2 + 1, size + 1)), size)
        assert_close(case.run(runner, batch), case.run_eagerly(batch), 1e-3)
