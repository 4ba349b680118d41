"""If these fail, an answer in bfloat16 depends on who is served beside it, or on what became of executors.

Token ids and log probabilities are compared bit for bit with those of the same request by itself.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from executor.model.cpu_kernels import library
from router.requests.request import SamplingParams
from router.scheduling.speculation import NO_DRAFTS, DraftCounts
from tests.executor.model.cpu_kernels.kernel_cases import num_threads
from tests.support.paths import DEMO_MODEL, DEMO_MODEL_MLA
from tests.together.speculation.speculative_cell import (
    NEWLINE,
    Answer,
    Ask,
    Cell,
    Router,
    cell_of,
    demo_prompts,
    poison_free_blocks,
    serve,
    settings_of,
)

Answers = list[list[Answer]]
MODELS = {"heads": DEMO_MODEL, "latents": DEMO_MODEL_MLA}
NUM_ALONE = 6  # of 64, one of each kind
KINDS: list[dict[str, Any]] = [
    {"logprobs": True},
    {"sampling": SamplingParams({"temperature": 1.0, "top_p": 0.9}, seed=5), "logprobs": True},
    {"prompt_logprobs": True, "num_top": 20},
    {"sampling": SamplingParams({"repetition_penalty": 1.3}), "logprobs": True},
    {"sampling": SamplingParams({"temperature": 2.0, "top_k": 40}, seed=6), "n": 2},
    {},
]
ASKS = [
    Ask(prompt=prompt, max_tokens=10 + place % 3, **KINDS[place % len(KINDS)])
    for place, prompt in enumerate(demo_prompts(8, 64, 24))
]


class Served(NamedTuple):
    """A model, and what it answers when 64 ask at once.

    Attributes:
        settings: Of an executor that has it.
        cell: Such an executor, with room for all of them.
        answers: Its kernels are of one tile as long as this is there.
    """

    settings: dict[str, Any]
    cell: Cell
    answers: Answers


# The best tile of this CPU, and the one that most CPUs have.
@pytest.fixture(scope="module", params=[("auto", "heads"), ("avx2", "latents")], ids=", ".join)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    tile, name = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.CHOICE, tile)
        if library.load() is None:
            pytest.skip("these kernels do not run here")
        settings = {"model": MODELS[name], "dtype": "bfloat16"}
        room = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "num_kv_blocks": 64 * 24 + 1}
        with cell_of(**settings, **room) as cell:
            yield Served(settings, cell, serve(Router(cell), ASKS))


def test_each_of_64_is_answered_as_if_it_were_the_only_one(served: Served):
    for ask, answer in zip(ASKS[:NUM_ALONE], served.answers, strict=False):
        assert serve(Router(served.cell), [ask]) == [answer]


def test_two_threads_give_the_bits_of_one(served: Served):
    with num_threads(2):
        assert serve(Router(served.cell), ASKS) == served.answers


class LosingRouter(Router):
    """Loses an executor every few steps, with two in flight."""

    num_lost = 0

    def commit(self) -> DraftCounts:
        if len(self.widths) < 5 * (self.num_lost + 1):
            return super().commit()
        self.lose()
        self.num_lost += 1
        return NO_DRAFTS


def test_executors_that_are_lost_change_no_bit(served: Served):
    router = LosingRouter(served.cell)
    assert serve(router, ASKS[:20]) == served.answers[:20]
    assert router.num_lost > 1


def test_chunks_cached_prefixes_and_preemptions_change_no_bit(served: Served):
    few = {"max_num_seqs": 5, "max_num_batched_tokens": 21, "num_kv_blocks": 36}
    with cell_of(**served.settings, **few) as cell:
        router = Router(cell)
        poison_free_blocks(router)
        assert serve(router, ASKS[:20]) == served.answers[:20]
    assert router.num_preemptions > 0
    assert router.num_hit_tokens > 0
    assert (21,) in router.counts


@pytest.mark.parametrize(("name", "topk"), [("mtp", 1), ("eagle", 4)])
def test_drafts_change_no_bit(served: Served, name: str, topk: int):
    if served.settings["model"] != MODELS["heads"]:
        pytest.skip("the demo's drafts are of its other model")
    with cell_of(**served.settings, **settings_of(name, topk)) as cell:
        router = Router(cell)
        assert serve(router, ASKS[:20]) == served.answers[:20]
    assert router.tokens_per_step > 1.2


@pytest.mark.parametrize("name", MODELS)
def test_every_tile_and_plain_pytorch_give_the_same_greedy_answers(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    asks = [Ask(prompt=p, stop_ids=(NEWLINE,), logprobs=True) for p in demo_prompts(3, 12)]
    expected = None
    for choice in ("off", *library.TILES):
        monkeypatch.setenv(library.CHOICE, choice)
        if choice != "off" and library.load() is None:
            continue
        with cell_of(model=MODELS[name], dtype="bfloat16") as cell:
            answers = [answer for [answer] in serve(Router(cell), asks)]
        expected = expected or answers
        for answer, plain in zip(answers, expected, strict=True):
            assert answer.tokens == plain.tokens
            assert answer.logprobs == pytest.approx(plain.logprobs, abs=0.01)
