"""If this fails, a quantised checkpoint serves other numbers than it holds, or loads unscaled ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from executor.errors import CheckpointError
from executor.model.weights import Format, Part, Source, WeightGroup, load_weights
from executor.model.weights.formats import (
    Fp8Format,
    Fp8RowFormat,
    Int4Format,
    Mxfp4Format,
    Nvfp4Format,
    Nvfp4PackedFormat,
)
from tests.executor.model.weights.quantised import Quantised, fp8, fp8_rows, int4, mxfp4, nvfp4

Saved = tuple[dict[str, torch.Tensor], torch.Tensor]

# The last blocks of FP8 and the last group of INT4 are partial.
FORMATS: dict[str, tuple[Format, Callable[[torch.Tensor], Quantised], tuple[int, ...]]] = {
    "fp8": (Fp8Format(), fp8, (200, 300)),
    "fp8 with scales in F8_E8M0": (
        Fp8Format(),
        partial(fp8, scale_type=torch.float8_e8m0fnu),
        (200, 300),
    ),
    "fp8 rows": (Fp8RowFormat(), fp8_rows, (200, 300)),
    "mxfp4": (Mxfp4Format(), mxfp4, (2, 96, 10)),
    "int4": (Int4Format(), int4, (10, 104)),
    "nvfp4": (Nvfp4Format(), nvfp4, (10, 112)),
    "nvfp4 packed": (Nvfp4PackedFormat(), partial(nvfp4, packed=True), (10, 112)),
}
PARTS = [(0, range(200)), (0, range(3, 9)), (1, range(7, 41)), (1, range(64, 96)), (0, range(2, 2))]


def test_every_fp8_number_is_what_pytorch_says_that_it_is(tmp_path: Path) -> None:
    """NaN included: it is not to pass for a large number."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    save(tmp_path, {"w": numbers, "w_scale_inv": torch.ones(1, 1)})
    target = torch.zeros(2, 128)
    load_weights(tmp_path, [WeightGroup({"w": target})], weight_format=Fp8Format())
    assert target.isnan().sum() == 2
    torch.testing.assert_close(target, numbers.float(), rtol=0, atol=0, equal_nan=True)


def new(name: str) -> tuple[Format, Saved]:
    """Returns a format, the tensors of a weight w in it, and the weight that they stand for."""
    weight_format, quantise, shape = FORMATS[name]
    torch.manual_seed(0)
    parts, weight = quantise(torch.randn(shape) / 4)
    return weight_format, ({f"w{suffix}": part for suffix, part in parts.items()}, weight)


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_a_quantised_weight_is_that_part_of_the_weight(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Parts that cut blocks, too, and every second row, as one of two that alternate."""
    weight_format, (tensors, weight) = new(name)
    save(tmp_path, tensors)
    stacked = {"index": 1, "count": len(weight), "transposed": True} if weight.dim() == 3 else {}
    matrix = weight[1].T if stacked else weight
    for every in (1, 2):
        source = Source(name="w", every=every, first=every - 1, **stacked)
        wanted = matrix[every - 1 :: every]
        for dim, at in PARTS:
            at = range(*slice(at.start, at.stop).indices(wanted.shape[dim]))
            piece = wanted.narrow(dim, at.start, len(at))
            target = torch.zeros(piece.shape, dtype=dtype)
            group = WeightGroup({source: Part(target, dim, at, wanted.shape[dim])})
            load_weights(tmp_path, [group], weight_format=weight_format)
            assert target.equal(piece.to(dtype)), (every, dim, at)


@pytest.mark.parametrize("name", ["fp8", "fp8 rows", "mxfp4", "int4", "nvfp4", "nvfp4 packed"])
def test_a_quantised_weight_without_one_of_its_tensors_is_named(name: str, tmp_path: Path) -> None:
    """Whether it is needed or not: what is left of it says that the checkpoint is not whole."""
    weight_format, (tensors, weight) = new(name)
    for absent in tensors:
        if absent == "w":
            continue  # below
        left = {key: value for key, value in tensors.items() if key != absent}
        save(tmp_path, left)
        groups = [WeightGroup({"w": torch.zeros(weight.shape)})]
        is_fp8 = name.startswith("fp8")
        problem = r"w in .* has type F8_E4M3; .* scales" if is_fp8 else rf"lacks {absent}"
        with pytest.raises(CheckpointError, match=problem):
            load_weights(tmp_path, groups, weight_format=weight_format)
        if not is_fp8:
            with pytest.raises(CheckpointError, match=rf"lacks {absent}"):
                load_weights(tmp_path, [], weight_format=weight_format, skipped=lambda _: True)


def test_a_scale_without_its_weight_or_with_a_plain_one_is_named(tmp_path: Path) -> None:
    _, (tensors, weight) = new("fp8")
    groups = [WeightGroup({"w": torch.zeros(weight.shape)})]
    save(tmp_path, {"w_scale_inv": tensors["w_scale_inv"]})
    with pytest.raises(CheckpointError, match=r"lacks w$"):
        load_weights(tmp_path, [], weight_format=Fp8Format(), skipped=lambda _: True)
    save(tmp_path, tensors | {"w": weight})
    with pytest.raises(CheckpointError, match=r"has w F32 .*: FP8 weights are F8_E4M3"):
        load_weights(tmp_path, groups, weight_format=Fp8Format())


@pytest.mark.parametrize("weight_format", [None, Mxfp4Format()])
def test_fp8_numbers_are_never_loaded_unscaled(
    weight_format: Format | None, tmp_path: Path
) -> None:
    _, (tensors, weight) = new("fp8")
    groups = [WeightGroup({"w": torch.zeros(weight.shape)})]
    save(tmp_path, {"w": tensors["w"]})
    with pytest.raises(CheckpointError, match=r"w in .* has type F8_E4M3; BF16.* can be loaded"):
        load_weights(tmp_path, groups, weight_format=weight_format)
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"has w_scale_inv, for which .* no place"):
        load_weights(tmp_path, groups, weight_format=weight_format)


@pytest.mark.parametrize(
    ("name", "wrong", "problem"),
    [
        ("fp8", {"w_scale_inv": torch.zeros(2, 2)}, r"blocks of 128 there are \[2, 3\] scales"),
        ("fp8", {"w_scale_inv": torch.zeros(2, 3, dtype=torch.int32)}, r"scales of F32"),
        ("fp8 rows", {"w_scale": torch.zeros(200)}, "each row has one scale"),
        ("fp8 rows", {"w": torch.zeros(200, 300)}, "FP8 weights are F8_E4M3"),
        ("mxfp4", {"w_scales": torch.zeros(2, 10, 4, dtype=torch.uint8)}, "have one scale"),
        ("mxfp4", {"w_blocks": torch.zeros(2, 10, 3, 16)}, "U8 for both"),
        ("int4", {"w_scale": torch.zeros(10, 3)}, "groups of 32"),
        ("int4", {"w_packed": torch.zeros(10, 13)}, "packed in I32"),
        ("nvfp4", {"w_scale": torch.zeros(10, 4).to(torch.float8_e4m3fn)}, "8 bytes of a row have"),
        ("nvfp4", {"w_scale_2": torch.ones(2)}, "8 bytes of a row have a scale, and all together"),
        ("nvfp4", {"w_scale": torch.zeros(10, 7)}, "packed in U8, with scales of F8_E4M3"),
        ("int4", {"w_shape": torch.tensor([10, 100])}, r"w_shape .* says \[10, 100\], not \[10"),
    ],
)
def test_tensors_of_a_format_that_do_not_fit_one_another_are_named(
    name: str, wrong: dict[str, torch.Tensor], problem: str, tmp_path: Path
) -> None:
    weight_format, (tensors, weight) = new(name)
    save(tmp_path, tensors | wrong)
    groups = [WeightGroup({"w": torch.zeros(weight.shape)})]
    with pytest.raises(CheckpointError, match=problem):
        load_weights(tmp_path, groups, weight_format=weight_format)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 packed"])
def test_scales_of_activations_belong_to_their_weight_and_stay_unread(
    name: str, tmp_path: Path
) -> None:
    weight_format, (tensors, weight) = new(name)
    assert isinstance(weight_format, Nvfp4Format)
    renamed = {f"x.weight{key[1:]}": tensor for key, tensor in tensors.items()}
    save(tmp_path, renamed | {f"x.{last}": torch.ones(()) for last in weight_format.unread})
    target = torch.zeros(weight.shape)
    load_weights(tmp_path, [WeightGroup({"x.weight": target})], weight_format=weight_format)
    assert target.equal(weight)


def test_a_quantised_weight_of_another_executor_is_not_read(tmp_path: Path) -> None:
    """``skipped`` knows weights; the tensors of one go with it. A plain one may stand beside it."""
    _, (tensors, _) = new("fp8")
    save(tmp_path, {**tensors, "norm": torch.ones(3)})
    norm = torch.zeros(3)
    groups = [WeightGroup({"norm": norm})]
    load_weights(tmp_path, groups, weight_format=Fp8Format(), skipped=lambda name: name == "w")
    assert norm.tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"has w, w_scale_inv, for which"):
        load_weights(tmp_path, groups, weight_format=Fp8Format())
