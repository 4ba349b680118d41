"""Which inputs the graphs of a phase read, as slots. Specs only: nothing is allocated here."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from executor.graph.graph_slot import (
    FillContext,
    GraphSlot,
    PaddingPolicy,
    SizesOnly,
    SourceFn,
    proxy_tensors,
)

_per_sequence = partial(GraphSlot, axis="bs")
_per_token = partial(GraphSlot, axis="tokens")


def decode_slots(
    *,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype,
    seq_lens_dtype: torch.dtype = torch.int64,
    seq_lens_cpu_dtype: torch.dtype = torch.int64,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
) -> list[GraphSlot]:
    """Returns the inputs that every decode batch has, and those of the model's kind.

    Padded rows of ``input_ids`` keep an earlier batch's ids, all of them valid. Padded positions
    are zero, because attention planning reads them.

    Source: sgl-project/sglang issue 24361 (padded positions).
    """
    sentinel = partial(
        _per_sequence,
        shape_fn=_bs,
        padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=seq_len_fill_value,
    )
    slots = [
        _per_token("input_ids", _tokens, torch.int64),
        _per_token("positions", _tokens, torch.int64, padding_policy=PaddingPolicy.ZERO),
        _per_token("out_cache_loc", _tokens, cache_loc_dtype, padding_policy=PaddingPolicy.ZERO),
        _per_sequence("req_pool_indices", _bs, torch.int64, padding_policy=PaddingPolicy.ZERO),
        sentinel("seq_lens", dtype=seq_lens_dtype),
        sentinel("seq_lens_cpu", dtype=seq_lens_cpu_dtype, device="cpu"),
        _mrope_positions(),
    ]
    if enable_mamba_track:
        slots += _mamba_track_slots()
    if is_encoder_decoder:
        slots.append(
            _per_sequence(
                "encoder_lens",
                _bs,
                encoder_lens_dtype,
                padding_policy=PaddingPolicy.FILL_ONCE,
                pad_value=encoder_len_fill_value,
            )
        )
    return slots


def prefill_slots(
    *,
    cache_loc_dtype: torch.dtype,
    is_multimodal: bool = False,
    hidden_size: int = 0,
    embed_dtype: torch.dtype | None = None,
    register_input_embeds: bool = True,
    enable_mamba_track: bool = False,
) -> list[GraphSlot]:
    """Returns the inputs of an extend, all ZERO: every padded row really runs.

    Raises:
        ValueError: ``input_embeds`` is wanted without its width or type.
    """
    zero = partial(_per_token, padding_policy=PaddingPolicy.ZERO)
    slots = [
        zero("input_ids", _tokens, torch.int64),
        zero("positions", _tokens, torch.int64),
        zero("out_cache_loc", _tokens, cache_loc_dtype),
    ]
    if is_multimodal:
        slots.append(_mrope_positions())
    if is_multimodal and register_input_embeds:
        if hidden_size < 1 or embed_dtype is None:
            raise ValueError(
                f"slot 'input_embeds': hidden_size={hidden_size}, embed_dtype={embed_dtype}: "
                f"give the embedding's width and type, or register_input_embeds=False"
            )
        slots.append(
            zero(
                "input_embeds",
                lambda _, max_num_tokens: (max_num_tokens, hidden_size),
                embed_dtype,
                copy_from_fb=False,  # the model writes it
            )
        )
    if enable_mamba_track:
        slots += _mamba_track_slots()
        slots.append(
            _per_sequence(
                "mamba_track_seqlens", _bs, torch.int32, padding_policy=PaddingPolicy.ZERO
            )
        )
    return slots


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

    In a replay every rank runs the graph's size, so that is every entry. Without a gathered buffer
    nobody reads them and nothing is written.
    """
    length = num_dp_ranks if require_mlp_tp_gather else 1

    every_rank = SizesOnly(lambda context: context.padded_num_tokens)
    post_fill = every_rank if require_gathered_buffer else None
    names = ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
    return [_counts(name, length, post_fill) for name in names]


def structured_slots(
    source: Any, structured_fields: Sequence[str]
) -> list[tuple[GraphSlot, torch.Tensor]]:
    """Returns the slots that exist only because a runner brought their storage, and that storage.

    Args:
        source: The runner's buffers. Each tensor in its ``pp_proxy_tensors``, if there are any,
            becomes a slot.
        structured_fields: Dotted paths of further tensors, in the source and in every batch.

    Raises:
        ValueError: A path has no dot, or leads to no tensor in the source.
    """
    found = [
        _structured(f"pp_proxy_tensors.{key}", tensor, _proxy_source(key))
        for key, tensor in proxy_tensors(getattr(source, "pp_proxy_tensors", None)).items()
    ]
    for path in structured_fields:
        tensor = _follow(source, path)
        if "." not in path or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"slot {path!r}: need a dotted path to a tensor in source, found {tensor!r}"
            )
        found.append(_structured(path, tensor, _path_source(path)))
    return found


def _bs(max_bs: int, _: int) -> tuple[int, ...]:
    return (max_bs,)


def _tokens(_: int, max_num_tokens: int) -> tuple[int, ...]:
    return (max_num_tokens,)


def _constant_shape(shape: Sequence[int]) -> Callable[[int, int], tuple[int, ...]]:
    return lambda max_bs, max_num_tokens: tuple(shape)


def _mrope_positions() -> GraphSlot:
    """Returns the rope positions in time, height and width, [3, T]."""
    return GraphSlot(
        "mrope_positions",
        lambda _, max_num_tokens: (3, max_num_tokens),
        torch.int64,
        padding_policy=PaddingPolicy.ZERO,
        slice_fn=lambda buffer, count: buffer[:, :count],
    )


def _mamba_track_slots() -> list[GraphSlot]:
    zero = partial(_per_sequence, shape_fn=_bs, padding_policy=PaddingPolicy.ZERO)
    return [
        zero("mamba_track_indices", dtype=torch.int64),
        zero("mamba_track_mask", dtype=torch.bool),
    ]


def _counts(name: str, length: int, post_fill: SizesOnly | None) -> GraphSlot:
    return GraphSlot(
        name,
        _constant_shape((length,)),
        torch.int32,
        axis="none",
        copy_from_fb=False,
        post_fill=post_fill,
    )


def _structured(
    name: str, tensor: torch.Tensor, source_fn: SourceFn
) -> tuple[GraphSlot, torch.Tensor]:
    slot = GraphSlot(
        name,
        _constant_shape(tensor.shape),
        tensor.dtype,
        axis="none",
        device=tensor.device,
        padding_policy=PaddingPolicy.KEEP_PAD,
        source_fn=source_fn,
    )
    return slot, tensor


def _proxy_source(key: str) -> SourceFn:
    return lambda _, context: proxy_tensors(context.pp_proxy_tensors).get(key)


def _path_source(path: str) -> SourceFn:
    return lambda forward_batch, _: _follow(forward_batch, path)


def _follow(start: Any, path: str) -> Any:
    """Returns what a dotted path leads to, or None if it breaks off."""
    for name in path.split("."):
        start = getattr(start, name, None)
    return start
