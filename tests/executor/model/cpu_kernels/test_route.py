"""If this fails, rows on the CPU go to other experts than the plain router sends them to."""

import ctypes
import random

import pytest
import torch

from executor.model.cpu_kernels.linear import pack, pad_bias
from executor.model.cpu_kernels.route import RouterRule, route
from executor.model.moe.routing import choose_experts
from executor.model.spec import GroupScore, RouterSpec, Scores
from tests.executor.model.cpu_kernels.kernel_cases import (
    assert_rows_stand_alone,
    num_rows_of,
    random_bf16,
    random_shapes,
)


def rule_of(spec: RouterSpec, num_experts: int, top_k: int) -> RouterRule:
    return RouterRule(
        num_experts,
        top_k,
        spec.num_groups,
        spec.num_kept_groups,
        spec.scores is Scores.SIGMOID,
        spec.group_score is GroupScore.TOP2,
        spec.renormalise,
        spec.factor,
    )


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
    )
    return groups * size, rng.randint(1, min(8, spec.num_kept_groups * size)), spec


def test_rows_go_where_the_plain_router_sends_them(kernels: ctypes.CDLL):
    for rng in random_shapes():
        experts, top_k, spec = random_spec(rng)
        x = random_bf16(num_rows_of(rng), 80, seed=experts)
        gate = random_bf16(experts, 80, seed=1, scale=0.1)
        bias = torch.linspace(-0.5, 0.5, experts) if rng.random() < 0.5 else None
        correction = torch.linspace(0.3, -0.3, experts) if rng.random() < 0.5 else None
        packed = gate.float() if rng.random() < 0.5 else pack(gate)
        padded = None if bias is None else pad_bias(bias)
        ids, weights = route(kernels, x, rule_of(spec, experts, top_k), packed, padded, correction)
        logits = x.float() @ gate.float().T + (0 if bias is None else bias)
        expected_ids, expected_weights = choose_experts(logits, top_k, spec, correction)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("in_float32", [False, True])
def test_rows_stand_alone(kernels: ctypes.CDLL, in_float32: bool):
    x, gate = random_bf16(80, 512), random_bf16(40, 512, seed=1)
    packed = gate.float() if in_float32 else pack(gate)
    rule = rule_of(RouterSpec(), 40, 4)
    for part in range(2):
        assert_rows_stand_alone(
            lambda rows, part=part: route(kernels, x[rows], rule, packed)[part], len(x)
        )


def test_choices_stay_within_the_experts_whatever_the_row(kernels: ctypes.CDLL):
    x = random_bf16(3, 64)
    x[0, 0], x[1] = torch.nan, 3e38
    for spec in (RouterSpec(), RouterSpec(scores=Scores.SIGMOID, num_groups=4, num_kept_groups=2)):
        ids, _ = route(kernels, x, rule_of(spec, 8, 4), pack(random_bf16(8, 64, seed=1)))
        assert ((ids >= 0) & (ids < 8)).all()
