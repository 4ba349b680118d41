"""Slots for kinds of models that no runner serves yet: Mamba, encoders, multimodal, pipelines.

Kept apart so that ``slots.py`` is what the runners use. ``bind``, ``copy_slots`` and ``skip_slots``
of the registry belong to the same: no runner calls them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from executor.graph.slots import (
    GraphSlot,
    PaddingPolicy,
    SourceFn,
    lines,
    per_sequence,
    per_token,
)


def unserved_decode_slots(
    *,
    enable_mamba_track: bool,
    is_encoder_decoder: bool,
    encoder_len_fill_value: int,
    encoder_lens_dtype: torch.dtype,
) -> list[GraphSlot]:
    """Returns a decode's positions in three dimensions, and what the model's kind adds."""
    slots = [_mrope_positions()]
    if enable_mamba_track:
        slots += _mamba_track_slots()
    if is_encoder_decoder:
        slots.append(
            per_sequence(
                "encoder_lens",
                dtype=encoder_lens_dtype,
                padding_policy=PaddingPolicy.FILL_ONCE,
                pad_value=encoder_len_fill_value,
            )
        )
    return slots


def unserved_prefill_slots(
    *,
    is_multimodal: bool,
    hidden_size: int,
    embed_dtype: torch.dtype | None,
    register_input_embeds: bool,
    enable_mamba_track: bool,
) -> list[GraphSlot]:
    """Returns what the model's kind adds to an extend.

    Raises:
        ValueError: ``input_embeds`` is wanted without its width or type.
    """
    slots = []
    if is_multimodal:
        slots.append(_mrope_positions())
    if is_multimodal and register_input_embeds:
        if hidden_size < 1 or embed_dtype is None:
            raise ValueError(
                f"slot 'input_embeds': hidden_size={hidden_size}, embed_dtype={embed_dtype}: "
                f"give the embedding's width and type, or register_input_embeds=False"
            )
        slots.append(
            per_token(
                "input_embeds",
                shape_fn=lambda _, max_num_tokens: (max_num_tokens, hidden_size),
                dtype=embed_dtype,
                copy_from_fb=False,  # the model writes it
            )
        )
    if enable_mamba_track:
        slots += _mamba_track_slots()
        slots.append(per_sequence("mamba_track_seqlens", dtype=torch.int32))
    return slots


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
        for key, tensor in _proxy_tensors(getattr(source, "pp_proxy_tensors", None)).items()
    ]
    for path in structured_fields:
        tensor = _value_at(source, path)
        if "." not in path or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"slot {path!r}: need a dotted path to a tensor in source, found {tensor!r}"
            )
        found.append(_structured(path, tensor, _path_source(path)))
    return found


def _proxy_tensors(pp_proxy_tensors: Any) -> Mapping[str, torch.Tensor]:
    """Returns the mapping in ``FillContext.pp_proxy_tensors``, whichever form it came in."""
    if pp_proxy_tensors is None:
        return {}
    tensors: Mapping[str, torch.Tensor] = getattr(pp_proxy_tensors, "tensors", pp_proxy_tensors)
    return tensors


def _mrope_positions() -> GraphSlot:
    """Returns the rope positions in time, height and width, [3, T]."""
    return per_token("mrope_positions", shape_fn=lambda _, tokens: (3, tokens), slice_fn=lines)


def _mamba_track_slots() -> list[GraphSlot]:
    mask = per_sequence("mamba_track_mask", dtype=torch.bool)
    return [per_sequence("mamba_track_indices"), mask]


def _structured(
    name: str, tensor: torch.Tensor, source_fn: SourceFn
) -> tuple[GraphSlot, torch.Tensor]:
    slot = GraphSlot(
        name,
        lambda max_bs, max_num_tokens: tuple(tensor.shape),
        tensor.dtype,
        axis="none",
        device=tensor.device,
        padding_policy=PaddingPolicy.KEEP_PAD,
        source_fn=source_fn,
    )
    return slot, tensor


def _proxy_source(key: str) -> SourceFn:
    return lambda _, context: _proxy_tensors(context.pp_proxy_tensors).get(key)


def _path_source(path: str) -> SourceFn:
    return lambda forward_batch, _: _value_at(forward_batch, path)


def _value_at(start: Any, path: str) -> Any:
    """Returns what a dotted path leads to, or None if it breaks off."""
    for name in path.split("."):
        start = getattr(start, name, None)
    return start
