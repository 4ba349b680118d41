"""If these fail, an answer is not what its request's schema says, or depends on how it was served.

LOCKSTEP_CONSTRAINTS says how many random requests each model gets.
"""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from router.api.grammar_worker import try_build
from router.errors import ConstraintFailed
from router.requests.request import FinishReason, SamplingParams
from tests.support.constraints import Constraint, is_beginning, random_constraint
from tests.support.paths import DEMO_MODEL
from tests.support.random_model import save_random_model
from tests.together.speculation.speculative_cell import (
    EXACT_DTYPE,
    Answer,
    Ask,
    Cell,
    LosingRouter,
    Router,
    cell_of,
    demo_prompts,
    serve,
    settings_of,
)

NUM_ASKS = int(os.environ.get("LOCKSTEP_CONSTRAINTS", "16"))
NUM_AGAIN = 8  # of them that are served in another way, too
END_IDS = (13, 2)
MAX_LEN = 64  # of prompt and output
BEGIN = (38, 9.0)  # twice this token, here with its bias, is where some constraints begin
SIZES: dict[str, Any] = {
    "dtype": EXACT_DTYPE,
    "max_num_seqs": 16,
    "max_model_len": 96,
    "num_kv_blocks": 16 * 24 + 1,
}


class Case(NamedTuple):
    """A request, and what its answers must be."""

    constraint: Constraint
    ask: Ask


def random_cases(seed: int, count: int) -> list[Case]:
    rng, cases = random.Random(seed), []
    for place, prompt in enumerate(demo_prompts(seed, count)):
        grammar = ""
        while not grammar:
            constraint = random_constraint(rng)
            grammar, _ = try_build(*constraint)
        sampling = SamplingParams(
            {0: {}, 1: {"temperature": 1.0}, 2: {"temperature": 2.5, "top_k": 40}}[place % 3],
            logit_bias=((10, 5.0),) if place % 5 == 0 else (BEGIN,) if place % 4 == 3 else (),
            seed=place,
        )
        ask = Ask(
            prompt=prompt,
            max_tokens=MAX_LEN - len(prompt),
            min_tokens=rng.choice([0, 0, 5]),
            stop_ids=END_IDS,
            sampling=sampling,
            logprobs=place % 11 == 0,
            n=1 + place % 2,
            grammar=grammar,
            grammar_after=BEGIN[:1] * 2 if place % 4 == 3 else (),
            delay=rng.randrange(9) + 4 * max(place - 16, 0),
        )
        cases.append(Case(constraint, ask))
    return cases


def text_of(ids: Sequence[int]) -> str:
    """As the tokenizer makes it, whose tokens are bytes."""
    return bytes(i - 3 for i in ids).decode(errors="ignore")


def constrained_part(ask: Ask, answer: Answer) -> tuple[int, ...] | None:
    """Returns the tokens behind those where the constraint begins; None: there are none."""
    size = len(ask.grammar_after)
    ends = range(size, len(answer.tokens) + 1)
    found = (end for end in ends if answer.tokens[end - size : end] == ask.grammar_after)
    end = next(found, None)
    return None if end is None else answer.tokens[end:]


def expect_constrained(cases: list[Case], answers: list[list[Answer]]) -> None:
    """Asserts that every answer fits its constraint, or is the beginning of one that does."""
    num_whole = 0
    for case, sequences in zip(cases, answers, strict=True):
        for answer in sequences:
            part = constrained_part(case.ask, answer)
            if answer.finish_reason is FinishReason.STOP:
                assert part is not None
                assert case.constraint.fits(text_of(part[:-1])), (case, answer)
                num_whole += 1
            else:
                assert len(answer.tokens) == case.ask.max_tokens
                assert part is None or is_beginning(case.ask.grammar, part), (case, answer)
    assert num_whole > len(cases) / 2


class Served(NamedTuple):
    """A model, what it was asked, and what it answered."""

    model: Path
    cell: Cell
    cases: list[Case]
    answers: list[list[Answer]]

    @property
    def again(self) -> tuple[list[Ask], list[list[Answer]]]:
        """Some of the requests, and their answers."""
        return [case.ask for case in self.cases[:NUM_AGAIN]], self.answers[:NUM_AGAIN]


@pytest.fixture(scope="module", params=["demo", "random"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    is_demo, folder = request.param == "demo", tmp_path_factory.mktemp("random") / "model"
    model = DEMO_MODEL if is_demo else save_random_model(folder)
    with cell_of(model=model, **SIZES) as cell:
        cases = random_cases(11, NUM_ASKS)
        yield Served(model, cell, cases, serve(Router(cell), [case.ask for case in cases]))


def test_every_answer_is_valid_against_its_constraint(served: Served):
    expect_constrained(served.cases, served.answers)


def test_executors_that_are_lost_change_no_answer(served: Served):
    router, (asks, answers) = LosingRouter(served.cell), served.again
    assert serve(router, asks) == answers
    assert router.num_lost > 1


def test_preemptions_change_no_answer(served: Served):
    asks, answers = served.again
    few = {"model": served.model, "max_num_seqs": 6, "max_model_len": MAX_LEN}
    with cell_of(**SIZES | few | {"num_kv_blocks": MAX_LEN // 4 + 2}) as cell:
        router = Router(cell)
        assert serve(router, [replace(ask, delay=0) for ask in asks]) == answers
        assert router.num_preemptions > 0


@pytest.mark.parametrize(("name", "topk"), [("mtp", 1), ("eagle", 4)])
def test_drafts_change_no_answer(served: Served, name: str, topk: int):
    asks, answers = served.again
    with cell_of(model=served.model, **SIZES | settings_of(name, topk)) as cell:
        router = Router(cell)
        assert serve(router, asks) == answers
        accepted = [each.progress.num_accepted_drafts for each in router.ended]
        assert sum(accepted) > 0 or served.model != DEMO_MODEL  # drafts are of the demo's text


def test_several_executors_keep_to_constraints_too(served: Served):
    """Their sums are of another order, so their answers may be others."""
    shape = {"dp_size": 2} if served.model == DEMO_MODEL else {"attn_tp_size": 2}
    cases = served.cases[:NUM_AGAIN]
    asks = [case.ask for case in cases]
    with cell_of(model=served.model, **SIZES | shape) as cell:
        answers = serve(Router(cell), asks)
        expect_constrained(cases, answers)
        assert serve(LosingRouter(cell), asks) == answers


def test_what_the_tokens_cannot_spell_ends_its_request_only(served: Served):
    cases = served.cases[:4]
    router = Router(served.cell)
    broken = router.submit((5, 6), 8, stop_token_ids=END_IDS, grammar='start: "a" %bad')
    answers = serve(router, [case.ask for case in cases])

    assert isinstance(broken.sequences[0].error, ConstraintFailed)
    assert broken.sequences[0].num_output_tokens == 0
    assert answers == served.answers[:4]
