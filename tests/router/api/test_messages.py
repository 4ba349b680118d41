"""A value that cannot work is refused by name; one that gets through must not hurt the engine."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from grpc import StatusCode

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.errors import RpcError
from router.api.messages import empty_response, read_request, refill_response
from router.api.text import Tokenizer
from router.errors import InvalidRequest, PromptTooLong
from router.requests.callers import CallerSettings
from router.requests.request import (
    Listeners,
    OutputOptions,
    Request,
    SamplingParams,
    StopConditions,
)
from tests.router.support import fake_engines
from tests.router.support.calls import PROMPT, SAMPLING, prompt

MODEL = replace(fake_engines.MODEL, vocab_size=256, max_model_len=32)
INVALID, NOT_FOUND = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    # Has a token 256, which the model lacks.
    return fake_engines.byte_tokenizer(tmp_path, added=["<beyond>"])


async def read(
    message: pb.GenerateRequest, tokenizer: Tokenizer | None = None, **options: Any
) -> Request:
    listener = Listeners(max_listeners=1).open()
    return await read_request(
        message, model=MODEL, tokenizer=tokenizer, listener=listener, **options
    )


def sampling(**fields: Any) -> pb.GenerateRequest:
    return prompt(sampling=pb.SamplingParams(**fields))


def stop(**fields: Any) -> pb.GenerateRequest:
    return prompt(stop=pb.StopConditions(**fields))


def output(**fields: Any) -> pb.GenerateRequest:
    return prompt(output=pb.OutputOptions(**fields))


def ids(*token_ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids))


def timeout(seconds: int, nanos: int = 0) -> pb.GenerateRequest:
    request = prompt()
    request.timeout.seconds, request.timeout.nanos = seconds, nanos
    return request


def limited(**fields: Any) -> pb.GenerateRequest:
    return prompt(vocabulary=pb.Vocabulary(**fields))


BAD = [
    # what is wrong, code, field, a part of the message
    (pb.GenerateRequest(), INVALID, "prompt", "token_ids, text or chat"),
    (ids(), INVALID, "token_ids.ids", "empty"),
    (ids(1, 256), INVALID, "token_ids.ids[1]", "256 is no token; the model has 0 to 255"),
    (ids(2**32 - 1), INVALID, "token_ids.ids[0]", "4294967295"),
    (ids(*[1] * 32), INVALID, "token_ids.ids", "32 tokens; at most 31"),
    (pb.GenerateRequest(text=""), INVALID, "text", "no tokens"),
    (pb.GenerateRequest(text="x" * 32), INVALID, "text", "32 tokens; at most 31"),
    (pb.GenerateRequest(text="x" * 600), INVALID, "text", "600 tokens; at most 31"),
    (pb.GenerateRequest(text="<beyond>"), INVALID, "text", "another model's"),
    (prompt(model="other"), NOT_FOUND, "model", "'other' is not served here; 'tiny-moe' is"),
    (prompt(request_id="r" * 129), INVALID, "request_id", "129 characters"),
    *[
        (prompt(request_id=name), INVALID, "request_id", f"{name!r} is not 1 to 128 visible ASCII")
        for name in ("two words", "line\n", "\x1b[2J", "\u202etfel", "caf\xe9")
    ],
    (prompt(n=65), INVALID, "n", "65 is not from 0 to 64"),
    (prompt(priority=101), INVALID, "priority", "101 is not from -100 to 100"),
    (prompt(priority=-101), INVALID, "priority", "-101"),
    (timeout(0), INVALID, "timeout", "0 s"),
    (timeout(-1), INVALID, "timeout", "-1 s"),
    (timeout(0, -1), INVALID, "timeout", "-1e-09 s"),
    *[
        (sampling(**{name: value}), INVALID, f"sampling.{name}", f"{value:g}")
        for name, values in {
            "temperature": [-0.5, 101, math.nan, math.inf, -math.inf],
            "top_p": [0, -1, 1.5, math.nan, math.inf],
            "min_p": [-0.5, 1.5, math.nan, math.inf],
            "repetition_penalty": [0, -1, 101, math.nan, math.inf],
            "presence_penalty": [-101, 101, math.nan, math.inf, -math.inf],
            "frequency_penalty": [-101, 101, math.nan, math.inf, -math.inf],
        }.items()
        for value in values
    ],
    (sampling(logit_bias={256: 1.0}), INVALID, "sampling.logit_bias[256]", "256 is no token"),
    (sampling(logit_bias={5: 101}), INVALID, "sampling.logit_bias[5]", "101 is not from -100"),
    (sampling(logit_bias={5: math.nan}), INVALID, "sampling.logit_bias[5]", "nan"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1)), INVALID, "sampling.logit_bias", "1025"),
    (stop(max_tokens=0), INVALID, "stop.max_tokens", "0 is below 1"),
    (stop(max_tokens=3, min_tokens=4), INVALID, "stop.min_tokens", "4 is above max_tokens"),
    (stop(stop_token_ids=[1] * 65), INVALID, "stop.stop_token_ids", "65 are too many"),
    (stop(stop_token_ids=[1, 256]), INVALID, "stop.stop_token_ids[1]", "256 is no token"),
    (stop(stop_strings=["a"] * 17), INVALID, "stop.stop_strings", "17 are too many"),
    (stop(stop_strings=["a", ""]), INVALID, "stop.stop_strings[1]", "0 characters"),
    (stop(stop_strings=["a" * 257]), INVALID, "stop.stop_strings[0]", "257 characters"),
    (limited(allowed_token_ids=[7, 256]), INVALID, "vocabulary.allowed_token_ids[1]", "no token"),
    (limited(allowed_token_ids=[7] * 1025), INVALID, "vocabulary.allowed_token_ids", "1025 are"),
    (
        limited(allowed_token_ids=[7], bad_token_ids=[pb.TokenIds(ids=[7])]),
        INVALID,
        "vocabulary.allowed_token_ids",
        "bad word",
    ),
    (
        prompt(
            vocabulary=pb.Vocabulary(allowed_token_ids=[2]), stop=pb.StopConditions(min_tokens=1)
        ),
        INVALID,
        "vocabulary.allowed_token_ids",
        "min_tokens forbids",
    ),
    (
        prompt(
            vocabulary=pb.Vocabulary(allowed_token_ids=[7]), constraint=pb.Constraint(regex="a")
        ),
        INVALID,
        "vocabulary.allowed_token_ids",
        "leave one out",
    ),
    (limited(bad_words=["a"] * 65), INVALID, "vocabulary.bad_words", "65 are too many"),
    (
        limited(bad_words=["a", ""]),
        INVALID,
        "vocabulary.bad_words[1]",
        "0 characters are not from 1",
    ),
    (limited(bad_words=["abcdefghi"]), INVALID, "vocabulary.bad_words[0]", "9 tokens"),
    (limited(bad_token_ids=[pb.TokenIds()]), INVALID, "vocabulary.bad_token_ids[0]", "0 tokens"),
    (
        limited(bad_token_ids=[pb.TokenIds(ids=[1, 256])]),
        INVALID,
        "vocabulary.bad_token_ids[0]",
        "256 is no token",
    ),
    (output(logprobs=True, top_logprobs=21), INVALID, "output.top_logprobs", "21 is not from"),
    (output(top_logprobs=1), INVALID, "output.top_logprobs", "set logprobs"),
    (output(logprob_token_ids=[1]), INVALID, "output.logprob_token_ids", "set logprobs"),
    (
        output(logprobs=True, logprob_token_ids=[1, 256]),
        INVALID,
        "output.logprob_token_ids[1]",
        "256 is no token",
    ),
    (output(logprob_token_ids=[1] * 65), INVALID, "output.logprob_token_ids", "65 are too many"),
]


@pytest.mark.parametrize(
    ("bad", "code", "field", "problem"),
    BAD,
    ids=[f"{field} {problem}" for _, _, field, problem in BAD],
)
async def test_a_value_that_cannot_work_is_refused_by_field_value_and_limit(
    tokenizer: Tokenizer, bad: pb.GenerateRequest, code: StatusCode, field: str, problem: str
):
    with pytest.raises(RpcError) as caught:
        await read(bad, tokenizer)
    assert (caught.value.code, caught.value.field) == (code, field)
    assert (caught.value.resource is not None) == (code is NOT_FOUND)
    assert str(caught.value).startswith(f"{field}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "value", "limit"),
    [
        (prompt(n=65), "65", "64"),
        (prompt(priority=-101), "-101", "-100"),
        (timeout(-1), "-1", "0"),
        (ids(1, 256), "256", "255"),
        (ids(*[1] * 32), "32", "31"),
        (pb.GenerateRequest(text="x" * 2000), "2000", "1984"),
        (pb.GenerateRequest(text="<beyond>"), "256", "255"),
        (sampling(top_p=0), "0", "0"),
        (sampling(temperature=math.inf), "inf", "100"),
        (sampling(logit_bias={5: -101}), "-101", "-100"),
        (stop(max_tokens=3, min_tokens=4), "4", "3"),
        (stop(stop_strings=[""]), "0", "1"),
        (stop(stop_token_ids=[1] * 65), "65", "64"),
        (limited(allowed_token_ids=[7] * 1025), "1025", "1024"),
        (limited(bad_words=["a"] * 65), "65", "64"),
        (limited(bad_words=["abcdefghi"]), "9", "8"),
        (limited(bad_token_ids=[pb.TokenIds()]), "0", "1"),
        (output(logprobs=True, logprob_token_ids=[1] * 65), "65", "64"),
    ],
)
async def test_a_program_reads_value_and_limit_too(
    tokenizer: Tokenizer, bad: pb.GenerateRequest, value: str, limit: str
):
    with pytest.raises(InvalidRequest) as caught:
        await read(bad, tokenizer)
    assert caught.value.metadata == {"value": value, "limit": limit}


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (pb.GenerateRequest(text="a"), "text"),
        (output(text=True), "output.text"),
        (stop(stop_strings=["a"]), "stop.stop_strings"),
    ],
)
async def test_what_needs_a_tokenizer_is_refused_without_one(bad: pb.GenerateRequest, field: str):
    with pytest.raises(InvalidRequest, match="no tokenizer") as caught:
        await read(bad, tokenizer=None)
    assert caught.value.field == field


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """Of 64 MiB of text, the tokens would take gigabytes."""
    encode = Mock(return_value=np.ones(1, dtype=np.int32))
    monkeypatch.setattr(tokenizer, "encode", encode)
    most = 64 * MODEL.max_prompt_tokens
    await read(pb.GenerateRequest(text="x" * most), tokenizer)
    told = f"has {most + 1} characters.* and {most} char"
    with pytest.raises(PromptTooLong, match=told) as error:
        await read(pb.GenerateRequest(text="x" * (most + 1)), tokenizer)

    assert (error.value.reason, error.value.field) == ("PROMPT_TOO_LONG", "text")
    encode.assert_called_once_with("x" * most, adds_special=True)


async def test_the_longest_prompt_leaves_room_for_one_token():
    request = await read(ids(*[1] * 31))
    assert request.stop.max_tokens == 1


@pytest.mark.parametrize(
    "good",
    [
        sampling(temperature=100, top_p=1, min_p=1, repetition_penalty=100),
        sampling(presence_penalty=-100, frequency_penalty=100, logit_bias={255: -100}),
        sampling(logit_bias=dict.fromkeys(range(256), 100)),
        stop(max_tokens=2**32 - 1, min_tokens=2**32 - 1),
        stop(stop_token_ids=[255] * 64),
        output(logprobs=True, prompt_logprobs=True, top_logprobs=20),
        prompt(n=64, priority=100, request_id="r" * 128, model="tiny-moe"),
        prompt(priority=-100),
        timeout(0, 1),
    ],
)
async def test_values_at_their_limits_pass(good: pb.GenerateRequest):
    await read(good)


async def test_what_is_absent_has_its_documented_default():
    request = await read(prompt())
    assert request.sampling == SamplingParams(seed=request.sampling.seed)
    assert request.stop == StopConditions(max_tokens=29, stop_token_ids=(2,))
    assert request.output == OutputOptions()
    assert (len(request.sequences), request.priority, request.deadline) == (1, 0, None)
    assert request.prompt.dtype == np.int32
    assert request.prompt.tolist() == PROMPT


async def test_what_is_given_arrives():
    request = await read(
        pb.GenerateRequest(
            request_id="mine",
            token_ids=pb.TokenIds(ids=[1]),
            sampling=pb.SamplingParams(**SAMPLING, logit_bias={9: 1, 3: -1}, seed=2**64 - 1),
            stop=pb.StopConditions(max_tokens=9, min_tokens=3, stop_token_ids=[5, 5, 2]),
            output=pb.OutputOptions(logprobs=True, top_logprobs=4, logprob_token_ids=[9, 3]),
            n=3,
            priority=-7,
        )
    )
    assert (request.request_id, len(request.sequences), request.priority) == ("mine", 3, -7)
    bias = ((3, -1), (9, 1))
    assert request.sampling == SamplingParams(SAMPLING, logit_bias=bias, seed=2**64 - 1)
    assert request.stop == StopConditions(max_tokens=9, min_tokens=3, stop_token_ids=(5, 2))
    assert request.output == OutputOptions(logprobs=True, top_logprobs=4, logprob_ids=(9, 3))


async def test_a_vocabulary_becomes_biases_and_sequences(tokenizer: Tokenizer):
    a, b, space = tokenizer.encode("ab ").tolist()
    message = prompt(
        sampling=pb.SamplingParams(logit_bias={a: 2.0, 7: 1.0}),
        vocabulary=pb.Vocabulary(
            allowed_token_ids=[9, 7, 9],
            bad_words=["a", " b"],
            bad_token_ids=[pb.TokenIds(ids=[7, 8]), pb.TokenIds(ids=[space, a])],
        ),
    )
    sampling = (await read(message, tokenizer)).sampling
    assert sampling.allowed_ids == (9, 7)
    assert dict(sampling.logit_bias) == {a: 2.0 - 1e9, 7: 1.0}
    assert sampling.banned == ((space, b), (space, a), (7, 8))


async def test_a_request_without_an_id_or_a_seed_is_given_its_own():
    one, other = await read(prompt()), await read(prompt())
    assert one.request_id != other.request_id
    assert one.sampling.seed != other.sampling.seed


async def test_more_tokens_than_fit_become_as_many_as_fit():
    request = await read(stop(max_tokens=1000, min_tokens=900))
    assert (request.stop.max_tokens, request.stop.min_tokens) == (29, 29)


async def test_a_request_for_more_outputs_than_one_may_have_is_told_which_numbers_are_too_large():
    settings = CallerSettings(max_request_outputs=2000)
    scored = pb.OutputOptions(logprobs=True, top_logprobs=1, logprob_token_ids=[1, 2, 3])
    asked = {"n": 20, "output": scored}
    each = r"\(1 \+ top_logprobs=1 \+ logprob_token_ids=3\)"
    with pytest.raises(InvalidRequest, match=f"n=20 x max_tokens=21 x {each} is 2100"):
        await read(prompt(stop=pb.StopConditions(max_tokens=21), **asked), settings=settings)
    most = await read(prompt(stop=pb.StopConditions(max_tokens=20), **asked), settings=settings)
    assert most.stop.max_tokens == 20

    asked["output"] = pb.OutputOptions(prompt_logprobs=True, top_logprobs=4)  # not of outputs
    await read(prompt(stop=pb.StopConditions(max_tokens=29), **asked), settings=settings)


async def test_the_prompts_log_probabilities_are_outputs_too():
    scored = pb.OutputOptions(prompt_logprobs=True, top_logprobs=4)
    asked = {"n": 2, "output": scored, "stop": pb.StopConditions(max_tokens=10)}
    num_prompt = len((await read(prompt())).prompt)
    settings = CallerSettings(max_request_outputs=5 * num_prompt + 19)
    with pytest.raises(
        InvalidRequest, match=f"is 20, and {5 * num_prompt} of the prompt;.* send 9"
    ):
        await read(prompt(**asked), settings=settings)
    settings = CallerSettings(max_request_outputs=5 * num_prompt + 1)
    with pytest.raises(InvalidRequest, match=r"output.prompt_logprobs: .* shorter prompt"):
        await read(prompt(**asked), settings=settings)


async def test_without_a_limit_of_its_own_a_request_gets_what_one_may_have():
    settings = CallerSettings(max_request_outputs=1344)
    assert (await read(prompt(n=64), settings=settings)).stop.max_tokens == 21
    assert (await read(prompt(n=1), settings=settings)).stop.max_tokens == 29  # all that fit


async def test_priority_goes_as_high_as_the_operator_lets_it():
    settings = CallerSettings(max_priority=0)
    assert (await read(prompt(priority=0), settings=settings)).priority == 0
    with pytest.raises(InvalidRequest, match="priority: 1 is not from -100 to 0"):
        await read(prompt(priority=1), settings=settings)


async def test_ignoring_the_end_of_the_sequence_leaves_the_own_stop_tokens():
    request = await read(stop(ignore_eos=True, stop_token_ids=[5]))
    assert request.stop.stop_token_ids == (5,)


async def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert (await read(sampling(temperature=1e-30))).sampling["temperature"] == 0.0


async def test_a_top_k_of_the_whole_vocabulary_or_more_is_all():
    assert (await read(sampling(top_k=2**32 - 1))).sampling["top_k"] == 0


async def test_the_shorter_of_the_two_timeouts_holds():
    now = asyncio.get_running_loop().time()
    short = await read(timeout(5), call_timeout_s=60.0)
    long = await read(timeout(500), call_timeout_s=60.0)
    call = await read(prompt(), call_timeout_s=60.0)
    deadlines = [request.deadline for request in (short, long, call)]
    arrivals = [request.arrival_time for request in (short, long, call)]
    assert deadlines == [arrivals[0] + 5, arrivals[1] + 60, arrivals[2] + 60]
    assert min(arrivals) >= now


async def test_a_text_prompt_gets_text_and_each_continuation_its_own(tokenizer: Tokenizer):
    request = await read(pb.GenerateRequest(text="hi", n=2), tokenizer)
    assert request.prompt.tolist() == tokenizer.encode("hi").tolist()
    assert request.output.text
    assert request.sequences[0].text is not None
    assert request.sequences[0].text is not request.sequences[1].text


async def test_stop_strings_look_at_text_that_the_client_does_not_get(tokenizer: Tokenizer):
    request = await read(stop(stop_strings=["."]), tokenizer)
    [sequence] = request.sequences
    assert (request.output.text, request.stop.has_stop_strings) == (False, True)
    assert sequence.text is not None
    assert sequence.text.feed(tokenizer.encode("a.b"), may_stop=True) == "."


@pytest.mark.parametrize(
    ("plain", "is_columnar"),
    [
        (prompt(), True),
        (stop(stop_strings=["."]), True),
        (prompt(n=2), False),
        (output(text=True), False),
        (output(logprobs=True), False),
        (output(prompt_logprobs=True), False),
    ],
)
async def test_only_a_plain_request_on_a_stream_is_columnar(
    tokenizer: Tokenizer, plain: pb.GenerateRequest, is_columnar: bool
):
    assert (await read(plain, tokenizer, tag=5)).is_columnar is is_columnar
    assert not (await read(plain, tokenizer)).is_columnar


async def test_a_response_that_is_used_again_has_the_new_tokens_only():
    request = await read(prompt())
    [sequence] = request.sequences
    response = empty_response(sequence)
    for new in ([5], [6, 7]):
        sequence.tokens = np.concatenate((sequence.tokens, np.array(new, np.int32)))
        assert refill_response(response, sequence)
        assert response == pb.GenerateResponse(request_id=request.request_id, token_ids=new)
    assert not refill_response(response, sequence)
