"""Sampler: token ids from logits, with the parameters and the seen tokens of each row.

    logits [S, V] ─┬─ argmax ───────────────────────────────────────────────▶ plain rows
                   └─ penalties, biases, bans, suppression, constraints ─┬─ argmax ──▶ greedy rows
                                                                         └─ temperature,
                                                                            filters, draw ─▶ sampling rows

Rows go only through the stages that they ask for: a greedy batch is one argmax. The host knows which
rows these are, so nothing waits for the device: what every step needs there comes staged, and the
indices of a mixed batch are copied without waiting. It computes uniform samples, too: of a seed and
a position that is one number for a row, and some 25 launches on a device.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.columns import BoolArray, Int64Array
from executor.batch.read_step import PARAMETER_WIDTH, PARAMETERS, RowStarts
from executor.batch.staging import to_device
from executor.model.cpu_kernels.library import by_row, load
from executor.model.sampling.banned import BannedSequences
from executor.model.sampling.constraints import Constraints
from executor.model.sampling.fixed_shape import Draws, Filters, sample_rows
from executor.model.sampling.logits import (
    RowParameters,
    draw,
    draw_likeliest,
    penalize,
    probabilities,
    temper,
    uniform_samples,
    uniform_samples_on_host,
)
from protos.executor.sampling_fields import MAX_LOGPROB_IDS

# Up to here the likeliest tokens are picked out; beyond, the row is sorted. A row's own top_k
# decides, never its neighbours', so that ties break alike in any batch.
PICK_WIDTH = 128

# Stages of a row, in one byte: its edits, and how its token is drawn, where it is not the likeliest.
PENALIZED, BIASED, SUPPRESSED, CONSTRAINED, BANNED = 1, 2, 4, 32, 64
GREEDY, DRAW_ANY, DRAW_PICKED, DRAW_SORTED = 0, 8, 16, 24
EDITS, DRAWS = 103, 24
Stages = npt.NDArray[np.uint8]


class Sampler:
    """Sampling parameters, seen tokens and last token of every row.

    Args:
        num_rows: R, rows of the block table.
        vocab_size: V.
        device: Where logits come from.
        agree: Replaces tokens, int64 [S], by those of one executor among all that sample the same
            rows, in place, before they are remembered; None if there are no others. Called at each
            ``sample``, by all of them.
        filters: How unlikely tokens are dropped if all rows that do not just take the likeliest
            token go through the same stages, as few kernels want; None sends each row only through
            what it asks for.
        constraints: Masks of rows with a grammar; None where another executor's tokens count.

    Attributes:
        last_tokens: int64 [R] on ``device``, the token that each row sampled last.
        parameters: Of all rows, on ``device``.
        scores_output: bool [R] on the host, rows whose sampled tokens are scored.
        num_top_logprobs: int64 [R] on the host, likeliest tokens to return with each score.
        num_logprob_ids: int64 [R] on the host, tokens in ``logprob_ids``.
        logprob_ids: int64 [R, MAX_LOGPROB_IDS] on the host, tokens to score with each.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        agree: Callable[[torch.Tensor], None] | None = None,
        filters: Filters | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._library = load() if self.device.type == "cpu" else None
        self._agree = agree
        self._filters = filters
        self.constraints = constraints
        self.vocab_size = vocab_size

        self.scores_output = np.zeros(num_rows, dtype=np.bool_)
        self.num_top_logprobs = np.zeros(num_rows, dtype=np.int64)
        self.num_logprob_ids = np.zeros(num_rows, dtype=np.int64)
        self.logprob_ids = np.zeros((num_rows, MAX_LOGPROB_IDS), dtype=np.int64)
        self._stages = np.zeros(num_rows, dtype=np.uint8)
        self._suppressed_until = np.zeros(num_rows, dtype=np.int64)
        self._given = np.zeros(num_rows, PARAMETERS)  # the parameters, on the host

        def state(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=self.device)

        self.last_tokens = state(dtype=torch.int64)
        self._parameters = state(PARAMETER_WIDTH, dtype=torch.int64)
        self.parameters = RowParameters.of_table(self._parameters)
        self._bias = state(vocab_size, dtype=torch.float32)
        self._suppressed = state(vocab_size, dtype=torch.bool)
        self._prompt_mask = state(vocab_size, dtype=torch.bool)
        self._output_counts = state(vocab_size, dtype=torch.int32)
        self._banned = BannedSequences(num_rows, self.device)

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
            parameters: ``starts.packed_parameters`` on the device, likewise.
        """
        rows, given = starts.rows, starts.parameters
        self._given[rows] = given
        self.scores_output[rows] = starts.scores_output
        self.num_top_logprobs[rows] = starts.num_top_logprobs
        self.num_logprob_ids[rows] = starts.num_logprob_ids
        if starts.logprob_ids.size:
            is_given = np.arange(MAX_LOGPROB_IDS) < starts.num_logprob_ids[:, None]
            ids = np.zeros(is_given.shape, np.int64)
            ids[is_given] = starts.logprob_ids
            self.logprob_ids[rows] = ids
        at = self._index(rows) if at is None else at
        packed = self._index(starts.packed_parameters) if parameters is None else parameters
        self._parameters.index_copy_(0, at, packed.view(-1, PARAMETER_WIDTH))

        has_top_k = (given["top_k"] > 0) & (given["top_k"] < self.vocab_size)
        is_picked = has_top_k & (given["top_k"] <= min(PICK_WIDTH, self.vocab_size - 1))
        is_filtered = has_top_k | (given["top_p"] < 1)
        draws = np.select(
            [given["temperature"] <= 0, ~is_filtered, is_picked],
            [GREEDY, DRAW_ANY, DRAW_PICKED],
            DRAW_SORTED,
        )
        is_suppressed = (starts.suppressed_until > 0) & (starts.num_suppressed_ids > 0)
        is_constrained = np.zeros(len(rows), np.bool_)
        if self.constraints is not None:
            is_constrained = self.constraints.start(starts)
        edits = (
            PENALIZED * starts.is_penalized
            + BIASED * (starts.num_biases + starts.num_allowed_ids > 0)
            + SUPPRESSED * (is_suppressed & ~is_constrained)
            + CONSTRAINED * is_constrained
            + BANNED * self._banned.start(starts)
        )
        self._clear_edits(rows[self._stages[rows] & EDITS > 0])
        self._stages[rows] = edits + draws
        self._suppressed_until[rows] = starts.suppressed_until
        self._write_edits(starts)

    def _clear_edits(self, rows: Int64Array) -> None:
        """Resets what is as wide as the vocabulary, in rows that used it."""
        if rows.size:
            at = self._index(rows)
            for target in (self._bias, self._suppressed, self._prompt_mask, self._output_counts):
                target[at] = 0

    def _write_edits(self, starts: RowStarts) -> None:
        """Sets what is as wide as the vocabulary."""
        everyone = np.ones(len(starts.rows), np.bool_)

        def entries(
            lengths: Int64Array, ids: Int64Array, is_member: BoolArray = everyone
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Returns (row, id) of the entries of the members' lists."""
            keep = np.repeat(is_member, lengths)
            return self._index(np.repeat(starts.rows, lengths)[keep]), self._index(ids[keep])

        if starts.allowed_ids.size:
            self._bias[self._index(starts.rows[starts.num_allowed_ids > 0])] = -torch.inf
            self._bias[entries(starts.num_allowed_ids, starts.allowed_ids)] = 0
        if starts.bias_ids.size:
            biases = to_device(starts.biases, self.device)
            self._bias.index_put_(
                entries(starts.num_biases, starts.bias_ids), biases, accumulate=True
            )
        if starts.suppressed_ids.size:
            self._suppressed[entries(starts.num_suppressed_ids, starts.suppressed_ids)] = True
        is_penalized = starts.is_penalized
        if is_penalized.any():
            seen = entries(starts.num_prompt_ids, starts.prompt_ids, is_penalized)
            self._prompt_mask[seen] = True
            seen = entries(starts.num_output_ids, starts.output_ids, is_penalized)
            ones = torch.ones_like(seen[1], dtype=torch.int32)
            self._output_counts.index_put_(seen, ones, accumulate=True)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        seq_lens: Int64Array,
        at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Samples one token per row and remembers it.

        Args:
            logits: [S, V], any float dtype; left as they are.
            rows: [S] rows of the block table, no row twice.
            seq_lens: [S] tokens that each sequence has, which is the new token's position.
            at: ``rows`` on the device, if they are there already.

        Returns:
            int64 [S] token ids on the device.
        """
        at = self._index(rows) if at is None else at
        tokens = self.pick(logits, rows, seq_lens, at)
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

        Args:
            positions: int64 [S] on the device, of the new tokens; None: they are ``seq_lens``.
        """
        if not self._stages[rows].any():
            return self._likeliest(logits)
        stages = self._stages_at(rows, seq_lens)
        if stages.all():
            is_edited = bool((stages & EDITS).any())
            edited = self._edit(logits.to(torch.float32, copy=is_edited), stages, at)
            return self._choose(edited, stages, at, rows, seq_lens, positions)
        tokens = self._likeliest(logits)
        special = np.flatnonzero(stages)
        if special.size:
            members, stages = self._index(special), stages[special]
            rows, seq_lens, at = rows[special], seq_lens[special], at[members]
            positions = None if positions is None else positions[members]
            edited = self._edit(logits[members].float(), stages, at)
            tokens[members] = self._choose(edited, stages, at, rows, seq_lens, positions)
        return tokens

    def probabilities(
        self, logits: torch.Tensor, rows: Int64Array, seq_lens: Int64Array, at: torch.Tensor
    ) -> torch.Tensor:
        """Returns what ``pick`` draws from, float32 [S, V]: one token has it all where it is greedy."""
        stages = self._stages_at(rows, seq_lens)
        edited = self._edit(logits.to(torch.float32, copy=True), stages, at)
        greedy = torch.nn.functional.one_hot(edited.argmax(dim=-1), self.vocab_size).float()
        parameters = self.parameters.at(at)
        temperature = parameters["temperature"]
        is_random = temperature > 0
        tempered = temper(edited, torch.where(is_random, temperature, 1.0))
        drawn = probabilities(
            tempered, parameters["top_k"], parameters["top_p"], parameters["min_p"]
        )
        return torch.where(is_random[:, None], drawn, greedy)

    def remember(self, tokens: torch.Tensor, rows: Int64Array, at: torch.Tensor) -> None:
        """Stores each row's last token, and notes it where later tokens depend on it.

        Args:
            tokens: int64 [S], which the executors that sample the same rows agree on.
            rows: [S], no row twice.
            at: ``rows`` on the device.
        """
        self.last_tokens.index_copy_(0, at, tokens)
        stages = self._stages[rows] & (PENALIZED + BANNED)
        if not stages.any():
            return
        for stage, note in ((PENALIZED, self._count), (BANNED, self._banned.remember)):
            is_member = (stages & stage) > 0
            if is_member.all():
                note(tokens, at)
            elif is_member.any():
                members = self._index(np.flatnonzero(is_member))
                note(tokens[members], at[members])

    def _count(self, tokens: torch.Tensor, at: torch.Tensor) -> None:
        self._output_counts[at, tokens] += 1

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        if self._library is None or logits.dtype is not torch.float32:
            return logits.argmax(dim=-1)
        num_rows, size = logits.shape
        tokens = logits.new_empty(num_rows, dtype=torch.int64)
        self._library("arg_max", *by_row(logits), tokens, num_rows, size)
        return tokens

    def _stages_at(self, rows: Int64Array, seq_lens: Int64Array) -> Stages:
        """Returns the stages of rows, [S]: tokens come back when a sequence is long enough."""
        stages: Stages = self._stages[rows]
        stages[seq_lens >= self._suppressed_until[rows]] &= 0xFF - SUPPRESSED
        return stages

    def _edit(self, logits: torch.Tensor, stages: Stages, at: torch.Tensor) -> torch.Tensor:
        """Applies the edits, in order of their numbers. May write to the logits."""
        if not (stages & EDITS).any():
            return logits

        def apply_penalties(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            parameters = self.parameters.at(at)
            return penalize(x, self._prompt_mask[at], self._output_counts[at], parameters)

        def apply_biases(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return x + self._bias[at]

        def suppress(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(self._suppressed[at], -torch.inf)

        def constrain(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            assert self.constraints is not None, "else no row has this stage"
            return x.masked_fill_(self.constraints.is_out(), -torch.inf)

        for stage, edit in (
            (PENALIZED, apply_penalties),
            (BIASED, apply_biases),
            (BANNED, self._banned.lower),
            (SUPPRESSED, suppress),
            (CONSTRAINED, constrain),
        ):
            logits = self._write_members(logits, stages & stage > 0, edit, logits, at)
        return logits

    def _choose(
        self,
        logits: torch.Tensor,
        stages: Stages,
        at: torch.Tensor,
        rows: Int64Array,
        seq_lens: Int64Array,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Picks each row's token by the way that its parameters ask for."""
        given, uniform = self._given[rows], None
        on_host = uniform_samples_on_host(given["seed"].view(np.int64), seq_lens)
        if positions is not None:
            uniform = uniform_samples(self.parameters.at(at)["seed"], positions)
        if self._filters is not None:
            how = Draws.of(given, on_host, self.vocab_size, self.device)
            if uniform is not None:
                how = how._replace(uniform=uniform)
            return sample_rows(logits, how, self._filters)

        uniform = to_device(on_host, self.device) if uniform is None else uniform
        tokens, draws = torch.empty_like(at), stages & DRAWS
        for way, width in (
            (GREEDY, 1),
            (DRAW_ANY, None),
            (DRAW_PICKED, min(PICK_WIDTH, self.vocab_size)),
            (DRAW_SORTED, self.vocab_size),
        ):
            choose = partial(self._draw, width)
            tokens = self._write_members(tokens, draws == way, choose, logits, at, uniform)
        return tokens

    def _draw(
        self, width: int | None, x: torch.Tensor, at: torch.Tensor, uniform: torch.Tensor
    ) -> torch.Tensor:
        """Draws each row's token among its ``width`` likeliest; None: among all of them."""
        if width == 1:
            return self._likeliest(x)
        p = self.parameters.at(at)
        x = temper(x, p["temperature"])
        if width is None:
            return draw(x, p["min_p"], uniform)
        return draw_likeliest(x, p["top_k"], p["top_p"], p["min_p"], uniform, width)

    def _write_members(
        self,
        out: torch.Tensor,
        is_member: BoolArray,
        run: Callable[..., torch.Tensor],
        *columns: torch.Tensor,
    ) -> torch.Tensor:
        """Returns ``out`` with what ``run`` makes of the members' rows of the columns in theirs."""
        if is_member.all():
            return run(*columns)
        if is_member.any():
            members = self._index(np.flatnonzero(is_member))
            out[members] = run(*(column[members] for column in columns))
        return out

    def _index(self, values: Int64Array) -> torch.Tensor:
        return to_device(values, self.device)
