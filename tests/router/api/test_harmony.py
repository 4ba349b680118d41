"""Harmony, the channels of gpt-oss. A parser of text, or of token ids behind a gateway, must get
every marker, the last one included.
"""

import re
from pathlib import Path

import pytest

from protos.serving.v1 import serving_pb2 as pb
from router.api.text import Tokenizer
from router.requests.request import FinishReason
from tests.router.support import fake_engines, vllm_calls
from tests.router.support.calls import connected, prompt, responses
from tests.router.support.fake_engines import FakeEngines

MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
RETURN, CALL = 260, 261
TRANSCRIPT = (
    "<|channel|>analysis<|message|>Une requête… 🤔<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Voilà: é = 世<|return|>"
)
CHANNELS = [("analysis", "Une requête… 🤔"), ("final", "Voilà: é = 世")]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return fake_engines.byte_tokenizer(tmp_path, special=MARKERS)


def channels_of(transcript: str) -> list[tuple[str, str]]:
    return re.findall(r"<\|channel\|>(\w+)<\|message\|>(.*?)<\|(?:end|return|call)\|>", transcript)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"skip_special_tokens": False, "include_stop": True}, TRANSCRIPT),
        ({"skip_special_tokens": False}, TRANSCRIPT.removesuffix("<|return|>")),
        ({"include_stop": True}, re.sub(r"<\|\w+\|>", "", TRANSCRIPT)),
        ({}, re.sub(r"<\|\w+\|>", "", TRANSCRIPT)),
    ],
)
@pytest.mark.parametrize("stop_strings", [[], ["never"]])
async def test_text_has_the_markers_that_a_request_asks_for(
    options: dict[str, bool], expected: str, stop_strings: list[str], tokenizer: Tokenizer
):
    """With stop strings the engine feeds the text, without them the call does."""
    engines = FakeEngines()
    stop = pb.StopConditions(stop_token_ids=[RETURN, CALL], stop_strings=stop_strings)
    message = prompt(stop=stop, output=pb.OutputOptions(text=True, **options))
    async with connected(engines, tokenizer) as stub:
        call = stub.Generate(message)
        [sequence] = (await engines.arrivals.get()).sequences
        *token_ids, last = tokenizer.encode(TRANSCRIPT).tolist()
        for token_id in token_ids:
            engines.give(sequence, [token_id])
        sequence.stop_token_id = last
        engines.give(sequence, [last])
        engines.finish(sequence, FinishReason.STOP)
        text = "".join(message.text for message in await responses(call))
    assert text == expected


@pytest.mark.parametrize("stream", [True, False])
async def test_a_gateway_gets_the_markers_as_token_ids_and_which_one_ended_it(
    stream: bool, tokenizer: Tokenizer
):
    asked = {"stop_token_ids": [RETURN, CALL], "skip_special_tokens": False, "stream": stream}
    async with vllm_calls.generating(tokenizer, **asked) as (engines, call, [sequence]):
        token_ids = tokenizer.encode(TRANSCRIPT).tolist()
        for start in range(0, len(token_ids), 7):
            engines.give(sequence, token_ids[start : start + 7])
        sequence.stop_token_id = RETURN
        engines.finish(sequence, FinishReason.STOP)
        *chunks, complete = await vllm_calls.answers(call)

    given = [i for chunk in chunks for i in chunk.token_ids] if stream else complete.output_ids
    assert channels_of(tokenizer.decode(list(given), skips_special=False)) == CHANNELS
    assert complete.matched_token_id == RETURN


async def test_a_marker_may_be_a_gateways_stop_string(tokenizer: Tokenizer):
    asked = {"stop": ["<|end|>"], "skip_special_tokens": False}
    async with vllm_calls.generating(tokenizer, **asked) as (engines, call, [sequence]):
        engines.give(sequence, tokenizer.encode("thought<|end|>"))
        complete = (await vllm_calls.answers(call))[-1]
    assert complete.matched_stop_str == "<|end|>"
