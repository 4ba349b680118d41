"""If this fails, latent attention computes other numbers than the published weights mean."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor.batch.kv_pool import KVShape
from executor.model.decoder.kernels import Kernels, Peers
from executor.model.decoder.latent import LatentAttention
from executor.model.layers.attention_torch import TorchAttention
from executor.model.layers.operators import RotaryEmbedding, TorchOperators
from executor.model.spec import MlaSpec, RopeSpec
from executor.model.weights import load_weights
from executor.parallel.layout import Capacity
from tests.executor.support.kv import batch_of, full_pool

HIDDEN, THETA, MAX_LEN = 24, 1e4, 64
SPEC = MlaSpec(
    num_heads=4,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=10,
    rope=0,
    scale=0.4,
)
Weights = dict[str, torch.Tensor]
SPECS = {"q latents": SPEC, "no q latents": replace(SPEC, q_lora_rank=None, bias=True)}


def random_weights(spec: MlaSpec) -> Weights:
    """Returns them as published, so large that scores matter; norms' weights are near 1."""
    generator = torch.Generator().manual_seed(1)
    q_size = spec.num_heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    kv_size = spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    latent_size = spec.kv_lora_rank + spec.qk_rope_head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent_size, HIDDEN),
        "kv_a_layernorm.weight": (spec.kv_lora_rank,),
        "kv_b_proj.weight": (kv_size, spec.kv_lora_rank),
        "o_proj.weight": (HIDDEN, spec.num_heads * spec.v_head_dim),
        "q_proj.weight": (q_size, HIDDEN),
    }
    if spec.q_lora_rank is not None:
        del sizes["q_proj.weight"]
        sizes["q_a_proj.weight"] = (spec.q_lora_rank, HIDDEN)
        sizes["q_a_layernorm.weight"] = (spec.q_lora_rank,)
        sizes["q_b_proj.weight"] = (q_size, spec.q_lora_rank)
    if spec.bias:
        sizes["kv_a_proj_with_mqa.bias"] = (latent_size,)
        sizes["o_proj.bias"] = (HIDDEN,)
    made = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return {
        name: x * 1.5 / x.shape[-1] ** 0.5 if x.dim() == 2 else 1 + 0.2 * x
        for name, x in made.items()
    }


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Returns x [T, …, R] with each pair (x_2i, x_2i+1) turned by its row's position."""
    width = x.shape[-1]
    angles = torch.outer(torch.arange(len(x)), THETA ** (-torch.arange(0, width, 2) / width))
    by = torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.dim() - 2), -1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * by).flatten(-2)


def expanded(x: torch.Tensor, weights: Weights, spec: MlaSpec) -> torch.Tensor:
    """Returns what attention adds to x [T, D], with keys and values of each head, as published."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        bias = weights.get(f"{name}.bias", torch.zeros(()))
        return x @ weights[f"{name}.weight"].T + bias

    nope, count = spec.qk_nope_head_dim, len(x)
    if spec.q_lora_rank is None:
        q = linear("q_proj", x)
    else:
        q = linear("q_b_proj", normed(linear("q_a_proj", x), weights["q_a_layernorm.weight"]))
    q = q.view(count, spec.num_heads, -1)
    latents, k_rope = linear("kv_a_proj_with_mqa", x).split(
        (spec.kv_lora_rank, spec.qk_rope_head_dim), dim=-1
    )
    kv = linear("kv_b_proj", normed(latents, weights["kv_a_layernorm.weight"]))
    k_nope, v = kv.view(count, spec.num_heads, -1).split((nope, spec.v_head_dim), dim=-1)
    q = torch.cat((q[..., :nope], turned(q[..., nope:])), dim=-1)
    k_rope = turned(k_rope)[:, None].expand(-1, spec.num_heads, -1)
    scores = torch.einsum("qhd,khd->hqk", q, torch.cat((k_nope, k_rope), dim=-1)) * spec.scale
    hidden = torch.ones(count, count).triu(1).bool()
    weights_of = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return linear("o_proj", torch.einsum("hqk,khd->qhd", weights_of, v).flatten(1))


def new_layer(spec: MlaSpec, rank: int = 0, count: int = 1) -> LatentAttention:
    """Returns one executor's heads, to be filled."""
    cpu = torch.device("cpu")
    rope = RopeSpec(rotary_dim=spec.qk_rope_head_dim, theta=THETA)
    rotary = RotaryEmbedding(rope, MAX_LEN, dtype=torch.float32, device=cpu)
    kernels = Kernels(operators=TorchOperators([rotary]), new_experts=Any)
    peers: Any = Peers.gathering(1)
    if count > 1:
        peers = Sharing(Capacity(attn_tp_rank=rank, attn_tp_size=count))
    return LatentAttention(spec, HIDDEN, 0, peers, kernels, dtype=torch.float32, device=cpu)


class Executor:
    """One executor's heads, and the latents that it keeps."""

    def __init__(self, path: Path, spec: MlaSpec, rank: int = 0, count: int = 1) -> None:
        self.layer = new_layer(spec, rank, count)
        skipped = {"a.o_proj.bias"} if rank else set[str]()
        load_weights(path, self.layer.weight_groups("a."), skipped=skipped.__contains__)
        shape = KVShape.of_latents(
            num_layers=1,
            latent_dim=spec.kv_lora_rank,
            rope_dim=spec.qk_rope_head_dim,
            block_size=4,
            dtype=torch.float32,
        )
        self.pool = full_pool(shape, 2, MAX_LEN)
        self.attention = TorchAttention(self.layer.num_heads, shape, scale=spec.scale)

    def run(self, x: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
        """Returns what attention adds to x [T, D] of row 1, so many tokens a pass."""
        done, outs = 0, []
        for count in chunks:
            batch = batch_of(self.pool, [1], [done], [count])
            rows = x[done : done + count]
            call = self.layer.project_gathered(
                rows, self.layer.operators.rotations(batch.positions)
            )
            self.attention.init_forward_metadata_out_graph(batch, self.pool)
            outs.append(self.layer.merge(self.attention.forward(*call[:4]), batch.layout))
            done += count
        return torch.cat(outs)


class Sharing:
    """Peers that share the heads, and add up nothing."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.attn_tp = self

    def scatter_sum(self, x: torch.Tensor, layout: object) -> torch.Tensor:
        return x


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> MlaSpec:
    return SPECS[request.param]


@pytest.fixture
def weights(spec: MlaSpec, tmp_path: Path) -> Weights:
    made = random_weights(spec)
    saved = {f"a.{name}": x for name, x in made.items()}
    if spec.bias:  # a checkpoint without q latents has none for queries
        assert "a.q_proj.bias" not in saved
    save_file(saved, tmp_path / "model.safetensors")
    return made


@pytest.mark.parametrize("chunks", [[30], [1, 20, 9], [27, 1, 1, 1]])
def test_absorbed_attention_equals_expanded_attention(
    chunks: list[int], spec: MlaSpec, weights: Weights, tmp_path: Path
) -> None:
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = expanded(x, weights, spec)
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(
        Executor(tmp_path, spec).run(x, chunks), expected, atol=1e-5, rtol=1e-5
    )


def test_executors_that_share_the_heads_add_up_to_all_of_them_and_keep_the_same_latents(
    spec: MlaSpec, weights: Weights, tmp_path: Path
) -> None:
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(2))
    shares = [Executor(tmp_path, spec, rank, 2) for rank in range(2)]
    total = sum((share.run(x, [20, 9, 1]) for share in shares), torch.zeros(()))
    torch.testing.assert_close(total, expanded(x, weights, spec), atol=1e-5, rtol=1e-5)
    first, second = (share.pool.caches[0][0] for share in shares)
    assert first.any()
    assert torch.equal(first, second)


def test_what_is_only_for_loading_takes_no_memory_before_it_is_read() -> None:
    name = "kv_b_proj.weight"
    [(group, part)] = [
        (group, dict[Any, Any](group.targets)[name])
        for group in new_layer(SPEC).weight_groups("")
        if name in group.targets
    ]
    memory = part.target.untyped_storage()
    assert memory.nbytes() == 0
    group.begin()
    assert memory.nbytes() == random_weights(SPEC)[name].nbytes


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"attn_tp_size=3: num_attention_heads=4 does not divide"):
        Executor(tmp_path, SPEC, 0, 3)
