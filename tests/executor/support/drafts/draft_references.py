"""What each kind of draft computes, written once more: plain torch, no cache, one text at a time.

Reads a checkpoint's tensors by their published names. Knows nothing of the executor.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TargetTensors:
    """What a draft has of its target.

    Attributes:
        embedding: [V, H].
        head: [V, H].
    """

    embedding: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True)
class DraftReference:
    """One draft.

    Attributes:
        config: Its config.json.
        tensors: Its checkpoint.
        target: What it shares.
    """

    config: Mapping[str, Any]
    tensors: Tensors
    target: TargetTensors

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.tensors["fc.weight"].T

    def hidden(self, ids: Sequence[int], hidden: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Returns [T, H] of a text from its first token on, and a hidden state with each token."""
        embedded = self.target.embedding[torch.tensor(ids)]
        if "midlayer.hidden_norm.weight" in self.tensors:
            return self._eagle(embedded, hidden)
        names = self._names(layer)
        x = self._combine(embedded, hidden, names)
        x = self._decoder(x, names[4], range(len(ids)))
        return self._norm(x, names[3])

    def frozen(
        self,
        token: int,
        hidden: torch.Tensor,
        position: int,
        kept: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Returns [H] of one token, given keys and values [S, N, D] of each of its layers."""
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "")
        x = self._combine(self.target.embedding[token][None], hidden[None], names)
        for i, keys_values in enumerate(kept):
            x = self._decoder(x, f"layers.{i}.", [position], keys_values)
        return self._norm(x, "norm")[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if "midlayer.hidden_norm.weight" in self.tensors:
            hidden = self._norm(hidden, "norm")
            return hidden @ self.tensors.get("lm_head.weight", self.target.head).T
        return hidden @ self.target.head.T

    def _names(self, layer: int) -> tuple[str, str, str, str, str]:
        """Returns norms of embedding and hidden, projection, last norm, and the layer's prefix."""
        if "mtp.fc.weight" in self.tensors:
            shared = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
            return (*shared, f"mtp.layers.{layer}.")
        prefix = f"model.layers.{self.config['num_hidden_layers'] + layer}."
        own = (f"{prefix}{x}" for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        enorm, hnorm, proj, norm = own
        return enorm, hnorm, proj, norm, prefix

    def _eagle(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self._normed(embedded, hidden, "midlayer.input_layernorm", "midlayer.hidden_norm")
        x = hidden + self._attention(x, "midlayer.self_attn.", range(len(x)), None)
        return x + self._mlp(self._norm(x, "midlayer.post_attention_layernorm"), "midlayer.mlp.")

    def _combine(
        self, embedded: torch.Tensor, hidden: torch.Tensor, names: Sequence[str]
    ) -> torch.Tensor:
        both = self._normed(embedded, hidden, names[0], names[1])
        return both @ self.tensors[f"{names[2]}.weight"].T

    def _normed(self, embedded: torch.Tensor, hidden: torch.Tensor, *norms: str) -> torch.Tensor:
        return torch.cat(
            [self._norm(x, n) for x, n in zip((embedded, hidden), norms, strict=True)], dim=-1
        )

    def _decoder(
        self,
        x: torch.Tensor,
        prefix: str,
        positions: Sequence[int],
        kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        normed = self._norm(x, f"{prefix}input_layernorm")
        x = x + self._attention(normed, f"{prefix}self_attn.", positions, kept)
        return x + self._mlp(self._norm(x, f"{prefix}post_attention_layernorm"), f"{prefix}mlp.")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale: torch.Tensor = (
            x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        ).rsqrt()
        normed: torch.Tensor = x * scale * self.tensors[f"{name}.weight"]
        return normed

    def _attention(
        self,
        x: torch.Tensor,
        prefix: str,
        positions: Sequence[int],
        kept: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        queries = self._rotated(self._heads(x, f"{prefix}q"), positions)
        if kept is None:
            keys = self._rotated(self._heads(x, f"{prefix}k"), positions)
            values = self._heads(x, f"{prefix}v")
        else:
            keys, values = kept
        group = queries.shape[1] // keys.shape[1]
        out = []
        for t, query in enumerate(queries):
            seen = len(keys) if kept is not None else t + 1
            heads = []
            for h, q in enumerate(query):
                scores = keys[:seen, h // group] @ q * q.shape[0] ** -0.5
                heads.append(torch.softmax(scores, 0) @ values[:seen, h // group])
            out.append(torch.cat(heads))
        return self._linear(torch.stack(out), f"{prefix}o_proj")

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        heads = self._linear(x, f"{name}_proj").view(len(x), -1, self.config["head_dim"])
        return self._norm(heads, f"{name}_norm") if f"{name}_norm.weight" in self.tensors else heads

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors.get(f"{name}.bias", 0.0)

    def _rotated(self, heads: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Turns (x[i], x[i + D/2]), seen as one complex number."""
        half = heads.shape[-1] // 2
        rope = self.config.get("rope_parameters", {})
        theta = rope.get("rope_theta", self.config.get("rope_theta", 10000.0))
        speeds = theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.tensor(list(positions))[:, None] * speeds
        turned = torch.complex(heads[..., :half].double(), heads[..., half:].double())
        turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    def _mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        if f"{prefix}gate.weight" not in self.tensors:
            return self._gated(x, prefix)
        rows = []
        for row in x:
            weights = torch.softmax(self.tensors[f"{prefix}gate.weight"] @ row, 0)
            chosen = weights.argsort(descending=True)[: self.config["num_experts_per_tok"]]
            total = weights[chosen].sum() if self.config["norm_topk_prob"] else 1.0
            added = torch.zeros_like(row)
            for e in chosen.tolist():
                added += weights[e] / total * self._gated(row, f"{prefix}experts.{e}.")
            rows.append(added)
        return torch.stack(rows)

    def _gated(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate = x @ self.tensors[f"{prefix}gate_proj.weight"].T
        up = x @ self.tensors[f"{prefix}up_proj.weight"].T
        return (gate * torch.sigmoid(gate) * up) @ self.tensors[f"{prefix}down_proj.weight"].T


def shared_with(target: Path, tensors: Tensors | None = None) -> TargetTensors:
    """Returns what drafts have of a target: of its checkpoint, or of these tensors."""
    tensors = tensors or load_file(target / "model.safetensors")
    return TargetTensors(
        tensors["model.embed_tokens.weight"].float(), tensors["lm_head.weight"].float()
    )


def reference(target: Path, path: Path) -> DraftReference:
    """Returns the draft of a checkpoint."""
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    return DraftReference(
        json.loads((path / "config.json").read_text()), tensors, shared_with(target)
    )
