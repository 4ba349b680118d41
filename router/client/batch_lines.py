"""OpenAI's batch lines: a request of one, and the line that answers it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from router.client.messages import Completion, Options, Prompt, TokenLogprob, to_request

Json = dict[str, Any]

COMPLETIONS = "/v1/completions"
_LINE = ("custom_id", "method", "url", "body")
DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions
# Fields of a body that are called so here, too: OpenAI's, and behind them our own.
_SAME = (
    *("model", "n", "seed", "max_tokens", "temperature", "top_p"),
    *("presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "include_stop", "regex", "grammar", "choices"),
)
_LISTS = ("stop_token_ids", "choices")
_BODY = (*_SAME, "prompt", "stream", "stop", "logit_bias", "logprobs", "response_format")


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
    if line.get("method") != "POST":
        raise LineRefused("method", f"{line.get('method')!r}; it must be 'POST'")
    if line.get("url") != COMPLETIONS:
        raise LineRefused("url", f"{line.get('url')!r}; it must be {COMPLETIONS!r}")
    _refuse_unknown(line, _LINE, "")
    body = line.get("body")
    if not isinstance(body, dict):
        raise LineRefused("body", "it must be an object")
    _refuse_unknown(body, _BODY, "body.")
    body = {name: value for name, value in body.items() if value is not None}
    options = {"temperature": 1.0, "max_tokens": DEFAULT_MAX_TOKENS}  # where OpenAI's differ
    options |= {name: body[name] for name in _SAME if name in body} | _read_renamed(body)
    prompt = _read_prompt(body.get("prompt"))
    try:
        whole = {**options, "text": True, "priority": priority}
        return BatchRequest(
            prompt, cast(Options, whole), to_request(prompt, cast(Options, whole)).ByteSize()
        )
    except (TypeError, ValueError) as error:
        field = _field_at_fault(prompt, options)
        raise LineRefused(f"body.{field}", f"it cannot be sent: {error}") from error


def answer_line(custom_id: str, model: str, completions: Sequence[Completion]) -> Json:
    """Returns the output line of a request's continuations.

    Args:
        custom_id: The line's.
        model: Name of the model that answered.
        completions: All of them, by index.
    """
    finishes = [completion.finish for completion in completions]
    num_prompt_tokens = finishes[0].num_prompt_tokens
    num_tokens = sum(finish.num_completion_tokens for finish in finishes)
    request_id = completions[0].request_id
    body = {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": completion.index,
                "text": completion.text,
                "logprobs": _logprobs(completion.logprobs) if completion.logprobs else None,
                "finish_reason": completion.finish.reason,
            }
            for completion in completions
        ],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": finishes[0].num_cached_tokens},
        },
    }
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return _output_line(custom_id, request_id, response=response)


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
    if "logprobs" in body:
        options |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return options | _read_format(body.get("response_format"))


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


def _field_at_fault(prompt: Prompt, options: Json) -> str:
    for name, value in options.items():
        try:
            to_request("", cast(Options, {name: value}))
        except (TypeError, ValueError):
            return {"stop_strings": "stop", "top_logprobs": "logprobs"}.get(name, name)
    return "prompt"


def _logprobs(entries: Sequence[TokenLogprob]) -> Json:
    """Returns log probabilities as of OpenAI's completions, tokens by their ids."""
    return {
        "tokens": [f"token_id:{entry.token_id}" for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {f"token_id:{token_id}": logprob for token_id, logprob in entry.top}
            for entry in entries
        ],
    }
