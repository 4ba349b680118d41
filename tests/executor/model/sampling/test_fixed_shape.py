"""If this fails, a captured sampler draws tokens that a request's parameters forbid."""

from typing import Any

import pytest
import torch

from executor.graph.backend import ShapeKey
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.sampling.fixed_shape import (
    Asked,
    Draws,
    Filters,
    FlashInferFilters,
    TorchFilters,
    sample_rows,
)
from executor.model.sampling.logits import draw, draw_likeliest, temper, uniform_samples
from tests.executor.support.flashinfer.cpu_flashinfer import reference
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.sampling import Way, draws, parameters

VOCAB = 50
# temperature, top_k, top_p, min_p
ROWS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 1.0, 1.0),
    (2.0, 20, 0.8, 0.1),
    (1.0, 1, 1.0, 0.0),
    (1.0, VOCAB + 9, 0.99, 0.0),
    (0.0, 3, 0.5, 0.5),
]


@pytest.fixture(params=[TorchFilters, FlashInferFilters])
def filters(request: pytest.FixtureRequest, ops: FlashInferOps) -> Filters:
    made: Filters = TorchFilters() if request.param is TorchFilters else FlashInferFilters(ops)
    return made


def random_logits(num_rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sweep(num_samples: int) -> torch.Tensor:
    """Coins that lie evenly in [0, 1): they count probabilities."""
    return (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples


def of_each(rows: list[Way], uniform: torch.Tensor) -> Draws:
    return draws(rows, uniform, VOCAB)


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] > 0], ids=str)
def test_tokens_are_as_likely_as_the_other_sampler_makes_them(
    row: tuple[float, int, float, float],
) -> None:
    num_samples = 5000
    logits = random_logits(1).expand(num_samples, -1).contiguous()
    row_parameters = parameters([row] * num_samples)
    ours = sample_rows(logits, of_each([row] * num_samples, sweep(num_samples)), TorchFilters())
    theirs = draw_likeliest(
        temper(logits, row_parameters["temperature"]),
        row_parameters["top_k"],
        row_parameters["top_p"],
        row_parameters["min_p"],
        sweep(num_samples),
        width=VOCAB,
    )
    counts = [torch.bincount(tokens, minlength=VOCAB) for tokens in (ours, theirs)]
    assert (counts[0] - counts[1]).abs().max() <= 2  # a token's share may begin between two samples


def test_a_row_without_filters_draws_what_the_other_sampler_draws() -> None:
    num_rows = 500
    logits = random_logits(num_rows)
    uniform = uniform_samples(torch.arange(num_rows), torch.full((num_rows,), 7))
    rows = [(0.8, 0, 1.0, 0.05)] * num_rows
    row_parameters = parameters(rows)
    ours = sample_rows(logits, of_each(rows, uniform), TorchFilters())
    theirs = draw(temper(logits, row_parameters["temperature"]), row_parameters["min_p"], uniform)
    assert torch.equal(ours, theirs)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = random_logits(40)
    tokens = sample_rows(logits, of_each([(0.0, 4, 0.9, 0.1)] * 40, sweep(40)), TorchFilters())
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_a_rows_token_depends_on_no_other_row_and_not_on_its_place() -> None:
    logits, uniform = random_logits(len(ROWS)), sweep(len(ROWS))
    together = sample_rows(logits, of_each(ROWS, uniform), TorchFilters())
    for i, row in enumerate(ROWS):
        alone = sample_rows(logits[i : i + 1], of_each([row], uniform[i : i + 1]), TorchFilters())
        assert alone == together[i]
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(3))
    shuffled = of_each([ROWS[i] for i in order.tolist()], uniform[order])
    tokens = sample_rows(logits[order], shuffled, TorchFilters())
    assert torch.equal(tokens, together[order])


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_stages_that_no_row_asks_for_change_no_token(row: Way, filters: Filters) -> None:
    logits, asked = random_logits(200) / 3, of_each([row] * 200, sweep(200))
    tokens = sample_rows(logits, asked, filters)
    assert torch.equal(tokens, sample_rows(logits, asked._replace(asked=Asked()), filters))


def test_both_filters_sample_alike(ops: FlashInferOps) -> None:
    rows = ROWS * 30
    logits, uniform = random_logits(len(rows)), sweep(len(rows)).flip(0).contiguous()
    ours = sample_rows(logits, of_each(rows, uniform), TorchFilters())
    assert torch.equal(sample_rows(logits, of_each(rows, uniform), FlashInferFilters(ops)), ours)


def test_tokens_as_likely_as_the_last_one_kept_stay_too(filters: Filters) -> None:
    probs = torch.tensor([[0.3, 0.2, 0.1, 0.2, 0.2]])
    kept = filters.top_k(probs, torch.tensor([2], dtype=torch.int32))
    assert kept.nonzero()[:, 1].tolist() == [0, 1, 3, 4]
    torch.testing.assert_close(kept.sum(), torch.tensor(1.0))
    kept = filters.top_p(probs, torch.tensor([0.4]))
    assert kept.nonzero()[:, 1].tolist() == [0, 1, 3, 4]


def test_uniform_samples_at_the_ends_give_tokens_that_are_allowed() -> None:
    logits = random_logits(3)
    logits[:, 0] = logits[:, -1] = -torch.inf
    for value in (0.0, 1 - 2.0**-52):
        uniform = torch.full((3,), value, dtype=torch.float64)
        tokens = sample_rows(logits, of_each([(1.0, 0, 1.0, 0.0)] * 3, uniform), TorchFilters())
        assert torch.isfinite(logits.gather(-1, tokens[:, None])).all()


def test_a_graph_of_it_follows_the_parameters_of_each_replay() -> None:
    backend = RecordingBackend()
    logits, captured = random_logits(len(ROWS)), of_each(ROWS, sweep(len(ROWS)))
    tokens = torch.zeros(len(ROWS), dtype=torch.int64)

    def run() -> None:
        tokens.copy_(sample_rows(logits, captured, TorchFilters()))

    with backend.session(label="sampling", num_captures=1):
        backend.warm_up(run)
        backend.capture(ShapeKey(len(ROWS)), run)
    for seed in range(4):
        order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(seed))
        other = of_each([ROWS[i] for i in order.tolist()], sweep(len(ROWS)))
        for ours, theirs in zip(captured[:-1], other[:-1], strict=True):
            ours.copy_(theirs)
        logits.copy_(random_logits(len(ROWS), seed=seed + 1))
        backend.replay(ShapeKey(len(ROWS)))
        assert torch.equal(tokens, sample_rows(logits, other, TorchFilters()))


def test_filters_keep_what_the_library_keeps(real: Any) -> None:
    """By its own references; the one for top_k takes one k for all rows."""
    probs = torch.softmax(random_logits(6), dim=-1)
    for k in (1, 3, VOCAB):
        ours = TorchFilters().top_k(probs, torch.full((6,), k, dtype=torch.int32))
        torch.testing.assert_close(ours, reference("top_k_renorm_probs")(probs, k))
    top_p = torch.tensor([0.05, 0.3, 0.5, 0.9, 0.95, 0.999])
    ours = TorchFilters().top_p(probs, top_p)
    torch.testing.assert_close(ours, reference("top_p_renorm_probs")(probs, top_p))
