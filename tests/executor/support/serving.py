"""A few sequences stepped by hand through a model, as a worker would: rows, blocks, batches."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from executor.model.decoder.kernels import Kernels, Peers
from executor.model.decoder.sizes import attention_of, attention_share, kv_shape
from executor.model.families import load_model, read_spec
from executor.model.layers.attention import run_stages
from executor.model.layers.attention_cpu import cpu_attention
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.layout import DpLayout, DpPaddingMode, Topology
from tests.executor.support.kv import batch_of, full_pool

BLOCK_SIZE, NUM_ROWS, MAX_LEN = 4, 6, 128


class Rank:
    """One rank with its model and a KV pool in which every row owns its blocks."""

    def __init__(
        self,
        path: Path,
        *,
        topology: Topology | None = None,
        communicator: DpCommunicator | None = None,
        attn_tp_communicator: AttnTpCommunicator | None = None,
        moe_dense_tp_size: int | None = None,
        dtype: torch.dtype | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        config = read_spec(path)
        dtype = dtype or config.dtype
        topology = topology or Topology()
        self.model = load_model(
            path,
            config,
            peers=Peers.gathering(
                config.num_experts,
                communicator,
                attn_tp_communicator,
                moe_dense_tp_size=moe_dense_tp_size,
            ),
            dtype=dtype,
            kernels=kernels,
        )
        shape = kv_shape(config, BLOCK_SIZE, dtype, topology.capacity)
        self.pool = full_pool(shape, NUM_ROWS, MAX_LEN)
        self.attention = cpu_attention(
            len(attention_share(attention_of(config), topology.capacity).q_heads),
            shape,
            scale=attention_of(config).scale,
            layers=self.model.attention_layers,
        )
        self.num_computed = [0] * NUM_ROWS

    def share_prefix(self, owner: int, row: int, num_blocks: int) -> None:
        """Lets ``row`` start with the first blocks of ``owner``, already computed."""
        tables = self.pool.tables_cpu
        blocks = torch.cat((tables[:, owner, :num_blocks], tables[:, row, num_blocks:]), dim=1)
        self.pool.append_blocks([row], [0], [blocks.shape[1]], blocks.flatten())
        self.num_computed[row] = num_blocks * BLOCK_SIZE

    def step(
        self, tokens: Mapping[int, Sequence[int]], layout: DpLayout | None = None
    ) -> dict[int, torch.Tensor]:
        """Runs new tokens of some rows in one batch. Returns each row's logits, one per token."""
        rows = list(tokens)
        counts = [len(tokens[row]) for row in rows]
        computed = [self.num_computed[row] for row in rows]
        for row, count in zip(rows, counts, strict=True):
            self.num_computed[row] += count
        ids = torch.tensor([i for row in rows for i in tokens[row]], dtype=torch.int64)
        scored = range(sum(counts))
        batch = batch_of(self.pool, rows, computed, counts, ids, layout, scored)
        self.attention.init_forward_metadata_out_graph(batch, self.pool)
        hidden = run_stages(self.model.stages(batch), self.attention.forward)
        logits = self.model.compute_logits(hidden)
        return dict(zip(rows, torch.split_with_sizes(logits, counts), strict=True))


def layout_of(counts: Sequence[int], padding_mode: DpPaddingMode, topology: Topology) -> DpLayout:
    """Returns the layout of an executor's eager step in which DP ranks have so many tokens."""
    place = (topology.attn_tp_rank, topology.attn_tp_size)
    return DpLayout(tuple(counts), padding_mode, topology.dp_rank, None, False, *place)
