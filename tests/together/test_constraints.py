"""If these fail, an answer is not what its request's schema says, or depends on how it was served.

LOCKSTEP_CONSTRAINTS says how many random requests each model gets.
"""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from safetensors.torch import load_file, save_file

from router.api.constraints import build_grammar
from router.errors import ConstraintFailed
from router.requests.request import FinishReason, SamplingParams
from router.scheduling.speculation import NO_DRAFTS, DraftCounts
from tests.support.paths import DEMO_MODEL
from tests.together.speculation.speculative_cell import (
    EXACT_DTYPE,
    Answer,
    Ask,
    Cell,
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
SIZES: dict[str, Any] = {
    "dtype": EXACT_DTYPE,
    "max_num_seqs": 16,
    "max_model_len": 96,
    "num_kv_blocks": 16 * 24 + 1,
}
PATTERNS = [
    r"[0-9]{2,4}",
    r"(ab|cd)+e",
    r"[a-f]{3}-[0-9]{2}",
    r"[^a\n]{1,6}",
    r"x?y*z{2}",
    r"\.\S\t",
]
TEXTS = ["yes", "no", "maybe so", 'with "quotes"', "back\\slash", "two\tparts", "é", "😀"]


class Case(NamedTuple):
    """A request, and what its answers must be."""

    kind: str
    text: str
    ask: Ask

    def fits(self, text: str) -> bool:
        match self.kind:
            case "json_schema":
                try:
                    jsonschema.validate(json.loads(text), json.loads(self.text))
                except ValueError:
                    return False
                return True
            case "regex":
                return re.fullmatch(self.text, text) is not None
            case _:
                return text in json.loads(self.text)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    match rng.choice(kinds + ["array", "object", "anyOf"] * depth):
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": 3 + depth}
        case "pattern":
            return {"type": "string", "pattern": "^[a-z]{1,3}[0-9]?$"}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(90)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randrange(1, 9)}
        case "enum":
            return {"enum": rng.sample([1, "two", None, True, 2.5, ["x"], {"y": 1}], 3)}
        case "const":
            return {"const": rng.choice([0, "fixed", [1, 2], {"a": None}])}
        case "array":
            least = rng.randrange(2)
            most = least + rng.randrange(3)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": most}
        case "object":
            names = rng.sample(["id", "name", "value", "a b", "ä"], rng.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randrange(len(names) + 1)),
                "additionalProperties": False,
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def random_constraint(rng: random.Random) -> tuple[str, str]:
    match rng.randrange(8):
        case 0:
            return "regex", rng.choice(PATTERNS)
        case 1:
            return "choices", json.dumps(rng.sample(TEXTS, rng.randrange(1, len(TEXTS))))
        case 2:
            return "json_schema", '{"type": "object"}'
        case _:
            return "json_schema", json.dumps(random_schema(rng))


def random_cases(seed: int, count: int) -> list[Case]:
    rng, cases = random.Random(seed), []
    for place, prompt in enumerate(demo_prompts(seed, count)):
        kind, text = random_constraint(rng)
        sampling = SamplingParams(
            {0: {}, 1: {"temperature": 1.0}, 2: {"temperature": 2.5, "top_k": 40}}[place % 3],
            logit_bias=((10, 5.0),) if place % 5 == 0 else (),
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
            grammar=build_grammar(kind, text),
            delay=rng.randrange(9) + 4 * max(place - 16, 0),
        )
        cases.append(Case(kind, text, ask))
    return cases


def text_of(answer: Answer) -> str:
    """As the tokenizer makes it, whose tokens are bytes; the end is none of it."""
    ids = answer.tokens
    is_ended = answer.finish_reason is FinishReason.STOP
    return bytes(i - 3 for i in (ids[:-1] if is_ended else ids)).decode(errors="ignore")


def expect_constrained(cases: list[Case], answers: list[list[Answer]]) -> None:
    """Asserts that every answer fits its constraint, or is the beginning of one that does."""
    tokenizer = LLTokenizer(str(DEMO_MODEL / "tokenizer.json"), n_vocab=264, eos_token=[2])
    num_whole = 0
    for case, sequences in zip(cases, answers, strict=True):
        for answer in sequences:
            if answer.finish_reason is FinishReason.STOP:
                assert case.fits(text_of(answer)), (case, answer)
                num_whole += 1
            else:
                assert len(answer.tokens) == case.ask.max_tokens
                matcher = LLMatcher(tokenizer, case.ask.grammar)
                assert matcher.consume_tokens(list(answer.tokens)), (case, answer)
    assert num_whole > len(cases) / 2


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with random weights, which has never seen JSON."""
    folder: Path = tmp_path_factory.mktemp("random") / "model"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    for name, tensor in tensors.items():
        if not name.endswith("norm.weight"):
            std = tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
    save_file(tensors, folder / "model.safetensors")
    return folder


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
def served(request: pytest.FixtureRequest, random_model: Path) -> Iterator[Served]:
    model = DEMO_MODEL if request.param == "demo" else random_model
    with cell_of(model=model, **SIZES) as cell:
        cases = random_cases(7, NUM_ASKS)
        yield Served(model, cell, cases, serve(Router(cell), [case.ask for case in cases]))


def test_every_answer_is_valid_against_its_constraint(served: Served):
    expect_constrained(served.cases, served.answers)


class LosingRouter(Router):
    """Loses an executor every few steps, with two in flight."""

    num_lost = 0

    def commit(self) -> DraftCounts:
        if len(self.widths) < 15 * (self.num_lost + 1):
            return super().commit()
        self.lose()
        self.num_lost += 1
        return NO_DRAFTS


def test_executors_that_are_lost_change_no_answer(served: Served):
    router, (asks, answers) = LosingRouter(served.cell), served.again
    assert serve(router, asks) == answers
    assert router.num_lost > 1


def test_preemptions_change_no_answer(served: Served):
    asks, answers = served.again
    few = {"model": served.model, "max_num_seqs": 6, "max_model_len": MAX_LEN}
    with cell_of(**SIZES | few | {"num_kv_blocks": MAX_LEN // 4 + 8}) as cell:
        router = Router(cell)
        assert serve(router, asks) == answers
        assert router.num_preemptions > 0


@pytest.mark.parametrize(("name", "topk"), [("mtp", 1), ("eagle", 4)])
def test_drafts_change_no_answer(served: Served, name: str, topk: int):
    asks, answers = served.again
    with cell_of(model=served.model, **SIZES | settings_of(name, topk)) as cell:
        router = Router(cell)
        assert serve(router, asks) == answers
        accepted = [each.progress.num_accepted_drafts for each in router.ended]
        assert sum(accepted) > 0


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
