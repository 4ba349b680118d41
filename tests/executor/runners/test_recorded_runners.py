"""What runners record must hold on a GPU: nothing read on the host, everything refreshed.

The stand-in backend replays the very operators that a capture ran, on the very same tensors, and
runs no Python again. So a number that a forward pass baked in, or an input that a runner forgot to
refresh, shows as a wrong result.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.model.moe import experts
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.recording.lazy_attention import LazyAttention
from tests.executor.support.recording.recording_backend import CannotBeCaptured, RecordingBackend
from tests.executor.support.runner_cases import (
    DECODE_SIZES,
    PREFILL_GRAPHS,
    PREFILL_SIZES,
    RunnerCase,
    assert_padding_reaches_no_expert,
    assert_same,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded")
    save_qwen3_moe(path, "wide")
    return path


@pytest.fixture(scope="module")
def capturable(checkpoint: Path) -> RunnerCase:
    """Attention too is captured."""
    return RunnerCase(checkpoint, LazyAttention.of, is_capturable=True)


@pytest.fixture(scope="module")
def breaking(checkpoint: Path) -> RunnerCase:
    """Attention is not: graphs break around it."""
    return RunnerCase(checkpoint, is_capturable=True)


@pytest.mark.parametrize("width", [1, 3])
def test_a_recorded_decode_equals_eager_for_batches_it_was_not_captured_with(
    capturable: RunnerCase, width: int
):
    rng = np.random.default_rng(width)
    runner = capturable.decode(RecordingBackend(), width)
    for size in DECODE_SIZES * 2:
        batch = capturable.decode_batch(rng, size, width=width)
        got, expected = capturable.run(runner, batch), capturable.run_eagerly(batch)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_recorded_decode_that_breaks_at_attention_equals_eager(breaking: RunnerCase):
    rng = np.random.default_rng(0)
    runner = breaking.decode(RecordingBackend())
    for size in DECODE_SIZES * 2:
        batch = breaking.decode_batch(rng, size)
        assert_same(breaking.run(runner, batch), breaking.run_eagerly(batch))


@pytest.mark.parametrize("kind", PREFILL_GRAPHS)
def test_a_recorded_prefill_equals_eager(breaking: RunnerCase, kind: str):
    rng = np.random.default_rng(0)
    runner = breaking.prefill(kind, RecordingBackend())
    for size in PREFILL_SIZES * 2:
        batch = breaking.prefill_batch(rng, size)
        assert_same(breaking.run(runner, batch), breaking.run_eagerly(batch))


@pytest.mark.parametrize("num_seqs", [0, 1, 5, 8])
def test_no_padded_row_of_a_recorded_decode_reaches_an_expert(
    breaking: RunnerCase, monkeypatch: pytest.MonkeyPatch, num_seqs: int
):
    """A count that the capture had baked in would send padding to experts, unseen in results."""
    seen = breaking.watch_experts(monkeypatch)
    runner = breaking.decode(RecordingBackend())
    breaking.run(runner, breaking.decode_batch(np.random.default_rng(0), 8, num_seqs=num_seqs))
    recorded = [ids for ids in seen if len(ids) == 8][-breaking.num_layers :]
    assert_padding_reaches_no_expert(breaking, recorded, num_real=num_seqs, num_rows=8)


@pytest.mark.parametrize("kind", PREFILL_GRAPHS)
@pytest.mark.parametrize("num_tokens", [[1], [3, 2], [4, 1, 3]])
def test_no_padded_row_of_a_recorded_prefill_reaches_an_expert(
    breaking: RunnerCase, monkeypatch: pytest.MonkeyPatch, kind: str, num_tokens: list[int]
):
    seen = breaking.watch_experts(monkeypatch)
    runner = breaking.prefill(kind, RecordingBackend())
    breaking.run(runner, breaking.batch(np.random.default_rng(0), num_tokens, 8, has_extend=True))
    recorded = [ids for ids in seen if len(ids) == 8][-breaking.num_layers :]
    assert_padding_reaches_no_expert(breaking, recorded, num_real=sum(num_tokens), num_rows=8)


def test_metadata_that_stays_upgraded_after_warm_up_would_be_noticed(checkpoint: Path):
    """The crash that the contract is there for, put back on purpose."""
    broken = RunnerCase(checkpoint, partial(LazyAttention.of, restores=False), is_capturable=True)
    runner = broken.decode(RecordingBackend())
    batch = broken.decode_batch(np.random.default_rng(0), 8)
    got, expected = broken.run(runner, batch)[0], broken.run_eagerly(batch)[0]
    assert not torch.allclose(got, expected, rtol=1e-2, atol=1e-2)


def test_layers_that_read_results_on_the_host_are_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(experts, "are_small", lambda *sizes: False)
    case = RunnerCase(checkpoint, LazyAttention.of)  # experts of the CPU, one by one
    with pytest.raises(CannotBeCaptured):
        case.decode(RecordingBackend())
