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
from tests.executor.support.recording.lazy_attention import LazyAttention
from tests.executor.support.recording.recording_backend import CannotBeCaptured, RecordingBackend
from tests.executor.support.runner_cases import DECODE_SIZES, RunnerCase, assert_close

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def capturable(targets: dict[str, Path]) -> RunnerCase:
    """Attention too is captured."""
    return RunnerCase(targets["float32"], LazyAttention.of, is_capturable=True)


@pytest.mark.parametrize("width", [1, 3])
def test_a_recorded_decode_equals_eager_for_batches_it_was_not_captured_with(
    capturable: RunnerCase, width: int
):
    rng = np.random.default_rng(width)
    runner = capturable.decode(RecordingBackend(), width)
    for size in DECODE_SIZES * 2:
        batch = capturable.decode_batch(rng, size, width=width)
        assert_close(capturable.run(runner, batch), capturable.run_eagerly(batch), 1e-5)


def test_metadata_that_stays_upgraded_after_warm_up_would_be_noticed(targets: dict[str, Path]):
    """The crash that the contract is there for, put back on purpose."""
    broken = RunnerCase(
        targets["float32"], partial(LazyAttention.of, restores=False), is_capturable=True
    )
    runner = broken.decode(RecordingBackend())
    batch = broken.decode_batch(np.random.default_rng(0), 8)
    got, expected = broken.run(runner, batch)[0], broken.run_eagerly(batch)[0]
    assert not torch.allclose(got, expected, rtol=1e-2, atol=1e-2)


def test_layers_that_read_results_on_the_host_are_refused(
    targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(experts, "are_small", lambda *sizes: False)
    case = RunnerCase(targets["float32"], LazyAttention.of)  # experts of the CPU, one by one
    with pytest.raises(CannotBeCaptured):
        case.decode(RecordingBackend())
