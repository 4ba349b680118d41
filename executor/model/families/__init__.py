"""Model families by the class name in config.json, imported only when asked for."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.errors import CheckpointError
from executor.model.decoder.decoder import Decoder, Tensors
from executor.model.decoder.fields import Fields
from executor.model.decoder.kernels import Kernels, Peers, cpu_kernels
from executor.model.layers.attention import LayerOptions, Stages
from executor.model.layers.linear import Embedding, LMHead
from executor.model.moe.experts import ExpertSlots
from executor.model.spec import ModelSpec
from executor.model.weights import OnProgress, WeightGroup, load_weights

_MODULES = {  # by class name, the file of this folder
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "LlamaForCausalLM": "dense",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2ForCausalLM": "dense",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "dense",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


class Family(Protocol):
    """A file of this folder. One whose checkpoints hold more than a language model has ``UNREAD``.

    ``UNREAD`` are beginnings of names of tensors, of parts that nothing here runs.
    """

    def read(self, fields: Fields) -> ModelSpec:
        """Returns the model that config.json describes, without what generation_config.json says.

        Raises:
            CheckpointError: A field is missing, or says what is not supported.
        """
        ...

    def tensors(self, spec: ModelSpec) -> Tensors:
        """Returns what its checkpoints hold tensors as, by the names that layers give them."""
        ...


class Model(Protocol):
    """A model, as the loader and runners see it, and what a draft shares with it.

    Attributes:
        embed_tokens: The same rows on every executor; those past the vocabulary are zeros.
        lm_head: Takes normalised hidden states to logits.
        peers: Its ways to the other executors.
    """

    embed_tokens: Embedding
    lm_head: LMHead
    peers: Peers

    @property
    def expert_slots(self) -> list[ExpertSlots]:
        """Of each layer that has experts."""
        ...

    @property
    def attention_layers(self) -> tuple[LayerOptions, ...]:
        """What each layer's attention does that a plain softmax does not."""
        ...

    def stages(self, batch: ForwardBatch) -> Stages:
        """Runs a forward pass up to each attention call; returns the hidden states [T, D].

        With ``aux_layers``, their features stand beside them, [T, D + len(aux_layers) * D].
        Every executor must run it, also with T = 0.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns float32 logits [L, vocab_size] of hidden states [L, D], in ``out`` if given.

        Every executor of the DP rank must call it, with the same rows. The next call may overwrite
        what this one returned.
        """
        ...

    def weight_groups(self) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, in the order to load it."""
        ...

    def missing_groups(self, slots: Sequence[int]) -> list[WeightGroup]:
        """Returns the same of experts that are not in their slots yet, of all layers.

        Args:
            slots: The expert wanted in each, or GHOST, where anything may be.
        """
        ...

    def skips(self, name: str) -> bool:
        """Whether a tensor of the checkpoint may be left unread."""
        ...


def read_spec(path: str | Path) -> ModelSpec:
    """Reads config.json and, if there is one, generation_config.json.

    Raises:
        CheckpointError: A file or field is missing, or says what is not supported.
    """
    path = Path(path)
    fields = Fields.read(path / "config.json")
    spec = read_family(fields)
    generation_config = path / "generation_config.json"
    return replace(spec, eos_token_ids=_eos_token_ids(generation_config, fields, spec.vocab_size))


def read_family(fields: Fields) -> ModelSpec:
    """Returns the model that config.json describes, without what generation_config.json says.

    Raises:
        CheckpointError: A field is missing, not known, or says what is not supported.
    """
    spec = _family(fields.architecture()).read(fields)
    fields.refuse_others()
    return spec


def _family(architecture: str) -> Family:
    if architecture not in _MODULES:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported; {', '.join(_MODULES)} are"
        )
    family: Any = import_module(f"{__name__}.{_MODULES[architecture]}")
    return cast(Family, family)


def _eos_token_ids(generation_config: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The generation config decides where it names any, as in Transformers' generate."""
    sources = [Fields.read(generation_config)] if generation_config.exists() else []
    for source in (*sources, fields, fields.nested("text_config")):
        eos = source.get("eos_token_id")
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        for number in ids:
            if type(number) is not int or not 0 <= number < vocab_size:
                raise source.error(
                    f"eos_token_id={eos}: need ids below the vocabulary's size, {vocab_size}"
                )
        return tuple(dict.fromkeys(ids))
    return ()


def new_model(
    spec: ModelSpec,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    peers: Peers | None = None,
    kernels: Kernels | None = None,
    aux_layers: Sequence[int] = (),
) -> Model:
    """Builds the model that ``spec`` describes, to be filled.

    Args:
        spec: Sizes and switches.
        dtype: Type to run in; the saved one if None.
        device: Where to run.
        peers: This executor's place and ways to the others; none if None.
        kernels: What the layers call; those of the CPU if None.
        aux_layers: Layers, counted from 0, after which the sum of residuals is a feature for a draft
            (``DraftConfig.aux_layers``).

    Raises:
        CheckpointError: The architecture is not supported.
        ValueError: Heads, experts or dense MLPs do not divide.
    """
    absent = [layer for layer in aux_layers if not 0 <= layer < len(spec.layers)]
    if absent:
        raise ValueError(
            f"aux_layers={list(aux_layers)}: the model has layers 0 to {len(spec.layers) - 1}"
        )
    dtype = dtype or spec.dtype
    family = _family(spec.architecture)
    return Decoder(
        spec,
        dtype=dtype,
        device=torch.device(device),
        peers=peers or Peers.gathering(spec.num_experts),
        kernels=kernels or cpu_kernels(spec, dtype=dtype, device=device),
        aux_layers=aux_layers,
        tensors=family.tensors(spec),
        unread=getattr(family, "UNREAD", ()),
    )


def load_model(
    path: str | Path,
    spec: ModelSpec,
    *,
    on_progress: OnProgress | None = None,
    **place: Any,
) -> Model:
    """Builds the model that ``spec`` describes and fills it from ``path``.

    Args:
        path: Checkpoint directory.
        spec: From the same directory.
        on_progress: Called with tensors loaded and tensors in all.
        place: As of ``new_model``.

    Raises:
        CheckpointError: The architecture is not supported, or the weights do not fit it.
        ValueError: Heads, experts or dense MLPs do not divide.
    """
    model = new_model(spec, **place)
    fill_model(path, spec, model, on_progress=on_progress)
    return model


def fill_model(
    path: str | Path, spec: ModelSpec, model: Model, *, on_progress: OnProgress | None = None
) -> None:
    """Fills a model; on the meta device, only checks the checkpoint.

    Raises:
        CheckpointError: The weights do not fit it.
    """
    load_weights(
        path,
        model.weight_groups(),
        weight_format=spec.quantization,
        skipped=model.skips,
        on_progress=on_progress,
    )
