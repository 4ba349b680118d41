"""A runner cannot tell backends apart, so all of them go through the same tests.

CUDAGraphBackend runs on a stand-in for the device, which records as RecordingBackend does: this
checks what is called in which order, and not that a GPU takes it.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import structlog
import torch

from executor.errors import CaptureError
from executor.graph.backend import EagerBackend, RunnerBackend, ShapeKey
from executor.graph.cuda_graph_backend import CaptureResources, CUDAGraphBackend, weak_view
from tests.executor.support.recording.fake_cuda_device import FakeDevice
from tests.executor.support.recording.recording_backend import RecordingBackend, known_world

KEY = ShapeKey(4)


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    """Spares each capture the million objects that a run has imported."""
    with known_world():
        yield


@pytest.fixture(autouse=True)
def collector(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collects only what a test has made, and notes that it is frozen: it is seen all the same."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "collect", partial(gc.collect, 1))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def on_cuda(device: FakeDevice) -> CUDAGraphBackend:
    return CUDAGraphBackend(CaptureResources(device), barrier=lambda: device.log.append("barrier"))


@pytest.fixture
def backends(on_cuda: CUDAGraphBackend) -> dict[str, RunnerBackend]:
    return {"eager": EagerBackend(), "recording": RecordingBackend(), "cuda": on_cuda}


@pytest.fixture(params=["eager", "recording", "cuda"])
def backend(request: pytest.FixtureRequest, backends: dict[str, RunnerBackend]) -> RunnerBackend:
    return backends[request.param]


@pytest.fixture(params=["recording", "cuda"])
def recorder(request: pytest.FixtureRequest, backends: dict[str, RunnerBackend]) -> RunnerBackend:
    """The backends that run what they capture."""
    return backends[request.param]


def capture(backend: RunnerBackend, *keys: ShapeKey, run: Callable[[], Any]) -> None:
    with backend.session(label="decode", num_captures=len(keys)):
        for key in keys:
            backend.capture(key, run)


def capture_breakable(backend: RunnerBackend, run: Callable[[], Any]) -> None:
    with backend.session(label="prefill", num_captures=1):
        backend.capture_breakable(KEY, run)


def test_a_replay_does_again_what_was_captured(backend: RunnerBackend):
    x, out = torch.zeros(4), torch.zeros(4)
    capture(backend, KEY, run=lambda: out.copy_(x + 1))

    for value in (1, 5):
        x.fill_(value)
        backend.replay(KEY)
        assert out.tolist() == [value + 1] * 4


def test_captures_that_outlive_the_group_run_nothing(backend: RunnerBackend):
    """A member that is new to the group captures alone then, and must not meet a collective."""
    calls: list[int] = []
    with backend.session(label="decode", num_captures=1):
        backend.warm_up(lambda: calls.append(1))
        backend.capture(KEY, lambda: calls.append(1))
    assert backend.outlives_group == (not calls) == isinstance(backend, EagerBackend)


def test_each_size_and_piece_is_its_own_capture(backend: RunnerBackend):
    out = torch.zeros(4)
    keys = [ShapeKey(4), ShapeKey(4, 1), ShapeKey(2)]
    with backend.session(label="prefill", num_captures=3):
        for number, key in enumerate(keys):
            backend.capture(key, lambda n=number: out.fill_(n))

    for number, key in enumerate(keys):
        backend.replay(key)
        assert out.tolist() == [number] * 4


def test_a_region_is_called_anew_with_the_captured_tensors(backend: RunnerBackend):
    """Attention between graphs: what it reads on the host is this step's."""
    x, out, plan = torch.ones(4), torch.zeros(4), [10.0]
    attend = backend.eager_region(lambda y, scale: y * plan[0] + y.tolist()[0] * scale)

    def run() -> None:
        hidden = x + 1
        for layer in range(3):
            hidden = hidden + attend(hidden * 2, scale=layer)
        out.copy_(hidden)

    with backend.session(label="prefill", num_captures=1):
        backend.warm_up(run)
        backend.capture_breakable(KEY, run)
    for plan[0] in (1.0, 2.0):
        x.add_(1)
        backend.replay(KEY)
        replayed = out.clone()
        run()
        assert torch.equal(replayed, out)


def test_a_region_at_either_end_and_two_in_a_row(backend: RunnerBackend):
    x, out = torch.ones(4), torch.zeros(4)
    first = backend.eager_region(lambda y: y * y[0].item())
    last = backend.eager_region(lambda y: out.copy_(y))

    capture_breakable(backend, lambda: last(first(first(x))))
    x.fill_(3)
    backend.replay(KEY)

    assert out.tolist() == [81] * 4


def test_a_region_inside_a_region_is_part_of_it(backend: RunnerBackend):
    x, out = torch.ones(4), torch.zeros(4)
    inner = backend.eager_region(lambda y: y * y[0].item())
    outer = backend.eager_region(lambda pair: inner(pair[0]) + pair[1])

    capture_breakable(backend, lambda: out.copy_(outer((x + 1, x)) * 2))
    x.fill_(2)
    backend.replay(KEY)

    assert out.tolist() == [22] * 4


def test_a_region_outside_a_capture_is_just_called(backend: RunnerBackend):
    assert backend.eager_region(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_breakable", [False, True])
def test_a_capture_that_fails_leaves_no_trace(
    recorder: RunnerBackend, is_breakable: bool, is_late: bool
):
    """The process must be able to report the error, and to go on without that size."""
    x, out = torch.ones(4), torch.zeros(4)

    def fail(y: torch.Tensor) -> torch.Tensor:
        raise KeyError("a layer is missing")

    failing = recorder.eager_region(fail) if is_late else fail
    record = recorder.capture_breakable if is_breakable else recorder.capture
    with recorder.session(label="decode", num_captures=1):
        with pytest.raises(KeyError, match="a layer is missing"):
            record(KEY, lambda: out.copy_(failing(x + 1)))
        with pytest.raises(LookupError):
            recorder.replay(KEY)
        record(KEY, lambda: out.copy_(x + 2))
    recorder.replay(KEY)

    assert out.tolist() == [3] * 4
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_key_that_was_not_captured_is_named_with_those_that_were(backend: RunnerBackend):
    capture(backend, ShapeKey(8), ShapeKey(4, 1), run=lambda: None)
    with pytest.raises(LookupError, match=r"size 16 was not captured.* size 8; size 4, piece 1"):
        backend.replay(ShapeKey(16))


def test_a_capture_inside_a_capture_is_refused(recorder: RunnerBackend):
    def run() -> None:
        recorder.capture(ShapeKey(2), lambda: None)

    with pytest.raises(RuntimeError, match=r"size 2 (while size 4|inside another)"):
        capture(recorder, KEY, run=run)


@pytest.mark.parametrize("act", ["capture", "capture_breakable", "warm_up"])
def test_captures_and_warm_ups_need_a_session(backend: RunnerBackend, act: str):
    arguments = () if act == "warm_up" else (KEY,)
    with pytest.raises(RuntimeError, match=r"within session\(\)"):
        getattr(backend, act)(*arguments, lambda: None)


def test_a_key_is_captured_once_until_all_are_discarded(backend: RunnerBackend):
    out = torch.zeros(1)
    with pytest.raises(RuntimeError, match="size 4 was captured before"):
        capture(backend, KEY, KEY, run=lambda: out.fill_(1))

    backend.discard()
    with pytest.raises(LookupError, match="captured are: none"):
        backend.replay(KEY)
    capture(backend, KEY, run=lambda: out.fill_(3))
    backend.replay(KEY)

    assert out.tolist() == [3]


@pytest.mark.parametrize("result", [torch.ones(1), torch.ones(4, dtype=torch.int64)])
def test_a_region_that_returns_something_else_than_at_capture_is_refused(
    recorder: RunnerBackend, result: torch.Tensor
):
    """A copy would spread one row over all, or round, without a word."""
    results = [torch.ones(4)]
    region = recorder.eager_region(lambda x: results[-1])
    capture_breakable(recorder, lambda: region(torch.zeros(4)).add_(1))
    results.append(result)
    with pytest.raises(ValueError, match=r"returned \[.\].* but \[4\] torch.float32"):
        recorder.replay(KEY)


def test_two_warm_ups_each_after_a_synchronize_and_a_barrier(
    on_cuda: CUDAGraphBackend, device: FakeDevice
):
    streams = []

    def run() -> None:
        device.log.append("run")
        streams.append(device.current)

    with on_cuda.session(label="decode", num_captures=1):
        on_cuda.warm_up(run)
        on_cuda.capture(KEY, run)

    warm_up = ["synchronize", "barrier", "run"]
    assert device.log == [*warm_up * 2, "synchronize", "release", "begin", "run", "end"]
    assert streams == ["capture stream"] * 3
    assert device.current == "default stream"


def test_a_capture_with_regions_is_graphs_and_calls_in_order(
    on_cuda: CUDAGraphBackend, device: FakeDevice
):
    def call(y: torch.Tensor) -> torch.Tensor:
        device.log.append(f"region {y[0].item():g}")
        return y * 10

    x, out = torch.ones(2), torch.zeros(2)
    region = on_cuda.eager_region(call)
    capture_breakable(on_cuda, lambda: out.copy_(region(region(x + 1) + 1)))
    recorded, device.log[:] = device.log[2:], []
    on_cuda.replay(KEY)

    # Each graph runs before the region behind it, also at capture: a region sees real values.
    segment = ["begin", "end", "replay"]
    assert recorded == [*segment, "region 2", *segment, "region 21", "begin", "end"]
    assert device.log == ["replay", "region 2", "replay", "region 21", "replay"]
    assert out.tolist() == [210] * 2


def test_regions_keep_no_tensor_of_the_pool_alive(on_cuda: CUDAGraphBackend):
    """Else each layer of each size would hold its queries, keys and values: gigabytes."""
    x, seen = torch.ones(4), []

    def region(y: torch.Tensor) -> torch.Tensor:
        seen.append(y)
        return y + 1

    marked = on_cuda.eager_region(region)
    capture_breakable(on_cuda, lambda: marked(x.view(2, 2)).add_(1))
    on_cuda.replay(KEY)
    at_capture, at_replay = seen

    assert at_replay.data_ptr() == at_capture.data_ptr()
    assert at_replay.untyped_storage()._cdata != at_capture.untyped_storage()._cdata


def test_all_backends_of_a_process_share_one_pool_and_one_stream(device: FakeDevice):
    resources = CaptureResources(device)
    decode, prefill = CUDAGraphBackend(resources), CUDAGraphBackend(resources)
    capture(decode, ShapeKey(8), ShapeKey(4), run=lambda: None)
    region = prefill.eager_region(lambda x: x + 1)
    capture_breakable(prefill, lambda: region(torch.zeros(1)).add_(1))

    assert len(device.pools) == 4
    assert len(set(device.pools)) == 1


def test_a_pool_that_no_graph_holds_any_more_is_not_taken_again(device: FakeDevice):
    """PyTorch refuses its handle."""
    resources = CaptureResources(device)
    one, other = CUDAGraphBackend(resources), CUDAGraphBackend(resources)
    capture(one, KEY, run=lambda: None)
    capture(other, KEY, run=lambda: None)
    one.discard()
    capture(one, KEY, run=lambda: None)
    assert len(set(device.pools)) == 1

    one.discard()
    other.discard()
    assert device.log.count("reset") == 3
    assert device.log[-3:] == ["synchronize", "reset", "release"]
    capture(one, KEY, run=lambda: None)

    assert device.pools[-1] is not device.pools[0]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
@pytest.mark.parametrize("act", ["warm_up", "capture", "region"])
def test_memory_that_runs_out_is_explained(
    on_cuda: CUDAGraphBackend, device: FakeDevice, error: RuntimeError, act: str
):
    def fail(*args: object) -> torch.Tensor:
        raise error

    region = on_cuda.eager_region(fail)
    acts: dict[str, Callable[[], None]] = {
        "warm_up": lambda: on_cuda.warm_up(fail),
        "capture": lambda: on_cuda.capture(KEY, fail),  # type: ignore[arg-type]
        "region": lambda: on_cuda.capture_breakable(KEY, lambda: region(torch.ones(1)).add_(1)),
    }
    with on_cuda.session(label="decode", num_captures=3):
        on_cuda.capture(ShapeKey(8), lambda: None)
        device.free = 3 << 29
        with pytest.raises(CaptureError) as caught:
            acts[act]()

    where = "a warm-up run" if act == "warm_up" else "size 4"
    message = str(caught.value)
    assert f"memory ran out at {where} of decode, after 1 of 3 captures" in message
    assert "1.50 of 16.00 GiB free" in message
    for remedy in ("largest capture size", "max_num_seqs", "KV pool"):
        assert remedy in message
    assert caught.value.__cause__ is error
    assert device.num_open == 0


def test_what_the_device_refuses_to_record_is_a_start_up_error_and_others_say_their_size(
    on_cuda: CUDAGraphBackend,
):
    def fail() -> None:
        raise error

    error: Exception = torch.AcceleratorError("CUDA error: operation not permitted")
    problem = "size 4 of decode cannot be captured.* turn decode graphs off"
    with pytest.raises(CaptureError, match=problem):
        capture(on_cuda, KEY, run=fail)
    error = RuntimeError("not permitted")
    with pytest.raises(RuntimeError, match="not permitted") as caught:
        capture(on_cuda, KEY, run=fail)
    assert caught.value.__notes__ == ["while decode captured size 4"]


def test_progress_is_one_line_per_size(on_cuda: CUDAGraphBackend):
    keys = [ShapeKey(8, 0), ShapeKey(8, 1), ShapeKey(4, 0), ShapeKey(4, 1)]
    with structlog.testing.capture_logs() as lines:
        capture(on_cuda, *keys, run=lambda: None)

    shown = [(line["event"], line["runner"], line["size"], line["captures"]) for line in lines]
    assert shown == [("captured", "decode", 8, "2/4"), ("captured", "decode", 4, "4/4")]
    assert [line["memory_mib"] for line in lines] == [2, 2]
    assert all(line["seconds"] >= 0 for line in lines)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x,
        lambda x: x[:, 1:3].transpose(0, 1),
        lambda x: x[1, 2],
        lambda x: x[:0],
        lambda x: x[:1].expand(5, -1, -1),
    ],
)
def test_a_weak_view_is_the_same_tensor_without_owning_it(
    dtype: torch.dtype, cut: Callable[[torch.Tensor], torch.Tensor]
):
    owner = (torch.arange(24).view(2, 3, 4) % 5).to(dtype)
    x = cut(owner)
    view = weak_view(x)

    assert torch.equal(view, x)
    assert (view.shape, view.stride(), view.dtype) == (x.shape, x.stride(), x.dtype)
    assert view.untyped_storage()._cdata != owner.untyped_storage()._cdata
    owner.logical_not_()
    assert torch.equal(view, x)
