"""Which rows the draft model runs behind a plain step, against a walk in plain Python."""

import random

import numpy as np
import pytest

from executor.batch.read_step import StepColumns, read_step
from executor.speculative.ragged import Ragged, filled_blocks
from tests.executor.support.drafts.speculative_steps import (
    CHAIN,
    LAYERS,
    Run,
    limits,
    mixed_step,
    progress,
)

SAMPLED, CARRY = "sampled", "carry"


def random_runs(seed: int) -> tuple[list[Run], dict[int, int]]:
    """Returns a step's sequences, and the tokens of those that decode."""
    rng = random.Random(seed)
    runs, held = [], {}
    for row in rng.sample(range(6), rng.randint(1, 6)):
        if rng.random() < 0.4:
            held[row] = rng.randint(2, 20)
            runs.append(Run(row, held[row] - 1))
        else:
            count = rng.randint(1, 9)
            samples = rng.random() < 0.6
            num_scored = rng.randint(0, 2) if count > 2 else 0
            ids = [rng.randrange(100) for _ in range(count)]
            runs.append(Run(row, 4 * rng.randint(0, 3), ids, samples, num_scored))
    return runs, held


def read(runs: list[Run], held: dict[int, int], plan=CHAIN) -> StepColumns:
    rows = progress(held, {row: -(-count // 4) for row, count in held.items()})
    return read_step(mixed_step(runs), limits(plan), rows)


def entries_of(run: Run) -> list[tuple[int, int | str, int | str]]:
    """Returns (position, token, hidden state) of what the draft model runs for a sequence.

    Tokens and hidden states are places among the sequence's own tokens of this step.
    """
    count = max(len(run.token_ids), 1)
    if not run.token_ids:
        return [(run.num_computed + 1, SAMPLED, 0)]
    entries: list[tuple[int, int | str, int | str]] = [
        (run.num_computed + place, place, place - 1 if place else CARRY) for place in range(count)
    ]
    if run.samples:
        entries.append((run.num_computed + count, SAMPLED, count - 1))
    return entries


@pytest.mark.parametrize("seed", range(30))
def test_the_rows_of_a_plain_step_are_those_of_a_walk_through_its_sequences(seed: int):
    runs, held = random_runs(seed)
    ragged = Ragged.of(read(runs, held), num_layers=1)

    total = sum(max(len(run.token_ids), 1) for run in runs)
    token_index, hidden_index, starts, lasts, at, num_sampled = [], [], [], [], 0, 0
    for place, run in enumerate(runs):
        entries = entries_of(run)
        starts.append(len(token_index))
        for _, token, hidden in entries:
            token_index.append(total + num_sampled if token == SAMPLED else at + int(token))
            hidden_index.append(total + place if hidden == CARRY else at + int(hidden))
        lasts.append(len(token_index) - 1)
        at += max(len(run.token_ids), 1)
        num_sampled += run.samples
    assert ragged.positions.tolist() == [entries_of(run)[0][0] for run in runs]
    assert ragged.num_rows.tolist() == [len(entries_of(run)) for run in runs]
    assert ragged.num_entries.tolist() == ragged.num_rows.tolist()
    assert ragged.starts.tolist() == starts
    assert ragged.lasts.tolist() == lasts
    assert ragged.samples.tolist() == [run.samples for run in runs]
    assert ragged.token_index.tolist() == token_index
    assert ragged.hidden_index.tolist() == hidden_index


@pytest.mark.parametrize("seed", range(10))
def test_further_layers_add_rows_where_a_sequence_samples_and_change_no_other(seed: int):
    runs, held = random_runs(seed)
    one = Ragged.of(read(runs, held), num_layers=1)
    three = Ragged.of(read(runs, held, LAYERS), num_layers=3)

    added = [2 * run.samples for run in runs]
    assert three.num_rows.tolist() == (one.num_rows + added).tolist()
    assert three.num_entries.tolist() == one.num_entries.tolist()
    assert three.positions.tolist() == one.positions.tolist()
    own = [
        row
        for start, count in zip(three.starts, three.num_entries, strict=True)
        for row in range(start, start + count)
    ]
    assert three.token_index[own].tolist() == one.token_index.tolist()
    assert three.hidden_index[own].tolist() == one.hidden_index.tolist()
    assert three.lasts.tolist() == (three.starts + one.num_entries - 1).tolist()
    # What the added rows hold is written in later, but they must be of the sequence's own.
    num_tokens = sum(max(len(run.token_ids), 1) for run in runs)
    assert (three.token_index < num_tokens + sum(run.samples for run in runs)).all()
    assert (three.hidden_index < num_tokens + len(runs)).all()


def test_what_all_ranks_were_told_is_what_the_draft_model_runs():
    for seed in range(10):
        runs, held = random_runs(seed)
        columns = read(runs, held)
        assert Ragged.of(columns, 1).num_rows.sum() == columns.draft_counts[1]
        columns = read(runs, held, LAYERS)
        expected = columns.draft_counts[1] + 2 * columns.num_sampled[1]
        assert Ragged.of(columns, 3).num_rows.sum() == expected


def test_a_rank_without_sequences_runs_no_rows():
    ragged = Ragged.of(read([], {}), num_layers=3)
    for column in (ragged.positions, ragged.num_rows, ragged.token_index, ragged.hidden_index):
        assert column.shape == (0,)
        assert column.dtype == np.int64


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_the_blocks_filled_are_those_whose_last_position_is_run(seed: int, block_size: int):
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    first = [rng.randrange(40) for _ in range(count)]
    counts = [rng.randint(0, 30) for _ in range(count)]
    gaps = [rng.randrange(4) for _ in range(count)]
    starts = np.cumsum([n + gap for n, gap in zip(counts, gaps, strict=True)]) - counts

    filled = filled_blocks(np.array(first), np.array(counts), starts, block_size)

    expected = [
        (place, (position + 1) // block_size - 1, int(starts[place]) + position - begin)
        for place, (begin, num_rows) in enumerate(zip(first, counts, strict=True))
        for position in range(begin, begin + num_rows)
        if (position + 1) % block_size == 0
    ]
    assert list(zip(*(column.tolist() for column in filled), strict=True)) == expected


def test_no_sequences_fill_no_blocks():
    none = np.zeros(0, dtype=np.int64)
    assert [column.tolist() for column in filled_blocks(none, none, none, 4)] == [[], [], []]
