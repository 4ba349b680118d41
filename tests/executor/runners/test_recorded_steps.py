"""If these fail, a step that was recorded on a CPU answers from what another step held."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVPool
from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.graph.backend import EagerBackend
from executor.graph.cpu_graph import CpuGraph, GraphMemory
from executor.model.cpu_kernels.library import load
from executor.model.decoder.sizes import attention_of, windows_of
from executor.model.layers.attention import Attention, LayerOptions
from executor.model.layers.attention_cpu import cpu_attention
from executor.model.moe.layer import MoELayer
from executor.model.spec import ModelSpec
from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.support.checkpoints import save_latent_model, save_qwen3_moe
from tests.executor.support.drafts import draft_cases
from tests.executor.support.drafts.draft_cases import FILE_OF, DraftCase, Way
from tests.executor.support.drafts.draft_checkpoints import KINDS, save_draft
from tests.executor.support.runner_cases import (
    PREFILL_GRAPHS,
    RunnerCase,
    assert_same,
    captured,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MODELS: dict[str, Callable[[Path], Any]] = {
    "grouped queries": partial(
        save_qwen3_moe, shape="wide", hidden_size=64, moe_intermediate_size=32
    ),
    "latents": partial(save_latent_model, shape="deepseek_v3", qk_rope_head_dim=32),
    "windows and sinks": partial(save_model, shape="gpt_oss", hidden_size=64, head_dim=32),
}
SIZES = GraphSizes(decode=(1, 2, 4, 8), extend=(8, 32))
VERIFIED = SpeculationPlan(algorithm="eagle", num_draft_steps=2, topk=1, num_draft_tokens=3)
DRAFTS = [
    Way("draft", "eagle"),
    Way("draft", "eagle", 2),
    Way("extend", "moe", is_drawn=True),
    Way("multi_layer", "multi_layer"),
    Way("frozen_kv", "frozen_kv", is_drawn=True),
]


def kernels_attention(config: ModelSpec, pool: KVPool) -> Attention:
    of_model, windows = attention_of(config), windows_of(config)
    sinks = torch.linspace(-1, 1, of_model.num_heads) if windows else None
    layers = [LayerOptions(windows.get(i), sinks) for i in range(len(config.layers))]
    return cpu_attention(of_model.num_heads, pool.shape, scale=of_model.scale, layers=layers)


@pytest.fixture
def new_backend() -> Callable[[], EagerBackend]:
    """Returns what makes backends that record, as those of one executor."""
    kernels = load()
    if kernels is None:
        pytest.skip("there are no kernels here")
    return partial(EagerBackend, partial(CpuGraph, kernels, GraphMemory()))


@pytest.mark.parametrize("name", MODELS)
def test_any_mix_of_steps_answers_as_it_would_eagerly(
    name: str, new_backend: Callable[[], EagerBackend], tmp_path: Path
):
    MODELS[name](tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    case = RunnerCase(tmp_path, kernels_attention, aux_layers=())
    runner = case.build(SIZES, new_backend, "piecewise", VERIFIED)
    verifier, rng = SimpleNamespace(run=runner.verify), np.random.default_rng(0)
    for place in range(32):
        captured(runner)  # as when a group is formed anew
        runs: Any = verifier if place % 4 == 1 else runner
        if place % 4 < 2:
            width = VERIFIED.num_draft_tokens if place % 4 else 1
            batch = case.decode_batch(rng, int(rng.choice(SIZES.decode)), width=width)
        elif place % 4 == 2:
            batch = case.prefill_batch(rng, int(rng.choice(SIZES.extend)))
        else:
            lens = rng.integers(1, 9, rng.integers(1, 8)).tolist()
            batch = case.batch(rng, lens, None, has_extend=True)
        assert_same(case.run(runs, batch), case.run_eagerly(batch))


@pytest.mark.parametrize("way", DRAFTS, ids=str)
def test_recorded_drafts_are_those_of_passes_that_are_called_and_of_eager_ones(
    way: Way,
    new_backend: Callable[[], EagerBackend],
    targets: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    kind: Any = KINDS[FILE_OF[way.draft]]
    monkeypatch.setitem(kind.config, "head_dim", 32)  # for the kernel

    def attention(
        _: DraftCase, num_heads: int, pool: KVPool, *args: Any, **named: Any
    ) -> Attention:
        return cpu_attention(num_heads, pool.shape)

    monkeypatch.setattr(DraftCase, "_attention", attention)
    save_draft(tmp_path, FILE_OF[way.draft])
    case = DraftCase(targets["bfloat16"], tmp_path, way)
    runner, called = (
        draft_cases.captured(case.build(SIZES.decode, new)) for new in (new_backend, EagerBackend)
    )
    rng = np.random.default_rng(0)
    for size in (4, 8, 4, 1, 8, 4):
        batch = case.batch(rng, int(rng.integers(1, size + 1)), size)
        recorded = case.run(runner, batch)
        assert_same(recorded, case.run(called, batch))
        assert_same(recorded, case.run_eagerly(batch))


@pytest.mark.parametrize("kind", ["decode", *PREFILL_GRAPHS])
def test_a_size_whose_first_step_failed_runs_those_after_it(
    kind: str,
    new_backend: Callable[[], EagerBackend],
    targets: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
):
    case, rng = RunnerCase(targets["bfloat16"], kernels_attention), np.random.default_rng(0)
    is_decode, backend, run = kind == "decode", new_backend(), MoELayer.__call__
    runner = case.decode(backend) if is_decode else case.prefill(kind, backend)
    fails = iter([False, True])

    def failing(*args: Any) -> torch.Tensor:
        if next(fails, False):
            raise MemoryError
        return run(*args)

    monkeypatch.setattr(MoELayer, "__call__", failing)
    for place in range(3):
        batch = case.decode_batch(rng, 8) if is_decode else case.prefill_batch(rng, 8)
        if place:
            assert_same(case.run(runner, batch), case.run_eagerly(batch))
            continue
        with pytest.raises(MemoryError):
            case.run(runner, batch)
