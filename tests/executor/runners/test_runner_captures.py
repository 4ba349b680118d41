"""If these fail, ranks wait for each other in different captures, or graphs hold a warm-up's state."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVPool
from executor.budget.capture_sizes import GraphSizes
from executor.graph.backend import EagerBackend
from executor.model.spec import ModelSpec
from executor.parallel.layout import Place, Topology
from executor.runners.target import RunnerSelection
from tests.executor.support.recording.capture_state import check_reset_before_capture
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.runner_cases import PREFILL_GRAPHS, RunnerCase, torch_attention

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DECODES, EXTENDS = GraphSizes(decode=(2, 4)), GraphSizes(extend=(4, 8))


# What a call of each method leaves in the log.
OF_ATTENTION = {
    "init_forward_metadata_out_graph": "plan {0.input_ids.shape[0]} rows",
    "init_forward_metadata_in_graph": "plan in graph",
    "on_after_cuda_graph_warmup": "restore",
}
OF_BACKEND = {
    "session": "session {label}",
    "warm_up": "warm up",
    "capture": "capture {0}",
    "capture_breakable": "capture {0}",
    "replay": "replay {0}",
    "discard": "discard",
}


def noting(inner: Any, log: list[str], lines: dict[str, str]) -> Any:
    """Returns the object, whose methods leave a line each as they are called."""

    def noted(call: Callable[..., Any], line: str, *args: Any, **named: Any) -> Any:
        log.append(line.format(*args, **named))
        return call(*args, **named)

    for name, line in lines.items():
        setattr(inner, name, partial(noted, getattr(inner, name), line))
    return inner


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def case(tiny_checkpoint: Path, log: list[str]) -> RunnerCase:
    def logging_attention(config: ModelSpec, pool: KVPool) -> Any:
        return noting(torch_attention(config, pool), log, OF_ATTENTION)

    return RunnerCase(tiny_checkpoint, logging_attention, is_capturable=True)


def build(
    case: RunnerCase, log: list[str], sizes: GraphSizes, prefill_graphs: str = "breakable"
) -> RunnerSelection:
    """Returns runners that have captured, and nothing else in the log."""
    log.clear()
    runner = case.build(sizes, lambda: noting(RecordingBackend(), log, OF_BACKEND), prefill_graphs)
    with torch.inference_mode():
        runner.capture()
    return runner


def warmed(size: int) -> list[str]:
    two_runs = ("warm up", "plan in graph", "plan in graph")
    return [f"plan {size} rows", *two_runs, "restore", f"capture size {size}"]


def whole(size: int) -> list[str]:
    """Captures a pass, of which planning on the device is a part."""
    return [*warmed(size), "plan in graph"]


def in_pieces(size: int) -> list[str]:
    """Captures the pieces between four attention calls; attention and its plan stay outside."""
    return [*warmed(size), *(f"capture size {size}, piece {piece}" for piece in (1, 2, 3))]


DISCARD, DECODE, PREFILL = "discard", "session decode", "session prefill"


@pytest.mark.parametrize(
    ("sizes", "prefill_graphs", "expected"),
    [
        (DECODES, "breakable", [DISCARD, DECODE, *whole(4), *whole(2)]),
        (EXTENDS, "breakable", [DISCARD, PREFILL, *whole(8), *whole(4)]),
        (EXTENDS, "piecewise", [DISCARD, PREFILL, *in_pieces(8), *in_pieces(4)]),
        (
            GraphSizes((2, 4), (4, 8)),
            "breakable",
            [DISCARD, DISCARD, PREFILL, *whole(8), *whole(4), DECODE, *whole(4), *whole(2)],
        ),
    ],
    ids=["decodes", "breakable", "piecewise", "prefills before decodes"],
)
def test_sizes_are_captured_largest_first_each_after_two_warm_ups_and_a_restore(
    case: RunnerCase, log: list[str], sizes: GraphSizes, prefill_graphs: str, expected: list[str]
):
    build(case, log, sizes, prefill_graphs)
    assert log == expected


@pytest.mark.parametrize(
    ("sizes", "prefill_graphs", "num_tokens", "expected"),
    [
        (DECODES, "off", [1, 1, 1], ["plan 4 rows", "replay size 4"]),
        (EXTENDS, "breakable", [1, 2], ["plan 4 rows", "replay size 4"]),
        (
            EXTENDS,
            "piecewise",
            [1, 2],
            ["plan 4 rows", "plan in graph", "replay size 4"]
            + [f"replay size 4, piece {piece}" for piece in (1, 2, 3)],
        ),
    ],
    ids=["decode", "breakable", "piecewise"],
)
def test_a_replay_plans_on_the_host_first_and_on_the_device_only_where_no_graph_does(
    case: RunnerCase,
    log: list[str],
    sizes: GraphSizes,
    prefill_graphs: str,
    num_tokens: list[int],
    expected: list[str],
):
    runner = build(case, log, sizes, prefill_graphs)
    has_extend = sizes is EXTENDS
    batch = case.batch(np.random.default_rng(0), num_tokens, 4, has_extend=has_extend)
    log.clear()
    case.run(runner, batch)
    assert log == expected


def test_a_capture_that_failed_is_made_when_its_size_is_run_again(case: RunnerCase):
    runner: Any = case.build(DECODES, EagerBackend)
    runner._decode.capture()
    batch = case.batch(np.random.default_rng(0), [1, 1, 1], 4, has_extend=False)
    failing = patch.object(runner._decode.graphs.backend, "warm_up", side_effect=MemoryError)
    with failing, pytest.raises(MemoryError):
        case.run(runner, batch)
    case.run(runner, batch)


@pytest.mark.parametrize("sizes", [DECODES, EXTENDS], ids=["decode", "breakable"])
def test_a_capture_that_runs_nothing_is_made_when_its_size_is_first_run(
    case: RunnerCase, log: list[str], sizes: GraphSizes
):
    runner: Any = case.build(sizes, lambda: noting(EagerBackend(), log, OF_BACKEND))
    of_graph, session, num_tokens = runner._decode, DECODE, [1, 1, 1]
    if sizes is EXTENDS:
        of_graph, session, num_tokens = runner._prefill, PREFILL, [1, 2]
    batch = case.batch(np.random.default_rng(0), num_tokens, 4, has_extend=sizes is EXTENDS)
    made = [session, "plan 4 rows", "warm up", "restore", "capture size 4"]
    for _ in range(2):
        of_graph.discard()
        log.clear()
        of_graph.capture()
        assert log == []
        for before in (made, []):
            log.clear()
            case.run(runner, batch)
            assert log == [*before, "plan 4 rows", "replay size 4", "plan in graph"]


@pytest.mark.parametrize("kind", ["decode", "verify", *PREFILL_GRAPHS])
def test_what_another_runner_left_in_shared_buffers_is_gone_before_a_capture(
    tiny_checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    case = RunnerCase(tiny_checkpoint)
    runner: Any
    if kind in PREFILL_GRAPHS:
        runner = case.build(EXTENDS, RecordingBackend, prefill_graphs=kind)._prefill
    elif kind == "decode":
        runner = case.build(DECODES, RecordingBackend)._decode
    else:
        runner = case.decode(RecordingBackend(), 3, has_tree=True)
        runner.discard()
    check_reset_before_capture(runner, [runner.graphs.registry], monkeypatch)


def fake_runner(
    name: str, log: list[str], outcomes: Iterable[Exception | None] | None = None
) -> Any:
    """Returns what notes its calls and captures nothing; captures end as said, if it is."""
    inner = SimpleNamespace(discard=Mock(), capture=Mock(side_effect=outcomes))
    return noting(inner, log, {call: f"{call} {name}" for call in ("discard", "capture")})


BOTH = ("prefill", "decode")


@pytest.mark.parametrize("num_joins", [1, 2, 3])
@pytest.mark.parametrize("binds_group", [False, True])
@pytest.mark.parametrize("names", [(), ("prefill",), ("decode",), BOTH])
def test_graphs_are_captured_anew_for_each_group_that_they_are_bound_to(
    names: tuple[str, ...], binds_group: bool, num_joins: int
):
    log: list[str] = []
    runner = by_layout(log, names, binds_group)
    for join in range(num_joins):
        log.clear()
        runner.capture()
        if join and not binds_group:
            assert log == []
            continue
        # All graphs of the old group go first, in any order, whichever runner has them.
        discards, captures = log[: len(names)], log[len(names) :]
        assert sorted(discards) == sorted(f"discard {name}" for name in names)
        assert captures == [f"capture {name}" for name in names]


@pytest.mark.parametrize("binds_group", [False, True])
@pytest.mark.parametrize("failing", BOTH)
def test_a_capture_that_failed_is_made_again_from_the_start(failing: str, binds_group: bool):
    log: list[str] = []
    runner = by_layout(log, BOTH, binds_group, failing)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.capture()
    log.clear()
    runner.capture()
    assert sorted(log[:2]) == ["discard decode", "discard prefill"]
    assert log[2:] == ["capture prefill", "capture decode"]


def test_after_a_capture_that_failed_nothing_is_left_of_an_older_place_either():
    log: list[str] = []
    outcomes, place = [None, RuntimeError("no memory"), None], Place()
    decode = fake_runner("decode", log, outcomes)
    eager = fake_runner("eager", log)
    runner = RunnerSelection(eager, decode=decode, binds_group=False, place=place)
    runner.capture()
    older, place.topology = place.topology, Topology(dp_size=2)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.capture()
    place.topology = older
    log.clear()
    runner.capture()
    assert log == ["discard decode", "capture decode"]


def by_layout(
    log: list[str], names: tuple[str, ...], binds_group: bool, failing: str | None = None
) -> RunnerSelection:
    """Returns fakes of the named kinds behind one runner; the first capture of one may fail."""
    outcomes = [RuntimeError("no memory"), None]
    fakes = {n: fake_runner(n, log, outcomes if n == failing else None) for n in names}
    return RunnerSelection(fake_runner("eager", log), binds_group=binds_group, **fakes)


def test_drafts_are_captured_last_and_everything_is_dropped_first():
    log: list[str] = []
    order = ["prefill", "decode", "verify", "draft", "draft_extend"]
    fakes = {name: fake_runner(name, log) for name in order}
    drafts = [fakes.pop("draft"), fakes.pop("draft_extend")]
    RunnerSelection(fake_runner("eager", log), draft_runners=drafts, **fakes).capture()
    assert log == [f"{act} {name}" for act in ("discard", "capture") for name in order]
