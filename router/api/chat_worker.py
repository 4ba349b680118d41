"""Chat worker: a process that renders chat templates, which may loop for ever or take all memory.

    python -m router.api.chat_worker

It reads frames on stdin and answers each on stdout (chat.py). When a template has had its processor
time, the kernel ends the process: a template is not to be stopped otherwise in a single long operation.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any, BinaryIO, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from protos.serving.v1 import serving_pb2

REQUEST = struct.Struct("<II")  # bytes of the chat, and most characters of its text
ANSWER = struct.Struct("<cI")  # kind, and bytes of what follows
TEXT, FAILED, INVALID = b"t", b"f", b"i"  # the text; why there is none; a field and what is wrong
MAX_PROBLEM_LEN = 1000
MAX_MEMORY_BYTES = 256 << 20  # of address space, of which Python itself takes 30

END_OF_FINAL_MESSAGE = (
    "END_OF_THE_FINAL_MESSAGE "  # with a space, which shows if the template strips
)
RESERVED = ("messages", "tools", "add_generation_prompt")


class Invalid(ValueError):
    """A field of a chat that no template gets to see."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)


class Settings(NamedTuple):
    """First frame of a worker, as JSON.

    Attributes:
        sources: Templates by name: "default", and perhaps "tool_use" for chats with tools.
        special_tokens: By name, such as "bos_token".
        timeout_s: Processor time that a chat may take.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    timeout_s: float = 2.0


# ---- templates, as Hugging Face's are written


class _Generation(Extension):
    """The tag that marks what an assistant wrote, which matters in training only."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own way

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _PlainNamespace(Namespace):
    """A namespace without names that mean something to Python."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no name such as {name!r}")
        super().__setitem__(name, value)


def new_environment() -> jinja2.Environment:
    """Returns what templates find. Source: Transformers, utils/chat_template_utils.py."""

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def new_dict(*args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        dict=new_dict,
        namespace=_PlainNamespace,
    )
    return environment


class Renderer:
    """Templates of a model, compiled when they are first used.

    Args:
        settings: The templates.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._compiled = cache(new_environment().from_string)

    def render(self, chat: serving_pb2.Chat, max_chars: int) -> str:
        """Returns a chat's text; of one that is longer than may be, its beginning.

        Raises:
            Invalid: A field is wrong.
            Exception: Any that a template may raise.
        """
        sources, is_continued = self._settings.sources, chat.continue_final_message
        adds_prompt = not is_continued
        if chat.HasField("add_generation_prompt"):
            adds_prompt = chat.add_generation_prompt
        if adds_prompt and is_continued:
            problem = (
                "the prompt ends with that message, or with the beginning of an answer; set one"
            )
            raise Invalid("chat.continue_final_message", problem)
        messages = [_message(message, index) for index, message in enumerate(chat.messages)]
        if not messages:
            raise Invalid("chat.messages", "there is none; send at least one")
        if is_continued:
            if not messages[-1].get("content"):
                problem = "the last message has no content to go on with"
                raise Invalid("chat.continue_final_message", problem)
            messages[-1]["content"] += END_OF_FINAL_MESSAGE
        tools = [_object(f"chat.tools[{i}]", tool) for i, tool in enumerate(chat.tools)] or None
        arguments = _object("chat.template_arguments", chat.template_arguments)
        if taken := [name for name in RESERVED if name in arguments]:
            raise Invalid("chat.template_arguments", f"{taken[0]} is a field of its own")
        name = "tool_use" if tools and "tool_use" in sources else "default"
        parts: list[str] = []
        for part in self._compiled(sources[name]).generate(
            {
                "documents": None,
                **self._settings.special_tokens,
                **arguments,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": adds_prompt,
            }
        ):
            parts.append(part)
            max_chars -= len(part)
            if max_chars < 0:
                return "".join(parts)
        text = "".join(parts)
        return _cut(text) if is_continued else text


def _cut(text: str) -> str:
    """Returns a text up to the end of the final message's content."""
    end = text.rfind(END_OF_FINAL_MESSAGE.strip())
    if end < 0:
        raise jinja2.exceptions.TemplateError("it leaves the content of the last message out")
    kept = text[:end]
    return kept if text.startswith(END_OF_FINAL_MESSAGE, end) else kept.rstrip()


def _message(message: serving_pb2.ChatMessage, index: int) -> dict[str, Any]:
    """Returns a message as templates know it: what is not set is not there."""
    values: dict[str, Any] = {"role": message.role}
    if message.HasField("content"):
        values["content"] = message.content
    if message.HasField("reasoning_content"):  # by the name of gpt-oss' template, too
        values |= dict.fromkeys(("reasoning_content", "thinking"), message.reasoning_content)
    for name in ("name", "tool_call_id"):
        if given := getattr(message, name):
            values[name] = given
    if message.tool_calls:
        place = f"chat.messages[{index}].tool_calls"
        values["tool_calls"] = [
            _tool_call(f"{place}[{number}]", call) for number, call in enumerate(message.tool_calls)
        ]
    return values


def _tool_call(place: str, call: serving_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _object(f"{place}.arguments", call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _object(field: str, text: str) -> dict[str, Any]:
    """Returns a JSON object; an empty text is one without fields."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise Invalid(field, f"it is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise Invalid(field, "it is no JSON object")
    return value


# ---- the process


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever reads the answers says when it is over
    with suppress(ValueError, OSError):  # where there is no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError):
        settings = Settings(**json.loads(_read(source)[0]))
        renderer = Renderer(settings)
        while True:
            data, max_chars = _read(source)
            signal.setitimer(signal.ITIMER_PROF, settings.timeout_s)
            kind, answer = answer_to(renderer.render, data, max_chars)
            signal.setitimer(signal.ITIMER_PROF, 0)
            target.write(ANSWER.pack(kind, len(answer)) + answer)
            target.flush()


def answer_to(
    render: Callable[[serving_pb2.Chat, int], str], data: bytes, max_chars: int
) -> tuple[bytes, bytes]:
    """Returns the kind of an answer and the answer itself."""
    try:
        return TEXT, render(serving_pb2.Chat.FromString(data), max_chars).encode()
    except Invalid as error:
        return INVALID, json.dumps(error.args).encode()
    except MemoryError:
        return FAILED, b"it takes too much memory"
    except Exception as error:  # templates raise all that Python has
        problem = str(error) or type(error).__name__
        return FAILED, problem[:MAX_PROBLEM_LEN].encode(errors="replace")


def _read(source: BinaryIO) -> tuple[bytes, int]:
    header = source.read(REQUEST.size)
    if len(header) < REQUEST.size:
        raise EOFError
    size, max_chars = REQUEST.unpack(header)
    return source.read(size), max_chars


if __name__ == "__main__":
    main()
