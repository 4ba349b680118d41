"""FlashInfer's kernels for weights that stay quantised, as far as their arguments say what they compute.

Weights are read as the library's source reads them: numbers times the scale of their block, up before
gate, MXFP4 with the low half of a byte first and laid as the interleaves return it. Rows are not
rounded to FP8, which the kernels for FP8 do.
"""

import torch

_FP4 = torch.tensor([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def fp8_weight(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns [.., n, k] in float32."""
    assert numbers.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    assert numbers.is_contiguous()
    assert scales.is_contiguous()
    *stack, n, k = numbers.shape
    assert k % 128 == 0
    assert list(scales.shape) == [*stack, -(-n // 128), k // 128]
    blocks = scales.repeat_interleave(128, -1).repeat_interleave(128, -2)
    return numbers.float() * blocks[..., :n, :]


def fp8_experts(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    assert numbers.shape[1] % 128 == 0, "experts follow one another by whole scales"
    return fp8_weight(numbers, scales)


def mxfp4_experts(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns [L, n, k] in float32 of what the interleaves returned."""
    assert numbers.dtype == scales.dtype == torch.uint8
    assert numbers.is_contiguous()
    assert scales.is_contiguous()
    count, n, half = numbers.shape
    assert n % 64 == 0
    assert half % 64 == 0
    assert scales.numel() == count * n * half // 16
    assert int(scales.max()) < 255
    folded = scales.view(count, n // 64, half // 64, 16, 4, 4).permute(0, 1, 4, 3, 2, 5)
    return mxfp4_weight(numbers.bitwise_not(), folded.reshape(count, n, half // 16))


def mxfp4_weight(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns [.., n, k] in float32 of a checkpoint's bytes, the low half of each first."""
    halves = torch.stack((numbers & 15, numbers >> 4), dim=-1).int()
    return _FP4[halves].flatten(-2) * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def interleave_moe_weights_for_sm90_mixed_gemm(
    *, weight: torch.Tensor, quant_type: str
) -> torch.Tensor:
    """Marks what the library interleaves; only its kernel reads that."""
    assert quant_type == "fp4"
    assert weight.dtype == torch.uint8
    assert weight.shape[1] % 16 == weight.shape[2] % 32 == 0
    return weight.bitwise_not()


def interleave_moe_scales_for_sm90_mixed_gemm(
    *, scales: torch.Tensor, group_size: int
) -> torch.Tensor:
    count, n, groups = scales.shape
    assert group_size == 32
    assert n % 64 == groups % 4 == 0
    slices = scales.reshape(count, n // 64, 4, 16, groups // 4, 4)
    return slices.permute(0, 1, 4, 3, 2, 5).reshape(count, n // 64, groups // 4, 16, 16)


INTERLEAVES = (
    interleave_moe_weights_for_sm90_mixed_gemm,
    interleave_moe_scales_for_sm90_mixed_gemm,
)


def fp8_blockscale_gemm_sm90(
    *, input: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor
) -> None:
    assert len(input), "the library refuses no rows"
    assert input.dtype == out.dtype == torch.bfloat16
    assert input.is_contiguous()
    assert len(weight) % 64 == 0
    out.copy_(input.float() @ fp8_weight(weight, weight_scale).T)
