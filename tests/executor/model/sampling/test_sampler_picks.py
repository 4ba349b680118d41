"""What a sampler gives for several tokens of one row, what it draws them from, what it remembers."""

from typing import Any

import numpy as np
import pytest
import torch

from executor.model.sampling.logits import probabilities
from executor.model.sampling.sampler import PICK_WIDTH, Sampler
from tests.executor.model.sampling.test_sampler import VOCAB_SIZE, random_logits, starts
from tests.executor.support.chi_square import p_value

NUM_DRAWS = 20_000

# What requests ask for, by row.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 0.7, "top_p": 0.6},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "all filters": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "greedy and biased": {"num_biases": 2, "bias_ids": [3, 4], "biases": [50.0, -50.0]},
    "biased": {"temperature": 1.0, "num_biases": 2, "bias_ids": [3, 4], "biases": [2.0, -50.0]},
    "suppressed": {
        "temperature": 1.0,
        "suppressed_until": 100,
        "num_suppressed_ids": 2,
        "suppressed_ids": [1, 2],
    },
    "penalized": {
        "temperature": 1.0,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "num_prompt_ids": 2,
        "prompt_ids": [5, 6],
        "num_output_ids": 3,
        "output_ids": [7, 8, 8],
    },
}
RAGGED = ("bias_ids", "biases", "suppressed_ids", "prompt_ids", "output_ids")
DEFAULTS = {"top_p": 1.0, "repetition_penalty": 1.0}


def sampler_of(kinds: list[dict[str, Any]], vocab_size: int = VOCAB_SIZE) -> Sampler:
    """Returns a sampler with a row of each kind, seeded by the row."""
    columns: dict[str, Any] = {
        "rows": range(len(kinds)),
        "seed": [11 + i for i in range(len(kinds))],
    }
    for name in sorted({name for kind in kinds for name in kind}):
        if name in RAGGED:
            columns[name] = [value for kind in kinds for value in kind.get(name, [])]
        else:
            columns[name] = [kind.get(name, DEFAULTS.get(name, 0)) for kind in kinds]
    sampler = Sampler(len(kinds), vocab_size)
    sampler.start(starts(vocab_size, **columns))
    return sampler


def several(count: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.stack([random_logits(vocab_size, seed) for seed in range(count)])


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 3 * PICK_WIDTH])
def test_several_tokens_of_a_row_are_what_as_many_steps_would_sample(vocab_size: int):
    """Four in a row of every kind at once, against one sampler that takes one at a time."""
    kinds = [kind for name, kind in KINDS.items() if name != "penalized"]
    count, width = len(kinds), 4
    logits = several(count * width, vocab_size)
    rows = np.repeat(np.arange(count), width)
    seq_lens = np.repeat(np.arange(count) + 20, width) + np.tile(np.arange(width), count)

    picked = sampler_of(kinds, vocab_size).pick(logits, rows, seq_lens, torch.from_numpy(rows))

    one_by_one = sampler_of(kinds, vocab_size)
    sampled = torch.stack(
        [
            one_by_one.sample(logits[place::width], np.arange(count), np.arange(count) + 20 + place)
            for place in range(width)
        ],
        dim=1,
    )
    assert torch.equal(picked, sampled.flatten())
    assert len(set(picked.tolist())) > 4


def test_tokens_are_suppressed_up_to_the_row_s_length_and_not_behind_it():
    suppressed = {"suppressed_until": 12, "num_suppressed_ids": 1, "suppressed_ids": [4]}
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[:, 4], logits[:, 9] = 5, 2
    rows, seq_lens = np.zeros(4, dtype=np.int64), np.arange(10, 14)
    picked = sampler_of([suppressed]).pick(logits, rows, seq_lens, torch.from_numpy(rows))
    assert picked.tolist() == [9, 9, 4, 4]


def test_the_first_token_of_a_penalized_row_is_exact():
    kinds = [KINDS["penalized"], KINDS["greedy"]]
    logits = several(4)
    rows, seq_lens = np.array([0, 0, 1, 1]), np.array([30, 31, 8, 9])
    picked = sampler_of(kinds).pick(logits, rows, seq_lens, torch.from_numpy(rows))
    sampled = sampler_of(kinds).sample(logits[::2], rows[::2], seq_lens[::2])
    assert picked[::2].tolist() == sampled.tolist()


def test_picking_remembers_nothing():
    kinds = list(KINDS.values())
    sampler, rows = sampler_of(kinds), np.arange(len(KINDS))
    sampler.last_tokens.fill_(7)
    before = sampler._output_counts.clone()
    for call in (sampler.pick, sampler.probabilities):
        logits = several(len(kinds))
        call(logits, rows, rows + 9, torch.from_numpy(rows))
        assert torch.equal(logits, several(len(kinds))), "the logits are the caller's"
    assert (sampler.last_tokens == 7).all()
    assert torch.equal(sampler._output_counts, before)


def test_what_is_remembered_is_the_last_token_and_a_count_where_penalties_need_it():
    sampler = sampler_of([KINDS["penalized"], KINDS["greedy"], KINDS["penalized"]])
    before = sampler._output_counts.clone()
    rows = np.array([2, 1])
    sampler.remember(torch.tensor([13, 14]), rows, torch.from_numpy(rows))
    assert sampler.last_tokens.tolist() == [0, 14, 13]
    change = sampler._output_counts - before
    assert torch.nonzero(change).tolist() == [[2, 13]]
    assert int(change[2, 13]) == 1


def test_sampling_is_picking_and_remembering():
    kinds = list(KINDS.values())
    rows, logits = np.arange(len(kinds)), several(len(kinds))
    at = torch.from_numpy(rows)
    whole, parts = sampler_of(kinds), sampler_of(kinds)
    tokens = whole.sample(logits, rows, rows + 30)
    picked = parts.pick(logits, rows, rows + 30, at)
    parts.remember(picked, rows, at)
    assert torch.equal(tokens, picked)
    assert torch.equal(whole.last_tokens, parts.last_tokens)
    assert torch.equal(whole._output_counts, parts._output_counts)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 3 * PICK_WIDTH])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_sampled_from_the_probabilities_that_it_says(kind: str, vocab_size: int):
    """Chi-square over 20,000 positions of one row, whose logits are always the same."""
    sampler = sampler_of([KINDS[kind]], vocab_size)
    logits = random_logits(vocab_size, seed=3).expand(NUM_DRAWS, -1)
    rows, seq_lens = np.zeros(NUM_DRAWS, dtype=np.int64), np.arange(NUM_DRAWS)
    if kind == "suppressed":
        seq_lens %= 100
    at, one = torch.from_numpy(rows), slice(0, 1)

    probs = sampler.probabilities(logits[one], rows[one], seq_lens[one], at[one])[0]

    assert probs.dtype == torch.float32
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
    if kind == "suppressed":  # as many samples as there are lengths below 100, so other rows
        sampler = sampler_of([KINDS[kind]] * 200, vocab_size)
        rows = np.arange(NUM_DRAWS) // 100
        at = torch.from_numpy(rows)
    tokens = sampler.pick(logits, rows, seq_lens, at)
    assert p_value(tokens, probs) > 0.001
    wrong = torch.softmax(random_logits(vocab_size, seed=3) / 2, dim=-1)
    assert p_value(tokens, wrong) < 0.001


def test_probabilities_of_a_mixed_batch_are_those_of_each_row_alone():
    kinds = list(KINDS.values())
    count = len(kinds)
    sampler, logits = sampler_of(kinds), several(count)
    rows = np.arange(count)
    whole = sampler.probabilities(logits, rows, rows + 30, torch.from_numpy(rows))
    for row in range(count):
        at = slice(row, row + 1)
        alone = sampler.probabilities(
            logits[at], rows[at], rows[at] + 30, torch.from_numpy(rows[at])
        )
        assert torch.equal(alone[0], whole[row])
    empty = sampler.probabilities(logits[:0], rows[:0], rows[:0], torch.from_numpy(rows[:0]))
    assert empty.shape == (0, VOCAB_SIZE)


def test_a_greedy_row_has_all_probability_on_its_likeliest_token():
    names = ["greedy", "greedy and biased"]
    sampler, rows = sampler_of([KINDS[name] for name in names]), np.arange(2)
    logits = several(2)
    at = torch.from_numpy(rows)
    probs = sampler.probabilities(logits, rows, rows, at)
    assert probs.argmax(dim=1).tolist() == sampler.pick(logits, rows, rows, at).tolist()
    assert probs.max(dim=1).values.tolist() == [1, 1]
    assert probs.sum(dim=1).tolist() == [1, 1]
    assert int(probs[1].argmax()) == 3


def test_ties_at_the_edge_of_top_k_leave_exactly_k_tokens():
    probs = probabilities(torch.zeros(2, 5), torch.tensor([2, 0]), torch.ones(2), torch.zeros(2))
    assert sorted(probs[0].tolist()) == [0, 0, 0, 0.5, 0.5]
    assert torch.allclose(probs[1], torch.full((5,), 0.2))
