"""Memory of an executor: the bytes of what it holds, and the KV pool, which takes a share of the rest.

Everything is made before the KV pool takes its memory; its bytes are counted on what was made. What
comes later is taken off: the all-to-all's workspace, NCCL's buffers and those of cuBLAS, and what a
step makes of the largest: experts' rows, logits, and probabilities. Graphs read the pool's addresses, so
they come later, too: what theirs take of these is counted with them. The remaining share is for other
activations, which are hidden states of a layer or two, and for what allocation loses.
"""

from collections.abc import Iterable
from typing import Any

import torch

from executor.batch.kv_pool import KVPool, KVShape
from executor.budget.report import A2A_TOKENS, EXECUTOR_ROWS, LOGITS, RANK_ROWS, BudgetLine
from executor.budget.token_budget import FLOAT32_BYTES
from executor.build.drafts import Drafts
from executor.build.plan import Blueprint
from executor.model.decoder.kernels import Kernels
from executor.model.decoder.sizes import kv_shape
from executor.model.moe.experts import ExpertShare, ExpertSlots
from executor.model.moe.layer import Dispatcher
from executor.model.sampling.sampler import Sampler
from executor.model.spec import MlaSpec, MoeSpec
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import RunnerSelection
from protos.executor.placement import GHOST

DEFAULT_CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85  # of what is free and will not be taken
NCCL_BYTES = 512 << 20  # of each communicator's buffers, made at the first Join: not measured
# Of a stream: those of steps and of captures. Source: PyTorch, ATen/cuda/CublasHandlePool.cpp, for Hopper.
CUBLAS_BYTES = 32 << 20
_ROWS, _GRAPH = "max_num_seqs", "largest decode graph"

# Tensors as large as its result that ``Sampler.probabilities`` has at once, at most, and ``Sampler.pick``
# fewer: those that sort and filter, with int64 indices, on top of the logits as edited and of what greedy
# rows get. Counted in tests/executor/build/test_memory.py; what a GPU's sort needs for itself comes on top.
PROBABILITY_COPIES = 12
# Of the logits that are scored: their rows, and what PyTorch's logsumexp makes of these.
SCORE_COPIES = 2

RECORDED_ROWS = 8  # of a layer's widest, which passes on a CPU hold at once, at most


class HeldBytes:
    """Bytes of the tensors that objects reach, each storage once, by the first who asks.

    Models, attention and the KV pool are not entered on the way: they have lines of their own.
    """

    _ENTERED = (
        *("executor.runners.", "executor.graph.", "executor.speculative.", "executor.worker"),
        "executor.model.sampling.",
    )

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of(self, *owners: object) -> int:
        return sum(self._count(owner, is_owner=True) for owner in owners)

    def _count(self, value: Any, *, is_owner: bool = False) -> int:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            return storage.nbytes() if self._is_new(storage.data_ptr()) else 0
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            return sum(map(self._count, value))
        kind = type(value)
        if not (is_owner or f"{kind.__module__}.".startswith(self._ENTERED)):
            return 0
        if not self._is_new(id(value)):
            return 0
        names = [*getattr(value, "__dict__", ())]
        names += [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        return sum(self._count(getattr(value, name, None)) for name in names)

    def _is_new(self, key: int) -> bool:
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def held_lines(
    blueprint: Blueprint,
    *,
    dispatcher: Dispatcher,
    kernels: list[Kernels],
    expert_slots: Iterable[ExpertSlots],
    sampler: Sampler,
    runner: RunnerSelection,
    forward_pass: ForwardPass,
    drafts: Drafts | None,
) -> tuple[BudgetLine, ...]:
    """Returns what is kept on the device beside attention, buffers of collectives, and most weights.

    Of weights it tells those of experts, ghosts among them; of keys and values what a sequence takes,
    as how many there are follows from the rest.
    """
    budget, held = blueprint.budget, HeldBytes()
    num_rows, graph = blueprint.config.max_num_seqs, max(blueprint.graph_sizes.decode, default=0)
    bound, rows = f"{EXECUTOR_ROWS} * {budget.world_size} executors", dispatcher.max_rows
    if rows > budget.max_gathered_tokens:
        bound = f"{A2A_TOKENS} * ep_size={budget.ep_size}"
    tokens = budget.max_tokens_per_rank
    scratch = held.of(*(one.scratch for one in kernels))
    kept_later = max(one.scratch_bytes for one in kernels)  # threads have it for all models
    lines = [
        *_slot_lines(blueprint, sum(x.nbytes for layer in expert_slots for x in layer.tensors)),
        BudgetLine("scratch of experts, for the rows of a pass", bound, rows, scratch),
        BudgetLine("scratch of the CPU's kernel for experts", bound, rows, kept_later),
        BudgetLine("sampling state of each row", _ROWS, num_rows, held.of(sampler)),
    ]
    if drafts is not None:
        lines += [
            BudgetLine("features of the target", RANK_ROWS, tokens, held.of(forward_pass.features)),
            BudgetLine("draft state of each row", _ROWS, num_rows, held.of(drafts.state)),
            BudgetLine("buffers of draft runners", _GRAPH, graph, held.of(*drafts.runners)),
        ]
    lines.append(BudgetLine("buffers of runners", RANK_ROWS, tokens, held.of(runner)))
    pool = forward_pass.kv_pool
    return (*lines, *kv_lines(pool.shape, pool.all_bytes_per_block))


def _slot_lines(blueprint: Blueprint, num_bytes: int) -> tuple[BudgetLine, ...]:
    if not blueprint.model.num_experts:
        return ()
    num_experts, config = blueprint.model.num_experts, blueprint.config
    slots = config.capacity.slots_at_start(config.topology, num_experts)
    bound = f"num_experts={num_experts} / ep_size={blueprint.budget.ep_size}"
    if config.capacity.is_elastic:
        bound = (
            f"num_experts={num_experts} / executors with min_dp_size={config.capacity.min_dp_size}"
        )
    elif ghosts := slots.count(GHOST):
        bound += f"; of each layer {ghosts} without an expert"
    return (BudgetLine("expert slots of all layers", bound, len(slots), num_bytes),)


def later_lines(
    blueprint: Blueprint, device: torch.device, dispatcher: Dispatcher, kernels: list[Kernels]
) -> tuple[BudgetLine, ...]:
    """Returns what comes after the KV pool, but for the dispatcher's workspace, which is told before."""
    if device.type != "cuda":
        return (*recorded_lines(blueprint, kernels), *step_lines(blueprint))
    topology, sizes = blueprint.config.topology, blueprint.graph_sizes
    groups = len({topology.world_size, topology.attn_tp_size} - {1})
    lines = [
        BudgetLine("cuBLAS, of two streams", "default", 0, 2 * CUBLAS_BYTES),
        BudgetLine("NCCL, an allowance", f"{groups} communicators", 0, groups * NCCL_BYTES),
    ]
    rows, passes = dispatcher.max_rows, 1 + bool(sizes.extend)  # graphs have memory of their own
    work = passes * pass_bytes(blueprint, rows, kernels)
    lines.append(BudgetLine("work of experts", f"rows of a pass, {passes} times", rows, work))
    rows, passes = blueprint.budget.max_logits_rows, 1 + bool(sizes.decode)
    row_bytes = blueprint.model.vocab_size * FLOAT32_BYTES
    of_passes = passes * rows * row_bytes
    lines.append(BudgetLine("logits of passes", f"{LOGITS}, {passes} times", rows, of_passes))
    drawn = step_lines(blueprint)
    if not drawn:
        plan, rows, bound = blueprint.speculation, blueprint.config.max_num_seqs, _ROWS
        if plan is not None:  # a token is picked behind each draft
            rows, bound = rows * plan.num_draft_tokens, f"{_ROWS} * num_draft_tokens"
        num_bytes = rows * PROBABILITY_COPIES * row_bytes
        drawn = (BudgetLine("work on probabilities of tokens", bound, rows, num_bytes),)
    rows = blueprint.budget.max_num_logits
    scored = BudgetLine(
        "work on log probabilities", "max_num_logits", rows, rows * SCORE_COPIES * row_bytes
    )
    # One is done when the other begins.
    return (*lines, max(*drawn, scored, key=lambda line: line.bytes))


def recorded_lines(blueprint: Blueprint, kernels: list[Kernels]) -> tuple[BudgetLine, ...]:
    """Returns what passes that a CPU has recorded compute on the way, at most.

    That is some rows of each width at once, and logits; as much again for sizes of less than half.
    """
    config, plan, sizes = blueprint.config, blueprint.speculation, blueprint.graph_sizes.decode
    if not sizes or not config.is_alone or kernels[0].library is None:
        return ()
    widths = [blueprint.model.hidden_size]
    for layer in blueprint.model.layers:
        attention, mlp = layer.attention, layer.feed_forward
        if isinstance(attention, MlaSpec):
            head_dim = attention.kv_lora_rank + attention.qk_rope_head_dim
            widths.append(attention.num_heads * head_dim)
        else:
            widths.append((attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim)
        dense = mlp.shared if isinstance(mlp, MoeSpec) else mlp
        widths.append(0 if dense is None else 2 * dense.intermediate_size)
    rows = sizes[-1] * (1 if plan is None else plan.num_rows_per_sequence)
    row_bytes = RECORDED_ROWS * max(widths) * blueprint.dtype.itemsize
    row_bytes += blueprint.model.vocab_size * FLOAT32_BYTES
    return (BudgetLine("recorded passes", _GRAPH, rows, 2 * rows * row_bytes),)


def pass_bytes(blueprint: Blueprint, num_rows: int, kernels: list[Kernels]) -> int:
    """Returns what a GPU's experts hold beside scratch while a pass of so many rows runs."""
    models, most = [blueprint.model], 0
    if blueprint.draft is not None:
        models.append(blueprint.draft.layers)
    for model, one in zip(models, kernels, strict=True):
        if model.moe is not None and one.elements_per_row is not None:
            columns = ExpertShare.of(blueprint.config.topology, model.moe).columns
            width = one.elements_per_row(model.top_k, model.hidden_size, len(columns))
            most = max(most, num_rows * width * blueprint.dtype.itemsize)
    return most


def step_lines(blueprint: Blueprint) -> tuple[BudgetLine, ...]:
    """Returns what comes and goes in a step that accepts drafts by what they were drawn from."""
    plan, config = blueprint.speculation, blueprint.config
    if plan is None or config.draft_sampling != "rejection":
        return ()
    rows = config.max_num_seqs * plan.num_draft_tokens
    copies = rows * PROBABILITY_COPIES + config.max_num_seqs * (plan.num_draft_tokens - 1)
    num_bytes = copies * blueprint.model.vocab_size * FLOAT32_BYTES
    what, bound = "work on probabilities of verified tokens", f"{_ROWS} * num_draft_tokens"
    return (BudgetLine(what, bound, rows, num_bytes),)


def new_kv_pool(blueprint: Blueprint, device: torch.device) -> KVPool:
    """Makes the KV pool of the target, without its blocks."""
    config = blueprint.config
    return KVPool(
        kv_shape(blueprint.model, config.block_size, blueprint.dtype, config.capacity),
        num_rows=config.max_num_seqs,
        max_blocks_per_row=blueprint.max_blocks_per_row,
        spill_blocks_per_row=blueprint.spill_blocks_per_row,
        device=device,
    )


def kv_lines(shape: KVShape, block_bytes: int) -> tuple[BudgetLine, ...]:
    """Returns what a sequence takes of the pool: of each token, and where it decodes, of windows.

    Args:
        shape: Of the pool.
        block_bytes: Of a block with all that lies in it.
    """
    lines = [BudgetLine("KV of a token", "block_size", 1, block_bytes // shape.block_size)]
    if shape.window is not None:
        blocks = shape.window_blocks
        bound = f"{blocks} blocks for window={shape.window}"
        num_bytes = blocks * block_bytes
        lines.append(
            BudgetLine("KV of a sequence's windows", bound, blocks * shape.block_size, num_bytes)
        )
    return tuple(lines)


def num_kv_blocks(
    blueprint: Blueprint, kv_pool: KVPool, dispatcher: Dispatcher, later: Iterable[BudgetLine]
) -> int:
    """Returns how many blocks a pool is to have, once all else is made but for what lines say.

    Raises:
        ValueError: There is no memory for two beside all rows' spill blocks.
    """
    if blueprint.config.num_kv_blocks is not None:
        return blueprint.config.num_kv_blocks
    kv_bytes, room = blueprint.config.kv_cache_bytes or DEFAULT_CPU_KV_BYTES, ""
    if blueprint.config.kv_cache_bytes is None and kv_pool.device.type == "cuda":
        later_bytes = dispatcher.workspace_bytes + sum(line.bytes for line in later)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(kv_pool.device)[0]
        kv_bytes = int(max(free - later_bytes, 0) * CUDA_KV_SHARE)
        room = f"; {later_bytes} are for what comes after it: lower max_num_batched_tokens or max_num_seqs"
    return blocks_in(kv_bytes, kv_pool, room)


def blocks_in(kv_bytes: int, kv_pool: KVPool, room: str = "") -> int:
    """Returns how many blocks a pool has of so many bytes, beside its spill blocks.

    Args:
        room: What an error says at its end.

    Raises:
        ValueError: There are not two.
    """
    block_bytes, num_spilled = kv_pool.all_bytes_per_block, kv_pool.num_spill_blocks
    num_blocks = kv_bytes // block_bytes - num_spilled
    if num_blocks < 2:
        spilled = f", and {num_spilled} for drafts behind sequences' blocks" if num_spilled else ""
        raise ValueError(
            f"kv_cache_bytes={kv_bytes}: a block takes {block_bytes} bytes; need the scratch "
            f"block and one more{spilled}, {(2 + num_spilled) * block_bytes} bytes{room}"
        )
    return num_blocks
