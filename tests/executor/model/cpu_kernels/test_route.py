"""If this fails, rows on the CPU go to other experts than the plain router sends them to."""

import random
from dataclasses import replace

import pytest
import torch

from executor.model.cpu_kernels.library import Library
from executor.model.moe.routing import Router, choose_experts
from executor.model.spec import GroupScore, MoeSpec, RouterSpec, Scores
from tests.executor.model.cpu_kernels.kernel_cases import (
    assert_rows_stand_alone,
    num_rows_of,
    random_bf16,
    random_shapes,
)


def router_of(
    kernels: Library,
    spec: RouterSpec,
    gate: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
) -> Router:
    """Returns a router that has these weights."""
    num_experts, width = gate.shape
    spec = replace(spec, bias=bias is not None, correction_bias=correction is not None)
    moe = MoeSpec(num_experts=num_experts, top_k=top_k, intermediate_size=16, router=spec)
    router = Router(moe, width, kernels, dtype=torch.bfloat16, device=torch.device("cpu"))
    filled = (router.gate.weight, gate), (router.gate.bias, bias), (router.correction, correction)
    for parameter, value in filled:
        if parameter is not None and value is not None:
            parameter.copy_(value)
    router.gate.finish()
    return router


def random_spec(rng: random.Random) -> tuple[int, int, RouterSpec]:
    """Returns experts, how many of them a row goes to, and how they are chosen."""
    groups, size = rng.choice([1, 1, 2, 4, 8]), rng.randint(2, 24)
    spec = RouterSpec(
        scores=rng.choice(list(Scores)),
        num_groups=groups,
        num_kept_groups=rng.randint(1, groups),
        group_score=rng.choice(list(GroupScore)),
        renormalise=rng.random() < 0.5,
        factor=rng.choice([1.0, 2.5]),
        in_float32=rng.random() < 0.5,
    )
    return groups * size, rng.randint(1, min(8, spec.num_kept_groups * size)), spec


def test_rows_go_where_the_plain_router_sends_them(kernels: Library):
    for rng in random_shapes():
        experts, top_k, spec = random_spec(rng)
        x = random_bf16(num_rows_of(rng), 80, seed=experts)
        gate = random_bf16(experts, 80, seed=1, scale=0.1)
        bias = torch.linspace(-0.5, 0.5, experts).bfloat16() if rng.random() < 0.5 else None
        correction = torch.linspace(0.3, -0.3, experts) if rng.random() < 0.5 else None
        ids, weights = router_of(kernels, spec, gate, top_k, bias, correction)(x)
        logits = x.float() @ gate.float().T + (0 if bias is None else bias.float())
        expected_ids, expected_weights = choose_experts(logits, top_k, spec, correction)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("in_float32", [False, True])
def test_rows_stand_alone(kernels: Library, in_float32: bool):
    x, gate = random_bf16(80, 512), random_bf16(40, 512, seed=1)
    router = router_of(kernels, RouterSpec(in_float32=in_float32), gate, 4)
    for part in range(2):
        assert_rows_stand_alone(lambda rows, part=part: router(x[rows])[part], len(x))


def test_choices_stay_within_the_experts_whatever_the_row(kernels: Library):
    x = random_bf16(3, 64)
    x[0, 0], x[1] = torch.nan, 3e38
    for spec in (RouterSpec(), RouterSpec(scores=Scores.SIGMOID, num_groups=4, num_kept_groups=2)):
        ids, _ = router_of(kernels, spec, random_bf16(8, 64, seed=1), 4)(x)
        assert ((ids >= 0) & (ids < 8)).all()
