"""State of a draft model, for every row and every KV block. Tensors on the device.

carry      what the draft's layers take with a row's next token: the target's features of the
           position before, then the outputs of all draft layers but the last
block      the same for the last position of each KV block, which a row takes that begins with
           blocks out of the prefix cache
"""

import torch

from executor.batch.columns import Int64Array
from executor.batch.kv_pool import KVPool
from executor.batch.staging import to_device
from executor.budget.speculation import SpeculationPlan
from executor.speculative.draft_batch import Extended


def block_carry_bytes(plan: SpeculationPlan, hidden_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of what is kept for each KV block."""
    return plan.num_layers * hidden_size * dtype.itemsize if plan.extends else 0


class DraftState:
    """The state of all rows.

    R rows    K drafts that a step goes on from, or the whole chain    H hidden size

    Args:
        plan: How the draft model drafts.
        kv_pool: The target's.
        hidden_size: H.
        vocab_size: The draft's; 0 unless drafts are drawn and not the likeliest.
        dtype: Of hidden states.

    Attributes:
        tokens: int64 [R, K], first drafts of each row, target ids.
        scores: float32 [R, K], their log probabilities.
        hidden: [R, H], what the next draft step takes.
        probs: float32 [R, V] or [R, D, V], what they were drawn from; None if nothing is drawn.
        carries: [R, layers, H].
    """

    def __init__(
        self,
        plan: SpeculationPlan,
        kv_pool: KVPool,
        *,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        rows, device = kv_pool.num_rows, kv_pool.device
        layers = plan.num_layers
        is_chain_known = plan.algorithm == "multi_layer_eagle"
        count = plan.num_draft_steps if is_chain_known else plan.topk
        self.tokens = torch.zeros(rows, count, dtype=torch.int64, device=device)
        self.scores = torch.zeros(rows, count, dtype=torch.float32, device=device)
        self.hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.carries = torch.zeros(rows, layers, hidden_size, dtype=dtype, device=device)
        self.probs: torch.Tensor | None = None
        if vocab_size:
            size = (rows, count, vocab_size) if is_chain_known else (rows, vocab_size)
            self.probs = torch.zeros(size, dtype=torch.float32, device=device)
        self._block_carries = torch.zeros(0, layers, hidden_size, dtype=dtype, device=device)
        if plan.extends:
            self._kv_pool = kv_pool
            num_bytes = block_carry_bytes(plan, hidden_size, dtype)
            kv_pool.per_block(num_bytes, self._make_block_carries)
        self._block_size = kv_pool.block_size

    def _make_block_carries(self) -> None:
        size = (self._kv_pool.num_physical_blocks, *self._block_carries.shape[1:])
        self._block_carries = self._block_carries.new_zeros(size)

    def start(self, rows: Int64Array, num_computed: Int64Array, last_blocks: Int64Array) -> None:
        """Gives rows that begin what their first tokens take.

        Args:
            rows: [A] rows that begin.
            num_computed: [A] tokens that they have out of the prefix cache: whole blocks.
            last_blocks: [A] the last of those blocks; anything where there is none.
        """
        if not len(self._block_carries) or not len(rows):
            return
        at = to_device(rows, self.carries.device)
        blocks = to_device(last_blocks, self.carries.device)
        is_new = to_device(num_computed, self.carries.device) == 0
        carries = self._block_carries.index_select(0, blocks)
        self.carries[at] = carries.masked_fill_(is_new[:, None, None], 0)

    def keep(self, at: torch.Tensor, extended: Extended) -> None:
        """Stores the first drafts of rows.

        Args:
            at: int64 [S] rows, on the device.
            extended: What the draft-extend gave for them.
        """
        self.tokens.index_copy_(0, at, extended.tokens)
        self.scores.index_copy_(0, at, extended.scores)
        self.hidden.index_copy_(0, at, extended.hidden)
        if self.probs is not None and extended.probs is not None:
            self.probs.index_copy_(0, at, extended.probs)

    def keep_carries(
        self, at: torch.Tensor, layer: int, states: torch.Tensor, index: torch.Tensor
    ) -> None:
        """Stores what a layer takes with each row's next token.

        Args:
            at: int64 [B] rows, on the device.
            layer: Which layer takes it.
            states: [T, H].
            index: int64 [B], the row of each in ``states``.
        """
        self.carries[at, layer] = states.index_select(0, index)

    def keep_blocks(
        self, blocks: torch.Tensor, layer: int, states: torch.Tensor, index: torch.Tensor
    ) -> None:
        """Stores the same for blocks that have just been filled: [N] each."""
        self._block_carries[blocks, layer] = states.index_select(0, index)
