"""Sampling inside a captured graph. If this fails, a seed does not repeat an answer."""

from functools import partial

import pytest
import torch

from executor.graph.backend import ShapeKey
from executor.model.sampling.fixed_shape import (
    Filters,
    FlashInferFilters,
    TorchFilters,
    sample_rows,
)
from executor.model.sampling.logits import uniform_samples
from tests.gpu.support.machine import IS_STAND_IN, Machine

NUM_ROWS = 8 if IS_STAND_IN else 64
VOCABULARIES = (64,) if IS_STAND_IN else (1000, 151936)
# temperature, top_k, top_p, min_p
WAYS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (2.0, 20, 0.8, 0.1),
]


class Rows:
    """What each row samples from, and by what parameters, seed and position."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        ways = [WAYS[i % len(WAYS)] for i in range(NUM_ROWS)]
        temperature, top_k, top_p, min_p = zip(*ways, strict=True)
        self.parameters = {
            "temperature": torch.tensor(temperature, device=device),
            "top_k": torch.tensor(top_k, device=device),
            "top_p": torch.tensor(top_p, device=device),
            "min_p": torch.tensor(min_p, device=device),
        }
        logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * 3
        self.logits = logits.to(device)
        self.seeds = torch.randint(1 << 62, (NUM_ROWS,), generator=generator).to(device)
        self.positions = torch.randint(4096, (NUM_ROWS,), generator=generator).to(device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        p = self.parameters
        floats = [p["temperature"], p["top_p"], p["min_p"], self.logits]
        return [*floats, p["top_k"], self.seeds, self.positions]

    def at(self, rows: torch.Tensor) -> "Rows":
        """Returns these rows, in this order."""
        chosen = object.__new__(Rows)
        names = ("temperature", "top_k", "top_p", "min_p")
        chosen.parameters = {name: self.parameters[name][rows] for name in names}
        chosen.logits, chosen.seeds = self.logits[rows], self.seeds[rows]
        chosen.positions = self.positions[rows]
        return chosen

    def copy(self, other: "Rows") -> None:
        for ours, theirs in zip(self.tensors, other.tensors, strict=True):
            ours.copy_(theirs)

    def sample(self, filters: Filters) -> torch.Tensor:
        uniform = uniform_samples(self.seeds, self.positions)
        return sample_rows(self.logits, self.parameters, uniform, filters)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("kind", ["flashinfer", "torch"])
def test_a_seed_gives_the_same_token_in_any_slot_of_a_graph(
    machine: Machine, kind: str, vocab_size: int, request: pytest.FixtureRequest
) -> None:
    filters: Filters = TorchFilters()
    if kind == "flashinfer":
        filters = FlashInferFilters(request.getfixturevalue("ops"))
    rows, slots = Rows(vocab_size, machine.device), Rows(vocab_size, machine.device)
    tokens = torch.zeros(NUM_ROWS, dtype=torch.int64, device=machine.device)

    def run() -> None:
        tokens.copy_(slots.sample(filters))

    key, backend = ShapeKey(NUM_ROWS), machine.new_backend(calls_library=kind == "flashinfer")
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
