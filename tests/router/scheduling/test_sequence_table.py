"""If these fail, a listener gets a token twice, never, or out of order."""

import random
from itertools import pairwise

import numpy as np
import pytest

from router.requests.request import NO_LISTENER, Listener, Listeners, Sequence
from router.scheduling.kv.prefix_cache import NO_PREFIX, CachedPrefix
from router.scheduling.sequence_table import NUM_STOP_IDS, RowStatus, SequenceTable
from tests.router.support.requests import make_request


def prefix(block_ids: list[int]) -> CachedPrefix:
    return CachedPrefix(np.array(block_ids, dtype=np.int32), NO_PREFIX.window_blocks)


def make_table(dp_size: int = 2, rows_per_rank: int = 3) -> SequenceTable:
    return SequenceTable(
        dp_size=dp_size, rows_per_rank=rows_per_rank, max_model_len=32, block_size=4
    )


def make_sequence(
    prompt: list[int], listener: Listener, tag: int = 0, stop_token_ids: tuple[int, ...] = ()
) -> Sequence:
    fields = {"min_tokens": 1, "stop_token_ids": stop_token_ids, "is_columnar": True}
    return make_request(prompt, listener, 20, tag=tag, **fields).sequences[0]


@pytest.fixture
def listeners() -> Listeners:
    return Listeners(max_listeners=4)


def give(table: SequenceTable, row: int, tokens: list[int]) -> None:
    """Commits output, as the scheduler does."""
    for token in tokens:
        table.tokens.add(np.arange(len(table.status)) == row, np.array([token], np.int32))


def test_rows_belong_to_ranks_and_come_back(listeners: Listeners) -> None:
    table, listener = make_table(), listeners.open()
    sequences = [make_sequence([1], listener) for _ in range(3)]
    rows = [table.bind(sequence, 1, NO_PREFIX) for sequence in sequences]
    assert sorted(rows) == [3, 4, 5]
    assert (table.has_free_row(0), table.has_free_row(1)) == (True, False)
    assert (table.num_bound(0), table.num_bound(1)) == (0, 3)
    table.detach(sequences[1])
    table.free_rows([rows[1]])
    assert table.bind(make_sequence([1], listener), 1, NO_PREFIX) == rows[1]


def test_ascending_rows_are_cut_by_rank() -> None:
    table = make_table(dp_size=4)
    assert table.cuts_of(np.array([1, 2, 6, 11])) == [0, 2, 2, 3, 4]
    assert table.cuts_of(np.array([], dtype=np.int64)) == [0] * 5


def test_the_rows_of_prompts_are_those_of_now_however_often_one_asks(listeners: Listeners) -> None:
    table, listener = make_table(), listeners.open()
    rows = [table.bind(make_sequence([1], listener), rank, NO_PREFIX) for rank in (1, 0, 1)]
    assert table.prompt_rows == table.prompt_rows == sorted(rows)
    table.set_status(rows[:2], RowStatus.DECODE)
    assert table.prompt_rows == [rows[2]]
    table.bind(make_sequence([1], listener), 0, NO_PREFIX)
    assert len(table.prompt_rows) == 2


@pytest.mark.parametrize("seed", range(10))
def test_the_row_set_is_that_of_its_mask_whatever_was_asked_for_before(seed: int) -> None:
    """It is kept from one call to the next, and the caller may write to its mask meanwhile."""
    rng = random.Random(seed)
    table = make_table(dp_size=3, rows_per_rank=4)
    mask = np.zeros(12, dtype=np.bool_)
    for _ in range(50):
        for _ in range(rng.choice([0, 0, 1, 2])):
            mask[rng.randrange(12)] ^= True
        row_set = table.row_set(mask)
        rows = [row for row in range(12) if mask[row]]
        of_ranks = [[row for row in rows if row // 4 == rank] for rank in range(3)]
        assert row_set.rows.tolist() == rows
        parts = [slice(*cuts) for cuts in pairwise(row_set.cuts)]
        assert [row_set.rows[part].tolist() for part in parts] == of_ranks
        assert row_set.num_rows == [len(part) for part in of_ranks]
        local_rows = [np.frombuffer(part, np.int32).tolist() for part in row_set.local_rows]
        assert local_rows == [[row % 4 for row in part] for part in of_ranks]


def test_the_shared_row_set_cannot_be_written_to() -> None:
    row_set = make_table().row_set(np.ones(6, dtype=np.bool_))
    with pytest.raises(ValueError, match="read-only"):
        row_set.mask[0] = False


def test_a_bound_row_says_what_its_request_asked_for(listeners: Listeners) -> None:
    table, listener = make_table(), listeners.open()
    sequence = make_sequence([5, 6, 7, 8, 9], listener, tag=77, stop_token_ids=(3, 4))
    row = table.bind(sequence, 0, prefix([8]))
    assert table.status[row] == RowStatus.EXTEND
    assert (table.num_tokens[row], table.num_prompt[row], table.num_computed[row]) == (5, 5, 4)
    assert (table.max_len[row], table.min_len[row]) == (25, 6)
    assert table.stop_ids[:, row].tolist() == [3, 4, -1, -1]
    assert (table.listener[row], table.tag[row]) == (listener.index, 77)
    assert table.blocks_of(row).tolist() == [8]
    assert sequence.tokens[:5].tolist() == [5, 6, 7, 8, 9]


def test_nothing_of_a_row_s_last_sequence_is_left_for_the_next(listeners: Listeners) -> None:
    table = make_table(dp_size=1, rows_per_rank=1)
    many = tuple(range(10, 11 + NUM_STOP_IDS))
    first = make_sequence([1] * 9, listeners.open(), tag=1, stop_token_ids=(1, 2, 3, 4))
    second = make_sequence([2], listeners.open(), tag=2, stop_token_ids=many)
    table.bind(first, 0, prefix([3, 4]))
    table.detach(first)
    table.free_rows([0])
    table.bind(second, 0, NO_PREFIX)
    assert (table.num_tokens[0], table.num_computed[0], table.num_blocks[0]) == (1, 0, 0)
    assert table.stop_ids[:, 0].tolist() == [-1] * NUM_STOP_IDS
    assert table.is_inspected[0]  # more stop tokens than there are columns for


def test_taken_tokens_do_not_change_when_the_row_does(listeners: Listeners) -> None:
    table = make_table()
    sequence = make_sequence([1], listeners.open())
    row = table.bind(sequence, 0, NO_PREFIX)
    give(table, row, [7])
    taken = sequence.take_tokens()
    table.tokens.begin(row, np.zeros(8, np.int32))
    assert taken.tolist() == [7]


def test_columns_hold_one_listeners_columnar_rows_in_row_order(listeners: Listeners) -> None:
    table = make_table()
    ours, theirs = listeners.open(), listeners.open()
    rows = [
        table.bind(make_sequence([1, 2], listener, tag), rank, NO_PREFIX)
        for tag, (listener, rank) in enumerate([(ours, 0), (theirs, 0), (ours, 1), (ours, 1)])
    ]
    table.columnar_listener[rows[3]] = NO_LISTENER
    for row, tokens in zip(rows, [[5], [6], [7, 8, 9], [4]], strict=True):
        give(table, row, tokens)
    columns = table.take_columns(ours.index)
    by_tag = dict(zip(columns.tags.tolist(), columns.num_tokens.tolist(), strict=True))
    assert by_tag == {0: 1, 2: 3}
    assert columns.token_ids.tolist() == [5, 7, 8, 9]
    assert columns.num_tokens.dtype == columns.token_ids.dtype == np.dtype(np.int32)
    assert len(table.take_columns(ours.index).tags) == 0
    assert table.take_columns(theirs.index).token_ids.tolist() == [6]


@pytest.mark.parametrize("seed", range(30))
def test_every_token_comes_out_once_whoever_takes_it(seed: int) -> None:
    """Tokens, columns, unbinding and binding again, in any order."""
    rng = random.Random(seed)
    listeners = Listeners(max_listeners=4)
    listener = listeners.open()
    table = make_table(dp_size=2, rows_per_rank=2)
    sequences = [make_sequence([0] * rng.randint(1, 4), listener, tag) for tag in range(4)]
    given: list[list[int]] = [[] for _ in sequences]
    taken: list[list[int]] = [[] for _ in sequences]
    for _ in range(300):
        tag = rng.randrange(4)
        sequence = sequences[tag]
        match rng.choice(["bind", "give", "give", "tokens", "columns", "detach"]):
            case "bind" if sequence.table is None:
                ranks = [rank for rank in range(2) if table.has_free_row(rank)]
                table.bind(sequence, rng.choice(ranks), NO_PREFIX)
            case "give" if sequence.table is not None:
                room = 32 - sequence.num_tokens
                tokens = [rng.randrange(100) for _ in range(min(room, rng.randint(1, 3)))]
                give(table, sequence.row, tokens)
                given[tag] += tokens
            case "tokens":
                taken[tag] += sequence.take_tokens().tolist()
            case "columns":
                columns = table.take_columns(listener.index)
                ends = np.cumsum(columns.num_tokens)
                parts = np.split(columns.token_ids, ends[:-1])
                for column_tag, part in zip(columns.tags.tolist(), parts, strict=False):
                    taken[column_tag] += part.tolist()
            case "detach" if sequence.table is not None:
                row = sequence.row
                table.detach(sequence)
                table.free_rows([row])
    for sequence, tokens in zip(sequences, taken, strict=True):
        tokens += sequence.take_tokens().tolist()
    assert taken == given
