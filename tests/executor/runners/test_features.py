"""If these fail, a draft is fed other features than it was trained on, and guesses badly."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.model.families import load_model, read_spec
from executor.model.flashinfer.operators import FlashInferOps
from executor.parallel.layout import DpLayout
from tests.executor.support.checkpoints import VOCAB_SIZE, save_qwen3_moe
from tests.executor.support.kv import batch_of
from tests.executor.support.runner_cases import (
    RunnerCase,
    assert_close,
    assert_same,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

AUX_LAYERS: dict[str, Sequence[int]] = {"three_sums": (0, 2, 1), "final_hidden": ()}


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
    saved: tuple[Path, Any], aux_layers: Sequence[int], ops: FlashInferOps
):
    plain = RunnerCase(saved[0], aux_layers=aux_layers)
    batch = plain.prefill_batch(np.random.default_rng(6), 16)
    case = RunnerCase(saved[0], is_capturable=True, aux_layers=aux_layers, ops=ops)
    got, expected = case.run_eagerly(batch), plain.run_eagerly(batch)
    assert_close(got, expected, 1e-4)


def test_a_target_answers_the_same_with_features(saved: tuple[Path, Any], case: RunnerCase):
    plain = RunnerCase(saved[0], is_capturable=True)
    batch = case.prefill_batch(np.random.default_rng(2), 32)
    *ours, features = case.run_eagerly(batch)
    assert not features.isnan().any()
    assert_same(ours, plain.run_eagerly(batch))


@pytest.mark.parametrize("aux_layers", [(0, 3), (-1,)])
def test_a_layer_that_the_target_has_not_is_refused(
    saved: tuple[Path, Any], aux_layers: Sequence[int]
):
    with pytest.raises(ValueError, match=r"aux_layers=\[.*\]: the model has layers 0 to 2"):
        load_model(saved[0], read_spec(saved[0]), aux_layers=aux_layers)
