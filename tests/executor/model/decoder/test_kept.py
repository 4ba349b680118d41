"""If this fails, a model whose weights stay quantised is another one than its dequantised twin.

The kernels have never run on a GPU; a stand-in computes what their arguments say.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from executor.model.decoder.kernels import Kernels, Peers, stacked_kernels
from executor.model.families import load_model, read_spec
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.weights import KeptWeight, Part
from executor.model.weights.formats import Fp8Format, Mxfp4Format
from executor.model.weights.kept import DEQUANTISED, Keeping
from executor.model.weights.targets import Cut
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.layout import Place, Topology
from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.model.weights.kept_models import LATENT, Quantise, Save, twins
from tests.executor.model.weights.quantised import fp8, mxfp4
from tests.executor.support.checkpoints import save_latent_model, save_qwen3_moe
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer
from tests.executor.support.flashinfer.cpu_kept import fp8_weight
from tests.executor.support.serving import Rank

HEADS = {"hidden_size": 128, "num_hidden_layers": 1, "head_dim": 128, "moe_intermediate_size": 128}
KEPT_FP8 = Keeping(Fp8Format.kept_as, Fp8Format.kept_as)


def kernels(path: Path, ops: FlashInferOps, keeping: Keeping) -> Kernels:
    return stacked_kernels(
        read_spec(path),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        ops=ops,
        moe_runner="cutlass",
        max_moe_rows=64,
        keeping=keeping,
    )


@pytest.mark.parametrize(
    ("save", "shape", "quantise", "sizes", "keeping"),
    [
        (save_latent_model, "deepseek_v3", fp8, LATENT, KEPT_FP8),
        (save_latent_model, "deepseek_v2_lite", fp8, LATENT | {"q_lora_rank": None}, KEPT_FP8),
        (save_qwen3_moe, "biased", fp8, HEADS, KEPT_FP8),
        (save_model, "gpt_oss", mxfp4, {}, Keeping(experts=Mxfp4Format.kept_as)),
    ],
    ids=["latents", "latents at once", "heads with biases", "gpt-oss"],
)
def test_a_model_that_keeps_its_weights_answers_as_its_dequantised_twin(
    save: Save,
    shape: str,
    quantise: Quantise,
    sizes: dict[str, Any],
    keeping: Keeping,
    library: CpuFlashInfer,
    ops: FlashInferOps,
    tmp_path: Path,
) -> None:
    folders = twins(tmp_path, save, shape, quantise, **sizes)
    kept, plain = (
        Rank(folder, dtype=torch.bfloat16, kernels=kernels(folder, ops, how))
        for folder, how in zip(folders, (keeping, DEQUANTISED), strict=True)
    )
    prompt = [5, 9, 11, 80]
    logits = kept.step({0: prompt})[0]
    called = library.names()
    expected = plain.step({0: prompt})[0]
    assert ("fp8_blockscale_gemm_sm90" in called) == (keeping.linears is not None)
    assert "fp8_blockscale_gemm_sm90" not in library.names()
    assert (logits - expected).norm() < 0.03 * expected.norm()


def dequantised(weight: KeptWeight) -> torch.Tensor:
    return fp8_weight(weight.numbers.contiguous(), weight.scales.contiguous())


@pytest.mark.parametrize(
    "topology",
    [
        Topology(dp_rank=1, dp_size=2),
        Topology(attn_tp_rank=1, attn_tp_size=2),
    ],
    ids=["experts", "heads"],
)
def test_an_executor_keeps_its_part_of_every_weight(
    topology: Topology, ops: FlashInferOps, tmp_path: Path
) -> None:
    quantised, plain = twins(
        tmp_path, save_latent_model, "deepseek_v3", **LATENT | {"moe_intermediate_size": 256}
    )
    spec = read_spec(quantised)
    sizes: dict[str, Any] = {"hidden_size": 128, "dtype": torch.bfloat16}
    communicators = (
        DpCommunicator(place=Place(topology), max_tokens_per_rank=1, top_k=3, **sizes),
        AttnTpCommunicator(capacity=topology.capacity, max_shard_tokens_per_rank=1, **sizes),
    )
    model = load_model(
        quantised,
        spec,
        dtype=torch.bfloat16,
        peers=Peers.gathering(spec.num_experts, *communicators),
        kernels=kernels(quantised, ops, KEPT_FP8),
    )
    tensors, kept = load_file(plain / "model.safetensors"), set()
    for source, target in (x for group in model.weight_groups() for x in group.targets.items()):
        weight = target.target if isinstance(target, Part) else target
        if not isinstance(weight, KeptWeight):
            continue
        expected = torch.zeros(weight.shape)
        part = Part(expected, 0, range(len(expected)), len(expected))
        if isinstance(target, Part):
            part = Part(expected, target.dim, target.at, target.size)
        cut = Cut.of(source, part)
        assert cut.index is not None
        cut.fill(tensors[cut.source.name][cut.index])
        assert dequantised(weight).equal(expected), cut.source.name
        kept.add(cut.source.name.split(".")[-2])
    assert kept == {
        *("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


@pytest.mark.parametrize(
    "odd", [{"q_lora_rank": 96}, {"qk_nope_head_dim": 96}, {"intermediate_size": 192}]
)
def test_a_matrix_that_no_kernel_takes_is_dequantised_and_said_once(
    odd: dict[str, int],
    ops: FlashInferOps,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its rows or columns do not divide, scales end inside it, or rows turn across scales."""
    quantised, plain = twins(tmp_path, save_latent_model, "deepseek_v3", **LATENT | odd)
    kept = Rank(quantised, dtype=torch.bfloat16, kernels=kernels(quantised, ops, KEPT_FP8))
    twin = Rank(plain, dtype=torch.bfloat16, kernels=kernels(plain, ops, DEQUANTISED))
    logits, expected = (rank.step({0: [5, 9, 11, 80]})[0] for rank in (kept, twin))
    assert (logits - expected).norm() < 0.03 * expected.norm()
    said = [record.getMessage() for record in caplog.records if "dequantised" in record.message]
    assert len(set(said)) == len(said)
    assert said
