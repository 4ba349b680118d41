"""Generation service: every token once and in order, one end, no request left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import error_details
from protos.transport.interceptors import Caller
from router.api import constraints, generate_many
from router.api.text import Tokenizer
from router.errors import ConstraintFailed, Moved, QueueFull, ShuttingDown
from router.requests.request import FinishReason, Request, Sequence
from tests.router.support.calls import connected, failure, prompt, responses
from tests.router.support.fake_engines import FakeEngines
from tests.router.support.requests import scored


@asynccontextmanager
async def generating(
    request: pb.GenerateRequest, tokenizer: Tokenizer | None = None
) -> AsyncIterator[tuple[FakeEngines, Any, list[Sequence]]]:
    """Runs a Generate call whose request has arrived."""
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        call = stub.Generate(request)
        yield engines, call, (await engines.arrivals.get()).sequences


async def test_tokens_come_as_they_are_made_and_the_last_message_says_how_it_ended():
    async with generating(prompt(request_id="mine")) as (engines, call, [sequence]):
        engines.give(sequence, [10, 11])
        first = await call.read()
        engines.give(sequence, [12])
        second = await call.read()
        sequence.stop_token_id, sequence.group, sequence.dp_rank = 2, 1, 3
        engines.give(sequence, [2])
        engines.finish(sequence, FinishReason.STOP)
        last = await call.read()

        assert await call.read() is grpc.aio.EOF
        assert [list(m.token_ids) for m in (first, second, last)] == [[10, 11], [12], [2]]
        assert [m.request_id for m in (first, second, last)] == ["mine"] * 3
        assert [m.HasField("finish") for m in (first, second, last)] == [False, False, True]
        finish = last.finish
        assert finish.reason == pb.FINISH_REASON_STOP
        assert (finish.stop_token_id, finish.HasField("stop_string")) == (2, False)
        assert (finish.num_prompt_tokens, finish.num_completion_tokens) == (3, 4)
        assert (finish.group, finish.dp_rank) == (1, 3)


async def test_the_finish_tells_what_the_request_took():
    async with generating(prompt()) as (engines, call, [sequence]):
        request = sequence.request
        progress, arrival = sequence.progress, request.arrival_time
        progress.start_time, progress.first_token_time = arrival + 1, arrival + 2.5
        progress.end_time = arrival + 4
        progress.num_cached_tokens, progress.num_preemptions = 2, 1
        progress.num_drafts, progress.num_accepted_drafts = 9, 4
        engines.give(sequence, [9])
        engines.finish(sequence)
        [last] = await responses(call)

        finish = last.finish
        assert finish.reason == pb.FINISH_REASON_LENGTH
        times = (finish.queue_duration, finish.first_token_duration, finish.total_duration)
        assert [time.ToMilliseconds() for time in times] == [1000, 2500, 4000]
        assert (finish.num_cached_tokens, finish.num_preemptions) == (2, 1)
        assert (finish.num_drafts, finish.num_accepted_drafts) == (9, 4)


@pytest.mark.parametrize("request_id", ["", "mine"])
async def test_a_call_that_fails_says_which_request_it_was(request_id: str):
    async with generating(prompt(request_id=request_id)) as (engines, call, [sequence]):
        engines.cancel(sequence.request)
        details = error_details(await failure(call))
        assert details.reason == "CANCELLED"
        assert details.request_id == sequence.request.request_id
        assert details.request_id == request_id or not request_id


async def test_what_came_since_the_last_wake_is_one_message():
    async with generating(prompt()) as (engines, call, [sequence]):
        for token_id in range(50):
            engines.give(sequence, [token_id])
        engines.finish(sequence)
        [message] = await responses(call)
        assert list(message.token_ids) == list(range(50))


async def test_a_text_prompt_is_answered_in_whole_characters(tokenizer: Tokenizer):
    async with generating(pb.GenerateRequest(text="hi"), tokenizer) as (engines, call, [sequence]):
        assert sequence.request.prompt.tolist() == tokenizer.encode("hi").tolist()
        pieces = []
        for token_id in tokenizer.encode("é🚀!").tolist():
            engines.give(sequence, [token_id])
            pieces.append((await call.read()).text)
        engines.give(sequence, tokenizer.encode("é").tolist()[:1])
        engines.finish(sequence)
        pieces += [message.text for message in await responses(call)]
        assert pieces == ["", "é", "", "", "", "🚀", "!", "\N{REPLACEMENT CHARACTER}"]


async def test_the_prompt_is_echoed_once_on_the_first_response_of_the_first_continuation(
    tokenizer: Tokenizer,
):
    message = pb.GenerateRequest(text="hi", n=2, output=pb.OutputOptions(echo=True))
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        call = stub.Generate(message)
        first, second = (await engines.arrivals.get()).sequences
        engines.give(second, [9])
        answers = [await call.read()]
        for token_id in (8, 9):
            engines.give(first, [token_id])
            answers.append(await call.read())
        for sequence in (first, second):
            engines.finish(sequence)
        answers += await responses(call)
        echoes = [(answer.prompt_text, list(answer.prompt_token_ids)) for answer in answers]
        assert echoes == [("", []), ("hi", tokenizer.encode("hi").tolist()), *[("", [])] * 3]


@pytest.mark.parametrize(("wants_text", "text"), [(True, "one "), (False, "")])
async def test_text_ends_before_the_stop_string_and_tokens_after_it(
    wants_text: bool, text: str, tokenizer: Tokenizer
):
    stop, output = pb.StopConditions(stop_strings=["END"]), pb.OutputOptions(text=wants_text)
    message = prompt(stop=stop, output=output)
    async with generating(message, tokenizer) as (engines, call, [sequence]):
        for piece in ("one E", "ND"):
            engines.give(sequence, tokenizer.encode(piece))
        messages = await responses(call)
        assert "".join(message.text for message in messages) == text
        assert sum(len(message.token_ids) for message in messages) == len("one END")
        assert messages[-1].finish.stop_string == "END"


async def test_a_continuation_that_fails_ends_the_others_for_its_own_reason():
    async with generating(prompt(n=3)) as (engines, call, sequences):
        engines.give(sequences[2], [9])
        engines.fail(sequences[1], ConstraintFailed("too complex"))
        assert list((await call.read()).token_ids) == [9]
        assert error_details(await failure(call)).reason == "CONSTRAINT_FAILED"
        await engines.idle()
        assert {type(sequence.error) for sequence in sequences} == {ConstraintFailed}


@pytest.mark.parametrize("text", ["é", "END"])
async def test_a_request_that_breaks_off_keeps_back_what_may_become_other_text(
    text: str, tokenizer: Tokenizer
):
    stop, output = pb.StopConditions(stop_strings=["END"]), pb.OutputOptions(text=True)
    async with generating(prompt(stop=stop, output=output), tokenizer) as (engines, call, [it]):
        engines.give(it, tokenizer.encode(text)[:1])
        engines.cancel(it.request, ShuttingDown("it goes on at another router"))
        last = await call.read()
        assert (len(last.token_ids), last.text) == (1, "")
        await failure(call)


async def test_the_deadline_of_the_call_is_the_deadline_of_the_request():
    engines = FakeEngines()
    async with connected(engines) as stub:
        call = stub.Generate(prompt(), timeout=50)
        request = await engines.arrivals.get()
        assert request.deadline is not None
        assert 0 < request.deadline - request.arrival_time < 51  # gRPC rounds up
        call.cancel()


async def test_a_call_whose_deadline_passes_leaves_nothing_behind():
    engines = FakeEngines()
    async with connected(engines) as stub:
        error = await failure(stub.Generate(prompt(), timeout=0.01))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await engines.idle()


async def test_a_call_too_many_is_told_when_to_come_again():
    engines = FakeEngines(max_listeners=1)
    async with connected(engines) as stub:
        call = stub.Generate(prompt())
        await engines.arrivals.get()
        error = await failure(stub.Generate(prompt()))
        assert error_details(error).reason == "QUEUE_FULL"
        assert error_details(error).retry_delay_s is not None
        call.cancel()


async def test_before_a_group_has_formed_only_the_status_is_there():
    engines = FakeEngines(model=None)
    engines.groups = [pb.GroupStatus(state=pb.GROUP_STATE_FORMING, problem="no answer")]
    async with connected(engines) as stub:
        for call in (stub.Generate(prompt()), stub.GetModel(pb.GetModelRequest())):
            error = await failure(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error_details(error).reason == "NOT_READY"
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert (status.version, list(status.groups)) == ("1.2.3", engines.groups)


# Complete


async def test_a_whole_answer_has_all_that_a_stream_would_have_brought(tokenizer: Tokenizer):
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        output = pb.OutputOptions(logprobs=True)
        call = stub.Complete(pb.GenerateRequest(text="hi", n=2, output=output, request_id="mine"))
        second, first = reversed((await engines.arrivals.get()).sequences)
        for sequence, pieces in ((second, ["no"]), (first, ["o", "k é"])):
            for piece in pieces:
                token_ids = tokenizer.encode(piece)
                sequence.logprobs += [scored(token_id) for token_id in token_ids.tolist()]
                engines.give(sequence, token_ids)
                while sequence.num_taken < len(sequence.tokens):
                    await asyncio.sleep(0)  # until the call has taken them
            engines.finish(sequence)
        one, other = (await call).continuations
        assert (one.request_id, one.index, one.text) == ("mine", 0, "ok é")
        assert list(one.token_ids) == tokenizer.encode("ok é").tolist()
        assert [entry.token_id for entry in one.logprobs] == list(one.token_ids)
        assert one.finish.num_completion_tokens == len(one.token_ids)
        assert (other.index, other.text, other.finish.num_completion_tokens) == (1, "no", 2)


async def test_a_whole_answer_that_fails_fails_as_a_stream_does():
    engines = FakeEngines()
    async with connected(engines) as stub:
        error = await failure(stub.Complete(prompt(n=65)))
        assert error_details(error).field == "n"

        call = stub.Complete(prompt(request_id="mine"))
        request = await engines.arrivals.get()
        engines.give(request.sequences[0], [9])
        engines.cancel(request)
        details = error_details(await failure(call))
        assert (details.reason, details.request_id) == ("CANCELLED", "mine")

        call = stub.Complete(prompt())
        await engines.arrivals.get()
        call.cancel()
        await engines.idle()


# GenerateMany


@dataclass
class Stream:
    """The caller's end of a GenerateMany stream."""

    engines: FakeEngines
    call: Any

    async def start(self, tag: int, request: pb.GenerateRequest) -> Request:
        await self.call.write(pb.GenerateManyRequest(tag=tag, start=request))
        return await self.engines.arrivals.get()

    async def send(self, **fields: Any) -> None:
        await self.call.write(pb.GenerateManyRequest(**fields))

    async def read(self) -> Any:
        return await self.call.read()

    async def end(self) -> None:
        """Half-closes the stream, on which nothing is left to come."""
        await self.call.done_writing()
        assert await self.read() is grpc.aio.EOF


@asynccontextmanager
async def streaming(
    tokenizer: Tokenizer | None = None,
) -> AsyncIterator[tuple[FakeEngines, Stream]]:
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        yield engines, Stream(engines, stub.GenerateMany())


def columns(message: pb.GenerateManyResponse) -> dict[int, list[int]]:
    tags = np.frombuffer(message.tags, "<u4").tolist()
    num_tokens = np.frombuffer(message.num_tokens, "<i4").tolist()
    token_ids = np.frombuffer(message.token_ids, "<i4").tolist()
    assert sum(num_tokens) == len(token_ids)
    return {
        tag: [token_ids.pop(0) for _ in range(count)]
        for tag, count in zip(tags, num_tokens, strict=True)
    }


async def test_plain_requests_share_the_columns_of_one_message():
    async with streaming() as (engines, stream):
        one = await stream.start(7, prompt())
        other = await stream.start(2**32 - 1, prompt())
        engines.give(one.sequences[0], [10, 11])
        engines.give(other.sequences[0], [20])
        message = await stream.read()
        assert columns(message) == {7: [10, 11], 2**32 - 1: [20]}
        assert not message.responses

        engines.give(one.sequences[0], [12])
        engines.finish(one.sequences[0])
        engines.give(other.sequences[0], [21])
        message = await stream.read()
        assert columns(message) == {2**32 - 1: [21]}
        [last] = message.responses
        assert (last.tag, list(last.response.token_ids)) == (7, [12])
        assert last.response.finish.num_completion_tokens == 3

        engines.finish(other.sequences[0])
        message = await stream.read()
        assert [last.tag for last in message.responses] == [2**32 - 1]
        assert not message.responses[0].response.token_ids
        await stream.end()


async def test_whatever_asks_for_more_than_tokens_is_answered_in_responses(tokenizer: Tokenizer):
    async with streaming(tokenizer) as (engines, stream):
        text = await stream.start(1, pb.GenerateRequest(text="hi"))
        two = await stream.start(2, prompt(n=2))
        engines.give(text.sequences[0], tokenizer.encode("ok"))
        engines.give(two.sequences[1], [9])
        message = await stream.read()
        assert columns(message) == {}
        [first, second] = message.responses
        assert (first.tag, first.response.text) == (1, "ok")
        assert (second.tag, second.response.index) == (2, 1)

        for sequence in (*text.sequences, *two.sequences):
            engines.finish(sequence)
        message = await stream.read()
        finished = [(last.tag, last.response.index) for last in message.responses]
        assert finished == [(1, 0), (2, 0), (2, 1)]
        await stream.end()


async def test_a_refused_request_leaves_the_stream_open():
    async with streaming() as (engines, stream):
        await stream.send(tag=1, start=prompt(n=65))
        [error] = (await stream.read()).errors
        assert (error.tag, error.code) == (1, code_pb2.INVALID_ARGUMENT)
        assert (error.reason, error.field) == ("INVALID_REQUEST", "n")
        assert (dict(error.metadata), len(error.request_id)) == ({"value": "65", "limit": "64"}, 32)

        engines.refusal = QueueFull("full", retry_delay_s=1.5)
        await stream.send(tag=1, start=prompt())
        [error] = (await stream.read()).errors
        assert (error.code, error.retry_delay.ToMilliseconds()) == (
            code_pb2.RESOURCE_EXHAUSTED,
            1500,
        )

        engines.refusal = None
        request = await stream.start(1, prompt())
        engines.finish(request.sequences[0])
        [last] = (await stream.read()).responses
        assert last.tag == 1
        await stream.end()


async def test_more_refusals_than_may_wait_all_arrive():
    async with streaming() as (_, stream):
        for tag in range(600):
            await stream.send(tag=tag, start=prompt(n=65))
        await stream.call.done_writing()
        tags = [error.tag for message in await responses(stream.call) for error in message.errors]
        assert tags == list(range(600))


async def test_a_request_that_fails_is_told_under_its_tag_once():
    async with streaming() as (engines, stream):
        request = await stream.start(4, prompt(n=3))
        engines.finish(request.sequences[0])
        engines.cancel(request)
        message = await stream.read()
        assert [last.response.index for last in message.responses] == [0]
        [error] = message.errors
        assert (error.tag, error.reason) == (4, "CANCELLED")
        assert error.request_id == request.request_id
        await stream.end()


async def test_a_continuation_that_fails_ends_its_request_and_nothing_more_comes_under_the_tag():
    async with streaming() as (engines, stream):
        request = await stream.start(4, prompt(n=3))
        engines.give(request.sequences[2], [9])
        engines.fail(request.sequences[1], ConstraintFailed("too complex"))
        message = await stream.read()
        came = [(each.response.index, list(each.response.token_ids)) for each in message.responses]
        assert came == [(2, [9])]
        [error] = message.errors
        assert (error.tag, error.reason) == (4, "CONSTRAINT_FAILED")
        assert not request.is_live
        again = await stream.start(4, prompt())
        engines.finish(again.sequences[0])
        assert [each.tag for each in (await stream.read()).responses] == [4]
        await stream.end()


async def test_cancelling_a_tag_is_answered_under_it():
    async with streaming() as (_, stream):
        await stream.start(4, prompt())
        await stream.send(tag=3, cancel=pb.CancelTag())  # nobody's; not answered
        await stream.send(tag=4, cancel=pb.CancelTag())
        message = await stream.read()
        assert [(error.tag, error.code) for error in message.errors] == [(4, code_pb2.CANCELLED)]
        await stream.end()


async def test_what_is_new_of_many_requests_is_no_message_that_is_too_long_for_a_client(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(generate_many, "FULL_BYTES", 1)
    async with streaming() as (engines, stream):
        ended = [await stream.start(tag, prompt(n=2)) for tag in (1, 2)]
        running = await stream.start(3, prompt(n=2))
        for sequence in (*ended[0].sequences, *ended[1].sequences):
            engines.finish(sequence)
        for sequence in running.sequences:
            engines.give(sequence, [9])
        came = []
        for _ in range(6):
            [each] = (await stream.read()).responses
            came.append((each.tag, each.response.index))
        assert came == [(tag, index) for tag in (1, 2, 3) for index in (0, 1)]
        await stream.call.done_writing()
        for sequence in running.sequences:
            engines.finish(sequence)
        for index in (0, 1):
            [each] = (await stream.read()).responses
            assert (each.response.index, each.response.HasField("finish")) == (index, True)
        assert await stream.read() is grpc.aio.EOF


async def test_half_closing_lets_running_requests_finish():
    async with streaming() as (engines, stream):
        request = await stream.start(1, prompt())
        await stream.call.done_writing()
        engines.give(request.sequences[0], [8])
        assert columns(await stream.read()) == {1: [8]}
        engines.finish(request.sequences[0])
        assert len((await stream.read()).responses) == 1
        assert await stream.read() is grpc.aio.EOF


async def test_half_closing_an_idle_stream_ends_it():
    async with streaming() as (_, stream):
        await stream.end()


async def test_dropping_the_stream_cancels_all_its_requests():
    async with streaming() as (engines, stream):
        await stream.start(1, prompt())
        await stream.start(2, prompt(n=2))
        stream.call.cancel()
        await engines.idle()


@pytest.mark.parametrize(
    ("message", "field"),
    [(pb.GenerateManyRequest(tag=1, start=prompt()), "tag"), (pb.GenerateManyRequest(), "action")],
)
async def test_a_message_that_no_tag_can_answer_ends_the_stream(
    message: pb.GenerateManyRequest, field: str
):
    async with streaming() as (engines, stream):
        await stream.start(1, prompt())
        await stream.call.write(message)
        error = await failure(stream.call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_details(error).field == field
        await engines.idle()
    assert +engines.measures.refused == {"INVALID_REQUEST": 1}


async def test_a_stream_to_a_router_that_shuts_down_is_refused_and_counted():
    engines = FakeEngines()
    async with connected(engines) as stub:
        open_before = stub.GenerateMany(iter(()))
        assert await responses(open_before) == []
        engines.shut_down()
        error = await failure(stub.GenerateMany())
        assert error_details(error).reason == "SHUTTING_DOWN"
    assert +engines.measures.refused == {"SHUTTING_DOWN": 1}


async def test_an_idle_stream_that_a_shutdown_ends_is_not_one_that_was_refused():
    engines = FakeEngines()
    async with connected(engines) as stub:
        call = stub.GenerateMany()
        while engines.listeners.num_free == 8:
            await asyncio.sleep(0)  # until the stream is open
        engines.shut_down()
        error = await failure(call)
        assert error_details(error).reason == "SHUTTING_DOWN"
    assert +engines.measures.refused == {}


async def test_a_stream_to_a_router_that_stands_by_is_refused_so_that_a_proxy_opens_it_elsewhere():
    engines = FakeEngines()
    engines.refusal = Moved()
    async with connected(engines) as stub:
        call = stub.GenerateMany(iter([pb.GenerateManyRequest(tag=1, start=prompt())]))
        assert error_details(await failure(call)).reason == "MOVED"
    assert +engines.measures.refused == {"MOVED": 1}


async def test_a_router_that_stands_by_cancels_what_it_has_and_sends_on_for_what_it_has_not():
    engines = FakeEngines()
    async with connected(engines) as stub:
        call = stub.Generate(prompt(request_id="mine"))
        await engines.arrivals.get()
        engines.refusal = Moved()
        await stub.Cancel(pb.CancelRequest(request_id="mine"))
        assert error_details(await failure(call)).reason == "CANCELLED"
        error = await failure(stub.Cancel(pb.CancelRequest(request_id="mine")))
        assert (error.code(), error_details(error).reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "MOVED",
        )


async def test_a_stream_to_a_router_whose_groups_were_taken_ends_behind_its_requests():
    async with streaming() as (engines, stream):
        request = await stream.start(1, prompt())
        engines.refusal = Moved()
        engines.listeners.wake_all()
        await asyncio.sleep(0)
        engines.cancel(request, Moved())
        [error] = (await stream.read()).errors
        assert (error.tag, error.reason) == (1, "MOVED")
        assert error_details(await failure(stream.call)).reason == "MOVED"


async def test_a_tag_may_be_used_again_once_its_request_has_ended():
    async with streaming() as (engines, stream):
        for _ in range(3):
            request = await stream.start(1, prompt())
            engines.finish(request.sequences[0])
            assert [last.tag for last in (await stream.read()).responses] == [1]
        await stream.end()


def constrained() -> pb.GenerateRequest:
    return prompt(constraint=pb.Constraint(regex="a"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Grammars are built, or fail to be, once this is set."""
    are_built = asyncio.Event()

    async def grammar_of(kind: str, text: str, caller: Caller) -> str:
        await are_built.wait()
        return f"{kind}: {text}"

    monkeypatch.setattr(constraints._kept, "grammar_of", grammar_of)
    return are_built


async def test_a_grammar_that_is_being_built_holds_up_no_other_request_of_its_stream(
    builds: asyncio.Event,
):
    async with streaming() as (engines, stream):
        await stream.send(tag=1, start=constrained())
        plain = await stream.start(2, prompt())
        engines.finish(plain.sequences[0])
        assert [each.tag for each in (await stream.read()).responses] == [2]
        await stream.call.done_writing()
        builds.set()
        request = await engines.arrivals.get()
        assert request.grammar == "regex: a"
        engines.finish(request.sequences[0])
        assert [each.tag for each in (await stream.read()).responses] == [1]
        assert await stream.read() is grpc.aio.EOF


async def test_a_request_that_is_cancelled_while_its_grammar_is_built_is_answered_so_at_once(
    builds: asyncio.Event,
):
    async with streaming() as (engines, stream):
        for _ in range(2):  # the tag is free again
            start = constrained()
            start.request_id = "mine"
            await stream.send(tag=1, start=start)
            await stream.send(tag=1, cancel=pb.CancelTag())
            [error] = (await stream.read()).errors
            told = error.tag, error.code, error.request_id
            assert told == (1, code_pb2.CANCELLED, "mine")
        await stream.end()
        assert engines.arrivals.empty()


async def test_a_tag_whose_grammar_is_being_built_is_in_use(builds: asyncio.Event):
    async with streaming() as (engines, stream):
        await stream.send(tag=1, start=constrained())
        await stream.send(tag=1, start=prompt())
        error = await failure(stream.call)
        assert (error.code(), error_details(error).field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "tag",
        )
        builds.set()
        await engines.idle()
        assert engines.arrivals.empty()


async def test_a_grammar_that_fails_as_nobody_expected_ends_its_stream(
    monkeypatch: pytest.MonkeyPatch,
):
    async def grammar_of(kind: str, text: str, caller: Caller) -> str:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(constraints._kept, "grammar_of", grammar_of)
    async with streaming() as (engines, stream):
        await stream.start(1, prompt())
        await stream.send(tag=2, start=constrained())
        assert "unexpected" in str((await failure(stream.call)).details())
        await engines.idle()


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_a_call_does_not_wait_for_a_grammar_longer_than_its_request_has_time(
    method: str, builds: asyncio.Event
):
    engines = FakeEngines()
    async with connected(engines) as stub:
        start = constrained()
        start.timeout.FromMilliseconds(1)
        error = await failure(getattr(stub, method)(start))
        assert error_details(error).reason == "DEADLINE_EXCEEDED"
        await engines.idle()
        assert engines.measures.refused["DEADLINE_EXCEEDED"] == 1
        assert engines.arrivals.empty()


@pytest.mark.parametrize("method", ["Generate", "Complete", "GenerateMany"])
async def test_a_request_is_cancelled_by_its_id_while_its_grammar_is_built(
    method: str, monkeypatch: pytest.MonkeyPatch
):
    is_building = asyncio.Event()

    async def grammar_of(kind: str, text: str, caller: Caller) -> str:
        is_building.set()
        return await asyncio.Future()

    monkeypatch.setattr(constraints._kept, "grammar_of", grammar_of)
    engines, start = FakeEngines(), constrained()
    start.request_id = "mine"
    async with connected(engines) as stub:
        is_many = method == "GenerateMany"
        call = stub.GenerateMany() if is_many else getattr(stub, method)(start)
        if is_many:
            await call.write(pb.GenerateManyRequest(tag=1, start=start))
        await is_building.wait()
        nobodys = stub.Complete(constrained())
        error = await failure(stub.Cancel(pb.CancelRequest()))  # not that one's: it has no id
        assert error_details(error).reason == "REQUEST_NOT_FOUND"
        nobodys.cancel()
        await stub.Cancel(pb.CancelRequest(request_id="mine"))
        if is_many:
            [error] = (await call.read()).errors
            assert (error.tag, error.reason) == (1, "CANCELLED")
            await call.done_writing()
        else:
            assert error_details(await failure(call)).reason == "CANCELLED"
        await engines.idle()
        assert engines.arrivals.empty()
