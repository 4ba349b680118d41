"""If this fails, tokens go through the wrong experts on a GPU, or with the wrong weights."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from executor.flashinfer_ops.operators import FlashInferOps
from executor.graph.backend import ShapeKey
from executor.layers.linear import Linear
from executor.moe.layer import Dispatched, MoERunner
from executor.moe.runner_cutlass import CutlassMoERunner, CutlassWorkspace
from executor.moe.runner_grouped import GroupedMMRunner
from executor.moe.runner_torch import TorchMoERunner
from tests.executor.cpu_flashinfer import CpuFlashInfer, real_flashinfer, reference
from tests.executor.recording_backend import RecordingBackend

D, FF, LOCAL, TOP_K, MAX_ROWS = 16, 24, 5, 3, 40
Weights = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def weights(request: pytest.FixtureRequest) -> Weights:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(LOCAL, 2 * FF, D, generator=generator) * D**-0.5
    w2 = torch.randn(LOCAL, D, FF, generator=generator) * FF**-0.5
    return w13.to(request.param), w2.to(request.param)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return real_flashinfer(tmp_path_factory)


@pytest.fixture
def ops(real: Any) -> Iterator[FlashInferOps]:
    with CpuFlashInfer(real).installed():
        yield FlashInferOps(enable_pdl=True)


def authority(weights: Weights) -> TorchMoERunner:
    stacks = []
    for stack in weights:
        linears = []
        for weight in stack:
            size = (weight.shape[1], weight.shape[0])
            linears.append(Linear(*size, dtype=weight.dtype, device=weight.device))
            linears[-1].weight.copy_(weight)
        stacks.append(linears)
    return TorchMoERunner(*stacks)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped(weights: Weights) -> GroupedMMRunner:
    return GroupedMMRunner(*weights, silu_and_mul)


def up_first(w13: torch.Tensor) -> torch.Tensor:
    gate, up = w13.chunk(2, dim=1)
    return torch.cat((up, gate), dim=1)


def cutlass(weights: Weights, ops: FlashInferOps) -> CutlassMoERunner:
    w13, w2 = weights
    workspace = CutlassWorkspace(ops, max_num_rows=MAX_ROWS, top_k=TOP_K, w2=w2)
    return CutlassMoERunner(ops, up_first(w13), w2, workspace)


def routed(num_rows: int, low: int, high: int, dtype: torch.dtype) -> Dispatched:
    """Rows whose experts are drawn from low to high, without repeats if there are enough."""
    generator = torch.Generator().manual_seed(num_rows)
    choices = torch.rand(num_rows, high - low, generator=generator).argsort(-1) + low
    ids = choices[:, torch.arange(TOP_K) % (high - low)].to(torch.int32)
    x = torch.randn(num_rows, D, generator=generator).to(dtype)
    return Dispatched(x, ids, torch.rand(num_rows, TOP_K, generator=generator))


CASES = {
    "no rows": (0, 0, LOCAL),
    "one row": (1, 0, LOCAL),
    "one row, some elsewhere": (1, LOCAL - 1, LOCAL + 1),
    "one row, all elsewhere": (1, LOCAL, LOCAL + 1),
    "many rows": (33, 0, LOCAL),
    "some elsewhere": (33, 0, LOCAL + 1),
    "all elsewhere": (4, LOCAL, LOCAL + 1),
    "all to one expert": (7, 2, 3),
    "all to the last expert": (7, LOCAL - 1, LOCAL),
}


def assert_like_the_authority(runner: MoERunner, weights: Weights, dispatched: Dispatched) -> None:
    dtype = weights[0].dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    y, expected = runner.run(dispatched), authority(weights).run(dispatched)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_grouped_products_equal_the_torch_runner(
    weights: Weights, case: tuple[int, int, int]
) -> None:
    assert_like_the_authority(grouped(weights), weights, routed(*case, weights[0].dtype))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_fused_kernel_is_asked_for_what_the_torch_runner_computes(
    weights: Weights, case: tuple[int, int, int], ops: FlashInferOps
) -> None:
    assert_like_the_authority(cutlass(weights, ops), weights, routed(*case, weights[0].dtype))


def test_the_fused_kernel_wants_up_projections_first(weights: Weights, real: Any) -> None:
    """By the library's own reference, which knows one rank only."""
    w13, w2 = weights
    dispatched = routed(9, 0, LOCAL, w13.dtype)
    x, ids, scales = dispatched.x_RD, dispatched.topk_ids_RK, dispatched.topk_weights_RK
    run = reference("cutlass_fused_moe")
    expected = authority(weights).run(dispatched).float()
    ours = run(x, ids, scales, up_first(w13), w2).float()
    torch.testing.assert_close(ours, expected, atol=0.05, rtol=0.05)
    assert (run(x, ids, scales, w13, w2).float() - expected).abs().max() > 0.2


@pytest.mark.parametrize("build", ["grouped", "cutlass"])
def test_rows_may_lie_apart_in_a_wider_buffer(
    weights: Weights, build: str, ops: FlashInferOps
) -> None:
    runner: MoERunner = grouped(weights) if build == "grouped" else cutlass(weights, ops)
    dispatched = routed(9, 0, LOCAL + 1, weights[0].dtype)
    expected = runner.run(dispatched)
    wide = torch.full((9, D + 8), 7.0, dtype=weights[0].dtype)
    wide[:, :D] = dispatched.x_RD
    dispatched.x_RD = wide[:, :D]
    assert torch.equal(runner.run(dispatched), expected)


def test_what_a_product_leaves_in_unused_rows_reaches_nobody(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose experts are elsewhere are not written by a grouped product, and hold anything."""
    from executor.moe import runner_grouped

    def poisoned(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
            y = product(x, w, offs=offs)
            y[int(offs[-1]) :] = torch.nan
            return y

        return run

    monkeypatch.setattr(runner_grouped, "_grouped_mm", poisoned(runner_grouped._grouped_mm))
    for case in ("some elsewhere", "all elsewhere", "one row, some elsewhere"):
        dispatched = routed(*CASES[case], weights[0].dtype)
        assert_like_the_authority(grouped(weights), weights, dispatched)


def test_a_graph_of_it_follows_the_routing_of_each_replay(weights: Weights) -> None:
    dtype, backend, runner = weights[0].dtype, RecordingBackend(), grouped(weights)
    inputs = routed(8, 0, LOCAL, dtype)
    y = torch.zeros(8, D, dtype=dtype)

    def run() -> None:
        y.copy_(runner.run(inputs))

    with backend.session(label="experts", num_captures=1):
        backend.warm_up(run)
        backend.capture(ShapeKey(8), run)
    for seed_rows in (8, 16, 24):
        other = routed(seed_rows, 0, LOCAL + 1, dtype)
        inputs.x_RD.copy_(other.x_RD[:8])
        inputs.topk_ids_RK.copy_(other.topk_ids_RK[:8])
        inputs.topk_weights_RK.copy_(other.topk_weights_RK[:8])
        backend.replay(ShapeKey(8))
        assert torch.equal(y, runner.run(inputs))


def test_a_rows_result_is_the_same_every_time(weights: Weights) -> None:
    dispatched = routed(33, 0, LOCAL + 1, weights[0].dtype)
    runner = grouped(weights)
    first = runner.run(dispatched)
    assert all(torch.equal(runner.run(dispatched), first) for _ in range(3))


def test_widths_that_the_product_cannot_take_are_refused() -> None:
    w13, w2 = torch.zeros(2, 8, 20).bfloat16(), torch.zeros(2, 20, 4).bfloat16()
    with pytest.raises(ValueError, match=r"D=20 in torch.bfloat16: .* multiple of 16 bytes"):
        GroupedMMRunner(w13, w2, silu_and_mul)


def test_weights_that_do_not_fit_one_another_are_refused(ops: FlashInferOps) -> None:
    w13, w2 = torch.zeros(2, 16, 8), torch.zeros(3, 8, 8)
    message = r"is \[2, 16, 8\] and w2 \[3, 8, 8\]: need \[L, 2F, D\] and \[L, D, F\]"
    with pytest.raises(ValueError, match=message):
        GroupedMMRunner(w13, w2, silu_and_mul)
    with pytest.raises(ValueError, match=message):
        CutlassMoERunner(ops, w13, w2, CutlassWorkspace(ops, max_num_rows=4, top_k=2, w2=w2))


def test_more_rows_than_the_workspace_is_for_are_refused(
    weights: Weights, ops: FlashInferOps
) -> None:
    dispatched = routed(MAX_ROWS + 1, 0, LOCAL, weights[0].dtype)
    with pytest.raises(AssertionError, match="41 rows; the workspace is for 40"):
        cutlass(weights, ops).run(dispatched)
