"""Prompts as tokens, and tokens as text: what requests go on from, and what callers ask to see."""

import asyncio
import os
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Literal

import numpy as np

from protos.serving.v1 import serving_pb2
from protos.transport.errors import quoted
from protos.transport.interceptors import Caller
from router.api.text import Tokenizer
from router.errors import InvalidRequest, ModelNotFound, PromptTooLong, TextTooLong
from router.requests.callers import Turns
from router.requests.request import Int32Array
from router.scheduling.step import ServedModel

MAX_CHARS_PER_TOKEN = 64  # on average: a text of more cannot fit, and is not encoded to see
SHORT_TEXT_LEN = 512  # characters; handing it to a thread would take longer than encoding it
SHORT_TOKENS_LEN = 512  # likewise, to decode

# About half of asyncio's threads (ThreadPoolExecutor): a megabyte takes a third of a second of one.
_TURNS = Turns((min(32, (os.cpu_count() or 1) + 4) + 2) // 2)

NO_TOKENIZER = "this router has no tokenizer"

Encodable = serving_pb2.TokenizeRequest | serving_pb2.CountTokensRequest


def check_model(name: str, model: ServedModel) -> None:
    if name not in ("", model.name):
        raise ModelNotFound(name, model.name)


def check_token_id(field: str, token_id: int, model: ServedModel) -> None:
    if token_id >= model.vocab_size:
        raise InvalidRequest(
            field,
            f"{token_id} is no token; the model has 0 to {model.vocab_size - 1}",
            value=token_id,
            limit=model.vocab_size - 1,
        )


async def read_prompt(
    message: serving_pb2.GenerateRequest,
    model: ServedModel,
    tokenizer: Tokenizer | None,
    caller: Caller = (),
) -> Int32Array:
    """Returns a request's prompt, which leaves room for an output token."""
    match message.WhichOneof("prompt"):
        case "token_ids":
            return _read_token_ids(message.token_ids.ids, model)
        case None:
            raise InvalidRequest("prompt", "there is none; set token_ids, text or chat")
        case kind:
            prompt = await _encode(message, kind, model, tokenizer, caller)
            if len(prompt) > model.max_prompt_tokens:
                raise PromptTooLong(kind, len(prompt), model.max_prompt_tokens)
            return prompt


async def encode_prompt(
    message: Encodable, model: ServedModel, tokenizer: Tokenizer | None, caller: Caller
) -> Int32Array:
    """Returns the tokens of a prompt of any length.

    Raises:
        InvalidRequest: There is none, or nothing here can encode it.
        ModelNotFound: It is for another model.
    """
    check_model(message.model, model)
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "there is none; set text or chat")
    return await _encode(message, kind, model, tokenizer, caller)


async def decode(
    message: serving_pb2.DetokenizeRequest, model: ServedModel, tokenizer: Tokenizer | None
) -> str:
    """Returns the text of tokens.

    Raises:
        InvalidRequest: Some are none, they are too many, or nothing here can decode them.
        ModelNotFound: They are for another model.
    """
    check_model(message.model, model)
    if tokenizer is None:
        raise InvalidRequest("token_ids", f"{NO_TOKENIZER}; decode them where there is one")
    token_ids = list(message.token_ids)
    if len(token_ids) > model.max_model_len:
        raise InvalidRequest(
            "token_ids",
            f"{len(token_ids)} are too many; send at most {model.max_model_len}",
            value=len(token_ids),
            limit=model.max_model_len,
        )
    _check_token_ids("token_ids", token_ids, model)
    return await decode_long(tokenizer, token_ids, skips_special=skips_special_tokens(message))


async def decode_long(
    tokenizer: Tokenizer, token_ids: SequenceOf[int], *, skips_special: bool
) -> str:
    """Returns the text of tokens; the router's loop does not wait for that of many."""
    if len(token_ids) <= SHORT_TOKENS_LEN:
        return tokenizer.decode(token_ids, skips_special=skips_special)
    return await asyncio.to_thread(tokenizer.decode_long, token_ids, skips_special=skips_special)


def skips_special_tokens(
    message: serving_pb2.OutputOptions | serving_pb2.DetokenizeRequest,
) -> bool:
    return message.skip_special_tokens or not message.HasField("skip_special_tokens")


def _read_token_ids(token_ids: SequenceOf[int], model: ServedModel) -> Int32Array:
    field = "token_ids.ids"
    if not len(token_ids):
        raise InvalidRequest(field, "the prompt is empty; send at least one token")
    if len(token_ids) > model.max_prompt_tokens:
        raise PromptTooLong(field, len(token_ids), model.max_prompt_tokens)
    return _check_token_ids(field, token_ids, model)


def _check_token_ids(field: str, token_ids: SequenceOf[int], model: ServedModel) -> Int32Array:
    ids = np.array(token_ids, dtype=np.uint32)
    if ids.max(initial=0) >= model.vocab_size:
        index = int(ids.argmax())
        check_token_id(f"{field}[{index}]", int(ids[index]), model)
    return ids.astype(np.int32)


async def _encode(
    message: serving_pb2.GenerateRequest | Encodable,
    kind: Literal["text", "chat"],
    model: ServedModel,
    tokenizer: Tokenizer | None,
    caller: Caller,
) -> Int32Array:
    """Returns the tokens of a text or chat, at least one."""
    if tokenizer is None:
        raise InvalidRequest(kind, f"{NO_TOKENIZER}; send token_ids")
    max_chars = MAX_CHARS_PER_TOKEN * model.max_prompt_tokens
    if kind == "text":
        text = message.text
    else:
        text = await _render(message.chat, tokenizer, max_chars, caller)
    if len(text) > max_chars:  # its tokens would take a hundred times its memory
        raise TextTooLong(kind, len(text), max_chars, model.max_prompt_tokens)
    encode = partial(tokenizer.encode, text, adds_special=kind == "text")
    if len(text) <= SHORT_TEXT_LEN:
        prompt = encode()
    else:  # in a thread: every rank would wait for a long text to be encoded
        async with _TURNS.of(caller):
            prompt = await asyncio.to_thread(encode)
    if not len(prompt):
        raise InvalidRequest(kind, f"{quoted(text)} has no tokens; send at least one token's text")
    if prompt.max() >= model.vocab_size:
        raise InvalidRequest(
            kind,
            f"the tokenizer gives token {prompt.max()}, but the model's vocabulary has "
            f"{model.vocab_size}; tell the operator that the tokenizer is another model's",
            value=prompt.max(),
            limit=model.vocab_size - 1,
        )
    return prompt


async def _render(
    chat: serving_pb2.Chat, tokenizer: Tokenizer, max_chars: int, caller: Caller
) -> str:
    if tokenizer.chat is None:
        raise InvalidRequest(
            "chat",
            "the model has no chat template; send text or token_ids, or have the operator give the "
            "router one by --chat-template",
        )
    return await tokenizer.chat.render(chat, max_chars, caller)
