"""Described graph sizes are the captured ones: the router plans with them."""

from pathlib import Path
from typing import Any

import pytest

from executor.budget.capture_sizes import GraphSizes
from executor.build.executor import build_worker
from executor.build.plan import plan_graph_sizes
from executor.config import ExecutorConfig
from executor.worker import Worker
from tests.executor.support.steps import decode_part, prompt_part, step, tokens_of

PROMPT = [5, 17, 33, 2, 90, 41, 8, 8, 60]


def config(model: Path, **settings: Any) -> ExecutorConfig:
    sizes: dict[str, Any] = {
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 64,
    }
    return ExecutorConfig(model=model, **(sizes | settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, GraphSizes((1, 2, 4, 8), (*range(4, 33, 4), 48, 64))),
        ({"decode_graphs": "off", "prefill_graphs": "off"}, GraphSizes()),
        (
            {"decode_graph_sizes": (6, 2), "prefill_graph_sizes": (64, 10)},
            GraphSizes((2, 6), (10, 64)),
        ),
    ],
)
def test_sizes_are_the_default_ones_or_those_listed(
    tiny_checkpoint: Path, settings: dict[str, Any], expected: GraphSizes
):
    assert plan_graph_sizes(config(tiny_checkpoint, **settings), max_model_len=512) == expected


def test_no_prefill_size_is_above_what_all_rows_hold(tiny_checkpoint: Path):
    sizes = plan_graph_sizes(config(tiny_checkpoint, max_num_seqs=2), max_model_len=9)
    assert sizes.extend == (4, 8, 12, 16, 18)


def test_a_listed_size_that_no_step_reaches_is_refused(tiny_checkpoint: Path):
    settings = config(tiny_checkpoint, max_num_seqs=2, prefill_graph_sizes=(16, 64))
    with pytest.raises(ValueError, match=r"has 64: 2 sequences of 9 tokens make 18 at most"):
        plan_graph_sizes(settings, max_model_len=9)


def test_describe_carries_the_very_list(tiny_checkpoint: Path):
    settings = config(tiny_checkpoint, prefill_graphs="piecewise")
    _, description = build_worker(settings)
    sizes = plan_graph_sizes(settings, max_model_len=512)
    described = description.graph_sizes
    assert (tuple(described.decode), tuple(described.extend)) == (sizes.decode, sizes.extend)
    assert described.extend_runner == "prefill_piecewise"
    assert description.agreement["decode_graph_sizes"] == "[1, 2, 4, 8]"


@pytest.mark.parametrize("prefill_graphs", ["breakable", "piecewise"])
def test_tokens_do_not_depend_on_whether_steps_replay_graphs(
    tiny_checkpoint: Path, prefill_graphs: str
):
    worker, _ = build_worker(config(tiny_checkpoint, prefill_graphs=prefill_graphs))
    eager = _generate(worker, prefill_size=None, decode_size=None)
    assert _generate(worker, prefill_size=12, decode_size=4) == eager
    assert _generate(worker, prefill_size=64, decode_size=8) == eager


def _generate(worker: Worker, prefill_size: int | None, decode_size: int | None) -> list[int]:
    """Returns 8 greedy tokens of one sequence, each step replaying a graph of that size or none."""
    worker.join(1, "")
    part = prompt_part(0, PROMPT, [1, 2, 3])
    request = step(1, part, num_tokens=[9], num_logits=[1], graph_size=prefill_size)
    tokens = tokens_of(worker.execute(request))
    for length in range(9, 16):
        part = decode_part(0, length, block_ids=[length] if length % 4 == 0 else [])
        request = step(2, part, num_tokens=[1], graph_size=decode_size)
        tokens += tokens_of(worker.execute(request))
    return tokens
