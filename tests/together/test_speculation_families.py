"""Output with a family's own draft layer is that of plain decoding, token for token."""

import random
from pathlib import Path

import pytest

from tests.executor.model.families.mtp_checkpoints import COMMON, FAMILIES, save_with_draft
from tests.together.speculative_cell import Ask, Router, cell_of, serve


@pytest.mark.parametrize("stem", FAMILIES)
def test_a_familys_own_draft_layer_changes_no_token(tmp_path: Path, stem: str):
    save_with_draft(tmp_path, stem)
    rng = random.Random(3)
    asks = [
        Ask(prompt=tuple(rng.choices(range(3, COMMON["vocab_size"]), k=length)), max_tokens=24)
        for length in (5, 30, 17)
    ]
    with cell_of(model=tmp_path) as cell:
        expected = serve(Router(cell), asks)
    with cell_of(model=tmp_path, draft_model=tmp_path, num_draft_steps=2) as cell:
        router = Router(cell)
        answers = serve(router, asks)
    assert [[x.tokens for x in each] for each in answers] == [
        [x.tokens for x in each] for each in expected
    ]
    assert max(router.widths) == 3
