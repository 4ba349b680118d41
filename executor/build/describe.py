"""Description of an executor: its answer to Describe, and the fingerprint of its checkpoint."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from executor.batch.read_step import StepLimits
from executor.budget.report import BudgetLine
from executor.budget.speculation import SpeculationPlan
from executor.build.grammars import grammar_digest
from executor.build.plan import Blueprint
from executor.model.moe.experts import ExpertSlots
from executor.model.weights.kept import DEQUANTISED, Keeping
from executor.parallel.layout import Topology
from protos.executor.v1 import executor_pb2 as pb


def describe(
    blueprint: Blueprint,
    limits: StepLimits,
    device: torch.device,
    lines: Iterable[BudgetLine],
    keeping: Keeping = DEQUANTISED,
    *,
    expert_slots: Iterable[ExpertSlots] = (),
) -> pb.DescribeResponse:
    """Returns all but what changes while it runs: its instance, its KV, its epoch, an elastic one's place.

    Args:
        blueprint: How it was built.
        limits: Of its steps.
        device: Where it runs.
        lines: What it has sized.
        keeping: What of the model stays quantised.
        expert_slots: Of all layers with experts.
    """
    config, model_config = blueprint.config, blueprint.model
    budget, graph_sizes = limits.budget, limits.graph_sizes
    model = pb.ModelInfo(
        architecture=model_config.architecture,
        fingerprint=fingerprint(config.model),
        vocab_size=model_config.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        block_size=config.block_size,
        takes_grammars=limits.takes_grammars,
        num_experts=model_config.num_experts,
        bytes_per_expert=sum(layer.bytes_per_slot for layer in expert_slots),
    )
    capacity = config.capacity
    capability = None
    if capacity.min_dp_size is not None:
        capability = pb.Capability(
            min_dp_size=capacity.min_dp_size,
            max_dp_size=capacity.max_dp_size,
            max_expert_slots=capacity.num_expert_slots(model_config.num_experts),
        )
    return pb.DescribeResponse(
        coordinates=pb.Coordinates(
            attn_tp_rank=config.attn_tp_rank, attn_tp_size=config.attn_tp_size
        )
        if capacity.is_elastic
        else coordinates_of(config.topology),
        capability=capability,
        model=model,
        num_kv_blocks=limits.num_kv_blocks,
        kv_window=limits.kv_window,
        num_rows=config.max_num_seqs,
        budget=pb.TokenBudget(
            max_num_batched_tokens=budget.max_num_batched_tokens,
            max_num_seqs=budget.max_num_seqs,
            max_num_logits=budget.max_num_logits,
            lines=[pb.BudgetLine(**asdict(line)) for line in lines],
        ),
        graph_sizes=pb.GraphSizes(
            decode=graph_sizes.decode,
            extend=graph_sizes.extend,
            extend_runner=f"prefill_{config.prefill_graphs}" if graph_sizes.extend else "",
        ),
        agreement=_agreement(blueprint, model.fingerprint, device, keeping),
        speculation=_speculation(blueprint.speculation),
    )


def coordinates_of(topology: Topology) -> pb.Coordinates:
    return pb.Coordinates(
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
        attn_tp_rank=topology.attn_tp_rank,
        attn_tp_size=topology.attn_tp_size,
        ep_rank=topology.ep_rank,
        ep_size=topology.num_expert_parts,
    )


def _speculation(plan: SpeculationPlan | None) -> pb.Speculation | None:
    if plan is None:
        return None
    return pb.Speculation(
        algorithm=plan.algorithm,
        num_draft_tokens=plan.num_draft_tokens,
        num_draft_steps=plan.num_draft_steps,
        topk=plan.topk,
        num_reserved_tokens=plan.num_reserved_tokens,
        kv_lookahead=plan.kv_lookahead,
        extends=plan.extends,
    )


def _agreement(
    blueprint: Blueprint, model_fingerprint: str, device: torch.device, keeping: Keeping
) -> dict[str, str]:
    """Returns all that members of a group may not differ in."""
    config, budget, graph_sizes = blueprint.config, blueprint.budget, blueprint.graph_sizes
    agreement: dict[str, Any] = {
        "model_fingerprint": model_fingerprint,
        "device": device.type,  # the collectives of one cannot reach the other
        "dtype": str(blueprint.dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "max_model_len": blueprint.max_model_len,
        "moe_dense_tp_size": config.moe_dense_tp_size,
        "moe_a2a": config.moe_a2a,
        "moe_a2a_extend": config.moe_a2a_extend,
        "moe_runner": config.moe_runner,
        "weights": config.weights,
        "quantized_weights": config.quantized_weights,
        "kept_weights": [name for name, kept in keeping._asdict().items() if kept is not None],
        "flashinfer_pdl": config.flashinfer_pdl,
        "triton_kernels": config.triton_kernels,
        "grammars": grammar_digest(config.model),
        "decode_graph_sizes": list(graph_sizes.decode),
        "extend_graph_sizes": list(graph_sizes.extend),
        "prefill_graphs": config.prefill_graphs,
        **asdict(budget),
    }
    if blueprint.speculation is not None:
        assert config.draft_model is not None
        agreement |= {
            "draft_fingerprint": fingerprint(config.draft_model),
            "draft_sampling": config.draft_sampling,
            **asdict(blueprint.speculation),
        }
    return {name: str(value) for name, value in agreement.items()}


def fingerprint(model: Path) -> str:
    """Returns SHA-256 (hex) over the configuration and every tensor's name, shape and data type.

    How tensors are spread over files does not matter. Values are not read, so a fine-tuned copy
    has its original's fingerprint.

    Args:
        model: Folder of a Hugging Face checkpoint that loads.
    """
    tensors: dict[str, tuple[str, list[int]]] = {}
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        tensors |= {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps([config, tensors], sort_keys=True).encode()).hexdigest()
