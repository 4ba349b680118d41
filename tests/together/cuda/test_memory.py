"""Memory of an executor on a fake GPU: what the table says, and what the KV pool leaves."""

import json
from pathlib import Path

import pytest

from executor.build.executor import build_worker
from executor.build.memory import CUDA_KV_SHARE
from executor.config import ExecutorConfig
from tests.support.paths import DEMO_MODEL
from tests.together.cuda.support.fake_flashinfer import MOE_BYTES
from tests.together.cuda.support.fake_gpu import FakeGpu

SIZES = {  # of Qwen3-235B-A22B; all else of its configuration is the demo model's
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


def test_of_64_executors_each_leaves_64_mib_to_the_all_to_all_of_a_235b_model(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    """It had 4 GiB, for prompts that it never carries, and the KV pool left nothing for it."""
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(demo | SIZES))
    kv_bytes, told = [], {}
    for moe_a2a in ("none", "flashinfer"):
        settings = {"moe_a2a": moe_a2a, "moe_runner": "cutlass"}
        config = ExecutorConfig(model=tmp_path, dtype="bfloat16", dp_size=64, **settings)
        worker, description = build_worker(config)
        pool = worker._kv_pool
        kv_bytes.append(pool.num_physical_blocks * pool.all_bytes_per_block)
        told = {line.what: line for line in description.budget.lines}
    workspace = told["all-to-all workspace, tokens of an EP rank"]
    assert (workspace.tokens, workspace.bytes) == (64, 67_383_424)
    block_bytes = pool.all_bytes_per_block
    left = CUDA_KV_SHARE * workspace.bytes
    assert kv_bytes[0] - kv_bytes[1] == pytest.approx(left, abs=block_bytes)
    assert told["scratch of experts, for the rows of a pass"].bytes == MOE_BYTES
