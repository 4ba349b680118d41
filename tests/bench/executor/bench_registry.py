"""Times one fill of a full decode registry against copies field by field, in one process.

    python -m tests.bench.executor.bench_registry [--rounds 200] [--fills 50] [--require 3]

Both fill the same 13 inputs on the CPU with one thread: input_ids, positions, out_cache_loc, M-RoPE
positions, rows, lengths on device and host, Mamba tracks, encoder lengths, and the computed counts.
Field by field is what a runner does without a registry: where the batch is smaller than the graph
it resets the tail, then ``buffer[:raw].copy_(source)``, with slices made on the spot. It skips the
same fields that a batch may lack, but does not look at shapes, as the registry does.

The two take turns, so that neighbours on the same cores slow both alike. Columns: the fastest round
of each, their ratio, the median of the ratios of neighbouring rounds; the floor, which is one
``_foreach_copy_`` of the 13 inputs with nothing around it; and the operations that each dispatches.
--require is about the lesser of the two ratios, in every row. In inference mode, as the executor
runs, slices are cheaper than outside, and so is field by field.

Sources take turns as the worker's do: a staging buffer hands out tensors of one slot after another,
so that a fill never meets those of the last one (executor/batch/staging.py).

On the CPU a copy inside ``_foreach_copy_`` is still an operation of its own, so a fill is hardly
faster than the floor, which shows most where nothing is padded. On CUDA each of these operations is
at least one kernel launch.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.batch.staging import NUM_SLOTS
from executor.graph.cuda_graph_buffer_registry import (
    CudaGraphBufferRegistry,
    PaddingPolicy,
    build_decode_registry,
)
from executor.graph.slots import local_num_token_non_padded
from tests.bench.support.options import parse_options
from tests.bench.support.timing import in_turns, median_ratio

MAX_BS = 256
SIZES = ((1, 1), (30, 32), (64, 64), (250, 256), (256, 256))  # (real, padded) sequences
ATTN_TP_SIZE = 1
NUM_DP_RANKS = 8


def full_registry() -> CudaGraphBufferRegistry:
    """Returns a decode registry with every slot that the factory knows but a pipeline's."""
    return build_decode_registry(
        device="cpu",
        max_bs=MAX_BS,
        max_num_token=MAX_BS,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=True,
        is_encoder_decoder=True,
        enable_num_token_non_padded=True,
        require_gathered_buffer=True,
        require_mlp_tp_gather=True,
        attn_tp_size=ATTN_TP_SIZE,
        num_dp_ranks=NUM_DP_RANKS,
        share_pool=False,
    )


def full_batch(size: int) -> SimpleNamespace:
    """Returns a decode batch with every field that a full registry copies."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(1, 1000, shape).to(dtype)

    return SimpleNamespace(
        batch_size=size,
        input_ids=numbers(size),
        positions=numbers(size),
        out_cache_loc=numbers(size),
        mrope_positions=numbers(3, size),
        req_pool_indices=numbers(size),
        seq_lens=numbers(size),
        seq_lens_cpu=numbers(size),
        mamba_track_indices=numbers(size),
        mamba_track_mask=numbers(size, dtype=torch.bool),
        encoder_lens=numbers(size, dtype=torch.int32),
        num_token_non_padded=None,
        global_num_tokens_gpu=None,
        global_num_tokens_for_logprob_gpu=None,
    )


class FieldByField:
    """The inputs of ``full_registry`` in plain tensors, each copied by a line of its own."""

    def __init__(self) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        self.input_ids = zeros(MAX_BS)
        self.positions = zeros(MAX_BS)
        self.out_cache_loc = zeros(MAX_BS)
        self.mrope_positions = zeros(3, MAX_BS)
        self.req_pool_indices = zeros(MAX_BS)
        self.seq_lens = torch.ones(MAX_BS, dtype=torch.int64)
        self.seq_lens_cpu = torch.ones(MAX_BS, dtype=torch.int64)
        self.mamba_track_indices = zeros(MAX_BS)
        self.mamba_track_mask = zeros(MAX_BS, dtype=torch.bool)
        self.encoder_lens = zeros(MAX_BS, dtype=torch.int32)
        self.num_token_non_padded = zeros(1, dtype=torch.int32)
        self.global_num_tokens_gpu = zeros(NUM_DP_RANKS, dtype=torch.int32)
        self.global_num_tokens_for_logprob_gpu = zeros(NUM_DP_RANKS, dtype=torch.int32)

    def fill(self, batch: SimpleNamespace, raw: int, padded: int) -> None:
        if raw != padded:
            self.positions[raw:padded].zero_()
            self.out_cache_loc[raw:padded].zero_()
            self.mrope_positions[:, raw:padded].zero_()
            self.req_pool_indices[raw:padded].zero_()
            self.seq_lens[raw:padded].fill_(1)
            self.seq_lens_cpu[raw:padded].fill_(1)
            self.mamba_track_indices[raw:padded].zero_()
            self.mamba_track_mask[raw:padded].zero_()
        self.input_ids[:raw].copy_(batch.input_ids)
        self.positions[:raw].copy_(batch.positions)
        self.out_cache_loc[:raw].copy_(batch.out_cache_loc)
        if batch.mrope_positions is not None:
            self.mrope_positions[:, :raw].copy_(batch.mrope_positions)
        self.req_pool_indices[:raw].copy_(batch.req_pool_indices)
        self.seq_lens[:raw].copy_(batch.seq_lens)
        if batch.seq_lens_cpu is not None:
            self.seq_lens_cpu[:raw].copy_(batch.seq_lens_cpu)
        if batch.mamba_track_indices is not None:
            self.mamba_track_indices[:raw].copy_(batch.mamba_track_indices)
        if batch.mamba_track_mask is not None:
            self.mamba_track_mask[:raw].copy_(batch.mamba_track_mask)
        if batch.encoder_lens is not None:
            self.encoder_lens[:raw].copy_(batch.encoder_lens)
        self.num_token_non_padded.fill_(local_num_token_non_padded(raw, padded, ATTN_TP_SIZE, 0))
        self.global_num_tokens_gpu.fill_(padded)
        self.global_num_tokens_for_logprob_gpu.fill_(padded)


def check_same(registry: CudaGraphBufferRegistry, fields: FieldByField, padded: int) -> None:
    """Asserts that both have the same content in every row that a graph of that size reads."""
    for name in registry.slot_names():
        slot = registry.get_slot(name)
        expected = getattr(fields, name)
        if slot.axis != "none":
            expected = expected.narrow(slot.row_axis(), 0, padded)
        if slot.padding_policy in (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL):
            assert torch.equal(slot.slice_for(padded, padded), expected), name


def operations(run: Callable[[SimpleNamespace], None], batch: SimpleNamespace) -> int:
    """Returns how many operations are dispatched, views left out."""
    with _Counter() as counter:
        run(batch)
    return counter.count


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def compare(raw: int, padded: int, rounds: int, fills: int) -> float:
    """Prints the row of a size. Returns the lesser of its two ratios."""
    registry, fields = full_registry(), FieldByField()
    slots = [full_batch(raw) for _ in range(NUM_SLOTS)]
    batches = [slots[i % NUM_SLOTS] for i in range(fills)]

    def by_registry(batch: SimpleNamespace) -> None:
        registry.fill_from(
            batch, raw_bs=raw, padded_bs=padded, raw_num_tokens=raw, padded_num_tokens=padded
        )

    def by_field(batch: SimpleNamespace) -> None:
        fields.fill(batch, raw, padded)

    views = [registry.get_slot(name).slice_for(raw, raw) for name in registry.slot_names()]
    copies = [view.clone() for view in views]

    def floor(_: SimpleNamespace) -> None:
        torch._foreach_copy_(copies, views)

    for batch in slots:
        by_registry(batch)
        by_field(batch)
        check_same(registry, fields, padded)

    def fill_all(run: Callable[[SimpleNamespace], None]) -> None:
        for batch in batches:
            run(batch)

    times = in_turns(
        {run: partial(fill_all, run) for run in (by_field, by_registry, floor)}, rounds
    )
    naive, ours, least = (min(column) / fills * 1e6 for column in times.values())
    median = median_ratio(times[by_field], times[by_registry])
    counts = f"{operations(by_field, slots[0]):>4} {operations(by_registry, slots[0]):>4}"
    print(
        f"{f'{raw}/{padded}':>12} {naive:9.2f} {ours:9.2f} {naive / ours:6.2f}x {median:6.2f}x "
        f"{least:6.2f} {counts}",
        flush=True,
    )
    return min(naive / ours, median)


def main() -> int:
    options = parse_options(__doc__, rounds=200, fills=50, require=0.0)  # fills of a round
    torch.set_num_threads(1)
    gc.disable()
    short = []
    print("13 inputs, CPU, 1 thread; us per fill, fastest round; GC off")
    for mode in (True, False):
        print(f"inference mode {'on' if mode else 'off'}")
        print(
            f"{'real/padded':>12} {'by field':>9} {'registry':>9} {'ratio':>7} {'median':>7} "
            f"{'floor':>6} operations"
        )
        with torch.inference_mode(mode):
            for raw, padded in SIZES:
                ratio = compare(raw, padded, options.rounds, options.fills)
                if ratio < options.require:
                    short.append(f"{raw}/{padded}, inference mode {'on' if mode else 'off'}")
    if short:
        print(f"below {options.require}: {'; '.join(short)}")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
