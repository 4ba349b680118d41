"""Parity with Transformers of Qwen3-MoE through the real stack, on one executor, on two and on four.

Each shape of checkpoint in several ways to share it out is in tests/together/test_family_parity.py,
without processes. The KV pool is too small for all requests: prompts run in chunks beside decodes,
later requests find the blocks of earlier ones, and sequences lose their blocks and are computed again.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from deploy.local.launch import LocalStack
from router.client import Client, Completion
from tests.e2e.conftest import PATIENT
from tests.e2e.support.stacks import paused
from tests.executor.support.checkpoints import VOCAB_SIZE, reference_logits, save_qwen3_moe

TOLERANCE = 1e-4
NUM_OUTPUT_TOKENS = 48
NUM_TOP = 20
BLOCK_SIZE = 4
PROMPT_LENS = (1, 5, 17, 33, 48, 52, 60, 71)
SHARED_LEN = 41  # of the longest prompts, the first tokens are alike

# A sequence takes up to 30 blocks, and a rank holds about two.
EXECUTOR_ARGS = (
    *("--block-size", str(BLOCK_SIZE), "--num-kv-blocks", "64", "--max-model-len", "140"),
    *("--max-num-seqs", "6", "--max-num-batched-tokens", "24"),
)

# A shape of checkpoint, dp_size, attn_tp_size and flags.
STACKS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "one": ("tied", 1, 1, ()),
    "dp2": ("plain", 2, 1, ()),
    "dp2 tp2, dense MLPs whole": ("mlp_only", 2, 2, ("--moe-dense-tp-size", "1")),
    "dp2 tp2, all-to-all": ("wide", 2, 2, ("--moe-a2a", "torch", "--moe-a2a-extend", "all-to-all")),
}


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, VOCAB_SIZE, (SHARED_LEN,), generator=generator).tolist()
    prompts = []
    for length in PROMPT_LENS:
        own = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        prompts.append(shared + own[SHARED_LEN:] if length > SHARED_LEN else own)
    return prompts


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=STACKS)
async def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[LocalStack, Any]]:
    """Yields a stack, and the model that it serves."""
    shape, dp_size, attn_tp_size, flags = STACKS[request.param]
    path = tmp_path_factory.mktemp(shape)
    model = save_qwen3_moe(path, shape)
    stack = LocalStack(
        path,
        dp_size=dp_size,
        attn_tp_size=attn_tp_size,
        executor_args=(*EXECUTOR_ARGS, *flags),
        router_args=PATIENT,
    )
    async with stack:
        yield stack, model


@pytest.fixture
async def served(made: tuple[LocalStack, Any]) -> AsyncIterator[tuple[LocalStack, Client, Any]]:
    stack, model = made
    async with stack.client() as client:
        yield stack, client, model


async def test_tokens_and_logits_are_those_of_transformers(
    served: tuple[LocalStack, Client, Any],
) -> None:
    stack, client, model = served
    prompts = make_prompts()
    completions = [await complete(client, prompts[-1])]
    completions += await complete_together(stack, client, prompts[:-1])
    for prompt, completion in zip(prompts[-1:] + prompts[:-1], completions, strict=True):
        assert_like_transformers(model, prompt, completion)
    finishes = [completion.finish for completion in completions]
    assert all(finish is not None for finish in finishes)
    assert sum(finish.num_preemptions for finish in finishes if finish) > 0
    assert sum(finish.num_cached_tokens for finish in finishes if finish) >= BLOCK_SIZE
    [group] = await client.get_status()
    assert all(rank.total_tokens > 0 for rank in group.ranks)


async def test_prompt_log_probabilities_are_those_of_transformers(
    served: tuple[LocalStack, Client, Any],
) -> None:
    _, client, model = served
    prompt = make_prompts()[-1]
    await client.complete(prompt, max_tokens=1)  # so that its blocks are cached
    completion = await client.complete(prompt, max_tokens=1, prompt_logprobs=True, top_logprobs=3)
    assert completion.finish.num_cached_tokens == 0
    expected = reference_logits(model, prompt).log_softmax(-1)
    assert [score.token_id for score in completion.prompt_logprobs] == prompt[1:]
    for position, score in enumerate(completion.prompt_logprobs):
        assert abs(score.logprob - expected[position, prompt[position + 1]].item()) < TOLERANCE


async def complete(client: Client, prompt: list[int]) -> Completion:
    return await client.complete(
        prompt, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=True, top_logprobs=NUM_TOP
    )


async def complete_together(
    stack: LocalStack, client: Client, prompts: list[list[int]]
) -> list[Completion]:
    """Asks for all at once: no step runs until the router has every request.

    A step that was on its way by then may run, and takes a few of them.
    """
    with paused(stack):
        asked = [asyncio.create_task(complete(client, prompt)) for prompt in prompts]
        while await num_there(client) < len(prompts):
            await asyncio.sleep(0.01)
    return await asyncio.gather(*asked)


async def num_there(client: Client) -> int:
    [group] = await client.get_status()
    return group.num_waiting + sum(rank.num_running for rank in group.ranks)


def assert_like_transformers(model: Any, prompt: list[int], completion: Completion) -> None:
    """Checks each token against the greedy one, and its log probability and the likeliest 20."""
    tokens = prompt + completion.token_ids
    assert len(completion.token_ids) == NUM_OUTPUT_TOKENS
    expected = reference_logits(model, tokens[:-1]).log_softmax(-1)[len(prompt) - 1 :]
    assert completion.token_ids == expected.argmax(-1).tolist()
    assert [score.token_id for score in completion.logprobs] == completion.token_ids
    for score, row in zip(completion.logprobs, expected, strict=True):
        assert abs(score.logprob - row[score.token_id].item()) < TOLERANCE
        assert len(dict(score.top)) == len(score.top) == NUM_TOP
        assert score.top[0] == (score.token_id, pytest.approx(score.logprob, abs=1e-5))
        assert list(score.top) == sorted(score.top, key=lambda entry: -entry[1])
        for token_id, logprob in score.top:
            assert abs(logprob - row[token_id].item()) < TOLERANCE
