"""If this fails, a DeepSeek, Kimi or GLM-4.7-Flash is answered for by another model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.support.checkpoints import (
    LATENT_SHAPES,
    VOCAB_SIZE,
    reference_logits,
    save_latent_model,
)
from tests.executor.support.serving import BLOCK_SIZE, Rank

TOLERANCE = 1e-4

Checkpoint = tuple[Path, Any]


@pytest.fixture(scope="module", params=LATENT_SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    path = tmp_path_factory.mktemp(request.param)
    return path, save_latent_model(path, request.param)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max().item() < TOLERANCE


def test_chunks_beside_decodes_and_a_shared_prefix_have_the_logits_of_transformers(
    checkpoint: Checkpoint,
):
    path, model = checkpoint
    rank, ids, other = Rank(path), prompt(100), prompt(30, seed=1)
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
