"""If this fails, FlashInfer's expert kernels read weights or memory that lie otherwise than they think.

What our code takes for granted is compared with the installed library: its own PyTorch code where it
ships some, else its source.
"""

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.budget.token_budget import TokenBudget
from executor.model.decoder.kernels import stacked_kernels
from executor.model.flashinfer import cutedsl
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.experts import ExpertShare
from executor.model.moe.layer import Dispatched
from executor.model.moe.runner_cutedsl import CuteDslMoERunner, CuteDslSizing
from executor.model.moe.runner_cutlass import CutlassMoERunner, CutlassWorkspace
from executor.model.moe.runner_grouped import GroupedMMRunner
from executor.parallel.layout import Topology
from tests.executor.model.moe.moe_cases import (
    CPU,
    FF,
    NUM_EXPERTS,
    TOP_K,
    D,
    L,
    assert_right,
    authority,
    checkpoint,
    config,
    fill,
    moe_spec,
    routed,
    stack,
)
from tests.executor.support.flashinfer.cpu_cutedsl import constant, functions
from tests.executor.support.flashinfer.cpu_flashinfer import (
    CpuFlashInfer,
    reference,
)

# CUTLASS.


def test_the_fused_kernel_wants_up_projections_first(real: Any) -> None:
    """By the library's own reference, which knows one rank only."""
    tensors, dispatched = checkpoint(torch.bfloat16), routed(9, 0, L, torch.bfloat16)
    x, ids, scales = dispatched.x_RD, dispatched.topk_ids_RK, dispatched.topk_weights_RK
    run = reference("cutlass_fused_moe")
    expected, w2 = authority(tensors, dispatched), stack(tensors, "down")
    ours = run(x, ids, scales, stack(tensors, "up", "gate"), w2).double()
    torch.testing.assert_close(ours, expected, atol=0.05, rtol=0.05)
    other = run(x, ids, scales, stack(tensors, "gate", "up"), w2).double()
    assert (other - expected).abs().max() > 0.2


# CuTe-DSL.


def test_weights_are_interleaved_as_the_kernel_reads_them(real: Any) -> None:
    theirs = functions(
        real,
        "sm90_contiguous_gather_grouped_gemm_act_fusion.py",
        "_interleave_gated_halves",
        "interleave_up_gate_sm90",
    )[1]
    tensors = checkpoint(torch.bfloat16)
    expected = theirs(stack(tensors, "gate", "up"))
    for expert, w31 in enumerate(stack(tensors, "up", "gate")):
        assert torch.equal(cutedsl.interleave_up_gate(w31), expected[expert])


def test_memory_between_the_products_is_what_the_library_asks_for(real: Any) -> None:
    theirs = functions(real, "moe_utils.py", "get_max_num_tiles", "get_max_num_permuted_tokens")[1]
    rng = random.Random(0)
    for _ in range(500):
        sizes = (rng.randrange(5000), rng.randrange(1, 10), rng.randrange(1, 300))
        assert cutedsl.scratch_rows(*sizes) == theirs(*sizes, cutedsl._TILE_ROWS)


def test_memory_for_the_largest_pass_is_enough_for_every_pass() -> None:
    for num_local in (1, 3, 16, 128):
        rows = [cutedsl.scratch_rows(num_rows, 8, num_local) for num_rows in range(600)]
        assert rows == sorted(rows)


def test_the_tactic_is_the_librarys_own(real: Any) -> None:
    assert constant(real, "sm90_tuner.py", "DEFAULT_SM90_MOE_TACTIC") == cutedsl._TACTIC


def test_a_small_first_batch_does_not_size_the_wrapper(
    library: CpuFlashInfer, ops: FlashInferOps
) -> None:
    """The published failure: 4 tokens to warm up, then 4073."""
    budget = TokenBudget(
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        max_num_logits=64,
        decode_graph_size=64,
        extend_graph_size=2048,
        dp_size=2,
    ).max_gathered_tokens
    kernels = stacked_kernels(
        config(torch.bfloat16),
        dtype=torch.bfloat16,
        device=CPU,
        ops=ops,
        moe_runner="cutedsl",
        max_moe_rows=budget,
    )
    tensors = checkpoint(torch.bfloat16)
    moe = moe_spec(config(torch.bfloat16))
    share = ExpertShare.of(Topology(), moe)
    layers = [kernels.new_experts(moe, share) for _ in range(2)]
    for layer in layers:
        fill(layer, tensors)
    assert library.names() == ["cutedsl.__init__"], "made with the model, and once for all layers"
    for num_rows in (4, 4073, 1, budget):
        dispatched = routed(num_rows, 0, L + 1, torch.bfloat16)
        for layer in layers:
            y = layer.runner.run(dispatched)
        last = Dispatched(
            dispatched.x_RD[-2:], dispatched.topk_ids_RK[-2:], dispatched.topk_weights_RK[-2:]
        )
        assert_right(y[-2:], tensors, last)
    assert {name for name, _ in library.calls} == {"cutedsl.run"}
    scratches = [kwargs["intermediate_buffer"] for _, kwargs in library.calls]
    assert len(scratches) == 8
    assert len({scratch.untyped_storage().data_ptr() for scratch in scratches}) == 1
    rows = cutedsl.scratch_rows(budget, TOP_K, NUM_EXPERTS)
    assert scratches[0].untyped_storage().nbytes() == rows * FF * 2


def test_ensuring_a_wrapper_takes_no_number_of_tokens() -> None:
    taken = inspect.signature(CuteDslSizing.ensure_cutedsl_wrapper).parameters
    assert list(taken) == ["self", "w2"]


def test_a_layer_of_other_sizes_is_refused(ops: FlashInferOps) -> None:
    sizing = CuteDslSizing(ops, max_num_rows=4, top_k=2)
    sizing.ensure_cutedsl_wrapper(torch.zeros(2, 8, 32, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match=r"w2 is \[3, 8, 32\]; that of other layers \[2, 8"):
        sizing.ensure_cutedsl_wrapper(torch.zeros(3, 8, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_local", [1, 3, 4, 128, 256])
def test_elsewhere_is_an_expert_that_the_kernel_knows(
    num_local: int, library: CpuFlashInfer, ops: FlashInferOps
) -> None:
    cutedsl.CuteDslExperts(ops, torch.zeros(num_local, 8, 32, dtype=torch.bfloat16), 6)
    [(_, made)] = library.calls
    assert made["num_local_experts"] == num_local < made["num_experts"]


# What cannot run is refused at start, with what would.


def test_without_its_packages_it_says_what_to_install(
    library: CpuFlashInfer, ops: FlashInferOps
) -> None:
    del library.fused_moe.CuteDslBf16MoEWrapper  # as the library is without them
    with pytest.raises(
        ValueError, match=r"moe_runner=cutedsl: .* nvidia-cutlass-dsl and triton: pip "
    ):
        cutedsl.CuteDslExperts(ops, torch.zeros(2, 8, 32, dtype=torch.bfloat16), 2)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_on_another_gpu_than_hopper_it_says_why(
    capability: tuple[int, int], ops: FlashInferOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    w2: Any = SimpleNamespace(shape=(2, 8, 32), device=torch.device("cuda"), dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"capability (8|10).0, .* on 9.0 .*; or set moe_runner=cu"
    ):
        cutedsl.CuteDslExperts(ops, w2, 2)


@pytest.mark.parametrize(
    ("w2", "problem"),
    [
        (torch.zeros(2, 8, 32), "take bfloat16, not float32"),
        (torch.zeros(2, 12, 32).bfloat16(), ".* multiple of 8 .* they are 12 and, .*, 32"),
        (torch.zeros(2, 8, 48).bfloat16(), ".* one of 32; here they are 8 and, .*, 48"),
    ],
    ids=["dtype", "D", "F"],
)
def test_sizes_that_it_cannot_take_are_refused(
    w2: torch.Tensor, problem: str, ops: FlashInferOps
) -> None:
    with pytest.raises(ValueError, match=f"moe_runner=cutedsl: its kernels {problem}"):
        cutedsl.CuteDslExperts(ops, w2, 2)


@pytest.mark.parametrize("moe_runner", ["cutlass", "cutedsl"])
def test_kernels_of_flashinfer_need_flashinfer(moe_runner: str) -> None:
    with pytest.raises(
        ValueError, match=f"moe_runner={moe_runner} needs FlashInfer, .* pip install"
    ):
        stacked_kernels(
            config(torch.bfloat16),
            dtype=torch.bfloat16,
            device=CPU,
            ops=None,
            moe_runner=moe_runner,
            max_moe_rows=4,
        )


@pytest.mark.parametrize("shape", [(2, 64, D), (3, 62, D), (3, 64, D + 1)], ids=["L", "F", "D"])
def test_one_dimension_that_does_not_fit_is_enough(shape: tuple[int, ...]) -> None:
    GroupedMMRunner(torch.zeros(3, 64, D), torch.zeros(3, D, 32), lambda x: x)
    with pytest.raises(ValueError, match=r"^w13 is .* need .* with the same L, F and D$"):
        GroupedMMRunner(torch.zeros(shape), torch.zeros(3, D, 32), lambda x: x)


def test_weights_that_do_not_fit_one_another_are_refused(ops: FlashInferOps) -> None:
    w13, w2 = torch.zeros(2, 16, D).bfloat16(), torch.zeros(3, D, 32).bfloat16()
    message = r"is \[2, 16, 32\] and w2 \[3, 32, 32\]: need \[L, 2F, D\] and \[L, D, F\]"
    with pytest.raises(ValueError, match=message):
        GroupedMMRunner(w13, w2, lambda x: x)
    with pytest.raises(ValueError, match=message):
        CutlassMoERunner(w13, w2, CutlassWorkspace(ops, max_num_rows=4, top_k=2))
    with pytest.raises(ValueError, match=message):
        CuteDslMoERunner(w13, w2, CuteDslSizing(ops, max_num_rows=4, top_k=2))
