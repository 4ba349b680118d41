"""Executors that share a DP rank's rows verify the drafts of the first of them, whatever they drafted."""

from collections.abc import Callable

import pytest
import torch

from executor.batch.read_step import StepColumns
from executor.speculative.speculator import Speculator
from executor.speculative.tree import Drafts
from tests.together.speculation.speculative_cell import (
    Ask,
    Router,
    cell_of,
    demo_prompts,
    expect_plain,
    settings_of,
    speculator_of,
)

ASKS = [Ask(prompt=prompt, max_tokens=14) for prompt in demo_prompts(17, 4, 20)]


def other_tokens(drafts: Drafts) -> Drafts:
    return drafts._replace(tokens=(drafts.tokens + 1) % 200)


def other_tree(drafts: Drafts) -> Drafts:
    """Returns a tree in which every draft stands behind the last token."""
    assert drafts.parents is not None
    return drafts._replace(parents=torch.zeros_like(drafts.parents))


WAYS = [
    ("mtp", 1, other_tokens),
    ("mtp3", 1, other_tokens),
    ("eagle", 2, other_tokens),
    ("frozen_kv", 2, other_tree),
]


@pytest.mark.parametrize(("name", "topk", "otherwise"), WAYS)
def test_a_peer_that_drafts_otherwise_runs_the_drafts_of_the_first(
    name: str, topk: int, otherwise: Callable[[Drafts], Drafts], monkeypatch: pytest.MonkeyPatch
):
    """As if it had rounded otherwise: else each half of the heads would store other tokens' keys."""
    with cell_of(attn_tp_size=2, **settings_of(name, topk)) as cell:
        draft, spoiled = Speculator.draft, speculator_of(cell.workers[1])

        def draft_otherwise(self: Speculator, columns: StepColumns, at: torch.Tensor) -> Drafts:
            drafts = draft(self, columns, at)
            return otherwise(drafts) if self is spoiled else drafts

        router = Router(cell)
        expect_plain(router, ASKS)
        undisturbed = router.tokens_per_step
        monkeypatch.setattr(Speculator, "draft", draft_otherwise)
        router = Router(cell)
        expect_plain(router, ASKS)
    assert router.tokens_per_step == pytest.approx(undisturbed)
    assert undisturbed > 1.2
