"""A sequence whose numbers are none changes no other's output: no row reads where another writes.

Drafts for which a row has no block go to its spill blocks. Sequences here end soon, and so have drafts
behind their last block in most steps.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVPool
from executor.build import executor as build
from executor.build.devices import AttentionGraphs, Cpu
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.speculative.verifier import Verifier
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer, real_flashinfer
from tests.support.paths import DEMO_DRAFTS as DRAFTS
from tests.together.speculation.speculative_cell import (
    Ask,
    Router,
    cell_of,
    demo_prompts,
    expect_plain,
    serve,
)

POISON = 200  # a token that no prompt has
WIDE = 17  # more drafts than a block holds
# Blocks smaller than what a step writes behind them.
OF_TWO = {"block_size": 2, "num_kv_blocks": 8 * 48 + 1}
OF_ONE = {"block_size": 1, "num_kv_blocks": 8 * 96 + 1}
CASES: dict[str, dict[str, Any]] = {
    "mtp": {"draft_model": DRAFTS / "mtp", "num_draft_steps": 6},
    "mtp3": {"draft_model": DRAFTS / "mtp3", "draft_sampling": "rejection"},
    "eagle": {"draft_model": DRAFTS / "eagle", "draft_topk": 2, "num_draft_tokens": 7},
    "frozen_kv": {"draft_model": DRAFTS / "frozen_kv", "draft_topk": 2, "num_draft_tokens": 7},
    "mtp, wide": {"draft_model": DRAFTS / "mtp", "num_draft_steps": WIDE},
    "frozen_kv, wide": {"draft_model": DRAFTS / "frozen_kv", "num_draft_steps": WIDE},
    "eagle, blocks of 2": {"draft_model": DRAFTS / "eagle", "draft_topk": 4, **OF_TWO},
    "mtp3, blocks of 1": {"draft_model": DRAFTS / "mtp3", **OF_ONE},
}
cases = pytest.mark.parametrize("settings", CASES.values(), ids=CASES)


@pytest.fixture
def flashinfer(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CpuFlashInfer]:
    """Attention of the CPU is FlashInfer's, as on a GPU, with kernels in plain PyTorch."""
    library = CpuFlashInfer(real_flashinfer(tmp_path_factory))
    workspace = cache(lambda device: AttentionWorkspace("cpu"))

    def attention(
        device: Cpu,
        num_heads: int,
        kv_pool: KVPool,
        graphs: Sequence[AttentionGraphs],
        budget: Any,
        scale: float | None = None,
        layers: Any = (),
    ) -> FlashInferAttention:
        made = FlashInferAttention(
            FlashInferOps(enable_pdl=False),
            kv_pool,
            num_heads,
            workspace(device),
            max_num_tokens=budget.max_tokens_per_rank,
            scale=scale,
        )
        for sizes, width, has_tree in graphs:
            made.init_cuda_graph_state(sizes, width, has_tree=has_tree)
        return made

    monkeypatch.setattr(Cpu, "attention", attention)
    with library.installed():
        yield library


def asks_of(*, is_poisoned: bool) -> list[Ask]:
    """Returns requests of which the poisoned ones, if any, are the others' twins."""
    asks = []
    for prompt in demo_prompts(5, 4, 20):
        for max_tokens in (5, 6, 7, 8):
            asks.append(Ask(prompt=prompt, max_tokens=max_tokens))
            if is_poisoned:
                asks.append(Ask(prompt=(*prompt[:-1], POISON), max_tokens=max_tokens))
    return asks


def expect_healthy(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that poisoned sequences change no other's output."""
    load = build.load_model

    def load_poisoned(*args: Any, **named: Any) -> Any:
        model: Any = load(*args, **named)
        model.embed_tokens.weight[POISON] = torch.nan
        return model

    monkeypatch.setattr(build, "load_model", load_poisoned)
    asks = asks_of(is_poisoned=True)
    with cell_of(**settings) as cell:
        expected = [answer.tokens for [answer] in serve(Router(cell), asks_of(is_poisoned=False))]
        router = Router(cell)
        answers = zip(asks, serve(router, asks), strict=True)
    assert router.tokens_per_step > 0
    assert [answer.tokens for ask, [answer] in answers if POISON not in ask.prompt] == expected


@cases
def test_a_sequence_of_nan_changes_no_other(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    expect_healthy(settings, monkeypatch)


@pytest.mark.parametrize("case", ["mtp", "eagle", "frozen_kv, wide", "mtp3, blocks of 1"])
def test_nor_with_flashinfer_s_attention(
    case: str, flashinfer: CpuFlashInfer, monkeypatch: pytest.MonkeyPatch
):
    expect_healthy(CASES[case], monkeypatch)
    assert any(name.endswith(".run") for name in flashinfer.names())


# ---- where each step writes


def watch_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the slots of every pass checked. Returns how many of each are in spill blocks."""
    spilled: list[int] = []
    locate = KVPool.locate

    def watched(pool: KVPool, rows: Any, positions: Any, *, out: Any) -> None:
        locate(pool, rows, positions, out=out)
        assert len(np.unique(out)) == len(out), "two tokens of a pass go to one place"
        blocks = out // pool.block_size
        assert 0 not in blocks, "a token goes to the scratch block"
        assert blocks.max(initial=0) < pool.num_physical_blocks
        spilled.append(int((blocks >= pool.num_blocks).sum()))

    monkeypatch.setattr(KVPool, "locate", watched)
    return spilled


class CheckedRouter(Router):
    """Checks the block table before every step."""

    def before_step(self, plan: Any) -> None:
        for worker in self._cell.workers:
            pool = worker._kv_pool
            held, table = pool.row_num_blocks, pool.tables_cpu[0].numpy()
            for row in np.flatnonzero(worker._rows.is_live):
                assert 0 not in table[row]
                assert table[row, : held[row]].max() < pool.num_blocks
                first = pool.num_blocks + row * pool.spill_blocks_per_row
                own = range(first, first + pool.spill_blocks_per_row)
                assert set(table[row, held[row] :].tolist()) <= set(own)


@pytest.mark.parametrize("num_kv_blocks", [None, 40])
@cases
def test_no_two_tokens_of_a_pass_go_to_one_place_and_none_to_the_scratch_block(
    settings: dict[str, Any], num_kv_blocks: int | None, monkeypatch: pytest.MonkeyPatch
):
    if num_kv_blocks is not None:  # for 6 sequences at most, with nothing left for drafts
        few = num_kv_blocks * 4 // settings.get("block_size", 4)
        settings = settings | {"num_kv_blocks": few, "max_num_seqs": 6}
    spilled = watch_slots(monkeypatch)
    with cell_of(**settings) as cell:
        serve(CheckedRouter(cell), asks_of(is_poisoned=False))
    assert sum(spilled) > 0


@pytest.mark.parametrize("name", ["eagle", "frozen_kv"])
def test_drafts_in_spill_blocks_are_accepted_and_what_follows_them_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """The tree's deeper nodes are stored behind the wide first levels: there is a block for the path
    that they are on, but not for them."""
    accept: Callable[..., Any] = Verifier.accept
    num_accepted = 0

    def watched(verifier: Verifier, verification: Any, logits: torch.Tensor) -> Any:
        nonlocal num_accepted
        accepted = accept(verifier, verification, logits)
        pool = verifier._kv_pool
        held = torch.from_numpy(pool.row_num_blocks[verification.columns.rows] * pool.block_size)
        first = torch.from_numpy(verification.columns.num_computed_tokens)
        is_gained = torch.arange(accepted.path.shape[1]) < accepted.num_tokens.unsqueeze(1)
        num_accepted += int((is_gained & (accepted.path + first[:, None] >= held[:, None])).sum())
        return accepted

    monkeypatch.setattr(Verifier, "accept", watched)
    prompts = demo_prompts(5, 6, 20)
    asks = [Ask(prompt=prompt, max_tokens=count) for prompt in prompts for count in (4, 6, 9)]
    with cell_of(draft_model=DRAFTS / name, draft_topk=4, **OF_TWO) as cell:
        expect_plain(Router(cell), asks)
    assert num_accepted > 0
