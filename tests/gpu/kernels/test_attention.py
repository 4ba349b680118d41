"""Attention over the KV pool against PyTorch on the CPU, in float32 from the same numbers."""

import numpy as np
import pytest

from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention_workspace import AttentionWorkspace
from tests.gpu.support.attention import BLOCK, LONG, SIZES, Twins
from tests.gpu.support.cases import torch_attention
from tests.gpu.support.machine import Machine
from tests.gpu.support.shapes import VERIFY_WIDTH

# One entry per sequence: keys before this pass, query rows in it.
DECODES = {
    "one": [(17, 1)],
    "first tokens": [(0, 1), (0, 1)],
    "block edges": [(BLOCK - 1, 1), (BLOCK, 1), (2 * BLOCK - 1, 1), (LONG - 1, 1)],
    "long and short": [(LONG - 1, 1), (0, 1), (LONG // 2, 1), (3, 1), (LONG - 7, 1)],
}
EXTENDS = {
    "one prompt": [(0, 9)],
    "prompts": [(0, 5), (0, 2), (0, LONG // 4)],
    "a chunk with its prefix": [(LONG // 2, LONG // 4)],
    "chunks": [(4, 5), (13, 7), (0, 3), (BLOCK, BLOCK)],
    "mixed": [(30, 1), (0, 6), (2, 1), (9, 4), (LONG - 8, 1)],
}


@pytest.mark.parametrize("mix", [*DECODES.values(), *EXTENDS.values()], ids=[*DECODES, *EXTENDS])
def test_torch_attends_alike_on_both_devices(twins: Twins, mix: list[tuple[int, int]]) -> None:
    twins.check(torch_attention(twins.config, twins.ours, SIZES), mix)


@pytest.mark.parametrize("mix", [*DECODES.values(), []], ids=[*DECODES, "none"])
def test_decodes_attend_like_the_authority(
    ops: FlashInferOps, twins: Twins, mix: list[tuple[int, int]]
) -> None:
    """With tensor cores and without: the number of query heads per KV head decides."""
    twins.check(twins.flashinfer(ops), mix)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("mix", EXTENDS.values(), ids=EXTENDS)
def test_extends_attend_like_the_authority(
    machine: Machine,
    ops: FlashInferOps,
    twins: Twins,
    mix: list[tuple[int, int]],
    backend: str,
) -> None:
    if backend == "fa3" and not machine.has_fa3:
        pytest.skip("needs a Hopper GPU: fa3 kernels run on compute capability 9")
    twins.check(twins.flashinfer(ops, extend_backend=backend), mix)


@pytest.mark.parametrize("width", [1, VERIFY_WIDTH])
def test_the_wrappers_of_graphs_attend_like_the_authority(
    ops: FlashInferOps, twins: Twins, width: int
) -> None:
    """Planned anew for each batch, with nothing captured yet."""
    attention = twins.flashinfer(ops)
    attention.init_cuda_graph_state(SIZES.decode, width)
    rng = np.random.default_rng(width)
    for size in (*reversed(SIZES.decode), SIZES.decode[-1]):
        prefixes = rng.integers(0, LONG - width + 1, size)
        mix = [(int(prefix), width) for prefix in prefixes]
        twins.check(attention, mix, graph_size=size * width)


def test_a_graph_that_needs_more_workspace_leaves_eager_batches_alone(
    ops: FlashInferOps, twins: Twins
) -> None:
    """Both are planned in turn, on one workspace."""
    attention = twins.flashinfer(ops)
    attention.init_cuda_graph_state(SIZES.decode)
    attention.init_cuda_graph_state(SIZES.decode, VERIFY_WIDTH)
    for mix in (EXTENDS["mixed"], DECODES["long and short"], EXTENDS["chunks"]):
        twins.check(attention, mix)
        twins.check(attention, [(LONG - 1, 1)] * 2, graph_size=2)


def test_passes_that_share_a_workspace_are_all_planned_before_the_first_one_runs(
    machine: Machine, ops: FlashInferOps, twins: Twins
) -> None:
    """As those of a draft phase. Their partial results lie in the same memory."""
    workspace = AttentionWorkspace(machine.device)
    attentions = [twins.flashinfer(ops, workspace=workspace) for _ in range(3)]
    for attention in attentions:
        attention.init_cuda_graph_state(SIZES.decode)
    for size in SIZES.decode:
        twins.check_together(
            attentions, lambda place, size=size: [(LONG - 1 - 5 * place, 1)] * size
        )


@pytest.mark.parametrize("mix", DECODES.values(), ids=DECODES)
def test_queries_without_keys_attend_like_the_authority(
    ops: FlashInferOps, twins: Twins, mix: list[tuple[int, int]]
) -> None:
    attention = twins.flashinfer(ops)
    twins.check(attention, mix, has_keys=False)
