"""Messages of serving.proto: a GenerateRequest becomes a Request, sequences become responses.

Every limit of serving.proto is checked here and nowhere else: behind this, values are resolved,
in range, and of the engine's types. An error names the field at fault.
"""

import asyncio
import math
import random
import re
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
from google.protobuf.duration_pb2 import Duration

from protos.executor.sampling_fields import (
    BAN,
    MAX_BANNED_LEN,
    MAX_LOGPROB_IDS,
    SAMPLING_FIELDS,
)
from protos.serving.v1 import serving_pb2
from protos.transport.errors import RpcError, duration, quoted
from protos.transport.interceptors import Caller
from router.api.constraints import read_after, read_constraint
from router.api.prompts import (
    NO_TOKENIZER,
    check_model,
    check_token_id,
    decode_long,
    read_prompt,
    skips_special_tokens,
)
from router.api.text import StopStrings, Tokenizer
from router.api.unknown_fields import refuse_unknown_fields
from router.errors import Cancelled, DeadlineExceeded, InvalidRequest, NotReady, ResumeMismatch
from router.requests.callers import DEFAULTS, CallerSettings, Turns
from router.requests.flow_limits import MIN_PRIORITY
from router.requests.request import (
    FinishReason,
    Int32Array,
    Listener,
    OutputOptions,
    Request,
    SamplingParams,
    Sequence,
    StopConditions,
    TokenLogprob,
)
from router.requests.resume import Resume, prompt_digest, take_up
from router.scheduling.step import ServedModel

MAX_REQUEST_ID_LEN = 128
REQUEST_ID = re.compile(rf"[!-~]{{0,{MAX_REQUEST_ID_LEN}}}")
MAX_N = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64  # of either kind; of a text there are two sequences of tokens
MAX_BAD_WORD_LEN = 64
MAX_TOP_LOGPROBS = 20
SHORT_OUTPUT_LEN = 512  # tokens; handing them to a thread would take longer than their text
# Texts of long outputs, one after another: several at once would take as long, and hold the loop up.
_REPLAYS = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resume")
_REPLAY_TURNS = Turns(1)
MIN_TEMPERATURE = 1e-5  # dividing logits by less overflows float32; below it is greedy anyway

_SAMPLING = {field.name: field for field in SAMPLING_FIELDS}
_FINISH_REASONS = {
    FinishReason.STOP: serving_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: serving_pb2.FINISH_REASON_LENGTH,
}


# ---- requests


def served(model: ServedModel | None) -> ServedModel:
    """Returns the model if it is known yet, as no group can have formed while it is not."""
    if model is None:
        raise NotReady("no group of executors has formed yet: try again")
    return model


def name_request(message: Any) -> str:
    """Gives a request an id if it has none. Returns it, or "" if it is none that fits.

    Args:
        message: A GenerateRequest, of our own service or a gateway's.
    """
    request_id: str = message.request_id
    if not request_id:
        request_id = message.request_id = uuid.uuid4().hex
    return request_id if REQUEST_ID.fullmatch(request_id) else ""


class Takings:
    """Requests that are being taken, while their grammars and prompts are made."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[Caller, str], asyncio.Task[Any]] = {}
        self._cancelled = WeakSet[asyncio.Task[Any]]()

    @asynccontextmanager
    async def within(
        self, timeout_s: float | None, arrival_time: float, caller: Caller, request_id: str
    ) -> AsyncIterator[None]:
        """Takes a request in the running task, until it is cancelled or its time is over.

        Args:
            timeout_s: Of the request; None: it has none.
            arrival_time: When it came, on the event loop's clock.
            caller, request_id: By which it may be cancelled.

        Raises:
            DeadlineExceeded, Cancelled: It was.
        """
        task, key = asyncio.current_task(), (caller, request_id)
        assert task is not None
        if request_id:
            self._tasks.setdefault(key, task)  # another one of this name is refused in the end
        try:
            async with asyncio.timeout_at(None if timeout_s is None else arrival_time + timeout_s):
                yield
        except TimeoutError:
            assert timeout_s is not None
            raise DeadlineExceeded("been taken", timeout_s) from None
        except asyncio.CancelledError:
            if task not in self._cancelled or task.uncancel():
                raise
            raise Cancelled("the request was cancelled") from None
        finally:
            if self._tasks.get(key) is task:
                del self._tasks[key]

    def cancel(self, caller: Caller, request_id: str) -> bool:
        """Ends one. Returns whether it is there."""
        task = self._tasks.get((caller, request_id))
        if task is not None and task not in self._cancelled:
            self._cancelled.add(task)
            task.cancel()
        return task is not None


async def read_request(
    message: serving_pb2.GenerateRequest,
    *,
    model: ServedModel | None,
    tokenizer: Tokenizer | None,
    listener: Listener,
    arrival_time: float | None = None,
    call_timeout_s: float | None = None,
    tag: int | None = None,
    caller: Caller = (),
    settings: CallerSettings = DEFAULTS,
) -> Request:
    """Returns what a client asked for, not submitted yet.

    Args:
        message: As it came from the client.
        model: The model served; None until it is known.
        tokenizer: Its tokenizer, where the router has one.
        listener: Whom to wake with the answer.
        arrival_time: When it came, on the event loop's clock in seconds; None for now.
        call_timeout_s: What is left of the call's deadline; None if it has none.
        tag: The request's number on a GenerateMany stream; None on a call of its own.
        caller: Who sent it.
        settings: What a caller may ask for.

    Raises:
        NotReady: The model is not known yet.
        InvalidRequest: A field's value can never work.
        ModelNotFound: The request is for another model.
    """
    if arrival_time is None:
        arrival_time = asyncio.get_running_loop().time()
    model = served(model)
    _parts = refuse_unknown_fields(message)  # kept, so that each is looked up once
    check_model(message.model, model)
    _check_request_id(message)
    _check_range("n", message.n, 0, MAX_N)
    _check_range("priority", message.priority, MIN_PRIORITY, settings.max_priority_of(caller))
    timeout_s = read_timeout(message, call_timeout_s)
    resume = _read_resume(message, model)
    sampling = _read_sampling(message, model)
    output = _read_output(message, model, tokenizer)
    _check_stop(message.stop, model, tokenizer)  # before a prompt is encoded in vain
    if message.HasField("vocabulary"):
        sampling = await _read_vocabulary(message, sampling, model, tokenizer)
    grammar = await read_constraint(message, model, caller)
    grammar_after = read_after(message.constraint, model, tokenizer)
    prompt = await read_prompt(message, model, tokenizer, caller)
    if resume is not None:
        _check_prompt(message.resume.prompt_digest, prompt)
    n = message.n or 1
    is_columnar = tag is not None and n == 1 and output.is_plain
    request = Request(
        request_id=message.request_id,
        prompt=prompt,
        sampling=sampling,
        stop=_read_stop(message, output, model, len(prompt), settings.max_request_outputs),
        output=output,
        listener=listener,
        arrival_time=arrival_time,
        n=n,
        priority=message.priority,
        deadline=None if timeout_s is None else arrival_time + timeout_s,
        tag=tag or 0,
        is_columnar=is_columnar,
        caller=caller,
        cache_salt=settings.cache_salt(caller),
        hides_cached=settings.is_cache_shared,
        grammar=grammar,
        grammar_after=grammar_after,
        tells_begin=resume is not None or not is_columnar or _draws_seed(message),
    )
    if tokenizer is not None and (output.text or message.stop.stop_strings):
        await _add_texts(request, message, tokenizer)
    if resume is not None:
        await _take_up(request, resume)
    return request


def _check_request_id(message: serving_pb2.GenerateRequest) -> None:
    if not name_request(message):
        raise InvalidRequest(
            "request_id",
            f"{quoted(message.request_id)} is not 1 to 128 visible ASCII characters; send such an "
            f"id, or none to be given one",
            value=quoted(message.request_id),
            limit=MAX_REQUEST_ID_LEN,
        )


async def _add_texts(
    request: Request, message: serving_pb2.GenerateRequest, tokenizer: Tokenizer
) -> None:
    strings, output = message.stop.stop_strings, message.output
    stops = StopStrings(strings, is_kept=output.include_stop) if strings else None
    skips_special = skips_special_tokens(output)
    silent_ids = () if output.include_stop else request.stop.stop_token_ids
    for sequence in request.sequences:
        sequence.text = tokenizer.new_text(
            stops, skips_special=skips_special, silent_ids=silent_ids
        )
    if output.echo and request.output.text:
        prompt = request.prompt.tolist()
        request.prompt_text = await decode_long(tokenizer, prompt, skips_special=skips_special)


async def _take_up(request: Request, resume: Resume) -> None:
    """Does so; the router's loop does not wait for long texts."""
    if sum(len(ids) for ids in resume.outputs.values() if ids is not None) <= SHORT_OUTPUT_LEN:
        take_up(request, resume)
    else:
        async with _REPLAY_TURNS.of(request.caller):
            await asyncio.get_running_loop().run_in_executor(_REPLAYS, take_up, request, resume)


def _draws_seed(message: serving_pb2.GenerateRequest) -> bool:
    """Whether what comes depends on a seed that the caller does not know."""
    sampling = message.sampling
    return sampling.temperature >= MIN_TEMPERATURE and not sampling.HasField("seed")


def _read_resume(message: serving_pb2.GenerateRequest, model: ServedModel) -> Resume | None:
    """Returns where a request goes on; the prompt's digest is not looked at."""
    if not message.HasField("resume"):
        return None
    given, n = message.resume, message.n or 1
    if given.fingerprint not in ("", model.fingerprint):
        raise ResumeMismatch("fingerprint", given.fingerprint, model.fingerprint)
    if not given.attempt:
        problem = "0 is below 1; number the attempts to go on from 1"
        raise InvalidRequest("resume.attempt", problem, value=0, limit=1)
    outputs: dict[int, Int32Array | None] = {}
    fields = {}
    for place, each in enumerate(given.continuations):
        field = f"resume.continuations[{place}]"
        _check_range(f"{field}.index", each.index, 0, n - 1)
        if each.index in outputs:
            raise InvalidRequest(f"{field}.index", f"{each.index} is there twice; send it once")
        fields[each.index] = f"{field}.token_ids"
        ids = None if each.has_ended else _read_ids(fields[each.index], each.token_ids, model)
        outputs[each.index] = ids
    if len(outputs) == n and all(ids is None for ids in outputs.values()):
        problem = "each has ended, so nothing comes of them; keep what there is"
        raise InvalidRequest("resume.continuations", problem)
    if _draws_seed(message) and any(ids is not None and len(ids) for ids in outputs.values()):
        problem = "there is none, so that the output would go on otherwise; send that of `begin`"
        raise InvalidRequest("sampling.seed", problem)
    return Resume(
        attempt=given.attempt,
        num_stalled=given.num_stalled,
        age_s=max(0.0, given.age.seconds + given.age.nanos / 1e9),
        outputs=outputs,
        fields=fields,
    )


def _read_ids(field: str, column: bytes, model: ServedModel) -> Int32Array:
    if len(column) % 4:
        problem = f"{len(column)} bytes are no column of numbers of 4 bytes"
        raise InvalidRequest(field, problem, value=len(column))
    ids = np.frombuffer(column, "<u4")
    check_token_id(field, int(ids.max(initial=0)), model)
    return ids.astype(np.int32)


def _check_prompt(digest: bytes, prompt: Int32Array) -> None:
    """Refuses to go on from a prompt that has other tokens here."""
    if digest and digest != (here := prompt_digest(prompt)):
        raise ResumeMismatch("prompt_digest", digest.hex(), here.hex())


def read_timeout(
    message: serving_pb2.GenerateRequest, call_timeout_s: float | None = None
) -> float | None:
    """Returns the shorter of the request's and the call's in seconds, or None if there is neither.

    Raises:
        InvalidRequest: It is over already.
    """
    if not message.HasField("timeout"):
        return call_timeout_s
    timeout_s = message.timeout.seconds + message.timeout.nanos / 1e9
    if timeout_s <= 0:
        raise InvalidRequest(
            "timeout",
            f"{timeout_s:g} s is over already; send more than 0, or leave it out",
            value=f"{timeout_s:g}",
            limit=0,
        )
    return timeout_s if call_timeout_s is None else min(timeout_s, call_timeout_s)


def _read_sampling(request: serving_pb2.GenerateRequest, model: ServedModel) -> SamplingParams:
    values: dict[str, float] = {}
    if not request.HasField("sampling"):
        return SamplingParams(values, seed=random.getrandbits(64))
    message = request.sampling
    for descriptor, value in message.ListFields():
        field = _SAMPLING.get(descriptor.name)
        if field is None or value == field.default:
            continue
        if not field.contains(value):
            raise InvalidRequest(
                f"sampling.{field.name}",
                f"{value:g} is not {field.range}",
                value=f"{value:g}",
                limit=f"{field.low if value <= field.low else field.high:g}",
            )
        values[field.name] = value
    if values.get("temperature", 0.0) < MIN_TEMPERATURE:
        values.pop("temperature", None)
    if values.get("top_k", 0) >= model.vocab_size:
        del values["top_k"]
    return SamplingParams(
        values=values,
        logit_bias=_read_logit_bias(message, model) if message.logit_bias else (),
        seed=message.seed if message.HasField("seed") else random.getrandbits(64),
    )


def _read_logit_bias(
    message: serving_pb2.SamplingParams, model: ServedModel
) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    _check_count(field, len(message.logit_bias), MAX_LOGIT_BIASES)
    biases = sorted(message.logit_bias.items())
    for token_id, bias in biases:
        check_token_id(f"{field}[{token_id}]", token_id, model)
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"{field}[{token_id}]",
                f"{bias:g} is not from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
                value=f"{bias:g}",
                limit=f"{math.copysign(MAX_LOGIT_BIAS, bias):g}",
            )
    return tuple(biases)


async def _read_vocabulary(
    message: serving_pb2.GenerateRequest,
    sampling: SamplingParams,
    model: ServedModel,
    tokenizer: Tokenizer | None,
) -> SamplingParams:
    """Returns the parameters with what a request's vocabulary adds to them."""
    vocabulary = message.vocabulary
    field, allowed = "vocabulary.allowed_token_ids", dict.fromkeys(vocabulary.allowed_token_ids)
    _check_count(field, len(vocabulary.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
    for index, token_id in enumerate(vocabulary.allowed_token_ids):
        check_token_id(f"{field}[{index}]", token_id, model)
    if allowed and message.HasField("constraint"):
        raise InvalidRequest(field, "a constraint says which tokens may come; leave one out")
    words = await _read_bad_words(vocabulary, model, tokenizer)
    banned = {word[0] for word in words if len(word) == 1}
    ends = set(message.stop.stop_token_ids)
    ends |= set(() if message.stop.ignore_eos else model.eos_token_ids)
    if allowed and banned.issuperset(allowed):
        raise InvalidRequest(field, "each of them is a bad word; allow others")
    if allowed and message.stop.min_tokens and ends.issuperset(allowed):
        problem = "each of them would end the output, which min_tokens forbids; allow others"
        raise InvalidRequest(field, problem)
    biases = dict(sampling.logit_bias)
    biases |= {token_id: biases.get(token_id, 0.0) + BAN for token_id in banned}
    return replace(
        sampling,
        logit_bias=tuple(sorted(biases.items())),
        allowed_ids=tuple(allowed),
        banned=tuple(dict.fromkeys(word for word in words if len(word) > 1)),
    )


async def _read_bad_words(
    vocabulary: serving_pb2.Vocabulary, model: ServedModel, tokenizer: Tokenizer | None
) -> list[tuple[int, ...]]:
    """Returns the tokens of each bad word; of a text, also as it is behind a space."""
    found = []
    for name in ("bad_words", "bad_token_ids"):
        _check_count(f"vocabulary.{name}", len(getattr(vocabulary, name)), MAX_BAD_WORDS)
    if texts := list(vocabulary.bad_words):
        if tokenizer is None:
            problem = f"{NO_TOKENIZER}; send bad_token_ids"
            raise InvalidRequest("vocabulary.bad_words", problem)
        for index, text in enumerate(texts):
            _check_len(f"vocabulary.bad_words[{index}]", text, MAX_BAD_WORD_LEN)
        spaced = [text if text.startswith(" ") else f" {text}" for text in texts]
        words = await asyncio.to_thread(tokenizer.encode_words, texts + spaced)
        found += [
            (f"vocabulary.bad_words[{index % len(texts)}]", word)
            for index, word in enumerate(words)
        ]
    for index, each in enumerate(vocabulary.bad_token_ids):
        found.append((f"vocabulary.bad_token_ids[{index}]", tuple(each.ids)))
    for field, word in found:
        if not 1 <= len(word) <= MAX_BANNED_LEN:
            raise InvalidRequest(
                field,
                f"{len(word)} tokens are not from 1 to {MAX_BANNED_LEN}",
                value=len(word),
                limit=MAX_BANNED_LEN if word else 1,
            )
        check_token_id(field, max(word), model)
    return [word for _, word in found]


def _check_stop(
    message: serving_pb2.StopConditions, model: ServedModel, tokenizer: Tokenizer | None
) -> None:
    if message.HasField("max_tokens"):
        if message.max_tokens == 0:
            raise InvalidRequest(
                "stop.max_tokens", "0 is below 1; leave it out for no limit", value=0, limit=1
            )
        if message.min_tokens > message.max_tokens:
            raise InvalidRequest(
                "stop.min_tokens",
                f"{message.min_tokens} is above max_tokens, which is {message.max_tokens}",
                value=message.min_tokens,
                limit=message.max_tokens,
            )
    _check_count("stop.stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for index, token_id in enumerate(message.stop_token_ids):
        check_token_id(f"stop.stop_token_ids[{index}]", token_id, model)
    _check_count("stop.stop_strings", len(message.stop_strings), MAX_STOP_STRINGS)
    for index, string in enumerate(message.stop_strings):
        _check_len(f"stop.stop_strings[{index}]", string, MAX_STOP_STRING_LEN)
    if message.stop_strings and tokenizer is None:
        raise InvalidRequest("stop.stop_strings", f"{NO_TOKENIZER}; send stop_token_ids")


def _read_stop(
    message: serving_pb2.GenerateRequest,
    output: OutputOptions,
    model: ServedModel,
    num_prompt_tokens: int,
    max_outputs: int,
) -> StopConditions:
    """Resolves what `_check_stop` has let pass."""
    stop, n = message.stop, message.n or 1
    each = output.num_scores if output.logprobs else 1
    of_prompt = num_prompt_tokens * output.num_scores if output.prompt_logprobs else 0
    most = (max_outputs - of_prompt) // (n * each)
    if most < 1:
        raise InvalidRequest(
            "output.prompt_logprobs",
            f"{num_prompt_tokens} tokens of the prompt x (1 + {_scores_of(output)}) is "
            f"{of_prompt}, and n={n} tokens with theirs are {n * each}; a request may ask "
            f"for {max_outputs} at most: send a shorter prompt or ask for fewer log probabilities",
            value=of_prompt + n * each,
            limit=max_outputs,
        )
    max_tokens = model.max_model_len - num_prompt_tokens
    if stop.HasField("max_tokens"):
        max_tokens = min(max_tokens, stop.max_tokens)
        if max_tokens > most:
            raise InvalidRequest(
                "stop.max_tokens",
                f"n={n} x max_tokens={max_tokens} x (1 + {_scores_of(output)}) is "
                f"{n * max_tokens * each}"
                + f", and {of_prompt} of the prompt"
                * (of_prompt > 0)
                + f"; a request may ask for {max_outputs} at most: "
                f"send {most} or less here, or less of the others",
                value=max_tokens,
                limit=most,
            )
    max_tokens = min(max_tokens, most)
    stop_token_ids = dict.fromkeys(stop.stop_token_ids)
    if not stop.ignore_eos:
        stop_token_ids |= dict.fromkeys(model.eos_token_ids)
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, stop.min_tokens),
        stop_token_ids=tuple(stop_token_ids),
        has_stop_strings=bool(stop.stop_strings),
    )


def _scores_of(output: OutputOptions) -> str:
    """Returns what comes with each log probability, in words."""
    named = f" + logprob_token_ids={len(output.logprob_ids)}" * bool(output.logprob_ids)
    return f"top_logprobs={output.top_logprobs}{named}"


def _read_output(
    message: serving_pb2.GenerateRequest, model: ServedModel, tokenizer: Tokenizer | None
) -> OutputOptions:
    has_text = message.WhichOneof("prompt") in ("text", "chat")
    if not message.HasField("output"):
        return OutputOptions(text=has_text)
    output = message.output
    if output.text and tokenizer is None:
        raise InvalidRequest("output.text", f"{NO_TOKENIZER}; leave it unset")
    _check_range("output.top_logprobs", output.top_logprobs, 0, MAX_TOP_LOGPROBS)
    field, logprob_ids = "output.logprob_token_ids", tuple(output.logprob_token_ids)
    _check_count(field, len(logprob_ids), MAX_LOGPROB_IDS)
    for index, token_id in enumerate(logprob_ids):
        check_token_id(f"{field}[{index}]", token_id, model)
    if not (output.logprobs or output.prompt_logprobs):
        problem = "has nothing to stand beside; set logprobs or prompt_logprobs"
        if output.top_logprobs:
            raise InvalidRequest("output.top_logprobs", f"{output.top_logprobs} {problem}")
        if logprob_ids:
            raise InvalidRequest(field, f"it {problem}")
    return OutputOptions(
        text=output.text or has_text,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        top_logprobs=output.top_logprobs,
        logprob_ids=logprob_ids,
        echo=output.echo,
    )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        limit = low if value < low else high
        raise InvalidRequest(
            field, f"{value} is not from {low} to {high}", value=value, limit=limit
        )


def _check_len(field: str, text: str, most: int) -> None:
    if not 1 <= len(text) <= most:
        raise InvalidRequest(
            field,
            f"{len(text)} characters are not from 1 to {most}",
            value=len(text),
            limit=most if text else 1,
        )


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(
            field, f"{count} are too many; send at most {most}", value=count, limit=most
        )


# ---- responses


def empty_response(sequence: Sequence) -> serving_pb2.GenerateResponse:
    """Returns a response with nothing but what each of a sequence has."""
    return serving_pb2.GenerateResponse(
        request_id=sequence.request.request_id, index=sequence.index
    )


def refill_response(response: serving_pb2.GenerateResponse, sequence: Sequence) -> bool:
    """Puts a sequence's new tokens in place of those of an earlier response, which had no more.

    For a request whose output is plain, and that was told how to resume it: each token of a stream is
    such a response, and to make one takes four times as long.

    Returns:
        Whether there are any.
    """
    response.ClearField("token_ids")
    response.token_ids.extend(sequence.take_tokens().tolist())
    return len(response.token_ids) > 0


def take_response(sequence: Sequence) -> serving_pb2.GenerateResponse | None:
    """Returns what is new of a sequence, its finish included, or None if nothing is."""
    request, output = sequence.request, sequence.request.output
    is_finished = sequence.finish_reason is not None
    token_ids = sequence.take_tokens()
    if not (len(token_ids) or is_finished):
        return None
    response = empty_response(sequence)
    response.token_ids.extend(token_ids.tolist())
    if output.echo and sequence.index == 0 and 0 < len(token_ids) == sequence.num_output_tokens:
        response.prompt_token_ids.extend(request.prompt.tolist())
        response.prompt_text = request.prompt_text
    if output.text:
        text = sequence.text
        assert text is not None, "a request that wants text was given one"
        if len(token_ids) and not request.stop.has_stop_strings:  # else the engine has fed it
            text.feed(token_ids, may_stop=False)
        if is_finished:  # what is held back of one that failed comes where it is resumed
            text.close()
        response.text = text.take()
    if output.logprobs:
        response.logprobs.extend(map(_logprob, sequence.logprobs))
        sequence.logprobs.clear()
    if output.prompt_logprobs and sequence.index == 0:
        response.prompt_logprobs.extend(map(_logprob, sequence.prompt_logprobs))
        sequence.prompt_logprobs.clear()
    if is_finished:
        response.finish.CopyFrom(_finish(sequence))
    add_begin(response, request)
    return response


def begin_response(request: Request) -> serving_pb2.GenerateResponse | None:
    """Returns what a request is told as soon as it was taken; None: nothing, or not yet."""
    if request.attempt == 0 and not request.is_columnar:
        return None
    response = serving_pb2.GenerateResponse(
        request_id=request.request_id, index=request.sequences[0].index
    )
    return response if add_begin(response, request) else None


def add_begin(response: serving_pb2.GenerateResponse, request: Request) -> bool:
    """Tells in a request's first response how to resume it. Returns whether it is the first."""
    model = request.served
    if not request.tells_begin or model is None:
        return False
    request.tells_begin = False
    response.begin.seed = request.sampling.seed
    response.begin.prompt_digest = prompt_digest(request.prompt)
    response.begin.num_prompt_tokens = len(request.prompt)
    response.begin.fingerprint = model.fingerprint
    response.begin.engine = model.engine
    response.begin.is_exact = request.is_exact
    return True


class Whole:
    """All responses to one request, put together for each continuation."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[serving_pb2.GenerateResponse, list[str]]] = {}

    async def add(self, response: serving_pb2.GenerateResponse) -> None:
        """Adds what came, as a stream would be written."""
        whole, texts = self._parts.setdefault(response.index, (serving_pb2.GenerateResponse(), []))
        whole.MergeFrom(response)
        texts.append(response.text)

    def answer(self) -> serving_pb2.CompleteResponse:
        """Returns all of it. Nothing is added afterwards."""
        for whole, texts in self._parts.values():
            whole.text = "".join(texts)
        return serving_pb2.CompleteResponse(
            continuations=[self._parts[index][0] for index in sorted(self._parts)]
        )


def tagged_error(tag: int, error: RpcError, request_id: str) -> serving_pb2.TaggedError:
    code, _ = error.code.value
    tagged = serving_pb2.TaggedError(
        tag=tag,
        code=code,
        reason=error.reason,
        message=str(error),
        field=error.field or "",
        request_id=request_id,
        metadata=error.metadata,
    )
    if error.retry_delay_s is not None:
        tagged.retry_delay.CopyFrom(duration(error.retry_delay_s))
    return tagged


def model_response(model: ServedModel, tokenizer: Tokenizer | None) -> serving_pb2.GetModelResponse:
    return serving_pb2.GetModelResponse(
        name=model.name,
        architecture=model.architecture,
        fingerprint=model.fingerprint,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.chat is not None,
        supports_constraints=model.supports_constraints,
        resumes=True,
    )


def _logprob(logprob: TokenLogprob) -> serving_pb2.TokenLogprob:
    return serving_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        given_logprobs=logprob.given_logprobs,
        top=[
            serving_pb2.TopLogprob(token_id=token_id, logprob=value)
            for token_id, value in zip(
                logprob.top_ids.tolist(), logprob.top_logprobs.tolist(), strict=True
            )
        ],
    )


def _finish(sequence: Sequence) -> serving_pb2.Finish:
    assert sequence.finish_reason is not None
    progress, arrival_time = sequence.progress, sequence.request.arrival_time

    def since_arrival(time: float | None) -> Duration | None:
        return None if time is None else duration(time - arrival_time)

    return serving_pb2.Finish(
        reason=_FINISH_REASONS[sequence.finish_reason],
        stop_token_id=sequence.stop_token_id,
        stop_string=sequence.stop_string,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=0 if sequence.request.hides_cached else progress.num_cached_tokens,
        num_completion_tokens=sequence.num_output_tokens,
        num_preemptions=progress.num_preemptions,
        queue_duration=since_arrival(progress.start_time),
        first_token_duration=since_arrival(progress.first_token_time),
        total_duration=since_arrival(progress.end_time),
        group=sequence.group,
        dp_rank=sequence.dp_rank,
        num_drafts=progress.num_drafts,
        num_accepted_drafts=progress.num_accepted_drafts,
        num_resumed_tokens=sequence.num_resumed,
        attempt=sequence.request.attempt,
    )
