"""What one caller's answers say must not depend on what another caller sent."""

import random

import pytest

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.interceptors import Caller
from router.api.messages import read_request, take_response
from router.requests.callers import CallerSettings
from router.requests.request import Request
from tests.router.support.fake_engines import MODEL
from tests.router.support.stepper import Stepper, make_shape

SENDER, STRANGER = ("sender",), ("stranger",)
NUM_TRIES = 1000
NUM_ROWS, PROMPT_LEN = 32, 24  # 6 blocks each
OWN = PROMPT_LEN - 4  # cached, of a prompt that its caller repeats: all but the last token's block


class World:
    """One rank, with room for the prompts of all tries.

    Args:
        settings: What the operator said.
    """

    def __init__(self, settings: CallerSettings) -> None:
        self._settings = settings
        sizes = {"num_blocks": 40_000, "rows_per_rank": NUM_ROWS, "max_num_logits": NUM_ROWS}
        self._stepper = Stepper(make_shape(max_num_batched_tokens=NUM_ROWS * PROMPT_LEN, **sizes))

    async def send(self, caller: Caller, prompts: list[list[int]]) -> list[Request]:
        """Runs requests to their ends, as many at a time as have a row."""
        requests = [await self._read(caller, prompt) for prompt in prompts]
        for start in range(0, len(requests), NUM_ROWS):
            for request in requests[start : start + NUM_ROWS]:
                self._stepper.admission.submit(request)
            self._stepper.run()
        return requests

    async def counts(self, caller: Caller, prompts: list[list[int]]) -> list[int]:
        """Sends requests. Returns of how many cached tokens their caller is told."""
        requests = await self.send(caller, prompts)
        responses = [take_response(request.sequences[0]) for request in requests]
        return [response.finish.num_cached_tokens for response in responses if response]

    async def _read(self, caller: Caller, prompt: list[int]) -> Request:
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
        message.stop.max_tokens = 1
        return await read_request(
            message,
            model=MODEL,
            tokenizer=None,
            listener=self._stepper.listener,
            caller=caller,
            settings=self._settings,
        )


def any_prompts(rng: random.Random, count: int = 1) -> list[list[int]]:
    return [[rng.randrange(MODEL.vocab_size) for _ in range(PROMPT_LEN)] for _ in range(count)]


async def test_in_1000_tries_a_repeated_prompt_counts_as_a_new_one_to_every_other_caller():
    world, rng = World(CallerSettings()), random.Random(0)
    secrets, others = any_prompts(rng, NUM_TRIES), any_prompts(rng, NUM_TRIES)
    assert await world.counts(SENDER, secrets) == [0] * NUM_TRIES
    assert await world.counts(STRANGER, secrets) == await world.counts(STRANGER, others)
    assert await world.counts(SENDER, secrets) == [OWN] * NUM_TRIES


async def test_callers_that_share_the_cache_gain_from_each_other_but_are_told_of_nothing():
    world, secret = (
        World(CallerSettings(prefix_cache_scope="shared")),
        any_prompts(random.Random(0)),
    )
    assert await world.counts(SENDER, secret) == [0]
    [repeated] = await world.send(STRANGER, secret)
    assert repeated.sequences[0].progress.num_cached_tokens == OWN
    assert await world.counts(STRANGER, secret) == await world.counts(SENDER, secret) == [0]


async def test_callers_that_nothing_tells_apart_are_one():
    world, prompt = World(CallerSettings()), any_prompts(random.Random(0))
    assert [await world.counts((), prompt) for _ in range(2)] == [[0], [OWN]]


@pytest.mark.parametrize(
    ("operators", "caller", "is_operator"),
    [
        (None, (), True),  # nobody is told apart
        (None, SENDER, False),
        ("sender, watch", SENDER, True),
        ("watch", ("watch", "search.example"), True),
        ("watch", SENDER, False),
        ("watch,", ("",), False),
    ],
)
def test_operators_are_those_named(operators: str | None, caller: Caller, is_operator: bool):
    assert CallerSettings(operators=operators).is_operator(caller) == is_operator


@pytest.mark.parametrize(
    ("metadata", "flow"),
    [
        ([], ("sender",)),
        ([("x-user", "")], ("sender",)),
        ([("other", "a"), ("x-user", "b"), ("x-user", "c")], ("sender", "x-user=b")),
    ],
)
def test_metadata_tell_the_flows_of_a_caller_apart(
    metadata: list[tuple[str, str | bytes]], flow: Caller
):
    settings = CallerSettings(flow_metadata="x-user")
    assert settings.flow_of(SENDER, metadata) == flow
    long = [settings.flow_of(SENDER, [("x-user", "a" * 1000 + end)]) for end in "bc"]
    assert long[0] != long[1]
    assert all(len(name) < 64 for _, name in long)
