"""Random weights without a checkpoint: each tensor follows from its name alone.

So two models have the same weights, however each lays them out.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from executor.model.spec import ModelSpec
from executor.model.weights.targets import Cut, WeightGroup

# Takes a checkpoint's name and a shape to a tensor.
NewTensor = Callable[[str, tuple[int, ...]], torch.Tensor]

_CODE = 16.0  # length of an expert's direction in the embedding of a token that goes there


def random_tensor(
    name: str, shape: tuple[int, ...], *, std: float = 1.0, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns normal numbers that depend on the name, the shape, the dtype and the kind of device."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=std, generator=generator)


def flat_weights(config: ModelSpec, device: torch.device, std: float = 0.02) -> NewTensor:
    """Returns weights for measurements, made on the device.

    Router logits are nearly alike, so the experts of a token are anyone's guess.
    """

    def new(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=config.dtype, device=device)
        return random_tensor(name, shape, std=std, dtype=config.dtype, device=device)

    return new


def decided_weights(config: ModelSpec) -> NewTensor:
    """Returns weights for comparisons, made on the CPU.

    Where two experts are about equally good, rounding decides between them, and two right
    computations differ by a whole expert. Here every token's embedding points along the router's
    directions of its own experts, far more than whatever layers add, so that no rounding matters.
    """
    cpu = torch.device("cpu")
    count, width = config.num_experts, config.hidden_size
    directions = random_tensor("directions", (width, count), dtype=torch.float32, device=cpu)
    codes = torch.linalg.qr(directions).Q.T  # [experts, hidden], orthonormal

    def new(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        x = random_tensor(name, shape, dtype=torch.float32, device=cpu)
        if name.endswith("norm.weight"):
            x = 1 + 0.1 * x
        elif name.endswith("mlp.gate.weight"):
            x = codes.clone()
        elif name == "model.embed_tokens.weight":
            scores = random_tensor("experts", (shape[0], count), dtype=torch.float32, device=cpu)
            chosen = torch.zeros_like(scores)
            chosen.scatter_(1, scores.topk(config.top_k).indices, 1.0)
            x += _CODE * chosen @ codes
        else:
            x *= shape[-1] ** -0.5
        return x.to(config.dtype)

    return new


def fill(groups: Iterable[WeightGroup], new_tensor: NewTensor) -> None:
    """Fills a model's groups in place of the loader."""
    for group in groups:
        for source, target in group.targets.items():
            cut = Cut.of(source, target)
            if cut.index is not None:
                cut.fill(new_tensor(cut.source.name, cut.shape)[cut.index])
        group.finish()


def fill_transformers(model: Any, new_tensor: NewTensor) -> None:
    """Fills a model of Transformers, whose layers keep all experts in two tensors."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                _fill_experts(name, parameter, new_tensor, ("gate", "up"))
            elif name.endswith("experts.down_proj"):
                _fill_experts(name, parameter, new_tensor, ("down",))
            else:
                parameter.copy_(new_tensor(name, tuple(parameter.shape)))


def _fill_experts(
    name: str, parameter: torch.Tensor, new_tensor: NewTensor, parts: tuple[str, ...]
) -> None:
    prefix = name.rpartition(".")[0]
    for expert, target in enumerate(parameter):
        for part, rows in zip(parts, target.chunk(len(parts)), strict=True):
            rows.copy_(new_tensor(f"{prefix}.{expert}.{part}_proj.weight", tuple(rows.shape)))
