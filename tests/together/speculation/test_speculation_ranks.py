"""Drafts in a group of several executors: idle ranks, ranks that share rows, and all of it again."""

from typing import Any

import pytest

from executor.speculative.verifier import Verifier
from tests.together.speculation.speculative_cell import (
    FAR_WAYS,
    WAYS,
    Ask,
    Router,
    cell_of,
    demo_prompts,
    expect_plain,
    mixed_asks,
    settings_of,
)

GROUPS = {  # 8 experts on 3 executors, and on 2
    "DP 3": {"dp_size": 3},
    "attention TP 2": {"attn_tp_size": 2},
    "DP 3, all-to-all": {"dp_size": 3, "moe_a2a": "torch"},
}


# Each draft model, and chains and trees, in some of them.
GROUPED = [(*way, list(GROUPS)[place % 3]) for place, way in enumerate(WAYS)]


@pytest.mark.parametrize(("name", "topk", "group"), GROUPED)
def test_output_is_that_of_plain_decoding_on_several_executors(name: str, topk: int, group: str):
    seed = WAYS.index((name, topk)) + 20 * len(group)
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    with cell_of(num_kv_blocks=24, **few, **GROUPS[group], **settings_of(name, topk)) as cell:
        router = Router(cell)
        expect_plain(router, mixed_asks(seed, 8))
    assert router.tokens_per_step > 1.2


@pytest.mark.parametrize(
    ("name", "topk", "graphs"),
    [*((*way, "on") for way in FAR_WAYS), ("eagle", 2, "off"), ("mtp3", 1, "off")],
)
def test_a_rank_without_sequences_takes_part_in_every_phase(name: str, topk: int, graphs: str):
    """One sequence at a time, so that one of two ranks is idle in all steps; then both, then one."""
    few = {"max_num_seqs": 2, "decode_graphs": graphs}
    prompts = demo_prompts(7, 4)
    alone = [Ask(prompt=prompts[0], max_tokens=9)]
    together = [Ask(prompt=prompts[1], max_tokens=5), Ask(prompt=prompts[2], max_tokens=17)]
    with cell_of(dp_size=2, **few, **settings_of(name, topk)) as cell:
        router = Router(cell)
        expect_plain(router, alone)
        assert all(min(counts) == 0 for counts in router.counts)
        expect_plain(router, together)
        width = cell.shape.speculation.num_draft_tokens  # type: ignore[union-attr]
        assert {(0, width), (width, width)} <= {tuple(sorted(c)) for c in router.counts}


def test_two_dp_ranks_of_two_executors_each_are_one_group():
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    for name, topk in (("eagle", 2), ("mtp3", 1)):
        with cell_of(dp_size=2, attn_tp_size=2, **few, **settings_of(name, topk)) as cell:
            expect_plain(Router(cell), mixed_asks(90, 6))


@pytest.mark.parametrize(("name", "topk"), [("mtp", 1), ("eagle", 4)])
def test_executors_that_share_rows_accept_what_the_first_of_them_accepts(
    name: str, topk: int, monkeypatch: pytest.MonkeyPatch
):
    """The other one's logits are spoiled, as if it had rounded otherwise."""
    with cell_of(attn_tp_size=2, **settings_of(name, topk)) as cell:
        accept = Verifier.accept
        speculation = cell.workers[1]._speculation
        assert speculation is not None
        spoiled = speculation.verifier

        def accept_otherwise(self: Verifier, verification: Any, logits: Any) -> Any:
            return accept(self, verification, -logits if self is spoiled else logits)

        monkeypatch.setattr(Verifier, "accept", accept_otherwise)
        router = Router(cell)
        expect_plain(router, mixed_asks(91, 6))
    assert router.tokens_per_step > 1.2
