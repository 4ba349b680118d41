"""FlashInfer's all-to-all on the CPU: its memory layout and its protocol, byte by byte.

Each function does to the workspace what the library's kernel does (csrc/trtllm_moe_alltoall.cu and
moeAlltoAllKernels.cu of 0.7.2): epochs and flags, a slot per row and target rank, stores into the
peer's part, sums over recorded slots. So ranks can be threads over one tensor or processes over
shared memory, and they wait for one another like kernels do. Where the library leaves something to
chance or to the caller, this is nasty:

* rows of a source lie in random order;
* what nobody wrote is filled with bytes that are no expert and no useful number;
* rows beyond the runtime maximum, ids out of range and other sizes on a peer are not noticed. They
  do the damage that they would do.

Only checks that the library makes are made here.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

MAX_TOP_K = 22
GARBAGE = 0xFF  # as int32 -1, which is no expert; as float32 and bfloat16 NaN
TIMEOUT_S = 60.0  # the library's kernels give up after 150 to 300 s
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def stand_in(real: Any, bound: Callable[..., Callable[..., Any]]) -> SimpleNamespace:
    """Returns what takes the place of ``flashinfer.comm``.

    Args:
        real: That module.
        bound: Wraps a function in a check of its arguments, given name, original and function.
    """
    functions = (initialize, dispatch, sanitize_expert_ids, combine, get_workspace_size_per_rank)
    names = {f"moe_a2a_{function.__name__}": function for function in functions}
    wrapped = {name: bound(name, getattr(real, name), own) for name, own in names.items()}
    # The library's own: it slices tensors wherever they are.
    name = "moe_a2a_wrap_payload_tensor_in_workspace"
    wrapped[name] = bound(name, getattr(real, name), getattr(real, name))
    return SimpleNamespace(Mapping=real.Mapping, mnnvl=real.mnnvl, **wrapped)


def get_workspace_size_per_rank(
    *,
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    **_: Any,
) -> int:
    offsets = _offsets(ep_size, max_num_tokens)
    rows = ep_size * max_num_tokens
    return (
        offsets["payload"]
        + _aligned(rows * total_dispatch_payload_size_per_token)
        + _aligned(rows * combine_payload_size_per_token)
    )


def initialize(
    *, workspace: torch.Tensor, ep_rank: int, ep_size: int, max_num_tokens: int, **_: Any
) -> torch.Tensor:
    """Clears this rank's counters and flags. The library's clears all; this spoils the rest."""
    assert workspace.dtype == torch.uint8
    assert workspace.dim() == 2
    assert len(workspace) == ep_size
    assert 0 <= ep_rank < ep_size
    offsets = _offsets(ep_size, max_num_tokens)
    workspace[ep_rank].zero_()
    workspace[ep_rank, offsets["payload"] :] = GARBAGE
    return torch.tensor(list(offsets.values()), dtype=torch.int64)


def dispatch(
    *,
    token_selected_experts: torch.Tensor,
    input_payloads: list[torch.Tensor],
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    **_: Any,
) -> tuple[list[torch.Tensor], int, None]:
    capacity = runtime_max_tokens_per_rank
    num_rows = len(token_selected_experts)
    assert token_selected_experts.dtype == torch.int32
    assert token_selected_experts.is_contiguous()
    assert token_selected_experts.shape[1] == top_k
    assert 0 < len(input_payloads) <= 6
    assert all(x.dim() == 2 and len(x) == num_rows and x.is_contiguous() for x in input_payloads)
    assert capacity > 0
    assert 0 < ep_size <= 64
    assert num_experts >= ep_size
    assert top_k in (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)

    parts = [_Part(workspace[rank], metainfo, ep_size) for rank in range(ep_size)]
    own = parts[ep_rank]
    starts, end = [], own.payload
    for x in input_payloads:
        starts.append(end)
        end += ep_size * capacity * x.shape[1] * x.element_size()
        assert (end - own.payload) % x.element_size() == 0, "order payloads by element size"
    assert workspace.shape[1] >= end, f"workspace: need {end} bytes, has {workspace.shape[1]}"

    own.send_counters.zero_()
    own.flag_val += 1
    rows = list(range(num_rows))
    random.Random(f"{ep_rank} {int(own.flag_val)}").shuffle(rows)  # another order each time
    for row in rows:
        for k, expert in enumerate(token_selected_experts[row].tolist()):
            rank = _rank_of(expert, num_experts, ep_size)
            seen = own.target_ranks[row * top_k : row * top_k + k].tolist()
            slot = -1
            if rank in seen:
                rank = -1
            else:
                slot = int(own.send_counters[rank])
                own.send_counters[rank] += 1
                for x, start in zip(input_payloads, starts, strict=True):
                    num_bytes = x.shape[1] * x.element_size()
                    first = start + (ep_rank * capacity + slot) * num_bytes
                    parts[rank].memory[first : first + num_bytes] = x[row].view(torch.uint8)
            own.target_ranks[row * top_k + k] = rank
            own.send_indices[row * top_k + k] = slot
    for rank, part in enumerate(parts):
        part.recv_counters[ep_rank] = own.send_counters[rank]
    for part in parts:
        part.dispatch_flags[ep_rank] = own.flag_val[0]
    _wait(own.dispatch_flags, own.flag_val)
    received = [
        own.memory[start:stop].view(x.dtype).view(ep_size, capacity, -1)
        for x, start, stop in zip(input_payloads, starts, [*starts[1:], end], strict=True)
    ]
    return received, _aligned(end), None


def sanitize_expert_ids(
    *,
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    **_: Any,
) -> None:
    assert expert_ids.dtype == torch.int32
    assert expert_ids.dim() == 3
    own = _Part(workspace[ep_rank], metainfo, len(expert_ids))
    for source, count in enumerate(own.recv_counters.tolist()):
        expert_ids[source, count:] = invalid_expert_id


def combine(
    *,
    payload: torch.Tensor,
    local_num_tokens: int,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool,
    output: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    capacity = runtime_max_tokens_per_rank
    assert payload.dim() == 3
    assert payload.shape[:2] == (ep_size, capacity)
    assert payload.is_contiguous()
    assert payload.dtype in DTYPES
    assert output.dtype == payload.dtype
    assert output.shape == (local_num_tokens, payload.shape[2])
    assert output.is_contiguous()
    width = payload.shape[2] * payload.element_size()
    num_bytes = ep_size * capacity * width
    assert 0 <= combine_payload_offset <= workspace.shape[1] - num_bytes

    parts = [_Part(workspace[rank], metainfo, ep_size) for rank in range(ep_size)]
    own = parts[ep_rank]
    own_results = own.memory[combine_payload_offset:][:num_bytes].view(ep_size, capacity, width)
    own.flag_val += 1
    if payload_in_workspace:
        assert payload.data_ptr() == own_results.data_ptr(), "payload is not where it must be"
    else:
        for source, count in enumerate(own.recv_counters.tolist()):
            own_results[source, :count] = payload[source, :count].view(torch.uint8)
    for part in parts:
        part.combine_flags[ep_rank] = own.flag_val[0]
    _wait(own.combine_flags, own.flag_val)
    for row in range(local_num_tokens):
        total = torch.zeros(payload.shape[2])
        choices = slice(row * top_k, (row + 1) * top_k)
        ranks, slots = own.target_ranks[choices].tolist(), own.send_indices[choices].tolist()
        for rank, slot in zip(ranks, slots, strict=True):
            if slot >= 0:
                first = combine_payload_offset + (ep_rank * capacity + slot) * width
                total += parts[rank].memory[first : first + width].view(payload.dtype).float()
        output[row] = total.to(output.dtype)
    return output


class _Part:
    """What a rank's part of the workspace holds, as views."""

    def __init__(self, memory: torch.Tensor, metainfo: torch.Tensor, ep_size: int) -> None:
        flag, _, send, recv, dispatched, combined, ranks, slots, _, payload = metainfo.tolist()

        def int32s(first: int, stop: int) -> torch.Tensor:
            return memory[first:stop].view(torch.int32)

        self.memory = memory
        self.payload = payload
        self.flag_val = int32s(flag, flag + 4)
        self.send_counters = int32s(send, send + 4 * ep_size)
        self.recv_counters = int32s(recv, recv + 4 * ep_size)
        self.dispatch_flags = int32s(dispatched, dispatched + 4 * ep_size)
        self.combine_flags = int32s(combined, combined + 4 * ep_size)
        self.target_ranks = int32s(ranks, slots)
        self.send_indices = int32s(slots, payload)


def _offsets(ep_size: int, max_num_tokens: int) -> dict[str, int]:
    """calculateOffsets. The order is that of the library's metainfo."""
    flags = _aligned(8 + 8 * ep_size)
    combined = _aligned(flags + 4 * ep_size)
    ranks = _aligned(combined + 4 * ep_size)
    slots = _aligned(ranks + 4 * MAX_TOP_K * max_num_tokens)
    stats = _aligned(slots + 4 * MAX_TOP_K * max_num_tokens)
    return {
        "flag_val": 0,
        "local_token_counter": 4,
        "send_counters": 8,
        "recv_counters": 8 + 4 * ep_size,
        "dispatch_flags": flags,
        "combine_flags": combined,
        "target_ranks": ranks,
        "send_indices": slots,
        "eplb_stats": stats,
        "payload": stats,
    }


def _rank_of(expert: int, num_experts: int, ep_size: int) -> int:
    """compute_target_rank_id. An id that is no expert goes where C's division sends it."""
    each = num_experts // ep_size
    assert num_experts % ep_size == 0, "uneven parts are not stood in for"
    rank = int(expert / each)
    assert 0 <= rank < ep_size, f"expert {expert}: a kernel would write anywhere"
    return rank


def _wait(flags: torch.Tensor, value: torch.Tensor) -> None:
    expected = int(value)
    deadline = time.monotonic() + TIMEOUT_S
    while not bool((flags == expected).all()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waiting for {expected}, flags are {flags.tolist()}")
        time.sleep(0)  # lets the peers' threads run


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 128) * 128


def run_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns what each call returned. They run at once, as ranks do; an error of one is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
