"""A stand-in for FlashInfer: its signatures, our arithmetic, on the CPU.

Each call is bound to the installed library's signature, so that one that the library would refuse
fails here too; then it is computed in plain PyTorch, so that what is built on it can be compared with
the torch backends. In graph mode attention reads its page table from the buffers it was given, as the
kernels do, its mask likewise, and refuses to run a plan that was made for other queries.
"""

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from executor.model.moe.routing import choose_experts
from executor.model.spec import RouterSpec, Scores
from tests.executor.support.flashinfer import cpu_all_to_all, cpu_kept
from tests.executor.support.flashinfer.cpu_cutedsl import cpu_wrapper

WORKSPACE = (4096, 512)  # bytes of float and of int workspace that every plan needs


def real_flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the installed library. Without it the test is skipped, but on CI it fails."""
    folder = str(tmp_path_factory.mktemp("flashinfer"))  # it writes a log as soon as it is imported
    with patch.dict(
        os.environ, {"FLASHINFER_WORKSPACE_BASE": folder, "FLASHINFER_USE_CUDA_NORM": "1"}
    ):
        if "CI" in os.environ:
            return import_module("flashinfer")
        return pytest.importorskip("flashinfer")


class CpuFlashInfer:
    """Takes the place of the module.

    Args:
        real: The library, for its signatures.

    Attributes:
        calls: Each call so far: its name and its keyword arguments.
        bound: Names of all functions whose calls are bound.
        misspelled: One of them, whose calls get their last keyword once more, with an e too many.
        wrappers: Attention wrappers, in the order in which they were made.
        launch: Goes around what would be a kernel, for a backend that records.
    """

    def __init__(self, real: Any) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.bound: set[str] = set()
        self.misspelled = ""
        self.wrappers: list[_Wrapper] = []
        self.launch: Callable[[Callable[..., None]], Callable[..., None]] = lambda kernel: kernel
        self.ActivationType = real.ActivationType
        for function in (
            _rmsnorm,
            _fused_add_rmsnorm,
            _silu_and_mul,
            _apply_rope_with_cos_sin_cache_inplace,
            _append_paged_kv_cache,
        ):
            self._replace(self, real, self._kernel(function))
        for function in (_top_k_renorm_probs, _top_p_renorm_probs):
            self._replace(self, real, function)
        self.fused_moe = SimpleNamespace(
            CuteDslBf16MoEWrapper=cpu_wrapper(real, self._bound, lambda kernel: self.launch(kernel))
        )
        for kernel in (_cutlass_fused_moe, _fused_topk_deepseek):
            self._replace(self.fused_moe, real.fused_moe, self._kernel(kernel))
        self._replace(self.fused_moe, real.fused_moe, _cutlass_fused_moe_workspace_size)
        for function in cpu_kept.INTERLEAVES:
            self._replace(self.fused_moe, real.fused_moe, function)
        self.gemm = SimpleNamespace()
        self._replace(self.gemm, real.gemm, self._kernel(cpu_kept.fp8_blockscale_gemm_sm90))
        self.comm = cpu_all_to_all.stand_in(import_module("flashinfer.comm"), self._bound)
        self.BatchDecodeWithPagedKVCacheWrapper = self._wrapper(
            real.BatchDecodeWithPagedKVCacheWrapper, _DecodeWrapper, plan="_plan_impl"
        )
        self.BatchPrefillWithPagedKVCacheWrapper = self._wrapper(
            real.BatchPrefillWithPagedKVCacheWrapper, _PrefillWrapper, plan="plan"
        )
        mla = import_module("flashinfer.mla")
        self.mla = SimpleNamespace(
            BatchMLAPagedAttentionWrapper=self._wrapper(
                mla.BatchMLAPagedAttentionWrapper, _LatentWrapper, plan="plan"
            ),
            MLAPlanMetadata=mla.MLAPlanMetadata,
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, ``import flashinfer`` finds this."""
        with patch.dict(sys.modules, {"flashinfer": self}):  # type: ignore[dict-item]
            yield

    def names(self) -> list[str]:
        """Returns the names of all calls so far, and forgets them."""
        names = [name for name, _ in self.calls]
        self.calls.clear()
        return names

    def _bound(
        self,
        name: str,
        real: Callable[..., Any],
        function: Callable[..., Any],
        *,
        is_method: bool = False,
    ) -> Callable[..., Any]:
        signature = inspect.signature(real)
        self.bound.add(name)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            own, rest = (args[:1], args[1:]) if is_method else ((), args)
            assert not rest, f"{name}: arguments go by keyword"
            if name == self.misspelled:
                keyword = next(reversed(kwargs))
                kwargs[f"{keyword}e"] = kwargs[keyword]
            signature.bind(*own, **kwargs)
            self.calls.append((name, kwargs))
            return function(*args, **kwargs)

        return call

    def _replace(self, ours: Any, real: Any, function: Callable[..., Any]) -> None:
        """Puts a function in the place of the library's of that name."""
        name = function.__name__.removeprefix("_")
        setattr(ours, name, self._bound(name, getattr(real, name), function))

    def _kernel(self, function: Callable[..., None]) -> Callable[..., None]:
        return wraps(function)(lambda **kwargs: self.launch(function)(**kwargs))

    def _wrapper(self, real: Any, ours: type["_Wrapper"], plan: str) -> type["_Wrapper"]:
        short = ours.__name__.removeprefix("_").removesuffix("Wrapper").lower()
        methods: dict[str, Any] = {
            "launch": lambda _, kernel: self.launch(kernel),
            "note": lambda wrapper: self.wrappers.append(wrapper),
        }
        for name, real_name in (
            ("__init__", "__init__"),
            ("plan", plan),
            ("run", "run"),
            ("workspace_size", "workspace_size"),
            ("reset_workspace_buffer", "reset_workspace_buffer"),
        ):
            if not hasattr(real, real_name):
                continue
            methods[name] = self._bound(
                f"{short}.{name}", getattr(real, real_name), getattr(ours, name), is_method=True
            )
        return type(ours.__name__, (ours,), methods)


def _rmsnorm(
    *, input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, **_: Any
) -> None:
    assert input.stride(-1) == out.stride(-1) == 1
    out.copy_(F.rms_norm(input, (input.shape[-1],), weight, eps))


def _fused_add_rmsnorm(
    *, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, **_: Any
) -> None:
    residual.add_(input)
    input.copy_(F.rms_norm(residual, (input.shape[-1],), weight, eps))


def _silu_and_mul(*, input: torch.Tensor, out: torch.Tensor, **_: Any) -> None:
    assert input.is_contiguous()
    gate, up = input.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def _apply_rope_with_cos_sin_cache_inplace(
    *,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    assert cos_sin_cache.dtype == torch.float32
    assert is_neox
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)  # a view or an error, as in the library
        heads = heads[..., : cos_sin_cache.shape[-1]]  # the rest stays
        first, second = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def _append_paged_kv_cache(
    *,
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str,
) -> None:
    assert kv_layout == "NHD"
    int32s = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in int32s)
    assert len(batch_indices) == len(positions) == len(append_key)
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    page_size = paged_kv_cache[0].shape[1]
    place = kv_indptr[batch_indices] * page_size + positions
    page = kv_indices[place // page_size].long()
    for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
        assert new.stride(-1) == 1
        cache[page, (place % page_size).long()] = new


def _top_k_renorm_probs(
    *, probs: torch.Tensor, top_k: torch.Tensor, is_deterministic: bool
) -> torch.Tensor:
    assert probs.dtype == torch.float32
    assert probs.is_contiguous()
    assert top_k.dtype == torch.int32
    return _renormed(probs, [row.topk(k).values[-1] for row, k in zip(probs, top_k, strict=True)])


def _top_p_renorm_probs(
    *, probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool
) -> torch.Tensor:
    assert probs.dtype == top_p.dtype == torch.float32
    assert probs.is_contiguous()
    leasts = []
    for row, p in zip(probs, top_p.tolist(), strict=True):
        values = row.sort(descending=True).values
        before = values.double().cumsum(0) - values
        leasts.append(values[before < p][-1])
    return _renormed(probs, leasts)


def _renormed(probs: torch.Tensor, leasts: list[torch.Tensor]) -> torch.Tensor:
    """Returns what is as likely as the least that each row keeps, scaled to sum to 1."""
    kept = torch.where(probs >= torch.stack(leasts).unsqueeze(1), probs, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _cutlass_fused_moe(
    *,
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    fc1_expert_biases: torch.Tensor | None,
    fc2_expert_biases: torch.Tensor | None,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    ep_size: int,
    ep_rank: int,
    use_fused_finalize: bool,
    activation_type: Any,
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    quant_scales: list[torch.Tensor],
    use_deepseek_fp8_block_scale: bool,
    use_w4_group_scaling: bool,
    **_: Any,
) -> None:
    assert len(input), "the library refuses no rows"
    assert not use_fused_finalize, "rows would be added up in any order"
    assert token_selected_experts.dtype == torch.int32
    assert token_final_scales.dtype == torch.float32
    assert workspace_buffer.dtype == torch.uint8
    assert token_selected_experts.numel() <= len(workspace_buffer), "workspace overflow"
    num_local = len(fc2_expert_weights)
    biases = (fc1_expert_biases, fc2_expert_biases)
    clamp = (swiglu_alpha, swiglu_beta, swiglu_limit)
    assert (biases[0] is None) == (biases[1] is None), "both or none"
    assert all(bias is None or bias.dtype == output.dtype for bias in biases)
    assert all(x is None or (x.dtype, len(x)) == (torch.float32, num_local) for x in clamp)
    assert int(token_selected_experts.max()) < num_local * ep_size, "no rank has this expert"
    if use_deepseek_fp8_block_scale or use_w4_group_scaling:
        assert not (use_deepseek_fp8_block_scale and use_w4_group_scaling)
        read = cpu_kept.fp8_experts if use_deepseek_fp8_block_scale else cpu_kept.mxfp4_experts
        weights = (fc1_expert_weights, fc2_expert_weights)
        fc1_expert_weights, fc2_expert_weights = map(read, weights, quant_scales)
        assert input.dtype == torch.bfloat16
        input = input.float()
        biases = tuple(None if bias is None else bias.float() for bias in biases)
    else:
        assert not quant_scales
    output.zero_()
    for row, ids in enumerate(token_selected_experts.tolist()):
        for k, expert in enumerate(ids):
            local = expert - ep_rank * num_local
            if 0 <= local < num_local:
                hidden = fc1_expert_weights[local] @ input[row]
                if biases[0] is not None:
                    hidden = hidden + biases[0][local]
                up, gate = hidden.chunk(2)
                if activation_type.name == "SwigluBias":
                    alpha, beta, limit = (x[local] for x in clamp if x is not None)
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                    y = fc2_expert_weights[local] @ (gate * (gate * alpha).sigmoid() * (up + beta))
                else:
                    y = fc2_expert_weights[local] @ (F.silu(gate) * up)
                if biases[1] is not None:
                    y = y + biases[1][local]
                output[row] += token_final_scales[row, k].to(y.dtype) * y


def _fused_topk_deepseek(
    *,
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: bool,
) -> None:
    spec = RouterSpec(
        scores=Scores.SIGMOID,
        num_groups=n_group,
        num_kept_groups=topk_group,
        factor=routed_scaling_factor,
    )
    ids, weights = choose_experts(scores, topk, spec, bias)
    topk_indices.copy_(ids)
    topk_values.copy_(weights)


def _cutlass_fused_moe_workspace_size(
    *,
    max_num_tokens: int,
    top_k: int,
    use_fused_finalize: bool,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    use_deepseek_fp8_block_scale: bool,
    use_w4_group_scaling: bool,
    **_: Any,
) -> int:
    assert not use_fused_finalize, "sized for other kernels than those that run"
    assert use_deepseek_fp8_block_scale == (weight_dtype == torch.float8_e4m3fn)
    assert use_w4_group_scaling == (weight_dtype == torch.uint8)
    assert x_dtype == weight_dtype or x_dtype == torch.bfloat16
    return max_num_tokens * top_k


class _Wrapper:
    """What both attention wrappers do.

    Attributes:
        table: qo_indptr, kv_indptr, kv_indices and last_page_len: in graph mode the buffers given.
        mask: Bits and the first byte of each sequence, likewise; empty if causal.
    """

    launch: Callable[[Callable[..., None]], Callable[..., None]]
    note: Callable[[], None]
    table: list[torch.Tensor]
    _custom_mask_buf: torch.Tensor | None = None
    _mask_indptr_buf: torch.Tensor | None = None

    def __init__(
        self,
        *,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        backend: str,
        **options: Any,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.device = float_workspace_buffer.device
        self.workspaces = (float_workspace_buffer, torch.zeros(WORKSPACE[1], dtype=torch.uint8))
        self.options = options
        self.backend = backend
        self.is_graph = options["use_cuda_graph"]
        assert backend == "fa2" or not self.is_graph, "graphs are planned for one backend"
        # Where planning copies to, by the names that the library has for it.
        self.targets = {
            id(x): f"_{name.removesuffix('fer')}"
            for name, x in options.items()
            if isinstance(x, torch.Tensor)
        }
        vars(self).update(
            {self.targets[id(x)]: x for x in options.values() if id(x) in self.targets}
        )
        self.note()

    def reset_workspace_buffer(
        self, *, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        self.workspaces = (float_workspace_buffer, int_workspace_buffer)

    def workspace_size(self, **_: Any) -> tuple[int, int]:
        return WORKSPACE

    def keep(self, buffers: list[torch.Tensor], table: list[torch.Tensor], **what: Any) -> None:
        for need, workspace in zip(WORKSPACE, self.workspaces, strict=True):
            assert len(workspace) >= need, "workspace overflow"
        on_host = [table[0], table[1], table[3]]
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in on_host)
        assert table[2].dtype == torch.int32
        assert len(table[2]) == int(table[1][-1]), "as many pages as kv_indptr says"
        if self.is_graph:
            assert len(table[3]) == len(buffers[3]), "graphs have a fixed number of sequences"
            for buffer, values in zip(buffers, table, strict=True):
                target = getattr(self, self.targets.get(id(buffer), ""), buffer)
                target[: len(values)].copy_(values)
            table = buffers
        self.table = table
        self.num_rows = int(table[0][-1])
        self.what = what

    def run(
        self,
        *,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        return_lse: bool,
        enable_pdl: bool,
    ) -> None:
        assert return_lse == (lse is not None)
        assert len(q) == self.num_rows, "planned for other queries"
        assert out.is_contiguous()
        assert out.dtype == q.dtype == self.what["q_data_type"] == self.what["kv_data_type"]
        scale = self.what["sm_scale"]
        window = (self.what["window_left"], lse)
        mask = [x for x in (self._custom_mask_buf, self._mask_indptr_buf) if x is not None]
        self.launch(_attend)(q, *paged_kv_cache, out, scale, *window, *self.table, *mask)


class _DecodeWrapper(_Wrapper):
    def plan(
        self,
        *,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        **what: Any,
    ) -> None:
        options = self.options
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        buffers = [
            one_each.clone(),
            options["paged_kv_indptr_buffer"],
            options["paged_kv_indices_buffer"],
            options["paged_kv_last_page_len_buffer"],
        ]
        self.keep(buffers, [one_each, indptr, indices, last_page_len], **what)


class _PrefillWrapper(_Wrapper):
    def plan(
        self,
        *,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        causal: bool,
        custom_mask: None,
        packed_custom_mask: torch.Tensor | None,
        uniform_q_len: int | None,
        **what: Any,
    ) -> None:
        options = self.options
        assert causal == (packed_custom_mask is None)
        assert causal or self.backend == "fa2", "the only one that takes masks"
        assert uniform_q_len is None or bool((qo_indptr.diff() == uniform_q_len).all())
        num_keys = (paged_kv_indptr.diff() - 1) * what["page_size"] + paged_kv_last_page_len
        if packed_custom_mask is not None:
            self.keep_mask(qo_indptr.diff() * num_keys, packed_custom_mask)
        buffers = [
            options["qo_indptr_buf"],
            options["paged_kv_indptr_buf"],
            options["paged_kv_indices_buf"],
            options["paged_kv_last_page_len_buf"],
        ]
        table = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        self.keep(buffers, table, **what)

    def keep_mask(self, num_bits: torch.Tensor, packed: torch.Tensor) -> None:
        """It gets offsets in bits, of which the kernels want bytes."""
        indptr = F.pad(num_bits.cumsum(0), (1, 0)).to(torch.int32)
        if self.is_graph:
            buffer, indptr_buffer = self.options["custom_mask_buf"], self.options["mask_indptr_buf"]
            buffer[: len(packed)].copy_(packed)
            packed, indptr = buffer, indptr_buffer.copy_(indptr)
        self._custom_mask_buf, self._mask_indptr_buf = packed, indptr


class _LatentWrapper(_Wrapper):
    """Reads its metadata as the library does: with the number of keys of each sequence."""

    def __init__(self, *, backend: str, **options: Any) -> None:
        backend = "fa2" if backend == "auto" else backend  # which one it is, the library decides
        super().__init__(kv_layout="NHD", backend=backend, **options)

    def plan(self, *, metadata: Any, causal: bool, **what: Any) -> None:
        options, page_size = self.options, what["page_size"]
        num_rows, num_heads = metadata.qo_indptr.diff(), what["num_heads"]
        assert causal == bool((num_rows > 1).any())
        assert not causal or 128 % num_heads == 0, "it would miss a key of some lengths"
        assert (what["query_layout"], what["kv_cache_layout"]) == ("packed", "packed")
        num_pages = metadata.kv_indptr.diff()
        assert torch.equal(-(-metadata.kv_len_arr // page_size), num_pages)
        last = metadata.kv_len_arr - (num_pages - 1) * page_size
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        table = [metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, last.int()]
        self.keep([options[name] for name in names], table, **what)

    def run(
        self, *, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, return_lse: bool
    ) -> None:
        assert len(query) == self.num_rows, "planned for other queries"
        assert out.is_contiguous()
        assert out.dtype == query.dtype == self.what["q_data_type"] == self.what["kv_data_type"]
        assert query.shape[1:] == (self.what["num_heads"], kv_cache.shape[2])
        assert kv_cache.shape[2] == self.what["head_dim_ckv"] + self.what["head_dim_kpe"]
        keys = kv_cache.unsqueeze(2)
        values = keys[..., : self.what["head_dim_ckv"]]
        scale = self.what["sm_scale"]
        self.launch(_attend)(query, keys, values, out, scale, -1, None, *self.table)


def _attend(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_left: int,
    lse: torch.Tensor | None,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    bits: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
) -> None:
    """Each sequence by itself, causal at its end unless there are bits."""
    starts, pages = qo_indptr.tolist(), kv_indptr.tolist()
    page_size = key_pages.shape[1]
    for i, last in enumerate(last_page_len.tolist()):
        assert 1 <= last <= page_size
        mine = kv_indices[pages[i] : pages[i + 1]].long()
        num_keys = (len(mine) - 1) * page_size + last
        keys, values = (x[mine].flatten(0, 1)[:num_keys] for x in (key_pages, value_pages))
        queries = q[starts[i] : starts[i + 1]]
        seen = torch.ones(len(queries), num_keys, dtype=torch.bool).tril(num_keys - len(queries))
        if bits is not None and mask_indptr is not None:
            mine_packed = bits[int(mask_indptr[i]) : int(mask_indptr[i + 1])].numpy()
            unpacked = np.unpackbits(mine_packed, count=seen.numel(), bitorder="little")
            seen = torch.from_numpy(unpacked).bool().view(seen.shape)
        if (
            window_left >= 0
        ):  # as the kernel's mask: kv_idx + qo_len + window_left >= kv_len + qo_idx
            rows = torch.arange(len(queries)).unsqueeze(1)
            kept = torch.arange(num_keys) + len(queries) + window_left >= num_keys + rows
            seen &= kept
        if lse is not None:
            heads = keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
            scores = torch.einsum("qhd,khd->qhk", queries.float(), heads.float()) * scale
            scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
            lse[starts[i] : starts[i + 1]] = scores.logsumexp(-1) / math.log(2)
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        out[starts[i] : starts[i + 1]] = attended.transpose(0, 1)


def reference(name: str) -> Callable[..., Any]:
    """Returns the library's own PyTorch code for a kernel; skips the test if it ships none.

    Not part of its public interface.
    """
    try:
        from flashinfer.api_logging import _TRACE_REGISTRY
    except ImportError:
        pytest.skip("this FlashInfer keeps no references")
    for _, template, label in _TRACE_REGISTRY:
        if label == name and template.reference is not None:
            found: Callable[..., Any] = template.reference
            return found
    pytest.skip(f"this FlashInfer ships no reference for {name}")
