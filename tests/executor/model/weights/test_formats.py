"""If this fails, a quantised checkpoint serves other numbers than it holds, or loads unscaled ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from executor.errors import CheckpointError
from executor.model.weights import Format, Part, Source, WeightGroup, load_weights
from executor.model.weights.formats import Fp8Format, Int4Format, Mxfp4Format

ROWS, COLUMNS = 200, 300  # of FP8: two blocks and three, the last ones partial
Saved = tuple[dict[str, torch.Tensor], torch.Tensor]


def fp8(scale_type: torch.dtype = torch.float32) -> Saved:
    """Returns tensors, and the weight that they stand for, computed element by element."""
    torch.manual_seed(0)
    weight = (torch.randn(ROWS, COLUMNS) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3).add(0.01).to(scale_type)
    blocks = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"w": weight, "w_scale_inv": scale}, weight.float() * blocks[:ROWS, :COLUMNS]


def mxfp4(count: int = 2, inputs: int = 96, outputs: int = 10) -> Saved:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 135, blocks.shape[:-1], dtype=torch.uint8)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    weight = torch.zeros(count, inputs, outputs)
    for e in range(count):
        for o in range(outputs):
            for i in range(inputs):
                byte = int(blocks[e, o, i // 32, i % 32 // 2])
                nibble = byte >> 4 if i % 2 else byte & 15
                sign = -1 if nibble & 8 else 1
                exponent = int(scales[e, o, i // 32]) - 127
                weight[e, i, o] = sign * table[nibble & 7] * 2.0**exponent
    return {"w_blocks": blocks, "w_scales": scales}, weight


def int4(rows: int = 10, columns: int = 104) -> Saved:
    """The last group of a row is a quarter of one."""
    torch.manual_seed(0)
    numbers = torch.randint(-8, 8, (rows, columns))
    scale = torch.rand(rows, -(-columns // 32)).bfloat16()
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for i in range(8):
        packed |= (numbers[:, i::8] + 8) << 4 * i
    tensors = {
        "w_packed": packed.where(packed < 2**31, packed - 2**32).int(),
        "w_scale": scale,
        "w_shape": torch.tensor([rows, columns]),
    }
    return tensors, numbers * scale.float().repeat_interleave(32, 1)[:, :columns]


FORMATS: dict[str, tuple[Format, Callable[[], Saved]]] = {
    "fp8": (Fp8Format(), fp8),
    "fp8 with scales in F8_E8M0": (Fp8Format(), lambda: fp8(torch.float8_e8m0fnu)),
    "mxfp4": (Mxfp4Format(), mxfp4),
    "int4": (Int4Format(), int4),
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


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_a_quantised_weight_is_that_part_of_the_weight(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Parts that cut blocks, too, and every second row, as one of two that alternate."""
    weight_format, new = FORMATS[name]
    tensors, weight = new()
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


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "int4"])
def test_a_quantised_weight_without_one_of_its_tensors_is_named(name: str, tmp_path: Path) -> None:
    """Whether it is needed or not: what is left of it says that the checkpoint is not whole."""
    weight_format, new = FORMATS[name]
    tensors, weight = new()
    for absent in tensors:
        if absent == "w":
            continue  # below
        left = {key: value for key, value in tensors.items() if key != absent}
        save(tmp_path, left)
        groups = [WeightGroup({"w": torch.zeros(weight.shape)})]
        problem = rf"lacks {absent}" if name != "fp8" else r"w in .* has type F8_E4M3; .* scales"
        with pytest.raises(CheckpointError, match=problem):
            load_weights(tmp_path, groups, weight_format=weight_format)
        if name != "fp8":
            with pytest.raises(CheckpointError, match=rf"lacks {absent}"):
                load_weights(tmp_path, [], weight_format=weight_format, skipped=lambda _: True)


def test_a_scale_without_its_weight_or_with_a_plain_one_is_named(tmp_path: Path) -> None:
    tensors, weight = fp8()
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
    tensors, weight = fp8()
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
        ("mxfp4", {"w_scales": torch.zeros(2, 10, 4, dtype=torch.uint8)}, "have one scale"),
        ("mxfp4", {"w_blocks": torch.zeros(2, 10, 3, 16)}, "U8 for both"),
        ("int4", {"w_scale": torch.zeros(10, 3)}, "groups of 32"),
        ("int4", {"w_packed": torch.zeros(10, 13)}, "packed in I32"),
        ("int4", {"w_shape": torch.tensor([10, 100])}, r"w_shape .* says \[10, 100\], not \[10"),
    ],
)
def test_tensors_of_a_format_that_do_not_fit_one_another_are_named(
    name: str, wrong: dict[str, torch.Tensor], problem: str, tmp_path: Path
) -> None:
    weight_format, new = FORMATS[name]
    tensors, weight = new()
    save(tmp_path, tensors | wrong)
    groups = [WeightGroup({"w": torch.zeros(weight.shape)})]
    with pytest.raises(CheckpointError, match=problem):
        load_weights(tmp_path, groups, weight_format=weight_format)


def test_a_quantised_weight_of_another_executor_is_not_read(tmp_path: Path) -> None:
    """``skipped`` knows weights; the tensors of one go with it. A plain one may stand beside it."""
    tensors, _ = fp8()
    save(tmp_path, {**tensors, "norm": torch.ones(3)})
    norm = torch.zeros(3)
    groups = [WeightGroup({"norm": norm})]
    load_weights(tmp_path, groups, weight_format=Fp8Format(), skipped=lambda name: name == "w")
    assert norm.tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"has w, w_scale_inv, for which"):
        load_weights(tmp_path, groups, weight_format=Fp8Format())
