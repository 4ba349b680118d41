"""Forward batch: the inputs of one forward pass of one rank.

Data only. The router decides every number in here; a layer gets tensors and a ``DpLayout``,
never a request. Field names are the field's own (SGLang's), so that a buffer registry can refer
to them by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.columns import Int64Array
from executor.parallel.layout import DpLayout


class ForwardMode(Enum):
    """What this rank does in a step."""

    IDLE = auto()  # no tokens, but every collective call
    DECODE = auto()  # one token per sequence
    EXTEND = auto()  # any number of tokens per sequence, decodes mixed in

    @classmethod
    def of(cls, num_tokens: int, batch_size: int) -> "ForwardMode":
        """Returns the mode of so many tokens, at least 1 per sequence."""
        if not num_tokens:
            return cls.IDLE
        return cls.EXTEND if num_tokens > batch_size else cls.DECODE


@dataclass(slots=True)
class ForwardBatch:
    """One rank's part of a forward pass. B sequences and T token rows; either may be 0.

    Tokens lie sequence after sequence, in the order of ``req_pool_indices``. Rows of
    ``input_ids`` past the last sequence's tokens are padding: they run through every layer,
    write to the scratch block and are read by nobody.

    Attributes:
        forward_mode: IDLE, DECODE or EXTEND.
        batch_size: B.
        input_ids: int64 [T].
        positions: int64 [T], from 0 at each sequence's first token.
        out_cache_loc: int64 [T], where each token's keys and values go in the KV pool.
        window_cache_loc: int64 [T], the same in layers of the pool's second group; None without one.
        req_pool_indices: int64 [B], rows of the block table.
        seq_lens: int64 [B], tokens in the KV pool after this pass.
        seq_lens_cpu: The same on the host.
        layout: Token counts of all DP ranks.
        logits_indices: int64 [L], the token rows that need logits.
        extend_seq_lens_cpu: int64 [B], tokens in this pass, at least 1. None in DECODE.
        num_token_non_padded: int32 [1] on the device, how many rows of this executor's shard
            (``layout.shard_num_rows``) are real; None if the layout says it.
        global_num_tokens_gpu: int32 on the device, rows of each DP rank in a graph: [dp_size] if
            some layer gathers every DP rank's rows, else [1]. None outside graphs, and where
            nothing is gathered.
        global_num_tokens_for_logprob_gpu: The same for rows of logits.
        hidden_states: [T, H] on the device, what a draft model takes with each token: the hidden
            state of the position before. None for every other model.
        tree_mask: bool [B, Q, W] on the device, which of the last W keys each query of a sequence
            sees; it sees all keys before them. Every sequence then has Q tokens in this pass, Q at
            most W. Read when the pass begins, so it may be written after planning; a graph reads
            the tensor that it was captured with. None: causal.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    layout: DpLayout
    logits_indices: torch.Tensor
    extend_seq_lens_cpu: Int64Array | None = None
    num_token_non_padded: torch.Tensor | None = None
    global_num_tokens_gpu: torch.Tensor | None = None
    global_num_tokens_for_logprob_gpu: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    window_cache_loc: torch.Tensor | None = None

    def slots_of(self, group: int) -> torch.Tensor:
        """Returns where tokens go in layers of a group of the KV pool, int64 [T]."""
        if group == 0:
            return self.out_cache_loc
        assert self.window_cache_loc is not None, "a pool with a second group has slots for it"
        return self.window_cache_loc

    def is_padding(self) -> torch.Tensor | None:
        """Returns which rows of this executor's shard are padding, bool [S, 1]. No host read.

        None if there are none but those that the layout tells of.
        """
        if self.num_token_non_padded is None:
            return None
        rows = torch.arange(self.layout.shard_num_rows, device=self.input_ids.device)
        return (rows >= self.num_token_non_padded).unsqueeze(1)

    @classmethod
    def from_columns(
        cls,
        *,
        rows: npt.ArrayLike,
        num_computed: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        input_ids: torch.Tensor,
        out_cache_loc: torch.Tensor,
        layout: DpLayout,
        logits_indices: Sequence[int] | npt.NDArray[np.integer] | None = None,
        window_cache_loc: torch.Tensor | None = None,
    ) -> "ForwardBatch":
        """Builds a batch from one entry per sequence. The mode follows from the counts.

        Args:
            rows: [B] rows of the block table.
            num_computed: [B] tokens already in the KV pool.
            num_tokens: [B] tokens to run now, each at least 1.
            input_ids: int64 [sum(num_tokens)], on the device that runs the batch.
            out_cache_loc: int64 [sum(num_tokens)], from ``KVPool.out_cache_loc``.
            layout: Token counts of all DP ranks.
            logits_indices: Token rows that need logits; each sequence's last one if None.
            window_cache_loc: int64 [sum(num_tokens)], where the pool has a second group.

        Raises:
            ValueError: The columns do not fit one another.
        """
        rows_ = np.asarray(rows, dtype=np.int64)
        prefix_lens = np.asarray(num_computed, dtype=np.int64)
        new_lens = np.asarray(num_tokens, dtype=np.int64)
        total = int(new_lens.sum())
        if not rows_.shape == prefix_lens.shape == new_lens.shape:
            raise ValueError(
                f"rows, num_computed and num_tokens have {rows_.size}, {prefix_lens.size} and "
                f"{new_lens.size} entries: need one of each per sequence"
            )
        if new_lens.size and new_lens.min() < 1:
            raise ValueError("num_tokens has a 0: leave a sequence without tokens out of the batch")
        if not len(input_ids) == len(out_cache_loc) == layout.num_tokens == total:
            raise ValueError(
                f"num_tokens adds up to {total}, but there are {len(input_ids)} input_ids, "
                f"{len(out_cache_loc)} out_cache_loc and {layout.num_tokens} tokens in the layout"
            )
        ends = np.cumsum(new_lens)
        positions = np.arange(total) + np.repeat(prefix_lens - (ends - new_lens), new_lens)
        wanted = ends - 1 if logits_indices is None else logits_indices
        device = input_ids.device
        seq_lens_cpu = torch.from_numpy(prefix_lens + new_lens)
        return cls(
            forward_mode=ForwardMode.of(total, len(rows_)),
            batch_size=len(rows_),
            input_ids=input_ids,
            positions=torch.from_numpy(positions).to(device),
            out_cache_loc=out_cache_loc,
            req_pool_indices=torch.from_numpy(rows_).to(device),
            seq_lens=seq_lens_cpu.to(device),
            seq_lens_cpu=seq_lens_cpu,
            layout=layout,
            logits_indices=torch.from_numpy(np.array(wanted, dtype=np.int64)).to(device),
            extend_seq_lens_cpu=new_lens if total > len(rows_) else None,
            window_cache_loc=window_cache_loc,
        )
