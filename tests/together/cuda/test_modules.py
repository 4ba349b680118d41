"""Compiled modules of FlashInfer's: those without which no server starts where there is no compiler."""

from pathlib import Path

from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from tests.gpu.support.modules import FEW_HEADS, MODULES, OF_ALL_TO_ALL
from tests.support.paths import DEMO_DRAFTS, DEMO_MODEL
from tests.together.cuda.support.fake_gpu import FakeGpu


def test_servers_load_the_modules_that_a_gpu_machine_is_searched_for(
    gpu: FakeGpu, large: Path
) -> None:
    """The archive had FA2 by another name, so that all decodes would have compiled, or failed."""
    build_worker(ExecutorConfig(model=large, dtype="bfloat16", dp_size=64, moe_a2a="flashinfer"))
    assert {*gpu.modules} == {*MODULES, *OF_ALL_TO_ALL}
    sizes = {"dtype": "bfloat16", "max_num_seqs": 2, "decode_graph_sizes": (2,)}
    settings = {"draft_model": DEMO_DRAFTS / "mtp", "draft_topk": 2, "kv_cache_bytes": 1 << 20}
    build_worker(ExecutorConfig(model=DEMO_MODEL, prefill_graphs="off", **sizes, **settings))
    assert {*gpu.modules} == {*MODULES, *OF_ALL_TO_ALL, *FEW_HEADS}
