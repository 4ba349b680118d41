"""If this fails, a model computes something else on a GPU than on a CPU."""

from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from executor.model.cpu_kernels.library import load
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.operators import (
    CpuOperators,
    FlashInferOperators,
    Operators,
    RotaryEmbedding,
    TorchOperators,
    cos_sin_table,
)
from executor.model.spec import RopeSpec
from tests.executor.support.flashinfer.cpu_flashinfer import reference

HEADS, KV_HEADS, HEAD_DIM, SIZE, MAX_POSITIONS, EPS = 6, 2, 16, 48, 200, 1e-6
ROPE = RopeSpec(rotary_dim=HEAD_DIM, theta=1e4)
CPU = torch.device("cpu")


def torch_operators(dtype: torch.dtype) -> TorchOperators:
    return TorchOperators([RotaryEmbedding(ROPE, MAX_POSITIONS, dtype=dtype, device=CPU)])


def flashinfer_operators(ops: FlashInferOps) -> FlashInferOperators:
    return FlashInferOperators(ops, ropes=[ROPE], max_positions=MAX_POSITIONS, device=CPU)


class Inputs:
    """Random tensors of T rows, laid as a model lays them."""

    def __init__(self, num_rows: int, dtype: torch.dtype, head_dim: int = HEAD_DIM) -> None:
        generator = torch.Generator().manual_seed(num_rows)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.x, self.residual = random(num_rows, SIZE), random(num_rows, SIZE)
        self.weight = random(SIZE)
        self.heads = random(num_rows, HEADS + 2 * KV_HEADS, head_dim)
        q_weight, k_weight = random(head_dim), random(head_dim)
        self.qk_weight = torch.stack([q_weight] * HEADS + [k_weight] * KV_HEADS)
        self.gate_up = random(num_rows, 2 * SIZE)
        self.positions = torch.randint(0, MAX_POSITIONS, (num_rows,), generator=generator)

    def qk(self, num_heads: int) -> torch.Tensor:
        """Returns the first heads as operators may overwrite them."""
        return self.heads.clone()[:, :num_heads]

    def through(self, operators: Operators) -> dict[str, torch.Tensor]:
        """Returns what every operator makes of them."""
        norm, rotation = (self.qk_weight, EPS), operators.rotations(self.positions)[0]
        of_queries, results = (self.qk_weight[:HEADS], EPS), {}
        for name, given in {
            "normed": (norm, None),
            "turned": (None, rotation),
            "both": (norm, rotation),
            "neither": (None, None),
        }.items():
            pair = operators.prepare_heads(self.qk(HEADS + KV_HEADS), HEADS, *given)
            results[f"{name} q"], results[f"{name} k"] = pair
        pair = operators.prepare_heads(self.qk(HEADS), HEADS, of_queries, rotation)
        results["q without keys"], none = pair
        assert none.shape == (len(self.positions), 0, self.heads.shape[-1])
        results["rms_norm"] = operators.rms_norm(self.x, self.weight, EPS)
        results["add_rms_norm"], results["sum"] = operators.add_rms_norm(
            self.x.clone(), self.residual.clone(), self.weight, EPS
        )
        results["silu_and_mul"] = operators.silu_and_mul(self.gate_up)
        return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_both_compute_the_same(num_rows: int, dtype: torch.dtype, ops: FlashInferOps) -> None:
    inputs = Inputs(num_rows, dtype)
    ours = inputs.through(flashinfer_operators(ops))
    theirs = inputs.through(torch_operators(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    for name, result in theirs.items():
        assert ours[name].shape == result.shape
        torch.testing.assert_close(ours[name], result, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(load() is None, reason="no kernels for this CPU")
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 24])
def test_kernels_of_the_cpu_compute_the_same(head_dim: int) -> None:
    """The second width is one that they do not take."""
    rope = RopeSpec(rotary_dim=8, theta=1e4)
    kernels, inputs = load(), Inputs(7, torch.bfloat16, head_dim)
    assert kernels is not None
    ours = CpuOperators(kernels, [rope], MAX_POSITIONS)
    plain = TorchOperators([RotaryEmbedding(rope, MAX_POSITIONS, dtype=torch.bfloat16, device=CPU)])
    results = inputs.through(ours)
    torch.testing.assert_close(results, inputs.through(plain), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_norm_rounds_once_as_that_of_gpt_oss(dtype: torch.dtype) -> None:
    """Twice, as norms of Llama's kind in Transformers do, shows in a quarter of the numbers."""
    inputs, norm = Inputs(50, dtype), GptOssRMSNorm(SIZE, EPS).to(dtype)
    norm.weight.data = inputs.weight
    ours = torch_operators(dtype).rms_norm(inputs.x, inputs.weight, EPS)
    assert torch.equal(ours, norm(inputs.x))


def test_inputs_that_others_still_read_are_left_alone(ops: FlashInferOps) -> None:
    inputs, untouched = Inputs(5, torch.float32), Inputs(5, torch.float32)
    inputs.through(flashinfer_operators(ops))
    inputs.through(torch_operators(torch.float32))
    for name, tensor in vars(untouched).items():
        assert torch.equal(getattr(inputs, name), tensor), name


def test_the_table_holds_what_the_torch_rotation_looks_up() -> None:
    rotary = RotaryEmbedding(ROPE, 9, dtype=torch.float32, device=CPU)
    cos, sin = rotary.at(torch.arange(9))
    half = HEAD_DIM // 2
    table = cos_sin_table(ROPE, 9)
    assert table.dtype == torch.float32
    assert torch.equal(table[:, :half], cos[:, 0, :half])
    assert torch.equal(table[:, half:], sin[:, 0, half:])


def test_the_rest_of_a_head_does_not_turn(ops: FlashInferOps) -> None:
    part = RopeSpec(rotary_dim=HEAD_DIM // 2, theta=1e4)
    rotary = RotaryEmbedding(part, MAX_POSITIONS, dtype=torch.float32, device=CPU)
    for operators in (
        TorchOperators([rotary]),
        FlashInferOperators(ops, ropes=[part], max_positions=MAX_POSITIONS, device=CPU),
    ):
        x = Inputs(5, torch.float32).heads
        [rotation] = operators.rotations(torch.arange(1, 6))
        q, k = operators.prepare_heads(x.clone(), HEADS, None, rotation)
        turned = torch.cat((q, k), dim=1)
        assert torch.equal(turned[..., HEAD_DIM // 2 :], x[..., HEAD_DIM // 2 :])
        alone = TorchOperators([rotary]).prepare_heads(
            x[..., : HEAD_DIM // 2].clone(), HEADS, None, rotary.at(torch.arange(1, 6))
        )
        torch.testing.assert_close(turned[..., : HEAD_DIM // 2], torch.cat(alone, dim=1))


# The torch operators against the library's own references.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norms_and_activation_are_those_of_the_library(real: Any, dtype: torch.dtype) -> None:
    inputs, operators = Inputs(9, dtype), torch_operators(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    x, residual, weight = inputs.x, inputs.residual, inputs.weight
    for ours, theirs in (
        (operators.rms_norm(x, weight, EPS), reference("rmsnorm")(x, weight)),
        (
            operators.add_rms_norm(x.clone(), residual.clone(), weight, EPS)[0],
            reference("fused_add_rmsnorm")(x, residual, weight),
        ),
        (operators.silu_and_mul(inputs.gate_up), reference("silu_and_mul")(inputs.gate_up)),
    ):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_the_rotation_is_that_of_the_library(real: Any) -> None:
    inputs, operators = Inputs(9, torch.float32), torch_operators(torch.float32)
    qk = inputs.heads[:, : HEADS + KV_HEADS]
    q, k = operators.prepare_heads(qk, HEADS, None, operators.rotations(inputs.positions)[0])
    expected = reference("rope_cos_sin_cache")(
        inputs.positions,
        qk[:, :HEADS].flatten(1),
        qk[:, HEADS:].flatten(1),
        HEAD_DIM,
        cos_sin_table(ROPE, MAX_POSITIONS),
        is_neox=True,
    )
    for ours, theirs in zip((q, k), expected, strict=True):
        torch.testing.assert_close(ours.flatten(1), theirs, atol=1e-5, rtol=1e-5)
