"""If this fails, tokens reach the wrong experts or come back wrong, or executors hang."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from executor.budget.token_budget import TokenBudget
from executor.config import ExecutorConfig
from executor.model.moe.dispatch import DISPATCHERS, new_dispatcher, require_capturable
from executor.model.moe.dispatch_all_to_all import TorchAllToAllDispatcher
from executor.model.moe.layer import Dispatcher, DispatchSetup
from executor.parallel.communicators import DpCommunicator
from executor.parallel.expert_places import ExpertPlaces
from executor.parallel.layout import DpLayout, DpPaddingMode, Place, Topology
from executor.parallel.process_groups import EpochGroups
from tests.executor.model.moe.dispatch_cases import (
    DTYPES,
    EXPERTS,
    HIDDEN,
    MAX_LEN,
    MAX_SHARD_ROWS,
    POISONS,
    TOP_K,
    Case,
    Observed,
    cases,
    run_case,
    sliced_cases,
    wrong,
    wrong_arrivals,
)
from tests.executor.support.ranks.ranks import join, run_ranks
from tests.support.paths import DEMO_MODEL

# What moe_a2a and moe_a2a_extend say.
KINDS = {
    "all-gather": ("none", "all-gather"),
    "all-to-all": ("torch", "all-to-all"),
    "by phase": ("torch", "all-gather"),
}
# DP ranks and attention-TP executors of each.
ARRANGEMENTS = {2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(2, 2), (4, 1)]}
CPU = torch.device("cpu")

Runs = list[list[Observed]]  # by pass, by executor


def cases_of(kind: str, dtype: str, world_size: int) -> list[Case]:
    """Returns the cases that a kind of dispatcher must run: bf16 and "by phase" fewer of them."""
    found = []
    for arrangement in ARRANGEMENTS[world_size][: 1 if dtype == "bf16" else None]:
        found += cases(*arrangement)
        if kind == "all-gather":
            found += sliced_cases(*arrangement)
    if kind == "by phase":
        return [case for case in found if case.graph_size is None and case.seed == 0]
    return found


def make(kind: str, communicator: DpCommunicator, dtype: torch.dtype) -> Dispatcher:
    return new_dispatcher(*KINDS[kind], setup_of(communicator, dtype))


def setup_of(communicator: DpCommunicator, dtype: torch.dtype) -> DispatchSetup:
    budget = TokenBudget(
        max_num_batched_tokens=MAX_SHARD_ROWS,
        max_num_seqs=MAX_SHARD_ROWS,
        max_num_logits=MAX_SHARD_ROWS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
    )
    return DispatchSetup(
        communicator=communicator,
        budget=budget,
        places=ExpertPlaces.of(communicator.topology, EXPERTS),
        dtype=dtype,
        device=CPU,
    )


def new_communicator(topology: Topology, dtype: torch.dtype) -> DpCommunicator:
    return DpCommunicator(
        place=Place(topology),
        max_tokens_per_rank=MAX_SHARD_ROWS,
        hidden_size=HIDDEN,
        dtype=dtype,
        top_k=TOP_K,
    )


class Executor:
    """A rank of the tests: its groups, and dispatchers that all its cases share."""

    def __init__(self, rank: int, port: int) -> None:
        self._rank, self._port = rank, port
        self._groups: dict[tuple[int, int], EpochGroups] = {}
        self._dispatchers: dict[Any, Dispatcher] = {}

    def run(self, kind: str, dtype: torch.dtype, case: Case, poison: float) -> Observed:
        topology = case.topology(self._rank)
        key = (kind, dtype, topology)
        if key not in self._dispatchers:
            communicator = new_communicator(topology, dtype)
            communicator.join(self._groups_of(topology))
            self._dispatchers[key] = make(kind, communicator, dtype)
        return run_case(self._dispatchers[key], case, self._rank, dtype, poison)

    def _groups_of(self, topology: Topology) -> EpochGroups:
        sizes = (topology.dp_size, topology.attn_tp_size)
        if sizes not in self._groups:
            self._groups[sizes] = join(self._port, topology, len(self._groups))
        return self._groups[sizes]


def run_all(rank: int, port: int, world_size: int) -> dict[tuple[str, str], list[list[Observed]]]:
    """Runs all cases forwards with one poison, then backwards with the other."""
    executor, seen = Executor(rank, port), {}
    for kind in KINDS:
        for name, dtype in DTYPES.items():
            due = cases_of(kind, name, world_size)
            forwards, backwards = POISONS
            first = [executor.run(kind, dtype, case, forwards) for case in due]
            second = [executor.run(kind, dtype, case, backwards) for case in reversed(due)]
            seen[kind, name] = [first, second[::-1]]
    return seen


@pytest.fixture(scope="module", params=ARRANGEMENTS, ids=lambda size: f"{size} executors")
def seen(request: pytest.FixtureRequest) -> tuple[int, list[Any]]:
    return request.param, run_ranks(run_all, request.param, request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def passes(
    seen: tuple[int, list[Any]], kind: str, dtype: str
) -> Iterator[tuple[Case, list[Observed], list[Observed]]]:
    """Yields each case, and what the executors saw in either pass."""
    world_size, by_rank = seen
    runs = [by_rank[rank][kind, dtype] for rank in range(world_size)]
    for index, case in enumerate(cases_of(kind, dtype, world_size)):
        first, second = ([run[turn][index] for run in runs] for turn in (0, 1))
        yield case, first, second


def test_results_equal_the_dense_model(seen: tuple[int, list[Any]], kind: str, dtype: str):
    for case, first, _ in passes(seen, kind, dtype):
        assert wrong(case, DTYPES[dtype], first) is None


def test_padding_and_earlier_passes_change_no_bit(
    seen: tuple[int, list[Any]], kind: str, dtype: str
):
    for case, first, second in passes(seen, kind, dtype):
        for one, other in zip(first, second, strict=True):
            assert np.array_equal(one.y, other.y), case


def test_every_dispatcher_and_padding_give_the_same_bits(seen: tuple[int, list[Any]], dtype: str):
    found: dict[Case, Any] = {}
    for kind in KINDS:
        for case, first, _ in passes(seen, kind, dtype):
            y = np.concatenate([one.y for one in first])
            same = replace(case, mode=MAX_LEN, has_extend=False, graph_size=None, is_replay=False)
            assert np.array_equal(y, found.setdefault(same, y)), (kind, case)


def test_a_token_reaches_the_executors_of_its_experts_once(
    seen: tuple[int, list[Any]], kind: str, dtype: str
):
    for case, first, second in passes(seen, kind, dtype):
        assert wrong_arrivals(case, first) is None
        assert wrong_arrivals(case, second) is None


def test_an_all_to_all_sends_no_other_row(seen: tuple[int, list[Any]], dtype: str):
    for case, first, _ in passes(seen, "all-to-all", dtype):
        assert [one.num_rows for one in first] == [len(one.arrived) for one in first], case


def test_by_phase_gathers_exactly_when_a_rank_extends(seen: tuple[int, list[Any]], dtype: str):
    for case, first, _ in passes(seen, "by phase", dtype):
        num_rows = [one.num_rows for one in first]
        if case.has_extend:
            assert num_rows == [case.layout(0).global_dp_buffer_len] * len(first), case
        else:
            assert num_rows == [len(one.arrived) for one in first], case


class Loopback:
    """The group of a rank without peers."""

    rank, world_size = 0, 1

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_splits: Any = None, in_splits: Any = None
    ) -> None:
        out.copy_(x)


def alone() -> tuple[TorchAllToAllDispatcher, DpCommunicator]:
    """Returns an all-to-all in one process, and the communicator whose group it uses."""
    communicator = new_communicator(Topology(), torch.float32)
    dispatcher = TorchAllToAllDispatcher(
        communicator,
        ExpertPlaces.of(Topology(), EXPERTS),
        hidden_size=HIDDEN,
        dtype=torch.float32,
        top_k=TOP_K,
    )
    rejoin(communicator)
    return dispatcher, communicator


def rejoin(communicator: DpCommunicator) -> None:
    group: Any = Loopback()
    communicator.join(EpochGroups(epoch=0, world=group, attn_tp=None, host=group))


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.zeros(count, TOP_K, dtype=torch.int32)
    return torch.ones(count, HIDDEN), ids, torch.ones(count, TOP_K)


def test_dispatch_and_combine_take_turns():
    dispatcher, _ = alone()
    for count in (3, 2):
        dispatched = dispatcher.dispatch(*rows(count), DpLayout.single(count))
        with pytest.raises(AssertionError, match="dispatch called twice without combine"):
            dispatcher.dispatch(*rows(count), DpLayout.single(count))
        dispatcher.combine(dispatched.x_RD, dispatched)
        with pytest.raises(AssertionError, match="combine called without dispatch"):
            dispatcher.combine(dispatched.x_RD, dispatched)
    dispatched = dispatcher.dispatch(*rows(3), DpLayout.single(3))
    with pytest.raises(AssertionError, match="2 rows of results for 3 received"):
        dispatcher.combine(dispatched.x_RD[:2], dispatched)


def test_a_dispatch_that_a_failed_step_left_open_ends_with_its_group():
    dispatcher, communicator = alone()
    stale = dispatcher.dispatch(*rows(3), DpLayout.single(3))
    rejoin(communicator)
    with pytest.raises(AssertionError, match="combine called without dispatch"):
        dispatcher.combine(stale.x_RD, stale)
    dispatched = dispatcher.dispatch(*rows(2), DpLayout.single(2))
    assert dispatcher.combine(dispatched.x_RD, dispatched).eq(1).all()


@pytest.mark.parametrize(
    ("sent", "counts", "problem"),
    [
        (2, (3,), "2 rows, 3 in the layout"),
        (4, (3,), "4 rows, 3 in the layout"),
        (1, (1, MAX_SHARD_ROWS + 1), "2 ranks in the layout"),
        (MAX_SHARD_ROWS + 1, (MAX_SHARD_ROWS + 1,), f"buffers were made for {MAX_SHARD_ROWS}"),
    ],
)
def test_rows_that_do_not_fit_the_layout_or_the_buffers_are_refused(
    sent: int, counts: tuple[int, ...], problem: str
):
    dispatcher, _ = alone()
    with pytest.raises(AssertionError, match=problem):
        dispatcher.dispatch(*rows(sent), DpLayout(counts, DpPaddingMode.SUM_LEN, 0))


def test_without_peers_nothing_is_exchanged():
    communicator = DpCommunicator.single()
    for kind in KINDS:
        dispatcher = make(kind, communicator, torch.float32)
        x, ids, weights = rows(2)
        assert dispatcher.dispatch(x, ids, weights, DpLayout.single(2)).x_RD is x


def test_flashinfer_is_refused_where_it_does_not_run():
    setup = setup_of(new_communicator(Topology(dp_size=2), torch.float32), torch.float32)
    with pytest.raises(ValueError, match="moe_a2a=flashinfer needs a CUDA device"):
        new_dispatcher("flashinfer", "all-gather", setup)


def test_every_choice_of_the_setting_has_a_dispatcher():
    with pytest.raises(ValueError, match=f"moe_a2a=: need one of {', '.join(DISPATCHERS)}$"):
        ExecutorConfig(model=DEMO_MODEL, moe_a2a="")


@pytest.mark.parametrize(
    ("kind", "graphs", "refused"),
    [
        ("all-gather", (True, True), None),
        ("by phase", (False, True), None),
        ("by phase", (True, True), "decode_graphs=off"),
        ("all-to-all", (False, False), None),
        ("all-to-all", (False, True), "prefill_graphs=off"),
    ],
)
def test_graphs_over_what_reads_counts_on_the_host_are_refused(
    kind: str, graphs: tuple[bool, bool], refused: str | None
):
    communicator = new_communicator(Topology(dp_size=2), torch.float32)
    dispatcher = make(kind, communicator, torch.float32)
    name, (decode, prefill) = KINDS[kind][0], graphs
    if refused is None:
        require_capturable(name, dispatcher, has_decode_graphs=decode, has_prefill_graphs=prefill)
        return
    with pytest.raises(ValueError, match=refused):
        require_capturable(name, dispatcher, has_decode_graphs=decode, has_prefill_graphs=prefill)
