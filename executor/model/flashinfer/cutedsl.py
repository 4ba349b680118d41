"""FlashInfer's experts in CuTe-DSL, for bfloat16 on Hopper (compute capability 9.0).

R rows of experts    D model    L experts on this rank    F expert hidden    K experts per row

FlashInfer's CuTe-DSL kernels for Blackwell (``CuteDslMoEWrapper``) take weights in NVFP4, which this
project cannot load yet, so they are not called here.
"""

from typing import Any

import torch

from executor.model.flashinfer.operators import FlashInferOps

INTERLEAVE = 32  # rows of up, then as many of gate, and so on
CAPABILITY = (9, 0)

# Rows per tile, tiles of both products and their order: the library's own choice as long as nothing is
# tuned, and said outright so that no rank tunes for itself. The rows per tile decide the scratch memory.
_TILE_ROWS = 128
_TACTIC = (_TILE_ROWS, ((_TILE_ROWS, 64), 1), ((_TILE_ROWS, 64), (1, 1), False))


def scratch_rows(num_rows: int, top_k: int, num_local: int) -> int:
    """Returns the rows that R rows take once each expert's are padded to whole tiles, at most.

    Source: FlashInfer, fused_moe/cute_dsl/moe_utils.py, get_max_num_tiles.
    """
    num_pairs = num_rows * top_k
    if num_pairs <= num_local:
        return num_pairs * _TILE_ROWS
    return (num_pairs + (_TILE_ROWS - 1) * num_local) // _TILE_ROWS * _TILE_ROWS


def interleave_up_gate(w31: torch.Tensor) -> torch.Tensor:
    """Returns an expert's up and gate rows in turns of INTERLEAVE.

    Args:
        w31: [2F, D], **up** projection first, then gate; F a multiple of INTERLEAVE.

    Source: FlashInfer, interleave_up_gate_sm90, which takes the gate first.
    """
    hidden_size = w31.shape[-1]
    blocks = w31.view(2, -1, INTERLEAVE, hidden_size)
    return blocks.transpose(0, 1).reshape(-1, hidden_size)


class CuteDslExperts:
    """The library's wrapper for layers of one size. It has no memory of its own.

    Args:
        ops: The library.
        w2: [L, D, F] of any layer, for sizes, dtype and device.
        top_k: K.

    Raises:
        ValueError: What it needs is not installed, or it does not run on this device, or does not
            take these sizes.
    """

    def __init__(self, ops: FlashInferOps, w2: torch.Tensor, top_k: int) -> None:
        num_local, hidden_size, intermediate_size = w2.shape
        problem = why_not(ops, w2)
        if problem is not None:
            raise ValueError(
                f"moe_runner=cutedsl: {problem}; or set moe_runner=cutlass or moe_runner=grouped"
            )
        # "Elsewhere", L, must be some expert. The kernel that sorts takes a multiple of 4.
        num_experts = -(-max(num_local + 1, top_k) // 4) * 4
        self._wrapper = ops.library.fused_moe.CuteDslBf16MoEWrapper(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_local_experts=num_local,
            local_expert_offset=0,
            output_dtype=w2.dtype,
            enable_pdl=ops.enable_pdl,
            use_fused_finalize=False,  # else rows are added up in any order
            activation_type=ops.library.ActivationType.Swiglu.value,
        )

    def run(
        self,
        x_RD: torch.Tensor,
        topk_ids_RK: torch.Tensor,
        topk_weights_RK: torch.Tensor,
        w31: torch.Tensor,
        w2: torch.Tensor,
        *,
        out: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Runs experts 0 to L - 1 and writes each row's weighted sum, always in one order.

        Args:
            x_RD: [R, D], contiguous.
            topk_ids_RK: int32, 0 to L - 1, or L for an expert that is elsewhere.
            topk_weights_RK: float32.
            w31: [L, 2F, D], each expert as ``interleave_up_gate`` returns it.
            w2: [L, D, F].
            out: [R, D]; rows without experts here become 0.
            scratch: [scratch_rows, F] for exactly these R.
        """
        if len(x_RD):
            self._wrapper.run(
                x=x_RD,
                token_selected_experts=topk_ids_RK,
                token_final_scales=topk_weights_RK,
                w1_weight=w31,
                w2_weight=w2,
                tactic=_TACTIC,
                moe_output=out,
                intermediate_buffer=scratch,
            )


def why_not(ops: FlashInferOps, w2: torch.Tensor) -> str | None:
    """Returns why these kernels cannot run layers like this one here; None if they can.

    Args:
        ops: The library.
        w2: [L, D, F].
    """
    wrapper: Any = getattr(ops.library.fused_moe, "CuteDslBf16MoEWrapper", None)
    if wrapper is None:
        return (
            "FlashInfer offers its CuTe-DSL kernels only beside nvidia-cutlass-dsl and triton: "
            "pip install nvidia-cutlass-dsl triton"
        )
    if w2.device.type == "cuda":
        capability = torch.cuda.get_device_capability(w2.device)
        if capability != CAPABILITY:
            return (
                f"this GPU has compute capability {capability[0]}.{capability[1]}, and its kernels "
                f"for bfloat16 run on 9.0 (those for Blackwell take NVFP4 weights, which cannot be "
                f"loaded yet)"
            )
    if w2.dtype is not torch.bfloat16:
        return f"its kernels take bfloat16, not {str(w2.dtype).removeprefix('torch.')}"
    _, hidden_size, intermediate_size = w2.shape
    if hidden_size % 8 or intermediate_size % INTERLEAVE:
        return (
            f"its kernels take a hidden size that is a multiple of 8 and columns of an expert that "
            f"are one of {INTERLEAVE}; here they are {hidden_size} and, on each executor, "
            f"{intermediate_size}"
        )
    return None
