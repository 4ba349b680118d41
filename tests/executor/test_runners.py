"""If these fail, padding or a replay changes somebody's answer."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.graph.cpu_eager_backend import EagerBackend
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry, PaddingPolicy
from executor.graph.input_buffers import fresh_input_buffer_pool
from tests.executor.checkpoints import save_qwen3_moe
from tests.executor.runner_cases import DECODE_SIZES, PREFILL_RUNNERS, PREFILL_SIZES, RunnerCase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def own_buffers() -> Iterator[None]:
    with fresh_input_buffer_pool():
        yield


@pytest.fixture(scope="module", params=DTYPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunnerCase:
    path: Path = tmp_path_factory.mktemp(request.param)
    save_qwen3_moe(path, "wide", dtype=DTYPES[request.param])
    return RunnerCase(path)


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit: logits, keys and values."""
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


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


@pytest.mark.parametrize("kind", PREFILL_RUNNERS)
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
    registry = case.decode_registry(width)
    runner = case.decode(EagerBackend(), width, registry)
    batches = [
        case.decode_batch(rng, size, num_seqs=num_seqs, width=width)
        for num_seqs in (0, 1, size // 2, size)
    ]
    expected = [case.run(runner, batch) for batch in batches]
    registry.poison_tails()
    for batch, unpoisoned in zip(batches, expected, strict=True):
        assert_same(case.run(runner, batch), unpoisoned)


@pytest.mark.parametrize("kind", PREFILL_RUNNERS)
@pytest.mark.parametrize("size", PREFILL_SIZES)
def test_poisoned_tails_change_no_prefill(case: RunnerCase, kind: str, size: int):
    rng = np.random.default_rng(size)
    registry = case.prefill_registry()
    runner = case.prefill(kind, EagerBackend(), registry)
    batches = [case.prefill_batch(rng, size) for _ in range(3)]
    expected = [case.run(runner, batch) for batch in batches]
    registry.poison_tails()
    for batch, unpoisoned in zip(batches, expected, strict=True):
        assert_same(case.run(runner, batch), unpoisoned)


@pytest.mark.parametrize("name", ["positions", "out_cache_loc", "req_pool_indices"])
def test_a_decode_index_that_kept_its_padding_would_be_noticed(case: RunnerCase, name: str):
    """The check of the check above: the same poison, and one slot that no longer resets it."""
    registry = _with_kept_padding(case.decode_registry(), name)
    runner = case.decode(EagerBackend(), registry=registry)
    batch = case.decode_batch(np.random.default_rng(0), 8, num_seqs=5)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


@pytest.mark.parametrize("kind", PREFILL_RUNNERS)
@pytest.mark.parametrize("name", ["positions", "out_cache_loc"])
def test_a_prefill_index_that_kept_its_padding_would_be_noticed(
    case: RunnerCase, name: str, kind: str
):
    registry = _with_kept_padding(case.prefill_registry(), name)
    runner = case.prefill(kind, EagerBackend(), registry)
    batch = case.batch(np.random.default_rng(0), [3, 4], 8, has_extend=True)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


def test_a_padded_row_that_reaches_an_expert_would_be_noticed(case: RunnerCase):
    """Experts skip padding by num_token_non_padded; junk in it must show."""
    registry = case.decode_registry()
    runner = case.decode(EagerBackend(), registry=registry)
    batch = case.decode_batch(np.random.default_rng(0), 8, num_seqs=5)
    expected = case.run_eagerly(batch)
    assert_same(case.run(runner, batch), expected)
    registry.get_slot("num_token_non_padded").enabled = False
    registry._plan.cache_clear()
    registry.get_slot("num_token_non_padded").allocated().fill_(3)
    with pytest.raises(AssertionError):
        assert_same(case.run(runner, batch), expected)


def _with_kept_padding(registry: CudaGraphBufferRegistry, name: str) -> CudaGraphBufferRegistry:
    """Returns a poisoned registry in which one ZERO slot is KEEP_PAD."""
    slot = registry.get_slot(name)
    assert slot.padding_policy is PaddingPolicy.ZERO
    slot.padding_policy = PaddingPolicy.KEEP_PAD
    registry.poison_tails({name: torch.iinfo(slot.dtype).max})
    return registry
