"""Chats become prompts by templates that may be hostile: none harms the router or another chat."""

import asyncio
import gc
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import error_details
from router.api.chat import MAX_WORKERS, ChatRenderer, read_templates
from router.api.chat_worker import FAILED, INVALID, TEXT, Renderer, Settings, answer_to
from router.api.text import Tokenizer
from router.client.messages import Chat, to_chat
from tests.router.support.calls import connected, failure
from tests.router.support.fake_engines import FakeEngines

TURNS = (
    "{{ bos_token }}{% for message in messages %}\n"
    "<{{ message.role }}>{{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENS = {"bos_token": "[", "eos_token": "]"}
USER = {"role": "user", "content": " hi "}
ASSISTANT = {"role": "assistant", "content": "Hello, "}
TOOL = {"type": "function", "function": {"name": "é", "parameters": {"z": 1, "a": {"b": 0.5}}}}
CALL = {"id": "7", "function": {"name": "add", "arguments": '{"y": 2, "x": 1}'}}


def answer(template: str, max_chars: int = 1000, **chat: Any) -> tuple[bytes, str]:
    """Kind and text of what a worker answers for a chat."""
    message = to_chat(Chat(**{"messages": [USER], **chat}))
    renderer = Renderer(Settings({"default": template}, TOKENS))
    kind, text = answer_to(renderer.render, message.SerializeToString(), max_chars)
    return kind, text.decode()


@pytest.mark.parametrize(
    ("template", "chat", "text"),
    [
        (TURNS, {}, "[<user>hi]\n<assistant>"),
        (TURNS, {"add_generation_prompt": False}, "[<user>hi]\n"),
        (
            TURNS,
            {"messages": [USER, ASSISTANT], "continue_final_message": True},
            "[<user>hi]\n<assistant>Hello,",  # as far as the template leaves it
        ),
        (
            "{% for m in messages %}{{ m.content }}|{% endfor %}",
            {"messages": [USER, ASSISTANT], "continue_final_message": True},
            " hi |Hello, ",
        ),
        ("{{ tools | tojson }}", {"tools": [TOOL]}, json.dumps([TOOL], ensure_ascii=False)),
        ("{{ tools is none }}", {}, "True"),
        (
            "{{ messages[0].tool_calls[0] | tojson }}{{ messages[0].content is defined }}",
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            '{"id": "7", "type": "function", "function": {"name": "add", "arguments": '
            '{"y": 2, "x": 1}}}False',
        ),
        (
            "{{ messages[0].tool_call_id }}",
            {"messages": [{"role": "tool", "tool_call_id": "7"}]},
            "7",
        ),
        (
            "{{ messages[0].reasoning_content + messages[0].thinking }}",
            {"messages": [{"role": "assistant", "reasoning_content": "m"}]},
            "mm",
        ),
        ("{{ thinks }}", {"template_arguments": {"thinks": False}}, "False"),
        ("{% generation %}a{% endgeneration %}{{ strftime_now('%%') }}", {}, "a%"),
        (
            "{% set ns = namespace(n=1) %}{% for i in range(9) %}{% if i == 3 %}{% break %}"
            "{% endif %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ ns.n }}",
            {},
            "8",
        ),
    ],
)
def test_templates_find_what_hugging_face_gives_them(
    template: str, chat: dict[str, Any], text: str
):
    assert answer(template, **chat) == (TEXT, text)


@pytest.mark.parametrize(
    ("template", "chat", "kind", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", {}, FAILED, "roles must alternate"),
        ("{{ missing.field }}", {}, FAILED, "'missing' is undefined"),
        ("{{ messages.append(1) }}", {}, FAILED, "unsafe"),
        ("{{ ''.__class__.__mro__ }}", {}, FAILED, "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", {}, FAILED, "no name such as"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {}, FAILED, "recursion"),
        (TURNS, {"messages": []}, INVALID, "chat.messages"),
        (TURNS, {"tools": ["{"]}, INVALID, "chat.tools[0]"),
        (TURNS, {"tools": ["[1]"]}, INVALID, "no JSON object"),
        (TURNS, {"tools": ["[" * 100_000]}, INVALID, "no JSON"),
        (TURNS, {"template_arguments": {"tools": 1}}, INVALID, "chat.template_arguments"),
        (
            TURNS,
            {
                "messages": [
                    {"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}
                ]
            },
            INVALID,
            "chat.messages[0].tool_calls[0].arguments",
        ),
        (
            TURNS,
            {"continue_final_message": True, "add_generation_prompt": True},
            INVALID,
            "chat.continue_final_message",
        ),
        (
            TURNS,
            {"messages": [{"role": "user"}], "continue_final_message": True},
            INVALID,
            "no content to go on with",
        ),
        ("hello", {"continue_final_message": True}, FAILED, "leaves the content"),
    ],
)
def test_what_makes_no_prompt_is_said(
    template: str, chat: dict[str, Any], kind: bytes, problem: str
):
    assert answer(template, **chat)[0] == kind
    assert problem in answer(template, **chat)[1]


def test_a_chat_that_is_too_long_is_not_rendered_to_its_end():
    kind, text = answer("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", max_chars=250)
    assert (kind, len(text)) == (TEXT, 300)


def test_a_template_for_tools_is_taken_where_there_are_some():
    renderer = Renderer(Settings({"default": "plain", "tool_use": "tools"}, {}))
    for tools, text in (([], "plain"), ([TOOL], "tools")):
        assert renderer.render(to_chat(Chat(messages=[USER], tools=tools)), 99) == text


def test_templates_are_found_where_checkpoints_have_them(tmp_path: Path):
    def found(file: Path | None = None) -> Settings | None:
        return read_templates(tmp_path, file, 1.0)

    assert found() is None
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "add_bos_token": True}
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "x", "eos_token": "</s>"}')
    given = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    for sources in ("a", given):
        content = json.dumps({**config, "chat_template": sources})
        (tmp_path / "tokenizer_config.json").write_text(content)
        settings = found()
        assert settings is not None
        assert settings.sources["default"] == "a"
        assert settings.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "given").write_text("d")
    for file, source in ((None, "c"), (tmp_path / "given", "d")):
        settings = found(file)
        assert settings is not None
        assert settings.sources == {"default": source}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% if %}", "is none: Expected an expression"),
        ("x" * (1 << 20) + "y", "1048577 bytes"),
        ([{"name": "rag", "template": "a"}], r"names \['rag'\], but no 'default'"),
        ([{"template": "a"}], "'name'; give another"),
        ({"default": "a"}, "is none: 'dict' object"),
    ],
)
def test_a_template_that_is_none_stops_the_start(tmp_path: Path, source: Any, problem: str):
    given = tmp_path / "given"
    if isinstance(source, str):
        given.write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    with pytest.raises(ValueError, match=problem):
        read_templates(tmp_path, given if given.is_file() else None, 1.0)


# The first message says what the template does; others are none of its business.
HOSTILE = (
    "{% set act = messages[0].content %}{% if act == 'loop' %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% elif act == 'operation' %}"
    "{{ (9 ** (messages | length * 10 ** 7)) > 0 }}{% elif act == 'memory' %}{{ 'x' * 10 ** 9 }}"
    "{% elif act == 'refuse' %}{{ raise_exception('no') }}{% else %}{{ act }}{% endif %}"
)


@pytest.fixture
async def chatting(tokenizer: Tokenizer) -> AsyncIterator[Any]:
    tokenizer.chat = ChatRenderer(Settings({"default": HOSTILE}, {}, timeout_s=0.1))
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        yield engines, stub
    await tokenizer.chat.close()


async def test_templates_that_never_end_or_take_all_memory_fail_their_own_chat(
    chatting: Any, tokenizer: Tokenizer
):
    engines, stub = chatting
    engines.echoes = True

    def chat(content: str, count: int = 1) -> pb.Chat:
        return pb.Chat(messages=[pb.ChatMessage(role="user", content=content)] * count)

    failing = {
        "loop": "0.1 s of processor time",
        "operation": "0.1 s of processor time",
        "memory": "too much memory",
        "refuse": "no",
    }
    calls = [
        (stub.CountTokens(pb.CountTokensRequest(chat=chat(act, count=3))), problem)
        for act, problem in failing.items()
    ]
    dropped = stub.Tokenize(pb.TokenizeRequest(chat=chat("loop")))
    await asyncio.sleep(0)
    dropped.cancel()
    answer = await stub.Complete(pb.GenerateRequest(chat=chat("hi")))
    assert [whole.text for whole in answer.continuations] == ["hi"]
    tokens = (await stub.Tokenize(pb.TokenizeRequest(chat=chat("hi")))).token_ids
    assert list(tokens) == tokenizer.encode("hi").tolist()
    for call, problem in calls:
        error = await failure(call)
        assert error_details(error).reason == "CHAT_TEMPLATE_FAILED"
        assert problem in (error.details() or "")
        limits = {"limit": "0.1"} if "processor time" in problem else {}
        assert error_details(error).metadata == limits
    error = await failure(stub.Generate(pb.GenerateRequest(chat=pb.Chat())))
    assert error_details(error).field == "chat.messages"
    error = await failure(stub.Generate(pb.GenerateRequest(chat=chat("x" * 10_000))))
    assert error_details(error).reason == "PROMPT_TOO_LONG"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_somebody_ended_or_stopped_is_replaced(
    chatting: Any, tokenizer: Tokenizer, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    if how == signal.SIGSTOP:
        monkeypatch.setattr("router.api.chat.STUCK_S", 3.0)
    _, stub = chatting
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert tokenizer.chat is not None
    for num_ended in range(2 if how == signal.SIGKILL else 1):
        assert (await stub.CountTokens(pb.CountTokensRequest(chat=chat))).num_tokens == 2
        [worker] = tokenizer.chat._workers
        worker.process.send_signal(how)
        if num_ended:
            await worker.process.wait()  # else the next chat finds it dying
    assert (await stub.CountTokens(pb.CountTokensRequest(chat=chat))).num_tokens == 2


async def test_a_worker_that_ends_as_it_starts_is_replaced(
    chatting: Any, monkeypatch: pytest.MonkeyPatch
):
    start, processes = asyncio.create_subprocess_exec, []

    async def starting(*args: str, **options: Any) -> Any:
        processes.append(await start(*args, **options))
        if len(processes) == 1:
            processes[0].kill()
            await processes[0].wait()
            closed = RuntimeError("unable to perform operation; the handler is closed")  # uvloop's
            processes[0].stdin = Mock(write=Mock(side_effect=closed))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    _, stub = chatting
    assert (await stub.CountTokens(pb.CountTokensRequest(chat=chat))).num_tokens == 2
    assert len(processes) == 2


async def test_a_process_that_was_started_before_the_first_chat_renders_it(
    chatting: Any, tokenizer: Tokenizer
):
    _, stub = chatting
    assert tokenizer.chat is not None
    tokenizer.chat.warm_up()
    tokenizer.chat.warm_up()
    while not tokenizer.chat._idle:
        await asyncio.sleep(0.001)
    [worker] = tokenizer.chat._workers
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert (await stub.CountTokens(pb.CountTokensRequest(chat=chat))).num_tokens == 2
    assert tokenizer.chat._workers == [worker]


async def test_a_process_that_could_not_be_started_beforehand_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
):
    worker = Mock()
    start = AsyncMock(side_effect=[OSError("no memory"), worker])
    monkeypatch.setattr(ChatRenderer, "_start", start)
    renderer = ChatRenderer(Settings({}, {}))
    for is_started in (False, True):
        renderer.warm_up()
        assert renderer._warming is not None
        await renderer._warming
        assert renderer._idle == [worker] * is_started


async def test_no_process_is_started_beforehand_where_chats_start_all_that_may_be(
    monkeypatch: pytest.MonkeyPatch,
):
    may_go_on = asyncio.Event()
    num_started = 0

    async def start(_: ChatRenderer) -> Any:
        nonlocal num_started
        num_started += 1
        await may_go_on.wait()
        return Mock(ask=AsyncMock(return_value=(TEXT, b"")), process=Mock(returncode=None))

    monkeypatch.setattr(ChatRenderer, "_start", start)
    renderer = ChatRenderer(Settings({}, {}))
    calls = [asyncio.create_task(renderer.render(pb.Chat(), 9)) for _ in range(MAX_WORKERS)]
    renderer.warm_up()
    assert renderer._warming is not None
    await asyncio.sleep(0.01)
    may_go_on.set()
    await asyncio.gather(*calls)
    assert num_started == MAX_WORKERS


async def test_a_caller_that_left_leaves_no_error_behind(
    chatting: Any, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    renderer = tokenizer.chat
    assert renderer is not None
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="refuse")])
    asking = asyncio.create_task(renderer.render(chat, 100))
    while not renderer._workers:
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    while not renderer._idle:
        await asyncio.sleep(0.001)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_chat_whose_caller_left_before_it_began_is_not_rendered(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else calls that are ended at once keep all others' chats waiting, and stay in memory."""
    asked: list[bytes] = []
    may_go_on = asyncio.Event()

    async def ask(data: bytes, max_chars: int) -> tuple[bytes, bytes]:
        asked.append(data)
        await may_go_on.wait()
        return TEXT, data

    async def start(_: ChatRenderer) -> Any:
        return Mock(ask=ask, process=Mock(returncode=None))

    monkeypatch.setattr(ChatRenderer, "_start", start)
    renderer = ChatRenderer(Settings({}, {}))
    chats = [pb.Chat(messages=[pb.ChatMessage(role=str(number))]) for number in range(9)]
    calls = [asyncio.create_task(renderer.render(chat, 9)) for chat in chats]
    await asyncio.sleep(0.01)
    for call in calls[:-1]:
        call.cancel()
    await asyncio.gather(*calls[:-1], return_exceptions=True)
    may_go_on.set()

    await calls[-1]
    assert asked == [chat.SerializeToString() for chat in [*chats[:MAX_WORKERS], chats[-1]]]


async def test_a_callers_flood_of_chats_delays_anothers_by_as_many_as_are_rendered_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[bytes] = []

    async def ask(data: bytes, max_chars: int) -> tuple[bytes, bytes]:
        asked.append(data)
        await asyncio.sleep(0)
        return TEXT, data

    async def start(_: ChatRenderer) -> Any:
        return Mock(ask=ask, process=Mock(returncode=None))

    monkeypatch.setattr(ChatRenderer, "_start", start)
    renderer = ChatRenderer(Settings({}, {}))
    other = pb.Chat(messages=[pb.ChatMessage(role="other")])
    flood = [renderer.render(pb.Chat(), 9) for _ in range(20)]
    await asyncio.gather(*flood, renderer.render(other, 9, ("another",)))
    assert asked.index(other.SerializeToString()) <= 2 * MAX_WORKERS


async def test_a_chat_without_a_template_is_refused(tokenizer: Tokenizer):
    async with connected(FakeEngines(), tokenizer) as stub:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        error = await failure(stub.Generate(pb.GenerateRequest(chat=chat)))
        assert "--chat-template" in (error.details() or "")
        assert not (await stub.GetModel(pb.GetModelRequest())).has_chat_template
