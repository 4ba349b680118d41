"""Gateway: OpenAI's HTTP API by a real `smg` in front of the router."""

import asyncio
import http.client
import importlib.util
import json
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from deploy.local.demo import idle_group
from deploy.local.demo_tasks import Problem, problems, rev, solved_lines, token_ids
from deploy.local.launch import DEMO_MODEL, LocalStack
from deploy.local.ports import held_port
from deploy.local.processes import Process
from router.client import Client
from tests.e2e.support.logs import scraped
from tests.e2e.support.stacks import is_paused_at_work, resume
from tests.router.support.block_table import BlockTable
from tests.support.scraping import scrape

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None,
    reason="the package smg is not in the environment; there is none for this platform",
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS_TOKENS = 900  # more than any of these tests has the patience for
NUM_READ = 4  # lines of a stream, before its reader goes away


class Gateway:
    """A running smg, called as its users call it.

    Attributes:
        metrics_address: Where it tells its own numbers.
    """

    def __init__(self, port: int, metrics_address: str) -> None:
        self.port = port
        self.metrics_address = metrics_address

    async def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        """Returns the answer to a request that wants no stream."""
        status, answer = await self._call(path, fields)
        assert status == 200, answer
        return json.loads(answer)

    async def refusal(self, path: str, **fields: Any) -> tuple[int, str]:
        status, answer = await self._call(path, fields)
        return status, json.loads(answer)["error"]["message"]

    async def events(self, path: str, is_streamed: bool, **fields: Any) -> list[dict[str, Any]]:
        """Returns what comes of a request: the one answer, or all events of a stream, usage last."""
        if not is_streamed:
            return [await self.ask(path, **fields)]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        _, answer = await self._call(path, fields | options)
        *events, done = [
            line.removeprefix("data: ") for line in answer.split("\n\n") if line.strip()
        ]
        assert done == "[DONE]", done
        return [json.loads(event) for event in events]

    async def answers(self, path: str, is_streamed: bool, **fields: Any) -> dict[int, str]:
        """Returns the text of each choice, however it comes."""
        texts: dict[int, str] = {}
        for event in await self.events(path, is_streamed, **fields):
            for choice in event["choices"]:
                part = choice.get("delta") or choice.get("message") or choice
                text = part.get("text") or part.get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + text
        return texts

    def connect(self, path: str, fields: dict[str, Any]) -> http.client.HTTPConnection:
        """Sends a request and returns the connection; nothing is read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {"model": DEMO_MODEL.name, "temperature": 0} | fields
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    async def _call(self, path: str, fields: dict[str, Any]) -> tuple[int, str]:
        """Returns the status and the whole body of the response."""

        def call() -> tuple[int, str]:
            with closing(self.connect(path, fields)) as connection:
                response = connection.getresponse()
                return response.status, response.read().decode()

        return await asyncio.to_thread(call)


@asynccontextmanager
async def started(address: str, log_path: Path, *args: str) -> AsyncIterator[Gateway]:
    """Runs the README's command, on free ports, until the end of the block."""
    with held_port() as port, held_port() as prometheus_port:
        command = [
            *("-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", f"grpc://{address}", "--policy", "cache_aware"),
            *("--history-backend", "none", "--health-check-interval-secs", "5"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus_port)),
            *("--log-level", "warn", *args),
        ]
        process = Process("smg", command, log_path=log_path, env={})
        try:
            gateway = Gateway(port, f"127.0.0.1:{prometheus_port}")
            async with asyncio.timeout(120):
                while not await _answers(gateway):
                    assert not process.has_ended, process.log_tail
                    await asyncio.sleep(0.05)
            yield gateway
        finally:
            await process.kill()


async def _answers(gateway: Gateway) -> bool:
    try:
        await gateway.ask(COMPLETIONS, prompt="\n1+1=", max_tokens=4)
    except (OSError, AssertionError):  # it does not listen yet, or has not found the router
        return False
    return True


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(
    stack: LocalStack, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """Without a copy of the model: it asks the router for the tokenizer."""
    log_path = tmp_path_factory.mktemp("smg") / "smg.log"
    async with started(stack.address, log_path) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
async def _leaves_nothing_behind(client: Client) -> AsyncIterator[None]:
    yield
    async with asyncio.timeout(120):
        group = await idle_group(client)
    assert group.num_waiting == 0


def fields_of(path: str, problem: Problem) -> dict[str, Any]:
    """The demo model's chat template puts the newline before what a user says."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": problem.prompt.removeprefix("\n")}]}
    return {"prompt": problem.prompt}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_choice_of_many_problems_at_once_is_right(
    gateway: Gateway, path: str, is_streamed: bool
):
    asked = [(problem, 1 + number % 2) for number, problem in enumerate(problems(11, 12))]
    answers = await asyncio.gather(
        *[
            gateway.answers(path, is_streamed, n=n, max_tokens=16, **fields_of(path, problem))
            for problem, n in asked
        ]
    )

    assert answers == [dict.fromkeys(range(n), problem.answer) for problem, n in asked]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stop_string_ends_the_text_and_the_work(gateway: Gateway, path: str):
    fields = fields_of(path, rev("abacus")) | {"stop": ["cab"], "ignore_eos": True}
    whole = await gateway.ask(path, max_tokens=ENDLESS_TOKENS, **fields)
    *_, last, usage = await gateway.events(path, True, max_tokens=ENDLESS_TOKENS, **fields)

    choice = whole["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == "su"
    assert [c["finish_reason"] for c in (choice, last["choices"][0])] == ["stop", "stop"]
    assert [u["usage"]["completion_tokens"] for u in (whole, usage)] == [len("sucab")] * 2
    assert await gateway.answers(path, True, max_tokens=ENDLESS_TOKENS, **fields) == {0: "su"}


async def test_log_probabilities_are_those_of_our_own_api(gateway: Gateway, client: Client):
    ours = await client.complete("\n17+25=", max_tokens=16, logprobs=True, top_logprobs=2)
    fields = {"messages": [{"role": "user", "content": "17+25="}], "max_tokens": 16}
    fields |= {"logprobs": True, "top_logprobs": 2}
    whole = await gateway.ask(CHAT, **fields)
    events = await gateway.events(CHAT, True, **fields)

    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    # smg leaves out the token that ended the answer, unless it comes in one message with others.
    assert [entry["token"] for entry in streamed[2:]] in ([], ["\n"])
    for entries in (whole["choices"][0]["logprobs"]["content"], streamed[:2]):
        assert [entry["token"] for entry in entries] == ["4", "2"]
        expected = [entry.logprob for entry in ours.logprobs[:2]]
        assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-4)
        for entry, own in zip(entries, ours.logprobs, strict=False):
            top = [top["logprob"] for top in entry["top_logprobs"]]
            assert top == pytest.approx([logprob for _, logprob in own.top], abs=1e-3)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_asking_completions_for_log_probabilities_changes_no_answer(
    gateway: Gateway, is_streamed: bool
):
    """smg passes the wish on, and leaves out what comes of it."""
    fields = {"prompt": "\n17+25=", "max_tokens": 16, "logprobs": 2, "n": 2}
    answers = await gateway.answers(COMPLETIONS, is_streamed, **fields)

    assert answers == {0: "42", 1: "42"}


async def test_a_prompt_of_token_ids_is_answered_at_smgs_own_path(gateway: Gateway):
    prompt = token_ids("\n17+25=")
    sampling = {"temperature": 0, "max_new_tokens": 16}
    [answer] = await gateway.ask("/generate", input_ids=prompt, sampling_params=sampling)

    assert answer["text"] == "42"
    assert answer["output_ids"] == token_ids("42\n")
    assert answer["meta_info"]["prompt_tokens"] == len(prompt)


async def test_a_seed_makes_sampling_repeatable(gateway: Gateway):
    fields = {"prompt": "\nrev ", "max_tokens": 24, "temperature": 1.5, "ignore_eos": True}
    texts = [
        await gateway.answers(COMPLETIONS, False, seed=seed, n=2, **fields) for seed in (7, 7, 8)
    ]

    assert texts[0] == texts[1]
    assert len({text for answers in texts for text in answers.values()}) == 4


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_usage_counts_what_came_from_the_prefix_cache(
    gateway: Gateway, is_streamed: bool
):
    prompt = solved_lines(12 + is_streamed, 200) + "\n17+25="
    usages = []
    for _ in range(2):
        events = await gateway.events(COMPLETIONS, is_streamed, prompt=prompt, max_tokens=16)
        usages.append(events[-1]["usage"])

    assert [usage["prompt_tokens"] for usage in usages] == [len(prompt)] * 2
    assert [usage["completion_tokens"] for usage in usages] == [len("42\n")] * 2
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] < 16  # a block at most, of another's prompt
    assert cached[1] in range(len(prompt) - 32, len(prompt))


@pytest.mark.parametrize(("path", "n"), [(COMPLETIONS, 1), (CHAT, 1), (CHAT, 3)])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_goes_away_frees_the_blocks_of_all_its_choices(
    stack: LocalStack, gateway: Gateway, client: Client, path: str, n: int, is_streamed: bool
):
    """smg tells the router by Abort if the answer was a stream, else by a reset of the call."""
    await leave_in_the_middle(stack, gateway, client, path, is_streamed, n=n)

    group = await idle_group(client)
    assert [rank.num_used_blocks for rank in group.ranks] == [0, 0]


async def leave_in_the_middle(
    stack: LocalStack, gateway: Gateway, client: Client, path: str, is_streamed: bool, *, n: int
) -> None:
    """Asks for endless answers, goes away when there are some tokens, and waits until that is known.

    The executors stand still until it has gone, so that no answer has run out by then. smg hears of it
    from the next tokens that it sends.
    """
    num_cancelled = await num_sequences_cancelled(stack)
    connection = await start_endless(client, gateway, path, is_streamed, n=n)
    while not await is_paused_at_work(stack, client):
        connection.close()
        connection = await start_endless(client, gateway, path, is_streamed, n=n)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    resume(stack)
    while await num_sequences_cancelled(stack) < num_cancelled + n:
        await asyncio.sleep(0.01)


async def start_endless(
    client: Client, gateway: Gateway, path: str, is_streamed: bool, *, n: int
) -> http.client.HTTPConnection:
    """Returns the connection of a request that has some tokens."""
    num_tokens = await tokens_run(client)
    fields = fields_of(path, rev("abacus")) | {"n": n}
    fields |= {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": is_streamed}
    connection = await asyncio.to_thread(gateway.connect, path, fields)
    if is_streamed:
        await asyncio.to_thread(_read_lines, connection)
    while await tokens_run(client) == num_tokens:
        await asyncio.sleep(0.001)
    return connection


async def num_sequences_cancelled(stack: LocalStack) -> float:
    return (await scraped(stack.router))["lockstep_router_ended_sequences_total"]["CANCELLED",]


def _read_lines(connection: http.client.HTTPConnection) -> None:
    assert connection.sock is not None
    with connection.sock.makefile("rb") as lines:
        for _ in range(NUM_READ):
            lines.readline()


async def tokens_run(client: Client) -> int:
    [group] = await client.get_status()
    return sum(rank.total_tokens for rank in group.ranks)


async def test_the_loads_are_those_of_the_executors(stack: LocalStack, client: Client):
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        answer = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())
    [group] = await client.get_status()

    for load, rank in zip(answer.loads, group.ranks, strict=True):
        num_blocks = rank.num_cached_blocks + rank.num_free_blocks
        assert load.max_total_num_tokens == num_blocks * 16
        assert load.max_running_requests == 64
        assert load.token_usage == 0.0


async def test_smg_knows_each_block_that_is_cached_and_can_flush_all(
    stack: LocalStack, gateway: Gateway
):
    await gateway.ask(COMPLETIONS, prompt=solved_lines(31, 200), max_tokens=2)
    table = BlockTable()
    async with grpc.aio.insecure_channel(stack.address) as channel:
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).SubscribeKvEvents(
            common_pb2.SubscribeKvEventsRequest()
        )
        async with asyncio.timeout(120):
            while table.num_chunks_left is None or table.num_chunks_left:
                table.apply(await call.read())
            cached = {name for blocks in table.ranks.values() for name in blocks}
            assert len(cached) >= 200 // 16
            while await num_indexed(gateway) != len(cached):
                await asyncio.sleep(0.05)
            await asyncio.to_thread(flush, gateway)
            while any(table.ranks.values()):
                table.apply(await call.read())
            while await num_indexed(gateway):
                await asyncio.sleep(0.05)
        call.cancel()


async def num_indexed(gateway: Gateway) -> float:
    samples = await scrape(gateway.metrics_address)
    return sum(samples["smg_kv_index_blocks"].values())


def flush(gateway: Gateway) -> None:
    with closing(gateway.connect("/flush_cache", {})) as connection:
        response = connection.getresponse()
        assert response.status == 200, response.read()


SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
NAMED_SUM = {"name": "answer", "schema": SUM}
# The model knows nothing of calls: most answers go on with spaces, and which end hangs on last bits.
DRAWN = [{"max_tokens": 200, "temperature": 1.0, "seed": seed} for seed in range(16)]
CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, r'\{\s*(}|".*)'),  # the model knows no end of it
    (
        {"response_format": {"type": "json_schema", "json_schema": NAMED_SUM}},
        r'\{\s*"sum"\s*:\s*[1-9][0-9]\s*\}',
    ),
    ({"regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
    ({"ebnf": 'root ::= "yes" | "no" "!"'}, "yes|no!"),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("fields", "pattern"), CONSTRAINTS, ids=lambda x: str(x)[:40])
async def test_what_an_answer_must_be_it_is(
    gateway: Gateway, fields: dict[str, Any], pattern: str, is_streamed: bool
):
    fields = fields | {"messages": [{"role": "user", "content": "17+25="}], "max_tokens": 200}
    answers = await gateway.answers(CHAT, is_streamed, n=2, **fields)

    assert len(answers) == 2
    for answer in answers.values():
        assert re.fullmatch(pattern, answer, re.DOTALL), answer


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_tool_that_must_be_called_is_called_with_arguments_of_its_schema(
    gateway: Gateway, choice: Any
):
    tools = [{"type": "function", "function": {"name": "add", "parameters": SUM}}]
    fields = {"messages": [{"role": "user", "content": "17+25="}], "tools": tools}
    answers = await asyncio.gather(
        *(gateway.ask(CHAT, tool_choice=choice, **fields, **drawn) for drawn in DRAWN)
    )

    messages = [answer["choices"][0]["message"] for answer in answers]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert calls
    for call in calls:
        assert call["function"]["name"] == "add"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SUM)


async def test_a_schema_that_cannot_be_kept_to_is_refused_with_its_place(gateway: Gateway):
    schema = {"type": "array", "items": {"type": "array", "uniqueItems": True}}
    status, message = await gateway.refusal(
        CHAT,
        messages=[{"role": "user", "content": "17+25="}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )

    assert status == 400
    assert "sampling_params.json_schema: at #/items" in message


TOOL = {"type": "function", "function": {"name": "add", "parameters": SUM, "strict": True}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        # The router would prefer token 5, write ten tokens, or refuse the priority.
        *[
            (path, {name: value})
            for path in (COMPLETIONS, CHAT)
            for name, value in (
                ("logit_bias", {"5": 100}),
                ("priority", 1000),
                ("no_such_field", 1),
            )
        ],
        (COMPLETIONS, {"best_of": 2}),
        (CHAT, {"min_tokens": 10}),
        (CHAT, {"tools": [TOOL], "tool_choice": "auto"}),
        (CHAT, {"prediction": {"type": "content", "content": "sucabb"}, "service_tier": "flex"}),
        (CHAT, {"parallel_tool_calls": False, "reasoning_effort": "high", "store": True}),
    ],
    ids=lambda x: str(x)[:40],
)
async def test_what_smg_leaves_out_changes_no_answer(
    gateway: Gateway, path: str, fields: dict[str, Any]
):
    """If one of these fails, SMG passes the field on now: take it off the README's list."""
    asked = fields_of(path, rev("abacus")) | {"max_tokens": 16}
    assert await gateway.answers(path, False, **asked, **fields) == {0: "sucaba"}


async def test_a_gateway_that_has_the_model_needs_no_tokenizer_of_ours(
    stack: LocalStack, tmp_path: Path
):
    args: Sequence[str] = ("--model-path", str(DEMO_MODEL))
    async with started(stack.address, tmp_path / "smg.log", *args) as gateway:
        answers = await gateway.answers(CHAT, False, **fields_of(CHAT, rev("abacus")))

    assert answers == {0: "sucaba"}


# ---- OpenAI's own client, whose reference says what each field does

needs_openai = pytest.mark.skipif(
    importlib.util.find_spec("openai") is None,
    reason="the package openai is not in the environment: pip install -c constraints.txt openai",
)
USER = [{"role": "user", "content": "17+25="}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SUM}} for name in ("add", "sub")
]


@pytest_asyncio.fixture
async def openai_chat(gateway: Gateway) -> AsyncIterator[Any]:
    """Asks for a completion of a chat as OpenAI's client does."""
    import openai

    url = f"http://127.0.0.1:{gateway.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        defaults = {"model": DEMO_MODEL.name, "messages": USER, "temperature": 0, "max_tokens": 64}
        yield lambda **fields: client.chat.completions.create(**defaults | fields)


@needs_openai
async def test_openais_client_gets_answers_choices_and_usage(openai_chat: Any):
    whole = await openai_chat(n=3)
    assert [(c.message.content, c.finish_reason) for c in whole.choices] == [("42", "stop")] * 3
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 3 * len("42\n"))
    [choice] = (await openai_chat(stop=["9", "2"])).choices
    assert (choice.message.content, choice.finish_reason) == ("4", "stop")
    [choice] = (await openai_chat(max_completion_tokens=1)).choices
    assert (choice.message.content, choice.finish_reason) == ("4", "length")
    [choice] = (await openai_chat(logprobs=True, top_logprobs=2)).choices
    assert [(e.token, len(e.top_logprobs)) for e in choice.logprobs.content] == [("4", 2), ("2", 2)]
    random = {"messages": [{"role": "user", "content": "rev "}], "temperature": 1.8}
    texts = [
        (await openai_chat(seed=seed, **random)).choices[0].message.content for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


@needs_openai
async def test_openais_client_gets_a_stream_with_its_usage(openai_chat: Any):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = [e async for e in await openai_chat(logprobs=True, top_logprobs=1, **options)]
    [choices] = zip(*[event.choices for event in events], strict=True)
    assert "".join(choice.delta.content or "" for choice in choices) == "42"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    scored = [e for choice in choices if choice.logprobs for e in choice.logprobs.content]
    assert [entry.token for entry in scored] == ["4", "2"]
    assert (last.choices, last.usage.completion_tokens) == ([], 3)


@needs_openai
async def test_openais_client_gets_json_and_calls_of_tools(openai_chat: Any):
    [choice] = (await openai_chat(response_format={"type": "json_object"})).choices
    assert choice.message.content.startswith("{")  # the model knows no end of it
    schema = {"type": "json_schema", "json_schema": NAMED_SUM | {"strict": True}}
    [choice] = (await openai_chat(response_format=schema)).choices
    jsonschema.validate(json.loads(choice.message.content), SUM)
    named = {"type": "function", "function": {"name": "sub"}}
    for tools, tool_choice, name in ((TOOLS, named, "sub"), (TOOLS[:1], "required", "add")):
        answers = await asyncio.gather(
            *(openai_chat(tools=tools, tool_choice=tool_choice, **drawn) for drawn in DRAWN)
        )
        choices = [answer.choices[0] for answer in answers]
        ended = [choice for choice in choices if choice.finish_reason == "tool_calls"]
        assert ended
        for call in [call for choice in ended for call in choice.message.tool_calls]:
            assert call.function.name == name
            jsonschema.validate(json.loads(call.function.arguments), SUM)


@needs_openai
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 0}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modality"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "json_schema: at #",
        ),
    ],
    ids=lambda x: str(x)[:40],
)
async def test_what_openais_client_may_not_ask_is_refused_by_name(
    openai_chat: Any, fields: dict[str, Any], named: str
):
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        await openai_chat(**fields)
    assert named in f"{caught.value.param} {caught.value.message}"
