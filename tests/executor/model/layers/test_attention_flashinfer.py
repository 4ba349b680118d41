"""If this fails, attention on a GPU reads other keys than its own, or a graph replays a stale plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVPool
from executor.build.devices import AttentionGraphs
from executor.model.decoder.sizes import attention_of
from executor.model.flashinfer.latent import LatentShape
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.layers.attention_tables import look_up_pages, plan_pages
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.model.spec import ModelSpec
from executor.parallel.layout import DpLayout
from tests.executor.model.layers.attention_cases import (
    BLOCK_SIZE,
    HEAD_DIM,
    KV_HEADS,
    MIXES,
    Case,
    Mix,
)
from tests.executor.support.flashinfer.attention import flashinfer_attention
from tests.executor.support.flashinfer.cpu_flashinfer import WORKSPACE, CpuFlashInfer, reference
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.runner_cases import (
    DECODE_SIZES,
    PREFILL_SIZES,
    RunnerCase,
    assert_close,
    registry_of,
)

SIZES = (1, 2, 4, 8)


def in_a_graph() -> Case:
    """Returns four decodes, for a graph of four."""
    return Case([(5, 1)] * 4, layout=DpLayout.single(4, 4))


def keywords(library: CpuFlashInfer, name: str) -> list[dict[str, Any]]:
    """Returns what each call of one function was given."""
    return [kwargs for called, kwargs in library.calls if called == name]


# Outside graphs.


@pytest.mark.parametrize(("mix", "kind"), [("block edges", "decode"), ("mixed", "prefill")])
def test_a_batch_is_planned_once_and_run_once_per_layer(
    mix: str, kind: str, library: CpuFlashInfer
) -> None:
    case = Case(MIXES[mix])
    attention = case.flashinfer()
    made = [name for name in library.names() if name.endswith("__init__")]
    assert made == ["decode.__init__", "prefill.__init__"]
    case.run(attention)
    attention.forward(case.q, case.k, case.v, 0)
    layer = ["append_paged_kv_cache", f"{kind}.run"]
    assert library.names() == [f"{kind}.plan", *layer, *layer]


@pytest.mark.parametrize(("num_heads", "expected"), [(2, False), (6, False), (8, True)])
def test_tensor_cores_are_for_four_query_heads_per_kv_head(
    num_heads: int, expected: bool, library: CpuFlashInfer
) -> None:
    Case([(5, 1)], num_heads=num_heads).flashinfer().init_cuda_graph_state([2])
    made = [given["use_tensor_cores"] for given in keywords(library, "decode.__init__")]
    assert made == [expected, expected]


def test_an_idle_rank_plans_nothing_and_attends_to_nothing(library: CpuFlashInfer) -> None:
    case = Case([])
    attention = case.flashinfer()
    library.names()
    assert case.run(attention).shape == (0, case.num_heads * HEAD_DIM)
    assert library.names() == []


def test_more_rows_than_it_was_made_for_are_refused(library: CpuFlashInfer) -> None:
    case = Case([(0, 1)])
    attention = case.flashinfer()
    case.pad(65, 0.0)
    with pytest.raises(AssertionError, match="66 token rows; made for 65"):
        case.run(attention)


# In graphs.


def test_each_size_has_its_own_wrapper_and_all_share_their_memory(library: CpuFlashInfer) -> None:
    case = in_a_graph()
    attention, columns = case.flashinfer(), case.pool.max_blocks_per_row
    library.names()
    attention.init_cuda_graph_state(SIZES)
    made, reset, asked = (
        keywords(library, f"decode.{name}")
        for name in ("__init__", "reset_workspace_buffer", "workspace_size")
    )
    assert [len(given["paged_kv_last_page_len_buffer"]) for given in made] == list(SIZES)
    for name, lengths in (
        ("paged_kv_indptr_buffer", [size + 1 for size in SIZES]),
        ("paged_kv_indices_buffer", [size * columns for size in SIZES]),
    ):
        assert [len(given[name]) for given in made] == lengths
        assert len({given[name].untyped_storage().data_ptr() for given in made}) == 1
    assert [int(given["indptr"][-1]) for given in asked] == [size * columns for size in SIZES]
    assert len({given["float_workspace_buffer"].data_ptr() for given in reset}) == 1
    assert len({given["int_workspace_buffer"].data_ptr() for given in reset}) == len(SIZES)
    library.names()
    case.run(attention)
    assert not any(name.endswith("__init__") for name in library.names())


def test_layers_with_windows_have_wrappers_of_their_own_in_graphs(library: CpuFlashInfer) -> None:
    case = Case([(25, 1), (3, 1)], layout=DpLayout.single(2, 2), window=5, sinks=True)
    attention = case.flashinfer()
    attention.init_cuda_graph_state(SIZES)
    library.names()
    case.check(case.run(attention))
    planned = keywords(library, "decode.plan")
    pages = {given["window_left"]: given["indptr"].tolist() for given in planned}
    assert pages == {-1: [0, 7, 8], 4: [0, 2, 3]}  # a window's list begins at its first column
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
    workspace, case = AttentionWorkspace("cpu", WORKSPACE[0]), in_a_graph()
    target, *drafts = [case.flashinfer(workspace) for _ in range(4)]
    target.init_cuda_graph_state(SIZES)
    target.init_cuda_graph_state(SIZES, 4, has_tree=True)
    target.init_trees(4)
    for draft in drafts:
        draft.init_cuda_graph_state(SIZES, 2, has_tree=True)
    of_wrappers = workspaces_of(library)
    assert len(of_wrappers) == 4 * 2 + 2 * len(SIZES) + 1 + 3 * len(SIZES)
    floats = {given["float"].data_ptr() for given in of_wrappers.values()}
    assert floats == {workspace.float.data_ptr()}
    assert len({given["int"].data_ptr() for given in of_wrappers.values()}) == len(of_wrappers)


def test_a_graph_that_needs_more_workspace_gives_all_wrappers_a_larger_one(
    library: CpuFlashInfer,
) -> None:
    workspace, case = AttentionWorkspace("cpu", WORKSPACE[0] - 1), in_a_graph()
    first, second = case.flashinfer(workspace), case.flashinfer(workspace)
    second.init_cuda_graph_state(SIZES)
    given = workspaces_of(library).values()
    assert {len(its["float"]) for its in given} == {WORKSPACE[0]}
    assert {its["float"].data_ptr() for its in given} == {workspace.float.data_ptr()}
    case.run(second)  # a plan that did not fit would be refused
    case.batch.layout = DpLayout.single(4)
    for attention in (first, second):
        case.run(attention)


def test_a_workspace_that_a_graph_holds_does_not_move(library: CpuFlashInfer) -> None:
    """A replay would write its partial results into memory that is somebody else's by then."""
    workspace = AttentionWorkspace("cpu", WORKSPACE[0])
    attention = in_a_graph().flashinfer(workspace)
    attention.init_cuda_graph_state([1])
    attention.on_after_cuda_graph_warmup()
    attention.init_cuda_graph_state([2])  # needs no more than there is
    with pytest.raises(AssertionError, match=f"needs {WORKSPACE[0] + 1} bytes, .* {WORKSPACE[0]}"):
        workspace.reserve(WORKSPACE[0] + 1)


def test_the_budget_has_what_attention_allocates(library: CpuFlashInfer) -> None:
    workspace, case = AttentionWorkspace("cpu", WORKSPACE[0]), in_a_graph()
    for has_tree in (False, True):
        case.flashinfer(workspace).init_cuda_graph_state(SIZES, 4, has_tree=has_tree)
    lengths = len([wrapper for wrapper in library.wrappers if "qo_indptr_buf" in wrapper.options])
    plans = sum(its["int"].nbytes for its in workspaces_of(library).values())
    buffers = {  # storages, since wrappers of graphs see the front of what the largest one has
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for wrapper in library.wrappers
        for tensor in wrapper.options.values()
        if isinstance(tensor, torch.Tensor)
    }
    num_keys, pool = SIZES[-1] * 4, case.pool  # of each sequence of a tree
    num_pages = max(pool.num_physical_blocks, pool.num_rows * pool.max_blocks_per_row)
    own = 2 * 2 * (len(case.q) + 64) * 4 + num_pages * 4
    assert [line.bytes for line in workspace.lines()] == [
        WORKSPACE[0],
        plans + lengths * 32768 * 4,
        sum(buffers.values()) + num_keys + own,
    ]


def test_a_size_that_was_never_prepared_is_refused(library: CpuFlashInfer) -> None:
    case = in_a_graph()
    attention = case.flashinfer()
    attention.init_cuda_graph_state([1, 2])
    with pytest.raises(AssertionError, match=r"no init_cuda_graph_state for .* \(4, 1, False\)"):
        case.run(attention)


def replaying(path: Path, width: int = 1, has_tree: bool = False) -> RunnerCase:
    """Returns a model on FlashInfer whose attention can be a part of decode graphs."""

    graphs = [AttentionGraphs(DECODE_SIZES, width, has_tree)]

    def new_attention(config: ModelSpec, pool: KVPool) -> FlashInferAttention:
        return flashinfer_attention(attention_of(config).num_heads, pool, graphs)

    return RunnerCase(path, new_attention, is_capturable=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("width", "has_tree"), [(1, False), (3, False), (4, True)], ids=["one", "several", "trees"]
)
def test_a_replay_attends_to_its_own_batch_and_not_to_the_captured_one(
    width: int, has_tree: bool, library: CpuFlashInfer, tiny_checkpoint: Path
) -> None:
    """Lengths are planned and trees are written before each replay of what was captured once."""
    backend, rng = RecordingBackend(), np.random.default_rng(width)
    library.launch = backend.kernel
    plain = RunnerCase(tiny_checkpoint)
    case = replaying(tiny_checkpoint, width, has_tree)
    runner = case.decode(backend, width, has_tree=has_tree)
    registry_of(runner).poison_tails()
    new_batch = partial(case.tree_batch if has_tree else case.decode_batch, rng, width=width)
    for size in (8, 1, 4, 2, 8, 8):
        batch = new_batch(size)
        library.names()
        got = case.run(runner, batch)
        assert library.names() == ["decode.plan" if width == 1 else "prefill.plan"]
        assert_close(got, plain.run_eagerly(batch), 1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_extend_between_graph_segments_attends_to_its_own_batch(
    library: CpuFlashInfer, tiny_checkpoint: Path
) -> None:
    backend, rng = RecordingBackend(), np.random.default_rng(0)
    library.launch = backend.kernel
    plain, case = RunnerCase(tiny_checkpoint), replaying(tiny_checkpoint)
    runner = case.prefill("breakable", backend)
    registry_of(runner).poison_tails()
    for size in PREFILL_SIZES:
        batch = case.prefill_batch(rng, size)
        assert_close(case.run(runner, batch), plain.run_eagerly(batch), 1e-4)


# Latents.


def test_one_wrapper_of_latents_runs_decodes_and_extends_and_each_graph_has_its_own(
    library: CpuFlashInfer,
) -> None:
    workspace = AttentionWorkspace("cpu", WORKSPACE[0])
    case = Case([(5, 1)] * 4, layout=DpLayout.single(4, 4), is_latent=True)
    attention = case.flashinfer(workspace)
    attention.init_cuda_graph_state(SIZES)
    made = keywords(library, "latent.__init__")
    assert [given["use_cuda_graph"] for given in made] == [False, *[True] * len(SIZES)]
    assert len({given["float_workspace_buffer"].data_ptr() for given in made}) == 1
    assert len({given["kv_indices"].data_ptr() for given in made[1:]}) == 1
    library.names()
    case.check(case.run(attention))
    assert library.names() == ["latent.plan", "latent.run"]
    [plans] = [line.bytes for line in workspace.lines() if line.what.startswith("plans")]
    assert plans == len(made) * (8 << 20)  # which wrappers take by themselves


def test_a_graph_of_several_rows_over_latents_pads_heads_that_divide_no_tile(
    library: CpuFlashInfer,
) -> None:
    mix = [(5, 3), (9, 3)]
    case = Case(mix, num_heads=3, layout=DpLayout.single(6, 6), is_latent=True)
    attention = case.flashinfer()
    attention.init_cuda_graph_state([2], 3)
    case.check(case.run(attention))
    assert [given["num_heads"] for given in keywords(library, "latent.plan")] == [4]


def test_what_planning_would_refuse_is_refused_at_start(library: CpuFlashInfer) -> None:
    pool = Case([], is_latent=True).pool
    with pytest.raises(ValueError, match=r"129 heads of latent attention .* raise attn_tp_size"):
        flashinfer_attention(129, pool)
    most = 16384 - 2 * pool.num_rows  # 128 heads fill a tile with a row
    flashinfer_attention(100, pool, max_num_tokens=most)
    with pytest.raises(ValueError, match=f"={most + 1}: .* rows of 100 heads .* at most {most}"):
        flashinfer_attention(100, pool, max_num_tokens=most + 1)
    sizes: dict[str, Any] = {"num_heads": 16, "block_size": 64, "dtype": torch.bfloat16}
    published = LatentShape(latent_dim=512, rope_dim=64, sm_scale=0.1, **sizes)
    published.check_widths()
    with pytest.raises(ValueError, match=r"kv_lora_rank=32 .* of 128 and of 64; .* device=cpu"):
        replace(published, latent_dim=32).check_widths()


# The torch backend, and how keys are stored, against the library's own references.


@pytest.mark.parametrize(
    "mix", [[(7, 1), (3, 1), (47, 1)], [(0, 8), (4, 4), (33, 7)]], ids=["decodes", "extends"]
)
def test_the_torch_backend_attends_like_the_library(mix: Mix, real: Any) -> None:
    """In full pages only: the references read every page to its end. They return bfloat16."""
    case = Case(mix)
    batch, pool = case.batch, case.pool
    ours = case.run(case.attention()).view(case.q.shape)
    plan = plan_pages(batch.seq_lens_cpu.numpy(), batch.extend_seq_lens_cpu, BLOCK_SIZE)
    assert set(plan.last_page_len) == {BLOCK_SIZE}
    kv_indptr = torch.from_numpy(plan.kv_indptr)
    places = torch.arange(plan.num_pages, dtype=torch.int32)
    kv_indices = look_up_pages(pool.tables[0], batch.req_pool_indices, kv_indptr, places)
    pages = [
        cache.view(pool.num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for cache in pool.caches[1]
    ]
    if batch.extend_seq_lens_cpu is None:
        run, rows = reference("gqa_paged_decode"), []
    else:
        run, rows = reference("gqa_paged_prefill"), [torch.from_numpy(plan.qo_indptr)]
    theirs, _ = run(case.q, *pages, *rows, kv_indptr, kv_indices, HEAD_DIM**-0.5)
    torch.testing.assert_close(ours, theirs.float(), atol=0.02, rtol=0.02)


def test_keys_are_stored_by_the_library_where_the_pool_says(library: CpuFlashInfer) -> None:
    """Told that the pool is one sequence, its reference writes to the very slots."""
    case, before = Case(MIXES["mixed"], garbage=0.0), Case(MIXES["mixed"], garbage=0.0)
    case.run(case.flashinfer())
    [stored] = keywords(library, "append_paged_kv_cache")
    shape = stored["paged_kv_cache"][0].shape
    pages = tuple(cache.view(shape) for cache in before.pool.caches[1])
    reference("append_paged_kv_cache")(**{**stored, "paged_kv_cache": pages})
    before.check_stored()
    for ours, theirs in zip(case.caches, before.caches, strict=True):
        assert torch.equal(ours, theirs)
