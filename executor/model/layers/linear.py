"""Linear layers: the product, the vocabulary's embedding and head.

A weight is laid out once, at load, for what reads it: the kernels of the CPU have it in panels
(``model/cpu_kernels``), all else as it is.

The executors of one DP rank share the head:

    attn_tp 0   [L, D] ─▶ [L, Vp]  ─┐
    attn_tp 1   [L, D] ─▶ [L, Vp]  ─┴─ gathered ─▶ [L, 2 * Vp], cut to [L, V]

All have equal shares of Vp = ceil(V / attn_tp_size) rows; rows past the vocabulary are zeros that
nobody reads. Every executor ends up with the same bits, so that they cannot sample differently.
"""

from collections.abc import Sequence

import structlog
import torch
import torch.nn.functional as F

from executor.model.cpu_kernels.library import Library
from executor.model.cpu_kernels.linear import linear, pack, pad_bias
from executor.model.layers.linear_kept import KeptLinears
from executor.model.weights import KeptWeight, Part, Weight, WeightGroup
from executor.parallel.communicators import AttnTpCommunicator

_LOG = structlog.stdlib.get_logger(__name__)


class Linear:
    """y = x @ weight.T + bias.

    Filled by the loader through ``weight`` and ``bias``, then finished once.

    Args:
        in_features: Width of x.
        out_features: Width of y.
        has_bias: Whether there is a bias.
        dtype: Type of weight, bias, x and y.
        device: Where they live.
        library: Kernels that read the weight packed, if it is bfloat16 or int8; None for plain PyTorch.
        kept: Keeps the weight quantised if it can; None dequantises.
        parts: Rows of each matrix in it that others follow, or that executors share.

    Attributes:
        weight: [out_features, in_features]; packed, once ``finish`` has done so; empty if it is kept.
        bias: [out_features], or None; as the kernel takes it, likewise.
        is_packed: Whether they are.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        library: Library | None = None,
        kept: KeptLinears | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._kept = kept
        self._kept_weight: KeptWeight | None = None
        if kept is not None:
            self._kept_weight = kept.new(out_features, in_features, parts, device)
        num_plain = out_features if self._kept_weight is None else 0
        self.weight = torch.empty(num_plain, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if has_bias else None
        self.is_packed = False
        self._scales: torch.Tensor | None = None
        self._library = library

    @property
    def filled(self) -> Weight:
        """What the loader fills."""
        return self.weight if self._kept_weight is None else self._kept_weight

    def rows(self, *sizes: int) -> Sequence[Weight]:
        """Returns it by rows of matrices side by side."""
        if self._kept_weight is None:
            return torch.split_with_sizes(self.weight, sizes)
        return self._kept_weight.split(sizes)

    def finish(self, weight: torch.Tensor | None = None) -> None:
        """Packs weight and bias for the kernel, if there is one.

        Args:
            weight: Takes the place of ``self.weight``; for a weight that another layer owns.
        """
        if weight is not None and self._kept_weight is not None:
            self._kept_weight.quantise(weight)
        elif weight is not None:
            self.weight = weight
        if self._kept is not None and self._kept_weight is not None:
            if not self._kept.is_int8 or self._library is None:
                return
            self.weight = self._kept_weight.numbers
            self._scales = pad_bias(self._kept_weight.scales.flatten())
            self._kept_weight = None
        elif self._library is None or self.weight.dtype is not torch.bfloat16:
            return
        if self.in_features % 2:
            _LOG.warning("no_kernel_for_odd_width", width=self.in_features, running="PyTorch's")
            return
        self.weight = pack(self.weight)
        self.bias = None if self.bias is None else pad_bias(self.bias)
        self.is_packed = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [N, out_features] for x [N, in_features]. N may be 0."""
        if self._library is not None and self.is_packed:
            size, scales = self.out_features, self._scales
            return linear(self._library, x, self.weight, size, self.bias, scales)
        if self._kept is not None and self._kept_weight is not None:
            return self._kept.run(x, self._kept_weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class HeadLinear:
    """y = x @ weight, each head with a weight of its own.

    Args:
        num_heads: H.
        in_features: Width of a head of x.
        out_features: Width of a head of y.
        dtype: Type of weight, x and y.
        device: Where they live.
        library: As in ``Linear``.

    Attributes:
        weight: [H, in_features, out_features]; packed, once ``finish`` has done so.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        library: Library | None = None,
    ) -> None:
        self.out_features = out_features
        size = (num_heads, in_features, out_features)
        self.weight = torch.zeros(size, dtype=dtype, device=device)
        self._library = library if dtype is torch.bfloat16 and in_features % 2 == 0 else None

    def finish(self) -> None:
        """Packs the weight for the kernel, if there is one."""
        if self._library is not None:
            self.weight = pack(self.weight.transpose(1, 2))

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [T, H, out_features] for x [T, H, in_features], in ``out`` if given."""
        if self._library is not None:
            assert out is None, "the kernel makes it"
            return linear(self._library, x, self.weight, self.out_features)
        by_head = None if out is None else out.transpose(0, 1)
        return torch.bmm(x.transpose(0, 1), self.weight, out=by_head).transpose(0, 1)


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
        library: Kernels of the product; None for plain PyTorch.
        kept: Makes the weight int8; None keeps ``dtype``.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        communicator: AttnTpCommunicator,
        dtype: torch.dtype,
        device: torch.device,
        library: Library | None,
        kept: KeptLinears | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        num_rows = vocab_slice(vocab_size, communicator.size)
        start = num_rows * communicator.capacity.attn_tp_rank
        self._rows = range(start, start + num_rows)
        self._communicator = communicator
        self._linear = Linear(
            hidden_size, num_rows, dtype=dtype, device=device, library=library, kept=kept
        )

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns float32 logits [L, V] of hidden states [L, D], in ``out`` if there is one.

        Every executor of the DP rank must call it, with the same rows. The next call may overwrite
        what this one returned.
        """
        logits = self._communicator.gather_logits(self._linear(hidden))[:, : self.vocab_size]
        return logits.float() if out is None else out.copy_(logits)

    def weight_group(self, name: str) -> WeightGroup:
        """Returns what fills a head of its own."""
        at = range(*(min(row, self.vocab_size) for row in (self._rows.start, self._rows.stop)))
        weight, rest = self._linear.rows(len(at), len(self._rows) - len(at))
        if isinstance(rest, torch.Tensor):
            rest.zero_()
        return WeightGroup({name: Part(weight, 0, at, self.vocab_size)}, self._linear.finish)

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
