"""A draft stepped by hand beside its target. Imports no Transformers: processes start here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.model.decoder.kernels import Kernels
from executor.model.decoder.sizes import attention_of, attention_share
from executor.model.drafts.config import DraftConfig
from executor.model.drafts.draft import load_draft_model
from executor.model.families import read_spec
from executor.model.layers.attention import run_stages
from executor.model.layers.attention_torch import TorchAttention
from executor.model.spec import ModelSpec
from executor.parallel.layout import DpLayout
from tests.executor.support.kv import batch_of
from tests.executor.support.serving import BLOCK_SIZE, Rank

# New tokens of some rows, and the hidden state that goes with each.
Entries = Mapping[int, tuple[Sequence[int], torch.Tensor]]
Drafted = dict[int, tuple[torch.Tensor, torch.Tensor]]  # of each row, hidden states and logits


class DraftRank:
    """A target, its draft, and the draft's keys and values over the target's blocks.

    Args:
        target_path: Checkpoint of the target.
        draft_path: Of the draft.
        new_kernels: Makes what the draft's layers call, given these; those of the CPU if None.
        options: Of ``Rank``.
    """

    def __init__(
        self,
        target_path: Path,
        draft_path: Path,
        *,
        new_kernels: Callable[[ModelSpec], Kernels] | None = None,
        **options: Any,
    ) -> None:
        self.target = Rank(target_path, **options)
        topology = self.target.model.peers.topology
        target_config = read_spec(target_path)
        self.config = DraftConfig.from_dir(draft_path, target_config)
        kernels = None if new_kernels is None else new_kernels(self.config.layers)
        self.model = load_draft_model(draft_path, self.config, self.target.model, kernels=kernels)
        shape = self.config.kv_shape(BLOCK_SIZE, target_config.dtype, topology.capacity)
        self.pool = self.target.pool
        if shape is not None:
            self.pool = self.target.pool.sibling(shape)
        attention = attention_of(self.config.layers)
        num_heads = len(attention_share(attention, topology.capacity).q_heads)
        self._attention = TorchAttention(num_heads, self.pool.shape, scale=attention.scale)
        self.num_drafted = [[0] * self.pool.num_rows for _ in range(self.model.num_layers)]

    def step(
        self,
        entries: Entries,
        layer: int = 0,
        layout: DpLayout | None = None,
        num_real: int | None = None,
    ) -> Drafted:
        """Runs a layer of a draft with keys of its own over new entries of some rows.

        Args:
            num_real: Token rows that the device is told not to take for padding; all if None.
        """
        rows = list(entries)
        counts = [len(entries[row][0]) for row in rows]
        computed = [self.num_drafted[layer][row] for row in rows]
        for row, num_tokens in zip(rows, counts, strict=True):
            self.num_drafted[layer][row] += num_tokens
        batch = batch_of(self.pool, rows, computed, counts, _ids(entries), layout)
        if num_real is not None:
            batch.num_token_non_padded = torch.tensor([num_real], dtype=torch.int32)
        return self._run(batch, entries, layer)

    def step_frozen(self, entries: Entries, offset: int, layout: DpLayout | None = None) -> Drafted:
        """Runs a draft that reads the target's keys: one token of some rows.

        Args:
            offset: How far the token is from the first position without keys.
        """
        rows = list(entries)
        computed = [self.target.num_computed[row] for row in rows]
        batch = ForwardBatch.from_columns(
            rows=rows,
            num_computed=[length - 1 for length in computed],
            num_tokens=[1] * len(rows),
            input_ids=_ids(entries),
            out_cache_loc=torch.zeros(len(rows), dtype=torch.int64),
            layout=layout or DpLayout.single(len(rows)),
        )
        positions = torch.tensor(computed, dtype=torch.int64) + offset
        return self._run(replace(batch, positions=positions), entries, 0)

    def _run(self, batch: ForwardBatch, entries: Entries, layer: int) -> Drafted:
        none = torch.zeros(0, self.model.hidden_size, dtype=self.pool.tensors[0].dtype)
        given = torch.cat([none, *(hidden for _, hidden in entries.values())])
        batch = replace(batch, hidden_states=given.clone())
        self._attention.init_forward_metadata_out_graph(batch, self.pool)
        hidden = run_stages(self.model.stages(batch, layer), self._attention.forward).clone()
        assert batch.hidden_states is not None
        assert torch.equal(batch.hidden_states, given), "the input was written to"
        logits = self.model.compute_logits(hidden, layer).clone()
        counts = [len(ids) for ids, _ in entries.values()]
        both = zip(*(torch.split_with_sizes(x, counts) for x in (hidden, logits)), strict=True)
        return dict(zip(entries, both, strict=True))


def entries_of(seed: int, counts: Mapping[int, int], vocab_size: int, hidden_size: int) -> Entries:
    """Returns random entries of some rows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        row: (
            torch.randint(0, vocab_size, (count,), generator=generator).tolist(),
            torch.randn(count, hidden_size, generator=generator),
        )
        for row, count in counts.items()
    }


def _ids(entries: Entries) -> torch.Tensor:
    return torch.tensor([i for ids, _ in entries.values() for i in ids], dtype=torch.int64)
