"""Ragged draft-extend: the draft model's rows behind a step that is not speculative. Pure.

    the target ran          c ........ c+n-1            and sampled the token at c+n
    the draft model runs    c ........ c+n-1   c+n      of a prompt; without c+n if nothing was sampled
                                               c+n      of a row that decodes: it ran c the step before

Its entry at position p takes token p and the hidden state of position p - 1.
"""

from dataclasses import dataclass

import numpy as np

from executor.batch.columns import BoolArray, Int64Array
from executor.batch.read_step import LAST_SAMPLED, StepColumns

Filled = tuple[Int64Array, Int64Array, Int64Array]  # what ``filled_blocks`` returns


@dataclass(frozen=True, slots=True)
class Ragged:
    """The draft model's rows of a step: R rows of B sequences, of which the target ran T.

    Attributes:
        positions: [B], of each sequence's first row.
        num_rows: [B], its rows: those of tokens, and for each further draft layer one more if it
            samples.
        num_entries: [B], those of tokens.
        starts: [B], where its rows begin.
        lasts: [B], the row of its last token.
        samples: bool [B], whether it samples.
        token_index: [R], each row's token in the step's T tokens followed by those sampled.
        hidden_index: [R], its hidden state in the step's T rows followed by the B carries.
    """

    positions: Int64Array
    num_rows: Int64Array
    num_entries: Int64Array
    starts: Int64Array
    lasts: Int64Array
    samples: BoolArray
    token_index: Int64Array
    hidden_index: Int64Array

    @classmethod
    def of(cls, columns: StepColumns, num_layers: int) -> "Ragged":
        """Returns the rows of a draft model with so many layers that follow one another."""
        num_tokens, num_sequences = columns.num_tokens, len(columns.rows)
        target_starts = np.cumsum(num_tokens) - num_tokens
        samples = np.zeros(num_sequences, dtype=np.bool_)
        samples[columns.logits_sequence[columns.is_sampled]] = True
        decodes = (columns.token_ids[target_starts] == LAST_SAMPLED).astype(np.int64)
        num_entries = num_tokens - decodes + samples
        num_rows = num_entries + (num_layers - 1) * samples
        starts = np.cumsum(num_rows) - num_rows
        sequence = np.repeat(np.arange(num_sequences), num_rows)
        # Which of its sequence's tokens a row runs; one behind the last is the sampled one.
        place = np.arange(len(sequence)) - starts[sequence] + decodes[sequence]
        last = num_tokens[sequence]
        total = int(num_tokens.sum())
        sampled_at = np.cumsum(samples) - 1
        token_index = np.where(
            place < last, target_starts[sequence] + place, total + sampled_at[sequence]
        )
        hidden_index = np.where(
            place == 0, total + sequence, target_starts[sequence] + np.minimum(place, last) - 1
        )
        return cls(
            positions=columns.num_computed_tokens + decodes,
            num_rows=num_rows,
            num_entries=num_entries,
            starts=starts,
            lasts=starts + num_entries - 1,
            samples=samples,
            token_index=token_index,
            hidden_index=hidden_index,
        )


def filled_blocks(
    first_positions: Int64Array, counts: Int64Array, starts: Int64Array, block_size: int
) -> Filled:
    """Returns which rows stand at the end of a block.

    Args:
        first_positions: [B], position of each sequence's first row.
        counts: [B], its rows, at positions one after another.
        starts: [B], where they begin.

    Returns:
        The sequence, the place of the block in it, and the row of each such end: [N] each.
    """
    first_block = first_positions // block_size
    num_ends = (first_positions + counts) // block_size - first_block
    sequence = np.repeat(np.arange(len(counts)), num_ends)
    within = np.arange(len(sequence)) - (np.cumsum(num_ends) - num_ends)[sequence]
    block = first_block[sequence] + within
    row = starts[sequence] + (block + 1) * block_size - 1 - first_positions[sequence]
    return sequence, block, row
