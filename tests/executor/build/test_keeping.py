"""If this fails, weights are dequantised without a word, or kept where nothing can run them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor.build import executor
from executor.build.devices import Cpu, Cuda, Device
from executor.build.keeping import keepable, plan_keeping, weight_bytes
from executor.build.plan import Blueprint
from executor.config import ExecutorConfig
from executor.model.cpu_kernels import library
from executor.model.decoder.kernels import Kernels, stacked_kernels
from executor.model.families import read_spec
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.spec import ModelSpec
from executor.model.weights import KeptAs
from executor.model.weights.formats import Fp8Format, Mxfp4Format
from executor.model.weights.kept import DEQUANTISED, IN_INT8, Keeping
from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.model.weights.kept_models import LATENT, twins
from tests.executor.model.weights.quantised import mxfp4
from tests.executor.support.checkpoints import save_latent_model
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer
from tests.executor.support.steps import prompt_part, step

FP8, MXFP4 = Fp8Format.kept_as, Mxfp4Format.kept_as


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twins(tmp_path_factory.mktemp("fp8"), save_latent_model, "deepseek_v3", **LATENT)[0]


@pytest.fixture(scope="module")
def in_mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twins(tmp_path_factory.mktemp("mxfp4"), save_model, "gpt_oss", mxfp4)[0]


def could_keep(path: Path, **settings: Any) -> tuple[Keeping, list[str]]:
    return keepable(ExecutorConfig(model=path, **settings), read_spec(path), path)


def test_what_kernels_read_is_what_the_tensors_say(
    in_fp8: Path, in_mxfp4: Path, tmp_path: Path
) -> None:
    assert could_keep(in_fp8) == (Keeping(FP8, FP8), [])
    assert could_keep(in_mxfp4) == (Keeping(experts=MXFP4), [])
    save_model(tmp_path, "gpt_oss")
    assert could_keep(tmp_path) == (DEQUANTISED, [])


@pytest.mark.parametrize(
    ("sizes", "settings", "keeping", "problem"),
    [
        ({}, {"moe_runner": "grouped"}, Keeping(None, FP8), "experts: moe_runner=grouped takes"),
        ({"moe_intermediate_size": 136}, {}, Keeping(None, FP8), "in multiples of 128, not 136"),
    ],
)
def test_experts_that_no_kernel_takes_are_dequantised_for_a_reason(
    sizes: dict[str, int],
    settings: dict[str, str],
    keeping: Keeping,
    problem: str,
    tmp_path: Path,
) -> None:
    path, _ = twins(tmp_path, save_latent_model, "deepseek_v3", **LATENT | sizes)
    found, [said] = could_keep(path, **settings)
    assert found == keeping
    assert problem in said


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.self_attn.o_proj.weight", "projections"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", "experts"),
    ],
)
def test_one_plain_weight_among_quantised_ones_dequantises_its_kind(
    in_fp8: Path, name: str, kind: str, tmp_path: Path
) -> None:
    tensors = load_file(in_fp8 / "model.safetensors")
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: tensors[name].bfloat16()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((in_fp8 / "config.json").read_text())
    keeping, [said] = could_keep(tmp_path)
    assert said.startswith(f"{kind}: ")
    assert sum(part is None for part in keeping) == 1


class Hopper(Cpu):
    """A CPU with the stand-in's kernels."""

    def __init__(self, ops: FlashInferOps | None = None) -> None:
        super().__init__()
        self.stand_in = ops

    def why_dequantised(self, kept_as: KeptAs) -> str | None:
        return None

    def kernels(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        max_moe_rows: int,
        keeping: Keeping = DEQUANTISED,
    ) -> Kernels:
        return stacked_kernels(
            model,
            dtype=dtype,
            device=self.torch_device,
            ops=self.stand_in,
            moe_runner="cutlass",
            max_moe_rows=max_moe_rows,
            keeping=keeping,
        )


def planned(path: Path, device: Device, **settings: Any) -> tuple[Keeping, list[Any]]:
    blueprint = Blueprint.of(ExecutorConfig(model=path, **settings))
    with capture_logs() as logs:
        keeping = plan_keeping(blueprint, device, blueprint.model, path)
    return keeping, [log for log in logs if log["event"] == "weights_dequantised"]


def test_a_device_without_kernels_dequantises_and_says_what_that_costs(in_fp8: Path) -> None:
    assert planned(in_fp8, Hopper()) == (Keeping(FP8, FP8), [])
    keeping, [said] = planned(in_fp8, Cpu())
    assert keeping == DEQUANTISED
    assert "a CPU" in said["reason"]
    blueprint = Blueprint.of(ExecutorConfig(model=in_fp8))
    sizes = [weight_bytes(blueprint, how) for how in (DEQUANTISED, Keeping(FP8, FP8))]
    assert said["more_bytes"] == sizes[0] - sizes[1] > sizes[1]


def test_settings_decide_before_the_device(in_fp8: Path) -> None:
    keeping, [said] = planned(in_fp8, Hopper(), quantized_weights="dequantize")
    assert keeping == DEQUANTISED
    assert said["reason"] == "quantized_weights=dequantize"
    assert planned(in_fp8, Hopper(), quantized_weights="keep")[0] == Keeping(FP8, FP8)
    for device, settings, problem in (
        (Cpu(), {}, "keep: a CPU .*; set quantized_weights=auto"),
        (Hopper(), {"moe_runner": "cutedsl"}, "keep: experts: moe_runner=cutedsl takes none"),
    ):
        with pytest.raises(ValueError, match=problem):
            planned(in_fp8, device, quantized_weights="keep", **settings)


def test_int8_is_made_of_any_format_where_a_cpu_has_kernels(
    in_fp8: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"weights": "int8", "dtype": "bfloat16"}
    if library.load() is not None:
        assert planned(in_fp8, Cpu(), **settings) == (IN_INT8, [])
    monkeypatch.setenv(library.CHOICE, "off")
    for path, device, asked, problem in (
        (in_fp8, Cpu(), {}, "none: LOCKSTEP_CPU_KERNELS=off; or set weights=auto"),
        (in_fp8, object.__new__(Cuda), {}, "only a CPU has kernels for it: set device=cpu"),
        (in_fp8, Cpu(), {"dtype": "float32"}, "dtype is float32: set dtype=bfloat16, or weights"),
        (tiny_checkpoint, Cpu(), {}, "hidden_size in multiples of 32, not 48: set weights=auto"),
    ):
        with pytest.raises(ValueError, match=f"^weights=int8: .*{problem}"):
            planned(path, device, **settings | asked)


@pytest.mark.parametrize(
    ("capability", "cuda", "kept_as", "problem"),
    [
        ((9, 0), "12.8", FP8, None),
        ((9, 0), "12.6", FP8, "CUDA 12.8"),
        ((9, 0), "12.6", MXFP4, None),
        ((10, 0), "13.0", FP8, "SM100"),
        ((8, 0), "13.0", MXFP4, "SM80"),
    ],
)
def test_a_gpu_keeps_what_its_kernels_read(
    capability: tuple[int, int],
    cuda: str,
    kept_as: Any,
    problem: str | None,
    ops: FlashInferOps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    gpu = object.__new__(Cuda)
    gpu.torch_device, gpu.ops = torch.device("cuda", 0), ops
    said = gpu.why_dequantised(kept_as)
    assert (said is None) if problem is None else (problem in said)
    del ops.library.gemm.fp8_blockscale_gemm_sm90
    del ops.library.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm
    if problem is None:
        assert "this FlashInfer lacks" in gpu.why_dequantised(kept_as)
    gpu.ops = None
    assert "FlashInfer is not installed" in gpu.why_dequantised(kept_as)


def test_bytes_of_weights_that_are_kept_are_those_of_the_checkpoint(in_fp8: Path) -> None:
    """But for kv_b, whose halves are in the type of the model."""
    tensors = load_file(in_fp8 / "model.safetensors")
    expected = sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        if "kv_b_proj" in name:
            expected += 3 * tensor.nbytes if name.endswith("weight") else -tensor.nbytes
    blueprint = Blueprint.of(ExecutorConfig(model=in_fp8))
    assert weight_bytes(blueprint, Keeping(FP8, FP8)) == expected


def test_bytes_of_kept_experts_count_their_padding(in_mxfp4: Path) -> None:
    blueprint = Blueprint.of(ExecutorConfig(model=in_mxfp4))
    moe, layers = blueprint.model.moe, len(blueprint.model.layers)
    assert moe is not None
    less = weight_bytes(blueprint, DEQUANTISED) - weight_bytes(blueprint, Keeping(MXFP4))
    size, width = blueprint.model.hidden_size, moe.intermediate_size
    plain = 3 * size * width * 4 + (2 * width + size) * 4
    kept = 3 * 128 * 128 * 17 // 32  # both sizes are below 128; a number takes half a byte
    kept += 3 * 128 * 4  # biases
    assert less == layers * moe.num_experts * (plain - kept)


def test_an_executor_runs_on_what_it_keeps(
    library: CpuFlashInfer, ops: FlashInferOps, in_fp8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "open_device", lambda config, dtype: Hopper(ops))
    settings: dict[str, Any] = {"num_kv_blocks": 8, "max_num_seqs": 2, "block_size": 4}
    worker, description = executor.build_worker(
        ExecutorConfig(model=in_fp8, dtype="bfloat16", **settings)
    )
    assert description.agreement["kept_weights"] == "['experts', 'linears']"
    library.calls.clear()
    worker.join(1, "")
    part = prompt_part(0, [5, 9, 11], [1])
    worker.execute(step(1, part, num_tokens=[3], num_logits=[1]))
    assert {"cutlass_fused_moe", "fp8_blockscale_gemm_sm90"} <= set(library.names())
