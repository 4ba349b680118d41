"""If this fails, tokens go to other experts than the model was trained with, or with other weights."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor.model.layers.operators import TorchOperators
from executor.model.moe.routing import Router, choose_experts
from executor.model.moe.shared import SharedExpert
from executor.model.spec import GroupScore, MoeSpec, RouterSpec, Scores, SharedSpec

E, K, GROUPS, KEPT = 16, 3, 4, 2
CPU = torch.device("cpu")
Choice = dict[int, float]  # experts and their weights, in the order of choice


def best(scores: list[float], count: int, among: list[int] | None = None) -> list[int]:
    places = range(len(scores)) if among is None else among
    return sorted(places, key=lambda i: -scores[i])[:count]


def softmax(z: list[float]) -> list[float]:
    total = sum(math.exp(x - max(z)) for x in z)
    return [math.exp(x - max(z)) / total for x in z]


def qwen(z: list[float], bias: list[float]) -> Choice:
    p = softmax(z)
    return {i: p[i] for i in best(p, K)}


def mixtral(z: list[float], bias: list[float]) -> Choice:
    chosen = qwen(z, bias)
    return {i: p / sum(chosen.values()) for i, p in chosen.items()}


def gpt_oss(z: list[float], bias: list[float]) -> Choice:
    chosen = best(z, K)
    return dict(zip(chosen, softmax([z[i] for i in chosen]), strict=True))


def deepseek_v2(z: list[float], bias: list[float]) -> Choice:
    p, size = softmax(z), E // GROUPS
    kept = best([max(p[g * size : (g + 1) * size]) for g in range(GROUPS)], KEPT)
    return {i: 16 * p[i] for i in best(p, K, [i for i in range(E) if i // size in kept])}


def deepseek_v3(
    z: list[float], bias: list[float], groups: int = GROUPS, kept: int = KEPT
) -> Choice:
    scores, size = [1 / (1 + math.exp(-x)) for x in z], E // groups
    corrected = [s + b for s, b in zip(scores, bias, strict=True)]
    by_group = [sorted(corrected[g * size : (g + 1) * size]) for g in range(groups)]
    left = best([sum(group[-2:]) for group in by_group], kept)
    chosen = best(corrected, K, [i for i in range(E) if i // size in left])
    total = sum(scores[i] for i in chosen)
    return {i: 2.5 * scores[i] / total for i in chosen}


def kimi(z: list[float], bias: list[float]) -> Choice:
    return deepseek_v3(z, bias, groups=1, kept=1)


SIGMOID = {"scores": Scores.SIGMOID, "correction_bias": True, "factor": 2.5}
KINDS: dict[str, tuple[Callable[..., Choice], RouterSpec]] = {
    "softmax": (qwen, RouterSpec(renormalise=False)),
    "softmax, renormalised": (mixtral, RouterSpec()),
    "softmax of the chosen": (gpt_oss, RouterSpec()),
    "softmax, groups by their best": (
        deepseek_v2,
        RouterSpec(
            num_groups=GROUPS,
            num_kept_groups=KEPT,
            group_score=GroupScore.MAX,
            renormalise=False,
            factor=16,
        ),
    ),
    "sigmoid, groups by their best two": (
        deepseek_v3,
        RouterSpec(num_groups=GROUPS, num_kept_groups=KEPT, **SIGMOID),
    ),
    "sigmoid, no groups": (kimi, RouterSpec(**SIGMOID)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shift", [0.0, -2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_router_equals_a_plain_loop(kind: str, shift: float, dtype: torch.dtype) -> None:
    """Shifted, all corrected scores are negative: then a group that counts as 0 would win."""
    authority, spec = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, E, generator=generator).to(dtype)
    logits += torch.arange(E) / 64  # no two of bfloat16 alike, which could be chosen either way
    bias = torch.randn(E, generator=generator) * 0.3 + shift
    ids, weights = choose_experts(logits, K, spec, bias if spec.correction_bias else None)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for z, row_ids, row_weights in zip(logits, ids.tolist(), weights, strict=True):
        if len(set(z.tolist())) < E:
            continue
        expected = authority(z.double().tolist(), bias.double().tolist())
        assert row_ids == list(expected)
        torch.testing.assert_close(row_weights, torch.tensor(list(expected.values())))


def test_scores_that_are_all_zero_have_weights_of_zero() -> None:
    spec = RouterSpec(scores=Scores.SIGMOID)
    _, weights = choose_experts(torch.full((2, E), -1e4), K, spec)
    assert weights.tolist() == [[0.0] * K] * 2


def test_no_rows_are_routed_nowhere() -> None:
    spec = KINDS["sigmoid, groups by their best two"][1]
    ids, weights = choose_experts(torch.zeros(0, E), K, spec, torch.zeros(E))
    assert ids.shape == weights.shape == (0, K)


@pytest.mark.parametrize("in_float32", [True, False])
def test_logits_are_the_product_of_float32_copies_where_the_model_says_so(in_float32: bool) -> None:
    spec = RouterSpec(in_float32=in_float32, bias=True)
    moe = MoeSpec(num_experts=E, top_k=K, intermediate_size=8, router=spec)
    router = Router(moe, 32, dtype=torch.bfloat16, device=CPU)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(E, 32, generator=generator) / 5 + 1e-3
    bias = torch.randn(E, generator=generator)
    x = torch.randn(9, 32, generator=generator).bfloat16()
    assert router.gate.bias is not None
    router.gate.weight.copy_(weight)
    router.gate.bias.copy_(bias)
    router.gate.finish()
    ids, weights = router(x)
    expected = choose_experts(x.float() @ weight.T + bias, K, spec)
    is_exact = torch.equal(ids, expected[0]) and torch.allclose(weights, expected[1], rtol=1e-5)
    assert is_exact is in_float32


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_groups": 3}, "16 experts do not divide into n_group=3"),
        ({"num_groups": 16}, "n_group=16 leaves 1 of 16 experts to a group"),
        ({"num_groups": 4, "num_kept_groups": 5}, "topk_group=5 of n_group=4"),
        (
            {"num_groups": 8, "num_kept_groups": 1},
            "num_experts_per_tok=3: the topk_group=1 .* 2 ex",
        ),
    ],
    ids=["groups", "small groups", "kept", "top k"],
)
def test_groups_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    moe = MoeSpec(num_experts=E, top_k=K, intermediate_size=8, router=RouterSpec(**sizes))
    with pytest.raises(ValueError, match=message):
        Router(moe, 8, dtype=torch.float32, device=CPU)


# Shared experts.


@pytest.mark.parametrize("gated", [True, False])
def test_a_shared_expert_is_a_gated_mlp(gated: bool) -> None:
    shared = SharedExpert(
        SharedSpec(intermediate_size=24, gated=gated),
        16,
        TorchOperators([]),
        None,
        dtype=torch.float32,
        device=CPU,
    )
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for group in shared.weight_groups("shared_expert.", "scale.weight"):
        for name, target in group.targets.items():
            assert isinstance(target, torch.Tensor)
            tensors[name] = torch.randn(target.shape, generator=generator) / 4
            target.copy_(tensors[name])
        group.finish()
    x = torch.randn(5, 16, generator=generator)
    gate, up, down = (
        tensors[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    if gated:
        expected *= (x @ tensors["scale.weight"].T).sigmoid()
    torch.testing.assert_close(shared(x), expected)
    assert len(tensors) == 3 + gated
