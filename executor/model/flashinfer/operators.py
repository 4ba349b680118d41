"""FlashInfer's operators, one thin method each.

T token rows    H query heads    N KV heads    D head width    S sampled rows    V vocabulary
R rows of experts    L experts on this rank    F expert hidden    K experts per row
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

KVPages = tuple[torch.Tensor, torch.Tensor]  # keys and values, each [blocks, block_size, N, D]


class ClampOfExperts(NamedTuple):
    """gate' sigmoid(alpha gate') (up' + beta), both clipped at the limit: float32 [L] each."""

    alpha: torch.Tensor
    beta: torch.Tensor
    limit: torch.Tensor


# Kernels for experts in FP8 are said to fail above some 16,000 rows (vLLM, issue 34249).
MAX_FP8_MOE_ROWS = 8192

LAYOUT = "NHD"  # [block, place in the block, head, width], as the KV pool lies


class FlashInferOps:
    """FlashInfer's operators, with the settings that all of them share.

    What FlashInfer compiles, caches or fills on first use is made by the warm-up runs: call nothing
    here for the first time inside a capture.

    Args:
        enable_pdl: Whether kernels may start before the one ahead of them has ended (programmatic
            dependent launch, from SM90 on).

    Attributes:
        library: The imported package.

    Raises:
        ImportError: FlashInfer is not installed.
    """

    def __init__(self, *, enable_pdl: bool) -> None:
        # Else norms are CuTe-DSL where that package happens to be installed. Read at import.
        os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
        import flashinfer

        self.library: Any = flashinfer
        self.enable_pdl = enable_pdl

    def has(self, name: str) -> bool:
        """Whether the library has ``module.function``."""
        module, _, function = name.partition(".")
        return hasattr(getattr(self.library, module, None), function)

    def has_built(self, module: str) -> bool:
        """Whether a compiled module is there, prebuilt or kept from an earlier start."""
        env = import_module("flashinfer.jit.env")
        kept = Path(env.FLASHINFER_JIT_DIR, module, f"{module}.so")
        return kept.exists() or Path(env.get_aot_path(module)).exists()

    def load(self, device: torch.device) -> None:
        """Runs each operator on one row, so that its kernel is loaded, or built for minutes, now.

        Later a peer might wait for it. Attention and experts load their own as they are made.
        """
        x = torch.zeros(1, 1, 128, dtype=torch.bfloat16, device=device)
        row, pages = x.view(1, -1), (x.clone().unsqueeze(0), x.clone().unsqueeze(0))
        self.rms_norm(row, row[0], 1.0, torch.empty_like(row))
        self.add_rms_norm_(row, row.clone(), row[0], 1.0)
        self.silu_and_mul(row, row.new_empty(1, 64))
        index = torch.arange(2, dtype=torch.int32, device=device)
        none, one = index[:1], index[1:]
        self.rotate_(x, x.clone(), none, torch.zeros(1, 128, device=device))
        places = {"batch_indices": none, "positions": none, "kv_indices": none}
        self.append_to_pages(x, x, pages, **places, kv_indptr=index, last_page_len=one)
        probs = torch.ones(1, 1, device=device)
        self.top_p_renorm(self.top_k_renorm(probs, one), probs[0])

    # Norms, activation, rotation. Nothing is asked of the library for no rows.

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """Writes x / rms(x) * weight to ``out``.

        Args:
            x: [T, size] or [T, heads, size]; only the last dimension must be dense.
            weight: [size].
            eps: Added to the mean square.
            out: Shaped like x.
        """
        if len(x):
            self.library.rmsnorm(
                input=x, weight=weight, eps=eps, out=out, enable_pdl=self.enable_pdl
            )

    def add_rms_norm_(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        """Adds x to ``residual``, then writes the norm of the sum to x. Both [T, size]."""
        if len(x):
            self.library.fused_add_rmsnorm(
                input=x, residual=residual, weight=weight, eps=eps, enable_pdl=self.enable_pdl
            )

    def silu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """Writes silu(gate) * up to ``out`` [T, F].

        Args:
            gate_up: [T, 2F], gate first, contiguous.
        """
        if len(gate_up):
            self.library.silu_and_mul(input=gate_up, out=out, enable_pdl=self.enable_pdl)

    def rotate_(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        """Turns queries and keys in place, by halves as Hugging Face does.

        Args:
            q: [T, H, D]; rows may be strided, heads lie side by side.
            k: [T, N, D], likewise.
            positions: int32 or int64 [T].
            cos_sin: float32 [positions, rotary_dim], cosines then sines; the rest of a head stays.
        """
        if len(q):
            self.library.apply_rope_with_cos_sin_cache_inplace(
                positions=positions,
                query=q.flatten(1),
                key=k.flatten(1),
                head_size=q.shape[-1],
                cos_sin_cache=cos_sin,
                is_neox=True,
            )

    def append_to_pages(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: KVPages,
        *,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor,
    ) -> None:
        """Stores keys and values. Nothing is checked: a wrong index writes anywhere.

        Args:
            k: [T, N, D]; rows and heads may be strided.
            v: Likewise.
            pages: Where to store them.
            batch_indices: int32 [T], the sequence of each row.
            positions: int32 [T], its place in that sequence.
            kv_indices, kv_indptr, last_page_len: The page table, all int32 on the device.
        """
        if len(k):
            self.library.append_paged_kv_cache(
                append_key=k,
                append_value=v,
                batch_indices=batch_indices,
                positions=positions,
                paged_kv_cache=pages,
                kv_indices=kv_indices,
                kv_indptr=kv_indptr,
                kv_last_page_len=last_page_len,
                kv_layout=LAYOUT,
            )

    # Sampling. Sums are exact integers, so that a row's result does not depend on its batch.

    def top_k_renorm(self, probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        """Returns probabilities [S, V] of each row's top_k likeliest tokens, summing to 1.

        All tokens as likely as the last of them stay too.

        Args:
            probs: float32 [S, V], contiguous.
            top_k: int32 [S], 1 to V. A tensor: an int would take another, slow to build path.
        """
        kept: torch.Tensor = self.library.top_k_renorm_probs(
            probs=probs, top_k=top_k, is_deterministic=True
        )
        return kept

    def top_p_renorm(self, probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """Returns probabilities [S, V] of each row's likeliest tokens up to top_p, summing to 1.

        All tokens as likely as the last of them stay too.

        Args:
            probs: float32 [S, V], contiguous.
            top_p: float32 [S], above 0, to 1. At 1, rounding may lose some of all tokens.
        """
        kept: torch.Tensor = self.library.top_p_renorm_probs(
            probs=probs, top_p=top_p, is_deterministic=True
        )
        return kept

    # Routing.

    def can_route(self, device: torch.device) -> bool:
        """Whether ``choose_experts`` has a kernel for a device."""
        name = "fused_topk_deepseek"
        if device.type != "cuda" or not self.has(f"fused_moe.{name}"):
            return False
        major, minor = torch.cuda.get_device_capability(device)
        function = getattr(self.library.fused_moe, name)
        is_supported: bool = function.is_compute_capability_supported(10 * major + minor)
        return is_supported

    def choose_experts(
        self,
        logits_TE: torch.Tensor,
        correction_E: torch.Tensor,
        *,
        num_groups: int,
        num_kept_groups: int,
        top_k: int,
        factor: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns expert ids [T, K] int32 and weights [T, K] float32, by sigmoids, as DeepSeek-V3 does.

        Args:
            logits_TE: float32, contiguous.
            correction_E: float32, added to the sigmoids for the choice.
            num_groups: More than one, of at most 32 experts.
            num_kept_groups: Those with the best sum of two experts; of at most 128 experts.
            top_k: K, at most 8.
            factor: What the sum of a row's weights is.
        """
        weights = logits_TE.new_empty(len(logits_TE), top_k)
        ids = torch.empty_like(weights, dtype=torch.int32)
        if len(ids):
            self.library.fused_moe.fused_topk_deepseek(
                scores=logits_TE,
                bias=correction_E,
                n_group=num_groups,
                topk_group=num_kept_groups,
                topk=top_k,
                routed_scaling_factor=factor,
                topk_values=weights,
                topk_indices=ids,
                launch_with_pdl=self.enable_pdl,
            )
        return ids, weights

    # Experts. A rank is told that it is the first of two whose experts are alike in number, so
    # that "elsewhere", expert L, is an expert of the other one.

    def fused_moe(
        self,
        x_RD: torch.Tensor,
        topk_ids_RK: torch.Tensor,
        topk_weights_RK: torch.Tensor,
        w31: torch.Tensor,
        w2: torch.Tensor,
        *,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        clamp: ClampOfExperts | None = None,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor,
        workspace: torch.Tensor,
        max_num_rows: int,
    ) -> None:
        """Runs experts 0 to L - 1 and writes each row's weighted sum, always in one order.

        FP8 weights (float8_e4m3fn), on Hopper: D and F are multiples of 128, rows are at most
        ``MAX_FP8_MOE_ROWS``, and x is rounded to FP8, with a scale per 128 of a row. MXFP4 weights
        (uint8), on Hopper: D and F are multiples of 128; weights and scales as ``interleave_mxfp4``
        returns them.

        Args:
            x_RD: [R, D], contiguous.
            topk_ids_RK: int32, 0 to L - 1, or L for an expert that is elsewhere.
            topk_weights_RK: float32.
            w31: [L, 2F, D], **up** projection first, then gate. MXFP4: [L, 2F, D / 2].
            w2: [L, D, F]. MXFP4: [L, D, F / 2].
            scales: Of FP8, float32 [L, 2F / 128, D / 128] and [L, D / 128, F / 128], or of MXFP4,
                uint8, as many as 32 numbers; None for other weights.
            clamp: Of the activation; None for silu(gate) * up.
            biases: [L, 2F], up first, and [L, D], in the type of x; None without.
            out: [R, D]; rows without experts here become 0.
            workspace: uint8, of ``fused_moe_workspace_size``.
            max_num_rows: R at most, ever.
        """
        if len(x_RD) == 0:  # the library refuses a tensor without memory
            return
        # Returns a list although its annotation says a tensor; the result is in ``output``.
        self.library.fused_moe.cutlass_fused_moe(
            input=x_RD,
            token_selected_experts=topk_ids_RK,
            token_final_scales=topk_weights_RK,
            fc1_expert_weights=w31,
            fc2_expert_weights=w2,
            output_dtype=out.dtype,
            quant_scales=[] if scales is None else list(scales),
            fc1_expert_biases=None if biases is None else biases[0],
            fc2_expert_biases=None if biases is None else biases[1],
            swiglu_alpha=None if clamp is None else clamp.alpha,
            swiglu_beta=None if clamp is None else clamp.beta,
            swiglu_limit=None if clamp is None else clamp.limit,
            tp_size=1,
            tp_rank=0,
            ep_size=2,
            ep_rank=0,
            output=out,
            enable_alltoall=False,
            use_deepseek_fp8_block_scale=w31.dtype is torch.float8_e4m3fn,
            use_w4_group_scaling=w31.dtype is torch.uint8,
            tune_max_num_tokens=max_num_rows,
            enable_pdl=self.enable_pdl,
            activation_type=self._activation_type(is_clamped=clamp is not None),
            use_fused_finalize=False,
            workspace_buffer=workspace,
        )

    def fused_moe_workspace_size(
        self, max_num_rows: int, top_k: int, w2: torch.Tensor, *, is_clamped: bool = False
    ) -> int:
        """Returns the bytes of workspace for at most ``max_num_rows`` rows. Needs the GPU.

        Args:
            max_num_rows: R at most.
            top_k: K.
            w2: [L, D, F], for its sizes and type, as of ``fused_moe``.
            is_clamped: Whether there will be a ``clamp``.
        """
        num_local, hidden_size, intermediate_size = w2.shape
        is_fp8, is_mxfp4 = w2.dtype is torch.float8_e4m3fn, w2.dtype is torch.uint8
        x_dtype = torch.bfloat16 if is_fp8 or is_mxfp4 else w2.dtype
        num_bytes: int = self.library.fused_moe.cutlass_fused_moe_workspace_size(
            max_num_tokens=max_num_rows,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size * (2 if is_mxfp4 else 1),
            num_experts_total=2 * num_local,
            top_k=top_k,
            x_dtype=x_dtype,
            weight_dtype=w2.dtype,
            output_dtype=x_dtype,
            use_deepseek_fp8_block_scale=is_fp8,
            use_w4_group_scaling=is_mxfp4,
            activation_type=self._activation_type(is_clamped=is_clamped),
            tp_size=1,
            tp_rank=0,
            ep_size=2,
            ep_rank=0,
            use_fused_finalize=False,
            device=w2.device,
        )
        return num_bytes

    def interleave_mxfp4(
        self, numbers: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns experts' numbers and scales, each as many bytes, as ``fused_moe`` reads them.

        Args:
            numbers: uint8 [L, n, k / 2], n and k multiples of 128, on the GPU.
            scales: uint8 [L, n, k / 32].
        """
        fused_moe = self.library.fused_moe
        return (
            fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(weight=numbers, quant_type="fp4"),
            fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales=scales, group_size=32),
        )

    def fp8_linear(
        self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Returns x @ weight.T [T, n] in bfloat16, on Hopper.

        x is rounded to FP8, with a scale per 128 of a row.

        Args:
            x: bfloat16 [T, k], k a multiple of 128.
            weight: float8_e4m3fn [n, k], n a multiple of 64.
            scales: float32 [ceil(n / 128), k / 128].
        """
        out = x.new_empty(len(x), len(weight))
        if len(x):
            self.library.gemm.fp8_blockscale_gemm_sm90(
                input=x.contiguous(), weight=weight, weight_scale=scales, out=out
            )
        return out

    def _activation_type(self, *, is_clamped: bool) -> Any:
        """Plain Swiglu takes the numbers of a clamp and ignores them."""
        types = self.library.ActivationType
        return types.SwigluBias if is_clamped else types.Swiglu
