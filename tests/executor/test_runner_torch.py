"""If this fails, tokens go through the wrong experts, or with the wrong weights."""

import pytest
import torch
import torch.nn.functional as F

from executor.layers.linear import Linear
from executor.layers.workers import WorkerPool
from executor.moe.layer import Dispatched, topk_softmax
from executor.moe.runner_torch import TorchMoERunner

D, FF, LOCAL, TOP_K = 16, 12, 5, 3
DEVICE = torch.device("cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def weights(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(LOCAL, 2 * FF, D, generator=generator) * D**-0.5
    w2 = torch.randn(LOCAL, D, FF, generator=generator) * FF**-0.5
    return w13.to(request.param), w2.to(request.param)


def runner(
    weights: tuple[torch.Tensor, torch.Tensor], workers: WorkerPool | None = None
) -> TorchMoERunner:
    stacks = []
    for stack in weights:
        linears = []
        for weight in stack:
            linear = Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype, device=DEVICE)
            linear.weight.copy_(weight)
            linear.finish()
            linears.append(linear)
        stacks.append(linears)
    return TorchMoERunner(*stacks, workers)


def authority(weights: tuple[torch.Tensor, torch.Tensor], dispatched: Dispatched) -> torch.Tensor:
    """Every pair of a row and an expert by itself, in float64."""
    y = torch.zeros(dispatched.x_RD.shape, dtype=torch.float64)
    w13, w2 = (weight.double() for weight in weights)
    for row, x in enumerate(dispatched.x_RD.double()):
        for expert, weight in zip(
            dispatched.topk_ids_RK[row].tolist(),
            dispatched.topk_weights_RK[row].tolist(),
            strict=True,
        ):
            if expert < LOCAL:
                gate, up = (w13[expert] @ x).chunk(2)
                y[row] += weight * (w2[expert] @ (F.silu(gate) * up))
    return y


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
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_runner_equals_a_loop_over_pairs(
    weights: tuple[torch.Tensor, torch.Tensor], case: tuple[int, int, int]
):
    dispatched = routed(*case, weights[0].dtype)
    tolerance = 1e-5 if weights[0].dtype == torch.float32 else 0.05
    y = runner(weights).run(dispatched)
    assert y.dtype == weights[0].dtype
    expected = authority(weights, dispatched)
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


def test_rows_may_lie_apart_in_a_wider_buffer(weights: tuple[torch.Tensor, torch.Tensor]):
    dispatched = routed(9, 0, LOCAL, weights[0].dtype)
    expected = runner(weights).run(dispatched)
    wide = torch.full((9, D + 8), 7.0, dtype=weights[0].dtype)
    wide[:, :D] = dispatched.x_RD
    dispatched.x_RD = wide[:, :D]
    assert torch.equal(runner(weights).run(dispatched), expected)


def test_a_rows_result_is_the_same_every_time(weights: tuple[torch.Tensor, torch.Tensor]):
    dispatched = routed(40, 0, LOCAL, weights[0].dtype)
    experts = runner(weights)
    first = experts.run(dispatched)
    assert all(torch.equal(experts.run(dispatched), first) for _ in range(3))


@pytest.mark.parametrize("num_workers", [2, 3, LOCAL + 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_workers_change_no_bit(
    weights: tuple[torch.Tensor, torch.Tensor], case: tuple[int, int, int], num_workers: int
):
    dispatched = routed(*case, weights[0].dtype)
    workers = WorkerPool(num_workers)
    with workers.sharing(num_rows=33):
        shared = runner(weights, workers).run(dispatched)
    assert torch.equal(shared, runner(weights).run(dispatched))


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_picks_the_largest_first(renormalize: bool):
    ids, weights = topk_softmax(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 2, renormalize=renormalize)
    assert ids.tolist() == [[1, 3]]
    total = weights.sum().item()
    assert (abs(total - 1.0) < 1e-6) is renormalize
