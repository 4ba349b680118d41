"""Kernels and peers of a model: the implementation of each part by device, and the other executors.

CPU     its own kernels (``model/cpu_kernels``) for bfloat16; PyTorch for float32 (but attention) and
        elsewhere, with experts as grouped products
CUDA    FlashInfer's norms, rotation and activation where it is installed, PyTorch's elsewhere;
        experts as PyTorch's grouped products, or as FlashInfer's kernels, CUTLASS or CuTe-DSL

peer          reaches                     for
dispatcher    the whole group             routed experts
communicator  the whole group             dense MLPs that are split over it
attn_tp       executors of the DP rank    attention heads, logits
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
import torch

from executor.model.cpu_kernels.library import Library, load
from executor.model.flashinfer.operators import MAX_FP8_MOE_ROWS, FlashInferOps
from executor.model.layers.linear import Linear
from executor.model.layers.linear_kept import KeptLinears
from executor.model.layers.operators import (
    CpuOperators,
    FlashInferOperators,
    Operators,
    RotaryEmbedding,
    TorchOperators,
)
from executor.model.moe.dispatch_all_gather import AllGatherDispatcher
from executor.model.moe.experts import ExpertShare, ExpertSlots, NewRunner
from executor.model.moe.layer import Dispatched, Dispatcher, ExpertScratch, StackedMoERunner
from executor.model.moe.runner_cpu import (
    HIDDEN_MULTIPLE,
    INTERMEDIATE_MULTIPLE,
    CpuMoERunner,
    scratch_bytes,
)
from executor.model.moe.runner_cutedsl import CuteDslMoERunner, CuteDslSizing
from executor.model.moe.runner_cutlass import (
    CutlassMoERunner,
    CutlassWorkspace,
    KeptCutlassRunner,
)
from executor.model.moe.runner_grouped import GroupedMMRunner
from executor.model.spec import ModelSpec, MoeSpec
from executor.model.triton.operators import TritonOps
from executor.model.weights.kept import DEQUANTISED, Keeping, KeptWeight
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.expert_places import places_at_start
from executor.parallel.layout import Capacity, Topology

GpuRunner = type[GroupedMMRunner] | type[CutlassMoERunner] | type[CuteDslMoERunner]

_LOG = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What a model's layers call.

    Attributes:
        operators: Norms, rotation and activation.
        new_experts: Makes an executor's share of one layer's experts.
        library: The CPU's kernels, which products and routers call; None for PyTorch's.
        scratch: Memory that the experts of all layers share; None where their kernels need none.
        scratch_bytes: What the CPU's kernel for experts keeps besides, once it has run.
        elements_per_row: As of ``StackedMoERunner``, of a GPU's experts; None on a CPU.
        kept: Keeps weights of linear layers quantised; None dequantises them.
        ops: FlashInfer, which routers call; None where it does not run.
        triton: Kernels of ours that spare decodes launches; None likewise.
    """

    operators: Operators
    new_experts: Callable[[MoeSpec, ExpertShare], ExpertSlots]
    library: Library | None = None
    scratch: ExpertScratch | None = None
    scratch_bytes: int = 0
    elements_per_row: Callable[[int, int, int], int] | None = None
    kept: KeptLinears | None = None
    ops: FlashInferOps | None = None
    triton: TritonOps | None = None

    @property
    def kept_head(self) -> KeptLinears | None:
        """Likewise for the head, which is int8 or not quantised."""
        return self.kept if self.kept is not None and self.kept.is_int8 else None

    def linear(
        self, *, dtype: torch.dtype, device: torch.device, keeps: bool = True
    ) -> "partial[Linear]":
        """Returns what makes linear layers; ``keeps`` False dequantises their weights."""
        kept = self.kept if keeps else None
        return partial(Linear, dtype=dtype, device=device, library=self.library, kept=kept)


def cpu_kernels(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_moe_rows: int = 0,
    keeping: Keeping = DEQUANTISED,
) -> Kernels:
    """Returns the CPU's own kernels for bfloat16, where it has some, and PyTorch for all else.

    Args:
        spec: The model.
        dtype: Type of weights and hidden states.
        device: The CPU, or meta, for a model that only has sizes.
        max_moe_rows: Most rows that the experts of a layer see in a pass.
        keeping: What is int8, which takes the kernels.
    """
    device = torch.device(device)
    library = load() if dtype is torch.bfloat16 and device.type == "cpu" else None
    operators: Operators
    if library is None:
        operators = _torch_operators(spec, dtype, device)
    else:
        operators = CpuOperators(library, spec.ropes, spec.max_position_embeddings)

    kind: NewRunner = GroupedMMRunner
    tool: Any = operators.silu_and_mul
    multiple, kept_bytes = 16 // dtype.itemsize, 0  # of a grouped product
    if library is not None and spec.hidden_size % HIDDEN_MULTIPLE == 0:
        kind, tool, multiple = CpuMoERunner, library, INTERMEDIATE_MULTIPLE
        if spec.moe is not None:
            kept_bytes = scratch_bytes(max_moe_rows, spec.top_k, spec.moe.intermediate_size)
    elif library is not None:
        problem = f"hidden_size={spec.hidden_size} is no multiple of {HIDDEN_MULTIPLE}"
        _LOG.warning("no_cpu_kernel_for_experts", problem=problem, running="PyTorch's")
    return Kernels(
        operators=operators,
        new_experts=lambda moe, share: ExpertSlots(
            moe,
            share,
            spec.hidden_size,
            kind,
            tool,
            keeping.experts,
            multiple,
            dtype=dtype,
            device=device,
        ),
        library=library,
        scratch_bytes=kept_bytes,
        kept=None if keeping.linears is None else KeptLinears(keeping.linears, None),
    )


def stacked_kernels(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: FlashInferOps | None,
    moe_runner: str = "grouped",
    max_moe_rows: int | None = None,
    keeping: Keeping = DEQUANTISED,
    triton: TritonOps | None = None,
) -> Kernels:
    """Returns what CUDA runs: nothing in it reads a result on the host, so graphs can capture it.

    Args:
        spec: The model.
        dtype: Type of weights and hidden states.
        device: Where the model lives.
        ops: FlashInfer; None runs PyTorch's operators.
        moe_runner: What runs the experts: ``grouped``, or FlashInfer's ``cutlass`` or ``cutedsl``.
        max_moe_rows: Most rows that the experts of a layer see in a pass, from the token budget;
            FlashInfer's kernels need it.
        keeping: What stays quantised; experts by ``cutlass`` only.
        triton: Kernels of ours, beside FlashInfer's.

    Raises:
        ValueError: FlashInfer's kernels for experts are asked for without FlashInfer. When experts
            are made: they do not divide, or the kernels do not run here or take their sizes.
    """
    operators: Operators = _torch_operators(spec, dtype, device)
    if ops is not None:
        operators = FlashInferOperators(
            ops,
            ropes=spec.ropes,
            max_positions=spec.max_position_embeddings,
            device=device,
        )
    scratch = None
    kind: GpuRunner = GroupedMMRunner
    if moe_runner != "grouped":
        if ops is None:
            raise ValueError(
                f"moe_runner={moe_runner} needs FlashInfer, which is not installed: pip install "
                f"flashinfer-python, or set moe_runner=grouped"
            )
        assert max_moe_rows is not None, f"how many rows {moe_runner} may see is not said"
        kind, new_scratch = _FLASHINFER_RUNNERS[moe_runner]
        if keeping.experts is not None:
            assert moe_runner == "cutlass", f"{moe_runner} keeps nothing"
            kind = KeptCutlassRunner
            if keeping.experts.per_byte == 1:
                max_moe_rows = min(max_moe_rows, MAX_FP8_MOE_ROWS)
        scratch = new_scratch(ops, max_num_rows=max_moe_rows, top_k=spec.top_k)
    return Kernels(
        operators=operators,
        new_experts=lambda moe, share: ExpertSlots(
            moe,
            share,
            spec.hidden_size,
            kind,
            scratch or operators.silu_and_mul,
            keeping.experts,
            dtype=dtype,
            device=device,
        ),
        scratch=scratch,
        elements_per_row=kind.elements_per_row,
        kept=None if keeping.linears is None else KeptLinears(keeping.linears, ops),
        ops=ops,
        triton=triton,
    )


def kept_sizes(spec: ModelSpec, keeping: Keeping, *, dtype: torch.dtype) -> Kernels:
    """Returns kernels of a model on the meta device that keeps weights and only has sizes."""
    device = torch.device("meta")
    kernels = cpu_kernels(spec, dtype=dtype, device=device)
    if keeping.experts is not None:
        kernels = replace(
            kernels,
            new_experts=lambda moe, share: ExpertSlots(
                moe,
                share,
                spec.hidden_size,
                lambda w13, w2, tool, activation, biases: NoRunner(w13, w2, biases),
                None,
                keeping.experts,
                dtype=dtype,
                device=device,
            ),
        )
    linears = None if keeping.linears is None else KeptLinears(keeping.linears, None)
    return replace(kernels, kept=linears)


class NoRunner(StackedMoERunner):
    """Of experts that only have sizes."""

    def arrange_kept(self, w13: KeptWeight, w2: KeptWeight) -> None:
        pass

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        raise NotImplementedError("experts on the meta device only have sizes")


def _torch_operators(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> TorchOperators:
    positions = spec.max_position_embeddings
    return TorchOperators(
        [RotaryEmbedding(rope, positions, dtype=dtype, device=device) for rope in spec.ropes]
    )


_FLASHINFER_RUNNERS: dict[str, tuple[GpuRunner, type[ExpertScratch]]] = {
    "cutlass": (CutlassMoERunner, CutlassWorkspace),
    "cutedsl": (CuteDslMoERunner, CuteDslSizing),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This executor's place, and its ways to the others. Groups come and go behind them.

    Attributes:
        communicator: Gathers and sums rows over the group.
        attn_tp: Gathers and sums rows over the executors of this DP rank.
        dispatcher: Takes rows to their experts; shared by all layers.
        moe_dense_tp_size: 1 runs dense MLPs whole on each executor; None splits them over the
            group.

    Raises:
        ValueError: The communicators are for different arrangements.
    """

    communicator: DpCommunicator
    attn_tp: AttnTpCommunicator
    dispatcher: Dispatcher
    moe_dense_tp_size: int | None = None

    def __post_init__(self) -> None:
        if self.attn_tp.size != self.topology.attn_tp_size:
            raise ValueError(
                f"the attention-TP communicator joins {self.attn_tp.size} executors, the model's "
                f"attention is shared by attn_tp_size={self.topology.attn_tp_size}"
            )

    @classmethod
    def gathering(
        cls,
        num_experts: int,
        communicator: DpCommunicator | None = None,
        attn_tp: AttnTpCommunicator | None = None,
        **dense: int | None,
    ) -> "Peers":
        """Returns peers among which rows are gathered for experts; none by default."""
        communicator = communicator or DpCommunicator.single()
        attn_tp = attn_tp or AttnTpCommunicator.single()
        places = places_at_start(communicator.topology, attn_tp.capacity, num_experts)
        return cls(
            communicator=communicator,
            attn_tp=attn_tp,
            dispatcher=AllGatherDispatcher(communicator, places),
            **dense,
        )

    @property
    def capacity(self) -> Capacity:
        """What this executor is built for, whatever its place: its share of heads and vocabulary."""
        return self.attn_tp.capacity

    @property
    def topology(self) -> Topology:
        """This executor's place: its share of experts, and of dense MLPs that are split."""
        return self.communicator.topology

    def expert_share(self, spec: MoeSpec) -> ExpertShare:
        """Returns what this executor holds of a layer's experts before any Join."""
        return ExpertShare.of(self.topology, spec, self.capacity)

    @property
    def splits_dense(self) -> bool:
        """Whether dense MLPs are split over the group."""
        return self.moe_dense_tp_size is None and self.topology.world_size > 1
