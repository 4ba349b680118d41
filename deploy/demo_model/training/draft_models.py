"""Draft models of the demo model. Their parameters are named as in published checkpoints.

Built from deploy/demo_model/training/draft_modules.py, which says how drafts are aligned with their target.
"""

import torch
from torch import nn

from deploy.demo_model.training.draft_modules import (
    CHAIN_LEN,
    Attention,
    Cell,
    Chains,
    Choose,
    Context,
    Draft,
    Layer,
    Mlp,
    Norm,
    Row,
    Shape,
    shifted,
)


class EagleDraft(Draft):
    """An EAGLE-3 head: one dense layer over three of the target's residual sums.

    Args:
        shape: The heads are the draft's own.
        embedding: [V, H], the target's.
        head: [V, H], the target's, which the draft's own begins as.
        aux_layer_ids: The layers after which the three sums are taken.

    Source: Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via
    training-time test", section 3; tensor names of `LlamaForCausalLMEagle3`.
    """

    def __init__(
        self,
        shape: Shape,
        embedding: torch.Tensor,
        head: torch.Tensor,
        aux_layer_ids: tuple[int, ...],
    ) -> None:
        super().__init__(embedding, head)
        self._aux_layer_ids = aux_layer_ids
        hidden_size = shape.hidden_size
        self.fc = nn.Linear(len(aux_layer_ids) * hidden_size, hidden_size, bias=False)
        self.midlayer = EagleLayer(shape)
        self.norm = Norm(hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(hidden_size, shape.vocab_size, bias=False)
        self.lm_head.weight.data.copy_(head)

    def unroll(self, context: Context, choose: Choose) -> list[torch.Tensor]:
        """See Draft."""
        sums = [context.residuals[layer_id] for layer_id in self._aux_layer_ids]
        features = self.fc(torch.cat(sums, dim=-1))
        return self.unroll_cell(self.midlayer, features, context, choose)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [B, T, V] of [B, T, H]."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


class EagleLayer(Cell):
    """The layer of an EAGLE-3 head: attention's input is token and feature side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(
            shape, Attention(shape, 2 * shape.hidden_size, has_norms=False), Mlp(shape)
        )
        self.hidden_norm = Norm(shape.hidden_size, shape.norm_eps)

    def enter(
        self, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Cell."""
        normed = (self.input_layernorm(embedded), self.hidden_norm(hidden))
        return hidden, torch.cat(normed, dim=-1)


class SharedHead(nn.Module):
    """End of an MTP layer. Its head is the target's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = Norm(shape.hidden_size, shape.norm_eps)


class MtpLayer(Cell):
    """A decoder layer of the target's family behind a projection of token and hidden state.

    Args:
        shape: Shared with the target.
        mlp: Dense or mixture of experts, from [B, T, H] to [B, T, H].

    Source: DeepSeek-V3 technical report, section 2.2, and the tensor names of its layer 61.
    """

    def __init__(self, shape: Shape, mlp: nn.Module) -> None:
        hidden_size, eps = shape.hidden_size, shape.norm_eps
        # Drawn first: the order of the draws is part of what makes a training repeatable.
        eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        super().__init__(shape, Attention(shape, hidden_size, has_norms=True), mlp)
        self.enorm = Norm(hidden_size, eps)
        self.hnorm = Norm(hidden_size, eps)
        self.eh_proj = eh_proj
        self.shared_head = SharedHead(shape)

    def enter(
        self, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Cell."""
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return joined, self.input_layernorm(joined)

    def leave(self, residual: torch.Tensor) -> torch.Tensor:
        """See Cell."""
        hidden: torch.Tensor = self.shared_head.norm(super().leave(residual))
        return hidden


class MtpDraft(Draft):
    """One MTP layer, applied again to its own output."""

    def __init__(
        self, shape: Shape, embedding: torch.Tensor, head: torch.Tensor, mlp: nn.Module
    ) -> None:
        super().__init__(embedding, head)
        self.mtp_layers = [MtpLayer(shape, mlp)]
        self.layers = nn.ModuleList(self.mtp_layers)

    def unroll(self, context: Context, choose: Choose) -> list[torch.Tensor]:
        """See Draft."""
        (layer,) = self.mtp_layers
        return self.unroll_cell(layer, context.hidden, context, choose)


class MultiLayerMtpDraft(Draft):
    """CHAIN_LEN MTP layers, each taking what the one before gives one position earlier.

    Draft i + 1 of a chain comes from layer i at position root + i.
    """

    def __init__(self, shape: Shape, embedding: torch.Tensor, head: torch.Tensor) -> None:
        super().__init__(embedding, head)
        self.mtp_layers = [MtpLayer(shape, Mlp(shape)) for _ in range(CHAIN_LEN)]
        self.layers = nn.ModuleList(self.mtp_layers)

    def unroll_true(self, context: Context) -> list[torch.Tensor]:
        """Returns what `unroll` does if every draft is right, from one pass of each layer."""
        outputs = self._row_outputs(context)
        return [
            self.compute_logits(context.at_roots(hidden, i)) for i, hidden in enumerate(outputs)
        ]

    def unroll(self, context: Context, choose: Choose) -> list[torch.Tensor]:
        """See Draft."""
        outputs = self._row_outputs(context)
        hidden = context.at_roots(outputs[0])
        logits = [self.compute_logits(hidden)]
        chain = [(choose(0, logits[0]), hidden)]  # tokens at root + 1, ..; hidden before each
        for step in range(1, CHAIN_LEN):
            layer, rows_before = self.mtp_layers[step], shifted(outputs[step - 1])
            _, inputs = layer.enter(self.embed(context.ids), rows_before)
            row = layer.self_attn.keys_values(inputs, context.positions)
            chains = Chains(*row, ends=context.roots + 1)
            new_hidden: list[torch.Tensor] = []
            for i, (tokens, before) in enumerate(chain, start=1):
                positions = context.roots + i
                residual, inputs = layer.enter(self.embed(tokens), before)
                chains.append(layer.self_attn.keys_values(inputs, positions))
                attended = layer.self_attn(inputs, positions, chains)
                new_hidden.append(layer.leave(residual + attended))
            logits.append(self.compute_logits(new_hidden[-1]))
            # The next layer's entry at root + 1 takes this one's output at the root.
            befores = [context.at_roots(outputs[step]), *new_hidden]
            next_tokens = [*(tokens for tokens, _ in chain), choose(step, logits[-1])]
            chain = list(zip(next_tokens, befores, strict=True))
        return logits

    def _row_outputs(self, context: Context) -> list[torch.Tensor]:
        """Returns what each layer gives on the rows as they stand, [B, S, H]."""
        embedded, hidden = self.embed(context.ids), context.hidden
        outputs: list[torch.Tensor] = []
        for layer in self.mtp_layers:
            residual, inputs = layer.enter(embedded, shifted(hidden))
            row = Row(*layer.self_attn.keys_values(inputs, context.positions))
            hidden = layer.leave(residual + layer.self_attn(inputs, context.positions, row))
            outputs.append(hidden)
        return outputs


class FrozenKvDraft(Draft):
    """Layers that attend to the target's keys and values, and have none of their own.

    Every step of a chain sees what the target has computed: the positions before the root.

    Args:
        shape: The target's.
        embedding: [V, H], the target's.
        head: [V, H], the target's.
        target_kv_layer_ids: The target's layer whose keys and values each layer reads.
    """

    def __init__(
        self,
        shape: Shape,
        embedding: torch.Tensor,
        head: torch.Tensor,
        target_kv_layer_ids: tuple[int, ...],
    ) -> None:
        super().__init__(embedding, head)
        hidden_size, eps = shape.hidden_size, shape.norm_eps
        self._target_kv_layer_ids = target_kv_layer_ids
        self.pre_fc_norm_embedding = Norm(hidden_size, eps)
        self.pre_fc_norm_hidden = Norm(hidden_size, eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.kv_layers = [
            Layer(shape, Attention(shape, hidden_size, has_norms=True, has_keys=False), Mlp(shape))
            for _ in target_kv_layer_ids
        ]
        self.layers = nn.ModuleList(self.kv_layers)
        self.norm = Norm(hidden_size, eps)

    def unroll(self, context: Context, choose: Choose) -> list[torch.Tensor]:
        """See Draft."""
        hidden = context.at_roots(shifted(context.hidden))
        tokens = context.at_roots(context.ids)
        seen = [
            Chains(context.keys[layer_id], context.values[layer_id], ends=context.roots)
            for layer_id in self._target_kv_layer_ids
        ]
        logits: list[torch.Tensor] = []
        for step in range(CHAIN_LEN):
            positions = context.roots + step
            embedded = self.pre_fc_norm_embedding(self.embed(tokens))
            x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(hidden)), dim=-1))
            for layer, chains in zip(self.kv_layers, seen, strict=True):
                x = x + layer.self_attn(layer.input_layernorm(x), positions, chains)
                x = layer.leave(x)
            hidden = self.norm(x)
            logits.append(self.compute_logits(hidden))
            tokens = choose(step, logits[-1])
        return logits
