"""If these fail, padding or a replay changes somebody's answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.graph.cpu_eager_backend import EagerBackend
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.ranks.ranks import run_ranks
from tests.executor.support.ranks.runner_ranks import GRAPH_SIZES, RanksStep, replay_on_ranks
from tests.executor.support.runner_cases import (
    DECODE_SIZES,
    DTYPES,
    PREFILL_GRAPHS,
    PREFILL_SIZES,
    RunnerCase,
    assert_padding_reaches_no_expert,
    assert_same,
    keep_padding,
    registry_of,
)


@pytest.fixture(scope="module", params=DTYPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunnerCase:
    path: Path = tmp_path_factory.mktemp(request.param)
    save_qwen3_moe(path, "wide", dtype=DTYPES[request.param])
    return RunnerCase(path)


@pytest.mark.parametrize("size", DECODE_SIZES)
def test_a_decode_replay_equals_eager(case: RunnerCase, size: int):
    rng = np.random.default_rng(size)
    runner = case.decode(EagerBackend())
    for _ in range(6):
        batch = case.decode_batch(rng, size)
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("size", DECODE_SIZES)
def test_a_replay_of_several_tokens_per_sequence_equals_eager(
    case: RunnerCase, size: int, width: int
):
    rng = np.random.default_rng(size)
    runner = case.decode(EagerBackend(), width)
    for _ in range(3):
        batch = case.decode_batch(rng, size, width=width)
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


@pytest.mark.parametrize("kind", PREFILL_GRAPHS)
@pytest.mark.parametrize("size", PREFILL_SIZES)
def test_a_prefill_replay_equals_eager(case: RunnerCase, kind: str, size: int):
    rng = np.random.default_rng(size)
    runner = case.prefill(kind, EagerBackend())
    for _ in range(6):
        batch = case.prefill_batch(rng, size)
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


def test_an_idle_rank_replays_and_returns_nothing(case: RunnerCase):
    runner = case.decode(EagerBackend())
    idle = case.decode_batch(np.random.default_rng(0), 8, num_seqs=0)
    logits, *caches = case.run(runner, idle)
    assert logits.shape == (0, case.vocab_size)
    assert_same(caches, [cache[4:] for cache in case.caches])


@pytest.mark.parametrize("size", DECODE_SIZES)
@pytest.mark.parametrize("width", [1, 3])
def test_poisoned_tails_change_no_decode(case: RunnerCase, size: int, width: int):
    rng = np.random.default_rng(size)
    runner = case.decode(EagerBackend(), width)
    batches = [
        case.decode_batch(rng, size, num_seqs=num_seqs, width=width)
        for num_seqs in (0, 1, size // 2, size)
    ]
    expected = [case.run(runner, batch) for batch in batches]
    registry_of(runner).poison_tails()
    for batch, unpoisoned in zip(batches, expected, strict=True):
        assert_same(case.run(runner, batch), unpoisoned)


@pytest.mark.parametrize("kind", PREFILL_GRAPHS)
@pytest.mark.parametrize("size", PREFILL_SIZES)
def test_poisoned_tails_change_no_prefill(case: RunnerCase, kind: str, size: int):
    rng = np.random.default_rng(size)
    runner = case.prefill(kind, EagerBackend())
    batches = [case.prefill_batch(rng, size) for _ in range(3)]
    expected = [case.run(runner, batch) for batch in batches]
    registry_of(runner).poison_tails()
    for batch, unpoisoned in zip(batches, expected, strict=True):
        assert_same(case.run(runner, batch), unpoisoned)


@pytest.mark.parametrize("name", ["positions", "out_cache_loc", "req_pool_indices"])
def test_a_decode_index_that_kept_its_padding_would_be_noticed(case: RunnerCase, name: str):
    """The check of the check above: the same poison, and one slot that no longer resets it."""
    runner = case.decode(EagerBackend())
    keep_padding(registry_of(runner), name)
    batch = case.decode_batch(np.random.default_rng(0), 8, num_seqs=5)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


@pytest.mark.parametrize("kind", PREFILL_GRAPHS)
@pytest.mark.parametrize("name", ["positions", "out_cache_loc"])
def test_a_prefill_index_that_kept_its_padding_would_be_noticed(
    case: RunnerCase, name: str, kind: str
):
    runner = case.prefill(kind, EagerBackend())
    keep_padding(registry_of(runner), name)
    batch = case.batch(np.random.default_rng(0), [3, 4], 8, has_extend=True)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


@pytest.mark.parametrize("num_seqs", [0, 1, 5, 8])
@pytest.mark.parametrize("width", [1, 3])
def test_no_padded_row_of_a_decode_reaches_an_expert(
    case: RunnerCase, monkeypatch: pytest.MonkeyPatch, width: int, num_seqs: int
):
    runner = case.decode(EagerBackend(), width)
    batch = case.decode_batch(np.random.default_rng(0), 8, num_seqs=num_seqs, width=width)
    seen = case.watch_experts(monkeypatch)
    case.run(runner, batch)
    assert_padding_reaches_no_expert(case, seen, num_real=num_seqs * width, num_rows=8 * width)


@pytest.mark.parametrize("kind", PREFILL_GRAPHS)
@pytest.mark.parametrize("num_tokens", [[1], [3, 2], [4, 1, 3]])
def test_no_padded_row_of_a_prefill_reaches_an_expert(
    case: RunnerCase, monkeypatch: pytest.MonkeyPatch, kind: str, num_tokens: list[int]
):
    runner = case.prefill(kind, EagerBackend())
    batch = case.batch(np.random.default_rng(0), num_tokens, 8, has_extend=True)
    seen = case.watch_experts(monkeypatch)
    case.run(runner, batch)
    assert_padding_reaches_no_expert(case, seen, num_real=sum(num_tokens), num_rows=8)


def test_real_rows_that_no_expert_sees_would_be_noticed(case: RunnerCase):
    """Experts skip the rows from num_token_non_padded on: too small a count drops real ones."""
    runner = case.decode(EagerBackend())
    batch = case.decode_batch(np.random.default_rng(0), 8, num_seqs=5)
    expected = case.run_eagerly(batch)
    assert_same(case.run(runner, batch), expected)
    registry = registry_of(runner)
    registry.get_slot("num_token_non_padded").enabled = False
    registry._plan.cache_clear()
    registry.get_slot("num_token_non_padded").allocated().fill_(3)
    with pytest.raises(AssertionError):
        assert_same(case.run(runner, batch), expected)


RANKS_STEPS = [
    RanksStep(([1, 1, 1], []), 4, has_extend=False),
    RanksStep(([], [1]), 2, has_extend=False),
    RanksStep(([1], [1, 1, 1, 1]), 4, has_extend=False),
    RanksStep(([3, 4], [2]), 8, has_extend=True),
    RanksStep(([1, 1], [4]), 4, has_extend=True),
    RanksStep(([3, 2], [1]), None, has_extend=True),
]


# Executors of each DP rank, and groups formed one after the other.
@pytest.fixture(scope="module", params=[(1, 2), (2, 1)], ids=["attn_tp_1", "attn_tp_2"])
def replayed(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> list[Any]:
    """Returns what each executor of two DP ranks saw."""
    attn_tp_size, num_epochs = request.param
    sizes = (attn_tp_size, num_epochs)
    return run_ranks(replay_on_ranks, 2 * attn_tp_size, tiny_checkpoint, *sizes, RANKS_STEPS)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> list[list[list[torch.Tensor]]]:
    """Returns, by DP rank, what an executor without peers makes of its part of each step."""
    alone = RunnerCase(tiny_checkpoint)
    return [
        [alone.run_eagerly(step.batch(alone, dp_rank)) for step in RANKS_STEPS]
        for dp_rank in range(2)
    ]


@pytest.mark.parametrize("kind", PREFILL_GRAPHS)
@pytest.mark.parametrize("is_recorded", [False, True], ids=["called", "recorded"])
def test_replays_of_two_dp_ranks_equal_eager_runs_of_one(
    replayed: list[Any], expected: list[list[list[torch.Tensor]]], is_recorded: bool, kind: str
):
    """Also of a rank that is idle or has fewer tokens than the other, and in a second group."""
    attn_tp_size = len(replayed) // 2
    for rank, of_rank in enumerate(replayed):
        for epoch in of_rank[is_recorded, kind]:
            for ours, theirs in zip(epoch.outcomes, expected[rank // attn_tp_size], strict=True):
                assert_shares(ours, theirs, rank % attn_tp_size, attn_tp_size)


def assert_shares(
    ours: list[Any], theirs: list[torch.Tensor], attn_tp_rank: int, attn_tp_size: int
) -> None:
    """The logits are the same, and keys and values those of this executor's heads."""
    shares = [theirs[0]] + [cache.chunk(attn_tp_size, dim=1)[attn_tp_rank] for cache in theirs[1:]]
    for got, wanted in zip(ours, shares, strict=True):
        # Executors add up their experts' and heads' outputs in another order.
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-4, atol=1e-4)


def test_executors_that_share_attention_compute_the_same_bits_of_logits(replayed: list[Any]):
    attn_tp_size = len(replayed) // 2
    for rank, of_rank in enumerate(replayed):
        first = replayed[rank - rank % attn_tp_size]
        for way, epochs in of_rank.items():
            for ours, theirs in zip(epochs, first[way], strict=True):
                for (mine, *_), (its, *_) in zip(ours.outcomes, theirs.outcomes, strict=True):
                    assert mine.tobytes() == its.tobytes()


def test_every_graph_sees_its_size_of_all_dp_ranks_and_the_real_rows_of_its_own_shard(
    replayed: list[Any],
):
    """At the capture, which runs padding alone, and at every replay, of an idle rank too."""
    attn_tp_size = len(replayed) // 2
    for rank, of_rank in enumerate(replayed):
        dp_rank, attn_tp_rank = divmod(rank, attn_tp_size)

        def counts(size: int, num_tokens: int, attn_tp_rank: int = attn_tp_rank) -> dict[str, Any]:
            shard = size // attn_tp_size
            num_real = min(max(num_tokens - shard * attn_tp_rank, 0), shard)
            return {
                "num_token_non_padded": [num_real],
                "global_num_tokens_gpu": [size] * 2,
                "global_num_tokens_for_logprob_gpu": [size] * 2,
            }

        wanted = [
            {}
            if step.graph_size is None
            else counts(step.graph_size, sum(step.num_tokens[dp_rank]))
            for step in RANKS_STEPS
        ]
        at_capture = [
            counts(min(sizes), min(sizes)) for sizes in (GRAPH_SIZES.extend, GRAPH_SIZES.decode)
        ]
        for (is_recorded, _), (first, *later) in of_rank.items():
            assert first.counts_at_capture == at_capture
            assert first.counts == wanted
            for epoch in later:
                # What is called and not recorded outlives its group.
                assert epoch.counts_at_capture == (at_capture if is_recorded else [])
                assert epoch.counts == wanted
