"""Tokens of texts and texts of tokens, for callers that have no tokenizer."""

import asyncio
from threading import Event
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from grpc import StatusCode

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import error_details
from router.api.prompts import SHORT_TEXT_LEN, encode_prompt
from router.api.text import Tokenizer
from router.requests.request import Int32Array
from tests.router.support.calls import connected, failure
from tests.router.support.fake_engines import MODEL, FakeEngines


async def test_texts_become_tokens_and_tokens_texts(tokenizer: Tokenizer):
    async with connected(FakeEngines(), tokenizer) as stub:
        for text in ("h€llo", "x" * 600):  # more than fit the model, too
            tokens = tokenizer.encode(text).tolist()
            answer = await stub.Tokenize(pb.TokenizeRequest(text=text))
            assert list(answer.token_ids) == tokens
            count = await stub.CountTokens(pb.CountTokensRequest(text=text, model="tiny-moe"))
            assert count.num_tokens == len(tokens)
        tokens = tokenizer.encode("h€llo").tolist()
        answer = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens))
        assert answer.text == "h€llo"
        answer = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens[:2]))
        assert answer.text == "h\N{REPLACEMENT CHARACTER}"


REFUSED = [
    # method, message, whether there is a tokenizer, field, a part of the message
    ("Tokenize", pb.TokenizeRequest(), True, "prompt", "there is none"),
    ("Tokenize", pb.TokenizeRequest(text=""), True, "text", "no tokens"),
    ("Tokenize", pb.TokenizeRequest(text="x" * 6337), True, "text", "6337 characters"),
    ("Tokenize", pb.TokenizeRequest(text="hi", model="other"), True, "model", "'other'"),
    ("Tokenize", pb.TokenizeRequest(text="hi"), False, "text", "no tokenizer"),
    ("CountTokens", pb.CountTokensRequest(text="hi"), False, "text", "no tokenizer"),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[1]), False, "token_ids", "no tokenizer"),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 1000]), True, "token_ids[1]", "is no token"),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * 101), True, "token_ids", "101 are too"),
]


async def test_what_cannot_be_encoded_or_decoded_is_refused_by_field_and_counted(
    tokenizer: Tokenizer,
):
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub, connected(engines) as bare_stub:
        for method, message, has_tokenizer, field, problem in REFUSED:
            error = await failure(getattr(stub if has_tokenizer else bare_stub, method)(message))
            assert error_details(error).field == field
            assert problem in (error.details() or "")
    assert engines.measures.refused.total() == len(REFUSED)


async def test_a_callers_flood_of_long_texts_keeps_no_other_callers_waiting():
    may_go_on = Event()

    def encode(text: str, **_: bool) -> Int32Array:
        if text[0] == "f":
            may_go_on.wait()
        return np.array([5], np.int32)

    async def count(text: str, caller: str) -> int:
        message = pb.CountTokensRequest(text=text * SHORT_TEXT_LEN * 2)
        return len(await encode_prompt(message, MODEL, Mock(encode=encode), (caller,)))

    flood = [asyncio.create_task(count("f", "a")) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(count("o", "b"), 30) == 1
    finally:
        may_go_on.set()
        await asyncio.gather(*flood)


@pytest.mark.parametrize(
    ("method", "message"),
    [("Tokenize", pb.TokenizeRequest(text="hi")), ("Detokenize", pb.DetokenizeRequest())],
)
async def test_before_a_group_has_formed_nothing_is_encoded(
    tokenizer: Tokenizer, method: str, message: Any
):
    async with connected(FakeEngines(model=None), tokenizer) as stub:
        error = await failure(getattr(stub, method)(message))
        assert error.code() is StatusCode.UNAVAILABLE
