"""Memory of an executor with a draft model: what is loaded when, and what a KV block takes."""

from typing import Any

import pytest

from executor.batch.kv_pool import KVPool
from executor.build import executor as build_executor
from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from tests.support.paths import DEMO_DRAFTS as DRAFTS
from tests.support.paths import DEMO_MODEL as MODEL

SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "dtype": "float32",
    "device": "cpu",
    "block_size": 4,
    "max_num_seqs": 2,
    "max_model_len": 32,
    "max_num_batched_tokens": 32,
    "decode_graphs": "off",
    "prefill_graphs": "off",
}


def test_the_draft_model_is_loaded_before_the_kv_pool_takes_what_memory_is_left(
    monkeypatch: pytest.MonkeyPatch,
):
    made: list[str] = []
    load, allocate = build_executor.load_draft_model, KVPool.allocate

    def load_draft_model(*args: Any, **named: Any) -> Any:
        made.append("draft model")
        return load(*args, **named)

    def take(pool: KVPool, num_blocks: int) -> None:
        made.append("KV pool")
        allocate(pool, num_blocks)

    monkeypatch.setattr(build_executor, "load_draft_model", load_draft_model)
    monkeypatch.setattr(KVPool, "allocate", take)
    build_worker(ExecutorConfig(draft_model=DRAFTS / "mtp", num_kv_blocks=20, **SETTINGS))
    assert made == ["draft model", "KV pool"]


@pytest.mark.parametrize("name", ["eagle", "mtp", "mtp3", "frozen_kv"])
def test_all_that_is_kept_for_each_block_fits_in_the_memory_for_kv(name: str):
    num_bytes = 1 << 20
    worker, _ = build_worker(
        ExecutorConfig(draft_model=DRAFTS / name, kv_cache_bytes=num_bytes, **SETTINGS)
    )
    speculation, pool = worker._speculation, worker._kv_pool
    assert speculation is not None
    kept = [*pool.tensors, speculation.speculator._state._block_carries]
    runner: Any = speculation.speculator._extender
    if runner is not None:
        passes = runner._passes if name == "mtp3" else [runner._pass]
        kept += passes[0].kv_pool.tensors
    taken = sum(tensor.numel() * tensor.itemsize for tensor in kept)
    assert num_bytes - taken // pool.num_physical_blocks < taken <= num_bytes


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"draft_model": DRAFTS / "mtp"}, 2),  # drafts of 3 and the next one's entry: 4 slots
        ({"draft_model": DRAFTS / "mtp", "block_size": 2}, 4),
        ({"draft_model": DRAFTS / "mtp", "max_num_seqs": 7}, 7),
        ({"draft_model": DRAFTS / "mtp3"}, 4),
        ({"draft_model": DRAFTS / "frozen_kv", "draft_topk": 4}, 6),  # 12 slots
        ({}, 0),
    ],
)
def test_a_pool_has_spill_blocks_for_each_row_beside_those_that_the_router_is_told_of(
    settings: dict[str, Any], count: int
):
    config = ExecutorConfig(num_kv_blocks=20, **SETTINGS | settings)
    worker, description = build_worker(config)
    pool = worker._kv_pool
    assert description.num_kv_blocks == pool.num_blocks == 20
    assert pool.num_spill_blocks == count
    assert len(pool.caches[0][0]) == (20 + count) * config.block_size
    assert worker._limits.num_kv_blocks == 20


@pytest.mark.parametrize("name", ["mtp3", "frozen_kv", None])
def test_memory_that_holds_one_block_too_few_is_refused_with_what_is_needed(name: str | None):
    drafts = {} if name is None else {"draft_model": DRAFTS / name, "max_num_seqs": 5}

    def build_with(num_bytes: int) -> KVPool:
        worker, _ = build_worker(ExecutorConfig(kv_cache_bytes=num_bytes, **SETTINGS | drafts))
        return worker._kv_pool

    with pytest.raises(ValueError, match="kv_cache_bytes=1: a block takes ") as refused:
        build_with(1)
    needed = int(str(refused.value).split()[-2])
    assert str(refused.value).endswith(f" {needed} bytes")
    pool = build_with(needed)
    assert pool.num_blocks == 2
    spilled = f", and {pool.num_spill_blocks} for drafts behind sequences' blocks, "
    assert (spilled in str(refused.value)) == (name is not None)
    with pytest.raises(ValueError, match=f"kv_cache_bytes={needed - 1}: .*, {needed} bytes"):
        build_with(needed - 1)
