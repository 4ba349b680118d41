"""If this fails, drafts from a family's own checkpoint are other layers than it was trained with."""

from pathlib import Path

import pytest
import torch

from tests.executor.model.families.mtp_checkpoints import COMMON, FAMILIES, save_with_draft
from tests.executor.support.drafts.drafting import DraftRank, entries_of


@pytest.mark.parametrize("stem", FAMILIES)
def test_a_familys_own_draft_layer_equals_that_layer_of_transformers(tmp_path: Path, stem: str):
    draft, parts = save_with_draft(tmp_path, stem)
    rank = DraftRank(tmp_path, tmp_path)
    [(ids, hidden)] = entries_of(3, {0: 21}, COMMON["vocab_size"], COMMON["hidden_size"]).values()
    drafted = [
        rank.step({0: (ids[start:stop], hidden[start:stop])})[0][1]
        for start, stop in ((0, 13), (13, 20), (20, 21))
    ]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    eps = draft.config.rms_norm_eps
    embedded = norm(parts["embedding"][torch.tensor(ids)], parts["enorm"])
    x = torch.cat((embedded, norm(hidden, parts["hnorm"])), dim=-1) @ parts["eh_proj"].T
    with torch.inference_mode():
        expected = draft(inputs_embeds=x.unsqueeze(0), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(drafted), expected, atol=1e-4, rtol=1e-4)
