"""From logits to token ids, with what each row of the block table remembers for it.

    logits [S, V] ─┬─ argmax ───────────────────────────────────────────────▶ plain rows
                   └─ penalties, biases, suppression ─┬─ argmax ────────────▶ greedy rows
                                                      └─ temperature,
                                                         filters, coin ─────▶ sampling rows

Only the rows that ask for a stage go through it: a greedy batch is one argmax. Which rows those
are is known on the host, so nothing waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from executor.columns import BoolArray, Float32Array, Int64Array
from executor.logits import coins, draw, draw_likeliest, penalize, temper

# Up to here the likeliest tokens are picked out; beyond, the row is sorted. A row's own top_k
# decides, never its neighbours', so that ties break alike in any batch.
PICK_WIDTH = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStarts:
    """Rows that begin. A entries each, as RowStarts in executor.proto defines them.

    A ragged column is a pair: lengths [A], and the entries end to end.
    """

    rows: Int64Array
    temperature: Float32Array
    top_k: Int64Array
    top_p: Float32Array
    min_p: Float32Array
    repetition_penalty: Float32Array
    presence_penalty: Float32Array
    frequency_penalty: Float32Array
    seed: Int64Array  # the bits of the uint64
    scores_output: BoolArray
    num_top_logprobs: Int64Array
    suppressed_until: Int64Array
    num_suppressed_ids: Int64Array
    suppressed_ids: Int64Array
    num_biases: Int64Array
    bias_ids: Int64Array
    biases: Float32Array
    num_prompt_ids: Int64Array
    prompt_ids: Int64Array
    num_output_ids: Int64Array
    output_ids: Int64Array


class Sampler:
    """Sampling parameters, seen tokens and last token of every row.

    Args:
        num_rows: R, lines of the block table.
        vocab_size: V.
        device: Where logits come from.

    Attributes:
        last_tokens: int64 [R] on ``device``, the token that each row sampled last.
        scores_output: bool [R] on the host, rows whose sampled tokens are scored.
        num_top_logprobs: int64 [R] on the host, likeliest tokens to return with each score.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size

        # On the host: what decides which rows go through which stage.
        self.scores_output = np.zeros(num_rows, dtype=np.bool_)
        self.num_top_logprobs = np.zeros(num_rows, dtype=np.int64)
        self._is_random = np.zeros(num_rows, dtype=np.bool_)
        self._is_penalized = np.zeros(num_rows, dtype=np.bool_)
        self._is_biased = np.zeros(num_rows, dtype=np.bool_)
        self._suppressed_until = np.zeros(num_rows, dtype=np.int64)
        self._is_filtered = np.zeros(num_rows, dtype=np.bool_)
        self._is_picked = np.zeros(num_rows, dtype=np.bool_)
        self._is_dirty = np.zeros(num_rows, dtype=np.bool_)

        # On the device: what the stages read.
        def state(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=self.device)

        self.last_tokens = state(dtype=torch.int64)
        self._temperature = state(dtype=torch.float32)
        self._top_k = state(dtype=torch.int64)
        self._top_p = state(dtype=torch.float32)
        self._min_p = state(dtype=torch.float32)
        self._repetition = state(dtype=torch.float32)
        self._presence = state(dtype=torch.float32)
        self._frequency = state(dtype=torch.float32)
        self._seed = state(dtype=torch.int64)
        self._bias = state(vocab_size, dtype=torch.float32)
        self._suppressed = state(vocab_size, dtype=torch.bool)
        self._prompt_mask = state(vocab_size, dtype=torch.bool)
        self._output_counts = state(vocab_size, dtype=torch.int32)

    def start(self, starts: RowStarts) -> None:
        """Forgets what these rows held and gives them new parameters."""
        rows = starts.rows
        self.scores_output[rows] = starts.scores_output
        self.num_top_logprobs[rows] = starts.num_top_logprobs
        self._is_random[rows] = starts.temperature > 0
        self._is_penalized[rows] = (
            (starts.repetition_penalty != 1)
            | (starts.presence_penalty != 0)
            | (starts.frequency_penalty != 0)
        )
        self._is_biased[rows] = starts.num_biases > 0
        self._suppressed_until[rows] = starts.suppressed_until * (starts.num_suppressed_ids > 0)
        has_top_k = (starts.top_k > 0) & (starts.top_k < self.vocab_size)
        self._is_filtered[rows] = has_top_k | (starts.top_p < 1)
        self._is_picked[rows] = has_top_k & (starts.top_k <= min(PICK_WIDTH, self.vocab_size - 1))

        at = self._index(rows)
        for target, column in (
            (self._temperature, starts.temperature),
            (self._top_k, starts.top_k),
            (self._top_p, starts.top_p),
            (self._min_p, starts.min_p),
            (self._repetition, starts.repetition_penalty),
            (self._presence, starts.presence_penalty),
            (self._frequency, starts.frequency_penalty),
            (self._seed, starts.seed),
        ):
            target[at] = torch.from_numpy(column).to(self.device)
        self._start_vocabulary_state(starts)

    def _start_vocabulary_state(self, starts: RowStarts) -> None:
        """Resets what is as wide as the vocabulary, only in rows that use it or did."""
        rows = starts.rows
        dirty = self._index(rows[self._is_dirty[rows]])
        if len(dirty):
            for target in (self._bias, self._suppressed, self._prompt_mask, self._output_counts):
                target[dirty] = 0
        self._is_dirty[rows] = (
            self._is_penalized[rows] | self._is_biased[rows] | (self._suppressed_until[rows] > 0)
        )
        if starts.bias_ids.size:
            at = self._ragged_index(rows, starts.num_biases, starts.bias_ids)
            biases = torch.from_numpy(starts.biases).to(self.device)
            self._bias.index_put_(at, biases, accumulate=True)
        if starts.suppressed_ids.size:
            at = self._ragged_index(rows, starts.num_suppressed_ids, starts.suppressed_ids)
            self._suppressed[at] = True
        is_penalized = self._is_penalized[rows]
        if starts.prompt_ids.size and is_penalized.any():
            at = self._ragged_index(rows, starts.num_prompt_ids, starts.prompt_ids, is_penalized)
            self._prompt_mask[at] = True
        if starts.output_ids.size and is_penalized.any():
            at = self._ragged_index(rows, starts.num_output_ids, starts.output_ids, is_penalized)
            ones = torch.ones_like(at[1], dtype=torch.int32)
            self._output_counts.index_put_(at, ones, accumulate=True)

    def sample(self, logits: torch.Tensor, rows: Int64Array, seq_lens: Int64Array) -> torch.Tensor:
        """Samples one token per row and remembers it.

        Args:
            logits: [S, V], any float dtype; left as they are.
            rows: [S] rows of the block table, no row twice.
            seq_lens: [S] tokens that each sequence has, which is the new token's position.

        Returns:
            int64 [S] token ids on the device.
        """
        is_suppressed = seq_lens < self._suppressed_until[rows]
        is_edited = self._is_penalized[rows] | self._is_biased[rows] | is_suppressed
        is_plain = ~(is_edited | self._is_random[rows])
        if is_plain.all():
            tokens = logits.argmax(dim=-1)
        else:
            special = np.flatnonzero(~is_plain)
            at = self._index(special)
            edited = self._edit(logits[at].float(), rows[special], is_suppressed[special])
            sampled = self._choose(edited, rows[special], seq_lens[special])
            tokens = logits.argmax(dim=-1)
            tokens[at] = sampled
        self.last_tokens[self._index(rows)] = tokens
        is_counted = self._is_penalized[rows]
        if is_counted.any():
            counted = tokens[self._index(np.flatnonzero(is_counted))]
            self._output_counts[self._index(rows[is_counted]), counted] += 1
        return tokens

    def _edit(
        self, logits: torch.Tensor, rows: Int64Array, is_suppressed: BoolArray
    ) -> torch.Tensor:
        """Applies penalties, biases and suppression, in this order."""

        def apply_penalties(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return penalize(
                x,
                self._prompt_mask[at],
                self._output_counts[at],
                repetition=self._repetition[at],
                presence=self._presence[at],
                frequency=self._frequency[at],
            )

        def apply_biases(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return x + self._bias[at]

        def suppress(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(self._suppressed[at], -torch.inf)

        logits = self._edit_members(logits, rows, self._is_penalized[rows], apply_penalties)
        logits = self._edit_members(logits, rows, self._is_biased[rows], apply_biases)
        return self._edit_members(logits, rows, is_suppressed, suppress)

    def _edit_members(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        is_member: BoolArray,
        edit: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        if is_member.all():
            return edit(logits, self._index(rows))
        if is_member.any():
            members = self._index(np.flatnonzero(is_member))
            logits[members] = edit(logits[members], self._index(rows[is_member]))
        return logits

    def _choose(self, logits: torch.Tensor, rows: Int64Array, seq_lens: Int64Array) -> torch.Tensor:
        """Picks each row's token by the way that its parameters ask for."""
        is_random = self._is_random[rows]
        is_filtered = is_random & self._is_filtered[rows]
        is_picked = is_filtered & self._is_picked[rows]
        width = min(PICK_WIDTH, self.vocab_size)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        for is_member, choose in (
            (~is_random, lambda x, at, coin: x.argmax(dim=-1)),
            (is_random & ~is_filtered, self._draw),
            (is_picked, lambda x, at, coin: self._draw_likeliest(x, at, coin, width)),
            (
                is_filtered & ~is_picked,
                lambda x, at, coin: self._draw_likeliest(x, at, coin, self.vocab_size),
            ),
        ):
            if not is_member.any():
                continue
            members = self._index(np.flatnonzero(is_member))
            at = self._index(rows[is_member])
            x = logits if is_member.all() else logits[members]
            coin = coins(self._seed[at], self._index(seq_lens[is_member]))
            tokens[members] = choose(x, at, coin)
        return tokens

    def _draw(self, x: torch.Tensor, at: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
        return draw(temper(x, self._temperature[at]), self._min_p[at], coin)

    def _draw_likeliest(
        self, x: torch.Tensor, at: torch.Tensor, coin: torch.Tensor, width: int
    ) -> torch.Tensor:
        x = temper(x, self._temperature[at])
        return draw_likeliest(x, self._top_k[at], self._top_p[at], self._min_p[at], coin, width)

    def _index(self, values: Int64Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def _ragged_index(
        self,
        rows: Int64Array,
        lengths: Int64Array,
        ids: Int64Array,
        is_member: BoolArray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (row, id) of every entry of a ragged column, or of its members' entries."""
        row_of = np.repeat(rows, lengths)
        if is_member is not None:
            keep = np.repeat(is_member, lengths)
            row_of, ids = row_of[keep], ids[keep]
        return self._index(row_of), self._index(ids)
