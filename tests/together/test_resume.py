"""If these fail, an output that goes on at another router is not what it would have been.

Requests of every kind are cut behind each of their tokens and go on from there, as messages of the
public API. In float32 all tokens and texts are equal; where executors have kernels for bfloat16, whose
sums do not depend on what else a step runs, log probabilities are, too, to the last bit.
LOCKSTEP_RESUME says how many prompts each kind gets; 0, the default: one, and each third cut.
"""

import asyncio
import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest

from protos.serving.v1 import serving_pb2 as pb
from router.api.messages import read_request, take_response
from router.api.text import Tokenizer
from router.errors import ConstraintFailed
from router.requests.request import Request, Sequence
from tests.router.support.calls import resumed
from tests.support.paths import DEMO_MODEL
from tests.together.speculation.speculative_cell import (
    EXACT_DTYPE,
    NEWLINE,
    Cell,
    Router,
    cell_of,
    demo_prompts,
    settings_of,
)

NUM_PROMPTS = int(os.environ.get("LOCKSTEP_RESUME", "0"))
NUM_TOKENS = 14
TOKENIZER = Tokenizer(DEMO_MODEL / "tokenizer.json")
SIZES: dict[str, Any] = {"max_num_seqs": 16, "num_kv_blocks": 16 * 24 + 1}

Heard = list[pb.GenerateResponse]  # one for each token


def sampled(temperature: float = 1.2, **fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(temperature=temperature, seed=11, **fields)


DIGITS = range(ord("0") + 3, ord("9") + 4)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": sampled()},
    "of the likeliest": {"sampling": sampled(2.0, top_k=40, top_p=0.9, min_p=0.01)},
    "penalties": {
        "sampling": sampled(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.4)
    },
    "penalties, greedy": {"sampling": pb.SamplingParams(repetition_penalty=1.5)},
    "bias": {"sampling": sampled(logit_bias={50: 3.0, 52: -4.0})},
    "min_tokens": {"stop": pb.StopConditions(min_tokens=6, stop_token_ids=[*DIGITS, NEWLINE])},
    "log probabilities": {
        "sampling": sampled(),
        "output": pb.OutputOptions(logprobs=True, top_logprobs=2, logprob_token_ids=[50]),
    },
    "of the prompt": {"output": pb.OutputOptions(prompt_logprobs=True, logprobs=True, echo=True)},
    "three": {"n": 3, "sampling": sampled()},
    "text": {
        "sampling": sampled(8.0),
        "output": pb.OutputOptions(text=True),
        "vocabulary": pb.Vocabulary(allowed_token_ids=[byte + 3 for byte in b"a\xc3\xa9\xa8"]),
    },
    "stop strings": {
        "stop": pb.StopConditions(stop_strings=["g\n5", "nd", "\n0"], min_tokens=5),
        "sampling": sampled(),
        "output": pb.OutputOptions(text=True),
    },
    "bad words": {
        "sampling": sampled(2.0),
        "vocabulary": pb.Vocabulary(
            bad_words=["1"],
            bad_token_ids=[
                pb.TokenIds(ids=[first, second]) for first in DIGITS[:6] for second in DIGITS
            ],
        ),
    },
    "allowed tokens": {
        "sampling": sampled(),
        "vocabulary": pb.Vocabulary(allowed_token_ids=[*DIGITS, NEWLINE]),
    },
    "constraint": {
        "sampling": sampled(2.0),
        "constraint": pb.Constraint(regex=r"([a-z]{2,4}[0-9]){2}"),
    },
    "constraint later": {
        "sampling": sampled(logit_bias={38: 9.0}),
        "constraint": pb.Constraint(regex=r"[a-z]{2,4}[0-9]{2}", after_token_ids=[38, 38]),
    },
}


def messages_of(kind: str) -> list[pb.GenerateRequest]:
    messages = []
    for prompt in demo_prompts(29, max(NUM_PROMPTS, 1)):
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **KINDS[kind])
        message.stop.max_tokens = NUM_TOKENS
        message.stop.ignore_eos = not message.HasField("constraint")
        messages.append(message)
    return messages


def read(cell: Cell, router: Router, messages: Iterable[pb.GenerateRequest]) -> list[Request]:
    async def read_all() -> list[Request]:
        options: dict[str, Any] = {"tokenizer": TOKENIZER, "listener": router.listener}
        return [await read_request(m, model=cell.model, **options) for m in messages]

    return asyncio.run(read_all())


def hear(cell: Cell, messages: Iterable[pb.GenerateRequest]) -> list[list[Heard]]:
    """Returns what each continuation of each request is answered."""
    router = Router(cell)
    requests = read(cell, router, messages)
    heard: dict[Sequence, Heard] = {s: [] for request in requests for s in request.sequences}
    for request in requests:
        router.admission.submit(request)
    is_open = set(heard)
    while is_open:
        while len(router.in_flight) < 2 and router.plan() is not None:
            pass
        if router.in_flight:
            router.commit()
        for sequence in tuple(is_open):
            assert sequence.error is None
            if response := take_response(sequence):
                heard[sequence].append(response)
            if sequence.is_ended:
                is_open.remove(sequence)
    return [[heard[sequence] for sequence in request.sequences] for request in requests]


@cache
def plain_cell(dtype: str) -> Cell:
    return Cell(dtype=dtype, **SIZES)


@cache
def undisturbed(kind: str, dtype: str) -> list[list[Heard]]:
    """Returns what comes of the requests of a kind in one call, each token by itself."""
    whole = hear(plain_cell(dtype), messages_of(kind))
    assert all(len(m.token_ids) == 1 for sequences in whole for h in sequences for m in h)
    return whole


def tokens_of(heard: Heard) -> list[int]:
    return [token for message in heard for token in message.token_ids]


def test_the_kinds_do_what_they_are_for():
    [[text]], [[stopped]], [[constrained]] = [
        undisturbed(kind, "float32")[:1] for kind in ("text", "stop strings", "constraint")
    ]
    pieces = [message.text for message in text]
    assert "" in pieces
    assert not {"é", "è"}.isdisjoint("".join(pieces))
    assert stopped[-1].finish.stop_string == "g\n5"
    assert constrained[-1].finish.reason == pb.FINISH_REASON_STOP


def expect_the_rest(got: Heard, whole: Heard, cut: int, *, to_the_bit: bool) -> None:
    rest = whole[cut:]
    assert tokens_of(got) == tokens_of(rest)
    assert "".join(m.text for m in got) == "".join(m.text for m in rest)
    finish, wanted = got[-1].finish, whole[-1].finish
    for name in ("reason", "stop_token_id", "stop_string", "num_completion_tokens"):
        assert getattr(finish, name) == getattr(wanted, name)
    assert finish.num_resumed_tokens == cut
    for name in ("logprobs", "prompt_logprobs"):
        mine, theirs = [[one for m in of for one in getattr(m, name)] for of in (got, rest)]
        if to_the_bit:
            assert mine == theirs
        else:
            values = [[one.logprob for one in of] for of in (mine, theirs)]
            assert values[0] == pytest.approx(values[1], abs=1e-3)


def cuts_of(length: int, place: int) -> Iterator[int]:
    cuts = range(length + 1) if NUM_PROMPTS else {0, *range(place % 3 + 1, length, 3), length}
    yield from cuts


def expect_all_cuts_alike(cell: Cell, kind: str) -> None:
    cases, dtype = [], cell.dtype
    for message, sequences in zip(messages_of(kind), undisturbed(kind, dtype), strict=True):
        for cut in cuts_of(max(map(len, sequences)), list(KINDS).index(kind)):
            cuts = [min(cut + index, len(heard)) for index, heard in enumerate(sequences)]
            outputs = [tokens_of(heard[:each]) for each, heard in zip(cuts, sequences, strict=True)]
            cases.append((resumed(message, *outputs), sequences, cuts))
    answers = hear(cell, [message for message, _, _ in cases])
    for got, (_, sequences, cuts) in zip(answers, cases, strict=True):
        for one, whole, cut in zip(got, sequences, cuts, strict=True):
            expect_the_rest(one, whole, cut, to_the_bit=dtype == "bfloat16")


DTYPES = list(dict.fromkeys(["float32", EXACT_DTYPE]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_goes_on_from_each_of_its_tokens(kind: str, dtype: str):
    expect_all_cuts_alike(plain_cell(dtype), kind)


@pytest.fixture(scope="module", params=DTYPES)
def drafting(request: pytest.FixtureRequest) -> Iterator[Cell]:
    with cell_of(dtype=request.param, **SIZES, **settings_of("mtp", 1)) as cell:
        yield cell


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_nothing_of_it(drafting: Cell, kind: str):
    expect_all_cuts_alike(drafting, kind)


def test_an_output_that_breaks_its_constraint_fails_alone():
    cell, message = plain_cell("float32"), messages_of("constraint")[0]
    router = Router(cell)
    requests = read(cell, router, [resumed(message, [50, 51]), message])
    for request in requests:
        router.admission.submit(request)
    while not all(s.is_ended for request in requests for s in request.sequences):
        while len(router.in_flight) < 2 and router.plan() is not None:
            pass
        router.commit()
    [[broken], [whole]] = [request.sequences for request in requests]
    assert isinstance(broken.error, ConstraintFailed)
    assert whole.error is None
