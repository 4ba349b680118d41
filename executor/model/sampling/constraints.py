"""Constraints: the grammars of rows, and masks of the tokens with which their outputs may go on.

    start    a row's grammar and the tokens that it has ──▶ its matcher
    begin    rows that sample, and their drafts ──▶ masks, filled while the forward pass runs
    is_out   waits for them
    accept   what the rows gained, as soon as it is on the host

A matcher is a function of the grammar and the tokens, so a row that begins anew goes on as it would
have. All belong to one thread, which works beside the one that steps, in the order in which it is
told to: llguidance lets go of the interpreter. Whatever goes wrong is a problem of one row, which the
step's answer names; its mask then lets everything pass.

    C constrained rows that sample    N tokens that each verifies, 1 without drafts    V vocabulary
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from executor.batch.columns import BoolArray, Int64Array
from executor.batch.read_step import RowStarts
from protos.executor.grammars import LIMITS, MAX_PROBLEM_BYTES, new_grammar_thread

NO_TOKEN = "no token of the model can go on from here"
NUM_COMPILED = 32  # grammars kept as they begin, for rows that have the same

Masks = npt.NDArray[np.int32]


class HostDrafts(NamedTuple):
    """Drafts of a step's sequences, on the host.

    Attributes:
        tokens: [S, N - 1].
        parents: [S, N - 1], the node that each follows; node 0 is the sequence's last token.
    """

    tokens: Int64Array
    parents: Int64Array


class Row(NamedTuple):
    """A row with a grammar that has a matcher.

    Attributes:
        matcher: Where its output is.
        min_len: Tokens of the sequence below which it ends only if it cannot go on.
        end_ids: Tokens that would end it.
    """

    matcher: LLMatcher
    min_len: int
    end_ids: Int64Array


class Constraints:
    """Matchers of one executor's rows. One thread calls it.

    Args:
        tokenizer: The model's, with its vocabulary's size and end-of-sequence tokens.
        num_rows: R, rows of the block table.
        device: Where logits are.
        max_nodes: The largest N.
        num_threads: That fill a step's masks.

    Attributes:
        is_constrained: bool [R], rows that have a grammar.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        num_rows: int,
        device: torch.device,
        *,
        max_nodes: int = 1,
        num_threads: int = 1,
    ) -> None:
        self.is_constrained: BoolArray = np.zeros(num_rows, np.bool_)
        self._tokenizer = tokenizer
        self._end_ids = frozenset(tokenizer.eos_tokens)
        # Those that are text as well, as a newline may be. They would end an output too early.
        plain = [id_ for id_ in tokenizer.eos_tokens if not tokenizer.is_special_token(id_)]
        self._plain_end_ids = np.array(plain, np.int64)
        self._device = device
        self._fillers = LLExecutor(num_threads)
        self._thread = new_grammar_thread()
        self._filling: Future[torch.Tensor] | None = None
        self._most_masks = num_rows * max_nodes
        self._buffer: torch.Tensor | None = None  # of masks, once a row has a grammar
        # The thread's from here on.
        self._rows: dict[int, Row] = {}
        self._problems: dict[int, str] = {}
        self._compiled = lru_cache(maxsize=NUM_COMPILED)(self._compile)

    def start(self, starts: RowStarts) -> BoolArray:
        """Forgets what these rows held. Returns which have a grammar, bool [A]."""
        has_grammar: BoolArray = starts.grammar_of > 0
        if has_grammar.any() or self.is_constrained[starts.rows].any():
            self.is_constrained[starts.rows] = has_grammar
            self._thread.submit(self._start, starts)
        return has_grammar

    def begin(
        self,
        rows: Int64Array,
        seq_lens: Int64Array,
        drafts: Callable[[], HostDrafts] | None = None,
    ) -> None:
        """Begins to fill the masks of a step's rows that are constrained, if some are.

        Args:
            rows: [S] that sample.
            seq_lens: [S] tokens that each sequence has.
            drafts: Waits for the drafts that these sequences verify, if they do.
        """
        at = np.flatnonzero(self.is_constrained[rows]).tolist()
        self._filling = self._thread.submit(self._fill, rows, seq_lens, at, drafts) if at else None

    def is_out(self) -> torch.Tensor:
        """Returns the tokens that may not follow, waiting for the masks: bool [C * N, V].

        In order of the rows that are constrained, and of their nodes.
        """
        assert self._filling is not None, "the masks of a step with constrained rows were begun"
        masks, size = self._filling.result(), self._tokenizer.vocab_size
        if self._device.type == "cpu":
            bits = np.invert(masks.numpy()).view(np.uint8)
            return torch.from_numpy(np.unpackbits(bits, 1, size, "little")).view(torch.bool)
        return clear_bits(masks.to(self._device, non_blocking=True), size)

    def accept(
        self, rows: Int64Array, gained: Callable[[], Int64Array]
    ) -> Future[list[tuple[int, str]]] | None:
        """Notes what the rows of a step gain.

        Args:
            rows: [S].
            gained: Waits for it: [S] tokens, or [S, 1 + n] how many tokens each gained, and these.

        Returns:
            Rows that cannot go on, and why, as soon as that is known; None if no row is constrained.
        """
        at = np.flatnonzero(self.is_constrained[rows]).tolist()
        return self._thread.submit(self._accept_step, rows[at].tolist(), at, gained) if at else None

    # ---- on the thread

    def _start(self, starts: RowStarts) -> None:
        ends = [starts.num_output_ids.cumsum(), starts.num_suppressed_ids.cumsum()]
        outputs, end_ids = (
            np.split(ids, end[:-1])
            for ids, end in zip((starts.output_ids, starts.suppressed_ids), ends, strict=True)
        )
        for i, row in enumerate(starts.rows.tolist()):
            self._rows.pop(row, None)
            self._problems.pop(row, None)
            if not starts.grammar_of[i]:
                continue
            try:
                matcher = self._compiled(starts.grammars[starts.grammar_of[i] - 1]).deep_copy()
            except BaseException as error:  # a panic of llguidance is no Exception
                self._fail(row, f"{type(error).__name__}: {error}")
                continue
            self._rows[row] = Row(matcher, int(starts.suppressed_until[i]), end_ids[i])
            if self._check(row):
                self._accept(row, outputs[i].tolist())

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)

    def _accept_step(
        self, rows: list[int], at: list[int], gained: Callable[[], Int64Array]
    ) -> list[tuple[int, str]]:
        table = gained()
        for row, i in zip(rows, at, strict=True):
            tokens = table[i : i + 1] if table.ndim == 1 else table[i, 1 : 1 + table[i, 0]]
            self._accept(row, tokens.tolist())
        return [(row, self._problems[row]) for row in rows if row in self._problems]

    def _accept(self, row: int, tokens: list[int]) -> None:
        """Takes a row along its tokens, up to the end of its sequence."""
        if row not in self._rows:
            return
        matcher = self._rows[row].matcher
        num_taken = next((i for i, id_ in enumerate(tokens) if id_ in self._end_ids), len(tokens))
        matcher.consume_tokens(tokens[:num_taken])
        if self._check(row) and num_taken < len(tokens):
            if matcher.is_accepting():
                del self._rows[row]  # steps that had begun by then may still run it
            else:
                self._fail(row, NO_TOKEN)

    def _fill(
        self,
        rows: Int64Array,
        seq_lens: Int64Array,
        at: list[int],
        drafts: Callable[[], HostDrafts] | None,
    ) -> torch.Tensor:
        """Fills the masks of rows[at]. Returns them: int32 [C * N, V / 32], on the host."""
        given = None if drafts is None else drafts()
        size = 1 if given is None else given.tokens.shape[1] + 1
        if self._buffer is None:
            buffer_size = (self._most_masks, -(-self._tokenizer.vocab_size // 32))
            is_pinned = self._device.type == "cuda"
            self._buffer = torch.zeros(buffer_size, dtype=torch.int32, pin_memory=is_pinned)
        filled = self._buffer[: len(at) * size]
        masks: Masks = filled.numpy()
        masks.fill(-1)
        constrained = rows[at].tolist()
        live = [(i, row) for i, row in enumerate(constrained) if row in self._rows]
        firsts = [(self._rows[row].matcher, i * size) for i, row in live]
        if firsts:
            width = masks.shape[1] * masks.itemsize
            self._fillers.unsafe_compute_mask_ptr(firsts, masks.ctypes.data, width, len(masks))
        for i, row in live:
            nodes, length = masks[i * size : (i + 1) * size], int(seq_lens[at[i]])
            if not self._check(row):
                nodes.fill(-1)
            elif not self._trim(row, self._rows[row].matcher, nodes[0], length):
                self._fail(row, NO_TOKEN)
            elif given is not None:
                drafted = given.tokens[at[i]], given.parents[at[i]]
                self._fill_nodes(row, nodes, length, *drafted)
        return filled

    def _trim(self, row: int, matcher: LLMatcher, mask: Masks, length: int) -> bool:
        """Takes out of the mask of a row [V / 32] what would end it too early.

        Args:
            row: The row.
            matcher: Its own, or one that has gone on along drafts.
            mask: To be written to.
            length: Tokens that its sequence has there.

        Returns:
            Whether anything is left; else it lets everything pass.
        """
        _, min_len, end_ids = self._rows[row]
        if self._plain_end_ids.size and not matcher.is_accepting():
            mask[:] = _without(mask, self._plain_end_ids)
        if length < min_len and (rest := _without(mask, end_ids)).any():
            mask[:] = rest
        is_left = bool(mask.any())
        if not is_left:
            mask.fill(-1)
        return is_left

    def _fill_nodes(
        self, row: int, masks: Masks, length: int, tokens: Int64Array, parents: Int64Array
    ) -> None:
        """Fills the masks [N, V / 32] behind a row's drafts. Those behind a wrong one matter not."""
        base = self._rows[row].matcher  # not to fail where a draft leads nowhere
        matcher, here = base.deep_copy(), list[int]()
        paths: list[list[int] | None] = [here]  # of each node, the drafts up to it
        for node, parent in enumerate(parents.tolist(), start=1):
            path, before = None, paths[parent]
            if before is not None and tokens[node - 1] not in self._end_ids:
                path = [*before, node]
                num_common = sum(a == b for a, b in zip(here, path, strict=False))
                matcher.rollback(len(here) - num_common)
                ids = [int(tokens[step - 1]) for step in path[num_common:]]
                num_taken = matcher.try_consume_tokens(ids)
                here = path[: num_common + num_taken]
                if num_taken < len(ids):
                    path = None
                else:
                    matcher.unsafe_compute_mask_ptr(masks[node].ctypes.data, masks[node].nbytes)
                    self._trim(row, matcher, masks[node], length + len(here))
                if matcher.is_error():
                    matcher, here = base.deep_copy(), []
            paths.append(path)

    def _check(self, row: int) -> bool:
        """Returns whether a row can go on."""
        if row in self._rows and self._rows[row].matcher.is_error():
            self._fail(row, self._rows[row].matcher.get_error())
        return row in self._rows

    def _fail(self, row: int, problem: str) -> None:
        """Has a row keep to nothing from now on. Its mask must let everything pass."""
        self._rows.pop(row, None)
        self._problems[row] = problem.encode()[:MAX_PROBLEM_BYTES].decode(errors="ignore")


def clear_bits(masks: torch.Tensor, size: int) -> torch.Tensor:
    """Returns which of the first bits are 0, from the lowest on: bool [S, size].

    Args:
        masks: int32 [S, size / 32 or more].
        size: How many.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    ones = (masks.view(torch.uint8).unsqueeze(2) >> shifts) & 1
    return (ones == 0).flatten(1)[:, :size]


def _without(mask: Masks, ids: Int64Array) -> Masks:
    """Returns a mask [V / 32] less some tokens."""
    rest = mask.copy()
    np.bitwise_and.at(rest, ids >> 5, ~(np.int32(1) << (ids & 31).astype(np.int32)))
    return rest
