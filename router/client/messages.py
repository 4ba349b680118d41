"""Messages of the client library: options, deltas, completions and failures, and serving.proto's."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import grpc

from protos.serving.v1 import serving_pb2
from protos.transport.error_details import ErrorDetails, error_details


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Messages that the model's chat template makes a prompt of; serving.proto says more.

    Attributes:
        messages: As in OpenAI's API, with text as content: `role`, `content`, `name`, `tool_calls`,
            `tool_call_id`, and `reasoning_content`.
        tools: Functions that the model may call, likewise.
        add_generation_prompt: Whether an answer begins; None: unless the last message goes on.
        continue_final_message: Whether the model goes on with the last message.
        template_arguments: Further variables for the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | Chat | Iterable[int]  # text, a chat, or token ids


class Options(TypedDict, total=False):
    """How to continue a prompt; serving.proto says what each means, its limits and default."""

    request_id: str
    model: str
    n: int
    priority: int
    timeout_s: float
    # SamplingParams
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    # StopConditions
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    stop_strings: Sequence[str]
    ignore_eos: bool
    # Constraint: one of these at most, and one of the two behind them
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choices: Sequence[str]
    after_token_ids: Sequence[int]
    after_reasoning: bool
    # Vocabulary
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    bad_token_ids: Sequence[Sequence[int]]
    # OutputOptions
    text: bool
    logprobs: bool
    prompt_logprobs: bool
    top_logprobs: int
    skip_special_tokens: bool
    include_stop: bool
    logprob_token_ids: Sequence[int]
    echo: bool


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log probability, pairs of the likeliest tokens and theirs, and those of
    `logprob_token_ids`."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    given_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """How a continuation ended and what it took, as the router saw it. Times from its arrival."""

    reason: Literal["stop", "length"]
    stop_token_id: int | None
    stop_string: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_preemptions: int
    queue_s: float
    first_token_s: float
    total_s: float
    group: int
    dp_rank: int
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_resumed_tokens: int = 0
    attempt: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Some new tokens of continuation `index`. The last one has `finish`."""

    request_id: str
    index: int = 0
    token_ids: list[int]
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A whole continuation.

    Attributes:
        first_token_s: From sending the request to its first token, as the client saw it.
        total_s: From sending the request to its end, as the client saw it.
        num_resumes: How often the request was sent again, as its call had broken off.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    finish: Finish
    first_token_s: float
    total_s: float
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_text: str = ""
    num_resumes: int = 0


class CallFailed(Exception):
    """A call or a request that did not end well.

    CallFailed
    ├── Rejected      cannot work as sent: an invalid value, another model, an id in use, no token
    ├── Overloaded    too much waits: send it again after `retry_delay_s`
    ├── TimedOut      its timeout passed
    ├── Cancelled     somebody called cancel
    ├── Interrupted   its output so far cannot go on at the router that is there now
    └── Unavailable   no router, or none that is ready: send it again, perhaps elsewhere

    Anything else, such as a request that breaks its executors, is a bare CallFailed.

    Attributes:
        code: gRPC status code.
        reason: Constant to match on, listed on top of serving.proto; empty if the router did not
            give one, as when it is gone.
        field: The field at fault, if one is; else empty.
        retry_delay_s: When to try again, if that can help.
        metadata: Parts of the message for programs, such as the `value` given and the `limit`.
        request_id: Of the request that failed, as the router's log has it; empty if it was not read.
    """

    def __init__(self, code: grpc.StatusCode, message: str, details: ErrorDetails) -> None:
        super().__init__(message)
        self.code = code
        self.reason = details.reason
        self.field = details.field
        self.retry_delay_s = details.retry_delay_s
        self.metadata = details.metadata
        self.request_id = details.request_id


class Rejected(CallFailed):
    """The request cannot work as sent."""


class Overloaded(CallFailed):
    """Too much waits; send the request again later."""


class TimedOut(CallFailed):
    """The request's timeout passed."""


class Cancelled(CallFailed):
    """Somebody cancelled the request by its id."""


class Interrupted(CallFailed):
    """Another model is served now, or another tokenizer: the output cannot go on.

    Attributes:
        so_far: What came, of each continuation: its tokens at least, and of `complete` all of it.
    """

    def __init__(self, failure: CallFailed, so_far: list[Delta]) -> None:
        details = ErrorDetails(
            failure.reason,
            failure.field,
            failure.retry_delay_s,
            failure.metadata,
            failure.request_id,
        )
        super().__init__(failure.code, str(failure), details)
        self.so_far = so_far


class Unavailable(CallFailed):
    """No router took the request, or the one that did has stopped."""


_FAILURES: dict[grpc.StatusCode, type[CallFailed]] = {
    grpc.StatusCode.INVALID_ARGUMENT: Rejected,
    grpc.StatusCode.NOT_FOUND: Rejected,
    grpc.StatusCode.ALREADY_EXISTS: Rejected,
    grpc.StatusCode.UNAUTHENTICATED: Rejected,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_REASONS: dict[int, Literal["stop", "length"]] = {
    serving_pb2.FINISH_REASON_STOP: "stop",
    serving_pb2.FINISH_REASON_LENGTH: "length",
}
_PARTS = {  # of a GenerateRequest, and the options that go there
    "sampling": serving_pb2.SamplingParams.DESCRIPTOR.fields_by_name,
    "stop": serving_pb2.StopConditions.DESCRIPTOR.fields_by_name,
    "constraint": serving_pb2.Constraint.DESCRIPTOR.fields_by_name,
    "vocabulary": serving_pb2.Vocabulary.DESCRIPTOR.fields_by_name,
    "output": serving_pb2.OutputOptions.DESCRIPTOR.fields_by_name,
}
_CONSTRAINTS = {
    field.name for field in serving_pb2.Constraint.DESCRIPTOR.oneofs_by_name["kind"].fields
}


def failure_of_call(error: grpc.aio.AioRpcError) -> CallFailed:
    failure = _FAILURES.get(error.code(), CallFailed)
    return failure(error.code(), error.details() or "", error_details(error))


def failure_of_tag(error: serving_pb2.TaggedError) -> CallFailed:
    code = _CODES[error.code]
    delay_s = error.retry_delay.ToNanoseconds() / 1e9 if error.HasField("retry_delay") else None
    details = ErrorDetails(
        error.reason, error.field, delay_s, dict(error.metadata), error.request_id
    )
    return _FAILURES.get(code, CallFailed)(code, error.message, details)


def to_request(prompt: Prompt, options: Options) -> serving_pb2.GenerateRequest:
    """Raises ValueError or TypeError for an option that does not exist or cannot be sent."""
    fields: dict[str, Any] = {}
    given = dict(options)
    if "bad_token_ids" in given:
        given["bad_token_ids"] = [{"ids": ids} for ids in options["bad_token_ids"]]
    if "choices" in given:
        given["choices"] = {"values": given["choices"]}
    if "json_object" in given and given.pop("json_object"):
        given["json_object"] = {}
    for name, value in given.items():
        part = next((part for part, names in _PARTS.items() if name in names), None)
        (fields if part is None else fields.setdefault(part, {}))[name] = value
    timeout_s = fields.pop("timeout_s", None)
    constraints = [name for name in fields.get("constraint", ()) if name in _CONSTRAINTS]
    if len(constraints) > 1:  # protobuf would keep the last
        raise ValueError(f"{' and '.join(constraints)}: an output has one constraint at most")
    request = serving_pb2.GenerateRequest(**fields)
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(to_chat(prompt))
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()  # also for an empty one, so that the router says so
    if timeout_s is not None:
        request.timeout.FromNanoseconds(round(timeout_s * 1e9))
    return request


def to_chat(chat: Chat) -> serving_pb2.Chat:
    """Raises ValueError or TypeError for part of a message that cannot be sent."""
    return serving_pb2.Chat(
        messages=[_to_message(message) for message in chat.messages],
        tools=[_to_json(tool) for tool in chat.tools],
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_arguments=_to_json(chat.template_arguments) if chat.template_arguments else "",
    )


def _to_message(message: Mapping[str, Any]) -> serving_pb2.ChatMessage:
    fields = dict(message)
    calls = fields.pop("tool_calls", None) or ()
    functions = [call["function"] for call in calls]
    return serving_pb2.ChatMessage(
        **fields,
        tool_calls=[
            serving_pb2.ToolCall(
                id=call.get("id"),
                name=function["name"],
                arguments=_to_json(function.get("arguments") or {}),
            )
            for call, function in zip(calls, functions, strict=True)
        ],
    )


def _to_json(value: Any) -> str:
    """Returns JSON text as it is, and all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def to_delta(message: serving_pb2.GenerateResponse) -> Delta:
    return Delta(
        request_id=message.request_id,
        index=message.index,
        token_ids=list(message.token_ids),
        text=message.text,
        logprobs=_logprobs(message.logprobs),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        finish=_finish(message.finish) if message.HasField("finish") else None,
        prompt_token_ids=list(message.prompt_token_ids),
        prompt_text=message.prompt_text,
    )


class Collector:
    """Puts the deltas of one request together and takes the time.

    Args:
        n: Number of continuations.
    """

    def __init__(self, n: int) -> None:
        self._start_time = time.perf_counter()
        self._n = n  # a router has not said yet whether it takes so many
        self._parts = defaultdict[int, _Part](_Part)  # by index

    def add(self, delta: Delta) -> None:
        now = time.perf_counter()
        part = self._parts[delta.index]
        if delta.token_ids and not part.token_ids:
            part.first_token_time = now
        part.token_ids += delta.token_ids
        part.text.append(delta.text)
        part.logprobs += delta.logprobs
        part.prompt_logprobs += delta.prompt_logprobs
        if delta.prompt_token_ids:
            part.prompt_token_ids, part.prompt_text = delta.prompt_token_ids, delta.prompt_text
        if delta.finish is not None:
            part.last, part.end_time = delta, now

    def completions(self, num_resumes: int = 0) -> list[Completion]:
        """Returns every continuation, by index. All have finished."""
        return [self._completion(index, part, num_resumes) for index, part in self._all()]

    def so_far(self, request_id: str) -> list[Delta]:
        """Returns what came of every continuation, by index."""
        return [
            Delta(
                request_id=request_id,
                index=index,
                token_ids=part.token_ids,
                text="".join(part.text),
                logprobs=part.logprobs,
                prompt_logprobs=part.prompt_logprobs,
                finish=None if part.last is None else part.last.finish,
                prompt_token_ids=part.prompt_token_ids,
                prompt_text=part.prompt_text,
            )
            for index, part in self._all()
        ]

    def _all(self) -> "list[tuple[int, _Part]]":
        return [(index, self._parts[index]) for index in range(self._n)]

    def _completion(self, index: int, part: "_Part", num_resumes: int) -> Completion:
        assert part.last is not None
        assert part.last.finish is not None
        return Completion(
            request_id=part.last.request_id,
            index=index,
            token_ids=part.token_ids,
            text="".join(part.text),
            logprobs=part.logprobs,
            prompt_logprobs=part.prompt_logprobs,
            finish=part.last.finish,
            first_token_s=part.first_token_time - self._start_time,
            total_s=part.end_time - self._start_time,
            prompt_token_ids=part.prompt_token_ids,
            prompt_text=part.prompt_text,
            num_resumes=num_resumes,
        )


@dataclass(slots=True)
class _Part:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_text: str = ""
    first_token_time: float = 0.0
    end_time: float = 0.0
    last: Delta | None = None


def _logprobs(messages: Iterable[serving_pb2.TokenLogprob]) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            message.token_id,
            message.logprob,
            tuple((top.token_id, top.logprob) for top in message.top),
            tuple(message.given_logprobs),
        )
        for message in messages
    ]


def _finish(message: serving_pb2.Finish) -> Finish:
    return Finish(
        reason=_REASONS[message.reason],
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_completion_tokens=message.num_completion_tokens,
        num_preemptions=message.num_preemptions,
        queue_s=message.queue_duration.ToNanoseconds() / 1e9,
        first_token_s=message.first_token_duration.ToNanoseconds() / 1e9,
        total_s=message.total_duration.ToNanoseconds() / 1e9,
        group=message.group,
        dp_rank=message.dp_rank,
        num_drafts=message.num_drafts,
        num_accepted_drafts=message.num_accepted_drafts,
        num_resumed_tokens=message.num_resumed_tokens,
        attempt=message.attempt,
    )
