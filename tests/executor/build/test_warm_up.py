"""If these fail, a group that grows waits for what a newcomer's first step has to set up."""

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.errors import PeerLost
from executor.runners.target import RunnerSelection

ELASTIC = {"min_dp_size": 1, "max_dp_size": 3}
SIZES = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 64}


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        (ELASTIC, [(ForwardMode.EXTEND, 64), (ForwardMode.DECODE, 8)]),
        (ELASTIC | {"max_dp_size": 1}, [(ForwardMode.EXTEND, 64), (ForwardMode.DECODE, 8)]),
        (ELASTIC | {"moe_a2a": "torch"}, [(ForwardMode.EXTEND, 64), (ForwardMode.DECODE, 8)]),
        (
            ELASTIC | {"attn_tp_size": 2, "moe_a2a": "torch", "moe_a2a_extend": "all-to-all"},
            [(ForwardMode.EXTEND, 64), (ForwardMode.DECODE, 8)],
        ),
        (
            ELASTIC | {"attn_tp_size": 2, "max_num_batched_tokens": 63},
            [(ForwardMode.EXTEND, 62), (ForwardMode.DECODE, 8)],
        ),
        (
            ELASTIC | {"attn_tp_size": 2, "max_num_batched_tokens": 1, "max_num_seqs": 1},
            [(ForwardMode.EXTEND, 2), (ForwardMode.DECODE, 2)],
        ),
        (ELASTIC | {"decode_graphs": "off"}, [(ForwardMode.EXTEND, 64)]),
        ({"dp_size": 3}, []),
        ({}, []),
    ],
    ids=str,
)
def test_an_elastic_executor_has_run_padding_before_it_joins(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    modes: list[tuple[ForwardMode, int]],
) -> None:
    ran, run = [], RunnerSelection.run

    def spy(runner: RunnerSelection, batch: ForwardBatch) -> torch.Tensor:
        logits = run(runner, batch)
        ran.append((batch.forward_mode, len(batch.input_ids)))
        return logits

    monkeypatch.setattr(RunnerSelection, "run", spy)
    config = ExecutorConfig(model=tiny_checkpoint, device="cpu", **(SIZES | settings))
    worker, _ = build_worker(config)
    assert ran == modes
    pool = worker._kv_pool
    for cache in pool.tensors:
        assert not cache[pool.block_size :].any()  # behind the scratch block
    assert not pool.row_num_blocks.any()
    if settings:
        with pytest.raises(PeerLost):
            _ = worker._members[0].group
