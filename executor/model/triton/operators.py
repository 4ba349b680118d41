"""Operators in Triton, one launch each. Triton itself is imported with the first object of the class.

T token rows    H query heads    N KV heads    D head width    B sequences    E experts    K of a row
C width of a latent    R of what turns beside it
"""

from typing import Any, NamedTuple

import torch

_PAGES_AT_ONCE = 1024


class HeadTurn(NamedTuple):
    """What queries and keys are still to be normalised and turned by.

    Attributes:
        weight: [H + N, D], of their norms; None: they have none.
        eps: Added to a head's mean square.
        positions: int64 [T].
        cos_sin: float32 [positions, rotary_dim], cosines, then sines; no columns turn nothing.
    """

    weight: torch.Tensor | None
    eps: float
    positions: torch.Tensor
    cos_sin: torch.Tensor


class LatentTurn(NamedTuple):
    """What latent attention's queries and keys are still to be normalised and turned by.

    Attributes:
        q: [T, H, R], what of queries turns; rows and heads may be strided.
        weight: [C], of the latents' norm.
        eps: Added to a latent's mean square.
        positions: int64 [T].
        cos_sin: float32 [positions, R], cosines, then sines.
    """

    q: torch.Tensor
    weight: torch.Tensor
    eps: float
    positions: torch.Tensor
    cos_sin: torch.Tensor


class TritonOps:
    """Kernels of ours.

    Raises:
        ImportError: Triton is not installed.
    """

    def __init__(self) -> None:
        from executor.model.triton import kernels

        self._kernels: Any = kernels

    def load(self, device: torch.device) -> None:
        """Runs a kernel, so that a machine on which none can be compiled is found out now."""
        index = torch.zeros(2, dtype=torch.int32, device=device)
        self.look_up_pages(index.view(1, 2), index[:1].long(), index, index[:1], most=1)

    def look_up_pages(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        kv_indptr: torch.Tensor,
        out: torch.Tensor,
        *,
        most: int,
        firsts: torch.Tensor | None = None,
    ) -> None:
        """Writes the pages of each row, row after row.

        Args:
            table: int32 [num_rows, columns].
            rows: int64 [B] lines of it.
            kv_indptr: int32 [B + 1], first place in ``out`` of each row, then their sum.
            out: int32, where they go.
            most: Pages of a row, at most.
            firsts: int32 [B], the column of each row's first page; None if that is 0 of all.
        """
        if not len(rows):
            return
        span = min(_power_of_two(most), _PAGES_AT_ONCE)
        self._kernels.look_up_pages[len(rows), -(-most // span)](
            table,
            rows,
            kv_indptr,
            kv_indptr if firsts is None else firsts,
            out,
            table.stride(0),
            HAS_FIRSTS=firsts is not None,
            SPAN=span,
        )

    def choose_experts(
        self,
        logits_TE: torch.Tensor,
        is_padding_T1: torch.Tensor | None,
        *,
        top_k: int,
        factor: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns expert ids [T, K] int32 and weights [T, K] float32, the softmax of the chosen.

        Args:
            logits_TE: Of any float type, contiguous.
            is_padding_T1: bool, rows whose ids are E; None: no row's.
            top_k: K.
            factor: What the sum of a row's weights is.
        """
        num_rows, num_experts = logits_TE.shape
        ids = logits_TE.new_empty(num_rows, top_k, dtype=torch.int32)
        weights = torch.empty_like(ids, dtype=torch.float32)
        if num_rows:
            self._kernels.choose_experts[num_rows,](
                logits_TE,
                ids if is_padding_T1 is None else is_padding_T1,
                ids,
                weights,
                num_experts,
                factor,
                HAS_PADDING=is_padding_T1 is not None,
                TOP_K=top_k,
                PLACES=_power_of_two(top_k),
                SPAN=_power_of_two(num_experts),
                num_warps=1,
            )
        return ids, weights

    def store_heads(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        turn: HeadTurn,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Stores keys, normalised and turned, and values. Returns queries likewise, [T, H, D].

        Args:
            q: [T, H, D], as projected: keys and values lie behind them in each row.
            k: [T, N, D], those keys.
            turn: How.
            keys: [slots, N, D], contiguous.
            values: Likewise.
            slots: int64 [T], where each row's go.
        """
        num_rows, num_heads, width = q.shape
        num_kv_heads = k.shape[1]
        assert k.storage_offset() == q.storage_offset() + num_heads * width, "keys lie elsewhere"
        out = q.new_empty(num_rows, num_heads, width)
        if num_rows:
            self._kernels.store_heads[num_rows, num_heads + 2 * num_kv_heads](
                q,
                keys if turn.weight is None else turn.weight,
                turn.positions,
                turn.cos_sin,
                slots,
                out,
                keys,
                values,
                q.stride(0),
                turn.eps,
                NUM_HEADS=num_heads,
                NUM_KV_HEADS=num_kv_heads,
                WIDTH=width,
                HALF=turn.cos_sin.shape[1] // 2,
                HAS_NORM=turn.weight is not None,
                SPAN=_power_of_two(width),
                num_warps=1,
            )
        return out

    def store_latents_(
        self,
        queries: torch.Tensor,
        latents: torch.Tensor,
        turn: LatentTurn,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Stores latents, normalised, and keys beside them, turned; turns queries likewise.

        Args:
            queries: [T, H, C + R], contiguous, which get their last R columns.
            latents: [T, 1, C + R], as projected; rows may be strided.
            turn: How.
            cache: [slots, 1, C + R], contiguous.
            slots: int64 [T], where each row's go.
        """
        num_rows, num_heads, _ = queries.shape
        half, latent_dim = turn.cos_sin.shape[1] // 2, len(turn.weight)
        if num_rows:
            self._kernels.store_latents[num_rows, num_heads + 1](
                turn.q,
                latents,
                turn.weight,
                turn.positions,
                turn.cos_sin,
                slots,
                queries,
                cache,
                turn.q.stride(0),
                turn.q.stride(1),
                latents.stride(0),
                turn.eps,
                NUM_HEADS=num_heads,
                LATENT=latent_dim,
                HALF=half,
                LATENT_SPAN=_power_of_two(latent_dim),
                HALF_SPAN=_power_of_two(half),
                num_warps=1,
            )

    def add_sinks_(self, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
        """Gives each head's softmax a logit more, which has no value.

        Args:
            out: [T, H, D], contiguous.
            lse: float32 [T, H], logarithms to base 2 of the softmaxes' sums.
            sinks: float32 [H].
        """
        num_rows, num_heads, width = out.shape
        if num_rows:
            self._kernels.add_sinks[num_rows * num_heads,](
                out,
                lse,
                sinks,
                NUM_HEADS=num_heads,
                WIDTH=width,
                SPAN=_power_of_two(width),
                num_warps=1,
            )


def _power_of_two(number: int) -> int:
    """Returns the next power of two, at least as large."""
    return 1 << (number - 1).bit_length()
