"""If this fails, some way of serving some family answers with other tokens than Transformers.

The router's scheduler drives real executors: prompts longer than windows and than ropes were first
made for, in chunks beside decodes, shared prefixes, preempted sequences, graphs with poisoned padding,
blocks that are NaN from the moment in which they are given back.
A normal run takes each family one way; ``LOCKSTEP_FAMILY_WAYS=all`` takes each every way, and further.
"""

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.budget.capture_sizes import GraphSizes
from tests.executor.model.families import head_checkpoints
from tests.executor.support.checkpoints import (
    FAMILIES,
    LATENT_SHAPES,
    SHAPES,
    VOCAB_SIZE,
    reference_logits,
    save_family,
    save_latent_model,
    save_qwen3_moe,
)
from tests.executor.support.experts import poison_ghosts
from tests.executor.support.recording.fixtures import own_buffers, world
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.runner_cases import (
    PREFILL_GRAPHS,
    RunnerCase,
    assert_close,
    captured,
    registry_of,
)
from tests.together.speculation.speculative_cell import (
    Answer,
    Ask,
    Cell,
    Router,
    cell_of,
    poison_free_blocks,
    serve,
)

__all__ = ["own_buffers", "world"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOLERANCE = 1e-4
IS_FULL = os.environ.get("LOCKSTEP_FAMILY_WAYS") == "all"
NUM_TOKENS = 64 if IS_FULL else 8
MAX_LEN = 168
FEW_BLOCKS = (104 + NUM_TOKENS) // 4 + 2  # a rank holds about two sequences
# Where windows give blocks back, longer answers are needed to run out of them, and more blocks to find
# a prefix: those of its last window may be gone.
ROOMS = {"gpt_oss": ((49, 90), 32)}

SAVES: dict[str, Callable[[Path], Any]] = {
    **{shape: partial(save_qwen3_moe, shape=shape) for shape in SHAPES},
    **{name: partial(save_family, name=name) for name in FAMILIES},
    **{shape: partial(save_latent_model, shape=shape) for shape in LATENT_SHAPES},
    **{
        shape: partial(head_checkpoints.save_model, shape=shape)
        for shape in head_checkpoints.SHAPES
    },
}
DENSE = {"llama", "llama_biased", "qwen2", "qwen3"}

WHOLE_MLPS = {"moe_dense_tp_size": 1}  # whose widths do not divide by 3 or 5
# Settings of executors. Where ep_size is unset, each executor is an EP rank.
WAYS: dict[str, dict[str, Any]] = {
    "EP 2, DP 2": {"dp_size": 2, "prefill_graphs": "breakable"},
    "EP 2, attention TP 2": {"attn_tp_size": 2, "prefill_graphs": "piecewise"},
    "all-to-all, DP 2": {"dp_size": 2, "moe_a2a": "torch", "moe_a2a_extend": "all-to-all"},
    "one executor": {"prefill_graphs": "breakable"},
    "DP 2": {"dp_size": 2, "ep_size": 1, "prefill_graphs": "piecewise"},
    "attention TP 2": {"attn_tp_size": 2, "ep_size": 1, "prefill_graphs": "breakable"},
    "whole prompts": {"max_num_batched_tokens": 128},
    "EP 4": {"dp_size": 2, "attn_tp_size": 2, "prefill_graphs": "breakable"},
    "EP 2 of 4": {"dp_size": 2, "attn_tp_size": 2, "ep_size": 2, "prefill_graphs": "piecewise"},
    "all-to-all, 4": {"dp_size": 2, "attn_tp_size": 2, "moe_a2a": "torch"},
    "DP 4": {"dp_size": 4, "ep_size": 1},
    "EP 4, DP 4": {"dp_size": 4, "prefill_graphs": "breakable"},
    "all-to-all, DP 4": {"dp_size": 4, "moe_a2a": "torch", "moe_a2a_extend": "all-to-all"},
    "all-to-all, attention TP 2": {"attn_tp_size": 2, "moe_a2a": "torch"},
    "DP 2, attention TP 2": {"dp_size": 2, "attn_tp_size": 2, "ep_size": 1},
    "attention TP 3": {"attn_tp_size": 3, "ep_size": 1, "max_num_seqs": 6},  # of 6 heads
    # Parts of unequal numbers of experts; of 4 experts, one of five executors has none.
    "EP 3, DP 3": {"dp_size": 3, **WHOLE_MLPS, "prefill_graphs": "breakable"},
    "all-to-all, DP 3": {
        "dp_size": 3,
        **WHOLE_MLPS,
        "moe_a2a": "torch",
        "moe_a2a_extend": "all-to-all",
    },
    "EP 5, DP 5": {"dp_size": 5, **WHOLE_MLPS, "prefill_graphs": "piecewise"},
    "all-to-all, DP 5": {"dp_size": 5, **WHOLE_MLPS, "moe_a2a": "torch"},
    "EP 3 of 6": {"dp_size": 3, "attn_tp_size": 2, "ep_size": 3, **WHOLE_MLPS},
}
NEEDS_EXPERTS = {way for way in WAYS if "EP" in way or "all-to-all" in way} - {"EP 4"}
QUICK = [
    ("llama", "attention TP 2"),
    ("qwen2", "DP 2"),
    ("qwen3", "one executor"),
    ("mixtral", "EP 3, DP 3"),
    ("olmoe", "EP 2, attention TP 2"),
    ("qwen2_moe", "all-to-all, DP 3"),
    ("deepseek_v3", "EP 2, DP 2"),
    ("kimi_k2", "all-to-all, DP 5"),
    ("deepseek_v2", "one executor"),
    ("glm4_moe_lite", "EP 2, attention TP 2"),
    ("glm4_moe", "EP 5, DP 5"),
    ("gpt_oss", "EP 3, DP 3"),
    ("minimax_m2", "one executor"),
    ("plain", "one executor"),
    ("plain", "all-to-all, 4"),
    ("tied", "DP 4"),
    ("tied", "DP 2, attention TP 2"),
    ("sparse_step", "all-to-all, DP 2"),
    ("sparse_step", "EP 4"),
    ("mlp_only", "all-to-all, attention TP 2"),
    ("biased", "EP 4, DP 4"),
    ("biased", "attention TP 3"),
    ("wide", "all-to-all, DP 4"),
    ("wide", "EP 3 of 6"),
]
EVERY = [
    (family, way)
    for family in SAVES
    for way in WAYS
    if (family not in DENSE or way not in NEEDS_EXPERTS)
    and WAYS[way].get("attn_tp_size", 1) in ((1, 3) if family == "biased" else (1, 2))
]
# What graphs of other families record is made of the same operators.
RECORDED = list(SAVES) if IS_FULL else ["qwen2_moe", "deepseek_v3", "glm4_moe", "gpt_oss"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Returns what saves a family's checkpoint, once."""

    @cache
    def save(family: str) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp(family)
        return path, SAVES[family](path)

    return save


def asks(num_late: int) -> list[Ask]:
    rng = np.random.default_rng(12)
    first, *others = (
        tuple(rng.integers(3, VOCAB_SIZE, length).tolist())
        for length in (100, 30, 22, 90, 26, 34, 38, 29)
    )
    branch = first[:61] + others[0][:20]
    return [
        Ask(prompt=first, max_tokens=NUM_TOKENS, logprobs=True),
        Ask(prompt=others[1], max_tokens=2, prompt_logprobs=True),
        *(
            Ask(prompt=prompt, max_tokens=num_late, logprobs=True, delay=delay)
            for prompt, delay in (
                (others[0], 3),
                (branch, 12),
                *((late, 14) for late in others[2:]),
            )
        ),
    ]


def poison_padding(cell: Cell) -> None:
    for worker in cell.workers:
        runners: list[Any] = [worker._runner._decode, worker._runner._prefill]  # type: ignore
        for runner in filter(None, runners):
            runner.graphs.registry.poison_tails()


def poison_slots(cell: Cell) -> None:
    for worker in cell.workers:
        forward_pass: Any = worker._runner._eager._pass  # type: ignore[attr-defined]
        for experts in forward_pass.stages.__self__.expert_slots:
            poison_ghosts(experts)


@pytest.mark.parametrize(("family", "way"), EVERY if IS_FULL else QUICK)
def test_every_family_answers_like_transformers(family: str, way: str, saved: Any) -> None:
    path, model = saved(family)
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 4} | WAYS[way]
    if settings.get("prefill_graphs"):
        settings["prefill_graph_sizes"] = (8, 24)
    rooms, num_late = ROOMS.get(family, ((FEW_BLOCKS,), 12))
    num_preemptions = num_hit_tokens = 0
    for num_blocks in rooms:
        room = {"max_model_len": MAX_LEN, "num_kv_blocks": num_blocks}
        with cell_of(model=path, **room, **settings) as cell:
            router = Router(cell)
            poison_padding(cell)
            poison_slots(cell)
            poison_free_blocks(router)
            asked = asks(num_late)
            for ask, [answer] in zip(asked, serve(router, asked), strict=True):
                assert_like_transformers(model, ask, answer)
        num_preemptions += router.num_preemptions
        num_hit_tokens += router.num_hit_tokens
        assert min(map(sum, zip(*router.counts, strict=True))) > 0
    assert num_preemptions > 0 or cell.dp_size > 2  # whose ranks have room for all
    assert num_hit_tokens > 0


def assert_like_transformers(model: Any, ask: Ask, answer: Answer) -> None:
    """Checks greedy tokens, and the log probabilities of all tokens asked about."""
    text = [*ask.prompt, *answer.tokens]
    expected = reference_logits(model, text[:-1]).log_softmax(-1)
    start = len(ask.prompt) - 1
    assert len(answer.tokens) == ask.max_tokens
    assert list(answer.tokens) == expected[start:].argmax(-1).tolist()
    scored = torch.arange(0 if ask.prompt_logprobs else start, len(text) - 1)
    wanted = expected[scored, torch.tensor(text)[scored + 1]][: len(answer.logprobs)]
    assert len(answer.logprobs) >= min(len(ask.prompt) - 1, ask.max_tokens)
    assert np.abs(np.asarray(answer.logprobs) - wanted.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("family", RECORDED)
def test_recorded_graphs_of_every_family_replay_with_poisoned_padding(
    family: str, saved: Any
) -> None:
    case = RunnerCase(saved(family)[0], is_capturable=True)
    rng = np.random.default_rng(0)
    kinds = ["decode", *PREFILL_GRAPHS]
    for kind in kinds if IS_FULL else [kinds[RECORDED.index(family) % len(kinds)]]:
        is_decode = kind == "decode"
        sizes = GraphSizes(decode=(4, 8)) if is_decode else GraphSizes(extend=(8, 32))
        prefill = PREFILL_GRAPHS[0] if is_decode else kind
        runner = captured(case.build(sizes, RecordingBackend, prefill))
        registry_of(runner).poison_tails()
        new_batch = case.decode_batch if is_decode else case.prefill_batch
        for size in sizes.decode + sizes.extend:
            batch = new_batch(rng, size)
            assert_close(case.run(runner, batch), case.run_eagerly(batch), TOLERANCE)
