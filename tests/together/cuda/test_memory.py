"""Memory of an executor on a fake GPU: what the table says, and what the KV pool leaves."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from executor.batch.kv_pool import KVPool
from executor.build import executor as build
from executor.build.executor import build_worker
from executor.build.memory import CUDA_KV_SHARE
from executor.config import ExecutorConfig
from executor.model.flashinfer.cutedsl import scratch_rows
from protos.executor.v1.executor_pb2 import BudgetLine
from tests.executor.support.recording.peak_memory import PeakMemory
from tests.together.cuda.support.fake_flashinfer import MOE_BYTES
from tests.together.cuda.support.fake_gpu import FakeGpu


def built(model: Path, moe_a2a: str = "none", **settings: Any) -> tuple[dict[str, BudgetLine], int]:
    """Returns one of 64 executors' table, and the bytes of its KV pool."""
    config = ExecutorConfig(model=model, dtype="bfloat16", dp_size=64, moe_a2a=moe_a2a, **settings)
    worker, description = build_worker(config)
    pool = worker._kv_pool
    num_bytes = pool.num_physical_blocks * pool.all_bytes_per_block
    return {line.what: line for line in description.budget.lines}, num_bytes


def test_of_64_executors_each_leaves_64_mib_to_the_all_to_all_of_a_235b_model(
    gpu: FakeGpu, large: Path
) -> None:
    """It had 4 GiB, for prompts that it never carries, and the KV pool left nothing for it."""
    _, without = built(large)
    told, num_bytes = built(large, "flashinfer")
    workspace = told["all-to-all workspace, tokens of an EP rank"]
    assert (workspace.tokens, workspace.bytes) == (64, 67_383_424)
    left = CUDA_KV_SHARE * workspace.bytes
    assert without - num_bytes == pytest.approx(left, abs=told["KV of a token"].bytes * 16)


def test_the_table_has_the_scratch_that_is_allocated_for_experts(
    gpu: FakeGpu, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen as the difference from experts without any, by what is alive before the KV pool is made."""
    alive, told = [], []
    new_kv_pool = build.new_kv_pool

    def watched(*args: Any) -> KVPool:
        alive.append(memory.alive)
        return new_kv_pool(*args)

    monkeypatch.setattr(build, "new_kv_pool", watched)
    library = import_module("flashinfer.fused_moe")
    monkeypatch.setattr(library, "CuteDslBf16MoEWrapper", lambda **_: None, raising=False)
    for runner in ("grouped", "grouped", "cutlass", "cutedsl"):  # the first one fills caches
        with PeakMemory() as memory:
            table, _ = built(large, moe_runner=runner)
        told.append(table["scratch of experts, for the rows of a pass"].bytes)
    assert told == [0, 0, MOE_BYTES, scratch_rows(64 * 2048, 8, 2) * 1536 * 2]
    numbers = 2 * 2 * 4  # of two experts in each of two layers, where products are grouped
    assert [num_bytes - alive[1] + numbers for num_bytes in alive[2:]] == told[2:]
