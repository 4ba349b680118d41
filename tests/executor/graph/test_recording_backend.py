"""The stand-in must be as strict as a GPU: what it lets pass is what nobody checks without one."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from executor.graph.backend import ShapeKey
from tests.executor.support.recording.recording_backend import (
    CannotBeCaptured,
    RecordingBackend,
    known_world,
)

KEY = ShapeKey(4)


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    """Spares each capture the million objects that a run has imported."""
    with known_world():
        yield


def captured(run: Callable[[], Any], backend: RecordingBackend | None = None) -> RecordingBackend:
    backend = backend or RecordingBackend()
    with backend.session(label="test", num_captures=1):
        backend.capture(KEY, run)
    return backend


def is_poisoned(x: torch.Tensor) -> bool:
    if x.is_floating_point():
        return bool(x.isnan().all())
    return bool((x == torch.iinfo(x.dtype).max // 2).all())


def test_what_python_computes_is_frozen():
    """Else a runner that counts on host code at replay would pass here and fail on a GPU."""
    calls, factor, out = [], [2.0], torch.zeros(1)
    backend = captured(lambda: (calls.append(0), out.copy_(torch.full((1,), factor[0]))))

    factor[0] = 3.0
    backend.replay(KEY)

    assert len(calls) == 1
    assert out.tolist() == [2]


def test_weights_in_an_opaque_layout_can_be_captured():
    x, out = torch.randn(4, 8), torch.zeros(4, 8)  # of bfloat16, older CPUs have no such product
    packed = torch.randn(8, 8).to_mkldnn()
    linear = torch.ops.mkldnn._linear_pointwise
    backend = captured(lambda: out.copy_(linear(x, packed, None, "none", [], "")))

    x.copy_(torch.randn(4, 8))
    backend.replay(KEY)

    assert torch.equal(out, linear(x, packed, None, "none", [], ""))


def test_a_view_changed_in_place_later_does_not_change_what_was_noted():
    x, out = torch.arange(6.0).view(2, 3), torch.zeros(3, 2)

    def run() -> None:
        y = x * 1
        z = y + 1
        y.t_()
        out.copy_(y.add_(z.t()))

    backend = captured(run)
    for _ in range(2):
        x.add_(1)
        backend.replay(KEY)

        assert torch.equal(out, (2 * x + 1).t())


X = torch.arange(4.0)
IDS = torch.tensor([0, 1, 1, 3])

REFUSED: dict[str, Callable[[], Any]] = {
    # What depends on values.
    "item": lambda: X[0].item(),
    "int": lambda: int(IDS[0]),
    "if": lambda: 1 if X.sum() > 0 else 2,
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "np.asarray": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "equal": lambda: torch.equal(X, X),
    "nonzero": lambda: IDS.nonzero(),
    "where without values": lambda: torch.where(X > 1),
    "mask as index": lambda: X[X > 1],
    "mask as index of an assignment": lambda: X.clone().__setitem__(X > 1, 0.0),
    "masked_select": lambda: torch.masked_select(X, X > 1),
    "unique": lambda: IDS.unique(),
    "bincount": lambda: torch.bincount(IDS),
    "repeat_interleave": lambda: torch.repeat_interleave(X, IDS),
    "a slice up to a value": lambda: X[: IDS[1]],
    # What comes from the host.
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "tensor of a number": lambda: torch.tensor(1.0),
    "as_tensor": lambda: torch.as_tensor(np.ones(2)),
    "from_numpy": lambda: torch.from_numpy(np.ones(2)),
    "list as index": lambda: X[[0, 2]],
    "new_tensor": lambda: X.new_tensor([1.0, 2.0]),
    "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.float32) + 1,
}


@pytest.mark.parametrize("run", REFUSED.values(), ids=REFUSED)
def test_what_a_gpu_cannot_record_is_refused(run: Callable[[], Any]):
    with pytest.raises(CannotBeCaptured, match="cannot be captured"):
        captured(run)


def test_a_tensor_of_the_host_is_refused():
    seq_lens_cpu = torch.ones(4, dtype=torch.int64)
    backend = RecordingBackend(host_tensors=[seq_lens_cpu])
    with pytest.raises(CannotBeCaptured, match="host tensor"):
        captured(lambda: seq_lens_cpu[:2] + 1, backend=backend)


def test_intermediate_results_are_poisoned_once_the_session_ends():
    """A runner that keeps one would, on a GPU, read what another size left there."""
    x, kept = torch.ones(4), []
    captured(lambda: kept.extend((x + 1, x.to(torch.int32) * 2, torch.empty(3), x.bool())))

    assert [is_poisoned(y) for y in kept[:3]] == [True] * 3
    assert kept[3].all()


def test_an_intermediate_result_is_poisoned_when_another_size_is_replayed():
    x, kept, out = torch.ones(4), [], torch.zeros(4)
    backend = RecordingBackend()
    with backend.session(label="test", num_captures=2):
        backend.capture(ShapeKey(4), lambda: kept.append(x + 1))
        backend.capture(ShapeKey(2), lambda: out[:2].copy_(x[:2]))
    backend.replay(ShapeKey(4))
    assert kept[0].tolist() == [2] * 4

    backend.replay(ShapeKey(2))

    assert is_poisoned(kept[0])


def test_reading_memory_that_this_replay_did_not_write_yields_poison():
    out = torch.zeros(4)
    backend = captured(lambda: out.copy_(torch.empty(4)))
    out.zero_()

    backend.replay(KEY)

    assert is_poisoned(out)


def test_what_was_there_before_the_capture_is_never_poisoned():
    x, out = torch.arange(8.0).view(2, 4), torch.zeros(4, 2)
    backend = captured(lambda: out.copy_(x.t().contiguous().view(4, 2)))
    backend.replay(KEY)
    backend.discard()

    assert torch.equal(x, torch.arange(8.0).view(2, 4))
    assert torch.equal(out, x.t())


def test_a_constant_that_an_operator_hands_out_is_never_poisoned():
    constant, out = torch.ones(4), torch.zeros(4)
    library = torch.library.Library("recording_backend_test", "DEF")
    library.define("constant() -> Tensor")
    library.impl("constant", lambda: constant, "CompositeExplicitAutograd")

    backend = captured(lambda: out.copy_(torch.ops.recording_backend_test.constant() + 1))
    backend.replay(KEY)

    assert constant.tolist() == [1] * 4
    assert out.tolist() == [2] * 4


def test_a_piece_reads_what_an_earlier_piece_of_its_size_left():
    """The pieces of a prefill hand hidden states on that only they use."""
    x, out, handed = torch.ones(4), torch.zeros(4), []
    backend = RecordingBackend()
    with backend.session(label="test", num_captures=2):
        backend.capture(ShapeKey(4, 0), lambda: handed.append(x * 2))
        backend.capture(ShapeKey(4, 1), lambda: out.copy_(handed.pop() + 1))

    for value in (3, 4):
        x.fill_(value)
        backend.replay(ShapeKey(4, 0))
        backend.replay(ShapeKey(4, 1))
        assert out.tolist() == [2 * value + 1] * 4

    backend.replay(ShapeKey(4, 1))
    backend.discard()
    assert torch.equal(x, torch.full((4,), 4.0))


def test_a_tensor_that_another_thread_made_is_refused():
    x, made = torch.ones(4), []

    def run() -> None:
        thread = threading.Thread(target=lambda: made.append(x + 1))
        thread.start()
        thread.join()
        made.pop().add_(1)

    with pytest.raises(CannotBeCaptured, match=r"shape \[4\].*thread"):
        captured(run)


def test_a_collective_is_repeated_if_it_is_declared_a_kernel():
    def all_gather(out: torch.Tensor, x: torch.Tensor) -> None:
        out.numpy()[:] = np.concatenate((x.numpy(), -x.numpy()))

    backend = RecordingBackend()
    gather = backend.kernel(all_gather)
    x, out = torch.ones(2), torch.zeros(4)

    def run() -> None:
        gathered = torch.empty(4)
        gather(gathered, x + 1)
        out.copy_(gathered * 2)

    captured(run, backend=backend)
    x.fill_(5)
    backend.replay(KEY)

    assert out.tolist() == [12, 12, -12, -12]


def test_a_region_in_a_capture_that_does_not_break_is_recorded_like_the_rest():
    backend, x = RecordingBackend(), torch.ones(4)
    region = backend.eager_region(lambda y: y + y[0].item())

    with pytest.raises(CannotBeCaptured, match="reads values on the host"):
        captured(lambda: region(x), backend=backend)


def test_what_a_region_makes_beside_its_result_is_refused_in_the_recording():
    """It would be frozen: only the result is handed on at each replay."""
    backend, x, left = RecordingBackend(), torch.ones(4), []

    def leaving(y: torch.Tensor) -> torch.Tensor:
        left.append(y + 1)
        return y + 2

    region = backend.eager_region(leaving)
    with backend.session(label="test", num_captures=0), pytest.raises(CannotBeCaptured):
        backend.capture_breakable(KEY, lambda: region(x).add_(left.pop()))


def test_a_capture_inside_a_capture_of_another_backend_is_refused():
    outer, inner = RecordingBackend(), RecordingBackend()
    with pytest.raises(RuntimeError, match="size 4 inside another capture"):
        captured(lambda: captured(lambda: None, backend=inner) and None, backend=outer)


def test_a_session_that_announced_another_number_of_captures_fails():
    backend = RecordingBackend()
    with (
        pytest.raises(AssertionError, match="decode: 2 announced, 1 made"),
        backend.session(label="decode", num_captures=2),
    ):
        backend.capture(KEY, lambda: None)
