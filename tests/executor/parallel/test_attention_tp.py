"""If this fails, executors that share a DP rank's attention answer with other tokens than one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.parallel.layout import DpPaddingMode
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.support.checkpoints import (
    SHAPES,
    VOCAB_SIZE,
    reference_logits,
    save_family,
    save_qwen3_moe,
)
from tests.executor.support.ranks.attention_tp_ranks import Case, Step, answer_steps, serve_cases
from tests.executor.support.ranks.ranks import run_ranks
from tests.executor.support.steps import (
    decode_part,
    floats_of,
    ints_of,
    prompt_part,
    step,
    tokens_of,
)

TOLERANCE = 1e-4
# All shapes of the parity test, some of its families, and vocabularies that do not divide by 2. Its six
# heads and three KV heads cannot be shared by two executors, so here they are six and two.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{shape: (shape, {}) for shape in SHAPES},
    "biased": ("biased", {"num_key_value_heads": 2}),
    "odd_vocab": ("plain", {"vocab_size": VOCAB_SIZE + 1}),
    "odd_tied": ("tied", {"vocab_size": VOCAB_SIZE + 1}),
    "qwen2": ("qwen2", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "qwen2_moe": ("qwen2_moe", {}),
}
DENSE = ("sparse_step", "mlp_only")
# Shared experts, biased experts whole and in parts, sinks, norms over projections of all heads.
HEADS = [("glm4_moe", None, None), ("gpt_oss", None, None), ("gpt_oss", 1, 1), ("minimax_m2", 1, 1)]
MODES = tuple(DpPaddingMode)

# Two prompts on DP rank 0 and one on DP rank 1, in chunks, beside each other's decodes. In some
# steps a DP rank is idle; few token counts are even.
_CHUNKS: list[tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]] = [
    ({0: (0, 5)}, {}),
    ({0: (5, 8), 3: (0, 4)}, {1: (0, 11)}),
    ({0: (8, 9), 3: (4, 5)}, {1: (11, 12)}),
    ({}, {1: (12, 20)}),
    ({3: (5, 6)}, {1: (20, 21)}),
    ({0: (9, 13), 3: (6, 9)}, {}),
]


def _prompts() -> list[dict[int, list[int]]]:
    rng = np.random.default_rng(5)
    return [
        {row: rng.integers(3, VOCAB_SIZE, length).tolist() for row, length in of_rank.items()}
        for of_rank in ({0: 13, 3: 9}, {1: 21})
    ]


PROMPTS = _prompts()


def _steps(dp_size: int) -> list[Step]:
    return [
        tuple(
            {row: PROMPTS[rank][row][slice(*chunk)] for row, chunk in chunks[rank].items()}
            for rank in range(dp_size)
        )
        for chunks in _CHUNKS
    ]


def _cases(sizes: tuple[int, int]) -> list[Case]:
    plain = [Case(shape, None, None, mode) for shape, mode in product(CHECKPOINTS, MODES)]
    whole_dense = [Case(shape, None, 1, mode) for shape, mode in product(DENSE, MODES)]
    parts = [1, 2] if sizes == (2, 2) else [1]
    shared_experts = [Case("wide", ep_size, None, mode) for ep_size, mode in product(parts, MODES)]
    heads = [Case(*case, DpPaddingMode.SUM_LEN) for case in HEADS]
    return plain + whole_dense + shared_experts + heads


@dataclass(frozen=True)
class Saved:
    """The checkpoints, and what Transformers makes of the prompts."""

    paths: Mapping[str, Path]
    expected: Mapping[str, list[dict[int, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    paths, expected = {}, {}
    for name, (shape, changed) in CHECKPOINTS.items():
        paths[name] = tmp_path_factory.mktemp(name)
        save = save_qwen3_moe if shape in SHAPES else save_family
        expected[name] = _logits(save(paths[name], shape, **changed))
    for name in {name for name, *_ in HEADS}:
        paths[name] = tmp_path_factory.mktemp(name)
        expected[name] = _logits(save_model(paths[name], name))
    return Saved(paths, expected)


def _logits(model: Any) -> list[dict[int, torch.Tensor]]:
    return [
        {row: reference_logits(model, ids) for row, ids in of_rank.items()} for of_rank in PROMPTS
    ]


Served = dict[Case, Sequence[dict[int, Any]]]  # by case, what each executor answered


def _serve(saved: Saved, sizes: tuple[int, int]) -> Served:
    cases, steps = _cases(sizes), _steps(sizes[0])
    answers = run_ranks(serve_cases, sizes[0] * sizes[1], saved.paths, sizes, cases, steps)
    return dict(zip(cases, zip(*answers, strict=True), strict=True))


@pytest.fixture(scope="module")
def served(saved: Saved) -> Callable[[tuple[int, int]], Served]:
    """Answers of two executors of one DP rank, of two DP ranks, or of two DP ranks of two."""
    return cache(lambda sizes: _serve(saved, sizes))


def name_of(case: Case | tuple[int, int]) -> str:
    if isinstance(case, tuple):
        return str(case)
    return f"{case.shape}-ep_{case.ep_size}-dense_{case.moe_dense_tp_size}-{case.padding_mode.name}"


@pytest.mark.parametrize(
    ("sizes", "case"),
    [(sizes, case) for sizes in ((1, 2), (2, 1), (2, 2)) for case in _cases(sizes)],
    ids=name_of,
)
def test_executors_of_a_group_have_the_logits_of_transformers(
    saved: Saved, served: Any, sizes: tuple[int, int], case: Case
):
    assert_served(served(sizes)[case], saved.expected[case.shape], attn_tp_size=sizes[1])


def assert_served(
    answers: Sequence[dict[int, Any]], expected: list[dict[int, torch.Tensor]], attn_tp_size: int
) -> None:
    """Every executor's logits are close to Transformers', and its peers' are the same bits."""
    for world_rank, logits in enumerate(answers):
        wanted = expected[world_rank // attn_tp_size]
        assert logits.keys() == wanted.keys()
        first = answers[world_rank - world_rank % attn_tp_size]
        for row, theirs in wanted.items():
            ours = logits[row]
            assert ours.dtype == np.float32
            assert ours.shape == theirs.shape
            assert np.abs(ours - theirs.numpy()).max() < TOLERANCE
            assert ours.tobytes() == first[row].tobytes()


WORKER_SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 64,
}


def _worker_requests() -> list[pb.StepRequest]:
    """Two prompts, one greedy, one sampled and scored; then decodes of tokens not yet known."""
    settings: dict[str, Any] = {"temperature": [1.0], "seed": [3], "frequency_penalty": [0.5]}
    settings |= {"scores_output": [1], "num_top_logprobs": [2]}
    requests = [
        step(1, prompt_part(0, [5, 17, 33, 2, 90], [1, 2]), num_tokens=[5], num_logits=[1]),
        step(2, prompt_part(3, [8, 60, 4], [11], **settings), num_tokens=[3], num_logits=[1]),
    ]
    blocks = iter(range(20, 40))
    for position in range(3, 11):
        new = [next(blocks)] if position % 4 == 0 else []
        part = decode_part(3, position, -1, new)
        requests.append(step(position, part, num_tokens=[1]))
    for request in requests[2::2]:  # every other decode replays a graph of 2 rows
        request.agreement.graph_size = 2
    return requests


@pytest.fixture(scope="module")
def workers(tiny_checkpoint: Path) -> list[Any]:
    """What each of two workers that share a DP rank answers."""
    return run_ranks(answer_steps, 2, tiny_checkpoint, WORKER_SETTINGS, _worker_requests())


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path) -> list[pb.StepResponse]:
    """What one worker answers, whose graphs have the same sizes."""
    settings = WORKER_SETTINGS | {"decode_graph_sizes": (2, 4)}
    worker, _ = build_worker(ExecutorConfig(model=tiny_checkpoint, **settings))
    worker.join(1, "")
    return [worker.execute(request) for request in _worker_requests()]


def test_the_first_worker_of_a_dp_rank_answers_for_both(
    workers: list[Any], alone: list[pb.StepResponse]
):
    first, second = (answered["alike"] for answered in workers)
    for response, wanted in zip(first.responses, alone, strict=True):
        assert tokens_of(response) == tokens_of(wanted)
        ours, theirs = response.ranks[0], wanted.ranks[0]
        np.testing.assert_allclose(floats_of(ours.logprobs), floats_of(theirs.logprobs), atol=1e-4)
        assert ints_of(ours.top_ids) == ints_of(theirs.top_ids)
    assert any(response.ranks[0].logprobs for response in alone)
    assert not any(response.ranks for response in second.responses)
    assert first.last_tokens == second.last_tokens


def test_a_worker_that_would_draw_other_tokens_goes_on_with_those_of_the_first(workers: list[Any]):
    """Else it would feed itself another text, and nobody would notice."""
    for answered in workers:
        assert answered["at odds"] == answered["alike"]
        assert any(map(any, answered["alike"].output_counts))
