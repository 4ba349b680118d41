"""Tree masks in FlashInfer's kernels against PyTorch on the CPU, in float32 from the same numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.graph.backend import ShapeKey
from executor.model.decoder.sizes import attention_of
from executor.model.flashinfer.operators import FlashInferOps
from executor.parallel.layout import DpLayout
from tests.gpu.support.attention import LONG, SIZES, Twins, batch_of
from tests.gpu.support.machine import Machine
from tests.gpu.support.shapes import VERIFY_WIDTH

WIDTHS = [1, VERIFY_WIDTH, 9]


def random_masks(size: int, width: int, tree_width: int, seed: int) -> torch.Tensor:
    """Returns bool [B, Q, W] in which each query sees its own key, and others by chance."""
    masks = torch.rand(size, width, tree_width, generator=torch.Generator().manual_seed(seed)) < 0.5
    own = torch.arange(width)
    masks[:, own, tree_width - width + own] = True
    return masks


def random_mix(size: int, width: int, seed: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return [(int(prefix), width) for prefix in rng.integers(0, LONG - width + 1, size)]


@pytest.mark.parametrize("width", WIDTHS)
def test_trees_outside_graphs_attend_like_the_authority(
    ops: FlashInferOps, twins: Twins, width: int
) -> None:
    attention = twins.flashinfer(ops)
    for seed, size in enumerate((1, 3, 7)):
        masks = random_masks(size, width, width + seed, seed)
        twins.check(attention, random_mix(size, width, seed), tree_mask=masks)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_wrappers_of_graphs_attend_to_trees_like_the_authority(
    ops: FlashInferOps, twins: Twins, width: int
) -> None:
    """Planned anew for each batch, with nothing captured yet, between batches without trees."""
    sizes = [size for size in SIZES.decode if size * width <= SIZES.max_num_tokens]
    attention = twins.flashinfer(ops)
    attention.init_cuda_graph_state(sizes, width)
    attention.init_cuda_graph_state(sizes, width, has_tree=True)
    for seed, size in enumerate((*reversed(sizes), sizes[-1])):
        mix, graph_size = random_mix(size, width, seed), size * width
        masks = random_masks(size, width, width + seed, seed)
        twins.check(attention, mix, graph_size=graph_size, tree_mask=masks)
        twins.check(attention, mix, graph_size=graph_size)


def test_a_replay_reads_the_tree_that_was_written_after_planning(
    machine: Machine, ops: FlashInferOps, twins: Twins
) -> None:
    size, width = SIZES.decode[-1], VERIFY_WIDTH
    attention, config = twins.flashinfer(ops), twins.config
    attention.init_cuda_graph_state([size], width, has_tree=True)
    masks = torch.zeros(size, width, width, dtype=torch.bool, device=machine.device)
    slots = torch.zeros(size * width, dtype=torch.int64, device=machine.device)
    heads = torch.zeros_like(twins.heads(size * width), device=machine.device)
    out_size = (size * width, attention_of(config).num_heads * attention_of(config).head_dim)
    out = torch.zeros(out_size, dtype=torch.bfloat16, device=machine.device)

    def plan(batch: ForwardBatch) -> None:
        layout = DpLayout.single(size * width, size * width)
        view = replace(batch, layout=layout, tree_mask=masks, out_cache_loc=slots)
        attention.init_forward_metadata_out_graph(view, twins.ours)

    def run() -> None:
        attention.init_forward_metadata_in_graph()
        out.copy_(attention.forward(*twins.split(heads), 0))

    backend = machine.new_backend()
    plan(batch_of(twins.ours, [(0, width)] * size, None))
    with torch.inference_mode(), backend.session(label="verify", num_captures=1):
        backend.warm_up(run)
        backend.capture(ShapeKey(size), run)
    for seed in range(3):
        mix, drawn = random_mix(size, width, seed), twins.heads(size * width, seed)
        batch = batch_of(twins.ours, mix, None)
        tree = random_masks(size, width, width, seed)
        slots.copy_(batch.out_cache_loc)
        heads.copy_(drawn)
        plan(batch)
        masks.copy_(tree)
        backend.replay(ShapeKey(size))
        twins.check_result(out, mix, drawn, tree)
