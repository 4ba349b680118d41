"""If this fails, a GPU executor sends rows to wrong experts, or crashes where FlashInfer checks not."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from executor.budget.token_budget import A2A_TOP_KS
from executor.model.flashinfer.all_to_all import AllToAll, AllToAllSizes
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.dispatch_flashinfer import FlashInferDispatcher
from executor.parallel.layout import DpLayout, DpPaddingMode
from tests.executor.model.moe.dispatch_cases import (
    DTYPES,
    EXPERTS,
    HIDDEN,
    MAX_SHARD_ROWS,
    POISONS,
    TOP_K,
    cases,
    run_case,
    wrong,
    wrong_arrivals,
)
from tests.executor.support.flashinfer.cpu_all_to_all import run_threads
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer
from tests.executor.support.flashinfer.expert_rows import (
    SIZES,
    Rows,
    dense,
    experts,
    fitting,
    layouts_of,
    places_of,
    random_rows,
)

CPU = torch.device("cpu")


class Ranks:
    """All ranks of a group, as threads over one tensor."""

    def __init__(self, sizes: AllToAllSizes, *, in_place: bool = True) -> None:
        ops = FlashInferOps(enable_pdl=True)
        self.sizes = sizes
        self.in_place = in_place
        workspace = torch.zeros(sizes.ep_size, sizes.bytes_per_rank, dtype=torch.uint8)
        self.kernels = [AllToAll(ops, sizes, rank) for rank in range(sizes.ep_size)]
        for kernels in self.kernels:
            kernels.attach(workspace)
        self.dispatchers = [
            FlashInferDispatcher(
                kernels, places_of(sizes, rank), device=CPU, payload_in_workspace=in_place
            )
            for rank, kernels in enumerate(self.kernels)
        ]

    def run(self, rows: Sequence[Rows], layouts: Sequence[DpLayout]) -> list[torch.Tensor]:
        """Returns each rank's results."""
        each = zip(rows, layouts, strict=True)
        return run_threads([partial(self._run, rank, *own) for rank, own in enumerate(each)])

    def check(self, rows: Sequence[Rows], counts: Sequence[int]) -> None:
        """Compares each rank's results with those of all experts on one rank."""
        rtol, atol = (0.02, 0.5) if self.sizes.dtype == torch.bfloat16 else (1e-5, 1e-5)
        for got, sent in zip(self.run(rows, layouts_of(counts)), rows, strict=True):
            torch.testing.assert_close(got.float(), dense(sent, self.sizes), rtol=rtol, atol=atol)

    def _run(self, rank: int, rows: Rows, layout: DpLayout) -> torch.Tensor:
        dispatcher = self.dispatchers[rank]
        dispatched = dispatcher.dispatch(*rows, layout)
        y = experts(dispatched, rank, self.sizes)
        if self.in_place and dispatched.out_RD is not None:
            y = dispatched.out_RD.copy_(y)
        return dispatcher.combine(y, dispatched)


@pytest.mark.parametrize(
    "changes",
    [
        {"ep_size": 1},
        {"ep_size": 2, "top_k": 1},
        {"ep_size": 4, "top_k": 8},
        {"ep_size": 3, "hidden_size": 5, "top_k": 2},
        {"ep_size": 2, "dtype": torch.bfloat16, "hidden_size": 7, "top_k": 1},
        {"ep_size": 12, "max_num_tokens": 1},
        {"ep_size": 3, "num_experts": 8, "top_k": 2},
        {"ep_size": 5, "num_experts": 8},
        {"ep_size": 8, "num_experts": 5, "top_k": 4},
    ],
)
def test_all_sizes_agree_with_one_rank(library: CpuFlashInfer, changes: dict[str, Any]) -> None:
    sizes = fitting(**changes)
    ranks = Ranks(sizes)
    counts = [(7 * rank + 1) % (sizes.max_num_tokens + 1) for rank in range(sizes.ep_size)]
    ranks.check([random_rows(count, sizes, i) for i, count in enumerate(counts)], counts)


def test_steps_of_all_sizes_follow_one_another(library: CpuFlashInfer) -> None:
    """A larger step must not write over results that a slower peer still reads: own places."""
    ranks = Ranks(fitting())
    for seed, counts in enumerate([(1, 1, 1), (9, 2, 9), (0, 1, 0), (2, 9, 3), (1, 0, 0)]):
        rows = [random_rows(count, SIZES, 10 * seed + i) for i, count in enumerate(counts)]
        ranks.check(rows, counts)
    combines = [kwargs for name, kwargs in library.calls if name == "moe_a2a_combine"]
    assert len({kwargs["combine_payload_offset"] for kwargs in combines}) == 1


UNEVEN_SHARDS = [
    DpLayout((5,), DpPaddingMode.MAX_LEN, 0, attn_tp_rank=rank, attn_tp_size=2) for rank in range(2)
]


@pytest.mark.parametrize(
    ("counts", "layouts", "padding_id"),
    [
        ((3, 0, 5), layouts_of((6, 6, 6), graph_size=6), SIZES.num_experts),
        ((3, 2), UNEVEN_SHARDS, 0),
    ],
    ids=["of a graph", "of the rest of an uneven shard"],
)
def test_rows_that_are_padding_stay_and_run_no_expert(
    library: CpuFlashInfer, counts: Sequence[int], layouts: list[DpLayout], padding_id: int
) -> None:
    """A router's choice for them, where it makes one, does not count."""
    ranks = Ranks(fitting(ep_size=len(counts)))
    rows = [random_rows(layouts[0].shard_num_rows, SIZES, i) for i in range(len(counts))]
    for count, (x, ids, weights) in zip(counts, rows, strict=True):
        x[count:] = torch.nan
        ids[count:] = padding_id
        weights[count:] = torch.nan
    before = [ids.clone() for _, ids, _ in rows]
    results = ranks.run(rows, layouts)
    assert all(map(torch.equal, before, [ids for _, ids, _ in rows])), "they are the caller's"
    for count, got, sent in zip(counts, results, rows, strict=True):
        torch.testing.assert_close(got[:count], dense(sent, SIZES)[:count])
        assert not got[count:].any(), "their results are zeros"
    for kwargs in sent_by(library):
        routes = kwargs["token_selected_experts"][counts[kwargs["ep_rank"]] :]
        num_local = SIZES.num_experts // len(counts)
        assert (routes == kwargs["ep_rank"] * num_local).all(), "padding goes to its own rank"


def test_steps_without_any_row_call_nothing(library: CpuFlashInfer) -> None:
    ranks = Ranks(fitting())
    library.calls.clear()
    results = ranks.run([random_rows(0, SIZES, 0)] * 3, layouts_of((0, 0, 0)))
    assert [tuple(y.shape) for y in results] == [(0, 8)] * 3
    assert library.names() == []


def test_an_idle_rank_sends_no_rows_of_the_same_kind(library: CpuFlashInfer) -> None:
    ranks = Ranks(fitting())
    counts = (2, 0, 0)
    ranks.run([random_rows(n, SIZES, n) for n in counts], layouts_of(counts))
    kinds = {
        tuple((x.dtype, x.shape[1]) for x in kwargs["input_payloads"])
        for kwargs in sent_by(library)
    }
    assert kinds == {((torch.int32, 4), (torch.float32, 4), (torch.float32, 8))}
    assert {len(kwargs["input_payloads"][0]) for kwargs in sent_by(library)} == {0, 2}
    assert {kwargs["runtime_max_tokens_per_rank"] for kwargs in sent_by(library)} == {2}


def sent_by(library: CpuFlashInfer) -> list[dict[str, Any]]:
    return [kwargs for name, kwargs in library.calls if name == "moe_a2a_dispatch"]


def test_payloads_come_by_descending_element_size(library: CpuFlashInfer) -> None:
    sizes = fitting(dtype=torch.bfloat16, hidden_size=7)
    ranks = Ranks(sizes)
    ranks.run([random_rows(1, sizes, 0)] * 3, layouts_of((1, 1, 1)))
    for kwargs in sent_by(library):
        widths = [x.element_size() for x in kwargs["input_payloads"]]
        assert widths == sorted(widths, reverse=True)


def test_what_a_runner_wrote_in_place_is_not_copied(library: CpuFlashInfer) -> None:
    for in_place in (True, False):
        ranks = Ranks(fitting(), in_place=in_place)
        library.calls.clear()
        ranks.run([random_rows(2, SIZES, i) for i in range(3)], layouts_of((2, 2, 2)))
        said = [kw["payload_in_workspace"] for name, kw in library.calls if "combine" in name]
        assert said == [in_place] * 3


def test_rows_may_be_strided(library: CpuFlashInfer) -> None:
    ranks = Ranks(fitting())
    rows = [random_rows(3, SIZES, seed) for seed in range(3)]
    strided = [
        (torch.cat((x, x), dim=1)[:, :8], ids.t().contiguous().t(), weights)
        for x, ids, weights in rows
    ]
    assert not strided[0][0].is_contiguous()
    assert not strided[0][1].is_contiguous()
    ranks.check(strided, (3, 3, 3))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("arrangement", [(2, 1), (1, 2), (3, 1), (4, 1), (2, 2)])
def test_it_does_what_every_dispatcher_must(
    library: CpuFlashInfer, arrangement: tuple[int, int], dtype: torch.dtype, in_place: bool
) -> None:
    world_size = arrangement[0] * arrangement[1]
    sizes = fitting(
        ep_size=world_size,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        dtype=dtype,
        max_num_tokens=MAX_SHARD_ROWS,
    )
    ranks = Ranks(sizes, in_place=in_place)
    for case in cases(*arrangement):
        for poison in POISONS:
            calls = [
                partial(run_case, ranks.dispatchers[rank], case, rank, dtype, poison)
                for rank in range(world_size)
            ]
            observed = run_threads(calls)
            assert wrong(case, dtype, observed) is None
            assert wrong_arrivals(case, observed) is None


# What the library does not check.


def test_rows_that_the_step_or_the_budget_has_no_room_for_are_refused(
    library: CpuFlashInfer,
) -> None:
    ranks = Ranks(fitting())
    x, ids, weights = random_rows(5, SIZES, 0)
    with pytest.raises(AssertionError, match="5 rows, runtime_max_tokens_per_rank=4, max_num_toke"):
        ranks.kernels[0].dispatch([x], ids, weights, routes_TK=ids, capacity=4)
    for num_rows, counts, problem in (
        (1, (1, 10, 1), "1 rows, runtime_max_tokens_per_rank=10, max_num_tokens=9"),
        (2, (3, 3, 3), "2 rows, 3 in the layout"),
    ):
        with pytest.raises(AssertionError, match=problem):
            ranks.dispatchers[0].dispatch(*random_rows(num_rows, SIZES, 0), layouts_of(counts)[0])


def test_dispatch_and_combine_take_turns(library: CpuFlashInfer) -> None:
    ranks = Ranks(fitting(ep_size=1))
    [dispatcher], [layout] = ranks.dispatchers, layouts_of((2,))
    rows = random_rows(2, SIZES, 0)
    dispatched = dispatcher.dispatch(*rows, layout)
    with pytest.raises(AssertionError, match="a dispatch is active"):
        dispatcher.dispatch(*rows, layout)
    y = torch.zeros(dispatched.x_RD.shape)
    dispatcher.combine(y, dispatched)
    with pytest.raises(AssertionError, match="nothing was dispatched"):
        dispatcher.combine(y, dispatched)
    other = dispatcher.dispatch(*rows, layout)
    with pytest.raises(AssertionError, match="another dispatch is active"):
        dispatcher.combine(y, dispatched)
    dispatcher.combine(y, other)


def test_after_a_failed_step_the_next_epoch_starts_afresh(library: CpuFlashInfer) -> None:
    ranks = Ranks(fitting(ep_size=1))
    [dispatcher], [layout], [kernels] = ranks.dispatchers, layouts_of((2,)), ranks.kernels
    rows = random_rows(2, SIZES, 0)
    dispatcher.dispatch(*rows, layout)  # and no combine
    dispatcher.leave()
    with pytest.raises(AssertionError, match="join a group before the first step"):
        dispatcher.dispatch(*rows, layout)
    kernels.attach(torch.zeros(1, kernels.sizes.bytes_per_rank, dtype=torch.uint8))
    torch.testing.assert_close(ranks.run([rows], [layout])[0], dense(rows, SIZES))


# Limits, at start-up.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep_size": 65, "num_experts": 65}, "ep_size=65: .* 1 to 64 EP ranks; use 64"),
        ({"ep_size": 0}, "ep_size=0: .* use 1"),
        ({"top_k": 3}, "per_tok=3: .*nearest are for 2 and 4"),
        ({"top_k": 20}, "per_tok=20: .*nearest are for 18 and 22"),
        ({"top_k": 23}, r"per_tok=23: .*nearest are for 22\); use moe_a2a=none"),
        ({"top_k": 0}, r"per_tok=0: .*nearest are for 1\)"),
        ({"num_experts": 13}, "num_experts=13 do not fit num_slots=4 on each of ep_size=3"),
        ({"max_num_tokens": 0}, "max_num_tokens=0: need at least 1"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SIZES, **changes)


@pytest.mark.parametrize("top_k", A2A_TOP_KS)
def test_every_number_of_experts_that_is_built_is_taken(top_k: int) -> None:
    replace(SIZES, top_k=top_k, num_experts=24, num_slots=8)


def test_a_workspace_that_is_too_small_is_refused(library: CpuFlashInfer) -> None:
    ops = FlashInferOps(enable_pdl=True)
    sizes = fitting()
    AllToAll(ops, sizes, 0)
    small = replace(sizes, bytes_per_rank=sizes.bytes_per_rank - 1)
    with pytest.raises(ValueError, match=f"needs {sizes.bytes_per_rank} for 3 ranks of 9 tokens"):
        AllToAll(ops, small, 0)


def test_results_lie_where_the_received_rows_never_reach() -> None:
    for tokens in (1, 2, 7, 64, 100):
        for dtype in (torch.bfloat16, torch.float32):
            sizes = fitting(max_num_tokens=tokens, dtype=dtype)
            received = sizes.ep_size * tokens * sizes.sent_bytes
            aux = sizes.bytes_per_rank - received - sizes.ep_size * tokens * sizes.result_bytes
            assert sizes.result_offset % 128 == 0
            assert sizes.result_offset >= received + aux - 256  # two regions are rounded up
            assert sizes.result_offset + sizes.ep_size * tokens * sizes.result_bytes <= (
                sizes.bytes_per_rank
            )
