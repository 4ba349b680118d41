"""If these fail, a pass that is run again answers from what its first call saw."""

from collections.abc import Callable

import pytest
import torch

from executor.graph.cpu_graph import CpuGraph, GraphMemory
from executor.model.cpu_kernels.library import load
from executor.model.layers.operators import CpuOperators

X, OUT, WEIGHT = torch.zeros(3, 16).bfloat16(), torch.zeros(3, 16), torch.ones(16).bfloat16()


def normed(x: torch.Tensor) -> torch.Tensor:
    kernels = load()
    if kernels is None:
        pytest.skip("there are no kernels here")
    return CpuOperators(kernels, (), 0).rms_norm(x, WEIGHT, 1e-6)


def kernels_and_operators() -> None:
    halves = normed(X * 2).reshape(2, 3, 8).transpose(0, 1).reshape(3, 16)  # copies
    OUT.copy_(normed(halves + normed(X)).to(torch.float32))


def host_reads() -> None:
    OUT.copy_(normed(X) * float(X.sum()))


def host_lists() -> None:
    OUT.copy_(normed(X) * X[0].tolist()[0])


def host_arrays() -> None:
    OUT.copy_(normed(X) * float(X.float().numpy()[0, 0]))


def random_numbers() -> None:
    OUT.copy_(normed(X) * torch.rand(3, 16))


def graph_of(run: Callable[[], None]) -> CpuGraph:
    kernels = load()
    assert kernels is not None
    return CpuGraph(kernels, GraphMemory(), run)


@pytest.mark.parametrize(
    "run", [kernels_and_operators, host_reads, host_lists, host_arrays, random_numbers]
)
def test_each_call_sees_what_its_inputs_hold(run: Callable[[], None]):
    normed(X)  # skips
    graph = graph_of(run)
    for seed in range(3):
        torch.manual_seed(seed)
        X.copy_(torch.randn(3, 16))
        graph()
        got = OUT.clone()
        torch.manual_seed(seed)
        torch.randn(3, 16)
        run()
        assert torch.equal(got, OUT)


def test_nothing_of_a_recorded_pass_runs_again_in_python():
    calls = []

    def run() -> None:
        calls.append(0)
        kernels_and_operators()

    normed(X)  # skips
    graph = graph_of(run)
    for _ in range(3):
        graph()
    assert len(calls) == 1


def test_memory_is_shared_by_what_does_not_live_at_once():
    memory, like = GraphMemory(), torch.zeros(4, 8)
    one, two = memory.take(like), memory.take(like)
    view, places = one[1:], [x.data_ptr() for x in (one, two)]
    del one
    assert memory.take(like).data_ptr() not in places
    del view
    assert memory.take(like).data_ptr() == places[0]


def test_what_operators_make_is_in_memory_that_all_graphs_share():
    """Else each graph keeps what each of its layers makes, which no budget counts."""
    places = set()

    def many_layers() -> None:
        x = normed(X).repeat(100, 1)
        for _ in range(20):
            values, _ = torch.sort(torch.cat((x, x)), dim=1)
            x = values[:300] + x
            places.add(x.data_ptr())
        OUT.copy_(x[:3])

    normed(X)  # skips
    kernels, memory = load(), GraphMemory()
    assert kernels is not None
    graphs = [CpuGraph(kernels, memory, many_layers) for _ in range(3)]
    for seed in range(2):
        X.copy_(torch.randn(3, 16, generator=torch.Generator().manual_seed(seed)))
        many_layers()
        expected = OUT.clone()
        places.clear()
        for graph in graphs:  # the first time they run the pass itself
            OUT.zero_()
            graph()
            assert torch.equal(OUT, expected)
        assert len(places) < 5
