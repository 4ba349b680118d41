"""Where prompts never cease, drafts run in turns with them, and output stays that of plain decoding."""

import random
from typing import Any

import pytest

from router.scheduling.sequence_table import RowStatus
from router.scheduling.step import StepPlan
from tests.router.support.stepper import drafting
from tests.together.speculation.speculative_cell import (
    CHAINS,
    Ask,
    Cell,
    Router,
    cell_of,
    demo_prompts,
    expect_plain,
    settings_of,
)

FEW = {"max_num_seqs": 12, "max_num_batched_tokens": 32, "max_model_len": 64}
NUM_LATER = 12
GROUPS: dict[str, dict[str, Any]] = {
    "one executor": {},
    "DP 2": {"dp_size": 2},
    "attention TP 2": {"attn_tp_size": 2},
    "eager": {"decode_graphs": "off"},
    "few blocks": {"num_kv_blocks": 1 + 90},
}


class TurnRouter(Router):
    """Counts the speculative steps that are planned while prompts wait for their next tokens."""

    def __init__(self, cell: Cell, prompt_steps_between: int) -> None:
        super().__init__(cell, drafting(min_tokens=1.0, between=prompt_steps_between))
        self.num_turns = 0

    def before_step(self, plan: StepPlan) -> None:
        has_prompts = bool((self.table.status == RowStatus.EXTEND).any())
        self.num_turns += plan.limits is not None and has_prompts


def arriving(seed: int, num_decodes: int) -> list[Ask]:
    """Returns requests with long answers, and others of which one comes before each step after."""
    rng = random.Random(seed)
    long, short = demo_prompts(seed, NUM_LATER, 24), demo_prompts(seed, num_decodes)
    asks = [Ask(prompt=prompt, max_tokens=64 - len(prompt)) for prompt in short]
    for place, prompt in enumerate(long):
        prompt = prompt if rng.random() < 0.5 and len(prompt) < 60 else prompt[-12:]
        asks.append(Ask(prompt=prompt, max_tokens=rng.randint(1, 4), delay=3 + place))
    return asks


def check_turns(name: str, topk: int, group: str, prompt_steps_between: int) -> None:
    with cell_of(**FEW | settings_of(name, topk) | GROUPS[group]) as cell:
        router = TurnRouter(cell, prompt_steps_between)
        expect_plain(router, arriving(60 + topk, 8 * cell.dp_size))
    assert router.num_turns > 3
    assert (router.num_preemptions > 0) == (group == "few blocks")


@pytest.mark.parametrize(
    ("name", "topk"), [*((name, 1) for name in CHAINS), ("eagle", 4), ("frozen_kv", 2)]
)
def test_in_turns_with_prompts_every_draft_model_changes_no_output(name: str, topk: int):
    check_turns(name, topk, "one executor", 1)


@pytest.mark.parametrize("group", ["DP 2", "attention TP 2", "eager", "few blocks"])
def test_turns_change_no_output_in_any_kind_of_group(group: str):
    check_turns("eagle", 2, group, 2 if group == "eager" else 1)


def test_told_to_let_prompts_go_first_a_group_takes_no_turn():
    with cell_of(**FEW | settings_of("mtp", 1)) as cell:
        router = TurnRouter(cell, 10**6)
        expect_plain(router, arriving(61, 8))
    assert router.num_turns == 0
