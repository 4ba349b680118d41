"""If this fails, experts whose weights stay quantised compute something else than dequantised ones.

The kernels have never run on a GPU; a stand-in computes what their arguments say.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor.model.decoder import kernels
from executor.model.decoder.kernels import cpu_kernels, stacked_kernels
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.experts import ExpertShare, ExpertSlots
from executor.model.moe.layer import Dispatched
from executor.model.spec import ClampedSwiGlu, MoeSpec
from executor.model.weights import Format, Source, WeightGroup, load_weights
from executor.model.weights.formats import Fp8Format, Mxfp4Format
from executor.model.weights.kept import Keeping
from executor.parallel.layout import Topology
from protos.executor.placement import GHOST
from tests.executor.model.weights.quantised import fp8, mxfp4
from tests.executor.support.experts import new_spec, poison_ghosts
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer

CPU = torch.device("cpu")
NUM_EXPERTS, TOP_K, MAX_ROWS = 4, 2, 40
# By format: itself, D and F, and what else its experts have.
KINDS: dict[str, tuple[Format, int, int, dict[str, Any]]] = {
    "fp8": (Fp8Format(), 128, 256, {}),
    "mxfp4": (
        Mxfp4Format(),
        96,
        192,
        {"activation": ClampedSwiGlu(alpha=1.702, limit=1.0), "bias": True},
    ),
}


def save(folder: Path, name: str) -> None:
    """Saves experts one by one in FP8, or stacked with gate and up alternating in MXFP4."""
    _, d, f, _ = KINDS[name]
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    if name == "fp8":
        for expert in range(NUM_EXPERTS):
            for part, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
                parts, _ = fp8(torch.randn(shape))
                stem = f"experts.{expert}.{part}_proj.weight"
                tensors |= {stem + suffix: tensor for suffix, tensor in parts.items()}
    else:
        for part, shape in (("gate_up", (d, 2 * f)), ("down", (f, d))):
            parts, _ = mxfp4(torch.randn(NUM_EXPERTS, *shape) / 4)
            stem = f"experts.{part}_proj"
            tensors |= {stem + suffix: tensor for suffix, tensor in parts.items()}
            tensors[f"{stem}_bias"] = torch.randn(NUM_EXPERTS, shape[1])
    saved = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(saved, folder / "model.safetensors")


def source(name: str) -> str | Source:
    """Returns what a stacked checkpoint holds an expert's tensor as."""
    _, expert, part, kind = name.split(".")
    stack = "down_proj" if part == "down_proj" else "gate_up_proj"
    return Source(
        name=f"experts.{stack}" + ("" if kind == "weight" else "_bias"),
        index=int(expert),
        count=NUM_EXPERTS,
        transposed=kind == "weight",
        first=1 if part == "up_proj" else 0,
        every=1 if part == "down_proj" else 2,
    )


def load(experts: ExpertSlots, folder: Path, name: str) -> ExpertSlots:
    groups = experts.weight_groups("experts.")
    if name == "mxfp4":
        groups = [
            WeightGroup({source(str(x)): y for x, y in group.targets.items()}, group.finish)
            for group in groups
        ]
    load_weights(folder, groups, weight_format=KINDS[name][0], skipped=lambda name: True)
    return experts


def both(
    ops: FlashInferOps, folder: Path, name: str, topology: Topology | None = None
) -> tuple[ExpertSlots, ExpertSlots]:
    """Returns an executor's experts, kept and dequantised in float32."""
    weight_format, d, f, fields = KINDS[name]
    save(folder, name)
    spec = new_spec(
        hidden_size=d,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        intermediate_size=f,
        dtype=torch.bfloat16,
    )
    assert isinstance(spec.moe, MoeSpec)
    moe = replace(spec.moe, **fields)
    kept = stacked_kernels(
        spec,
        dtype=torch.bfloat16,
        device=CPU,
        ops=ops,
        moe_runner="cutlass",
        max_moe_rows=MAX_ROWS,
        keeping=Keeping(experts=weight_format.kept_as),
    )
    plain = cpu_kernels(spec, dtype=torch.float32)
    share = ExpertShare.of(topology or Topology(), moe)
    kept_experts, plain_experts = (x.new_experts(moe, share) for x in (kept, plain))
    return load(kept_experts, folder, name), load(plain_experts, folder, name)


def routed(num_rows: int, width: int, num_local: int = NUM_EXPERTS) -> Dispatched:
    generator = torch.Generator().manual_seed(num_rows)
    choices = torch.rand(num_rows, num_local + 1, generator=generator).argsort(-1)
    x = torch.randn(num_rows, width, generator=generator).bfloat16()
    return Dispatched(x, choices[:, :TOP_K].int(), torch.rand(num_rows, TOP_K, generator=generator))


def assert_alike(kept: ExpertSlots, plain: ExpertSlots, dispatched: Dispatched) -> None:
    y = kept.runner.run(dispatched)
    in_float32 = replace(dispatched, x_RD=dispatched.x_RD.float(), out_RD=None)
    expected = plain.runner.run(in_float32)
    assert y.dtype == torch.bfloat16
    scale = float(expected.abs().max()) if len(expected) else 1.0
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02 * scale)


@pytest.mark.parametrize("name", KINDS)
def test_kept_experts_compute_what_dequantised_ones_do(
    name: str, ops: FlashInferOps, tmp_path: Path
) -> None:
    kept, plain = both(ops, tmp_path, name)
    for num_rows in (0, 1, 9, MAX_ROWS):
        dispatched = routed(num_rows, KINDS[name][1])
        place = torch.full(dispatched.x_RD.shape, torch.nan, dtype=torch.bfloat16)
        dispatched.out_RD = place
        assert_alike(kept, plain, dispatched)
        assert not place.isnan().any(), "results go where the dispatcher has a place for them"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "topology",
    [
        Topology(dp_rank=1, dp_size=2),
        Topology(dp_rank=1, dp_size=2, ep_size=1),
        Topology(dp_rank=2, dp_size=3),
    ],
    ids=["its experts", "its part of each", "its one expert, and a ghost"],
)
def test_an_executor_keeps_its_share(
    topology: Topology, name: str, ops: FlashInferOps, tmp_path: Path
) -> None:
    kept, plain = both(ops, tmp_path, name, topology)
    slots = topology.expert_slots(NUM_EXPERTS)
    dispatched = routed(9, KINDS[name][1], len(slots))
    if num_ghosts := slots.count(GHOST):
        assert {poison_ghosts(kept), poison_ghosts(plain)} == {num_ghosts}
        ids = dispatched.topk_ids_RK
        ids[ids == len(slots) - num_ghosts] = len(slots)
    assert_alike(kept, plain, dispatched)


def test_fp8_experts_get_no_more_rows_than_their_kernel_takes(
    library: CpuFlashInfer, ops: FlashInferOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_FP8_MOE_ROWS", 16)
    kept, plain = both(ops, tmp_path, "fp8")
    assert_alike(kept, plain, routed(MAX_ROWS, 128))
    calls = [kwargs for name, kwargs in library.calls if name == "cutlass_fused_moe"]
    assert [len(call["input"]) for call in calls] == [16, 16, 8]
    [sized] = [kwargs for name, kwargs in library.calls if name.endswith("_size")]
    assert sized["max_num_tokens"] == 16
