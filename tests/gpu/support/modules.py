"""FlashInfer's compiled modules that executors load in bfloat16 with heads of 128, by its names for them.

tests/together/cuda/test_modules.py holds the list against what they load.
"""

_HEADS = (
    "with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128"
    "_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False"
)
# Of every executor of a model with experts on a Hopper GPU, with a draft model or without.
MODULES = (
    *("norm", "rope", "page", "silu_and_mul", "sampling", "fused_moe_90"),
    f"batch_prefill_{_HEADS}_f16qk_False_kv_stride_equal",
    f"batch_prefill_{_HEADS}_f16qk_False_sm90",
)
FEW_HEADS = (f"batch_decode_{_HEADS}",)  # fewer than four query heads per KV head
OF_ALL_TO_ALL = ("mnnvl_moe_alltoall",)
