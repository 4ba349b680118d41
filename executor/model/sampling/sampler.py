"""From logits to token ids, with what each row of the block table remembers for it.

    logits [S, V] ─┬─ argmax ───────────────────────────────────────────────▶ plain rows
                   └─ penalties, biases, suppression ─┬─ argmax ────────────▶ greedy rows
                                                      └─ temperature,
                                                         filters, coin ─────▶ sampling rows

Only the rows that ask for a stage go through it: a greedy batch is one argmax. Which rows those
are is known on the host, so nothing waits for the device: what every step needs there comes staged,
and the indices of a mixed batch are copied without waiting.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from executor.batch.columns import BoolArray, Float32Array, Int64Array
from executor.batch.staging import to_device
from executor.model.sampling.fixed_shape import Filters, RowParameters, sample_rows
from executor.model.sampling.logits import (
    coins,
    draw,
    draw_likeliest,
    penalize,
    probabilities,
    temper,
)

# Up to here the likeliest tokens are picked out; beyond, the row is sorted. A row's own top_k
# decides, never its neighbours', so that ties break alike in any batch.
PICK_WIDTH = 128

# int64 entries per row of parameters: seed, top_k, then six float32, two to an entry.
PARAMETER_WIDTH = 5


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

    def pack_parameters(self, out: Int64Array) -> None:
        """Writes every parameter of fixed width, row after row, as the device keeps them.

        Args:
            out: int64 [A * PARAMETER_WIDTH].
        """
        table = out.reshape(-1, PARAMETER_WIDTH)
        table[:, 0] = self.seed
        table[:, 1] = self.top_k
        floats = table.view(np.float32)[:, 4:]
        floats[:, 0] = self.temperature
        floats[:, 1] = self.top_p
        floats[:, 2] = self.min_p
        floats[:, 3] = self.repetition_penalty
        floats[:, 4] = self.presence_penalty
        floats[:, 5] = self.frequency_penalty


class Sampler:
    """Sampling parameters, seen tokens and last token of every row.

    Args:
        num_rows: R, lines of the block table.
        vocab_size: V.
        device: Where logits come from.
        agree: Replaces tokens, int64 [S], by those of one executor among all that sample the same
            rows, in place, before they are remembered; None if there are no others. Called at each
            ``sample``, by all of them.
        filters: How unlikely tokens are dropped if all rows that do not just take the likeliest
            token go through the same stages, as few kernels want; None sends each row only through
            what it asks for.

    Attributes:
        last_tokens: int64 [R] on ``device``, the token that each row sampled last.
        scores_output: bool [R] on the host, rows whose sampled tokens are scored.
        num_top_logprobs: int64 [R] on the host, likeliest tokens to return with each score.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        agree: Callable[[torch.Tensor], None] | None = None,
        filters: Filters | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._agree = agree
        self._filters = filters
        self.vocab_size = vocab_size

        # On the host: what decides which rows go through which stage.
        self.scores_output = np.zeros(num_rows, dtype=np.bool_)
        self.num_top_logprobs = np.zeros(num_rows, dtype=np.int64)
        self._is_special = np.zeros(num_rows, dtype=np.bool_)
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
        self._parameters = state(PARAMETER_WIDTH, dtype=torch.int64)
        self._seed, self._top_k = self._parameters[:, 0], self._parameters[:, 1]
        floats = self._parameters.view(torch.float32)[:, 4:].unbind(dim=1)
        self._temperature, self._top_p, self._min_p = floats[:3]
        self._repetition, self._presence, self._frequency = floats[3:]
        self._bias = state(vocab_size, dtype=torch.float32)
        self._suppressed = state(vocab_size, dtype=torch.bool)
        self._prompt_mask = state(vocab_size, dtype=torch.bool)
        self._output_counts = state(vocab_size, dtype=torch.int32)

    def start(
        self,
        starts: RowStarts,
        at: torch.Tensor | None = None,
        parameters: torch.Tensor | None = None,
    ) -> None:
        """Forgets what these rows held and gives them new parameters.

        Args:
            starts: The rows, A of them.
            at: ``starts.rows`` on the device, if it is there already.
            parameters: int64 [A * PARAMETER_WIDTH], what ``starts`` packs, if it is there already.
        """
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
        is_edited = self._is_penalized | self._is_biased | (self._suppressed_until > 0)
        self._is_special[rows] = (is_edited | self._is_random)[rows]

        if parameters is None:
            packed = np.empty(len(rows) * PARAMETER_WIDTH, dtype=np.int64)
            starts.pack_parameters(packed)
            parameters = self._index(packed)
        at = self._index(rows) if at is None else at
        self._parameters.index_copy_(0, at, parameters.view(-1, PARAMETER_WIDTH))
        self._start_vocabulary_state(starts)

    def _start_vocabulary_state(self, starts: RowStarts) -> None:
        """Resets what is as wide as the vocabulary, only in rows that use it or did."""
        rows = starts.rows
        dirty_rows = rows[self._is_dirty[rows]]
        if dirty_rows.size:
            dirty = self._index(dirty_rows)
            for target in (self._bias, self._suppressed, self._prompt_mask, self._output_counts):
                target[dirty] = 0
        self._is_dirty[rows] = (
            self._is_penalized[rows] | self._is_biased[rows] | (self._suppressed_until[rows] > 0)
        )
        if starts.bias_ids.size:
            at = self._ragged_index(rows, starts.num_biases, starts.bias_ids)
            biases = to_device(starts.biases, self.device)
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

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        seq_lens: Int64Array,
        at: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Samples one token per row and remembers it.

        Args:
            logits: [S, V], any float dtype; left as they are.
            rows: [S] rows of the block table, no row twice.
            seq_lens: [S] tokens that each sequence has, which is the new token's position.
            at: ``rows`` on the device, if they are there already.
            positions: ``seq_lens`` on the device, if they are there already.

        Returns:
            int64 [S] token ids on the device.
        """
        at = self._index(rows) if at is None else at
        tokens = self.pick(logits, rows, seq_lens, at, positions)
        if self._agree is not None:
            self._agree(tokens)
        self.remember(tokens, rows, at)
        return tokens

    def pick(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        seq_lens: Int64Array,
        at: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the token that each row of logits gives, and remembers nothing.

        The arguments are those of ``sample``, but a row may come more than once: with the logits
        behind each of its drafts. Its penalties are then exact only for the first.
        """
        if not self._is_special[rows].any():
            return logits.argmax(dim=-1)
        positions = self._index(seq_lens) if positions is None else positions
        is_suppressed = seq_lens < self._suppressed_until[rows]
        is_edited = self._is_penalized[rows] | self._is_biased[rows] | is_suppressed
        is_special = is_edited | self._is_random[rows]
        if is_special.all():
            edited = self._edit(logits.to(torch.float32, copy=True), rows, is_suppressed, at)
            return self._choose(edited, rows, at, positions)
        tokens = logits.argmax(dim=-1)
        if is_special.any():
            members, special = self._index(np.flatnonzero(is_special)), rows[is_special]
            at_special, x = at[members], logits[members].float()
            edited = self._edit(x, special, is_suppressed[is_special], at_special)
            tokens[members] = self._choose(edited, special, at_special, positions[members])
        return tokens

    def probabilities(
        self, logits: torch.Tensor, rows: Int64Array, seq_lens: Int64Array, at: torch.Tensor
    ) -> torch.Tensor:
        """Returns what ``pick`` draws from, float32 [S, V]: one token has it all where it is greedy."""
        is_suppressed = seq_lens < self._suppressed_until[rows]
        edited = self._edit(logits.to(torch.float32, copy=True), rows, is_suppressed, at)
        greedy = torch.nn.functional.one_hot(edited.argmax(dim=-1), self.vocab_size).float()
        temperature = self._temperature[at]
        is_random = temperature > 0
        tempered = temper(edited, torch.where(is_random, temperature, 1.0))
        drawn = probabilities(tempered, self._top_k[at], self._top_p[at], self._min_p[at])
        return torch.where(is_random[:, None], drawn, greedy)

    @property
    def seeds(self) -> torch.Tensor:
        """Returns int64 [R] on the device, the seed of each row."""
        return self._seed

    @property
    def temperatures(self) -> torch.Tensor:
        """Returns float32 [R] on the device, the temperature of each row."""
        return self._temperature

    def remember(self, tokens: torch.Tensor, rows: Int64Array, at: torch.Tensor) -> None:
        """Stores each row's last token, and counts it where penalties depend on it.

        Args:
            tokens: int64 [S], which the executors that sample the same rows agree on.
            rows: [S], no row twice.
            at: ``rows`` on the device.
        """
        self.last_tokens.index_copy_(0, at, tokens)
        is_counted = self._is_penalized[rows]
        if is_counted.any():
            counted = tokens[self._index(np.flatnonzero(is_counted))]
            self._output_counts[self._index(rows[is_counted]), counted] += 1

    def _edit(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        is_suppressed: BoolArray,
        at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Applies penalties, biases and suppression, in this order. May write to the logits."""
        at = self._index(rows) if at is None else at

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

        logits = self._edit_members(logits, at, self._is_penalized[rows], apply_penalties)
        logits = self._edit_members(logits, at, self._is_biased[rows], apply_biases)
        return self._edit_members(logits, at, is_suppressed, suppress)

    def _edit_members(
        self,
        logits: torch.Tensor,
        at: torch.Tensor,
        is_member: BoolArray,
        edit: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        if is_member.all():
            return edit(logits, at)
        if is_member.any():
            members = self._index(np.flatnonzero(is_member))
            logits[members] = edit(logits[members], at[members])
        return logits

    def _choose(
        self, logits: torch.Tensor, rows: Int64Array, at: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Picks each row's token by the way that its parameters ask for."""
        if self._filters is not None:
            parameters = RowParameters(
                temperature=self._temperature[at],
                top_k=self._top_k[at],
                top_p=self._top_p[at],
                min_p=self._min_p[at],
            )
            coin = coins(self._seed[at], positions)
            return sample_rows(logits, parameters, coin, self._filters)
        is_random = self._is_random[rows]
        is_filtered = is_random & self._is_filtered[rows]
        is_picked = is_filtered & self._is_picked[rows]
        tokens: torch.Tensor | None = None
        for is_member, choose in (
            (~is_random, self._take_likeliest),
            (is_random & ~is_filtered, self._draw),
            (is_picked, self._draw_picked),
            (is_filtered & ~is_picked, self._draw_sorted),
        ):
            if is_member.all():
                return choose(logits, at, positions)
            if is_member.any():
                members = self._index(np.flatnonzero(is_member))
                if tokens is None:
                    tokens = torch.empty_like(at)
                tokens[members] = choose(logits[members], at[members], positions[members])
        assert tokens is not None, "every row goes one way"
        return tokens

    def _take_likeliest(
        self, x: torch.Tensor, at: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return x.argmax(dim=-1)

    def _draw(self, x: torch.Tensor, at: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        coin = coins(self._seed[at], positions)
        return draw(temper(x, self._temperature[at]), self._min_p[at], coin)

    def _draw_picked(
        self, x: torch.Tensor, at: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._draw_among(x, at, positions, min(PICK_WIDTH, self.vocab_size))

    def _draw_sorted(
        self, x: torch.Tensor, at: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._draw_among(x, at, positions, self.vocab_size)

    def _draw_among(
        self, x: torch.Tensor, at: torch.Tensor, positions: torch.Tensor, width: int
    ) -> torch.Tensor:
        x, coin = temper(x, self._temperature[at]), coins(self._seed[at], positions)
        return draw_likeliest(x, self._top_k[at], self._top_p[at], self._min_p[at], coin, width)

    def _index(self, values: Int64Array) -> torch.Tensor:
        return to_device(values, self.device)

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
