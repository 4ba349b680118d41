"""If this fails, weights in int8 stand for others than those that were loaded.

With scales that are powers of two all products are those of bfloat16, bit for bit, in every batch.
"""

from pathlib import Path

import pytest
import torch

from executor.model.cpu_kernels import library
from executor.model.cpu_kernels.linear import linear, pack, pad_bias
from executor.model.decoder.kernels import cpu_kernels
from executor.model.families import read_spec
from executor.model.moe.layer import Dispatched, ExpertBiases
from executor.model.moe.runner_cpu import CpuMoERunner
from executor.model.weights import KeptWeight
from executor.model.weights.kept import IN_INT8, INT8
from tests.executor.model.cpu_kernels.kernel_cases import (
    ROUNDING,
    num_threads,
    random_bf16,
    relative_error,
)
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.serving import Rank
from tests.support.paths import DEMO_MODEL_MLA

CPU = torch.device("cpu")


def quantised(weight: torch.Tensor) -> KeptWeight:
    kept = KeptWeight.zeros(INT8, *weight.shape, device=CPU)
    kept.quantise(weight)
    return kept


def stacked(weights: list[KeptWeight]) -> KeptWeight:
    numbers, scales = ([getattr(w, name) for w in weights] for name in ("numbers", "scales"))
    return KeptWeight(INT8, torch.stack(numbers), torch.stack(scales))


def by_powers_of_two(*shape: int, seed: int) -> tuple[KeptWeight, torch.Tensor]:
    """Returns weights in int8, and the same in bfloat16."""
    kept = quantised(random_bf16(*shape, seed=seed))
    kept.scales.copy_(torch.exp2(kept.scales.log2().round()))
    return kept, (kept.numbers * kept.scales).bfloat16()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "width", "size"), [(0, 64, 32), (1, 2, 1), (13, 70, 33), (80, 640, 300)]
)
def test_a_product_is_that_of_bfloat16_bit_for_bit(
    kernels: library.Library, num_rows: int, width: int, size: int, has_bias: bool
):
    x, bias = random_bf16(num_rows, width), pad_bias(random_bf16(size)) if has_bias else None
    kept, plain = by_powers_of_two(size, width, seed=1)
    packed, scales = pack(kept.numbers), pad_bias(kept.scales.flatten())
    expected = linear(kernels, x, pack(plain), size, bias)
    for count in (1, 4, 8, 12, 25, num_rows):  # all ways of reading a panel
        y = linear(kernels, x[:count], packed, size, bias, scales)
        assert torch.equal(y, expected[:count])
    with num_threads(2):
        assert torch.equal(linear(kernels, x, packed, size, bias, scales), expected)


@pytest.mark.parametrize("has_biases", [False, True])
def test_experts_are_those_of_bfloat16_bit_for_bit(kernels: library.Library, has_biases: bool):
    experts, width, inner, rows = 3, 96, 48, 70
    gate_ups = [by_powers_of_two(2 * inner, width, seed=e) for e in range(experts)]
    downs = [by_powers_of_two(width, inner, seed=9 + e) for e in range(experts)]
    plain = [torch.stack([weight for _, weight in pairs]) for pairs in (gate_ups, downs)]
    kept = [stacked([weight for weight, _ in pairs]) for pairs in (gate_ups, downs)]
    biases = None
    if has_biases:
        biases = ExpertBiases(torch.randn(experts, 2 * inner), torch.randn(experts, width))
    of_kept, of_plain = (CpuMoERunner(*w, kernels, None, biases) for w in (kept, plain))
    for expert in range(experts):
        of_kept.arrange_kept(*(weight[expert] for weight in kept))
        for weight, arrange in zip(plain, (of_plain.arrange, of_plain.arrange_down), strict=True):
            weight[expert].copy_(arrange(weight[expert]))
    x, weights = random_bf16(rows, width), torch.rand(rows, 2)
    ids = torch.randint(0, experts + 1, (rows, 2), dtype=torch.int32)
    for part in (slice(0, 1), slice(0, 20), slice(0, rows)):
        routed = Dispatched(x[part], ids[part], weights[part])
        assert torch.equal(of_kept.run(routed), of_plain.run(routed))


def test_any_scales_are_multiplied_in_float32(kernels: library.Library):
    x, kept = random_bf16(9, 130), quantised(torch.randn(70, 130) * torch.rand(70, 1))
    y = linear(kernels, x, pack(kept.numbers), 70, None, pad_bias(kept.scales.flatten()))
    assert relative_error(y, x.float() @ (kept.numbers * kept.scales).T) < ROUNDING


def test_each_row_has_the_scale_of_its_largest():
    weight = torch.randn(5, 64) * torch.tensor([[1e-3], [1.0], [300.0], [0.0], [1.0]])
    weight[4, 7] = torch.nan
    kept = quantised(weight)
    assert torch.equal(kept.numbers[:3].abs().amax(-1), torch.full((3,), 127, dtype=torch.int8))
    error = (kept.numbers * kept.scales - weight).abs()
    assert (error[:4] <= kept.scales[:4] * 0.5001).all()
    assert not kept.scales[3].any()
    assert kept.scales[4].isnan()


def test_a_row_is_quantised_alike_in_a_matrix_of_any_height():
    weight = random_bf16(9000, 2)
    whole = quantised(weight)
    for rows in (slice(0, 4097), slice(4095, 9000)):
        part = quantised(weight[rows])
        assert torch.equal(part.numbers, whole.numbers[rows])
        assert torch.equal(part.scales, whole.scales[rows])


@pytest.mark.parametrize("is_latent", [False, True], ids=["heads", "latents"])
def test_logits_are_near_those_of_bfloat16_and_have_the_same_bits_in_chunks(
    is_latent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = DEMO_MODEL_MLA
    if not is_latent:
        path, sizes = tmp_path, {"hidden_size": 64, "moe_intermediate_size": 40, "head_dim": 32}
        save_qwen3_moe(path, "tied", dtype=torch.bfloat16, num_experts_per_tok=4, **sizes)
    if library.load() is None:
        pytest.skip("no kernels")
    spec, prompt = read_spec(path), list(range(3, 40))

    def rank() -> Rank:
        kernels = cpu_kernels(spec, dtype=torch.bfloat16, keeping=IN_INT8)
        return Rank(path, dtype=torch.bfloat16, kernels=kernels)

    logits, chunked = rank().step({0: prompt})[0], rank()
    parts = [chunked.step({0: prompt[2:5], 3: part})[3] for part in (prompt[:13], prompt[13:])]
    assert torch.equal(torch.cat(parts), logits)
    plain = Rank(path, dtype=torch.bfloat16).step({0: prompt})[0]
    assert not torch.equal(logits, plain)
    assert relative_error(logits, plain) < 0.1
