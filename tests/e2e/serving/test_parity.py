"""Parity with Transformers of every shape of Qwen3-MoE checkpoint.

Every shape of checkpoint goes through the real stack, on one and on two DP ranks and shared out
over attention TP as well, in a KV pool that is too small for all requests: prompts run in chunks
beside decodes, later requests find the blocks of earlier ones, and sequences lose their blocks and
are computed again.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from deploy.local.launch import LocalStack
from router.client import Client, Completion
from tests.e2e.conftest import PATIENT
from tests.e2e.support.stacks import paused
from tests.executor.support.checkpoints import SHAPES, VOCAB_SIZE, reference_logits, save_qwen3_moe

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

# dp_size, attn_tp_size and flags with which each shape is shared out over attention TP.
SHARED: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "plain": (2, 2, ("--moe-a2a", "torch")),
    "tied": (2, 2, ("--ep-size", "1")),
    "sparse_step": (2, 2, ()),  # its dense layers are split over all four
    "mlp_only": (2, 2, ("--moe-dense-tp-size", "1")),  # its one KV head is on both peers
    "biased": (1, 3, ("--ep-size", "1")),  # a KV head each
    "wide": (2, 2, ("--moe-a2a", "torch", "--moe-a2a-extend", "all-to-all")),
}


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, VOCAB_SIZE, (SHARED_LEN,), generator=generator).tolist()
    prompts = []
    for length in PROMPT_LENS:
        own = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        prompts.append(shared + own[SHARED_LEN:] if length > SHARED_LEN else own)
    return prompts


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, path, save_qwen3_moe(path, request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["dp1", "dp2", "attn_tp"])
async def stack(
    request: pytest.FixtureRequest, checkpoint: tuple[str, Path, Any]
) -> AsyncIterator[LocalStack]:
    shape, path, _ = checkpoint
    topologies = {"dp1": (1, 1, ()), "dp2": (2, 1, ()), "attn_tp": SHARED[shape]}
    dp_size, attn_tp_size, flags = topologies[request.param]
    stack = LocalStack(
        path,
        dp_size=dp_size,
        attn_tp_size=attn_tp_size,
        executor_args=(*EXECUTOR_ARGS, *flags),
        router_args=PATIENT,
    )
    async with stack:
        yield stack


@pytest.fixture
async def served(
    stack: LocalStack, checkpoint: tuple[str, Path, Any]
) -> AsyncIterator[tuple[Client, Any]]:
    async with stack.client() as client:
        yield client, checkpoint[2]


async def test_tokens_and_logits_are_those_of_transformers(
    stack: LocalStack, served: tuple[Client, Any]
) -> None:
    client, model = served
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
    served: tuple[Client, Any],
) -> None:
    client, model = served
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
