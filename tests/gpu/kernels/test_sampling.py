"""Filters and samples against PyTorch on the CPU, and inside a captured graph.

If this fails, a GPU draws other tokens, or a seed does not repeat an answer.
"""

from functools import partial

import pytest
import torch

from executor.graph.backend import ShapeKey
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.sampling.fixed_shape import (
    Draws,
    Filters,
    FlashInferFilters,
    TorchFilters,
    sample_rows,
)
from executor.model.sampling.logits import uniform_samples
from tests.executor.support.sampling import draws
from tests.gpu.support.cases import CPU, normal
from tests.gpu.support.machine import IS_STAND_IN, Machine

NUM_ROWS = 9 if IS_STAND_IN else 64
VOCABULARIES = (64,) if IS_STAND_IN else (1000, 32000, 151936)
WAYS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 0.95, 0.05),
    (2.0, 20, 0.8, 0.1),
    (1.0, 1, 1.0, 0.0),
    (1.0, 1 << 20, 0.5, 0.0),
]


@pytest.fixture(params=["flashinfer", "torch"])
def filters(request: pytest.FixtureRequest) -> Filters:
    if request.param == "torch":
        return TorchFilters()
    return FlashInferFilters(request.getfixturevalue("ops"))


class Rows:
    """What each row samples from, and how."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        ways = [WAYS[i % len(WAYS)] for i in range(NUM_ROWS)]
        logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * 3
        self.logits = logits.to(device)
        seeds = torch.randint(1 << 62, (NUM_ROWS,), generator=generator)
        positions = torch.randint(4096, (NUM_ROWS,), generator=generator)
        self.draws = draws(ways, uniform_samples(seeds, positions), vocab_size, device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.logits, *self.draws[:-1]]

    def at(self, rows: torch.Tensor) -> "Rows":
        """Returns these rows, in this order."""
        chosen = object.__new__(Rows)
        chosen.logits = self.logits[rows]
        chosen.draws = Draws(*(column[rows] for column in self.draws[:-1]))
        return chosen

    def copy(self, other: "Rows") -> None:
        for ours, theirs in zip(self.tensors, other.tensors, strict=True):
            ours.copy_(theirs)

    def sample(self, filters: Filters) -> torch.Tensor:
        return sample_rows(self.logits, self.draws, filters)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_seed_gives_the_same_token_in_any_slot_of_a_graph(
    machine: Machine, filters: Filters, vocab_size: int
) -> None:
    rows, slots = Rows(vocab_size, machine.device), Rows(vocab_size, machine.device)
    tokens = torch.zeros(NUM_ROWS, dtype=torch.int64, device=machine.device)

    def run() -> None:
        tokens.copy_(slots.sample(filters))

    calls_library = isinstance(filters, FlashInferFilters)
    key, backend = ShapeKey(NUM_ROWS), machine.new_backend(calls_library=calls_library)
    with torch.inference_mode(), backend.session(label="sampling", num_captures=1):
        backend.warm_up(run)
        backend.capture(key, run)
    index = partial(torch.tensor, device=machine.device)
    alone = torch.cat([rows.at(index([i])).sample(filters) for i in range(NUM_ROWS)])
    assert len(set(alone.tolist())) > NUM_ROWS // 4, (
        "rows that all sample alike would prove nothing"
    )
    for seed in range(5):
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))
        order = order.to(machine.device)
        slots.copy(rows.at(order))
        backend.replay(key)
        assert torch.equal(tokens, alone[order]), f"order {seed}"


@pytest.mark.parametrize("num_rows", [1, 5] if IS_STAND_IN else [1, 2, 64, 256])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_filters_keep_what_the_authority_keeps(
    machine: Machine, ops: FlashInferOps, vocab_size: int, num_rows: int
) -> None:
    probs = torch.softmax(normal(num_rows, vocab_size, seed=7) * 3, dim=-1)
    generator = torch.Generator().manual_seed(num_rows)
    most = min(200, vocab_size)
    top_k = torch.randint(1, most, (num_rows,), generator=generator, dtype=torch.int32)
    top_p = torch.rand(num_rows, generator=generator) * 0.9 + 0.05
    ours, theirs = FlashInferFilters(ops), TorchFilters()
    on_device = probs.to(machine.device)
    for got, expected in (
        (ours.top_k(on_device, top_k.to(machine.device)), theirs.top_k(probs, top_k)),
        (ours.top_p(on_device, top_p.to(machine.device)), theirs.top_p(probs, top_p)),
    ):
        # Where the sum reaches top_p, rounding may keep one unlikely token more or less.
        torch.testing.assert_close(got.cpu(), expected, atol=2e-4, rtol=1e-3)
        num_differing = ((got.cpu() > 0) != (expected > 0)).sum(dim=-1)
        assert int(num_differing.max()) <= max(1, vocab_size // 10_000)


def test_tokens_as_likely_as_the_last_one_kept_stay_too(
    machine: Machine, ops: FlashInferOps
) -> None:
    probs = torch.tensor([[0.3, 0.2, 0.1, 0.2, 0.2]], device=machine.device)
    filters = FlashInferFilters(ops)
    for kept in (
        filters.top_k(probs, torch.tensor([2], dtype=torch.int32, device=machine.device)),
        filters.top_p(probs, torch.tensor([0.4], device=machine.device)),
    ):
        assert kept.nonzero()[:, 1].tolist() == [0, 1, 3, 4]
        assert float(kept.sum()) == pytest.approx(1, rel=2**-6)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_sampled_tokens_are_as_likely_as_on_the_cpu(
    machine: Machine, filters: Filters, vocab_size: int
) -> None:
    """Many samples that lie evenly in [0, 1) count probabilities."""
    num_samples = 200 if vocab_size <= 1000 else 50
    uniform = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples
    for seed, way in enumerate(WAYS):
        logits = (normal(1, vocab_size, seed=seed) * 3).expand(num_samples, -1).contiguous()
        rows = [way] * num_samples
        expected = sample_rows(logits, draws(rows, uniform, vocab_size, CPU), TorchFilters())
        there = draws(rows, uniform, vocab_size, machine.device)
        got = sample_rows(logits.to(machine.device), there, filters).cpu()
        # Tokens lie by id along the unit interval: where shares differ in their last bits, a sample
        # at the edge of one falls on the next.
        assert int((got != expected).sum()) <= num_samples // 50, f"temperature and filters {way}"
