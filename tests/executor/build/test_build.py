"""Described graph sizes are the captured ones: the router plans with them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from executor.build.executor import _warn_of_many_threads, build_worker
from executor.build.plan import Blueprint, plan_graph_sizes
from executor.config import ExecutorConfig
from executor.errors import CheckpointError
from executor.worker import Worker
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.model.families.head_checkpoints import SHAPES as HEAD_SHAPES
from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.support.checkpoints import save_latent_model
from tests.executor.support.drafts.draft_checkpoints import save_draft
from tests.executor.support.steps import decode_part, prompt_part, step, tokens_of

PROMPT = [5, 17, 33, 2, 90, 41, 8, 8, 60]


def config(model: Path, **settings: Any) -> ExecutorConfig:
    sizes: dict[str, Any] = {
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 64,
    }
    return ExecutorConfig(model=model, **(sizes | settings))


def test_more_threads_than_cores_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for threads, told in ((2, []), (3, ["more_threads_than_cores"])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with capture_logs() as lines:
            _warn_of_many_threads()
        assert [line["event"] for line in lines] == told


def test_describe_says_what_the_executor_can_hold_and_has_captured(tiny_checkpoint: Path):
    settings = config(tiny_checkpoint, max_model_len=100, prefill_graphs="piecewise")
    _, description = build_worker(settings)
    sizes = plan_graph_sizes(settings, max_model_len=100)
    described = description.graph_sizes
    assert (tuple(described.decode), tuple(described.extend)) == (sizes.decode, sizes.extend)
    assert described.extend_runner == "prefill_piecewise"
    assert description.num_kv_blocks == 64
    assert description.num_rows == description.budget.max_num_seqs == 8
    assert description.model.architecture == "Qwen3MoeForCausalLM"
    assert description.model.max_model_len == 100
    assert list(description.model.eos_token_ids) == [2]
    agreement = description.agreement
    assert agreement["model_fingerprint"] == description.model.fingerprint
    assert agreement["max_num_batched_tokens"] == "64"
    assert agreement["decode_graph_sizes"] == "[1, 2, 4, 8]"


@pytest.mark.parametrize("prefill_graphs", ["breakable", "piecewise"])
def test_tokens_do_not_depend_on_whether_steps_replay_graphs(
    tiny_checkpoint: Path, prefill_graphs: str
):
    worker, _ = build_worker(config(tiny_checkpoint, prefill_graphs=prefill_graphs))
    eager = _generate(worker, prefill_size=None, decode_size=None)
    assert _generate(worker, prefill_size=12, decode_size=4) == eager
    assert _generate(worker, prefill_size=64, decode_size=8) == eager


@pytest.mark.parametrize("shape", HEAD_SHAPES)
def test_tokens_of_every_family_with_heads_are_those_of_transformers_in_graphs_too(
    shape: str, tmp_path: Path
):
    model = save_model(tmp_path, shape)
    worker, _ = build_worker(config(tmp_path, prefill_graphs="piecewise"))
    out = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    expected = out[0, len(PROMPT) :].tolist()
    assert _generate(worker, prefill_size=None, decode_size=None) == expected
    assert _generate(worker, prefill_size=12, decode_size=4) == expected


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents")
    save_latent_model(path, "deepseek_v3", hidden_size=48)
    return path


def test_a_model_of_latents_gives_the_same_tokens_in_graphs_and_without(latents: Path):
    worker, _ = build_worker(config(latents, prefill_graphs="piecewise"))
    eager = _generate(worker, prefill_size=None, decode_size=None)
    assert _generate(worker, prefill_size=12, decode_size=4) == eager


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        (
            "eagle3",
            {"draft_topk": 2, "num_draft_tokens": 4},
            r"draft_topk=2: .* latent attention \(MLA\) .*; set draft_topk=1",
        ),
        ("frozen_kv", {}, r"DeepseekV3ForCausalLM keeps latents \(MLA\)"),
    ],
)
def test_drafts_that_do_not_go_with_latents_are_refused_before_weights_are_read(
    kind: str, settings: dict[str, Any], problem: str, latents: Path, tmp_path: Path
):
    save_draft(tmp_path, kind)
    with pytest.raises((ValueError, CheckpointError), match=problem):
        Blueprint.of(config(latents, draft_model=tmp_path, **settings))
    Blueprint.of(config(latents))


def test_trees_over_sliding_windows_are_refused_before_weights_are_read(tmp_path: Path):
    draft, target = tmp_path / "draft", tmp_path / "target"
    draft.mkdir()
    save_draft(draft, "eagle3")
    save_model(target, "gpt_oss", hidden_size=48, vocab_size=96)
    Blueprint.of(config(target, draft_model=draft))
    with pytest.raises(ValueError, match=r"draft_topk=2: .* sliding_window=8 .*; set draft_topk=1"):
        Blueprint.of(config(target, draft_model=draft, draft_topk=2, num_draft_tokens=4))


def _generate(worker: Worker, prefill_size: int | None, decode_size: int | None) -> list[int]:
    """Returns 8 greedy tokens of one sequence, each step replaying a graph of that size or none."""
    worker.join(1, "")
    part = prompt_part(0, PROMPT, [1, 2, 3])
    request = step(1, part, num_tokens=[9], num_logits=[1], graph_size=prefill_size)
    tokens = _execute(worker, request, 9)
    for length in range(9, 16):
        part = decode_part(0, length, block_ids=[length] if length % 4 == 0 else [])
        request = step(2, part, num_tokens=[1], graph_size=decode_size)
        tokens += _execute(worker, request, length + 1)
    return tokens


def _execute(worker: Worker, request: pb.StepRequest, length: int) -> list[int]:
    """Returns the tokens of a step. Blocks that row 0 gives back of its window become NaN.

    Args:
        length: Tokens of the row that are computed behind it.
    """
    columns, window, pool = request.ranks[0].sequences, worker._limits.kv_window, worker._kv_pool
    if window:
        ids = np.frombuffer(columns.new_block_ids, "<i4") + 32
        columns.new_window_block_ids = ids.astype("<i4").tobytes()
    tokens = tokens_of(worker.execute(request))
    if window:
        given_back = pool.tables[1, 0, : max(length + 1 - window, 0) // pool.block_size]
        for cache in pool.tensors:
            cache.view(pool.num_blocks, -1)[given_back.long()] = torch.nan
    return tokens
