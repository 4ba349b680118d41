"""Layers of experts for tests: random weights, rows, every way to run them, and the right results."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from executor.model.cpu_kernels.library import load
from executor.model.decoder.kernels import Kernels, cpu_kernels, stacked_kernels
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.experts import ExpertShare, ExpertSlots
from executor.model.moe.layer import Dispatched, MoERunner
from executor.model.spec import ClampedSwiGlu, ModelSpec, MoeSpec
from executor.model.weights.targets import Cut
from executor.parallel.layout import Topology
from tests.executor.support.experts import new_spec

D, FF, NUM_EXPERTS, TOP_K = 32, 128, 5, 3  # a quarter of F is what CuTe-DSL takes at least
MAX_ROWS = 40
PREFIX = "experts."
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05}
CPU = torch.device("cpu")

CLAMPED = ClampedSwiGlu(alpha=1.702, limit=1.0)  # low, so that many values are clipped
Tensors = dict[str, torch.Tensor]
NewKernels = Callable[[ModelSpec, FlashInferOps | None], Kernels]


def config(
    dtype: torch.dtype, num_experts: int = NUM_EXPERTS, intermediate_size: int = FF
) -> ModelSpec:
    """Returns the configuration of a model whose experts have the sizes of this file."""
    return new_spec(
        hidden_size=D,
        num_experts=num_experts,
        top_k=TOP_K,
        intermediate_size=intermediate_size,
        dtype=dtype,
    )


def moe_spec(model: ModelSpec, **changed: Any) -> MoeSpec:
    """Returns the description of its experts."""
    assert model.moe is not None
    return replace(model.moe, **changed)


def _stacked(moe_runner: str) -> NewKernels:
    def new(model: ModelSpec, ops: FlashInferOps | None) -> Kernels:
        return stacked_kernels(
            model,
            dtype=model.dtype,
            device=CPU,
            ops=ops,
            moe_runner=moe_runner,
            max_moe_rows=MAX_ROWS,
        )

    return new


def _cpu(model: ModelSpec, ops: FlashInferOps | None) -> Kernels:
    return cpu_kernels(model, dtype=model.dtype)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to run experts.

    Attributes:
        new_kernels: Makes what the layers call.
        dtypes: What it can compute in.
        takes_place: Whether it writes where the dispatcher says.
    """

    new_kernels: NewKernels
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    takes_place: bool = False

    def new(
        self, model: ModelSpec, ops: FlashInferOps | None, topology: Topology, **spec: Any
    ) -> ExpertSlots:
        """Returns an executor's experts, not filled yet. ``spec`` are fields of their MoeSpec."""
        moe = moe_spec(model, **spec)
        return self.new_kernels(model, ops).new_experts(moe, ExpertShare.of(topology, moe))


KINDS = {
    "cpu": Kind(_cpu, dtypes=(torch.bfloat16,), takes_place=load() is not None),
    "grouped": Kind(_stacked("grouped")),
    "cutlass": Kind(_stacked("cutlass"), takes_place=True),
    "cutedsl": Kind(_stacked("cutedsl"), dtypes=(torch.bfloat16,), takes_place=True),
}


def checkpoint(dtype: torch.dtype, num_experts: int = NUM_EXPERTS) -> Tensors:
    """Returns whole experts, by the names that they have in a checkpoint."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for expert in range(num_experts):
        for name, shape in (("gate", (FF, D)), ("up", (FF, D)), ("down", (D, FF))):
            weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[f"{PREFIX}{expert}.{name}_proj.weight"] = weight.to(dtype)
    return tensors


def biases(dtype: torch.dtype, num_experts: int = NUM_EXPERTS) -> Tensors:
    """Returns the biases of as many experts, likewise."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"{PREFIX}{expert}.{name}_proj.bias": torch.randn(size, generator=generator).to(dtype)
        for expert in range(num_experts)
        for name, size in (("gate", FF), ("up", FF), ("down", D))
    }


def fill(layer: ExpertSlots, tensors: Tensors) -> None:
    """Fills experts in place of the loader."""
    for group in layer.weight_groups(PREFIX):
        for source, target in group.targets.items():
            cut = Cut.of(source, target)
            whole = tensors[cut.source.name]
            assert whole.shape == cut.shape
            assert cut.index is not None
            cut.fill(whole[cut.index])
        group.finish()


def new_runner(kind: Kind, tensors: Tensors, ops: FlashInferOps | None, **spec: Any) -> MoERunner:
    """Returns what runs all experts of a checkpoint on one executor."""
    dtype = next(iter(tensors.values())).dtype
    num_experts = sum(name.endswith("down_proj.weight") for name in tensors)
    layer = kind.new(config(dtype, num_experts), ops, Topology(), **spec)
    fill(layer, tensors)
    return layer.runner


def stack(tensors: Tensors, *names: str) -> torch.Tensor:
    """Returns weights of all experts, those of the same expert below one another."""
    return torch.stack(
        [
            torch.cat([tensors[f"{PREFIX}{expert}.{name}_proj.weight"] for name in names])
            for expert in range(len(tensors) // 3)
        ]
    )


def run_pairs(
    x_RD: torch.Tensor,
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    w13_E2FD: torch.Tensor,
    w2_EDF: torch.Tensor,
) -> torch.Tensor:
    """Every pair of a row and an expert by itself, in float64. Ids from E on are elsewhere."""
    y_RD = torch.zeros(x_RD.shape, dtype=torch.float64)
    row_P, k_P = (ids_RK < len(w2_EDF)).nonzero(as_tuple=True)
    expert_P = ids_RK[row_P, k_P].long()
    hidden_P2F = torch.einsum("pcfd,pd->pcf", w13_E2FD.double()[expert_P], x_RD.double()[row_P])
    hidden_PF = F.silu(hidden_P2F[:, 0]) * hidden_P2F[:, 1]
    y_PD = torch.einsum("pdf,pf->pd", w2_EDF.double()[expert_P], hidden_PF)
    return y_RD.index_add_(0, row_P, weights_RK[row_P, k_P].double().unsqueeze(1) * y_PD)


def clamped_pairs(tensors: Tensors, dispatched: Dispatched) -> torch.Tensor:
    """Every pair of a row and a gpt-oss expert by itself, in float64, with biases."""
    y = torch.zeros(dispatched.x_RD.shape, dtype=torch.float64)
    for row, ids in enumerate(dispatched.topk_ids_RK.tolist()):
        for k, expert in enumerate(ids):
            named = f"{PREFIX}{expert}.{{}}_proj.{{}}"
            if named.format("down", "weight") not in tensors:
                continue
            gate, up, down = (
                (tensors[named.format(part, "weight")], tensors[named.format(part, "bias")])
                for part in ("gate", "up", "down")
            )
            x = dispatched.x_RD[row].double()
            g = (gate[0].double() @ x + gate[1].double()).clamp(max=CLAMPED.limit)
            u = (up[0].double() @ x + up[1].double()).clamp(-CLAMPED.limit, CLAMPED.limit)
            hidden = (u + 1) * g / (1 + torch.exp(-CLAMPED.alpha * g))
            weight = dispatched.topk_weights_RK[row, k].double()
            y[row] += weight * (down[0].double() @ hidden + down[1].double())
    return y


def authority(tensors: Tensors, dispatched: Dispatched) -> torch.Tensor:
    """Rows through all experts of a checkpoint, in float64."""
    if any(name.endswith("bias") for name in tensors):
        return clamped_pairs(tensors, dispatched)
    x, ids, weights = dispatched.x_RD, dispatched.topk_ids_RK, dispatched.topk_weights_RK
    w13 = stack(tensors, "gate", "up").unflatten(1, (2, FF))
    return run_pairs(x, ids, weights, w13, stack(tensors, "down"))


def assert_right(y: torch.Tensor, tensors: Tensors, dispatched: Dispatched) -> None:
    tolerance = TOLERANCES[dispatched.x_RD.dtype]
    assert y.dtype == dispatched.x_RD.dtype
    expected = authority(tensors, dispatched)
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


def routed(num_rows: int, low: int, high: int, dtype: torch.dtype) -> Dispatched:
    """Returns rows whose experts are drawn from low to high, without repeats if there are enough."""
    generator = torch.Generator().manual_seed(num_rows)
    choices = torch.rand(num_rows, high - low, generator=generator).argsort(-1) + low
    ids = choices[:, torch.arange(TOP_K) % (high - low)].to(torch.int32)
    x = torch.randn(num_rows, D, generator=generator).to(dtype)
    return Dispatched(x, ids, torch.rand(num_rows, TOP_K, generator=generator))


def with_padding(dispatched: Dispatched, num_experts: int = NUM_EXPERTS) -> Dispatched:
    """Returns the rows with every third one padding: no expert, and anything in its place."""
    x, ids = dispatched.x_RD.clone(), dispatched.topk_ids_RK.clone()
    x[::3], ids[::3] = 1e4, num_experts
    return replace(dispatched, x_RD=x, topk_ids_RK=ids)


def apart(dispatched: Dispatched) -> Dispatched:
    """Returns the rows as part of a wider buffer."""
    x = dispatched.x_RD
    wide = torch.full((len(x), D + 8), 7.0, dtype=x.dtype)
    wide[:, :D] = x
    return replace(dispatched, x_RD=wide[:, :D])


def _drawn(num_rows: int, low: int, high: int) -> Callable[[torch.dtype], Dispatched]:
    return lambda dtype: routed(num_rows, low, high, dtype)


L = NUM_EXPERTS
CASES: dict[str, Callable[[torch.dtype], Dispatched]] = {
    "no rows": _drawn(0, 0, L),
    "one row": _drawn(1, 0, L),
    "one row, some elsewhere": _drawn(1, L - 1, L + 1),
    "one row, all elsewhere": _drawn(1, L, L + 1),
    "two rows": _drawn(2, 0, L),
    "many rows": _drawn(33, 0, L),
    "some elsewhere": _drawn(33, 0, L + 1),
    "all elsewhere": _drawn(4, L, L + 1),
    "all to one expert": _drawn(7, 2, 3),
    "all to the last expert": _drawn(7, L - 1, L),
    "padding between": lambda dtype: with_padding(routed(17, 0, L + 1, dtype)),
    "rows that lie apart": lambda dtype: apart(routed(9, 0, L + 1, dtype)),
    "no rows that lie apart": lambda dtype: apart(routed(0, 0, L + 1, dtype)),
    "as many rows as the budget has": _drawn(MAX_ROWS, 0, L + 1),
}


# Every way to run experts, in each type that it computes in.
OPTIONS = {
    f"{name}, {dtype_name}": (name, dtype)
    for name, kind in KINDS.items()
    for dtype_name, dtype in DTYPES.items()
    if dtype in kind.dtypes
}
