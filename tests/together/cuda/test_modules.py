"""Compiled modules of FlashInfer's: those without which no server starts where there is no compiler."""

from pathlib import Path

from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from tests.together.cuda.support.fake_gpu import FakeGpu

_BF16 = "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128"
_PREFILL = f"batch_prefill_with_kv_cache_{_BF16}_posenc_0_use_swa_False_use_logits_cap_False"

# Built before, and carried to such a machine: a module more here is one more to build.
CARRIED = {
    *("norm", "silu_and_mul", "rope", "page", "sampling"),
    *("fused_moe_90", "mnnvl_moe_alltoall"),
    f"{_PREFILL}_f16qk_False_kv_stride_equal",  # FA2: decodes of four heads or more per KV head
    f"{_PREFILL}_f16qk_False_sm90",  # FA3
}


def test_a_server_of_a_qwen3_model_loads_the_modules_that_are_carried(
    gpu: FakeGpu, large: Path
) -> None:
    """The archive had FA2 by another name, so that all decodes would have compiled, or failed."""
    build_worker(ExecutorConfig(model=large, dtype="bfloat16", dp_size=64, moe_a2a="flashinfer"))
    assert set(gpu.modules) == CARRIED
