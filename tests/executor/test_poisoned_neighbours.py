"""A sequence whose numbers are none changes no other's output, also where their drafts share a block.

Drafts behind a row's last block go to the scratch block, those of all such rows to the same places.
"""

from typing import Any

import pytest
import torch

from executor import build
from tests.executor.speculative_cell import DRAFTS, Ask, Cell, Router, demo_prompts, serve

POISON = 200  # a token that no prompt has


def asks_of(*, is_poisoned: bool) -> list[Ask]:
    """Returns requests of which the poisoned ones, if any, are the others' twins."""
    asks = []
    for prompt in demo_prompts(5, 4, 20):
        for max_tokens in (5, 6, 7, 8):
            asks.append(Ask(prompt=prompt, max_tokens=max_tokens))
            if is_poisoned:
                asks.append(Ask(prompt=(*prompt[:-1], POISON), max_tokens=max_tokens))
    return asks


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_model": DRAFTS / "mtp", "num_draft_steps": 6},
        {"draft_model": DRAFTS / "mtp3", "draft_sampling": "rejection"},
        {"draft_model": DRAFTS / "eagle", "draft_topk": 2, "num_draft_tokens": 7},
        {"draft_model": DRAFTS / "frozen_kv", "draft_topk": 2, "num_draft_tokens": 7},
    ],
    ids=["mtp", "mtp3", "eagle", "frozen_kv"],
)
def test_a_sequence_of_nan_changes_no_other(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    load = build.load_model

    def load_poisoned(*args: Any, **named: Any) -> Any:
        model: Any = load(*args, **named)
        model.embed_tokens.weight[POISON] = torch.nan
        return model

    monkeypatch.setattr(build, "load_model", load_poisoned)
    cell = Cell(**settings)
    try:
        router = Router(cell)
        expected = [answer.tokens for [answer] in serve(router, asks_of(is_poisoned=False))]
        router = Router(cell)
        asks = asks_of(is_poisoned=True)
        answers = serve(router, asks)
    finally:
        cell.close()
    assert router.tokens_per_step > 0
    healthy = [
        answer.tokens
        for ask, [answer] in zip(asks, answers, strict=True)
        if POISON not in ask.prompt
    ]
    assert healthy == expected
