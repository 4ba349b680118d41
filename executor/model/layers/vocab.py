"""Vocabulary layers: the embedding, and the head, which the executors of one DP rank share.

    attn_tp 0   [L, D] ─▶ [L, Vp]  ─┐
    attn_tp 1   [L, D] ─▶ [L, Vp]  ─┴─ gathered ─▶ [L, 2 * Vp], cut to [L, V]

All have equal shares of Vp = ceil(V / attn_tp_size) rows; rows past the vocabulary are zeros that
nobody reads. Every executor ends up with the same bits, so that they cannot sample differently.
"""

import torch
import torch.nn.functional as F

from executor.model.layers.linear import Linear
from executor.model.layers.workers import WorkerPool
from executor.model.weights import Part, WeightGroup
from executor.parallel.communicators import AttnTpCommunicator


class Embedding:
    """Looks up a row per token.

    Attributes:
        weight: [num_embeddings, width].
    """

    def __init__(
        self, num_embeddings: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(num_embeddings, width, dtype=dtype, device=device)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns [T, width] for int64 ids [T]."""
        return F.embedding(input_ids, self.weight)


class LMHead:
    """This executor's rows of the head.

    Args:
        hidden_size: D.
        vocab_size: V.
        communicator: Joins the executors of this DP rank.
        dtype: Type of weights and hidden states.
        device: Where they live.
        workers: Share the product.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        communicator: AttnTpCommunicator,
        dtype: torch.dtype,
        device: torch.device,
        workers: WorkerPool,
    ) -> None:
        self.vocab_size = vocab_size
        num_rows = vocab_slice(vocab_size, communicator.size)
        start = num_rows * communicator.topology.attn_tp_rank
        self._rows = range(start, start + num_rows)
        self._communicator = communicator
        self._linear = Linear(hidden_size, num_rows, dtype=dtype, device=device, workers=workers)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [L, V] of hidden states [L, D].

        Every executor of the DP rank must call it, with the same rows. The next call may overwrite
        what this one returned.
        """
        logits = self._communicator.gather_logits(self._linear(hidden))
        return logits[:, : self.vocab_size].float()

    def weight_group(self, name: str) -> WeightGroup:
        """Returns what fills a head of its own."""
        at = range(*(min(row, self.vocab_size) for row in (self._rows.start, self._rows.stop)))
        weight = self._linear.weight
        weight[len(at) :].zero_()
        part = Part(weight[: len(at)], 0, at, self.vocab_size)
        return WeightGroup({name: part}, self._linear.finish)

    def tied_weight_group(self, embedding: torch.Tensor) -> WeightGroup:
        """Returns what takes the head from the embedding, once that is filled.

        Args:
            embedding: [attn_tp_size * Vp, D], zeros past the vocabulary.
        """
        rows = embedding[self._rows.start : self._rows.stop]
        return WeightGroup({}, lambda: self._linear.finish(rows))


def vocab_slice(vocab_size: int, attn_tp_size: int) -> int:
    """Returns Vp, the rows of each executor's share."""
    return -(-vocab_size // attn_tp_size)
