"""If this fails, Lockstep answers with other tokens than the model it was given."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.support.checkpoints import (
    FAMILIES,
    SHAPES,
    VOCAB_SIZE,
    reference_logits,
    save_family,
    save_qwen3_moe,
)
from tests.executor.support.serving import BLOCK_SIZE, Rank

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[*SHAPES, *FAMILIES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    save = save_qwen3_moe if request.param in SHAPES else save_family
    return path, save(path, request.param)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max().item() < TOLERANCE


def test_a_whole_prompt_has_the_logits_of_transformers(checkpoint: tuple[Path, Any]):
    path, model = checkpoint
    ids = prompt(37)
    assert_close(Rank(path).step({0: ids})[0], reference_logits(model, ids))


def test_a_prompt_in_chunks_beside_decodes_has_the_same_logits(checkpoint: tuple[Path, Any]):
    path, model = checkpoint
    rank, ids, other = Rank(path), prompt(41), prompt(23, seed=1)
    got: dict[int, list[torch.Tensor]] = {0: [], 3: []}
    # Row 3 runs chunks of 5 to 20 tokens; row 0 starts with 18 and then decodes.
    for chunk, decode in [((0, 13), (0, 18)), ((13, 18), (18, 19)), ((18, 38), (19, 20))]:
        step = rank.step({3: ids[slice(*chunk)], 0: other[slice(*decode)]})
        got[0].append(step[0])
        got[3].append(step[3])
    got[3].append(rank.step({3: ids[38:]})[3])
    assert_close(torch.cat(got[3]), reference_logits(model, ids))
    assert_close(torch.cat(got[0]), reference_logits(model, other[:20]))


def test_a_shared_prefix_gives_the_same_logits(checkpoint: tuple[Path, Any]):
    path, model = checkpoint
    rank, ids = Rank(path), prompt(30)
    rank.step({0: ids})
    rank.share_prefix(owner=0, row=1, num_blocks=5)
    branch = ids[: 5 * BLOCK_SIZE] + prompt(9, seed=2)
    assert_close(
        rank.step({1: branch[5 * BLOCK_SIZE :]})[1],
        reference_logits(model, branch)[5 * BLOCK_SIZE :],
    )


def test_64_greedy_tokens_of_a_ragged_batch_equal_those_of_generate(checkpoint: tuple[Path, Any]):
    path, model = checkpoint
    prompts = {0: prompt(3, 3), 2: prompt(21, 4), 5: prompt(60, 5)}
    assert greedy(Rank(path), prompts, 64) == {
        row: greedy_reference(model, ids, 64) for row, ids in prompts.items()
    }


def greedy(rank: Rank, prompts: dict[int, list[int]], num_tokens: int) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {row: [] for row in prompts}
    feed = prompts
    for _ in range(num_tokens):
        logits = rank.step(feed)
        feed = {row: [int(logits[row][-1].argmax())] for row in prompts}
        for row, [token] in feed.items():
            tokens[row].append(token)
    return tokens


def greedy_reference(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens
