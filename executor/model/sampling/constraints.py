"""Constraints: the grammars of rows, and masks of the tokens with which their outputs may go on.

    start    a row's grammar and the tokens that it has ──▶ its matcher, before it first samples
    begin    rows that sample, and their drafts ──▶ masks, filled while the forward pass runs
    is_out   waits for them
    accept   what the rows gained, as soon as it is on the host

A matcher is a function of the grammar and the tokens, so a row that begins anew goes on as it would
have. All belong to one thread, which works beside the one that steps, in the order in which it is
told to: llguidance lets go of the interpreter. Another thread builds grammars, so that only steps in
which their rows sample can wait for that. Whatever goes wrong is a problem of one row, which the step's
answer names; its mask then lets everything pass.

    C constrained rows that sample    N tokens that each verifies, 1 without drafts    V vocabulary
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from executor.batch.columns import BoolArray, Int64Array
from executor.batch.read_step import RowStarts
from protos.executor.grammars import (
    LIMITS,
    MAX_ACCEPT_S,
    MAX_PROBLEM_BYTES,
    MAX_READ_S,
    MAX_WAIT_S,
    new_grammar_thread,
)

TOO_AMBIGUOUS = "there are too many ways to read the output by it"
NO_TOKEN = "no token of the model can go on from here"
READ_LEN = 16  # tokens that are read without a look at the time
NUM_KEPT = 32  # grammars kept as they begin, for rows that have the same

Masks = npt.NDArray[np.int32]


class TooAmbiguous(Exception):
    """There are too many ways to read an output by its grammar."""


class HostDrafts(NamedTuple):
    """Drafts of a step's sequences, on the host.

    Attributes:
        tokens: [S, N - 1].
        parents: [S, N - 1], the node that each follows; node 0 is the sequence's last token.
    """

    tokens: Int64Array
    parents: Int64Array


@dataclass(slots=True)
class Row:
    """A row with a grammar to which it can keep.

    Attributes:
        grammar: As llguidance reads it.
        built: Its matcher where outputs begin.
        output: Tokens that it has; before its grammar begins, as many of the last as matter.
        min_len: Tokens of the sequence below which it ends only if it cannot go on.
        end_ids: Tokens that would end it.
        begin_ids: Tokens behind which its grammar begins; empty: it has begun.
        matcher: Where its output is; None before it first samples, or if drafts broke it.
        is_renewed: Whether its automata are its own.
    """

    grammar: str
    built: Future[LLMatcher]
    output: list[int]
    min_len: int
    end_ids: Int64Array
    begin_ids: list[int]
    matcher: LLMatcher | None = None
    is_renewed: bool = False

    def add(self, tokens: list[int]) -> None:
        """Notes new tokens of the output."""
        self.output += tokens
        if self.begin_ids:
            behind = _behind(self.begin_ids, self.output)
            if behind is None:
                self.output = self.output[max(0, len(self.output) - len(self.begin_ids) + 1) :]
            else:
                self.output, self.begin_ids = behind, []

    def read(self, output: list[int], *, is_own: bool = False) -> LLMatcher:
        """Returns a matcher behind this output, waiting until the grammar is built.

        Args:
            output: Tokens.
            is_own: Whether the row came to it here, step by step; who resumes a request may send any.

        Raises:
            TimeoutError: It is not.
            TooAmbiguous: An output that is not its own takes too long.
        """
        matcher = self.built.result(MAX_WAIT_S).deep_copy()  # automata stay shared
        end_s = thread_time() + MAX_READ_S
        for start in range(0, len(output), READ_LEN):
            matcher.consume_tokens(output[start : start + READ_LEN])
            if thread_time() > end_s and not is_own:
                raise TooAmbiguous
        return matcher


class DraftPath:
    """The way of a row's matcher along its drafts.

    Args:
        row: Whose they are.
        tokens: [N - 1] drafts.
        parents: [N - 1] the node that each follows.

    Attributes:
        nodes: From 0, where the output is, to the one where the matcher is.
    """

    def __init__(self, row: Row, tokens: list[int], parents: list[int]) -> None:
        self.nodes = [0]
        self._row, self._tokens, self._parents = row, tokens, parents
        self._is_right = [True]  # of each node so far, whether the grammar lets one get there

    @property
    def matcher(self) -> LLMatcher:
        assert self._row.matcher is not None, "rows have begun before their drafts are looked at"
        return self._row.matcher

    def turn(self, node: int) -> bool:
        """Goes back to where the way to the next node turns off. Returns whether it was farther."""
        if self.matcher.is_error():  # an earlier draft led nowhere
            self._row.matcher = self._row.read(self._row.output, is_own=True)
            self.nodes = [0]
        parent = self._parents[node - 1]
        if parent == self.nodes[-1] or not self._is_right[parent]:
            return False
        way = _way_to(parent, self._parents)
        return self._go_back(sum(a == b for a, b in zip(self.nodes, way, strict=False)))

    def go(self, node: int, end_ids: frozenset[int]) -> bool:
        """Goes on to the next node. Returns whether it is there: nothing follows one of the ends."""
        is_right = self._is_right[self._parents[node - 1]]
        if is_right and self._tokens[node - 1] not in end_ids:
            rest = [node]
            while (parent := self._parents[rest[-1] - 1]) != self.nodes[-1]:
                rest.append(parent)
            rest.reverse()
            num_taken = self.matcher.try_consume_tokens([self._tokens[n - 1] for n in rest])
            self.nodes += rest[:num_taken]
            is_right = num_taken == len(rest)
        else:
            is_right = False
        self._is_right.append(is_right)
        return is_right

    def leave(self) -> None:
        """Goes back to where the output is."""
        self._go_back(1)

    def _go_back(self, num_nodes: int) -> bool:
        num_back = len(self.nodes) - num_nodes
        if num_back:
            self.matcher.rollback(num_back)
            del self.nodes[num_nodes:]
        return num_back > 0


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
        # Of rows whose grammar has not begun. They may not end.
        free = np.full(-(-tokenizer.vocab_size // 32), -1, np.int32)
        self._free = _without(free, np.array(tokenizer.eos_tokens, np.int64))
        # Those that are text as well, as a newline may be. They would end an output too early.
        plain = [id_ for id_ in tokenizer.eos_tokens if not tokenizer.is_special_token(id_)]
        self._plain_end_ids = np.array(plain, np.int64)
        self._device = device
        self._fillers = LLExecutor(num_threads)
        self._thread, builder = new_grammar_thread(), new_grammar_thread()
        compile_ = partial(LLMatcher, tokenizer, log_level=0, limits=LIMITS)
        self._build: Callable[[str], Future[LLMatcher]] = partial(builder.submit, compile_)
        self._kept: OrderedDict[str, Future[LLMatcher] | None] = OrderedDict()  # the latest last
        self._filling: Future[torch.Tensor] | None = None
        self._most_masks = num_rows * max_nodes
        self._buffer: torch.Tensor | None = None  # of masks, once a row has a grammar
        # The thread's from here on.
        self._rows: dict[int, Row] = {}
        self._problems: dict[int, str] = {}

    def start(self, starts: RowStarts) -> BoolArray:
        """Forgets what these rows held. Returns which have a grammar, bool [A]."""
        has_grammar: BoolArray = starts.grammar_of > 0
        if has_grammar.any() or self.is_constrained[starts.rows].any():
            self.is_constrained[starts.rows] = has_grammar
            built = [(grammar, self._keep(grammar)) for grammar in starts.grammars]
            self._thread.submit(self._start, starts, built)
        return has_grammar

    def _keep(self, grammar: str) -> Future[LLMatcher]:
        """Returns a grammar's matcher where outputs begin, built or being built, and keeps it."""
        kept = self._kept.pop(grammar, None)  # at once: the thread may drop it any time
        built = self._kept[grammar] = kept or self._build(grammar)
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)
        return built

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

    def _start(self, starts: RowStarts, built: list[tuple[str, Future[LLMatcher]]]) -> None:
        outputs, end_ids, begin_ids = (
            np.split(ids, lengths.cumsum()[:-1])
            for ids, lengths in (
                (starts.output_ids, starts.num_output_ids),
                (starts.suppressed_ids, starts.num_suppressed_ids),
                (starts.begin_ids, starts.num_begin_ids),
            )
        )
        for i, row in enumerate(starts.rows.tolist()):
            self._rows.pop(row, None)
            self._problems.pop(row, None)
            if number := starts.grammar_of[i]:
                grammar, future = built[number - 1]
                min_len = int(starts.suppressed_until[i])
                held = Row(grammar, future, [], min_len, end_ids[i], begin_ids[i].tolist())
                held.add(outputs[i].tolist())
                self._rows[row] = held

    def _matcher_of(self, row: int) -> LLMatcher | None:
        """Returns a row's matcher, waiting until its grammar is built; None: it keeps to nothing."""
        held = self._rows.get(row)
        if held is None or held.begin_ids:
            return None
        if held.matcher is None:
            held.matcher = self._read(row, held.output)
        if held.matcher is not None and held.matcher.is_error() and not held.is_renewed:
            # Perhaps not by its own output: a limit of automata counts all that share them.
            self._kept.pop(held.grammar, None)
            held.built, held.is_renewed = self._build(held.grammar), True
            held.matcher = self._read(row, held.output)
        if held.matcher is not None and held.matcher.is_error():
            self._fail(row, held.matcher.get_error())
            return None
        return held.matcher

    def _read(self, row: int, output: list[int]) -> LLMatcher | None:
        """Returns a row's matcher behind some output; None: its grammar was not built, and it fails."""
        try:
            return self._rows[row].read(output)
        except TimeoutError:
            problem = f"its grammar was not built within {MAX_WAIT_S:g} s"
        except TooAmbiguous:
            problem = TOO_AMBIGUOUS
        except BaseException as error:  # a panic of llguidance is no Exception
            problem = f"{type(error).__name__}: {error}"
        self._fail(row, problem)
        return None

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
        matcher = self._matcher_of(row)  # None, too, if its grammar has not begun
        if (held := self._rows.get(row)) is None:
            return
        num_taken = next((i for i, id_ in enumerate(tokens) if id_ in self._end_ids), len(tokens))
        held.add(tokens[:num_taken])
        if matcher is None:
            return
        begin = thread_time()
        matcher.consume_tokens(tokens[:num_taken])
        if thread_time() - begin > MAX_ACCEPT_S:  # masks, of many such rows at once, take longer
            self._fail(row, TOO_AMBIGUOUS)
        if (now := self._matcher_of(row)) is not None and num_taken < len(tokens):
            if now.is_accepting():
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
        places = [(i * size, row) for i, row in enumerate(rows[at].tolist())]
        lengths = seq_lens[at].tolist()
        if given is not None:
            self._fill_drafts(masks, places, lengths, given.tokens[at], given.parents[at])
        failed = places  # and again those whose automata others had used up
        for _ in range(2):
            found = [(self._matcher_of(row), place) for place, row in failed]
            self._compute(masks, [(matcher, place) for matcher, place in found if matcher])
            failed = [(place, row) for place, row in failed if self._is_broken(row)]
        for (place, row), length in zip(places, lengths, strict=True):
            if self._is_free(row):
                masks[place] = self._free_mask(row, length)
            elif (matcher := self._matcher_of(row)) is None:
                masks[place] = -1
            elif not self._trim(row, matcher, masks[place], length):
                self._fail(row, NO_TOKEN)
        return filled

    def _fill_drafts(
        self,
        masks: Masks,
        places: list[tuple[int, int]],
        lengths: list[int],
        tokens: Int64Array,
        parents: Int64Array,
    ) -> None:
        """Fills the masks behind drafts, and takes each row back to where it was.

        llguidance keeps a matcher's last mask, and may take it for that of another path to as far. So
        that of the node to which one goes back is filled once more.
        """
        for (place, row), length, *drafted in zip(
            places, lengths, tokens.tolist(), parents.tolist(), strict=True
        ):
            if self._is_free(row):
                self._fill_free(masks[place : place + 1 + tokens.shape[1]], row, length, *drafted)
        live = [
            (place, row, DraftPath(self._rows[row], *drafted), length)
            for (place, row), length, *drafted in zip(
                places, lengths, tokens.tolist(), parents.tolist(), strict=True
            )
            if self._matcher_of(row) is not None
        ]
        for node in range(1, 1 + tokens.shape[1]):
            self._fill_ends(masks, [each for each in live if each[2].turn(node)])
            self._fill_ends(masks, [each for each in live if each[2].go(node, self._end_ids)])
        for _, row, path, _ in live:
            path.leave()
            if self._is_broken(row):
                self._rows[row].matcher, self._rows[row].is_renewed = None, False

    def _fill_ends(self, masks: Masks, paths: list[tuple[int, int, DraftPath, int]]) -> None:
        """Fills the masks of the nodes where paths end."""
        at = [(path.matcher, place + path.nodes[-1]) for place, _, path, _ in paths]
        self._compute(masks, at)
        for (matcher, place), (_, row, path, length) in zip(at, paths, strict=True):
            self._trim(row, matcher, masks[place], length + len(path.nodes) - 1)

    def _fill_free(
        self, masks: Masks, row: int, length: int, tokens: list[int], parents: list[int]
    ) -> None:
        """Fills the masks behind drafts of a row whose grammar has not begun, and may among them."""
        held = self._rows[row]
        for node in range(1, len(masks)):
            way = [tokens[n - 1] for n in _way_to(node, parents)[1:]]
            behind = _behind(held.begin_ids, held.output + way)
            if behind is None:
                masks[node] = self._free_mask(row, length + len(way))
            elif (matcher := self._read(row, behind)) is None:
                return
            elif not matcher.is_error():
                self._compute(masks, [(matcher, node)])
                self._trim(row, matcher, masks[node], length + len(way))

    def _free_mask(self, row: int, length: int) -> Masks:
        """Returns the mask [V / 32] of a row whose grammar has not begun, with so many tokens."""
        held = self._rows[row]
        return _without(self._free, held.end_ids) if length < held.min_len else self._free

    def _is_free(self, row: int) -> bool:
        return row in self._rows and bool(self._rows[row].begin_ids)

    def _is_broken(self, row: int) -> bool:
        held = self._rows.get(row)
        return held is not None and held.matcher is not None and held.matcher.is_error()

    def _compute(self, masks: Masks, matchers: list[tuple[LLMatcher, int]]) -> None:
        """Fills the masks at these places, side by side."""
        if matchers:
            width = masks.shape[1] * masks.itemsize
            self._fillers.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, width, len(masks))

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
        if self._plain_end_ids.size and not matcher.is_accepting():
            mask[:] = _without(mask, self._plain_end_ids)
            if not mask.any():
                mask.fill(-1)
                return False
        held = self._rows[row]
        if length < held.min_len and (rest := _without(mask, held.end_ids)).any():
            mask[:] = rest
        return True

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


def _way_to(node: int, parents: list[int]) -> list[int]:
    """Returns the nodes up to one of a tree of drafts, from 0 on."""
    way = [node]
    while way[-1]:
        way.append(parents[way[-1] - 1])
    return way[::-1]


def _behind(ids: list[int], output: list[int]) -> list[int] | None:
    """Returns what stands behind the first such tokens in a row; None: there are none."""
    for end in range(len(ids), len(output) + 1):
        if output[end - len(ids) : end] == ids:
            return output[end:]
    return None


def _without(mask: Masks, ids: Int64Array) -> Masks:
    """Returns a mask [V / 32] less some tokens."""
    rest = mask.copy()
    np.bitwise_and.at(rest, ids >> 5, ~(np.int32(1) << (ids & 31).astype(np.int32)))
    return rest
