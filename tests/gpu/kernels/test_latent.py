"""Latent attention (MLA) over the KV pool against PyTorch on the CPU, in float32 from the same numbers."""

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVShape
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.layers.attention_torch import TorchAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from tests.executor.support.kv import full_pool
from tests.gpu.support.attention import BLOCK, LONG, SIZES, Twins
from tests.gpu.support.cases import CPU, fill_pool
from tests.gpu.support.machine import IS_STAND_IN, Machine
from tests.gpu.support.shapes import VERIFY_WIDTH

# DeepSeek-V3's, those of the prebuilt kernels, with the heads of one of eight executors.
HEADS, LATENT_DIM, ROPE_DIM = (6, 16, 8) if IS_STAND_IN else (16, 512, 64)
SCALE = 0.1
MIXES = {
    "decodes": [(LONG - 1, 1), (0, 1), (BLOCK, 1), (LONG // 2, 1)],
    "prompts": [(0, 5), (0, LONG // 4)],
    "mixed": [(30, 1), (0, 6), (9, 4), (LONG - 8, 1)],
}


class LatentTwins(Twins):
    """Latents of one layer, on the device and, in float32, on the CPU."""

    def __init__(self, device: torch.device) -> None:
        sizes = {"num_layers": 1, "latent_dim": LATENT_DIM, "rope_dim": ROPE_DIM}
        self.ours, self.theirs = (
            full_pool(
                KVShape.of_latents(**sizes, block_size=BLOCK, dtype=dtype),
                SIZES.num_rows,
                LONG,
                where,
            )
            for dtype, where in ((torch.bfloat16, device), (torch.float32, CPU))
        )
        for pool in (self.ours, self.theirs):
            fill_pool(pool)

    def latent(self, ops: FlashInferOps) -> FlashInferAttention:
        workspace = AttentionWorkspace(self.ours.device)
        rows = SIZES.max_num_tokens
        return FlashInferAttention(
            ops, self.ours, HEADS, workspace, max_num_tokens=rows, scale=SCALE
        )

    def authority(self) -> TorchAttention:
        return TorchAttention(HEADS, self.theirs.shape, scale=SCALE)

    def heads(self, num_rows: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(num_rows + seed)
        size = (num_rows, HEADS + 1, LATENT_DIM + ROPE_DIM)
        return torch.randn(*size, generator=generator).bfloat16()

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return heads[:, :HEADS], heads[:, HEADS:], None


@pytest.fixture
def latents(machine: Machine) -> LatentTwins:
    return LatentTwins(machine.device)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_latents_are_attended_to_like_the_authority_does(
    ops: FlashInferOps, latents: LatentTwins, mix: list[tuple[int, int]]
) -> None:
    latents.check(latents.latent(ops), mix)


@pytest.mark.parametrize("width", [1, VERIFY_WIDTH])
def test_the_wrappers_of_graphs_attend_to_latents_like_the_authority(
    ops: FlashInferOps, latents: LatentTwins, width: int
) -> None:
    """Planned anew for each batch, with nothing captured yet."""
    attention = latents.latent(ops)
    attention.init_cuda_graph_state(SIZES.decode, width)
    rng = np.random.default_rng(width)
    for size in reversed(SIZES.decode):
        mix = [(int(prefix), width) for prefix in rng.integers(0, LONG - width + 1, size)]
        latents.check(attention, mix, graph_size=size * width)
