"""If this fails, a weight that stays quantised is another part of the checkpoint than it says."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from executor.errors import CheckpointError
from executor.model.weights import Format, KeptWeight, Part, Source, WeightGroup, load_weights
from executor.model.weights.formats import Fp8Format, Mxfp4Format
from executor.model.weights.kept import INT8
from executor.model.weights.targets import rope_rows_to_halves
from tests.executor.model.weights.quantised import fp8, mxfp4
from tests.executor.support.flashinfer.cpu_kept import fp8_weight, mxfp4_weight

CPU = torch.device("cpu")


def read(weight: KeptWeight) -> torch.Tensor:
    numbers, scales = weight.numbers.contiguous(), weight.scales.contiguous()
    plain = fp8_weight if numbers.dtype == torch.float8_e4m3fn else mxfp4_weight
    return plain(numbers, scales)


def load(
    folder: Path, tensors: dict[str, torch.Tensor], source: Source, part: Part, kind: Format
) -> torch.Tensor:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    load_weights(folder, [WeightGroup({source: part})], weight_format=kind)
    assert isinstance(part.target, KeptWeight)
    return read(part.target)


@pytest.mark.parametrize(
    ("dim", "at"),
    [(0, range(320)), (0, range(128, 256)), (0, range(256, 320)), (1, range(128, 384))],
)
def test_a_part_of_fp8_is_kept_with_its_scales(dim: int, at: range, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, weight = fp8(torch.randn(320, 384), torch.bfloat16)
    shape = list(weight.shape)
    shape[dim] = len(at)
    target = KeptWeight.zeros(Fp8Format.kept_as, *shape, device=CPU)
    tensors = {f"w{suffix}": part for suffix, part in parts.items()}
    part = Part(target, dim, at, weight.shape[dim])
    kept = load(tmp_path, tensors, Source(name="w"), part, Fp8Format())
    assert kept.equal(weight.narrow(dim, at.start, len(at)))
    assert target.numbers.equal(parts[""].narrow(dim, at.start, len(at)))


def test_rows_that_turn_within_a_scale_turn_without_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, weight = fp8(torch.randn(384, 128))
    turn = rope_rows_to_halves(192, 64)
    target = KeptWeight.zeros(Fp8Format.kept_as, 384, 128, device=CPU)
    tensors = {f"w{suffix}": part for suffix, part in parts.items()}
    source, part = Source(name="w", turn=turn), Part(target, 0, range(384), 384)
    assert load(tmp_path, tensors, source, part, Fp8Format()).equal(turn(weight))


@pytest.mark.parametrize(("dim", "at"), [(0, range(16, 48)), (1, range(64, 96))])
@pytest.mark.parametrize("every", [1, 2])
def test_a_part_of_stacked_mxfp4_is_kept_inside_its_padding(
    dim: int, at: range, every: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    parts, weight = mxfp4(torch.randn(3, 96, 48 * every))  # inputs first
    matrix = weight[1].T[every - 1 :: every]
    wanted = matrix.narrow(dim, at.start, len(at))
    whole = KeptWeight.zeros(Mxfp4Format.kept_as, 2, 128, 128, device=CPU)
    source = Source(name="w", index=1, count=3, transposed=True, first=every - 1, every=every)
    tensors = {f"w{suffix}": part for suffix, part in parts.items()}
    part = Part(whole[1].crop(*wanted.shape), dim, at, matrix.shape[dim])
    assert load(tmp_path, tensors, source, part, Mxfp4Format()).equal(wanted)
    filled = read(whole)
    assert not filled[0].any()
    assert filled[1, : wanted.shape[0], : wanted.shape[1]].equal(wanted)
    assert filled.count_nonzero() == wanted.count_nonzero()


@pytest.mark.parametrize(("dim", "at"), [(0, range(128, 256)), (1, range(96, 224))])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_int8_is_made_of_the_part_that_an_executor_has(
    dim: int, at: range, is_fp8: bool, tmp_path: Path
) -> None:
    """Parts of rows are as in the whole; of columns they have scales of their own."""
    parts, weight = fp8(torch.randn(320, 256, generator=torch.Generator().manual_seed(0)))
    wanted = weight.narrow(dim, at.start, len(at))
    expected, target = (KeptWeight.zeros(INT8, *wanted.shape, device=CPU) for _ in range(2))
    expected.quantise(wanted)
    tensors = {f"w{suffix}": part for suffix, part in parts.items()} if is_fp8 else {"w": weight}
    source, part = Source(name="w"), Part(target, dim, at, weight.shape[dim])
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(tmp_path, [WeightGroup({source: part})], weight_format=Fp8Format())
    assert target.numbers.equal(expected.numbers)
    assert target.scales.equal(expected.scales)


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ({"w": torch.zeros(128, 128)}, "lacks w_scale_inv"),
        (
            {"w": torch.zeros(128, 128), "w_scale_inv": torch.ones(1, 1)},
            "w in .* has type F32; F8_E4M3",
        ),
        (
            {"w": torch.zeros(128, 128).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(2, 1)},
            r"w_scale_inv in .* has shape \[2, 1\]; this model needs \[1, 1\]",
        ),
    ],
)
def test_what_is_to_be_kept_and_is_not_quantised_is_refused_by_name(
    saved: dict[str, torch.Tensor], problem: str, tmp_path: Path
) -> None:
    target = KeptWeight.zeros(Fp8Format.kept_as, 128, 128, device=CPU)
    with pytest.raises(CheckpointError, match=problem):
        load(tmp_path, saved, Source(name="w"), Part(target, 0, range(128), 128), Fp8Format())
