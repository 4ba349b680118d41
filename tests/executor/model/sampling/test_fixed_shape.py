"""If this fails, a captured sampler draws tokens that a request's parameters forbid."""

from typing import Any

import pytest
import torch

from executor.graph.backend import ShapeKey
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.sampling.fixed_shape import (
    Filters,
    FlashInferFilters,
    TorchFilters,
    sample_rows,
)
from executor.model.sampling.logits import draw, draw_likeliest, temper, uniform_samples
from tests.executor.support.flashinfer.cpu_flashinfer import reference
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.sampling import parameters

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


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] > 0], ids=str)
def test_tokens_are_as_likely_as_the_other_sampler_makes_them(
    row: tuple[float, int, float, float],
) -> None:
    num_samples = 5000
    logits = random_logits(1).expand(num_samples, -1).contiguous()
    row_parameters = parameters([row] * num_samples)
    ours = sample_rows(logits, row_parameters, sweep(num_samples), TorchFilters())
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
    row_parameters = parameters([(0.8, 0, 1.0, 0.05)] * num_rows)
    ours = sample_rows(logits, row_parameters, uniform, TorchFilters())
    theirs = draw(temper(logits, row_parameters["temperature"]), row_parameters["min_p"], uniform)
    assert torch.equal(ours, theirs)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = random_logits(40)
    tokens = sample_rows(logits, parameters([(0.0, 4, 0.9, 0.1)] * 40), sweep(40), TorchFilters())
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_a_rows_token_depends_on_no_other_row_and_not_on_its_place() -> None:
    logits, uniform = random_logits(len(ROWS)), sweep(len(ROWS))
    together = sample_rows(logits, parameters(ROWS), uniform, TorchFilters())
    for i, row in enumerate(ROWS):
        alone = sample_rows(
            logits[i : i + 1], parameters([row]), uniform[i : i + 1], TorchFilters()
        )
        assert alone == together[i]
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(3))
    shuffled = parameters([ROWS[i] for i in order.tolist()])
    tokens = sample_rows(logits[order], shuffled, uniform[order], TorchFilters())
    assert torch.equal(tokens, together[order])


def test_both_filters_sample_alike(ops: FlashInferOps) -> None:
    rows = ROWS * 30
    logits, uniform = random_logits(len(rows)), sweep(len(rows)).flip(0).contiguous()
    ours = sample_rows(logits, parameters(rows), uniform, TorchFilters())
    assert torch.equal(sample_rows(logits, parameters(rows), uniform, FlashInferFilters(ops)), ours)


def test_tokens_as_likely_as_the_last_one_kept_stay_too(filters: Filters) -> None:
    probs = torch.tensor([[0.3, 0.2, 0.1, 0.2, 0.2]])
    kept = filters.top_k(probs, torch.tensor([2], dtype=torch.int32))
    assert kept.nonzero()[:, 1].tolist() == [0, 1, 3, 4]
    torch.testing.assert_close(kept.sum(), torch.tensor(1.0))
    kept = filters.top_p(probs, torch.tensor([0.4]))
    assert kept.nonzero()[:, 1].tolist() == [0, 1, 3, 4]


def test_top_p_of_one_keeps_every_token(filters: Filters) -> None:
    probs = torch.softmax(random_logits(3, vocab=4000) * 2, dim=-1)
    assert torch.equal(filters.top_p(probs, torch.ones(3)), probs)


def test_uniform_samples_at_the_ends_give_tokens_that_are_allowed() -> None:
    logits = random_logits(3)
    logits[:, 0] = logits[:, -1] = -torch.inf
    for value in (0.0, 1 - 2.0**-52):
        uniform = torch.full((3,), value, dtype=torch.float64)
        tokens = sample_rows(logits, parameters([(1.0, 0, 1.0, 0.0)] * 3), uniform, TorchFilters())
        assert torch.isfinite(logits.gather(-1, tokens[:, None])).all()


def test_a_graph_of_it_follows_the_parameters_of_each_replay() -> None:
    backend = RecordingBackend()
    logits, uniform, row_parameters = random_logits(len(ROWS)), sweep(len(ROWS)), parameters(ROWS)
    tokens = torch.zeros(len(ROWS), dtype=torch.int64)

    def run() -> None:
        tokens.copy_(sample_rows(logits, row_parameters, uniform, TorchFilters()))

    with backend.session(label="sampling", num_captures=1):
        backend.warm_up(run)
        backend.capture(ShapeKey(len(ROWS)), run)
    for seed in range(4):
        order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(seed))
        other = parameters([ROWS[i] for i in order.tolist()])
        for name in ("temperature", "top_k", "top_p", "min_p"):
            row_parameters[name].copy_(other[name])
        logits.copy_(random_logits(len(ROWS), seed=seed + 1))
        backend.replay(ShapeKey(len(ROWS)))
        assert torch.equal(tokens, sample_rows(logits, other, uniform, TorchFilters()))


def test_filters_keep_what_the_library_keeps(real: Any) -> None:
    """By its own references; the one for top_k takes one k for all rows."""
    probs = torch.softmax(random_logits(6), dim=-1)
    for k in (1, 3, VOCAB):
        ours = TorchFilters().top_k(probs, torch.full((6,), k, dtype=torch.int32))
        torch.testing.assert_close(ours, reference("top_k_renorm_probs")(probs, k))
    top_p = torch.tensor([0.05, 0.3, 0.5, 0.9, 0.95, 0.999])
    ours = TorchFilters().top_p(probs, top_p)
    torch.testing.assert_close(ours, reference("top_p_renorm_probs")(probs, top_p))
