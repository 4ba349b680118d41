"""Attention over the KV pool against PyTorch on the CPU, in float32 from the same numbers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.model.families.config import ModelConfig
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention import Attention
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.parallel.layout import DpLayout
from tests.executor.support.kv import out_cache_loc
from tests.gpu.support.cases import CPU, fill_pool, flashinfer_attention, new_pool, torch_attention
from tests.gpu.support.machine import IS_STAND_IN, Machine
from tests.gpu.support.shapes import SMALL_MODELS, VERIFY_WIDTH, Sizes

ATOL, RTOL = 2e-2, 2**-5  # weights of keys are rounded before they are summed

SIZES = Sizes(block_size=4, num_rows=9, max_len=48, decode=(1, 2, 4, 8), prefill=(8, 64))
if not IS_STAND_IN:
    SIZES = Sizes(
        block_size=16, num_rows=64, max_len=4096, decode=(1, 2, 8, 64), prefill=(64, 4096)
    )
LONG, BLOCK = SIZES.max_len, SIZES.block_size

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


@pytest.fixture(params=SMALL_MODELS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return replace(SMALL_MODELS[request.param], num_hidden_layers=1)


class Twins:
    """The same pool on the device and, in float32, on the CPU."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self.ours = new_pool(config, SIZES, device)
        self.exact_config = replace(config, dtype=torch.float32)
        self.theirs = new_pool(self.exact_config, SIZES, CPU)
        for pool in (self.ours, self.theirs):
            fill_pool(pool)

    def check(
        self,
        attention: Attention,
        mix: list[tuple[int, int]],
        *,
        graph_size: int | None = None,
        tree_mask: torch.Tensor | None = None,
        has_keys: bool = True,
    ) -> None:
        """Attends with both, and compares results and all keys and values.

        Args:
            attention: To be compared with the authority.
            mix: What the batch consists of.
            graph_size: Token rows of the graph whose wrapper runs it.
            tree_mask: bool [B, Q, W] on the CPU.
            has_keys: Whether the pass stores keys and values.
        """
        authority = torch_attention(self.exact_config, self.theirs, SIZES)
        heads = self._heads(sum(count for _, count in mix))
        what = (mix, heads, graph_size, tree_mask, has_keys)
        ours = self._planned(attention, self.ours, *what)()
        theirs = self._planned(authority, self.theirs, *what)()
        torch.testing.assert_close(ours.to(CPU, torch.float32), theirs, atol=ATOL, rtol=RTOL)
        for caches in ("key_cache", "value_cache"):
            [stored], [right] = getattr(self.ours, caches), getattr(self.theirs, caches)
            assert torch.equal(stored.to(CPU, torch.float32), right), caches

    def check_together(
        self, attentions: Sequence[Attention], mix_of: Callable[[int], list[tuple[int, int]]]
    ) -> None:
        """Plans all, each for a batch of queries without keys, before the first of them attends.

        Args:
            attentions: To be compared with the authority, with wrappers for graphs.
            mix_of: Takes the place of one to its batch.
        """
        authority = torch_attention(self.exact_config, self.theirs, SIZES)
        runs, expected = [], []
        for place, attention in enumerate(attentions):
            mix = mix_of(place)
            what = (mix, self._heads(len(mix) + place)[place:], len(mix), None, False)
            runs.append(self._planned(attention, self.ours, *what))
            expected.append(self._planned(authority, self.theirs, *what)())
        for ours, theirs in zip([run() for run in runs], expected, strict=True):
            torch.testing.assert_close(ours.to(CPU, torch.float32), theirs, atol=ATOL, rtol=RTOL)

    def _heads(self, num_rows: int) -> torch.Tensor:
        """Returns queries, keys and values side by side, as the projection leaves them."""
        config = self.config
        size = (num_rows, config.num_attention_heads + 2 * config.num_key_value_heads)
        generator = torch.Generator().manual_seed(num_rows)
        return torch.randn(*size, config.head_dim, generator=generator).bfloat16()

    def _planned(
        self,
        attention: Attention,
        pool: KVPool,
        mix: list[tuple[int, int]],
        heads: torch.Tensor,
        graph_size: int | None,
        tree_mask: torch.Tensor | None,
        has_keys: bool,
    ) -> Callable[[], torch.Tensor]:
        """Plans a batch, and returns what attends."""
        config = self.config
        batch = batch_of(pool, mix, graph_size)
        batch.tree_mask = None if tree_mask is None else tree_mask.to(pool.device)
        splits = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
        q, k, v = torch.split_with_sizes(heads.to(pool.device, pool.shape.dtype), splits, dim=1)
        attention.init_forward_metadata_out_graph(batch, pool)

        def attend() -> torch.Tensor:
            attention.init_forward_metadata_in_graph()
            return attention.forward(q, *((k, v) if has_keys else (None, None)), 0)

        return attend


def batch_of(pool: KVPool, mix: list[tuple[int, int]], graph_size: int | None) -> ForwardBatch:
    prefixes, counts = [p for p, _ in mix], [n for _, n in mix]
    rows = list(range(len(mix)))[::-1]
    total = sum(counts)
    return ForwardBatch.from_columns(
        rows=rows,
        num_computed=prefixes,
        num_tokens=counts,
        input_ids=torch.zeros(total, dtype=torch.int64, device=pool.device),
        out_cache_loc=out_cache_loc(pool, rows, prefixes, counts),
        layout=DpLayout.single(total, graph_size),
    )


@pytest.mark.parametrize("mix", [*DECODES.values(), *EXTENDS.values()], ids=[*DECODES, *EXTENDS])
def test_torch_attends_alike_on_both_devices(
    machine: Machine, config: ModelConfig, mix: list[tuple[int, int]]
) -> None:
    twins = Twins(config, machine.device)
    twins.check(torch_attention(config, twins.ours, SIZES), mix)


@pytest.mark.parametrize("mix", [*DECODES.values(), []], ids=[*DECODES, "none"])
def test_decodes_attend_like_the_authority(
    machine: Machine, ops: FlashInferOps, config: ModelConfig, mix: list[tuple[int, int]]
) -> None:
    """With tensor cores and without: the number of query heads per KV head decides."""
    twins = Twins(config, machine.device)
    twins.check(flashinfer_attention(ops)(config, twins.ours, SIZES), mix)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("mix", EXTENDS.values(), ids=EXTENDS)
def test_extends_attend_like_the_authority(
    machine: Machine,
    ops: FlashInferOps,
    config: ModelConfig,
    mix: list[tuple[int, int]],
    backend: str,
) -> None:
    if backend == "fa3" and not machine.has_fa3:
        pytest.skip("needs a Hopper GPU: fa3 kernels run on compute capability 9")
    twins = Twins(config, machine.device)
    twins.check(flashinfer_attention(ops, backend)(config, twins.ours, SIZES), mix)


@pytest.mark.parametrize("width", [1, VERIFY_WIDTH])
def test_the_wrappers_of_graphs_attend_like_the_authority(
    machine: Machine, ops: FlashInferOps, config: ModelConfig, width: int
) -> None:
    """Planned anew for each batch, with nothing captured yet."""
    twins = Twins(config, machine.device)
    attention = flashinfer_attention(ops)(config, twins.ours, SIZES)
    assert isinstance(attention, FlashInferAttention)
    attention.init_cuda_graph_state(SIZES.decode, width)
    rng = np.random.default_rng(width)
    for size in (*reversed(SIZES.decode), SIZES.decode[-1]):
        prefixes = rng.integers(0, LONG - width + 1, size)
        mix = [(int(prefix), width) for prefix in prefixes]
        twins.check(attention, mix, graph_size=size * width)


def test_a_graph_that_needs_more_workspace_leaves_eager_batches_alone(
    machine: Machine, ops: FlashInferOps, config: ModelConfig
) -> None:
    """Both are planned in turn, on one workspace."""
    twins = Twins(config, machine.device)
    attention = flashinfer_attention(ops)(config, twins.ours, SIZES)
    assert isinstance(attention, FlashInferAttention)
    attention.init_cuda_graph_state(SIZES.decode)
    attention.init_cuda_graph_state(SIZES.decode, VERIFY_WIDTH)
    for mix in (EXTENDS["mixed"], DECODES["long and short"], EXTENDS["chunks"]):
        twins.check(attention, mix)
        twins.check(attention, [(LONG - 1, 1)] * 2, graph_size=2)


def test_passes_that_share_a_workspace_are_all_planned_before_the_first_one_runs(
    machine: Machine, ops: FlashInferOps, config: ModelConfig
) -> None:
    """As those of a draft phase. Their partial results lie in the same memory."""
    twins = Twins(config, machine.device)
    workspace = AttentionWorkspace(machine.device)
    attentions = [
        flashinfer_attention(ops, workspace=workspace)(config, twins.ours, SIZES) for _ in range(3)
    ]
    for attention in attentions:
        assert isinstance(attention, FlashInferAttention)
        attention.init_cuda_graph_state(SIZES.decode)
    for size in SIZES.decode:
        twins.check_together(
            attentions, lambda place, size=size: [(LONG - 1 - 5 * place, 1)] * size
        )


@pytest.mark.parametrize("mix", DECODES.values(), ids=DECODES)
def test_queries_without_keys_attend_like_the_authority(
    machine: Machine, ops: FlashInferOps, config: ModelConfig, mix: list[tuple[int, int]]
) -> None:
    twins = Twins(config, machine.device)
    attention = flashinfer_attention(ops)(config, twins.ours, SIZES)
    twins.check(attention, mix, has_keys=False)
