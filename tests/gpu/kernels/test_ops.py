"""Every kernel that we call against PyTorch. If one of these fails, a GPU computes something else.

The authority computes in float32 on the CPU from the same bfloat16 numbers, so that what remains is
the kernel's own rounding. Attention has a file of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.operators import (
    FlashInferOperators,
    Operators,
    RotaryEmbedding,
    TorchOperators,
)
from executor.model.moe.layer import Dispatched, MoERunner
from executor.model.moe.routing import choose_experts
from executor.model.moe.runner_cutedsl import CuteDslMoERunner, CuteDslSizing
from executor.model.moe.runner_cutlass import CutlassMoERunner, CutlassWorkspace
from executor.model.moe.runner_grouped import GroupedMMRunner
from executor.model.spec import RopeSpec, RouterSpec, Scores
from executor.model.triton.operators import TritonOps
from tests.executor.support.flashinfer.triton_checks import CHECKS, Check
from tests.gpu.support.cases import CPU, largest_error, normal, skip_without_cutedsl
from tests.gpu.support.machine import IS_STAND_IN, Machine

THETA, EPS = 1e6, 1e-6
ROWS = (0, 1, 7) if IS_STAND_IN else (0, 1, 2, 7, 64, 255, 1000)


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of a layer: hidden, heads, KV heads, head width, experts' hidden, experts, chosen."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_size: int
    experts: int
    top_k: int
    positions: int


DIMS = {"tiny": Dims(48, 6, 2, 16, 32, 5, 3, 200)}
if not IS_STAND_IN:
    DIMS = {
        "small": Dims(256, 4, 2, 128, 128, 8, 4, 4096),
        "Qwen3-30B-A3B": Dims(2048, 32, 4, 128, 768, 32, 8, 40960),
    }

# bfloat16 has 8 bits: half a unit is 0.2 %, and results round once or twice.
Limits = tuple[float, float]  # atol, rtol
CLOSE: Limits = (2e-3, 2**-6)
# How far a row of experts' results may be off, as a part of its length: sums of products of rounded
# intermediate results, added up in bfloat16 at worst.
EXPERTS_OFF = 0.02


@pytest.fixture(params=DIMS)
def dims(request: pytest.FixtureRequest) -> Dims:
    return DIMS[request.param]


def random(*size: int, seed: int) -> torch.Tensor:
    """Returns such numbers as bfloat16 can hold."""
    return normal(*size, seed=seed).bfloat16().float()


def assert_close(got: torch.Tensor, expected: torch.Tensor, limits: Limits | None = None) -> None:
    assert got.shape == expected.shape
    atol, rtol = limits or CLOSE
    torch.testing.assert_close(got.to(CPU, torch.float32), expected, atol=atol, rtol=rtol)


# Norms, rotation, activation.


def rope_of(dims: Dims) -> RopeSpec:
    return RopeSpec(rotary_dim=dims.head_dim, theta=THETA)


def torch_operators(dims: Dims, device: torch.device, dtype: torch.dtype) -> TorchOperators:
    rotary = RotaryEmbedding(rope_of(dims), dims.positions, dtype=dtype, device=device)
    return TorchOperators([rotary])


@pytest.fixture(params=["flashinfer", "torch"])
def operators(request: pytest.FixtureRequest, machine: Machine, dims: Dims) -> Operators:
    """What runs on the GPU, with FlashInfer and without it."""
    if request.param == "torch":
        return torch_operators(dims, machine.device, torch.bfloat16)
    return FlashInferOperators(
        request.getfixturevalue("ops"),
        ropes=[rope_of(dims)],
        max_positions=dims.positions,
        device=machine.device,
    )


@pytest.fixture
def authority(dims: Dims) -> Operators:
    return torch_operators(dims, CPU, torch.float32)


@pytest.mark.parametrize("num_rows", ROWS)
def test_norms_equal_the_authority(
    machine: Machine, operators: Operators, authority: Operators, dims: Dims, num_rows: int
) -> None:
    x, residual = (random(num_rows, dims.hidden, seed=seed) for seed in (1, 2))
    weight = 1 + 0.2 * random(dims.hidden, seed=3)
    weight = weight.bfloat16().float()

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(machine.device, torch.bfloat16)

    normed = operators.rms_norm(on_device(x), on_device(weight), EPS)
    assert_close(normed, authority.rms_norm(x, weight, EPS))
    sums = (on_device(x), on_device(residual))
    ours = operators.add_rms_norm(*sums, on_device(weight), EPS)
    theirs = authority.add_rms_norm(x, residual, weight, EPS)
    for got, expected in zip(ours, theirs, strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("num_rows", ROWS)
def test_heads_are_normed_and_turned_like_the_authority_does(
    machine: Machine, operators: Operators, authority: Operators, dims: Dims, num_rows: int
) -> None:
    """Queries and keys lie beside values, as the projection leaves them."""
    num_qk = dims.heads + dims.kv_heads
    heads = random(num_rows, num_qk + dims.kv_heads, dims.head_dim, seed=num_rows)
    q_weight, k_weight = (1 + 0.2 * random(dims.head_dim, seed=seed) for seed in (1, 2))
    weight = torch.stack([q_weight] * dims.heads + [k_weight] * dims.kv_heads)
    weight = weight.bfloat16().float()
    generator = torch.Generator().manual_seed(num_rows)
    positions = torch.randint(0, dims.positions, (num_rows,), generator=generator)
    on_device = heads.to(machine.device, torch.bfloat16)
    device_weight = weight.to(machine.device, torch.bfloat16)

    normed, plain = (
        torch.cat(of_heads.prepare_heads(qk[:, :num_qk], dims.heads, (norm, EPS), None), dim=1)
        for of_heads, qk, norm in (
            (operators, on_device, device_weight),
            (authority, heads, weight),
        )
    )
    assert_close(normed, plain)

    # From the very numbers that were normed on the device: a rotation may cancel them.
    expected = authority.prepare_heads(
        normed.to(CPU, torch.float32), dims.heads, None, authority.rotations(positions)[0]
    )
    turned = operators.prepare_heads(
        normed, dims.heads, None, operators.rotations(positions.to(machine.device))[0]
    )
    limits = CLOSE
    if isinstance(operators, TorchOperators):  # its cosines and products are rounded too
        limits = (4e-2, 2**-5)
    for got, right in zip(turned, expected, strict=True):
        assert_close(got, right, limits)


@pytest.mark.parametrize("num_rows", ROWS)
def test_the_activation_equals_the_authority(
    machine: Machine, operators: Operators, authority: Operators, dims: Dims, num_rows: int
) -> None:
    gate_up = random(num_rows, 2 * dims.expert_size, seed=4)
    got = operators.silu_and_mul(gate_up.to(machine.device, torch.bfloat16))
    assert_close(got, authority.silu_and_mul(gate_up))


# Experts.


@cache
def experts_of(dims: Dims) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns w13 [E, 2F, D], gate first, and w2 [E, D, F]."""
    w13 = random(dims.experts, 2 * dims.expert_size, dims.hidden, seed=5) * dims.hidden**-0.5
    w2 = random(dims.experts, dims.hidden, dims.expert_size, seed=6) * dims.expert_size**-0.5
    return w13.bfloat16().float(), w2.bfloat16().float()


def grouped(machine: Machine, dims: Dims, w13: torch.Tensor, w2: torch.Tensor) -> MoERunner:
    activation = torch_operators(dims, machine.device, torch.bfloat16).silu_and_mul
    return GroupedMMRunner(w13, w2, activation)


def fused(ops: FlashInferOps, dims: Dims, w13: torch.Tensor, w2: torch.Tensor) -> MoERunner:
    gate, up = w13.chunk(2, dim=1)
    workspace = CutlassWorkspace(ops, max_num_rows=max(ROWS), top_k=dims.top_k)
    return CutlassMoERunner(torch.cat((up, gate), dim=1), w2, workspace)


@pytest.mark.parametrize("num_rows", ROWS)
def test_experts_are_chosen_as_the_authority_does(
    machine: Machine, ops: FlashInferOps, num_rows: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, 256, generator=generator) * 2
    correction = torch.randn(256, generator=generator) / 5
    spec = RouterSpec(scores=Scores.SIGMOID, num_groups=8, num_kept_groups=4, factor=2.5)
    expected_ids, expected = choose_experts(logits, 8, spec, correction)
    ids, weights = ops.choose_experts(
        logits.to(machine.device),
        correction.to(machine.device),
        num_groups=8,
        num_kept_groups=4,
        top_k=8,
        factor=2.5,
    )
    is_alike = (ids.cpu().sort().values == expected_ids.sort().values).all(dim=1)
    assert int((~is_alike).sum()) <= num_rows // 100, (
        "but for scores that differ in their last bits"
    )
    order, expected_order = ids.cpu().argsort(), expected_ids.argsort()
    torch.testing.assert_close(
        weights.cpu().gather(1, order)[is_alike],
        expected.gather(1, expected_order)[is_alike],
        atol=1e-5,
        rtol=1e-4,
    )


def cutedsl(ops: FlashInferOps, dims: Dims, w13: torch.Tensor, w2: torch.Tensor) -> MoERunner:
    skip_without_cutedsl(ops, w2.device)
    gate, up = w13.chunk(2, dim=1)
    w31 = [CuteDslMoERunner.arrange(expert) for expert in torch.cat((up, gate), dim=1)]
    sizing = CuteDslSizing(ops, max_num_rows=max(ROWS), top_k=dims.top_k)
    return CuteDslMoERunner(torch.stack(w31), w2, sizing)


def routed(dims: Dims, num_rows: int, low: int, high: int) -> Dispatched:
    """Returns rows with different experts each, from ``low`` up to ``high``, then elsewhere."""
    generator = torch.Generator().manual_seed(num_rows)
    choices = torch.rand(num_rows, high - low, generator=generator).argsort(-1) + low
    ids = torch.full((num_rows, dims.top_k), dims.experts, dtype=torch.int32)
    ids[:, : high - low] = choices[:, : dims.top_k]
    weights = torch.rand(num_rows, dims.top_k, generator=generator)
    return Dispatched(random(num_rows, dims.hidden, seed=num_rows), ids, weights)


ROUTINGS: dict[str, Callable[[int], tuple[int, int]]] = {
    "any expert": lambda experts: (0, experts),
    "some elsewhere": lambda experts: (0, experts + 1),
    "all elsewhere": lambda experts: (experts, experts + 1),
    "all to one": lambda experts: (2, 3),
    "all to the last": lambda experts: (experts - 1, experts),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["grouped", "fused", "cutedsl"])
def test_experts_equal_the_authority(
    machine: Machine, dims: Dims, kind: str, routing: str, request: pytest.FixtureRequest
) -> None:
    weights = experts_of(dims)
    on_device = [weight.to(machine.device, torch.bfloat16) for weight in weights]
    if kind == "grouped":
        runner = grouped(machine, dims, *on_device)
    else:
        build = fused if kind == "fused" else cutedsl
        runner = build(request.getfixturevalue("ops"), dims, *on_device)
    authority = GroupedMMRunner(*weights, TorchOperators([]).silu_and_mul)
    for num_rows in ROWS:
        dispatched = routed(dims, num_rows, *ROUTINGS[routing](dims.experts))
        y = runner.run(
            Dispatched(
                dispatched.x_RD.to(machine.device, torch.bfloat16),
                dispatched.topk_ids_RK.to(machine.device),
                dispatched.topk_weights_RK.to(machine.device),
                out_RD=torch.full_like(dispatched.x_RD, torch.nan, dtype=torch.bfloat16).to(
                    machine.device
                ),
            )
        )
        assert y.dtype == torch.bfloat16
        error = largest_error(y, authority.run(dispatched))
        assert error <= EXPERTS_OFF, f"{num_rows} rows: one is off by {error:.4f} of its length"


if not IS_STAND_IN:  # there Triton has nothing to compile for

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_kernels_in_triton_equal_the_authority(check: Check, machine: Machine) -> None:
        torch.manual_seed(0)
        check(TritonOps(), machine.device)
