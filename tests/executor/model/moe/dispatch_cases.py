"""Cases that every dispatcher must pass, the dense authority, and the comparison.

A case is one pass of all executors. ``run_case`` is one executor's part of it; executors may be
processes or threads. ``wrong`` compares what all of them saw with every token going through its
experts on one machine.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from executor.model.moe.layer import Dispatched, Dispatcher
from executor.parallel.layout import DpLayout, DpPaddingMode, Topology, share_of
from protos.executor.placement import GHOST
from tests.executor.model.moe.moe_cases import run_pairs

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 16, 8, 8, 2
MAX_SHARD_ROWS = 16  # rows of an executor in any case; buffers are made for as many
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
POISONS = (float("nan"), 7.0)  # what padding rows hold, a pass each
_NUMBER = 16  # column 0 of a token is its number over this: exact in bfloat16 up to 255

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
MAX_LEN, SUM_LEN = DpPaddingMode.MAX_LEN, DpPaddingMode.SUM_LEN


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass.

    Attributes:
        counts: Real tokens of each DP rank.
        mode: How the layout pads.
        attn_tp_size: Executors of a DP rank.
        ep_size: As in Topology.
        graph_size: As in DpLayout.
        is_replay: Whether the layout is the one that a graph was captured with, which counts
            padding as tokens: then ids of padding are E.
        has_extend: As in DpLayout.
        routing: "random", "one expert", "last executor" or "nowhere": which experts tokens pick.
        seed: Draws other numbers.
    """

    counts: tuple[int, ...]
    mode: DpPaddingMode = MAX_LEN
    attn_tp_size: int = 1
    ep_size: int | None = None
    graph_size: int | None = None
    is_replay: bool = False
    has_extend: bool = False
    routing: str = "random"
    seed: int = 0

    @property
    def world_size(self) -> int:
        return len(self.counts) * self.attn_tp_size

    def topology(self, world_rank: int) -> Topology:
        dp_rank, attn_tp_rank = divmod(world_rank, self.attn_tp_size)
        return Topology(
            dp_rank=dp_rank,
            dp_size=len(self.counts),
            attn_tp_rank=attn_tp_rank,
            attn_tp_size=self.attn_tp_size,
            ep_size=self.ep_size,
        )

    def layout(self, world_rank: int) -> DpLayout:
        topology = self.topology(world_rank)
        if self.is_replay:
            assert self.graph_size is not None
            return DpLayout.captured(self.graph_size, topology, has_extend=self.has_extend)
        return DpLayout(
            self.counts,
            self.mode,
            topology.dp_rank,
            self.graph_size,
            self.has_extend,
            topology.attn_tp_rank,
            self.attn_tp_size,
        )

    def real_tokens(self, world_rank: int) -> range:
        """Which of its DP rank's tokens an executor holds."""
        dp_rank, attn_tp_rank = divmod(world_rank, self.attn_tp_size)
        rows, count = self.layout(world_rank).shard_num_rows, self.counts[dp_rank]
        return range(min(attn_tp_rank * rows, count), min((attn_tp_rank + 1) * rows, count))


@dataclass(frozen=True)
class Observed:
    """What one executor saw of a case.

    Attributes:
        y: Results of its real tokens, as float32. An array, because a process cannot leave a tensor
            behind.
        num_rows: Rows that it received.
        arrived: Number and experts, ascending, of each received row that has an expert here.
    """

    y: FloatArray
    num_rows: int
    arrived: list[tuple[int, tuple[int, ...]]]


def cases(dp_size: int, attn_tp_size: int) -> list[Case]:
    """Returns the cases of one arrangement of executors, each expert on one of them."""
    return [case for case in _all_cases(dp_size, attn_tp_size) if case.ep_size is None]


def sliced_cases(dp_size: int, attn_tp_size: int) -> list[Case]:
    """Returns those in which several executors hold slices of the same experts."""
    return [case for case in _all_cases(dp_size, attn_tp_size) if case.ep_size is not None]


def _all_cases(dp_size: int, attn_tp_size: int) -> Iterator[Case]:
    most = MAX_SHARD_ROWS * attn_tp_size
    uneven = (5, 3, 0, 8)[:dp_size]
    counts_of = {
        "none": (0,) * dp_size,
        "one token": (0,) * (dp_size - 1) + (1,),
        "uneven": uneven,
        "one rank has all": (0,) * (dp_size - 1) + (9,),
        "largest": (most,) * dp_size,
    }
    new = partial(Case, attn_tp_size=attn_tp_size)
    for counts in counts_of.values():
        yield new(counts=counts)
        yield new(counts=counts, mode=SUM_LEN, has_extend=True)
    yield new(counts=uneven, mode=SUM_LEN)
    for routing in ("one expert", "last executor", "nowhere"):
        yield new(counts=counts_of["largest"], routing=routing)
    for counts in (uneven, (0,) * dp_size):
        for is_replay in (False, True):
            yield new(counts=counts, graph_size=8, is_replay=is_replay)
    generator = torch.Generator().manual_seed(dp_size * 10 + attn_tp_size)
    for seed in range(6):
        drawn = torch.randint(0, most + 1, (dp_size,), generator=generator)
        kept = torch.rand(dp_size, generator=generator) < 0.7
        yield new(
            counts=tuple((drawn * kept).tolist()),
            mode=(MAX_LEN, SUM_LEN)[seed % 2],
            has_extend=seed % 3 == 0,
            seed=seed,
        )
    world_size = dp_size * attn_tp_size
    for ep_size in (size for size in (1, 2) if size < world_size != 3):  # F divides by 2 and 4
        for counts in (uneven, counts_of["largest"]):
            for mode in DpPaddingMode:
                yield new(counts=counts, mode=mode, ep_size=ep_size)


def run_case(
    dispatcher: Dispatcher,
    case: Case,
    world_rank: int,
    dtype: torch.dtype,
    poison: float,
    device: torch.device | str = "cpu",
) -> Observed:
    """Dispatches an executor's rows, runs its experts, and combines. All executors call it.

    Args:
        dispatcher: For HIDDEN, EXPERTS and TOP_K, MAX_SHARD_ROWS, ``case.topology(world_rank)``.
        case: The pass.
        world_rank: This executor's.
        dtype: Of the hidden states.
        poison: What padding rows hold, their weights too.
        device: Where the dispatcher's tensors live.
    """
    layout, real = case.layout(world_rank), case.real_tokens(world_rank)
    x_AD, ids_AK, weights_AK = _tokens(case)
    first = sum(case.counts[: layout.dp_rank])
    own = slice(first + real.start, first + real.stop)
    num_rows = layout.shard_num_rows
    x_TD = torch.full((num_rows, HIDDEN), poison, dtype=dtype)
    x_TD[: len(real)] = x_AD[own].to(dtype)
    # A replay masks padding. Elsewhere the gate has routed it like any row.
    ids_TK = torch.full((num_rows, TOP_K), EXPERTS if case.is_replay else 3, dtype=torch.int32)
    ids_TK[: len(real)] = ids_AK[own]
    weights_TK = torch.full((num_rows, TOP_K), poison)
    weights_TK[: len(real)] = weights_AK[own]
    sent = [x.to(device) for x in (x_TD, ids_TK.clone(), weights_TK)]
    dispatched = dispatcher.dispatch(*sent, layout)
    assert torch.equal(sent[1].cpu(), ids_TK), "the caller's ids are the caller's"
    arrived = list(_arrived(dispatched, case.topology(world_rank)))
    y_RD = _run_experts(dispatched, case.topology(world_rank))
    y_TD = dispatcher.combine(y_RD, dispatched)
    assert y_TD.shape == (num_rows, HIDDEN), f"{y_TD.shape} for {num_rows} rows"
    assert y_TD.dtype == dtype
    return Observed(y_TD[: len(real)].float().cpu().numpy().copy(), len(y_RD), arrived)


def wrong(case: Case, dtype: torch.dtype, observed: Sequence[Observed]) -> str | None:
    """Compares all executors' results with the dense authority. Returns what differs."""
    expected = dense(case, dtype)
    tolerance = TOLERANCES[dtype]
    for world_rank, seen in enumerate(observed):
        real = case.real_tokens(world_rank)
        first = sum(case.counts[: world_rank // case.attn_tp_size])
        own = expected[first + real.start : first + real.stop]
        error = (torch.from_numpy(seen.y).double() - own).abs()
        if not (error <= tolerance * (1 + own.abs())).all():
            return f"executor {world_rank}: {error.max()} off in {case}"
    return None


def wrong_arrivals(case: Case, observed: Sequence[Observed]) -> str | None:
    """Checks that every token reaches exactly the executors with its experts, once each."""
    _, ids_AK, _ = _tokens(case)
    for world_rank, seen in enumerate(observed):
        local = case.topology(world_rank).expert_slots(EXPERTS)
        due = []
        for number, ids in enumerate(ids_AK.tolist()):
            here = tuple(sorted(expert for expert in ids if expert in local))
            if here:
                due.append((number, here))
        if sorted(seen.arrived) != due:
            return f"executor {world_rank} got {seen.arrived}, not {due}, in {case}"
    return None


def dense(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Every token through its experts, in float64, [A, HIDDEN]."""
    return _dense(case.counts, case.routing, case.seed, dtype)


@cache
def _dense(counts: tuple[int, ...], routing: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    x_AD, ids_AK, weights_AK = _draw(counts, routing, seed)
    return run_pairs(x_AD.to(dtype), ids_AK, weights_AK, *_weights())


def _tokens(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns all ranks' tokens, expert ids and weights, end to end without padding."""
    return _draw(case.counts, case.routing, case.seed)


@cache
def _draw(
    counts: tuple[int, ...], routing: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = sum(counts)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((counts, routing, seed)).encode()))
    x_AD = torch.randn(total, HIDDEN, generator=generator)
    x_AD[:, 0] = torch.arange(total) / _NUMBER
    ids_AK = torch.rand(total, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    if routing == "one expert":  # all choices but the first are masked
        ids_AK = torch.full_like(ids_AK, EXPERTS)
        ids_AK[:, 0] = 5
    elif routing == "last executor":
        ids_AK = torch.arange(EXPERTS - TOP_K, EXPERTS).expand_as(ids_AK)
    elif routing == "nowhere":
        ids_AK = torch.full_like(ids_AK, EXPERTS)
    return x_AD, ids_AK.to(torch.int32), torch.rand(total, TOP_K, generator=generator)


@cache
def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns w13 [E, 2, F, D] and w2 [E, D, F] in float64."""
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(EXPERTS, 2, INTERMEDIATE, HIDDEN, generator=generator).double()
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator).double()
    return w13 * HIDDEN**-0.5, w2 * INTERMEDIATE**-0.5


def _run_experts(dispatched: Dispatched, topology: Topology) -> torch.Tensor:
    """This executor's experts, or slices of them, on what it received. Rounds once."""
    slots = topology.expert_slots(EXPERTS)
    share = share_of("F", INTERMEDIATE, topology.moe_tp_rank, topology.moe_tp_size)
    cut = slice(share.start, share.stop)
    w13, w2 = (weight[list(slots)] for weight in _weights())
    for weight in (w13, w2):
        weight[torch.tensor(slots) == GHOST] = torch.nan
    y_RD = run_pairs(
        dispatched.x_RD.cpu(),
        dispatched.topk_ids_RK.cpu(),
        dispatched.topk_weights_RK.cpu(),
        w13[:, :, cut],
        w2[:, :, cut],
    )
    y_RD = y_RD.to(dispatched.x_RD.dtype).to(dispatched.x_RD.device)
    return y_RD if dispatched.out_RD is None else dispatched.out_RD.copy_(y_RD)


def _arrived(dispatched: Dispatched, topology: Topology) -> Iterator[tuple[int, tuple[int, ...]]]:
    slots = topology.expert_slots(EXPERTS)
    for x, ids in zip(dispatched.x_RD, dispatched.topk_ids_RK.tolist(), strict=True):
        assert all(0 <= slot <= len(slots) for slot in ids), f"{ids} of {len(slots)} slots"
        here = sorted(slots[slot] for slot in ids if slot < len(slots))
        assert GHOST not in here
        if here:
            yield round(x[0].item() * _NUMBER), tuple(here)
