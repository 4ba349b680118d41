"""The KV pool: how many blocks fit, with all that a draft model and spilled drafts take of them."""

import torch

from executor.batch.kv_pool import KVPool
from executor.build.memory import state_lines
from executor.build.plan import Blueprint

DEFAULT_CPU_KV_BYTES = 1 << 30

# Of what is free after loading and will not be taken by what the budget's table has of each row, graph
# and draft; the rest is for activations, the graphs' own memory and attention's plans.
CUDA_KV_SHARE = 0.85


def build_kv_pool(blueprint: Blueprint, device: torch.device) -> KVPool:
    """Makes the pool. After all weights are loaded: by default it takes a share of what is left.

    Raises:
        ValueError: There is no memory for two blocks.
    """
    config = blueprint.config
    return KVPool(
        blueprint.model.kv_shape(config.block_size, blueprint.dtype, config.topology),
        num_blocks=config.num_kv_blocks or _num_kv_blocks(blueprint, device),
        num_rows=config.max_num_seqs,
        max_blocks_per_row=blueprint.max_blocks_per_row,
        spill_blocks_per_row=blueprint.spill_blocks_per_row,
        device=device,
    )


def bytes_per_block(blueprint: Blueprint) -> int:
    """Returns the bytes of a KV block, with what the draft model keeps for it."""
    config, draft = blueprint.config, blueprint.draft
    shape = blueprint.model.kv_shape(config.block_size, blueprint.dtype, config.topology)
    if draft is None or blueprint.speculation is None:
        return shape.bytes_per_block
    own = draft.kv_shape(config.block_size, blueprint.dtype, config.topology)
    if own is None:
        return shape.bytes_per_block
    carry = blueprint.speculation.num_layers * draft.layers.hidden_size * blueprint.dtype.itemsize
    return shape.bytes_per_block + own.bytes_per_block + carry


def _num_kv_blocks(blueprint: Blueprint, device: torch.device) -> int:
    """Returns how many blocks fit in the memory for KV beside all rows' spill blocks."""
    config, block_bytes = blueprint.config, bytes_per_block(blueprint)
    kv_bytes = _kv_bytes(blueprint, device)
    num_spilled = config.max_num_seqs * blueprint.spill_blocks_per_row
    num_blocks = kv_bytes // block_bytes - num_spilled
    if num_blocks < 2:
        spilled = f", and {num_spilled} for drafts behind sequences' blocks" if num_spilled else ""
        raise ValueError(
            f"kv_cache_bytes={kv_bytes}: a block takes {block_bytes} bytes; need the scratch "
            f"block and one more{spilled}, {(2 + num_spilled) * block_bytes} bytes"
        )
    return num_blocks


def _kv_bytes(blueprint: Blueprint, device: torch.device) -> int:
    if blueprint.config.kv_cache_bytes is not None:
        return blueprint.config.kv_cache_bytes
    if device.type != "cuda":
        return DEFAULT_CPU_KV_BYTES
    free = torch.cuda.mem_get_info(device)[0]
    later = sum(line.bytes for line in state_lines(blueprint))
    return int(max(free - later, 0) * CUDA_KV_SHARE)
