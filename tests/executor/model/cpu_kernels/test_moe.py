"""If this fails, experts on the CPU are wrong, or a row's bits depend on its batch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from executor.model.cpu_kernels.library import Library
from executor.model.moe.layer import Dispatched, ExpertBiases
from executor.model.moe.runner_cpu import CpuMoERunner
from executor.model.spec import ActivationSpec, ClampedSwiGlu
from tests.executor.model.cpu_kernels.kernel_cases import (
    ROUNDING,
    assert_rows_stand_alone,
    num_rows_of,
    random_bf16,
    random_shapes,
    relative_error,
)

GPT_OSS = ClampedSwiGlu(alpha=1.702, limit=7.0)


class Case:
    """Random experts, and what they make of rows in float32."""

    def __init__(self, experts: int, width: int, inner: int, has_biases: bool = False) -> None:
        self.w13 = random_bf16(experts, 2 * inner, width, seed=1, scale=width**-0.5)
        self.w2 = random_bf16(experts, width, inner, seed=2, scale=inner**-0.5)
        self.b13 = random_bf16(experts, 2 * inner, seed=3).float() * has_biases
        self.b2 = random_bf16(experts, width, seed=4).float() * has_biases
        self._packed = (
            torch.stack([CpuMoERunner.arrange(w) for w in self.w13]),
            torch.stack([CpuMoERunner.arrange_down(w) for w in self.w2]),
        )
        self._biases = ExpertBiases(self.b13, self.b2) if has_biases else None

    def run(
        self,
        kernels: Library,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: ActivationSpec = None,
    ) -> torch.Tensor:
        runner = CpuMoERunner(*self._packed, kernels, activation, self._biases)
        return runner.run(Dispatched(x, ids, weights))

    def expected(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda g, u: F.silu(g) * u,
    ) -> torch.Tensor:
        y = torch.zeros(x.shape)
        for expert in range(len(self.w2)):
            rows, places = torch.where(ids == expert)
            hidden = x[rows].float() @ self.w13[expert].float().T + self.b13[expert]
            hidden = activate(*hidden.chunk(2, dim=-1))
            out = hidden @ self.w2[expert].float().T + self.b2[expert]
            y.index_add_(0, rows, out * weights[rows, places, None])
        return y


def chosen(rows: int, top_k: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns distinct random experts for each row, and weights."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts, generator=generator).argsort(dim=-1)[:, :top_k]
    return ids.to(torch.int32), torch.rand(rows, top_k, generator=generator)


def test_experts_of_random_shapes_are_as_in_float32(kernels: Library):
    for seed, rng in enumerate(random_shapes()):
        experts, rows = rng.randint(1, 9), num_rows_of(rng)
        top_k = rng.randint(1, experts)
        case = Case(experts, 32 * rng.randint(1, 4), 16 * rng.randint(1, 5), rng.random() < 0.5)
        x, (ids, weights) = random_bf16(rows, case.w2.shape[1]), chosen(rows, top_k, experts, seed)
        y = case.run(kernels, x, ids, weights)
        assert relative_error(y, case.expected(x, ids, weights)) < 2 * ROUNDING


def test_experts_elsewhere_add_nothing(kernels: Library):
    case, x = Case(3, 64, 32), random_bf16(6, 64)
    ids, weights = chosen(6, 2, 3)
    ids[0, 1], ids[1], ids[2, 0], ids[5] = 3, 3, -1, 2**31 - 1
    y = case.run(kernels, x, ids, weights)
    assert relative_error(y, case.expected(x, ids, weights)) < 2 * ROUNDING
    assert not y[[1, 5]].any()


@pytest.mark.parametrize("rows", [1, 12, 61])
def test_all_rows_may_go_to_one_expert(kernels: Library, rows: int):
    case, x = Case(4, 64, 48), random_bf16(rows, 64)
    ids, weights = torch.full((rows, 1), 2, dtype=torch.int32), torch.rand(rows, 1)
    y = case.run(kernels, x, ids, weights)
    assert relative_error(y, case.expected(x, ids, weights)) < 2 * ROUNDING


def test_gates_are_clamped_where_the_activation_says_so(kernels: Library):
    case, x = Case(4, 64, 48, has_biases=True), random_bf16(9, 64, scale=8)
    ids, weights = chosen(9, 2, 4)

    def activate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=7)
        return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)

    y = case.run(kernels, x, ids, weights, GPT_OSS)
    assert relative_error(y, case.expected(x, ids, weights, activate)) < 2 * ROUNDING


def test_rows_stand_alone(kernels: Library):
    """The weights are enough to be shared by threads."""
    case, x = Case(6, 256, 256), random_bf16(80, 256)
    ids, weights = chosen(80, 3, 6)
    assert_rows_stand_alone(
        lambda rows: case.run(kernels, x[rows], ids[rows], weights[rows]), len(x)
    )


@pytest.mark.parametrize("activation", [None, GPT_OSS], ids=["silu", "gpt-oss"])
def test_a_row_that_is_not_finite_stays_alone(kernels: Library, activation: ActivationSpec):
    case, x = Case(3, 64, 32), random_bf16(4, 64)
    ids, weights = chosen(4, 2, 3)
    clean = case.run(kernels, x, ids, weights, activation)
    x[2, 7] = torch.nan
    y = case.run(kernels, x, ids, weights, activation)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])
