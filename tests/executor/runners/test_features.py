"""If these fail, a draft is fed other features than it was trained on, and guesses badly."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.graph.backend import EagerBackend
from executor.model.families import load_model
from executor.model.families.config import ModelConfig
from executor.model.flashinfer.operators import FlashInferOps
from executor.parallel.layout import DpLayout
from tests.executor.support.checkpoints import VOCAB_SIZE, save_qwen3_moe
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer, real_flashinfer
from tests.executor.support.kv import batch_of
from tests.executor.support.ranks.feature_ranks import features_on_ranks
from tests.executor.support.ranks.ranks import run_ranks
from tests.executor.support.ranks.runner_ranks import RanksStep
from tests.executor.support.recording.lazy_attention import LazyAttention
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.runner_cases import (
    DECODE_SIZES,
    PREFILL_GRAPHS,
    PREFILL_SIZES,
    RunnerCase,
    assert_close,
    assert_same,
    registry_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

AUX_LAYERS: dict[str, Sequence[int]] = {"three_sums": (0, 2, 1), "final_hidden": ()}
BACKENDS: dict[str, Callable[[], Any]] = {"called": EagerBackend, "recorded": RecordingBackend}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("features")
    return path, save_qwen3_moe(path, "wide")


@pytest.fixture(scope="module", params=AUX_LAYERS)
def case(request: pytest.FixtureRequest, saved: tuple[Path, Any]) -> RunnerCase:
    return RunnerCase(saved[0], is_capturable=True, aux_layers=AUX_LAYERS[request.param])


def reference_features(model: Any, ids: list[int], aux_layers: Sequence[int]) -> torch.Tensor:
    """Returns [T, F] as Transformers computes it: what layers return, or the last norm does."""
    seen: dict[int, torch.Tensor] = {}

    def keep(layer_id: int) -> Any:
        return lambda module, args, out: seen.update({layer_id: out[0]})

    modules = {**dict(enumerate(model.model.layers)), -1: model.model.norm}
    hooks = [module.register_forward_hook(keep(i)) for i, module in modules.items()]
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[i] for i in aux_layers or (-1,)], dim=-1)


def test_features_are_those_of_transformers(saved: tuple[Path, Any], case: RunnerCase):
    ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, 11)
    layout = DpLayout.single(len(ids), has_extend=True)
    batch = batch_of(case.pool, [3], [0], [len(ids)], torch.from_numpy(ids), layout)
    *_, ours = case.run_eagerly(batch)
    theirs = reference_features(saved[1], ids.tolist(), case.aux_layers)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() < 1e-4


@pytest.mark.parametrize("aux_layers", AUX_LAYERS.values(), ids=list(AUX_LAYERS))
def test_operators_that_overwrite_what_they_are_given_leave_the_same_features(
    saved: tuple[Path, Any], aux_layers: Sequence[int], tmp_path_factory: pytest.TempPathFactory
):
    plain = RunnerCase(saved[0], aux_layers=aux_layers)
    batch = plain.prefill_batch(np.random.default_rng(6), 16)
    with CpuFlashInfer(real_flashinfer(tmp_path_factory)).installed():
        case = RunnerCase(
            saved[0], is_capturable=True, aux_layers=aux_layers, ops=FlashInferOps(enable_pdl=True)
        )
        got, expected = case.run_eagerly(batch), plain.run_eagerly(batch)
    assert_close(got, expected, 1e-4)


def test_a_target_answers_the_same_with_features(saved: tuple[Path, Any], case: RunnerCase):
    plain = RunnerCase(saved[0], is_capturable=True)
    batch = case.prefill_batch(np.random.default_rng(2), 32)
    *ours, features = case.run_eagerly(batch)
    assert not features.isnan().any()
    assert_same(ours, plain.run_eagerly(batch))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 3])
def test_a_decode_replay_leaves_the_features_of_eager(case: RunnerCase, backend: str, width: int):
    rng = np.random.default_rng(width)
    runner = case.decode(BACKENDS[backend](), width)
    for size in DECODE_SIZES:
        batch = case.decode_batch(rng, size, width=width)
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", PREFILL_GRAPHS)
def test_a_prefill_replay_leaves_the_features_of_eager(case: RunnerCase, backend: str, kind: str):
    rng = np.random.default_rng(3)
    runner = case.prefill(kind, BACKENDS[backend]())
    for size in PREFILL_SIZES * 2:
        batch = case.prefill_batch(rng, size)
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


@pytest.mark.parametrize("aux_layers", AUX_LAYERS.values(), ids=list(AUX_LAYERS))
def test_a_whole_recorded_decode_leaves_the_features_of_eager(
    saved: tuple[Path, Any], aux_layers: Sequence[int]
):
    case = RunnerCase(saved[0], LazyAttention.of, is_capturable=True, aux_layers=aux_layers)
    rng = np.random.default_rng(4)
    runner = case.decode(RecordingBackend())
    for size in DECODE_SIZES * 2:
        batch = case.decode_batch(rng, size)
        assert_close(case.run(runner, batch), case.run_eagerly(batch), 1e-5)


def test_poisoned_tails_change_no_features(case: RunnerCase):
    runners = [case.decode(EagerBackend()), case.prefill("piecewise", EagerBackend())]
    rng = np.random.default_rng(5)
    batches = [case.decode_batch(rng, 8, num_seqs=5), case.prefill_batch(rng, 32)]
    expected = [case.run(runner, x) for runner, x in zip(runners, batches, strict=True)]
    for runner, batch, unpoisoned in zip(runners, batches, expected, strict=True):
        registry_of(runner).poison_tails()
        assert_same(case.run(runner, batch), unpoisoned)


@pytest.mark.parametrize("attn_tp_size", [1, 2])
def test_two_dp_ranks_leave_the_features_of_one_executor(
    saved: tuple[Path, Any], attn_tp_size: int
):
    aux_layers = AUX_LAYERS["three_sums"]
    steps = [
        RanksStep(([5, 2], [3]), None, has_extend=True),
        RanksStep(([5, 2], [3]), 8, has_extend=True),
        RanksStep(([1, 1, 1], []), None, has_extend=False),
        RanksStep(([1, 1, 1], []), 4, has_extend=False),
        RanksStep(([], [1]), 2, has_extend=False),
    ]
    alone = RunnerCase(saved[0], aux_layers=aux_layers)
    expected = [
        [alone.run_eagerly(step.batch(alone, rank))[-1].numpy() for step in steps]
        for rank in range(2)
    ]
    ranks = run_ranks(
        features_on_ranks, 2 * attn_tp_size, saved[0], attn_tp_size, aux_layers, steps
    )
    for world_rank, by_kind in enumerate(ranks):
        for features in by_kind.values():
            for ours, theirs in zip(features, expected[world_rank // attn_tp_size], strict=True):
                assert ours.shape == theirs.shape
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("aux_layers", [(0, 3), (-1,)])
def test_a_layer_that_the_target_has_not_is_refused(
    saved: tuple[Path, Any], aux_layers: Sequence[int]
):
    with pytest.raises(ValueError, match=r"aux_layers=\[.*\]: the model has layers 0 to 2"):
        load_model(saved[0], ModelConfig.from_dir(saved[0]), aux_layers=aux_layers)
