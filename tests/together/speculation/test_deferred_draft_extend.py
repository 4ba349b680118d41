"""If these fail, answers wait for the draft model, or it drafts behind tokens that it has not seen."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from executor.batch.staging import ReadBack
from executor.errors import PeerLost
from executor.worker import Worker
from tests.executor.support.recording.copiers import SeparateMemory
from tests.router.support.stepper import drafting
from tests.support.paths import DEMO_DRAFTS as DRAFTS
from tests.together.speculation.speculative_cell import (
    ALWAYS,
    Cell,
    Router,
    cell_of,
    demo_prompts,
    expect_plain,
    mixed_asks,
    settings_of,
    speculator_of,
)

PROMPT = demo_prompts(11, 1, 20)[0]
OFF = drafting(is_on=False)


@pytest.fixture
def cell() -> Iterator[Cell]:
    with cell_of(draft_model=DRAFTS / "mtp") as cell:
        yield cell


@pytest.fixture
def worker(cell: Cell) -> Worker:
    """The only executor, which runs nothing deferred unless it is told to."""
    cell.runs_deferred = False
    return cell.workers[0]


def note(
    monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str, events: list[str] | None = None
) -> list[str]:
    """Has methods leave their names as they are called, in the list that is returned."""
    noted: list[str] = [] if events is None else events

    def called(name: str, call: Any, *args: Any) -> Any:
        noted.append(name)
        return call(*args)

    for name in names:
        monkeypatch.setattr(owner, name, partial(called, name, getattr(owner, name)))
    return noted


def on_its_own(worker: Worker) -> Worker:
    """Returns a worker of the same parts whose device has memory of its own, as a GPU has."""
    pool = worker._kv_pool
    pool.tables = pool.tables_cpu.clone()
    apart = Worker(
        limits=worker._limits,
        kv_pool=pool,
        sampler=worker._sampler,
        runner=worker._runner,
        speculation=worker._speculation,
        members=[],
        form_group=None,
        device=worker._device,
        copier=SeparateMemory(),
    )
    apart.join(1, "")
    return apart


def run_steps(worker: Worker, cell: Cell, count: int, drafts: dict[str, Any]) -> list[int]:
    """Runs a prompt and what follows it. Returns ``num_draft_tokens`` of each step."""
    router = Router(cell, drafts)
    router.submit(PROMPT, 16)
    widths = []
    cell.workers[0] = worker
    for _ in range(count):
        assert router.plan() is not None
        router.commit()
        widths.append(router.widths[-1])
    return widths


def test_where_the_host_computes_draft_extend_is_left_behind_the_answer(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    events = note(monkeypatch, worker, "_results")
    note(monkeypatch, speculator_of(worker), "extend", "extend_accepted", events=events)
    assert run_steps(worker, cell, 3, ALWAYS) == [0, 4, 4]
    assert events == ["_results", "extend", "_results", "extend_accepted", "_results"]
    assert worker.has_deferred
    worker.run_deferred()
    assert events[-1] == "extend_accepted"
    assert not worker.has_deferred
    worker.run_deferred()
    assert events.count("extend_accepted") == 2


def test_a_device_of_its_own_is_given_draft_extend_between_the_tokens_copy_and_the_wait(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
):
    worker = on_its_own(cell.workers[0])
    events = note(monkeypatch, speculator_of(worker), "extend", "extend_accepted")

    class Noted(ReadBack):
        def __init__(self, *args: Any) -> None:
            events.append("begin")
            super().__init__(*args)

        def wait(self) -> Any:
            events.append("wait")
            return super().wait()

    monkeypatch.setattr("executor.worker.ReadBack", Noted)
    assert run_steps(worker, cell, 3, ALWAYS) == [0, 4, 4]
    speculative = ["begin", "extend_accepted", "wait"]
    lengths = ["wait"]  # which follow from a speculative step
    assert events == ["begin", "extend", "wait", *speculative, *lengths, *speculative]
    assert not worker.has_deferred


@pytest.mark.parametrize(("name", "topk"), [("eagle", 2), ("mtp3", 1), ("frozen_kv", 1)])
def test_drafts_are_the_same_whoever_begins_what_a_step_has_left(name: str, topk: int):
    """As soon as it is answered, or only the next step, two of them in flight."""
    gained = []
    with cell_of(max_num_seqs=4, **settings_of(name, topk)) as cell:
        for cell.runs_deferred in (True, False):
            router = Router(cell)
            expect_plain(router, mixed_asks(300, 6))
            gained.append(router.tokens_per_step)
    assert gained[0] == gained[1] > 1.2


def test_a_new_epoch_drops_what_the_last_one_has_left(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    events = note(monkeypatch, speculator_of(worker), "extend")
    run_steps(worker, cell, 1, ALWAYS)
    assert worker.has_deferred
    cell.join()
    worker.run_deferred()
    assert events == []


def defer_in_a_group(cell: Cell, monkeypatch: pytest.MonkeyPatch, extend: Any) -> None:
    """Has the executor answer a prompt's step in a group, with this deferred behind the answer."""
    [worker] = cell.workers
    router = Router(cell)
    router.submit(PROMPT, 16)
    monkeypatch.setattr(worker, "_groups", SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(speculator_of(worker), "extend", extend)
    router.plan()
    assert worker.has_deferred


def test_who_has_left_its_group_runs_nothing_deferred_in_it(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    defer_in_a_group(cell, monkeypatch, lambda *_: pytest.fail("it ran"))
    worker.leave()
    worker.run_deferred()


def test_who_leaves_its_group_while_it_runs_deferred_says_so(
    cell: Cell, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    defer_in_a_group(cell, monkeypatch, lambda *_: worker.leave())
    with pytest.raises(PeerLost, match="left its group during a deferred draft-extend"):
        worker.run_deferred()


# ---- a router that plans no drafts


@pytest.mark.parametrize("group", [{}, {"dp_size": 2}, {"attn_tp_size": 2}], ids=str)
def test_without_speculative_steps_the_draft_model_runs_nothing(
    group: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    with cell_of(**group, **settings_of("mtp", 1)) as cell:
        events: list[str] = []
        for worker in cell.workers:
            note(monkeypatch, speculator_of(worker)._extender, "extend", events=events)
        expect_plain(Router(cell, OFF), mixed_asks(400, 5))
        assert events == []
        router = Router(cell)  # another router begins an epoch, and with it from the start
        expect_plain(router, mixed_asks(400, 5))
        assert router.tokens_per_step > 1.2


def test_rows_are_known_to_be_followed_or_not(cell: Cell):
    [worker] = cell.workers
    for drafts, is_followed in ((OFF, False), (ALWAYS, True), (OFF, False)):
        router = Router(cell, drafts)
        request = router.submit(PROMPT, 16)
        router.plan()
        router.commit()
        assert worker._rows.is_followed[request.sequences[0].row] == is_followed
