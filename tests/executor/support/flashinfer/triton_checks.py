"""What each kernel in Triton computes against plain PyTorch, wherever it runs."""

import math
from collections.abc import Callable
from functools import partial

import torch

from executor.model.layers.attention_tables import look_up_pages
from executor.model.layers.operators import RotaryEmbedding, TorchOperators, cos_sin_table
from executor.model.moe.routing import choose_experts
from executor.model.spec import RopeSpec, RouterSpec, Scores
from executor.model.triton.operators import HeadTurn, LatentTurn, TritonOps

Check = Callable[[TritonOps, torch.device], None]

EPS = 1e-6
CPU = torch.device("cpu")
close = partial(torch.testing.assert_close, atol=0.02, rtol=0.02)


def check_pages(firsts: list[int] | None, ops: TritonOps, device: torch.device) -> None:
    table = torch.randperm(5 * 1500).view(5, 1500).int()
    rows, indptr = torch.tensor([3, 0, 4]), torch.tensor([0, 2, 1402, 1403], dtype=torch.int32)
    first = None if firsts is None else torch.tensor(firsts, dtype=torch.int32)
    out = torch.full((1500,), -1, dtype=torch.int32, device=device)
    given = (x.to(device) for x in (table, rows, indptr))
    ops.look_up_pages(*given, out, most=1500, firsts=None if first is None else first.to(device))
    places = torch.arange(1403, dtype=torch.int32)
    assert out[:1403].cpu().equal(look_up_pages(table, rows, indptr, places, first))
    assert (out[1403:] == -1).all()


def check_experts(num_experts: int, top_k: int, ops: TritonOps, device: torch.device) -> None:
    order = torch.stack([torch.randperm(num_experts) for _ in range(5)])
    logits = (order / 8 - 3).bfloat16()
    is_padding = torch.tensor([[False], [False], [True], [False], [True]])
    ids, weights = ops.choose_experts(
        logits.to(device), is_padding.to(device), top_k=top_k, factor=2.5
    )
    spec = RouterSpec(scores=Scores.SOFTMAX, renormalise=True, factor=2.5)
    expected_ids, expected = choose_experts(logits, top_k, spec)
    assert ids.cpu().equal(expected_ids.masked_fill(is_padding, num_experts))
    torch.testing.assert_close(weights.cpu(), expected)


def check_heads(rotary_dim: int, has_norm: bool, ops: TritonOps, device: torch.device) -> None:
    projected = torch.randn(3, 8 * 128 + 40).bfloat16()
    heads = projected[:, : 8 * 128].view(3, 8, 128)
    of_kind = torch.randn(2, 128).bfloat16()
    weight = of_kind.repeat_interleave(torch.tensor([4, 2]), 0) if has_norm else None
    positions, slots = torch.tensor([5, 0, 30]), torch.tensor([7, 0, 2])
    qk = heads[:, :6].float()
    if weight is not None:
        normed = TorchOperators(()).prepare_heads(qk, 4, (weight.float(), EPS), None)
        qk = torch.cat(normed, dim=1).bfloat16().float()
    rope = RopeSpec(rotary_dim=rotary_dim, theta=1e4)
    rotation = RotaryEmbedding(rope, 32, dtype=torch.float32, device=CPU).at(positions)
    qk = RotaryEmbedding.rotate(qk, rotation).bfloat16()
    caches = torch.zeros(2, 10, 2, 128, device=device).bfloat16()
    stored = caches.cpu()
    stored[0, slots], stored[1, slots] = qk[:, 4:], heads[:, 6:]
    turn = HeadTurn(
        None if weight is None else weight.to(device),
        EPS,
        positions.to(device),
        cos_sin_table(rope, 32).to(device),
    )
    on_device = projected.to(device)[:, : 8 * 128].view(3, 8, 128)

    q = ops.store_heads(
        on_device[:, :4], on_device[:, 4:6], turn, caches[0], caches[1], slots.to(device)
    )

    close(q.cpu(), qk[:, :4])
    close(caches.cpu(), stored)


def check_latents(ops: TritonOps, device: torch.device) -> None:
    both, q = torch.randn(3, 80).bfloat16(), torch.randn(3, 4, 32).bfloat16()
    latents, weight = both[:, None, :64], torch.randn(48).bfloat16()
    positions, slots = torch.tensor([5, 0, 30]), torch.tensor([7, 0, 2])
    rope = RopeSpec(rotary_dim=16, theta=1e4)
    rotation = RotaryEmbedding(rope, 32, dtype=torch.float32, device=CPU).at(positions)
    normed = TorchOperators(()).rms_norm(latents[..., :48].float(), weight.float(), EPS)
    stored, expected = torch.zeros(10, 1, 64).bfloat16(), torch.zeros(3, 4, 64).bfloat16()
    stored[slots, :, :48] = normed.bfloat16()
    stored[slots, :, 48:] = RotaryEmbedding.rotate(latents[..., 48:].float(), rotation).bfloat16()
    expected[..., 48:] = RotaryEmbedding.rotate(q[..., 16:].float(), rotation).bfloat16()
    queries, cache = (
        torch.zeros_like(expected, device=device),
        torch.zeros_like(stored, device=device),
    )
    on_device = cos_sin_table(rope, 32).to(device)
    turn = LatentTurn(
        q.to(device)[..., 16:], weight.to(device), EPS, positions.to(device), on_device
    )

    ops.store_latents_(queries, both.to(device)[:, None, :64], turn, cache, slots.to(device))

    close(queries.cpu(), expected)
    close(cache.cpu(), stored)


def check_sinks(ops: TritonOps, device: torch.device) -> None:
    out, lse, sinks = torch.randn(3, 4, 64).bfloat16(), torch.randn(3, 4) * 3, torch.randn(4)
    total = lse.mul(math.log(2)).exp()
    expected = out.float() * (total / (total + sinks.exp())).unsqueeze(-1)
    on_device = out.to(device)
    ops.add_sinks_(on_device, lse.to(device), sinks.to(device))
    close(on_device.cpu(), expected.bfloat16())


CHECKS: dict[str, Check] = {
    "pages": partial(check_pages, None),
    "pages of windows": partial(check_pages, [1, 0, 3]),
    "8 of 128 experts": partial(check_experts, 128, 8),
    "4 of 60 experts": partial(check_experts, 60, 4),
    "1 of 8 experts": partial(check_experts, 8, 1),
    "heads": partial(check_heads, 128, True),
    "heads without norm": partial(check_heads, 128, False),
    "heads that turn in part": partial(check_heads, 64, True),
    "latents": check_latents,
    "sinks": check_sinks,
}
