"""If these fail, an answer has a token of another place, step or sequence."""

import random

import numpy as np
import pytest

from router.scheduling.row_tokens import LATEST, MIN_MOVED, NO_TOKEN, RowTokens

MAX_LEN = 4 * LATEST


@pytest.mark.parametrize("num_rows", [1, 7, MIN_MOVED + 5])
@pytest.mark.parametrize("num_left_out", [0, 1])
def test_a_row_has_the_tokens_that_it_was_given(num_rows: int, num_left_out: int) -> None:
    """Rows gain one token a step or several, are left out at times, and begin anew."""
    rng = random.Random(num_rows)
    num_tokens = np.zeros(num_rows, np.int32)
    table = RowTokens(num_tokens, MAX_LEN)
    given: list[list[int]] = [[] for _ in range(num_rows)]

    def begin(row: int) -> None:
        given[row] = [rng.randrange(100) for _ in range(rng.randint(1, 9))]
        num_tokens[row] = len(given[row])
        table.begin(row, np.array(given[row], np.int32))

    for row in range(num_rows):
        begin(row)
    for step in range(6 * LATEST):
        for row in {rng.randrange(num_rows) for _ in range(2)}:
            if len(given[row]) > MAX_LEN // 2:
                begin(row)
        full = {row for row in range(num_rows) if len(given[row]) > MAX_LEN - 4}
        left_out = full.union(rng.randrange(num_rows) for _ in range(num_left_out))
        rows = np.array(sorted(set(range(num_rows)) - left_out), np.int64)
        if step % 100 > 80 and step % 3:  # and between these some of one token
            counts = np.array([rng.randint(1, 3) for _ in rows], np.int32)
            kept = np.array([rng.randint(1, count) for count in counts], np.int32)
            tokens = np.array([rng.randrange(100) for _ in range(counts.sum())], np.int32)
            table.add_runs(rows, tokens, counts)
            table.keep(rows, kept)
            ends = counts.cumsum()
            for row, end, count, num in zip(rows, ends, counts, kept, strict=True):
                given[row] += tokens[end - count : end - count + num].tolist()
        else:
            tokens = np.array([rng.randrange(100) for _ in rows], np.int32)
            has_token = np.isin(np.arange(num_rows), rows)
            column = table.add(has_token, tokens)
            assert column[rows].tolist() == tokens.tolist()
            assert (column[~has_token] == NO_TOKEN).all()
            for row, token in zip(rows, tokens, strict=True):
                given[row].append(int(token))
        assert table.last.tolist() == [tokens[-1] for tokens in given]
        row, count = rng.randrange(num_rows), rng.randint(1, 3)
        assert table.newest_of(row, count).tolist() == given[row][-count:]
        few = [rng.randrange(num_rows) for _ in range(rng.randint(1, 3))]
        table.settle_for_now(few)
        for asked in (row, *few):
            assert table.of(asked).tolist() == given[asked]
    some = np.arange(0, num_rows, 2)
    counts = np.array([min(len(given[row]), 3 + row % 5) for row in some], np.int32)
    ends = [token for row, count in zip(some, counts, strict=True) for token in given[row][-count:]]
    assert table.newest(some, counts).tolist() == ends
    assert [table.of(row).tolist() for row in range(num_rows)] == given


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_row_that_gained_as_many_tokens_otherwise_is_not_taken_for_one_of_full_columns(
    num_drafts: int,
) -> None:
    """From one turn of a row to its next, LATEST steps later, one token each is the usual case."""
    num_tokens = np.full(1, 5, np.int32)
    table, given = RowTokens(num_tokens, MAX_LEN), list(range(100, 105))
    table.begin(0, np.array(given, np.int32))

    def step(token: int | None) -> None:
        has_token = np.array([token is not None])
        table.add(has_token, np.array([token] if token is not None else [], np.int32))
        given.extend([] if token is None else [token])

    step(1)  # its turn
    if num_drafts:
        row, counts = np.zeros(1, np.int64), np.full(1, num_drafts, np.int32)
        table.add_runs(row, np.arange(num_drafts, dtype=np.int32), counts)
        table.keep(row, counts)
        given += range(num_drafts)
        for token in range(LATEST):
            step(token if token >= num_drafts else None)
    else:
        for token in range(LATEST - 1):
            step(token)
        given[:] = range(200, 200 + len(given))  # another sequence begins, as long as this one
        table.begin(0, np.array(given, np.int32))
        step(7)
    assert table.of(0).tolist() == given
