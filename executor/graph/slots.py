"""Slots of decodes and prefills: specs only, nothing is allocated here."""

from functools import partial

import torch

from executor.graph.graph_slot import FillContext, GraphSlot, PaddingPolicy, SizesOnly

_per_sequence = partial(GraphSlot, shape_fn=lambda max_bs, _: (max_bs,), axis="bs")
_per_token = partial(GraphSlot, shape_fn=lambda _, max_num_tokens: (max_num_tokens,))


def decode_slots(
    *,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype,
    seq_lens_dtype: torch.dtype = torch.int64,
    seq_lens_cpu_dtype: torch.dtype = torch.int64,
) -> list[GraphSlot]:
    """Returns the inputs that every decode batch has.

    Padded rows of ``input_ids`` keep an earlier batch's ids, all of them valid. Padded positions
    are zero, because attention planning reads them.

    Source: sgl-project/sglang issue 24361 (padded positions).
    """
    zero = PaddingPolicy.ZERO
    lens = partial(
        _per_sequence, padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=seq_len_fill_value
    )
    return [
        _per_token("input_ids", dtype=torch.int64),
        _per_token("positions", dtype=torch.int64, padding_policy=zero),
        _per_token("out_cache_loc", dtype=cache_loc_dtype, padding_policy=zero),
        _per_sequence("req_pool_indices", dtype=torch.int64, padding_policy=zero),
        lens("seq_lens", dtype=seq_lens_dtype),
        lens("seq_lens_cpu", dtype=seq_lens_cpu_dtype, device="cpu"),
    ]


def prefill_slots(*, cache_loc_dtype: torch.dtype) -> list[GraphSlot]:
    """Returns the inputs of an extend, all ZERO: every padded row really runs."""
    zero = partial(_per_token, padding_policy=PaddingPolicy.ZERO)
    return [
        zero("input_ids", dtype=torch.int64),
        zero("positions", dtype=torch.int64),
        zero("out_cache_loc", dtype=cache_loc_dtype),
    ]


def num_token_non_padded_slot(
    *, require_gathered_buffer: bool, attn_tp_size: int, attn_tp_rank: int
) -> GraphSlot:
    """Returns the slot that tells this rank's kernels how many of its rows are real.

    It is written at every fill, also by a rank without tokens; else the last count would survive.

    Args:
        require_gathered_buffer: Whether layers split rows over attention TP.
        attn_tp_size: Ranks of the attention-TP group.
        attn_tp_rank: This one.
    """
    if not 0 <= attn_tp_rank < attn_tp_size:
        raise ValueError(
            f"slot 'num_token_non_padded': attn_tp_rank={attn_tp_rank}, "
            f"attn_tp_size={attn_tp_size}: ranks run from 0 to attn_tp_size - 1"
        )
    size, rank = (attn_tp_size, attn_tp_rank) if require_gathered_buffer else (1, 0)

    def num_rows(context: FillContext) -> int:
        raw, padded = context.raw_num_tokens, context.padded_num_tokens
        return local_num_token_non_padded(raw, padded, size, rank)

    return _counts("num_token_non_padded", 1, SizesOnly(num_rows))


def local_num_token_non_padded(
    num_tokens: int, padded_num_tokens: int, attn_tp_size: int, attn_tp_rank: int
) -> int:
    """Returns how many real rows an attention-TP rank holds once rows are split evenly.

    The split is of the padded rows, so the last ranks may hold no real row. 1018 real rows of 1024
    on 2 ranks are 512 and 506.

    Args:
        num_tokens: Real rows, the first ones.
        padded_num_tokens: All rows, a multiple of ``attn_tp_size``.
        attn_tp_size: Ranks that share the rows.
        attn_tp_rank: From 0 to ``attn_tp_size - 1``.

    Raises:
        ValueError: The rows do not divide among the ranks.
    """
    if padded_num_tokens % attn_tp_size:
        raise ValueError(
            f"slot 'num_token_non_padded': {padded_num_tokens} rows do not divide among "
            f"attn_tp_size={attn_tp_size} ranks: use a graph size that is a multiple of it"
        )
    chunk = padded_num_tokens // attn_tp_size
    return min(max(num_tokens - chunk * attn_tp_rank, 0), chunk)


def global_num_tokens_slots(
    *, require_gathered_buffer: bool, require_mlp_tp_gather: bool, num_dp_ranks: int
) -> list[GraphSlot]:
    """Returns the token counts of all DP ranks on the device.

    No layer of this executor reads them, as ``DpLayout`` has the counts on the host: they are for
    kernels that gather by counts on the device. In a replay every rank runs the graph's size, so
    that is every entry. Without a gathered buffer nothing is written.
    """
    length = num_dp_ranks if require_mlp_tp_gather else 1
    every_rank = SizesOnly(lambda context: context.padded_num_tokens)
    post_fill = every_rank if require_gathered_buffer else None
    names = ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
    return [_counts(name, length, post_fill) for name in names]


def _counts(name: str, length: int, post_fill: SizesOnly | None) -> GraphSlot:
    return GraphSlot(
        name,
        lambda max_bs, max_num_tokens: (length,),
        torch.int32,
        axis="none",
        copy_from_fb=False,
        post_fill=post_fill,
    )
