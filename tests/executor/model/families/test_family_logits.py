"""If this fails, a DeepSeek, GLM, gpt-oss, Kimi or MiniMax is answered for by another model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.errors import CheckpointError
from executor.model.families import read_spec
from executor.model.spec import MoeSpec
from tests.executor.model.families.head_checkpoints import SHAPES, config_of, save_model
from tests.executor.support.checkpoints import (
    LATENT_SHAPES,
    reference_logits,
    save_latent_model,
)
from tests.executor.support.serving import BLOCK_SIZE, Rank

TOLERANCE = 1e-4

Checkpoint = tuple[Path, Any]


@pytest.fixture(scope="module", params=[*SHAPES, *LATENT_SHAPES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    path, shape = tmp_path_factory.mktemp(request.param), request.param
    return path, (save_model if shape in SHAPES else save_latent_model)(path, shape)


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max().item() < TOLERANCE


def test_chunks_beside_decodes_and_a_shared_prefix_have_the_logits_of_transformers(
    checkpoint: Checkpoint,
):
    path, model = checkpoint
    size = model.config.vocab_size
    rank, ids, other = Rank(path), prompt(100, size), prompt(30, size, seed=1)
    expected, others = reference_logits(model, ids), reference_logits(model, other)
    assert expected.abs().max() > 1
    got = [rank.step({0: ids[:70]})[0]]  # beyond the positions before yarn
    mixed = [rank.step({0: ids[70 + i : 71 + i], 3: other[5 * i : 5 * i + 5]}) for i in range(5)]
    got += [step[0] for step in mixed]
    got.append(rank.step({0: ids[75:]})[0])
    assert_close(torch.cat(got), expected)
    assert_close(torch.cat([step[3] for step in mixed]), others[:25])
    rank.share_prefix(owner=0, row=1, num_blocks=5)
    assert_close(rank.step({1: ids[5 * BLOCK_SIZE : 60]})[1], expected[5 * BLOCK_SIZE : 60])


def test_norms_have_the_epsilon_of_transformers_where_the_file_says_none(
    checkpoint: Checkpoint, tmp_path: Path
):
    path, model = checkpoint
    fields = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": None}))
    assert read_spec(tmp_path).norm_eps == type(model.config)().rms_norm_eps


@pytest.mark.parametrize(("shape", "in_float32"), [("minimax_m2", True), ("gpt_oss", False)])
def test_experts_are_chosen_in_float32_where_servers_of_the_family_do(
    tmp_path: Path, shape: str, in_float32: bool
):
    """Transformers rounds the gate of MiniMax-M2, and chooses others where scores are close."""
    config_of(shape, architectures=[SHAPES[shape][1].__name__]).save_pretrained(tmp_path)
    experts = read_spec(tmp_path).layers[-1].feed_forward
    assert isinstance(experts, MoeSpec)
    assert experts.router.in_float32 == in_float32


@pytest.mark.parametrize(
    ("shape", "changed", "problem"),
    [
        (
            "gpt_oss",
            {"layer_types": ["full_attention"]},
            "need sliding_attention or full_attention",
        ),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "need sliding_attention or full_"),
        ("gpt_oss", {"layer_types": [{}] * 4}, "need sliding_attention or full_"),
        ("gpt_oss", {"swiglu_limit": -1}, "swiglu_limit=-1 is no number above 0"),
        ("glm4_moe", {"n_group": 3}, "8 experts do not divide into n_group=3"),
        ("glm4_moe", {"n_group": 8, "topk_group": 1}, "n_group=8 leaves 1 of 8 experts"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused_by_name(
    shape: str, changed: dict[str, Any], problem: str, tmp_path: Path
):
    fields = config_of(shape).to_dict() | {"architectures": [SHAPES[shape][1].__name__]} | changed
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=problem):
        read_spec(tmp_path)


def test_a_buffer_of_rope_that_old_files_hold_is_left_unread(tmp_path: Path):
    model, ids = save_model(tmp_path, "glm4_moe"), [5, 9, 33]
    weights = tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(weights) | {name: torch.full((4,), torch.nan)}, weights)
    assert_close(Rank(tmp_path).step({0: ids})[0], reference_logits(model, ids))
