"""Quantised weights: what stays as a checkpoint stores it, by settings, device and sizes, and its bytes."""

import re
from pathlib import Path

import structlog
import torch

from executor.build.devices import Device
from executor.build.plan import Blueprint
from executor.config import ExecutorConfig
from executor.model.decoder.kernels import Peers, kept_sizes
from executor.model.drafts.draft import DraftModel
from executor.model.families import Model, new_model
from executor.model.moe.experts import ExpertShare
from executor.model.spec import ModelSpec
from executor.model.weights import Format, KeptAs, KeptWeight, Part, tensor_names
from executor.model.weights.kept import DEQUANTISED, IN_INT8, Keeping
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.layout import Place

log = structlog.stdlib.get_logger(__name__)

META = torch.device("meta")
_EXPERTS = ".experts."
# Projections of layers; those that are split or joined at load are always dequantised.
_LINEAR = re.compile(
    r".*\.layers\.\d+\.(?!.*(\.experts\.|kv_b_proj|eh_proj)).*(_proj|_mqa)\.weight"
)


def keepable(config: ExecutorConfig, model: ModelSpec, path: Path) -> tuple[Keeping, list[str]]:
    """Returns what kernels could read as it is stored, and why the rest is dequantised.

    Args:
        config: The settings.
        model: What ``path`` holds.
        path: Folder of the checkpoint, whose tensors' names say what is quantised.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    weight_format = model.quantization
    if weight_format is None:
        return DEQUANTISED, []
    kept_as = weight_format.kept_as
    if kept_as is None or weight_format.block != kept_as.columns:
        return DEQUANTISED, [f"there are no kernels for {weight_format.title} here"]
    quantised, plain = _by_format(weight_format, tensor_names(path))
    problems, keeping = [], DEQUANTISED
    if any(_EXPERTS in name for name in quantised):
        problem = _experts_problem(config, model, kept_as)
        if any(_EXPERTS in name for name in plain):
            problem = "some of them are not quantised"
        if problem is None:
            keeping = keeping._replace(experts=kept_as)
        else:
            problems.append(f"experts: {problem}")
    if any(_LINEAR.fullmatch(name) for name in quantised):
        problem = next(
            (f"{name} is not quantised" for name in plain if _LINEAR.fullmatch(name)), None
        )
        if kept_as.per_byte > 1:
            problem = f"there are no kernels for {weight_format.title} here"
        if problem is None:
            keeping = keeping._replace(linears=kept_as)
        else:
            problems.append(f"projections: {problem}")
    return keeping, problems


def _by_format(weight_format: Format, names: frozenset[str]) -> tuple[set[str], list[str]]:
    """Returns the weights that are quantised, and the others."""
    of_parts = {name: weight_format.weight_of(name) for name in names}
    quantised = {weight for name, weight in of_parts.items() if name != weight}
    return quantised, sorted(
        name for name in names if name.endswith("weight") and of_parts[name] not in quantised
    )


def _experts_problem(config: ExecutorConfig, model: ModelSpec, kept_as: KeptAs) -> str | None:
    if config.moe_runner not in ("auto", "cutlass"):
        return f"moe_runner={config.moe_runner} takes none; set it to auto or cutlass"
    assert model.moe is not None, "the checkpoint has experts"
    width = len(ExpertShare.of(config.topology, model.moe).columns)
    for name, size in (("hidden_size", model.hidden_size), ("columns of an expert", width)):
        if kept_as.padded(size) % kept_as.multiple:
            return f"the kernel takes {name} in multiples of {kept_as.multiple}, not {size}"
    return None


def plan_keeping(blueprint: Blueprint, device: Device, model: ModelSpec, path: Path) -> Keeping:
    """Returns what an executor keeps of a checkpoint; logs what it dequantises, and what that costs.

    Args:
        blueprint: Of the executor.
        device: Where it runs.
        model: The target, or its draft.
        path: Folder of its checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
        ValueError: quantized_weights=keep or weights=int8 asks for what cannot be. Says why.
    """
    config, weight_format = blueprint.config, model.quantization
    if config.weights == "int8":
        if (problem := device.why_not_int8()) is not None:
            raise ValueError(f"weights=int8: {problem}; or set weights=auto")
        return IN_INT8
    if weight_format is None:
        return DEQUANTISED
    could, problems = keepable(config, model, path)
    keeping, reasons = could, problems
    if config.quantized_weights == "dequantize":
        keeping, reasons = DEQUANTISED, ["quantized_weights=dequantize"]
    elif (kept_as := could.experts or could.linears) is not None:
        problem = device.why_dequantised(kept_as)
        if problem is not None:
            keeping, reasons = DEQUANTISED, [problem]
    if config.quantized_weights == "keep" and reasons:
        raise ValueError(
            f"quantized_weights=keep: {'; '.join(reasons)}; set quantized_weights=auto to "
            f"dequantise what cannot stay in {weight_format.title}"
        )
    if reasons:
        extra = 0
        if model is blueprint.model:
            extra = weight_bytes(blueprint, keeping) - weight_bytes(blueprint, could)
        log.info(
            "weights_dequantised",
            format=weight_format.title,
            reason="; ".join(reasons),
            more_bytes=extra,
        )
    return keeping


def weight_bytes(blueprint: Blueprint, keeping: Keeping) -> int:
    """Returns the bytes of an executor's weights, if it keeps some of them quantised."""
    with torch.inference_mode():
        return bytes_of(sizes_only(blueprint, keeping))


def sizes_only(blueprint: Blueprint, keeping: Keeping = DEQUANTISED) -> Model:
    """Returns the target on the meta device."""
    draft = blueprint.draft
    return new_model(
        blueprint.model,
        dtype=blueprint.dtype,
        device=META,
        peers=_peers(blueprint),
        kernels=kept_sizes(blueprint.model, keeping, dtype=blueprint.dtype),
        aux_layers=() if draft is None else draft.aux_layers,
    )


def bytes_of(model: Model | DraftModel) -> int:
    """Returns the bytes of a model's weights: with the padding of those that are kept, and ghosts."""
    targets = [x for group in model.weight_groups() for x in group.targets.values()]
    weights = [x.target if isinstance(x, Part) else x for x in targets]
    whole = [x for layer in model.expert_slots for x in layer.tensors]
    for weight in weights:
        if isinstance(weight, KeptWeight):
            whole += [weight.numbers, weight.scales]
    storages = {x._cdata: x.nbytes() for x in (tensor.untyped_storage() for tensor in whole)}
    return sum(storages.values()) + sum(
        x.nbytes
        for x in weights
        if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in storages
    )


def _peers(blueprint: Blueprint) -> Peers:
    """Returns this executor's place, without ways to others."""
    topology = blueprint.config.topology
    return Peers.gathering(
        blueprint.model.num_experts,
        DpCommunicator(
            place=Place(topology), max_tokens_per_rank=0, hidden_size=0, dtype=torch.float32
        ),
        AttnTpCommunicator(
            capacity=blueprint.config.capacity,
            max_shard_tokens_per_rank=0,
            hidden_size=0,
            dtype=torch.float32,
        ),
        moe_dense_tp_size=blueprint.config.moe_dense_tp_size,
    )
