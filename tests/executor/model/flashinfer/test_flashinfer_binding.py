"""If this fails, the GPU executor calls FlashInfer in a way that the installed one refuses."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch

from executor.model.flashinfer.all_to_all import AllToAll, AllToAllSizes
from executor.model.flashinfer.cutedsl import CuteDslExperts, scratch_rows
from executor.model.flashinfer.latent import LatentShape, PagedLatent
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.flashinfer.paged import (
    MaskBuffers,
    PagedAttention,
    PagedShape,
    PageTable,
    PageTableBuffers,
    paged_decode,
    paged_prefill,
)
from tests.executor.support.flashinfer.cpu_flashinfer import (
    WORKSPACE,
    CpuFlashInfer,
)

SHAPE = PagedShape(
    num_heads=8, num_kv_heads=2, head_dim=64, block_size=4, dtype=torch.bfloat16, sm_scale=0.125
)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def half(*size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def call_small_operators(ops: FlashInferOps, num_rows: int = 3) -> None:
    x = half(num_rows, 16)
    ops.rms_norm(x, half(16), 1e-6, out=half(num_rows, 16))
    ops.add_rms_norm_(x, half(num_rows, 16), half(16), 1e-6)
    ops.silu_and_mul(half(num_rows, 16), out=half(num_rows, 8))
    q, k = half(num_rows, 2, 8), half(num_rows, 1, 8)
    ops.rotate_(q, k, torch.arange(num_rows), torch.ones(9, 8))


def call_filters(ops: FlashInferOps) -> None:
    probs = torch.full((2, 5), 0.2)
    ops.top_k_renorm(probs, int32(1, 5))
    ops.top_p_renorm(probs, torch.tensor([0.5, 0.9]))


def routes(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two experts of each row, and their weights."""
    return int32(0, 1, 1, 2, 2, 0).view(3, 2)[:num_rows], torch.ones(num_rows, 2)


def call_experts(ops: FlashInferOps, num_rows: int = 3) -> None:
    w31, w2 = half(2, 16, 4), half(2, 4, 8)
    num_bytes = ops.fused_moe_workspace_size(7, 2, w2)
    ops.fused_moe(
        half(num_rows, 4),
        *routes(num_rows),
        w31,
        w2,
        out=half(num_rows, 4),
        workspace=torch.zeros(num_bytes, dtype=torch.uint8),
        max_num_rows=7,
    )
    groups = {"num_groups": 4, "num_kept_groups": 2}
    logits = torch.zeros(num_rows, 16)
    ops.choose_experts(logits, torch.zeros(16), **groups, top_k=2, factor=2.5)


def call_kept_weights(ops: FlashInferOps, num_rows: int = 3) -> None:
    x, numbers = half(num_rows, 128), torch.ones(128, 128).to(torch.float8_e4m3fn)
    ops.fp8_linear(x, numbers, torch.ones(1, 1))
    blocks, scales = torch.ones(1, 128, 64).byte(), torch.full((1, 128, 4), 127).byte()
    ops.interleave_mxfp4(blocks, scales)


def call_cutedsl_experts(ops: FlashInferOps, num_rows: int = 3) -> None:
    w31, w2 = half(2, 64, 8), half(2, 8, 32)
    CuteDslExperts(ops, w2, top_k=2).run(
        half(num_rows, 8),
        *routes(num_rows),
        w31,
        w2,
        out=half(num_rows, 8),
        scratch=half(scratch_rows(num_rows, 2, 2), 32),
    )


def call_all_to_all(ops: FlashInferOps) -> None:
    sizes = AllToAllSizes(
        ep_size=1,
        num_experts=2,
        num_slots=2,
        top_k=2,
        hidden_size=4,
        dtype=torch.bfloat16,
        max_num_tokens=3,
        bytes_per_rank=1 << 12,
    )
    all_to_all = AllToAll(ops, sizes, ep_rank=0)
    all_to_all.attach(torch.zeros(1, 1 << 12, dtype=torch.uint8))
    ids = int32(0, 1, 1, 0, 0, 1).view(3, 2)
    received = all_to_all.dispatch([half(3, 4)], ids, torch.ones(3, 2), routes_TK=ids, capacity=3)
    all_to_all.combine(received.out, received)


def call_attention(ops: FlashInferOps) -> None:
    workspace = torch.zeros(WORKSPACE[0], dtype=torch.uint8)
    pages = (torch.zeros(6, 4, 2, 64, dtype=torch.bfloat16),) * 2
    ops.append_to_pages(
        half(3, 2, 64),
        half(3, 2, 64),
        pages,
        batch_indices=int32(0, 0, 0),
        positions=int32(4, 5, 0),
        kv_indices=torch.arange(6, dtype=torch.int32),
        kv_indptr=int32(0, 6),
        last_page_len=int32(4),
    )
    buffers = PageTableBuffers(
        torch.zeros(10, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    )
    table = PageTable(
        qo_indptr=int32(0, 1, 2),
        kv_indptr=int32(0, 1, 3),
        last_page_len=int32(3, 1),
        kv_indices=int32(1, 2, 3),
    )
    offsets = (table.qo_indptr, table.kv_indptr, table.last_page_len, int32(0, 0))
    buffers.offsets.copy_(torch.cat(offsets))
    mask = MaskBuffers(bits=torch.full((4,), 0xFF, dtype=torch.uint8), indptr=int32(0, 0, 0))
    decode = partial(paged_decode, ops, SHAPE, workspace)
    extend = partial(paged_prefill, ops, SHAPE, workspace)
    in_graph = partial(extend, backend="fa2", buffers=buffers, uniform_len=1)
    for attention, planned in (
        (decode(use_tensor_cores=True), table),
        (decode(use_tensor_cores=False, buffers=buffers), table),
        (extend(backend="auto"), table),
        (in_graph(), table),
        (extend(backend="fa2", is_causal=False, mask=mask), table),
        (in_graph(is_causal=False, mask=mask), table),
    ):
        assert attention.workspace_size(planned) == WORKSPACE
        attention.set_workspace(workspace, torch.zeros(WORKSPACE[1], dtype=torch.uint8))
        attention.plan(planned)
        mask.indptr.copy_(int32(0, 1, 2))
        attention.run(half(2, 8, 64), pages, half(2, 8, 64))


def call_latent_attention(ops: FlashInferOps) -> None:
    shape = LatentShape(
        num_heads=3,
        latent_dim=8,
        rope_dim=4,
        block_size=4,
        dtype=torch.bfloat16,
        sm_scale=0.125,
    )
    buffers = PageTableBuffers(
        torch.zeros(10, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    )
    table = PageTable(
        qo_indptr=int32(0, 1, 3),
        kv_indptr=int32(0, 1, 3),
        last_page_len=int32(3, 1),
        kv_indices=int32(1, 2, 3),
    )
    workspace = torch.zeros(WORKSPACE[0], dtype=torch.uint8)
    for attention in (
        PagedLatent(ops, shape, workspace),
        PagedLatent(ops, shape, workspace, buffers=buffers),
    ):
        attention.plan(table)
        attention.run(half(3, 3, 12), torch.zeros(6, 4, 12).bfloat16(), half(3, 3, 8))


CALLS = [
    call_small_operators,
    call_filters,
    call_experts,
    call_kept_weights,
    call_cutedsl_experts,
    call_all_to_all,
    call_attention,
    call_latent_attention,
]


def test_every_call_fits_the_installed_library(library: CpuFlashInfer) -> None:
    for call in CALLS:
        call(FlashInferOps(enable_pdl=True))
    assert set(library.names()) == library.bound


@pytest.mark.parametrize("call", CALLS)
def test_a_misspelled_keyword_is_refused(call: Any, library: CpuFlashInfer) -> None:
    call(FlashInferOps(enable_pdl=False))
    for name in set(library.names()):
        library.misspelled = name
        with pytest.raises(TypeError, match=r"^got an unexpected keyword argument"):
            call(FlashInferOps(enable_pdl=False))


@pytest.mark.parametrize("enable_pdl", [True, False])
def test_one_switch_decides_about_dependent_launches(
    enable_pdl: bool, library: CpuFlashInfer
) -> None:
    ops = FlashInferOps(enable_pdl=enable_pdl)
    for call in CALLS:
        call(ops)
    said = {name: kwargs["enable_pdl"] for name, kwargs in library.calls if "enable_pdl" in kwargs}
    assert len(said) == 11
    # True is refused where no kernel for latents has it: the library decides.
    assert said.pop("latent.plan") is (None if enable_pdl else False)
    assert set(said.values()) == {enable_pdl}


def test_no_dtype_is_left_to_the_library(library: CpuFlashInfer) -> None:
    call_attention(FlashInferOps(enable_pdl=True))
    planned = [kwargs for name, kwargs in library.calls if name.endswith((".plan", "_size"))]
    assert len(planned) == 12
    for kwargs in planned:
        assert {kwargs[f"{x}_data_type"] for x in ("q", "kv", "o")} == {torch.bfloat16}
        assert kwargs["sm_scale"] == 0.125


def test_no_rows_are_never_handed_to_a_kernel(library: CpuFlashInfer) -> None:
    for call in (call_small_operators, call_experts, call_kept_weights, call_cutedsl_experts):
        call(FlashInferOps(enable_pdl=True), 0)
    assert {name for name in library.names() if not name.startswith("interleave_moe")} == {
        "cutlass_fused_moe_workspace_size",
        "cutedsl.__init__",
    }


def test_planning_of_decodes_is_bound_where_the_library_reads_it(real: Any) -> None:
    """``plan`` itself takes anything and hands it on."""
    wrapper = real.BatchDecodeWithPagedKVCacheWrapper
    kinds = {p.kind for p in inspect.signature(wrapper.plan).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds
    strict = {p.kind for p in inspect.signature(wrapper._plan_impl).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in strict


def test_a_schedule_is_not_written_before_the_last_one_was_copied(
    library: CpuFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library leaves it in pinned memory, copies it from there later and waits for nothing."""
    order = []

    class Event:
        def synchronize(self) -> None:
            order.append("wait")

        def record(self) -> None:
            order.append("mark")

    class Wrapper:
        device = torch.device("cuda")

        def plan(self, **_: Any) -> None:
            order.append("write")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    attention = PagedAttention(Wrapper(), lambda table: {}, enable_pdl=True)
    table = PageTable(
        qo_indptr=int32(), kv_indptr=int32(), last_page_len=int32(), kv_indices=int32()
    )
    for _ in range(2):
        attention.plan(table)
    assert order == ["wait", "write", "mark"] * 2
