"""The client hides the wire: these tests see only what a user of the library sees."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos.serving.v1 import serving_pb2 as pb
from protos.serving.v1 import serving_pb2_grpc
from protos.transport.errors import RpcError, abort_on_error
from protos.transport.limits import PortLimits
from router.api.constraints import build_grammar
from router.client import (
    Cancelled,
    Chat,
    Client,
    Completion,
    Delta,
    Many,
    Options,
    Overloaded,
    Rejected,
    TimedOut,
    TokenLogprob,
    Unavailable,
)
from router.client.client import _CHANNEL_OPTIONS
from router.client.messages import to_chat
from router.errors import ConstraintFailed, NotReady, QueueFull
from router.requests.request import FinishReason, OutputOptions, SamplingParams, StopConditions
from tests.router.support.calls import SAMPLING
from tests.router.support.fake_engines import (
    FakeEngines,
    byte_tokenizer,
    generation,
    listening,
    serve,
)
from tests.router.support.requests import scored


@asynccontextmanager
async def connected(engines: FakeEngines, folder: Path | None = None) -> AsyncIterator[Client]:
    tokenizer = None if folder is None else byte_tokenizer(folder)
    async with serve(engines, tokenizer) as target, Client(target) as client:
        yield client


@pytest.fixture(params=["call", "stream"])
async def either(
    request: pytest.FixtureRequest, engines: FakeEngines, tmp_path: Path
) -> AsyncIterator[Client | Many]:
    """A client, and a stream of it: both complete and generate, with the same results."""
    async with (
        connected(engines, tmp_path) as client,
        nullcontext(client) if request.param == "call" else client.many() as source,
    ):
        yield source


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


async def test_a_completion_is_all_tokens_and_how_they_ended(
    engines: FakeEngines, either: Client | Many
):
    completing = asyncio.create_task(either.complete([5, 6], max_tokens=9, request_id="mine"))
    [sequence] = (await engines.arrivals.get()).sequences
    engines.give(sequence, [10, 11])
    engines.give(sequence, [12])
    sequence.stop_token_id = 12
    engines.finish(sequence, FinishReason.STOP)

    completion = await completing
    assert (completion.request_id, completion.token_ids) == ("mine", [10, 11, 12])
    assert (completion.finish.reason, completion.finish.stop_token_id) == ("stop", 12)
    assert (completion.finish.stop_string, completion.finish.num_prompt_tokens) == (None, 2)
    assert 0 < completion.first_token_s <= completion.total_s


async def test_a_text_prompt_is_completed_with_text(engines: FakeEngines, either: Client | Many):
    engines.echoes = True
    completion = await either.complete("h€llo")
    assert completion.text == "h€llo"
    assert completion.prompt_token_ids == []
    assert completion.finish.reason == "length"


async def test_all_continuations_are_returned_by_index(engines: FakeEngines, either: Client | Many):
    completing = asyncio.create_task(either.complete_all([5], n=3))
    request = await engines.arrivals.get()
    for sequence in reversed(request.sequences):
        engines.give(sequence, [sequence.index] * 2)
        engines.finish(sequence)
    completions = [(completion.index, completion.token_ids) for completion in await completing]
    assert completions == [(index, [index] * 2) for index in range(3)]


async def test_an_answer_without_a_stream_is_the_same(engines: FakeEngines, tmp_path: Path):
    engines.echoes = True
    asked: Options = {"n": 2, "echo": True, "request_id": "mine", "timeout_s": 40}
    async with connected(engines, tmp_path) as client:
        streamed = await client.complete_all("h€llo", **asked)
        answers = await client.complete_unary("h€llo", **asked)
        with pytest.raises(Rejected) as caught:
            await client.complete_unary([5], n=65)
    assert caught.value.field == "n"
    for answer, other in zip(answers, streamed, strict=True):
        for name in ("request_id", "index", "text", "token_ids", "prompt_text"):
            assert getattr(answer, name) == getattr(other, name)
        assert (answer.index == 0, answer.text) == (bool(answer.prompt_text), "h€llo")


async def test_deltas_come_while_the_request_runs(engines: FakeEngines, either: Client | Many):
    async with aclosing(either.generate(np.array([5, 6]), request_id="mine")) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        [sequence] = (await engines.arrivals.get()).sequences
        engines.give(sequence, [10])
        assert await first == Delta(request_id="mine", token_ids=[10])
        engines.give(sequence, [11])
        assert (await anext(deltas)).token_ids == [11]
        engines.finish(sequence)
        [last] = [delta async for delta in deltas]
        assert last.finish is not None
        assert last.finish.num_completion_tokens == 2


async def test_log_probabilities_stand_beside_their_tokens_once(
    engines: FakeEngines, either: Client | Many
):
    asked: Options = {"logprobs": True, "prompt_logprobs": True, "top_logprobs": 2, "echo": True}
    asked["logprob_token_ids"] = [9]
    async with aclosing(either.generate([5, 6, 7], **asked)) as deltas:
        coming = asyncio.ensure_future(anext(deltas))
        [sequence] = (await engines.arrivals.get()).sequences
        sequence.prompt_logprobs += [scored(6, 6, 1), scored(7, 7, 1)]
        sequence.logprobs.append(scored(10, 10, 1))
        engines.give(sequence, [10])
        first = await coming
        sequence.logprobs.append(scored(11, 11, 1))
        engines.give(sequence, [11])
        engines.finish(sequence)
        [last] = [delta async for delta in deltas]
    assert [entry.token_id for entry in first.prompt_logprobs] == [6, 7]
    assert first.logprobs == [TokenLogprob(10, -1.25, ((10, -1.0), (1, -2.0)), (-2.5,))]
    assert (first.prompt_token_ids, last.prompt_token_ids) == ([5, 6, 7], [])
    assert (last.prompt_logprobs, [entry.token_id for entry in last.logprobs]) == ([], [11])


async def test_every_option_reaches_the_engine(engines: FakeEngines, either: Client | Many):
    engines.echoes = True
    await either.complete_all(
        [5],
        request_id="mine",
        model="tiny-moe",
        n=2,
        priority=4,
        timeout_s=40,
        **SAMPLING,
        logit_bias={9: 3.0},
        seed=77,
        max_tokens=6,
        min_tokens=2,
        stop_token_ids=[8],
        stop_strings=["."],
        ignore_eos=True,
        text=True,
        allowed_token_ids=[5, 6],
        bad_token_ids=[[5, 6]],
        skip_special_tokens=False,
        include_stop=True,
    )
    request = await engines.arrivals.get()
    assert (request.request_id, len(request.sequences), request.priority) == ("mine", 2, 4)
    assert request.deadline is not None
    assert request.sampling == SamplingParams(
        SAMPLING, logit_bias=((9, 3.0),), seed=77, allowed_ids=(5, 6), banned=((5, 6),)
    )
    assert request.stop == StopConditions(
        max_tokens=6, min_tokens=2, stop_token_ids=(8,), has_stop_strings=True
    )
    assert request.output == OutputOptions(text=True)


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        ("json_schema", '{"type": "null"}', '{"type": "null"}'),
        ("json_schema", True, '{"type": "object"}'),
        ("regex", "a+", "a+"),
        ("grammar", 'start: "a"', 'start: "a"'),
        ("choices", ["a", "b"], '["a", "b"]'),
    ],
)
async def test_constraints_reach_the_engine(
    engines: FakeEngines, either: Client | Many, kind: str, given: Any, text: str
):
    engines.echoes = True
    option: Any = {"json_object" if given is True else kind: given}
    await either.complete([5], max_tokens=1, after_token_ids=[7, 9], **option)
    request = await engines.arrivals.get()
    assert (request.grammar, request.grammar_after) == (build_grammar(kind, text), (7, 9))


async def test_a_chat_reaches_the_router_as_it_was_given(
    engines: FakeEngines, either: Client | Many
):
    call = {"id": "7", "function": {"name": "add", "arguments": {"y": 2, "x": 1}}}
    chat = Chat(
        messages=[
            {"role": "user", "content": "2+1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "7"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
        template_arguments={"thinks": False},
    )
    message = to_chat(chat)
    assert message.messages[1].tool_calls[0].arguments == '{"y": 2, "x": 1}'
    assert not message.messages[1].HasField("content")
    assert message.tools[0] == '{"type": "function", "function": {"name": "add"}}'
    assert message.template_arguments == '{"thinks": false}'
    assert not message.HasField("add_generation_prompt")
    with pytest.raises(Rejected, match="no chat template"):
        await either.complete(chat)


async def test_an_option_that_does_not_exist_is_a_mistake_at_once(either: Client | Many):
    with pytest.raises(ValueError, match="temprature"):
        await either.complete([5], temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("prompt", "options", "failure", "reason", "field"),
    [
        ([], {}, Rejected, "INVALID_REQUEST", "token_ids.ids"),
        ([5], {"n": 65}, Rejected, "INVALID_REQUEST", "n"),
        ([5], {"model": "other"}, Rejected, "MODEL_NOT_FOUND", "model"),
        ([5], {"timeout_s": 1e-3}, TimedOut, "DEADLINE_EXCEEDED", ""),
    ],
)
async def test_a_failure_says_what_kind_it_is(
    either: Client | Many,
    prompt: list[int],
    options: Any,
    failure: type,
    reason: str,
    field: str,
):
    with pytest.raises(failure) as caught:
        await either.complete(prompt, **options)
    assert (caught.value.reason, caught.value.field) == (reason, field)


async def test_an_overloaded_router_says_when_to_come_again(
    engines: FakeEngines, either: Client | Many
):
    engines.refusal = QueueFull("full", retry_delay_s=2.5)
    with pytest.raises(Overloaded, match="full") as caught:
        await either.complete([5])
    assert caught.value.retry_delay_s == 2.5
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_leaving_a_generator_cancels_its_request(engines: FakeEngines, either: Client | Many):
    async with aclosing(either.generate([5])) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        request = await engines.arrivals.get()
        engines.give(request.sequences[0], [10])
        await first
    while engines.live:
        await asyncio.sleep(0)


async def test_cancelling_a_task_cancels_its_request(engines: FakeEngines, either: Client | Many):
    completing = asyncio.create_task(either.complete([5]))
    await engines.arrivals.get()
    completing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await completing
    while engines.live:
        await asyncio.sleep(0)


async def test_cancel_by_id_fails_the_one_who_waits(engines: FakeEngines):
    async with connected(engines) as client:
        completing = asyncio.create_task(client.complete([5], request_id="mine"))
        await engines.arrivals.get()
        await client.cancel("mine")
        with pytest.raises(Cancelled) as cancelled:
            await completing
        with pytest.raises(Rejected, match="'mine'") as unknown:
            await client.cancel("mine")
    assert (cancelled.value.reason, unknown.value.reason) == ("CANCELLED", "REQUEST_NOT_FOUND")
    assert cancelled.value.request_id == "mine"


async def test_hundreds_of_requests_share_a_stream(engines: FakeEngines):
    engines.echoes = True
    async with connected(engines) as client, client.many() as many:
        prompts = [[index % 1000, 3] for index in range(500)]
        completions = await asyncio.gather(*[many.complete(prompt) for prompt in prompts])
        assert [completion.token_ids for completion in completions] == prompts


async def test_a_burst_of_calls_is_not_dropped():
    """gRPC by itself lets 1,000 calls wait for their handlers, and drops of those beyond."""
    engines = FakeEngines(max_listeners=2500)
    engines.echoes = True
    async with connected(engines) as client:
        completions = await asyncio.gather(*[client.complete([5]) for _ in range(2500)])
        assert all(completion.token_ids == [5] for completion in completions)


async def test_more_calls_than_a_connection_takes_open_another(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
):
    """gRPC by itself lets them wait for those that run, silently."""
    monkeypatch.setattr("router.client.client.MAX_CONNECTION_CALLS", 2)
    peers = set[str]()

    class Servicer(serving_pb2_grpc.GenerationServiceServicer):
        async def Generate(self, request: Any, context: Any) -> None:
            peers.add(context.peer())
            await asyncio.Event().wait()

        GenerateMany = Cancel = GetModel = GetStatus = None  # type: ignore[assignment]

    options = PortLimits(max_connection_streams=2).server_options()
    async with (
        listening(generation(Servicer()), options=options) as target,
        Client(target) as client,
    ):
        calls = [asyncio.create_task(client.complete([5])) for _ in range(5)]
        while len(peers) < 3:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        again = [asyncio.create_task(client.complete([5])) for _ in range(6)]
        await asyncio.sleep(0.1)
        assert len(peers) == 3, "a connection whose calls have ended has room again"
        for call in again:
            call.cancel()
        await asyncio.gather(*again, return_exceptions=True)


async def test_one_failure_on_a_stream_leaves_the_others_alone(engines: FakeEngines):
    engines.echoes = True
    async with connected(engines) as client, client.many() as many:
        results = await asyncio.gather(
            many.complete([5]), many.complete([5], n=65), many.complete([6]), return_exceptions=True
        )
        assert [type(result) for result in results] == [Completion, Rejected, Completion]


async def test_a_continuation_that_fails_fails_its_request_and_no_other(
    engines: FakeEngines, either: Client | Many
):
    failing = asyncio.create_task(either.complete_all([5], n=2))
    request = await engines.arrivals.get()
    other = asyncio.create_task(either.complete([6]))
    [sequence] = (await engines.arrivals.get()).sequences
    engines.fail(request.sequences[0], ConstraintFailed("too complex"))
    with pytest.raises(Rejected) as caught:
        await failing
    assert caught.value.reason == "CONSTRAINT_FAILED"
    is_live = request.is_live
    engines.cancel(request)
    engines.give(sequence, [7])
    engines.finish(sequence)
    completion = await other
    assert (completion.token_ids, completion.num_resumes, is_live) == ([7], 0, False)


class Scripted(serving_pb2_grpc.GenerationServiceServicer):
    """Answers the first request of each stream by a script, and keeps the stream open."""

    def __init__(self, *scripts: list[pb.GenerateManyResponse]) -> None:
        self._scripts = iter(scripts)

    async def GenerateMany(self, messages: Any, context: Any) -> None:
        await anext(messages)
        for message in next(self._scripts):
            await context.write(message)
        await anext(messages, None)

    Generate = Cancel = GetModel = GetStatus = None  # type: ignore[assignment]


def ended(tag: int) -> pb.GenerateManyResponse:
    finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH)
    last = pb.GenerateResponse(token_ids=[7], finish=finish)
    return pb.GenerateManyResponse(responses=[pb.TaggedResponse(tag=tag, response=last)])


@asynccontextmanager
async def scripted(*scripts: list[pb.GenerateManyResponse]) -> AsyncIterator[Many]:
    async with (
        listening(generation(Scripted(*scripts))) as target,
        Client(target) as client,
        client.many() as many,
    ):
        yield many


async def test_what_comes_under_a_tag_that_no_request_has_harms_none():
    late = pb.GenerateManyResponse(
        tags=np.array([99], "<u4").tobytes(),
        num_tokens=np.array([1], "<i4").tobytes(),
        token_ids=np.array([5], "<i4").tobytes(),
        errors=[pb.TaggedError(tag=99, code=grpc.StatusCode.INTERNAL.value[0])],
    )
    async with scripted([late, ended(99), ended(0)], [ended(1)]) as many:
        completion = await many.complete([5])
        assert (completion.token_ids, completion.num_resumes) == ([7], 0)


async def test_a_stream_whose_answers_make_no_sense_is_cancelled():
    """Its requests go on on another one, and would meet themselves."""
    async with scripted([pb.GenerateManyResponse(tags=bytes(4))], [ended(1)]) as many:
        completing = asyncio.create_task(many.complete([5]))
        while not many._streams:
            await asyncio.sleep(0)
        call = many._streams[0]._call
        assert (await completing).num_resumes == 1
        assert call.cancelled()


async def test_an_exception_in_the_block_cancels_the_stream(engines: FakeEngines):
    async with connected(engines) as client:
        many = client.many()

        async def fail_inside() -> None:
            async with many, asyncio.TaskGroup() as tasks:
                tasks.create_task(many.complete([5]))
                await engines.arrivals.get()
                raise RuntimeError("mine")

        with pytest.raises(ExceptionGroup) as caught:
            await fail_inside()
        assert [str(error) for error in caught.value.exceptions] == ["mine"]


async def test_a_broken_stream_fails_what_runs_and_what_comes_later_has_another(
    engines: FakeEngines,
):
    async with connected(engines) as client, client.many() as many:
        completing = asyncio.create_task(many.complete([5]))
        await engines.arrivals.get()
        breaks_the_rules = pb.GenerateManyRequest(tag=99)
        many._streams[0]._outgoing.put_nowait(breaks_the_rules)
        with pytest.raises(Rejected) as caught:
            await completing
        assert caught.value.field == "action"
        engines.echoes = True
        assert (await many.complete([5])).token_ids == [5]


async def test_the_model_and_the_status_come_as_they_were_sent(engines: FakeEngines):
    engines.groups = [
        pb.GroupStatus(group=0, state=pb.GROUP_STATE_FORMING, problem="executor 1: no answer"),
        pb.GroupStatus(group=1, state=pb.GROUP_STATE_READY, ranks=[pb.RankStatus(num_running=3)]),
    ]
    async with connected(engines) as client:
        assert await client.get_status() == engines.groups
        assert await client.get_model() == pb.GetModelResponse(
            name="tiny-moe",
            architecture="Qwen3MoeForCausalLM",
            fingerprint="f00d",
            vocab_size=1000,
            max_model_len=100,
            eos_token_ids=[2],
            has_tokenizer=False,
            supports_constraints=True,
            resumes=True,
        )


async def test_texts_and_tokens_are_each_others(engines: FakeEngines, tmp_path: Path):
    async with connected(engines, tmp_path) as client:
        tokens = await client.tokenize("h€llo")
        assert await client.count_tokens("h€llo") == len(tokens)
        assert await client.detokenize(tokens) == "h€llo"
    async with connected(engines) as client:
        with pytest.raises(Rejected, match="no tokenizer"):
            await client.tokenize("h€llo")


def test_a_token_that_no_call_can_bring_is_refused_without_being_shown():
    with pytest.raises(ValueError, match="token: need visible ASCII") as caught:
        Client("unix:nobody", token="secret\n")
    assert "secret" not in str(caught.value)


async def test_nobody_at_the_other_end_is_unavailable():
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable) as caught:
            await client.get_model()
        assert caught.value.reason == ""


class Flaky(serving_pb2_grpc.GenerationServiceServicer):
    """Refuses its first call."""

    def __init__(self, refusal: RpcError) -> None:
        self.refusal = refusal
        self.num_calls = 0

    async def _count(self, context: Any) -> None:
        self.num_calls += 1
        async with abort_on_error(context):
            if self.num_calls == 1:
                raise self.refusal

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        await self._count(context)
        return pb.GetModelResponse()

    async def Generate(self, request: Any, context: Any) -> None:
        await self._count(context)
        finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH)
        await context.write(pb.GenerateResponse(token_ids=[1], finish=finish))

    GenerateMany = Cancel = GetStatus = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "ask", [lambda client: client.get_model(), lambda client: client.complete([5])]
)
async def test_only_unavailable_is_sent_again_before_the_first_answer(ask: Any):
    for refusal, num_calls in ((NotReady("not yet"), 2), (QueueFull("full"), 1)):
        servicer = Flaky(refusal)
        async with listening(generation(servicer)) as target, Client(target) as client:
            with pytest.raises(Overloaded) if num_calls == 1 else nullcontext():
                await ask(client)
        assert servicer.num_calls == num_calls


def test_a_clients_pings_are_none_too_many_for_a_router():
    client, router = dict(_CHANNEL_OPTIONS), dict(PortLimits().server_options())
    interval_ms = int(client["grpc.keepalive_time_ms"])
    assert interval_ms >= 2 * router["grpc.http2.min_ping_interval_without_data_ms"]
    # Of pings that measure the way; while one is under way, there are no others.
    timeout_ms = int(client["grpc.keepalive_timeout_ms"])
    assert client["grpc.http2.ping_timeout_ms"] == interval_ms + timeout_ms
