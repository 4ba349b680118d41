"""If these fail, a caller whose router died has a wrong answer, or none."""

import asyncio
import dataclasses
from typing import Any

import grpc
import numpy as np
import pytest

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import error_details
from router.api import messages
from router.api.generate import RESUME_METADATA
from router.api.messages import read_request
from router.api.text import OutputText, Tokenizer
from router.engine.engines import Engines
from router.errors import InvalidRequest, QueueFull, RequestExists, ResumeMismatch
from router.requests import resume
from router.requests.request import FinishReason, Listeners, Request
from router.requests.resume import MAX_AGE_S, prompt_digest
from router.requests.waiting_queue import WaitingQueue
from tests.router.support.calls import PROMPT, connected, failure, prompt, responses, resumed
from tests.router.support.fake_engines import MODEL, FakeEngines
from tests.router.support.fake_rank import EOS, expected_output
from tests.router.support.requests import make_request
from tests.router.support.running_engines import running
from tests.router.support.stepper import speculation

READER = Listeners(max_listeners=1).open()
SEEDED = pb.SamplingParams(temperature=1.0, seed=7)


async def read(
    message: pb.GenerateRequest, tokenizer: Tokenizer | None = None, **options: Any
) -> Request:
    listener = Listeners(max_listeners=1).open()
    options = {"model": MODEL, "tokenizer": tokenizer, "listener": listener, **options}
    return await read_request(message, **options)


async def give_from(engines: FakeEngines, tokens: list[int]) -> None:
    """Gives what comes behind the tokens that the request which arrives next has."""
    [sequence] = (await engines.arrivals.get()).sequences
    for token in tokens[sequence.num_output_tokens :]:
        if not sequence.is_ended:
            engines.give(sequence, [token])
    if not sequence.is_ended:
        engines.finish(sequence)


# ---- tokens


KINDS: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 30, "stop_token_ids": (EOS,)},
    {"max_tokens": 30, "stop_token_ids": tuple(range(25)), "min_tokens": 9},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [None, speculation()])
async def test_every_cut_goes_on_as_if_there_had_been_none(kind: dict[str, Any], drafts: Any):
    """And what had ended says so again, at once."""
    stop = kind.get("stop_token_ids", ())
    whole = expected_output(PROMPT, kind["max_tokens"], stop, 7, kind.get("min_tokens", 0))
    message = prompt(sampling=SEEDED, stop=pb.StopConditions(**kind, ignore_eos=True))
    async with running(sizes={"speculation": drafts}) as engines:
        for cut in range(len(whole) + 1):
            request = await take_up(engines, resumed(message, whole[:cut]))
            [sequence] = request.sequences
            assert sequence.tokens[: sequence.num_tokens].tolist() == [*PROMPT, *whole]
            assert sequence.take_tokens().tolist() == whole[cut:]
            is_stopped = whole[-1] in stop
            assert sequence.finish_reason is (
                FinishReason.STOP if is_stopped else FinishReason.LENGTH
            )
            assert sequence.stop_token_id == (whole[-1] if is_stopped else None)
        assert engines.num_live == 0
        assert engines.measures.resumed == {"true": len(whole) + 1, "false": 0}
        assert engines.measures.num_resumed_tokens == sum(range(len(whole) + 1))


async def take_up(engines: Engines, message: pb.GenerateRequest) -> Request:
    """Runs a request to its end."""
    listener = engines.listeners.open()
    request = await read(message, model=engines.model, listener=listener)
    engines.submit(request)
    while len(listener.ended) < len(request.sequences):
        await listener.wait()
    engines.listeners.close(listener)
    return request


async def test_continuations_go_on_each_from_its_own_tokens():
    message = prompt(n=4, sampling=SEEDED, stop=pb.StopConditions(max_tokens=8, ignore_eos=True))
    async with running() as engines:
        before = (await take_up(engines, resumed(message))).sequences
        whole = [s.tokens[s.num_prompt_tokens :].tolist() for s in before]
        assert len({tuple(tokens) for tokens in whole}) == 4
        again = resumed(message, whole[0][:3], None, whole[2])
        request = await take_up(engines, again)
        assert [sequence.index for sequence in request.sequences] == [0, 2, 3]
        got = [s.tokens[s.num_taken :].tolist() for s in request.sequences]
        assert got == [whole[0][3:], [], whole[3]]


# ---- text


STOPS = [[], ["nd é", "z"], ["🚀"], ["d of", "end"]]


@pytest.mark.parametrize("strings", STOPS)
@pytest.mark.parametrize("is_kept", [False, True])
async def test_text_goes_on_within_characters_and_stop_strings(
    tokenizer: Tokenizer, strings: list[str], is_kept: bool
):
    tokens = tokenizer.encode("und é🚀 an end of it").tolist()
    message = pb.GenerateRequest(
        text="hi",
        stop=pb.StopConditions(stop_strings=strings, max_tokens=len(tokens)),
        output=pb.OutputOptions(include_stop=is_kept, echo=True),
    )
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        whole, texts, told = [], [], []
        call = stub.Generate(message)
        [sequence] = (await engines.arrivals.get()).sequences
        while not sequence.is_ended:
            engines.give(sequence, tokens[len(whole) : len(whole) + 1])
            if len(whole) + 1 == len(tokens) and not sequence.is_ended:
                engines.finish(sequence)
            told.append(await call.read())
            whole += told[-1].token_ids
            texts.append(told[-1].text)
        for cut in range(len(whole) + 1):
            again = stub.Generate(resumed(message, whole[:cut]))
            await give_from(engines, tokens)
            begin, *rest = await responses(again)
            assert begin.HasField("begin")
            assert "".join(one.text for one in rest) == "".join(texts[cut:])
            assert [token for one in rest for token in one.token_ids] == whole[cut:]
            assert any(one.prompt_text for one in rest) == (cut == 0)
            finish = rest[-1].finish
            assert (finish.reason, finish.stop_string) == (
                told[-1].finish.reason,
                told[-1].finish.stop_string,
            )
            assert (finish.num_completion_tokens, finish.num_resumed_tokens) == (len(whole), cut)
            assert finish.attempt == 1


# ---- what a caller is told


async def test_a_call_tells_with_its_first_tokens_what_it_takes_to_resume_it():
    engines = FakeEngines()
    async with connected(engines) as stub:
        call = stub.Generate(prompt(n=2, sampling=pb.SamplingParams(temperature=1.0)))
        request = await engines.arrivals.get()
        for sequence in request.sequences:
            engines.give(sequence, [9])
            engines.finish(sequence)
        first, second = await responses(call)
        assert list(first.token_ids) == [9]
        assert not second.HasField("begin")
        assert first.begin == pb.Begin(
            seed=request.sampling.seed,
            prompt_digest=prompt_digest(np.array(PROMPT, np.int32)),
            num_prompt_tokens=3,
            fingerprint="f00d",
            is_exact=True,
        )


@pytest.mark.parametrize(
    ("sampling", "attempt", "tells"),
    [
        (pb.SamplingParams(), 0, False),
        (SEEDED, 0, False),
        (pb.SamplingParams(temperature=1.0), 0, True),
        (SEEDED, 1, True),
    ],
)
async def test_columns_come_behind_a_begin_where_the_caller_needs_one(
    sampling: pb.SamplingParams, attempt: int, tells: bool
):
    engines = FakeEngines()
    message = prompt(sampling=sampling)
    message = resumed(message, [8], attempt=attempt) if attempt else message
    async with connected(engines) as stub:
        call = stub.GenerateMany(iter([pb.GenerateManyRequest(tag=5, start=message)]))
        request = await engines.arrivals.get()
        [sequence] = request.sequences
        if tells:
            [told] = (await call.read()).responses
            assert (told.tag, list(told.response.token_ids)) == (5, [])
            assert told.response.begin.seed == request.sampling.seed
        engines.give(sequence, [9])
        column = await call.read()
        assert np.frombuffer(column.token_ids, "<i4").tolist() == [9]
        assert not column.responses
        engines.give(sequence, [10])
        engines.finish(sequence)
        [last] = (await call.read()).responses
        assert (list(last.response.token_ids), last.response.HasField("begin")) == ([10], False)
        assert last.response.finish.num_resumed_tokens == attempt
        assert await call.read() is grpc.aio.EOF


# ---- what is refused


def column(*ids: int) -> bytes:
    return np.array(ids, "<u4").tobytes()


def continuation(**fields: Any) -> dict[str, Any]:
    return {"attempt": 1, "continuations": [pb.Continuation(**fields)]}


WRONG: dict[str, tuple[pb.GenerateRequest, dict[str, Any]]] = {
    "resume.attempt": (prompt(), {}),
    "resume.continuations[0].index": (prompt(n=2), continuation(index=2)),
    "resume.continuations[1].index": (
        prompt(),
        {"attempt": 1, "continuations": [pb.Continuation(), pb.Continuation()]},
    ),
    "resume.continuations[0].token_ids": (prompt(), continuation(token_ids=b"123")),
    "resume.continuations[0].token_ids ": (prompt(), continuation(token_ids=column(1000))),
    "resume.continuations[0].token_ids  ": (prompt(), continuation(token_ids=column(2**32 - 1))),
    "resume.continuations[0].token_ids   ": (
        prompt(stop=pb.StopConditions(max_tokens=2)),
        continuation(token_ids=column(5, 6, 7)),
    ),
    "resume.continuations[0].token_ids    ": (prompt(), continuation(token_ids=column(5, 2, 7))),
    "resume.continuations": (prompt(), continuation(has_ended=True)),
    "sampling.seed": (
        prompt(sampling=pb.SamplingParams(temperature=1.0)),
        continuation(token_ids=column(5)),
    ),
}


@pytest.mark.parametrize("field", WRONG)
async def test_what_no_call_can_have_given_is_refused_by_its_field(field: str):
    message, resume = WRONG[field]
    message.resume.CopyFrom(pb.Resume(**resume))
    with pytest.raises(InvalidRequest) as caught:
        await read(message)
    assert caught.value.field == field.strip()


async def test_an_output_behind_a_stop_string_is_refused(tokenizer: Tokenizer):
    ids = tokenizer.encode("an end of").tolist()
    message = prompt(stop=pb.StopConditions(stop_strings=["end"]))
    with pytest.raises(InvalidRequest, match="token 6 of it ends"):
        await read(resumed(message, ids), tokenizer)


@pytest.mark.parametrize(
    "fields", [{"fingerprint": "other"}, {"prompt_digest": prompt_digest(np.ones(3, np.int32))}]
)
async def test_another_model_or_another_tokenizer_refuses_to_go_on(fields: dict[str, Any]):
    with pytest.raises(ResumeMismatch) as caught:
        await read(resumed(prompt(), [9], **fields))
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.field == f"resume.{next(iter(fields))}"
    same = {"fingerprint": "f00d", "prompt_digest": prompt_digest(np.array(PROMPT, np.int32))}
    assert (await read(resumed(prompt(), [9], **same))).attempt == 1


# ---- the attempt before, and the queue


async def test_a_higher_attempt_takes_the_place_of_a_live_one_and_no_other_does():
    message = prompt(request_id="mine", stop=pb.StopConditions(max_tokens=40, ignore_eos=True))
    async with running() as engines:
        first = await read(message, model=engines.model, listener=engines.listeners.open())
        second, third = [
            await read(
                resumed(message, [9], attempt=attempt),
                model=engines.model,
                listener=engines.listeners.open(),
            )
            for attempt in (1, 1)
        ]
        engines.submit(first)
        engines.submit(second)
        assert first.listener.ended.popleft().error.reason == "CANCELLED"
        for late in (first, third):
            with pytest.raises(RequestExists):
                engines.submit(late)
        assert engines.find((), "mine") is second
        engines.cancel(second)
        assert engines.num_live == 0


def waiting(num_tokens: int = 500, **fields: Any) -> Request:
    request = make_request([1] * 3, READER, 1, **fields)
    for sequence in request.sequences:
        sequence.tokens = np.ones(num_tokens, np.int32)
    return request


def test_a_full_queue_takes_resumed_requests_up_to_a_bound_of_their_own():
    queue = WaitingQueue(max_sequences=1, max_tokens=5, max_resumed_tokens=1200)
    queue.submit(make_request([1] * 3, READER, 1))
    with pytest.raises(QueueFull):
        queue.submit(make_request([1] * 3, READER, 1))
    for _ in range(2):
        queue.submit(waiting(attempt=1))
    with pytest.raises(QueueFull, match="max_resumed_tokens=1200"):
        queue.submit(waiting(attempt=1))
    while queue.peek() is not None:
        queue.pop()
    queue.submit(waiting(attempt=1, n=9))  # however large, where no other waits
    assert len(queue) == 9


def test_many_short_outputs_do_not_fill_the_memory():
    queue = WaitingQueue(max_sequences=1, max_tokens=5, max_resumed_tokens=1200)
    for _ in range(4):
        queue.submit(waiting(4, attempt=1))
    with pytest.raises(QueueFull, match="1024 tokens of resumed requests wait and 256 more"):
        queue.submit(waiting(4, attempt=1))


def test_no_caller_fills_the_bound_of_resumed_requests_by_itself():
    queue = WaitingQueue(max_sequences=1, max_tokens=5, max_resumed_tokens=1600)
    for _ in range(2):
        queue.submit(waiting(attempt=1, caller=("one",)))
    with pytest.raises(QueueFull, match="of the flow one wait"):
        queue.submit(waiting(attempt=1, caller=("one",)))
    queue.submit(waiting(attempt=1, caller=("two",)))


def test_a_resumed_request_waits_in_the_line_since_it_was_first_sent():
    queue = WaitingQueue(max_sequences=9, max_tokens=99)
    older, newer = make_request([1], READER), make_request([1], READER)
    older.arrival_time, newer.arrival_time = 100.0, 103.0
    again = waiting(attempt=1, age_s=5.0, arrival_time=106.0)
    for request in (older, newer, again):
        queue.submit(request)
    assert [queue.pop().request for _ in iter(queue.peek, None)] == [older, again, newer]


async def test_an_age_beyond_ten_minutes_counts_as_ten_minutes():
    message = resumed(prompt(), [9])
    message.resume.age.FromSeconds(100_000)
    assert (await read(message)).age_s == MAX_AGE_S


async def test_a_full_router_reads_a_call_that_says_that_it_resumes_one():
    engines = FakeEngines()

    def check_room(*, is_resumed: bool = False) -> None:
        if not is_resumed:
            raise QueueFull("too much waits already")

    engines.check_room = check_room  # type: ignore[method-assign]
    engines.submit = lambda request: engines.arrivals.put_nowait(request)  # type: ignore[method-assign]
    async with connected(engines) as stub:
        assert error_details(await failure(stub.Generate(prompt()))).reason == "QUEUE_FULL"
        call = stub.Generate(resumed(prompt(), [9]), metadata=[RESUME_METADATA])
        [sequence] = (await engines.arrivals.get()).sequences
        assert sequence.num_resumed == 1
        engines.finish = None  # type: ignore[assignment]
        sequence.finish_reason = FinishReason.LENGTH
        sequence.request.listener.ended.append(sequence)
        sequence.request.listener.wake()
        assert [m.HasField("finish") for m in await responses(call)] == [True]


@pytest.mark.parametrize("num_stalled", [0, 1, 5])
async def test_one_that_took_routers_down_is_suspected_and_holds_nobody_up(num_stalled: int):
    message = resumed(prompt(n=2), [9], None, num_stalled=num_stalled, attempt=num_stalled + 1)
    [sequence] = (await read(message)).sequences
    if not num_stalled:
        assert sequence.suspicion is None
    else:
        assert sequence.suspicion is not None
        assert (sequence.suspicion.num_losses, sequence.suspicion.num_output_tokens) == (1, 1)


async def test_texts_of_long_outputs_are_made_apart_one_after_another_and_in_pieces(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """Several at once, or one in a whole, would hold the router's loop up."""
    running, at_once, fed = set[int](), list[int](), list[int]()
    replay, feed = resume.take_up, OutputText.feed

    def spied(request: Request, given: resume.Resume) -> None:
        running.add(id(request))
        at_once.append(len(running))
        replay(request, given)
        running.remove(id(request))

    def spied_feed(text: OutputText, ids: Any, **options: Any) -> Any:
        fed.append(len(ids))
        return feed(text, ids, **options)

    monkeypatch.setattr(messages, "take_up", spied)
    monkeypatch.setattr(OutputText, "feed", spied_feed)
    model = dataclasses.replace(MODEL, max_model_len=4000)
    message = prompt(output=pb.OutputOptions(text=True), stop=pb.StopConditions(max_tokens=3000))
    ids = tokenizer.encode("und so " * 300).tolist()
    requests = [read(resumed(message, ids), tokenizer, model=model) for _ in range(6)]
    for request in await asyncio.gather(*requests):
        assert request.sequences[0].num_resumed == len(ids) > 2 * resume.FED_LEN
    assert at_once == [1] * 6
    assert max(fed) == resume.FED_LEN
    assert sum(fed) == 6 * len(ids)


async def test_a_callers_flood_of_long_outputs_delays_anothers_by_one_of_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    taken_up: list[Any] = []
    monkeypatch.setattr(messages, "take_up", lambda request, _: taken_up.append(request.caller))
    model = dataclasses.replace(MODEL, max_model_len=4000)
    message = resumed(prompt(), tokenizer.encode("und so " * 300).tolist())
    callers = [("a",)] * 6 + [("b",)]
    await asyncio.gather(*[read(message, model=model, caller=caller) for caller in callers])
    assert taken_up.index(("b",)) <= 2
