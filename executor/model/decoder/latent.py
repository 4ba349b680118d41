"""Multi-head latent attention (MLA): projections around the attention backend, absorbed.

    C latent    P, R width of a head that does not turn, and that does    V width of a head's value

The checkpoint's kv_b_proj takes a token's latent l to each head's key W_UK l and value W_UV l. Neither
is ever made: queries are taken to the latent's space instead, and what they attend to back from it, so
that all heads share one cached row [l ; k_rope] of C + R numbers, whose first C columns are the values.

    q · (W_UK l) = (W_UKᵀ q) · l            Σ p (W_UV l) = W_UV Σ p l

Heads divide among the executors of a DP rank (attention TP); each of them keeps all latents.

Source: Transformers, models/deepseek_v3/modeling_deepseek_v3.py, for the weights.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from executor.model.decoder.kernels import Kernels, Peers
from executor.model.decoder.sizes import attention_share
from executor.model.layers.attention import PLAIN, AttentionCall
from executor.model.layers.linear import HeadLinear, Linear
from executor.model.layers.operators import RMSNorm
from executor.model.spec import MlaSpec
from executor.model.triton.operators import LatentTurn
from executor.model.weights import Part, Source, Target, Weight, WeightGroup
from executor.model.weights.targets import rope_rows_to_halves
from executor.parallel.layout import DpLayout


class LatentAttention:
    """This executor's heads of one layer.

    Args:
        spec: Sizes and switches.
        hidden_size: D.
        layer_id: Layer of the KV pool.
        peers: Share the heads.
        kernels: What it calls.

    Raises:
        ValueError: Heads do not divide among the executors of a DP rank.
    """

    options = PLAIN

    def __init__(
        self,
        spec: MlaSpec,
        hidden_size: int,
        layer_id: int,
        peers: Peers,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.layer_id = layer_id
        self.operators = kernels.operators
        self._turns_late = kernels.triton is not None
        self._attn_tp = peers.attn_tp
        self._heads = attention_share(spec, peers.capacity).q_heads
        self.num_heads = len(self._heads)
        self._q_width = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        self.latent_width = spec.kv_lora_rank + spec.qk_rope_head_dim
        rope = spec.qk_rope_head_dim
        ends = [self._q_width * (head + 1) for head in range(self.num_heads)]
        keeps = kernels.kept is None or not any(
            _cuts_block(kernels.kept.block, end - rope, end) for end in (*ends, self.latent_width)
        )
        if kernels.kept is not None and not keeps:
            kernels.kept.say_dequantised(
                "projections of attention",
                f"rope turns rows across scales, of {kernels.kept.block} each",
            )
        linear = kernels.linear(dtype=dtype, device=device, keeps=keeps)
        norm = partial(RMSNorm, eps=spec.latent_norm_eps, operators=kernels.operators)
        q_size = self.num_heads * self._q_width
        self.q_a_size = q_size if spec.q_lora_rank is None else spec.q_lora_rank
        # Queries or their latents, and beside them the latents of keys.
        self._a_sizes = (self.q_a_size, self.latent_width)
        self.a_proj = linear(
            hidden_size, sum(self._a_sizes), has_bias=spec.bias, parts=(self.q_a_size,)
        )
        self.q_b_proj: Linear | None = None
        if spec.q_lora_rank is not None:
            self.q_a_norm = norm(spec.q_lora_rank, dtype=dtype, device=device)
            self.q_b_proj = linear(spec.q_lora_rank, q_size, parts=(q_size,))
        self.kv_a_norm = norm(spec.kv_lora_rank, dtype=dtype, device=device)
        of_heads = partial(HeadLinear, dtype=dtype, device=device, library=kernels.library)
        self.w_uk = of_heads(self.num_heads, spec.qk_nope_head_dim, spec.kv_lora_rank)
        self.w_uv = of_heads(self.num_heads, spec.kv_lora_rank, spec.v_head_dim)
        # The executors' products are summed, so the first one adds the bias.
        has_bias = spec.bias and peers.capacity.attn_tp_rank == 0
        self.o_proj = linear(self.num_heads * spec.v_head_dim, hidden_size, has_bias=has_bias)

    def project(self, x: torch.Tensor, rotations: Sequence[Any], layout: DpLayout) -> AttentionCall:
        """Returns queries [T, heads, C + R] and latents [T, 1, C + R] of x [S, D]."""
        x = self._attn_tp.gather(x, layout)
        if self._turns_late and not layout.has_extend:
            return self._project_only(x, rotations)
        return self.project_gathered(x, rotations)

    def _project_only(self, x: torch.Tensor, rotations: Sequence[Any]) -> AttentionCall:
        """Leaves the latents' norm and all rotation to attention, which does them as it stores."""
        q_nope, q_rope, latents = self._parts(x)
        norm, latent_dim = self.kv_a_norm, self.spec.kv_lora_rank
        queries = x.new_empty(len(x), self.num_heads, self.latent_width)
        self.w_uk(q_nope, out=queries[..., :latent_dim])
        turn = LatentTurn(q_rope, norm.weight, norm.eps, *rotations[self.spec.rope])
        return AttentionCall(queries, latents.unsqueeze(1), None, self.layer_id, turn)

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what of queries does not turn and what does, and latents with their keys [T, C + R]."""
        q, latents = torch.split_with_sizes(self.a_proj(x), self._a_sizes, dim=-1)
        if self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_norm(q))
        q = q.view(len(x), self.num_heads, self._q_width)
        nope = self.spec.qk_nope_head_dim
        return q[..., :nope], q[..., nope:], latents

    def project_gathered(self, x: torch.Tensor, rotations: Sequence[Any]) -> AttentionCall:
        """Does the same for x [T, D], which every executor of the DP rank has."""
        spec = self.spec
        q_nope, q_rope, both = self._parts(x)
        latents, k_rope = both[:, : spec.kv_lora_rank], both[:, spec.kv_lora_rank :]
        # Dense, as the kernels want it: a slice of wider heads would be copied and the copy turned.
        qk = torch.cat((q_rope, k_rope.unsqueeze(1)), dim=1)
        rotation = rotations[spec.rope]
        q_rope, turned = self.operators.prepare_heads(qk, self.num_heads, None, rotation)
        absorbed = self.w_uk(q_nope)
        keys = torch.cat((self.kv_a_norm(latents).unsqueeze(1), turned), dim=-1)
        return AttentionCall(torch.cat((absorbed, q_rope), dim=-1), keys, None, self.layer_id)

    def merge(self, attended: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Returns what attention adds to this executor's rows, [S, D], of its heads' [T, H * C]."""
        by_head, out = attended.view(-1, self.num_heads, self.spec.kv_lora_rank), None
        if self._turns_late:  # on a GPU: dense, as its product wants it
            out = by_head.new_empty(len(by_head), self.num_heads, self.spec.v_head_dim)
        values = self.w_uv(by_head, out).flatten(1)
        return self._attn_tp.scatter_sum(self.o_proj(values), layout)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, its rope rows turned from pairs to halves."""
        rope = self.spec.qk_rope_head_dim
        q_turn = rope_rows_to_halves(self._q_width, rope)
        kv_turn = rope_rows_to_halves(self.latent_width, rope)
        norms = {f"{prefix}kv_a_layernorm.weight": self.kv_a_norm.weight}
        if self.q_b_proj is not None:
            norms[f"{prefix}q_a_layernorm.weight"] = self.q_a_norm.weight
        groups = [WeightGroup(norms)]
        targets: dict[Source, Target] = {}
        q, kv = self.a_proj.rows(*self._a_sizes)
        targets[Source(name=f"{prefix}kv_a_proj_with_mqa.weight", turn=kv_turn)] = kv
        if self.q_b_proj is not None:
            targets[Source(name=f"{prefix}q_a_proj.weight")] = q
        else:
            targets[Source(name=f"{prefix}q_proj.weight", turn=q_turn)] = self._of_heads(q)
        if self.a_proj.bias is not None:
            q_bias, kv_bias = torch.split_with_sizes(self.a_proj.bias, self._a_sizes)
            targets[Source(name=f"{prefix}kv_a_proj_with_mqa.bias", turn=kv_turn)] = kv_bias
            if self.q_b_proj is not None:
                targets[Source(name=f"{prefix}q_a_proj.bias")] = q_bias
            else:
                q_bias.zero_()
        groups.append(WeightGroup(targets, self.a_proj.finish))
        if self.q_b_proj is not None:
            q_b = Source(name=f"{prefix}q_b_proj.weight", turn=q_turn)
            target = self._of_heads(self.q_b_proj.filled)
            groups.append(WeightGroup({q_b: target}, self.q_b_proj.finish))
        groups.append(self._kv_b_group(prefix))
        o_targets: dict[str, Target] = {
            f"{prefix}o_proj.weight": self._of_heads(self.o_proj.filled, dim=1)
        }
        if self.o_proj.bias is not None:
            o_targets[f"{prefix}o_proj.bias"] = self.o_proj.bias
        return [*groups, WeightGroup(o_targets, self.o_proj.finish)]

    def _kv_b_group(self, prefix: str) -> WeightGroup:
        spec = self.spec
        width = spec.qk_nope_head_dim + spec.v_head_dim
        rows = self.w_uk.weight.new_empty(self.num_heads * width, spec.kv_lora_rank)
        # No memory until they are read: those of all layers of a DeepSeek-V3 have 2 GB.
        memory = rows.untyped_storage()
        begin = partial(memory.resize_, memory.nbytes())
        memory.resize_(0)

        def split() -> None:
            heads = rows.view(self.num_heads, width, -1)
            self.w_uk.weight.copy_(heads[:, : spec.qk_nope_head_dim])
            self.w_uv.weight.copy_(heads[:, spec.qk_nope_head_dim :].transpose(1, 2))
            self.w_uk.finish()
            self.w_uv.finish()

        return WeightGroup({f"{prefix}kv_b_proj.weight": self._of_heads(rows)}, split, begin)

    def _of_heads(self, target: Weight, dim: int = 0) -> Part:
        """Returns the part of a matrix whose rows or columns are heads'."""
        width = target.shape[dim] // self.num_heads
        at = range(self._heads.start * width, self._heads.stop * width)
        return Part(target, dim, at, self.spec.num_heads * width)


def _cuts_block(block: int, start: int, stop: int) -> bool:
    """Returns whether such rows share a scale with others; a row's own scale turns with it."""
    return block > 1 and start // block != (stop - 1) // block
