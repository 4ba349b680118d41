"""OpenAI's batch lines: a request of one, and the line that answers it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from router.client.messages import (
    Chat,
    Completion,
    Options,
    Prompt,
    to_chat,
    to_request,
)

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OUTPUT_BEGIN = b'{"id": "batch_req_'  # of each output line
_LINE = ("custom_id", "method", "url", "body")
DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions
# Fields of a body that are called so here, too: OpenAI's, and behind them our own.
_SAME = (
    *("model", "n", "seed", "max_tokens", "temperature", "top_p"),
    *("presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "include_stop", "regex", "grammar", "choices"),
    *("after_reasoning", "after_token_ids", "allowed_token_ids", "bad_words", "bad_token_ids"),
)
_OTHER_NAMES = {  # that other fields of a body have here
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
    "max_tokens": "max_completion_tokens",
}
_LISTS = (
    *("stop_token_ids", "choices", "after_token_ids"),
    *("allowed_token_ids", "bad_words", "bad_token_ids"),
)
_BOTH = (*_SAME, "stream", "stop", "logit_bias", "logprobs", "response_format")
_CHAT: dict[str, tuple[str, type]] = {  # fields of a Chat
    "messages": ("messages", list),
    "tools": ("tools", list),
    "add_generation_prompt": ("add_generation_prompt", bool),
    "continue_final_message": ("continue_final_message", bool),
    "chat_template_kwargs": ("template_arguments", dict),
}
_BODIES = {
    COMPLETIONS: (*_BOTH, "prompt"),
    CHAT: (*_BOTH, "max_completion_tokens", "top_logprobs", *_CHAT),
}


class LineRefused(Exception):
    """A line that cannot be asked as it is.

    Attributes:
        field: Path of the field at fault.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a line asks for.

    Attributes:
        num_bytes: Of its message.
    """

    prompt: Prompt
    options: Options
    num_bytes: int


def read_request(line: Mapping[str, Any], priority: int) -> BatchRequest:
    """Returns the request of a line.

    Raises:
        LineRefused: It has a field that is not known here, or a value that cannot be sent.
    """
    try:
        return _read_request(line, priority)
    except RecursionError as error:
        raise LineRefused("body", "it is nested too deeply") from error


def _read_request(line: Mapping[str, Any], priority: int) -> BatchRequest:
    if line.get("method") != "POST":
        raise LineRefused("method", f"{line.get('method')!r}; it must be 'POST'")
    url = line.get("url")
    if url not in tuple(_BODIES):
        raise LineRefused("url", f"{url!r}; it must be {' or '.join(map(repr, _BODIES))}")
    _refuse_unknown(line, _LINE, "")
    body = line.get("body")
    if not isinstance(body, dict):
        raise LineRefused("body", "it must be an object")
    _refuse_unknown(body, _BODIES[url], "body.")
    body = {name: value for name, value in body.items() if value is not None}
    options: Json = {"temperature": 1.0}  # OpenAI's defaults where they differ
    if url == COMPLETIONS:
        options["max_tokens"] = DEFAULT_MAX_TOKENS
    options |= {name: body[name] for name in _SAME if name in body}
    options |= _read_renamed(body) | _read_logprobs(body, bool if url == CHAT else int)
    prompt = _read_prompt(body.get("prompt")) if url == COMPLETIONS else _read_chat(body)
    whole = cast(Options, {**options, "text": True, "priority": priority})
    try:
        return BatchRequest(prompt, whole, to_request(prompt, whole).ByteSize())
    except (TypeError, ValueError) as error:
        field = _field_at_fault(prompt, options, body)
        raise LineRefused(field, f"it cannot be sent: {error}") from error


def answer_line(line: Mapping[str, Any], model: str, completions: Sequence[Completion]) -> Json:
    """Returns the output line of a request's continuations.

    Args:
        line: What is answered.
        model: Name of the model that did.
        completions: All of them, by index.
    """
    is_chat = line["url"] == CHAT
    finishes = [completion.finish for completion in completions]
    num_prompt_tokens = finishes[0].num_prompt_tokens
    num_tokens = sum(finish.num_completion_tokens for finish in finishes)
    request_id = completions[0].request_id
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(completion, is_chat=is_chat) for completion in completions],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": finishes[0].num_cached_tokens},
        },
    }
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return _output_line(line["custom_id"], request_id, response=response)


def error_line(custom_id: str, code: str, message: str, field: str, request_id: str = "") -> Json:
    """Returns the output line of a request that was refused or failed."""
    error = {"code": code, "message": message, "param": field or None}
    return _output_line(custom_id, request_id or custom_id, error=error)


def _output_line(
    custom_id: str, name: str, response: Json | None = None, error: Json | None = None
) -> Json:
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    if unknown := [name for name in given if name not in known]:
        raise LineRefused(f"{path}{unknown[0]}", f"not known here; known are {', '.join(known)}")


def _read_prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str) or (
        isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
    ):
        return prompt
    raise LineRefused("body.prompt", "it must be a text, or a list of token ids")


def _read_chat(body: Json) -> Chat:
    given = {"messages": None} | {name: body[name] for name in _CHAT if name in body}
    for name, value in given.items():
        kind = _CHAT[name][1]
        if type(value) is not kind:
            raise LineRefused(f"body.{name}", f"it must be of type {kind.__name__}")
    chat = Chat(**{_CHAT[name][0]: value for name, value in given.items()})
    try:
        to_chat(chat)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LineRefused("body.messages", f"they cannot be sent: {error!r}") from error
    return chat


def _read_renamed(body: Json) -> Json:
    """Returns the options that other fields of a body stand for."""
    options: Json = {}
    if body.get("stream"):
        raise LineRefused("body.stream", "lines are answered whole")
    for name in _LISTS:
        if not isinstance(body.get(name, []), list):
            raise LineRefused(f"body.{name}", "it must be a list")
    if "stop" in body:
        stop = body["stop"]
        options["stop_strings"] = [stop] if isinstance(stop, str) else stop
    if "logit_bias" in body:
        try:
            options["logit_bias"] = {int(key): value for key, value in body["logit_bias"].items()}
        except (AttributeError, ValueError) as error:
            raise LineRefused("body.logit_bias", "it must be an object by token ids") from error
    if "max_completion_tokens" in body:
        options["max_tokens"] = body["max_completion_tokens"]
    return options | _read_format(body.get("response_format"))


def _read_logprobs(body: Json, kind: type) -> Json:
    """Returns the options of a chat, which says if and how many, or of a completion, only how many."""
    given = body.get("logprobs", kind())
    if type(given) is not kind:
        raise LineRefused("body.logprobs", f"it must be of type {kind.__name__}")
    if kind is bool:
        return {"logprobs": given, "top_logprobs": body.get("top_logprobs", 0)}
    return {"logprobs": "logprobs" in body, "top_logprobs": given}


def _read_format(given: object) -> Json:
    """Returns the constraint that a response_format is."""
    known = given is None or (isinstance(given, dict) and given.keys() <= {"type", "json_schema"})
    match given:
        case None | {"type": "text"} if known:
            return {}
        case {"type": "json_object"} if known:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}} if known:
            return {"json_schema": json.dumps(schema)}
    raise LineRefused(
        "body.response_format",
        'it must be {"type": "text"}, {"type": "json_object"}, or '
        '{"type": "json_schema", "json_schema": {"schema": {...}}}',
    )


def _field_at_fault(prompt: Prompt, options: Json, body: Json) -> str:
    """Returns the path of what cannot be sent by itself, or else of the body."""
    for name, value in options.items():
        try:
            to_request("", cast(Options, {name: value}))
        except (TypeError, ValueError):
            return f"body.{name if name in body else _OTHER_NAMES[name]}"
    try:
        to_request(prompt, {})
    except (TypeError, ValueError):
        return "body.prompt"
    return "body"


def _choice(completion: Completion, *, is_chat: bool) -> Json:
    entries, logprobs = completion.logprobs, None
    choice: Json = {"index": completion.index, "finish_reason": completion.finish.reason}
    if is_chat:
        content = [_token(entry.token_id, entry.logprob, entry.top) for entry in entries]
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return choice | {"message": message, "logprobs": {"content": content} if entries else None}
    if entries:
        logprobs = {
            "tokens": [_name(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{_name(top): value for top, value in e.top} for e in entries],
        }
    return choice | {"text": completion.text, "logprobs": logprobs}


def _token(token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> Json:
    """Returns a token of a chat's log probabilities."""
    likeliest = [{"token": _name(each), "logprob": value, "bytes": None} for each, value in top]
    return {
        "token": _name(token_id),
        "logprob": logprob,
        "bytes": None,
        "top_logprobs": likeliest,
    }


def _name(token_id: int) -> str:
    """Returns the name of a token, whose text is not known here."""
    return f"token_id:{token_id}"
