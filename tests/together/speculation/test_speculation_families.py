"""Output of every kind of family with drafts is that of plain decoding, token for token."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.model.families.mtp_checkpoints import COMMON, FAMILIES, save_with_draft
from tests.executor.support.checkpoints import save_latent_model
from tests.executor.support.drafts.draft_checkpoints import save_draft
from tests.together.speculation.speculative_cell import (
    Ask,
    Router,
    cell_of,
    poison_free_blocks,
    serve,
)


def expect_plain(target: Path, draft: Path) -> Router:
    rng = random.Random(3)
    asks = [
        Ask(prompt=tuple(rng.choices(range(3, COMMON["vocab_size"]), k=length)), max_tokens=24)
        for length in (5, 30, 17)
    ]
    with cell_of(model=target) as cell:
        expected = serve(Router(cell), asks)
    with cell_of(model=target, draft_model=draft, num_draft_steps=2) as cell:
        router = Router(cell)
        poison_free_blocks(router)
        answers = serve(router, asks)
    assert [[x.tokens for x in each] for each in answers] == [
        [x.tokens for x in each] for each in expected
    ]
    assert max(router.widths) == 3
    return router


def calm(path: Path) -> None:
    """Lets layers add little, so that the next token hangs on the last, and the draft sees it."""
    tensors = load_file(path / "model.safetensors")
    for name, x in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            x.mul_(0.01)
        elif name.endswith("norm.weight"):
            x.fill_(1.0)
        elif name.endswith("eh_proj.weight"):
            x.copy_(torch.eye(*x.shape))
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("stem", FAMILIES)
def test_a_familys_own_draft_layer_changes_no_token_and_is_right_at_times(
    tmp_path: Path, stem: str
):
    save_with_draft(tmp_path, stem)
    calm(tmp_path)
    router = expect_plain(tmp_path, tmp_path)
    assert sum(sequence.progress.num_accepted_drafts for sequence in router.ended) > 12


@pytest.mark.parametrize("shape", ["deepseek_v3", "gpt_oss"])
def test_an_eagle_head_beside_latents_windows_and_sinks_changes_no_token(
    tmp_path: Path, shape: str
):
    target, draft = tmp_path / "target", tmp_path / "draft"
    draft.mkdir()
    save = save_model if shape == "gpt_oss" else save_latent_model
    save(target, shape, hidden_size=48, vocab_size=COMMON["vocab_size"])
    save_draft(draft, "eagle3")
    expect_plain(target, draft)
