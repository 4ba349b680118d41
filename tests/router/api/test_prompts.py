"""Tokens of texts and texts of tokens, for callers that have no tokenizer."""

from typing import Any

import pytest
from grpc import StatusCode

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import error_details
from router.api.text import Tokenizer
from tests.router.support.calls import connected, failure
from tests.router.support.fake_engines import FakeEngines


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
