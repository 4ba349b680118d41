"""Attention over paged keys and values.

T token rows    H query heads    N KV heads    D head width    V width of values    B sequences
"""

import ctypes

import torch

_WIDTH_STEP = 32  # widths are multiples of it


class Layer(ctypes.Structure):
    """What a layer's attention is."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "kv_heads", "key_width", "value_width", "window")
        ),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    ]

    @classmethod
    def of(
        cls,
        num_heads: int,
        num_kv_heads: int,
        key_width: int,
        value_width: int,
        *,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> "Layer":
        """Returns a layer.

        Args:
            num_heads, num_kv_heads, key_width, value_width: H, N, D and V, in which ``misfit`` finds nothing.
            scale: What scores are multiplied by.
            window: Keys that a query sees, with its own; None for all.
            sinks: float32 [H], a logit of each head that joins its softmax and has no value.
        """
        layer = cls(num_heads, num_kv_heads, key_width, value_width, window or 0, None, scale)
        if sinks is not None:
            layer.kept = sinks.float().contiguous()
            layer.sinks = layer.kept.data_ptr()
        return layer


class Batch(ctypes.Structure):
    """What a pass attends, for all layers."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("sequences", "rows", "block_size", "columns", "tree_width")
        ),
        *((name, ctypes.c_void_p) for name in ("table_rows", "lengths", "counts", "slots", "tree")),
    ]

    @classmethod
    def of(
        cls,
        *,
        table_rows: torch.Tensor,
        lengths: torch.Tensor,
        counts: torch.Tensor | None,
        slots: torch.Tensor,
        block_size: int,
        columns: int,
        tree_mask: torch.Tensor | None = None,
    ) -> "Batch":
        """Returns a batch, which is read when a layer runs. All tensors are dense, on the CPU.

        Args:
            table_rows: int64 [B], rows of the block table.
            lengths: int64 [B], keys of each sequence with those of this pass. A padded one may have
                fewer than queries, which then see none or few.
            counts: int64 [B], queries of each; None: 1. Rows behind the last one are padding.
            slots: int64 [T], where keys and values go.
            block_size: Keys of a block.
            columns: Of the block table.
            tree_mask: bool [B, Q, W], which of its sequence's last W keys each query sees beside all
                before them; None: causal.
        """
        integers = (table_rows, lengths, slots)
        assert all(x.dtype is torch.int64 for x in integers), "read as int64, by pointers"
        width = 0 if tree_mask is None else tree_mask.shape[-1]
        batch = cls(len(table_rows), len(slots), block_size, columns, width)
        # Whoever reads the pointers needs the tensors alive.
        batch.kept = (table_rows, lengths, counts, slots, tree_mask)
        pointers = (None if x is None else x.data_ptr() for x in batch.kept)
        batch.table_rows, batch.lengths, batch.counts, batch.slots, batch.tree = pointers
        return batch


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "table", "out")),
    ]


def misfit(key_width: int, value_width: int) -> str | None:
    """Returns why the kernel does not take heads of these widths; None if it does."""
    if key_width % _WIDTH_STEP or value_width % _WIDTH_STEP:
        return f"heads of {key_width}, values of {value_width}: need multiples of {_WIDTH_STEP}"
    return None


def attention(
    kernels: ctypes.CDLL,
    layer: Layer,
    batch: Batch,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Stores keys and values, then attends; returns bfloat16 [T, H * V], zeros for padding.

    Args:
        kernels: From ``library.load``.
        layer: Of the model.
        batch: Of the pass.
        q: bfloat16 [T, H, D].
        k: bfloat16 [T, N, D]; None stores nothing.
        v: bfloat16 [T, N, V]; None where k is, or where values are the first V columns of keys.
        keys, values: bfloat16 [slots, N, width], caches; the same tensor for latents.
        table: int32 [.., columns], blocks of each row.
    """
    assert all(x is None or x.dtype is torch.bfloat16 for x in (q, k, v)), "read as bfloat16"
    assert all(x is None or len(x) == batch.rows for x in (q, k, v)), "a row for each slot"
    out = q.new_empty(q.shape[0], layer.heads * layer.value_width)
    q = _by_row(q)
    k, v = (None if x is None else _by_row(x) for x in (k, v))
    rows = _Rows(
        q.data_ptr(),
        None if k is None else k.data_ptr(),
        None if v is None else v.data_ptr(),
        q.stride(0),
        0 if k is None else k.stride(0),
        0 if v is None else v.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        table.data_ptr(),
        out.data_ptr(),
    )
    kernels.attention(ctypes.byref(layer), ctypes.byref(batch), ctypes.byref(rows))
    return out


def _by_row(x: torch.Tensor) -> torch.Tensor:
    """Returns x [T, heads, width] with the heads of a row side by side."""
    is_dense = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if is_dense else x.contiguous()
