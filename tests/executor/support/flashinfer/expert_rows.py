"""Rows for an all-to-all, and experts that show which of them a row reached.

Expert e doubles a row and adds e, so that a result says which experts ran and with what weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from executor.budget.token_budget import a2a_workspace_size_per_rank
from executor.model.flashinfer.all_to_all import AllToAllSizes
from executor.model.moe.layer import Dispatched
from executor.parallel.expert_places import ExpertPlaces
from executor.parallel.layout import DpLayout, DpPaddingMode
from protos.executor.placement import GHOST, num_slots_for, place_evenly

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states, expert ids, weights
SIZES = AllToAllSizes(
    ep_size=3,
    num_experts=12,
    num_slots=4,
    top_k=4,
    hidden_size=8,
    dtype=torch.float32,
    max_num_tokens=9,
    bytes_per_rank=1 << 16,
)


def fitting(**changes: Any) -> AllToAllSizes:
    """Returns sizes with a workspace of exactly the bytes that they need."""
    sizes = replace(SIZES, bytes_per_rank=1 << 30, num_slots=1 << 10, **changes)
    sizes = replace(sizes, num_slots=num_slots_for(sizes.num_experts, sizes.ep_size))
    num_bytes = a2a_workspace_size_per_rank(
        ep_size=sizes.ep_size,
        max_num_tokens=sizes.max_num_tokens,
        dispatch_payload_size_per_token=sizes.sent_bytes,
        combine_payload_size_per_token=sizes.result_bytes,
    )
    return replace(sizes, bytes_per_rank=num_bytes)


def places_of(sizes: AllToAllSizes, rank: int, device: torch.device | str = "cpu") -> ExpertPlaces:
    """Returns where the experts are, as one of the ranks sees it."""
    return ExpertPlaces(place_evenly(sizes.num_experts, sizes.ep_size), rank, device)


def random_rows(count: int, sizes: AllToAllSizes, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, sizes.hidden_size, generator=generator).to(sizes.dtype)
    order = torch.rand(count, sizes.num_experts, generator=generator).argsort(-1)
    ids = order[:, : sizes.top_k].to(torch.int32)
    return x, ids, torch.rand(count, sizes.top_k, generator=generator)


def layouts_of(counts: Sequence[int], graph_size: int | None = None) -> list[DpLayout]:
    mode = DpPaddingMode.MAX_LEN
    return [DpLayout(tuple(counts), mode, rank, graph_size) for rank in range(len(counts))]


def experts(dispatched: Dispatched, rank: int, sizes: AllToAllSizes) -> torch.Tensor:
    """Returns what a rank's experts give. Rows without experts here become 0, whatever they hold."""
    held = place_evenly(sizes.num_experts, sizes.ep_size)[rank]
    ids = dispatched.topk_ids_RK
    if not ids.is_cuda:  # a GPU would be waited for, and perhaps in a graph's capture
        assert bool(((ids >= 0) & (ids <= sizes.num_slots)).all())
        assert all(held[slot] != GHOST for slot in set(ids.flatten().tolist()) - {len(held)})
    is_here = ids < sizes.num_slots
    weights = torch.where(is_here, dispatched.topk_weights_RK, 0)
    numbers = torch.where(is_here, ids + held[0], 0)  # a contiguous run
    x = torch.where(is_here.any(dim=1, keepdim=True), dispatched.x_RD.float(), 0)
    y = 2 * x * weights.sum(dim=1, keepdim=True) + (weights * numbers).sum(dim=1, keepdim=True)
    return y.to(sizes.dtype)


def dense(rows: Rows, sizes: AllToAllSizes) -> torch.Tensor:
    """Returns what every expert on one rank would give, in float32."""
    x, ids, weights = rows
    weights = torch.where(ids < sizes.num_experts, weights, 0)
    total = weights.sum(dim=1, keepdim=True)
    return 2 * x.float() * total + (weights * ids).sum(dim=1, keepdim=True)
