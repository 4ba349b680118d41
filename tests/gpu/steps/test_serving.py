"""Steps of one executor as a router asks for them. If these fail, a caller gets a wrong answer."""

from collections.abc import Iterator

import pytest

from router.requests.request import SamplingParams
from tests.gpu.support.cells import SIZES, asks_of, assert_solved, exam, production_cell
from tests.gpu.support.machine import Machine
from tests.together.speculation.speculative_cell import Cell, Router, plain_cell, serve

MIB = 1 << 20
OFF = 0.1  # of a log probability, in bfloat16: 0.4 % of a logit, which may be 20
SURE = 0.9


@pytest.fixture(scope="module")
def cell(machine: Machine) -> Iterator[Cell]:
    with production_cell(machine) as cell:
        yield cell


def test_prompts_run_beside_decodes_and_every_answer_is_right(cell: Cell) -> None:
    router, problems = Router(cell), exam(11, 12)
    assert_solved(problems, serve(router, asks_of(problems)))
    [most] = map(max, zip(*router.counts, strict=True))
    assert most == SIZES["max_num_batched_tokens"]


def test_log_probabilities_are_those_of_the_cpu(cell: Cell) -> None:
    """In float32 there; of tokens that are likely, and the likeliest ones beside them."""
    problems = exam(12, 4)
    asks = asks_of(problems, logprobs=True, prompt_logprobs=True)
    ours, theirs = (serve(Router(each), asks) for each in (cell, plain_cell()))
    for [got], [expected] in zip(ours, theirs, strict=True):
        assert got.tokens == expected.tokens
        assert len(got.logprobs) == len(expected.logprobs)
        likely = [x for x in expected.logprobs if x > -3]
        near = [x for x, y in zip(got.logprobs, expected.logprobs, strict=True) if y > -3]
        assert near == pytest.approx(likely, abs=OFF)
        alike = sum(x[:1] == y[:1] for x, y in zip(got.top_ids, expected.top_ids, strict=True))
        assert alike >= SURE * len(expected.top_ids)


def test_seeds_give_the_same_answers_again(cell: Cell) -> None:
    """In the same batches: in others, kernels round differently."""
    sampled = SamplingParams({"temperature": 1.5, "top_k": 40, "top_p": 0.95, "seed": 5})
    asks = asks_of(exam(13, 3), sampling=sampled)
    assert serve(Router(cell), asks) == serve(Router(cell), asks)


def test_a_rejoin_takes_no_memory_and_answers_go_on(machine: Machine, cell: Cell) -> None:
    """Weights and the KV pool stay, graphs are captured anew."""
    router, problems = Router(cell), exam(14, 4)
    assert_solved(problems, serve(router, asks_of(problems)))
    before = machine.memory()[0]
    for _ in range(2):
        router.lose()
    assert_solved(problems, serve(router, asks_of(problems)))
    assert machine.memory()[0] <= before + 2 * MIB
