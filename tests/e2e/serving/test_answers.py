"""The demo model through the whole system: if one of these fails, a caller gets a wrong answer.

The expected answers are right by arithmetic; tests/e2e/serving/test_demo.py checks that the model, under
Hugging Face transformers, gives them too.
"""

import asyncio
import random
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from deploy.local.demo import MAX_ANSWER_TOKENS, SEED, DemoRequest, ask, draw_requests, idle_group
from deploy.local.demo_tasks import STOP_ID, add, rev, solved_lines, text_of, token_ids
from router.client import Cancelled, Client, Options, Rejected, TimedOut

ENDLESS_TOKENS = 600  # takes far longer than any cancel or timeout of these tests


async def is_right(client: Client, request: DemoRequest) -> bool:
    return (await ask(client, request)).is_right


async def close_early(client: Client, request: DemoRequest) -> bool:
    """Leaves the stream after its first tokens."""
    endless = client.generate(request.prompt, max_tokens=ENDLESS_TOKENS, ignore_eos=True)
    async with aclosing(endless) as deltas:
        async for _ in deltas:
            return True
    return False


async def cancel_by_id(client: Client, request: DemoRequest) -> bool:
    """Cancels from beside the stream, which then says so."""
    endless = client.generate(request.prompt, max_tokens=ENDLESS_TOKENS, ignore_eos=True)
    first = await anext(endless)
    await client.cancel(first.request_id)
    with pytest.raises(Cancelled) as failure:
        async for _ in endless:
            pass
    return failure.value.reason == "CANCELLED"


async def time_out(client: Client, request: DemoRequest) -> bool:
    with pytest.raises(TimedOut) as failure:
        await client.complete(
            request.prompt, max_tokens=ENDLESS_TOKENS, ignore_eos=True, timeout_s=0.3
        )
    return failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_streams_end_right_while_others_are_cancelled_and_leave_no_block_behind(
    client: Client,
):
    rng = random.Random(5)
    ways = (is_right, is_right, is_right, close_early, cancel_by_id, time_out)
    async with asyncio.TaskGroup() as tasks:
        outcomes = [
            tasks.create_task(rng.choice(ways)(client, request))
            for request in draw_requests(SEED, 200)
        ]

    assert all(outcome.result() for outcome in outcomes)
    group = await idle_group(client)
    assert [rank.num_used_blocks for rank in group.ranks] == [0, 0]
    assert group.num_waiting == 0


@pytest.mark.parametrize(
    ("as_ids", "options", "expected"),
    [(False, {}, "42\n"), (True, {}, ""), (True, {"text": True}, "42\n")],
)
@pytest.mark.parametrize("on_stream", [False, True])
async def test_text_and_ids_give_the_same_answer_in_both_kinds_of_call(
    client: Client, as_ids: bool, options: Options, expected: str, on_stream: bool
):
    text = solved_lines(3, 250) + add(17, 25).prompt
    prompt = token_ids(text) if as_ids else text
    async with client.many() as many:
        caller = many if on_stream else client
        completion = await caller.complete(prompt, **{**options, "max_tokens": MAX_ANSWER_TOKENS})

    assert text_of(completion.token_ids) == "42\n"
    assert completion.text == expected


REV = rev("abcdefgh").prompt


@pytest.mark.parametrize(
    ("prompt", "options", "text", "generated", "finish"),
    [
        ("\n17+25=", {"stop_token_ids": [STOP_ID]}, "42\n", "42\n", ("stop", STOP_ID, None)),
        (REV, {"max_tokens": 5}, "hgfed", "hgfed", ("length", None, None)),
        # It ends the text before it, across tokens.
        (REV, {"stop_strings": ["zz", "fed"]}, "hg", "hgfed", ("stop", None, "fed")),
        # Text that is held back for one comes if it does not complete.
        (
            REV,
            {"stop_strings": ["a\n!", "gfee"]},
            "hgfedcba\n",
            "hgfedcba\n",
            ("stop", STOP_ID, None),
        ),
    ],
)
async def test_an_answer_ends_where_it_is_told_to_and_says_so(
    client: Client,
    prompt: str,
    options: Options,
    text: str,
    generated: str,
    finish: tuple[Any, ...],
):
    completion = await client.complete(prompt, **options)

    assert completion.text == text
    assert text_of(completion.token_ids) == generated
    ended = completion.finish
    assert ended.num_completion_tokens == len(completion.token_ids)
    assert (ended.reason, ended.stop_token_id, ended.stop_string) == finish


async def test_continuations_of_one_request_differ_and_a_seed_repeats_them(client: Client):
    async def continuations() -> list[list[int]]:
        completions = await client.complete_all(
            "\n17+25=", n=4, seed=7, temperature=3.0, max_tokens=20, ignore_eos=True
        )
        assert [completion.index for completion in completions] == [0, 1, 2, 3]
        return [completion.token_ids for completion in completions]

    first = await continuations()

    assert len({tuple(ids) for ids in first}) == 4
    assert await continuations() == first


async def test_a_seed_repeats_whoever_else_is_in_the_batch(client: Client):
    async def sample() -> list[int]:
        completion = await client.complete(
            "\nrev ", seed=11, temperature=2.0, top_k=50, top_p=0.95, max_tokens=40, ignore_eos=True
        )
        return completion.token_ids

    alone = await sample()
    others = [asyncio.create_task(ask(client, r)) for r in draw_requests(SEED, 50)]
    together = await sample()
    await asyncio.gather(*others)

    assert together == alone


async def test_requests_without_a_seed_differ(client: Client):
    completions = await client.complete_all(
        "\nrev ", n=3, temperature=3.0, max_tokens=30, ignore_eos=True
    )

    assert len({tuple(completion.token_ids) for completion in completions}) == 3


async def test_usage_counts_the_tokens_that_a_repeated_prompt_finds_cached(client: Client):
    prompt = token_ids(solved_lines(6, 250) + "\n17+25=")
    first = (await client.complete(prompt, max_tokens=16)).finish
    second = (await client.complete(prompt, max_tokens=16)).finish

    assert first.num_prompt_tokens == len(prompt)
    assert first.num_cached_tokens == 0
    assert first.num_completion_tokens == len("42\n")
    assert second.num_prompt_tokens == len(prompt)
    # Whole blocks of 16, and the last token is always computed: its logits are wanted.
    assert second.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert second.dp_rank == first.dp_rank


async def test_a_request_that_cannot_work_is_refused_with_the_field_at_fault(client: Client):
    with pytest.raises(Rejected) as failure:
        await client.complete("\n17+25=", temperature=-1.0)
    assert failure.value.reason == "INVALID_REQUEST"
    assert failure.value.field == "sampling.temperature"

    with pytest.raises(Rejected) as failure:
        await client.complete([5] * 1025)
    assert failure.value.reason == "PROMPT_TOO_LONG"


async def test_the_model_is_described_by_its_checkpoint(client: Client):
    model = await client.get_model()

    assert model.name == "demo_model"
    assert model.architecture == "Qwen3MoeForCausalLM"
    assert model.vocab_size == 264
    assert model.has_tokenizer
    assert STOP_ID in model.eos_token_ids
