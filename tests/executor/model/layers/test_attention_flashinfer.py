"""If this fails, attention on a GPU reads other keys than its own, or a graph replays a stale plan."""

from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool, KVShape
from executor.graph.cuda_graph_buffer_registry import (
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention import Attention, AttentionCall, Stages
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.layers.attention_tables import look_up_pages, plan_pages
from executor.model.layers.attention_torch import TorchAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.parallel.layout import DpLayout
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import BreakablePrefillRunner, DecodeRunner, EagerRunner
from tests.executor.support import kv
from tests.executor.support.flashinfer.cpu_flashinfer import (
    WORKSPACE,
    CpuFlashInfer,
    reference,
)
from tests.executor.support.recording.recording_backend import RecordingBackend

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 4
BLOCKS_PER_ROW, NUM_ROWS, MAX_TOKENS, VOCAB, HIDDEN = 12, 9, 64, 23, 16
MAX_LEN = BLOCKS_PER_ROW * BLOCK_SIZE
SIZES = (1, 2, 4, 8)
# One entry per sequence: keys before this pass, query rows in it.
MIXES = {
    "one decode": [(17, 1)],
    "first tokens": [(0, 1), (0, 1)],
    "block edges": [(3, 1), (4, 1), (7, 1), (8, 1), (47, 1)],
    "one prompt": [(0, 9)],
    "prompts": [(0, 5), (0, 2), (0, 12)],
    "chunks": [(4, 5), (13, 7), (0, 3)],
    "mixed": [(30, 1), (0, 6), (2, 1), (9, 4), (40, 1)],
}


def new_pool() -> KVPool:
    """Returns a pool of two layers whose rows own shuffled blocks, filled with random numbers."""
    shape = KVShape(
        num_layers=2,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
    )
    pool = KVPool(
        shape,
        num_blocks=1 + NUM_ROWS * BLOCKS_PER_ROW,
        num_rows=NUM_ROWS,
        max_blocks_per_row=BLOCKS_PER_ROW,
    )
    blocks = np.random.default_rng(0).permutation(np.arange(1, pool.num_blocks))
    pool.append_blocks(range(NUM_ROWS), [0] * NUM_ROWS, [BLOCKS_PER_ROW] * NUM_ROWS, blocks)
    generator = torch.Generator().manual_seed(0)
    for cache in (*pool.key_cache, *pool.value_cache):
        cache.normal_(generator=generator)
    return pool


def flashinfer_attention(
    pool: KVPool, num_heads: int = HEADS, workspace: AttentionWorkspace | None = None
) -> FlashInferAttention:
    ops = FlashInferOps(enable_pdl=True)
    workspace = workspace or AttentionWorkspace(pool.device, WORKSPACE[0])
    return FlashInferAttention(ops, pool, num_heads, workspace, max_num_tokens=MAX_TOKENS)


def torch_attention(num_heads: int = HEADS) -> TorchAttention:
    return TorchAttention(num_heads, KV_HEADS, HEAD_DIM, dtype=torch.float32)


def batch_of(
    pool: KVPool, mix: list[tuple[int, int]], layout: DpLayout | None = None
) -> ForwardBatch:
    prefixes, counts = [p for p, _ in mix], [n for _, n in mix]
    rows = list(range(len(mix), 0, -1))
    return kv.batch_of(pool, rows, prefixes, counts, torch.arange(sum(counts)) % VOCAB, layout)


def attend(
    attention: Attention, pool: KVPool, batch: ForwardBatch, num_heads: int = HEADS
) -> torch.Tensor:
    """Plans, and attends in both layers with queries, keys and values strided as a model's are."""
    attention.init_forward_metadata_out_graph(batch, pool)
    attention.init_forward_metadata_in_graph()
    generator = torch.Generator().manual_seed(1)
    outs = []
    for layer_id in range(2):
        size = (len(batch.input_ids), num_heads + 2 * KV_HEADS, HEAD_DIM)
        heads = torch.randn(size, generator=generator)
        q, k, v = heads.split((num_heads, KV_HEADS, KV_HEADS), dim=1)
        outs.append(attention.forward(q, k, v, layer_id))
    return torch.stack(outs)


# Outside graphs.


@pytest.mark.parametrize("num_heads", [2, 6, 8])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_it_attends_and_stores_like_the_torch_backend(
    mix: list[tuple[int, int]], num_heads: int, library: CpuFlashInfer
) -> None:
    ours, theirs = new_pool(), new_pool()
    out = attend(flashinfer_attention(ours, num_heads), ours, batch_of(ours, mix), num_heads)
    expected = attend(torch_attention(num_heads), theirs, batch_of(theirs, mix), num_heads)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for cache, other in zip(
        ours.key_cache + ours.value_cache, theirs.key_cache + theirs.value_cache, strict=True
    ):
        assert torch.equal(cache, other)


@pytest.mark.parametrize(("mix", "kind"), [("block edges", "decode"), ("mixed", "prefill")])
def test_a_batch_is_planned_once_and_run_once_per_layer(
    mix: str, kind: str, library: CpuFlashInfer
) -> None:
    pool = new_pool()
    attention = flashinfer_attention(pool)
    made = [name for name in library.names() if name.endswith("__init__")]
    assert made == ["decode.__init__", "prefill.__init__"]
    attend(attention, pool, batch_of(pool, MIXES[mix]))
    layer = ["append_paged_kv_cache", f"{kind}.run"]
    assert library.names() == [f"{kind}.plan", *layer, *layer]


@pytest.mark.parametrize(("num_heads", "expected"), [(2, False), (6, False), (8, True)])
def test_tensor_cores_are_for_four_query_heads_per_kv_head(
    num_heads: int, expected: bool, library: CpuFlashInfer
) -> None:
    flashinfer_attention(new_pool(), num_heads).init_cuda_graph_state([2])
    made = [kwargs for name, kwargs in library.calls if name == "decode.__init__"]
    assert [kwargs["use_tensor_cores"] for kwargs in made] == [expected, expected]


@pytest.mark.parametrize("mix", [MIXES["block edges"], MIXES["chunks"]])
def test_padded_rows_write_to_the_scratch_block_only(
    mix: list[tuple[int, int]], library: CpuFlashInfer
) -> None:
    pool, before = new_pool(), new_pool()
    batch = batch_of(pool, mix)
    total = len(batch.input_ids)
    batch.input_ids = torch.zeros(total + 3, dtype=torch.int64)
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, torch.zeros(3, dtype=torch.int64)))
    batch.extend_seq_lens_cpu = np.array([n for _, n in mix])
    out = attend(flashinfer_attention(pool), pool, batch)
    assert not out[:, total:].any()
    for cache, old in zip(pool.key_cache, before.key_cache, strict=True):
        written = torch.unique((cache != old).nonzero()[:, 0])
        assert set(written.tolist()) == set(batch.out_cache_loc.tolist())


def test_an_idle_rank_plans_nothing_and_attends_to_nothing(library: CpuFlashInfer) -> None:
    pool = new_pool()
    attention = flashinfer_attention(pool)
    library.names()
    assert attend(attention, pool, batch_of(pool, [])).shape == (2, 0, HEADS * HEAD_DIM)
    assert library.names() == []


def test_more_rows_than_it_was_made_for_are_refused(library: CpuFlashInfer) -> None:
    pool = new_pool()
    with pytest.raises(AssertionError, match="65 token rows; made for 64"):
        attend(flashinfer_attention(pool), pool, batch_of(pool, [(0, 40), (0, 25)]))


# In graphs.


def test_each_size_has_its_own_wrapper_and_all_share_their_memory(library: CpuFlashInfer) -> None:
    pool = new_pool()
    attention = flashinfer_attention(pool)
    library.names()
    attention.init_cuda_graph_state(SIZES)
    made = [kwargs for name, kwargs in library.calls if name == "decode.__init__"]
    reset = [kwargs for name, kwargs in library.calls if name == "decode.reset_workspace_buffer"]
    asked = [kwargs for name, kwargs in library.calls if name == "decode.workspace_size"]
    assert [len(kwargs["paged_kv_last_page_len_buffer"]) for kwargs in made] == list(SIZES)
    for name, lengths in (
        ("paged_kv_indptr_buffer", [size + 1 for size in SIZES]),
        ("paged_kv_indices_buffer", [size * BLOCKS_PER_ROW for size in SIZES]),
    ):
        assert [len(kwargs[name]) for kwargs in made] == lengths
        assert len({kwargs[name].data_ptr() for kwargs in made}) == 1
    assert [int(kwargs["indptr"][-1]) for kwargs in asked] == [n * BLOCKS_PER_ROW for n in SIZES]
    assert len({kwargs["float_workspace_buffer"].data_ptr() for kwargs in reset}) == 1
    assert len({kwargs["int_workspace_buffer"].data_ptr() for kwargs in reset}) == len(SIZES)
    library.names()
    attend(attention, pool, batch_of(pool, [(5, 1)] * 4, DpLayout.single(4, 4)))
    assert not any(name.endswith("__init__") for name in library.names())


def workspaces_of(library: CpuFlashInfer) -> dict[Any, dict[str, torch.Tensor]]:
    """Returns the float and the int workspace that each wrapper has now."""
    return {
        wrapper: dict(zip(("float", "int"), wrapper.workspaces, strict=True))
        for wrapper in library.wrappers
    }


def test_all_attention_of_an_executor_has_one_float_workspace_and_plans_of_its_own(
    library: CpuFlashInfer,
) -> None:
    """As a target, the passes of a draft phase and a draft-extend have it."""
    workspace, pool = AttentionWorkspace("cpu", WORKSPACE[0]), new_pool()
    target, *drafts = [flashinfer_attention(pool, HEADS, workspace) for _ in range(4)]
    target.init_cuda_graph_state(SIZES)
    target.init_cuda_graph_state(SIZES, 4, has_tree=True)
    target.init_trees()
    for draft in drafts:
        draft.init_cuda_graph_state(SIZES, 2, has_tree=True)
    of_wrappers = workspaces_of(library)
    assert len(of_wrappers) == 4 * 2 + 2 * len(SIZES) + 1 + 3 * len(SIZES)
    assert {given["float"].data_ptr() for given in of_wrappers.values()} == {
        workspace.float.data_ptr()
    }
    assert len({given["int"].data_ptr() for given in of_wrappers.values()}) == len(of_wrappers)


def test_a_graph_that_needs_more_workspace_gives_all_wrappers_a_larger_one(
    library: CpuFlashInfer,
) -> None:
    workspace, pool = AttentionWorkspace("cpu", WORKSPACE[0] - 1), new_pool()
    first = flashinfer_attention(pool, HEADS, workspace)
    second = flashinfer_attention(pool, HEADS, workspace)
    second.init_cuda_graph_state(SIZES)
    given = workspaces_of(library).values()
    assert {len(its["float"]) for its in given} == {WORKSPACE[0]}
    assert {its["float"].data_ptr() for its in given} == {workspace.float.data_ptr()}
    for attention in (first, second):  # a plan that did not fit would be refused
        attend(attention, pool, batch_of(pool, MIXES["block edges"]))
    attend(second, pool, batch_of(pool, [(5, 1)] * 4, DpLayout.single(4, 4)))


def test_a_workspace_that_a_graph_holds_does_not_move(library: CpuFlashInfer) -> None:
    """A replay would write its partial results into memory that is somebody else's by then."""
    workspace, pool = AttentionWorkspace("cpu", WORKSPACE[0]), new_pool()
    attention = flashinfer_attention(pool, HEADS, workspace)
    attention.init_cuda_graph_state([1])
    attention.on_after_cuda_graph_warmup()
    attention.init_cuda_graph_state([2])  # needs no more than there is
    with pytest.raises(AssertionError, match=f"needs {WORKSPACE[0] + 1} bytes, .* {WORKSPACE[0]}"):
        workspace.reserve(WORKSPACE[0] + 1)


def test_the_budget_has_what_attention_allocates(library: CpuFlashInfer) -> None:
    workspace, pool = AttentionWorkspace("cpu", WORKSPACE[0]), new_pool()
    for has_tree in (False, True):
        attention = flashinfer_attention(pool, HEADS, workspace)
        attention.init_cuda_graph_state(SIZES, 4, has_tree=has_tree)
    lengths = len([wrapper for wrapper in library.wrappers if "qo_indptr_buf" in wrapper.options])
    plans = sum(its["int"].nbytes for its in workspaces_of(library).values())
    buffers = {  # storages, since wrappers of graphs see the front of what the largest one has
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for wrapper in library.wrappers
        for tensor in wrapper.options.values()
        if isinstance(tensor, torch.Tensor)
    }
    num_keys = SIZES[-1] * 4  # of each sequence of a tree
    own = 2 * 2 * MAX_TOKENS * 4 + max(pool.num_physical_blocks, NUM_ROWS * BLOCKS_PER_ROW) * 4
    assert [line.bytes for line in workspace.lines()] == [
        WORKSPACE[0],
        plans + lengths * 32768 * 4,
        sum(buffers.values()) + num_keys + own,
    ]


def test_a_size_that_was_never_prepared_is_refused(library: CpuFlashInfer) -> None:
    pool = new_pool()
    attention = flashinfer_attention(pool)
    attention.init_cuda_graph_state([1, 2])
    with pytest.raises(AssertionError, match=r"no init_cuda_graph_state for .* \(4, 1, False\)"):
        attend(attention, pool, batch_of(pool, [(5, 1)] * 4, DpLayout.single(4, 4)))


class TinyModel:
    """Two layers of attention and nothing else; every operator can be captured."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)

        def weight(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator) * size[-1] ** -0.5

        num_heads = HEADS + 2 * KV_HEADS
        self.embedding = weight(VOCAB, HIDDEN)
        self.qkv = [weight(num_heads * HEAD_DIM, HIDDEN) for _ in range(2)]
        self.out = [weight(HIDDEN, HEADS * HEAD_DIM) for _ in range(2)]

    def stages(self, batch: ForwardBatch) -> Stages:
        x = self.embedding[batch.input_ids] * (1 + batch.positions.unsqueeze(1) % 7)
        for layer_id in range(2):
            heads = (x @ self.qkv[layer_id].T).view(len(x), -1, HEAD_DIM)
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            attended = yield AttentionCall(q, k, v, layer_id)
            x = x + attended @ self.out[layer_id].T
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embedding.T

    def forward_pass(self, attention: Attention, pool: KVPool) -> ForwardPass:
        return ForwardPass(
            stages=self.stages,
            compute_logits=self.compute_logits,
            attention=attention,
            kv_pool=pool,
            num_heads=HEADS,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            dtype=torch.float32,
        )

    def run_eagerly(self, pool: KVPool, mix: list[tuple[int, int]]) -> torch.Tensor:
        """Returns the logits of every row by the torch backend."""
        registry = build_eager_registry(
            device="cpu", max_bs=NUM_ROWS, max_num_token=MAX_TOKENS, cache_loc_dtype=torch.int64
        )
        batch = batch_of(pool, mix)
        batch.logits_indices = torch.arange(len(batch.input_ids))
        runner = EagerRunner(self.forward_pass(torch_attention(), pool), registry)
        with torch.inference_mode():
            return runner.run(batch)

    def check_replay(
        self, runner: Any, pool: KVPool, mix: list[tuple[int, int]], batch: ForwardBatch
    ) -> None:
        """Compares a replay with an eager run. The pool holds the same afterwards as before."""
        caches = pool.key_cache + pool.value_cache
        before = [cache.clone() for cache in caches]
        with torch.inference_mode():
            logits = runner.run(batch)
        expected = self.run_eagerly(new_pool(), mix)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)


def random_decodes(rng: np.random.Generator, size: int, width: int) -> list[tuple[int, int]]:
    num_seqs = int(rng.integers(size // 2 + 1, size + 1))
    return [(int(rng.integers(0, MAX_LEN - width + 1)), width) for _ in range(num_seqs)]


@pytest.mark.parametrize("width", [1, 3])
def test_a_replay_attends_to_its_own_batch_and_not_to_the_captured_one(
    width: int, library: CpuFlashInfer
) -> None:
    pool, model, backend = new_pool(), TinyModel(), RecordingBackend()
    library.launch = backend.kernel
    attention = flashinfer_attention(pool)
    attention.init_cuda_graph_state(SIZES, width)
    registry = build_decode_registry(
        device="cpu",
        max_bs=SIZES[-1],
        max_num_token=SIZES[-1] * width,
        seq_len_fill_value=width,
        cache_loc_dtype=torch.int64,
        register_global_num_tokens=False,
    )
    runner = DecodeRunner(
        model.forward_pass(attention, pool), registry, backend, SIZES, num_tokens_per_bs=width
    )
    with torch.inference_mode():
        runner.capture()
    rng = np.random.default_rng(width)
    registry.poison_tails()
    kind = "decode" if width == 1 else "prefill"
    for size in (8, 1, 4, 2, 8, 8):
        mix = random_decodes(rng, size, width)
        layout = DpLayout.single(len(mix) * width, size * width)
        library.names()
        model.check_replay(runner, pool, mix, batch_of(pool, mix, layout))
        assert library.names() == [f"{kind}.plan"]


def test_an_extend_between_graph_segments_attends_to_its_own_batch(library: CpuFlashInfer) -> None:
    pool, model, backend = new_pool(), TinyModel(), RecordingBackend()
    library.launch = backend.kernel
    registry = build_prefill_registry(
        device="cpu", max_bs=NUM_ROWS, max_num_token=32, cache_loc_dtype=torch.int64
    )
    forward_pass = model.forward_pass(flashinfer_attention(pool), pool)
    runner = BreakablePrefillRunner(forward_pass, registry, backend, [8, 32])
    with torch.inference_mode():
        runner.capture()
    registry.poison_tails()
    for name in ("mixed", "chunks", "one prompt", "prompts"):
        mix = MIXES[name]
        total = sum(n for _, n in mix)
        batch = batch_of(pool, mix, DpLayout.single(total, 32, has_extend=True))
        batch.logits_indices = torch.arange(total)
        model.check_replay(runner, pool, mix, batch)


# The torch backend, and how keys are stored, against the library's own references.


@pytest.mark.parametrize(
    "mix", [[(7, 1), (3, 1), (47, 1)], [(0, 8), (4, 4), (33, 7)]], ids=["decodes", "extends"]
)
def test_the_torch_backend_attends_like_the_library(mix: list[tuple[int, int]], real: Any) -> None:
    """In full pages only: the references read every page to its end. They return bfloat16."""
    pool = new_pool()
    batch = batch_of(pool, mix)
    attention = torch_attention()
    attention.init_forward_metadata_out_graph(batch, pool)
    generator = torch.Generator().manual_seed(1)
    size = (len(batch.input_ids), HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = torch.randn(size, generator=generator).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    ours = attention.forward(q, k, v, 0).view(q.shape)
    plan = plan_pages(batch.seq_lens_cpu.numpy(), batch.extend_seq_lens_cpu, BLOCK_SIZE)
    assert set(plan.last_page_len) == {BLOCK_SIZE}
    kv_indptr = torch.from_numpy(plan.kv_indptr)
    places = torch.arange(plan.num_pages, dtype=torch.int32)
    kv_indices = look_up_pages(pool.block_table, batch.req_pool_indices, kv_indptr, places)
    pages = [
        cache[0].view(pool.num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        for cache in (pool.key_cache, pool.value_cache)
    ]
    if batch.extend_seq_lens_cpu is None:
        run, rows = reference("gqa_paged_decode"), []
    else:
        run, rows = reference("gqa_paged_prefill"), [torch.from_numpy(plan.qo_indptr)]
    theirs, _ = run(q, *pages, *rows, kv_indptr, kv_indices, HEAD_DIM**-0.5)
    torch.testing.assert_close(ours, theirs.float(), atol=0.02, rtol=0.02)


def test_keys_are_stored_by_the_library_where_the_pool_says(library: CpuFlashInfer) -> None:
    """Told that the pool is one sequence, its reference writes to the very slots."""
    pool = new_pool()
    batch = batch_of(pool, MIXES["mixed"])
    before = [new_pool().key_cache[0], new_pool().value_cache[0]]
    attend(flashinfer_attention(pool), pool, batch)
    stored = next(kwargs for name, kwargs in library.calls if name == "append_paged_kv_cache")
    shape = stored["paged_kv_cache"][0].shape
    pages = tuple(cache.view(shape) for cache in before)
    reference("append_paged_kv_cache")(**{**stored, "paged_kv_cache": pages})
    for cache, new, old in zip(
        before,
        (stored["append_key"], stored["append_value"]),
        (pool.key_cache[0], pool.value_cache[0]),
        strict=True,
    ):
        assert torch.equal(cache[batch.out_cache_loc], new)
        assert torch.equal(cache, old)
