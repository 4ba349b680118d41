"""If this fails, the GPU executor calls FlashInfer in a way that the installed one refuses."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.model.flashinfer.all_to_all import AllToAll, AllToAllSizes
from executor.model.flashinfer.cutedsl import CuteDslExperts, scratch_rows
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

SHAPE = PagedShape(num_heads=8, num_kv_heads=2, head_dim=64, block_size=4, dtype=torch.bfloat16)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def half(*size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def call_small_operators(ops: FlashInferOps) -> None:
    x = half(3, 16)
    ops.rms_norm(x, half(16), 1e-6, out=half(3, 16))
    ops.add_rms_norm_(x, half(3, 16), half(16), 1e-6)
    ops.silu_and_mul(half(3, 16), out=half(3, 8))
    ops.rotate_(half(3, 2, 8), half(3, 1, 8), torch.arange(3), torch.ones(9, 8))
    probs = torch.full((2, 5), 0.2)
    ops.top_k_renorm(probs, int32(1, 5))
    ops.top_p_renorm(probs, torch.tensor([0.5, 0.9]))


def call_experts(ops: FlashInferOps) -> None:
    w31, w2 = half(2, 16, 4), half(2, 4, 8)
    num_bytes = ops.fused_moe_workspace_size(7, 2, w2)
    ops.fused_moe(
        half(3, 4),
        int32(0, 1, 1, 2, 2, 0).view(3, 2),
        torch.ones(3, 2),
        w31,
        w2,
        out=half(3, 4),
        workspace=torch.zeros(num_bytes, dtype=torch.uint8),
        max_num_rows=7,
    )


def call_cutedsl_experts(ops: FlashInferOps) -> None:
    w31, w2 = half(2, 64, 8), half(2, 8, 32)
    CuteDslExperts(ops, w2, top_k=2).run(
        half(3, 8),
        int32(0, 1, 1, 2, 2, 0).view(3, 2),
        torch.ones(3, 2),
        w31,
        w2,
        out=half(3, 8),
        scratch=half(scratch_rows(3, 2, 2), 32),
    )


def call_all_to_all(ops: FlashInferOps) -> None:
    sizes = AllToAllSizes(
        ep_size=1,
        num_experts=2,
        top_k=2,
        hidden_size=4,
        dtype=torch.bfloat16,
        max_num_tokens=3,
        bytes_per_rank=1 << 12,
    )
    all_to_all = AllToAll(ops, sizes, ep_rank=0)
    all_to_all.attach(torch.zeros(1, 1 << 12, dtype=torch.uint8))
    ids = int32(0, 1, 1, 0, 0, 1).view(3, 2)
    received = all_to_all.dispatch(half(3, 4), ids, torch.ones(3, 2), routes_TK=ids, capacity=3)
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
        qo_indptr=int32(0, 0, 0),
        kv_indptr=int32(0, 0, 0),
        last_page_len=int32(0, 0),
        kv_indices=torch.zeros(9, dtype=torch.int32),
    )
    table = PageTable(
        qo_indptr=int32(0, 1, 2),
        kv_indptr=int32(0, 1, 3),
        last_page_len=int32(3, 1),
        kv_indices=int32(1, 2, 3),
    )
    for attention in (
        paged_decode(ops, SHAPE, workspace, use_tensor_cores=True),
        paged_decode(ops, SHAPE, workspace, use_tensor_cores=False, buffers=buffers),
        paged_prefill(ops, SHAPE, workspace, backend="auto"),
        paged_prefill(ops, SHAPE, workspace, backend="fa2", buffers=buffers, uniform_len=1),
    ):
        assert attention.workspace_size(table) == WORKSPACE
        attention.set_workspace(workspace, torch.zeros(WORKSPACE[1], dtype=torch.uint8))
        attention.plan(table)
        attention.run(half(2, 8, 64), pages, half(2, 8, 64))
    mask = MaskBuffers(bits=torch.full((4,), 0xFF, dtype=torch.uint8), indptr=int32(0, 0, 0))
    for attention, masked in (
        (
            paged_prefill(ops, SHAPE, workspace, backend="fa2", is_causal=False),
            replace(table, mask=torch.ones(3 + 5, dtype=torch.bool)),
        ),
        (
            paged_prefill(
                ops,
                SHAPE,
                workspace,
                backend="fa2",
                buffers=buffers,
                uniform_len=1,
                is_causal=False,
                mask=mask,
            ),
            table,
        ),
    ):
        assert attention.workspace_size(masked) == WORKSPACE
        attention.plan(masked)
        mask.indptr.copy_(int32(0, 1, 2))
        attention.run(half(2, 8, 64), pages, half(2, 8, 64))


CALLS = {
    call_small_operators: {
        "rmsnorm",
        "fused_add_rmsnorm",
        "silu_and_mul",
        "apply_rope_with_cos_sin_cache_inplace",
        "top_k_renorm_probs",
        "top_p_renorm_probs",
    },
    call_experts: {"cutlass_fused_moe", "cutlass_fused_moe_workspace_size"},
    call_cutedsl_experts: {"cutedsl.__init__", "cutedsl.run"},
    call_all_to_all: {
        "moe_a2a_get_workspace_size_per_rank",
        "moe_a2a_initialize",
        "moe_a2a_dispatch",
        "moe_a2a_sanitize_expert_ids",
        "moe_a2a_wrap_payload_tensor_in_workspace",
        "moe_a2a_combine",
    },
    call_attention: {
        "append_paged_kv_cache",
        *(
            f"{wrapper}.{method}"
            for wrapper in ("decode", "prefill")
            for method in ("__init__", "workspace_size", "reset_workspace_buffer", "plan", "run")
        ),
    },
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_fits_the_installed_library(call: Any, library: CpuFlashInfer) -> None:
    call(FlashInferOps(enable_pdl=True))
    assert set(library.names()) == CALLS[call]


def misspell(library: Any, path: str, keyword: str) -> None:
    """Makes calls of one function pass a keyword with an e too many."""
    *owners, name = path.split(".")
    for owner in owners:
        library = getattr(library, owner)
    function = getattr(library, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        assert keyword in kwargs, f"{path} is not given {keyword}"
        return function(*args, **{f"{k}e" if k == keyword else k: v for k, v in kwargs.items()})

    setattr(library, name, call)


@pytest.mark.parametrize(
    ("call", "path", "keyword"),
    [
        (call_small_operators, "rmsnorm", "eps"),
        (call_small_operators, "fused_add_rmsnorm", "residual"),
        (call_small_operators, "silu_and_mul", "enable_pdl"),
        (call_small_operators, "apply_rope_with_cos_sin_cache_inplace", "is_neox"),
        (call_small_operators, "top_k_renorm_probs", "is_deterministic"),
        (call_small_operators, "top_p_renorm_probs", "top_p"),
        (call_experts, "fused_moe.cutlass_fused_moe", "use_fused_finalize"),
        (call_experts, "fused_moe.cutlass_fused_moe_workspace_size", "top_k"),
        (call_cutedsl_experts, "fused_moe.CuteDslBf16MoEWrapper", "use_fused_finalize"),
        (call_cutedsl_experts, "fused_moe.CuteDslBf16MoEWrapper.run", "intermediate_buffer"),
        (call_all_to_all, "comm.moe_a2a_get_workspace_size_per_rank", "max_num_tokens"),
        (call_all_to_all, "comm.moe_a2a_initialize", "ep_rank"),
        (call_all_to_all, "comm.moe_a2a_dispatch", "runtime_max_tokens_per_rank"),
        (call_all_to_all, "comm.moe_a2a_sanitize_expert_ids", "invalid_expert_id"),
        (call_all_to_all, "comm.moe_a2a_wrap_payload_tensor_in_workspace", "slice_start"),
        (call_all_to_all, "comm.moe_a2a_combine", "payload_in_workspace"),
        (call_attention, "append_paged_kv_cache", "kv_layout"),
        (call_attention, "BatchDecodeWithPagedKVCacheWrapper", "use_tensor_cores"),
        (call_attention, "BatchDecodeWithPagedKVCacheWrapper.plan", "kv_data_type"),
        (call_attention, "BatchDecodeWithPagedKVCacheWrapper.run", "enable_pdl"),
        (call_attention, "BatchDecodeWithPagedKVCacheWrapper.workspace_size", "sm_scale"),
        (call_attention, "BatchPrefillWithPagedKVCacheWrapper", "backend"),
        (call_attention, "BatchPrefillWithPagedKVCacheWrapper.plan", "uniform_q_len"),
        (call_attention, "BatchPrefillWithPagedKVCacheWrapper.run", "out"),
    ],
)
def test_a_misspelled_keyword_is_refused(
    call: Any, path: str, keyword: str, library: CpuFlashInfer
) -> None:
    misspell(library, path, keyword)
    with pytest.raises(TypeError, match=f"'{keyword}e?'"):
        call(FlashInferOps(enable_pdl=False))


@pytest.mark.parametrize("enable_pdl", [True, False])
def test_one_switch_decides_about_dependent_launches(
    enable_pdl: bool, library: CpuFlashInfer
) -> None:
    ops = FlashInferOps(enable_pdl=enable_pdl)
    for call in CALLS:
        call(ops)
    said = {name: kwargs["enable_pdl"] for name, kwargs in library.calls if "enable_pdl" in kwargs}
    assert len(said) == 10
    assert set(said.values()) == {enable_pdl}


def test_no_dtype_is_left_to_the_library(library: CpuFlashInfer) -> None:
    call_attention(FlashInferOps(enable_pdl=True))
    planned = [kwargs for name, kwargs in library.calls if name.endswith((".plan", "_size"))]
    assert len(planned) == 12
    for kwargs in planned:
        assert {kwargs[f"{x}_data_type"] for x in ("q", "kv", "o")} == {torch.bfloat16}
        assert kwargs["sm_scale"] == 0.125


def test_no_rows_are_never_handed_to_a_kernel(library: CpuFlashInfer) -> None:
    ops = FlashInferOps(enable_pdl=True)
    ops.rms_norm(half(0, 16), half(16), 1e-6, out=half(0, 16))
    ops.add_rms_norm_(half(0, 16), half(0, 16), half(16), 1e-6)
    ops.silu_and_mul(half(0, 16), out=half(0, 8))
    ops.rotate_(half(0, 2, 8), half(0, 1, 8), torch.arange(0), torch.ones(9, 8))
    ops.fused_moe(
        half(0, 4),
        int32().view(0, 2),
        torch.ones(0, 2),
        half(2, 16, 4),
        half(2, 4, 8),
        out=half(0, 4),
        workspace=torch.zeros(1, dtype=torch.uint8),
        max_num_rows=7,
    )
    experts = CuteDslExperts(ops, half(2, 8, 32), top_k=2)
    assert library.names() == ["cutedsl.__init__"]
    experts.run(
        half(0, 8),
        int32().view(0, 2),
        torch.ones(0, 2),
        half(2, 64, 8),
        half(2, 8, 32),
        out=half(0, 8),
        scratch=half(0, 32),
    )
    assert library.names() == []


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
