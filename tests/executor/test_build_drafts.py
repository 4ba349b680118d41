"""Memory of an executor with a draft model: what is loaded when, and what a KV block takes."""

from typing import Any

import pytest

from executor import build, build_drafts
from executor.build import build_worker
from executor.config import ExecutorConfig
from executor.kv_pool import KVPool
from tests.executor.speculative_cell import DRAFTS, MODEL

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
    load, new_pool = build_drafts.load_draft_model, build.KVPool

    def load_draft_model(*args: Any, **named: Any) -> Any:
        made.append("draft model")
        return load(*args, **named)

    def kv_pool(*args: Any, **named: Any) -> KVPool:
        made.append("KV pool")
        return new_pool(*args, **named)

    monkeypatch.setattr(build_drafts, "load_draft_model", load_draft_model)
    monkeypatch.setattr(build, "KVPool", kv_pool)
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
    kept = [*pool.key_cache, *pool.value_cache, speculation.speculator._state._block_carries]
    runner: Any = speculation.speculator._extender
    if runner is not None:
        passes = runner._passes if name == "mtp3" else [runner._pass]
        kept += [*passes[0].kv_pool.key_cache, *passes[0].kv_pool.value_cache]
    taken = sum(tensor.numel() * tensor.itemsize for tensor in kept)
    assert num_bytes - taken // pool.num_blocks < taken <= num_bytes
