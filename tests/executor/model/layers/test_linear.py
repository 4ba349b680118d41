"""If this fails, a layer loses a piece, swallows an error or leaves threads behind."""

import gc
import threading
from functools import partial

import pytest
import torch

from executor.model.cpu_kernels.library import load
from executor.model.layers.linear import Linear, WorkerPool


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_pieces", [0, 1, 2, 7])
def test_results_come_in_the_order_of_the_pieces(size: int, num_pieces: int):
    workers = WorkerPool(size)
    with workers.sharing(num_rows=2):
        results = workers.run([partial(int, i) for i in range(num_pieces)])
    assert results == list(range(num_pieces))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_pieces_run_at_once_and_in_inference_mode(num_rows: int):
    workers, meet = WorkerPool(3), threading.Barrier(3, timeout=120)

    def piece() -> tuple[int, bool, int]:
        meet.wait()
        return threading.get_ident(), torch.is_inference_mode_enabled(), torch.get_num_threads()

    with torch.inference_mode(), workers.sharing(num_rows):
        idents, inferring, num_threads = zip(*workers.run([piece] * 3), strict=True)
    assert len(set(idents)) == 3
    assert all(inferring)
    assert set(num_threads) == {1}


@pytest.mark.parametrize("failing", [{0}, {1}, {1, 2}])
def test_the_first_failed_piece_raises_after_all_have_ended(failing: set[int]):
    workers, ended = WorkerPool(2), []

    def piece(number: int) -> None:
        ended.append(number)
        if number in failing:
            raise ValueError(f"piece {number}")

    with workers.sharing(num_rows=2), pytest.raises(ValueError, match=f"piece {min(failing)}"):
        workers.run([partial(piece, i) for i in range(3)])
    assert sorted(ended) == [0, 1, 2]
    with workers.sharing(num_rows=2):
        assert workers.run([partial(int, 1), partial(int, 2)]) == [1, 2]


@pytest.mark.parametrize("num_rows", [0, 512])
def test_no_rows_and_a_long_prompt_stay_with_the_caller(num_rows: int):
    workers = WorkerPool(2)
    with workers.sharing(num_rows):
        assert set(workers.run([threading.get_ident] * 4)) == {threading.get_ident()}


def test_the_callers_thread_count_comes_back():
    before = torch.get_num_threads()
    workers = WorkerPool(2)
    with workers.sharing(num_rows=2):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_threads_end_with_the_pool():
    before = set(threading.enumerate())
    workers = WorkerPool(3)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del workers
    gc.collect()
    for thread in started:
        thread.join(timeout=120)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "costs", [[], [5], [0, 0], [5, 0], [1] * 10, [100, 1, 1, 1], [1, 1, 1, 100], [9, 1, 9, 1, 9]]
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_cover_everything_once_and_evenly(costs: list[int], size: int):
    shares = WorkerPool(size).shares(costs)
    assert len(shares) <= size
    assert [i for share in shares for i in range(len(costs))[share]] == list(range(len(costs)))
    largest = max((sum(costs[share]) for share in shares), default=0)
    assert largest <= sum(costs) / size + max(costs, default=0)


@pytest.mark.parametrize("width", [64, 63])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_the_same_packed_or_not(dtype: torch.dtype, has_bias: bool, width: int):
    """Only bfloat16 of an even width is packed."""
    generator, results = torch.Generator().manual_seed(0), []
    weight, bias = (torch.randn(size, generator=generator) for size in ((96, width), (96,)))
    x = torch.randn(5, width, generator=generator).to(dtype)
    for library in (None, load()):
        device = torch.device("cpu")
        linear = Linear(width, 96, has_bias=has_bias, dtype=dtype, device=device, library=library)
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.copy_(bias)
        linear.finish()
        is_packed = library is not None and dtype is torch.bfloat16 and width % 2 == 0
        assert linear.is_packed is is_packed
        assert linear(x[:0]).shape == (0, 96)
        results.append(linear(x))
    torch.testing.assert_close(*results, atol=1e-2, rtol=1e-2)
