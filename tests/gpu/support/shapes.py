"""Sizes of the suite's models, pools and batches: on a GPU, and where a CPU stands in."""

from dataclasses import dataclass

import torch

from executor.budget.capture_sizes import default_decode_sizes, default_prefill_sizes
from tests.executor.support.experts import new_spec, with_heads
from tests.gpu.support.machine import IS_STAND_IN

VERIFY_WIDTH = 4  # tokens per sequence that a verify step runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a KV pool and of the graphs over it.

    Attributes:
        block_size: Tokens per block.
        num_rows: Sequences that have blocks.
        max_len: Tokens of each; a multiple of ``block_size``.
        decode: Captured sequences.
        prefill: Captured token rows.
    """

    block_size: int
    num_rows: int
    max_len: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...]

    @property
    def max_num_tokens(self) -> int:
        """Token rows of the largest pass."""
        return max(self.decode[-1] * VERIFY_WIDTH, self.prefill[-1])


# Qwen3-30B-A3B, as its config.json has it.
QWEN3_30B_A3B = new_spec(
    dtype=torch.bfloat16,
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=768,
    num_experts=128,
    top_k=8,
    max_position_embeddings=40960,
)

if IS_STAND_IN:
    SMALL_MODEL = new_spec(
        dtype=torch.bfloat16,
        vocab_size=64,
        hidden_size=48,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=32,
        num_experts=6,
        top_k=2,
        max_position_embeddings=64,
    )
    SMALL = Sizes(block_size=4, num_rows=8, max_len=32, decode=(1, 4, 8), prefill=(8, 16))
    LARGE_MODEL = SMALL_MODEL
    LARGE = Sizes(block_size=4, num_rows=4, max_len=32, decode=(1, 2, 4), prefill=(8, 16))
    CONTEXT = 12
    COMPARED_LAYERS, VARIANT_LAYERS = 2, 1
    PERIOD_SHAPE, PERIOD_LAYERS, PERIODS = {}, 2, (2,)
else:
    SMALL_MODEL = new_spec(
        dtype=torch.bfloat16,
        vocab_size=1000,
        hidden_size=256,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,  # that of the prebuilt kernels
        intermediate_size=128,
        num_experts=16,
        top_k=4,
        max_position_embeddings=2048,
    )
    SMALL = Sizes(
        block_size=16,
        num_rows=64,
        max_len=512,
        decode=default_decode_sizes(64),
        prefill=default_prefill_sizes(512),
    )
    LARGE_MODEL = QWEN3_30B_A3B
    LARGE = Sizes(
        block_size=16,
        num_rows=256,
        max_len=1040,
        decode=(1, 8, 32, 128, 256),
        prefill=(64, 256, 1024, 2048),
    )
    CONTEXT = 1024  # keys of each sequence when a decode step is measured
    COMPARED_LAYERS = 4  # of the model that is compared with Transformers
    VARIANT_LAYERS = 12  # of one whose kernels are compared
    PERIOD_SHAPE = {  # the same in a config.json; of these layers an H100 has room for
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }
    PERIOD_LAYERS, PERIODS = 24, (1, 32)

# FlashInfer decodes on tensor cores from four query heads per KV head.
SMALL_MODELS = {
    "4 heads per KV head": SMALL_MODEL,
    "2 heads per KV head": with_heads(SMALL_MODEL, num_heads=4),
}
