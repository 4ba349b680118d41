"""Requests, their sequences, and the listeners that wait for their tokens.

A Request is one client's call; each of its n continuations is a Sequence:

    WAITING ──bind──▶ RUNNING ──finish──▶ ENDED
       ▲                 │
       └───preemption────┘         cancel: from WAITING or RUNNING to ENDED

While a sequence is bound to a rank, its tokens and counters are a row of that group's
SequenceTable; before and after, they are here.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from protos.executor.sampling_fields import SAMPLING_FIELDS
from protos.transport.errors import RpcError
from protos.transport.interceptors import Caller
from router.requests.flows import NO_FLOW, Flow

if TYPE_CHECKING:
    from router.scheduling.sequence_table import SequenceTable
    from router.scheduling.step import ServedModel

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

NO_LISTENER = 0  # index 0 is never given out, so that an empty row of a table wakes nobody
FEW = 4  # waiting listeners whose rows are looked for one by one


class FinishReason(Enum):
    STOP = auto()  # a stop token, a stop string or the end of the sequence
    LENGTH = auto()  # max_tokens, or the context is full


_DEFAULTS = {field.name: field.default for field in SAMPLING_FIELDS}
_PENALTIES = frozenset(field.name for field in SAMPLING_FIELDS if field.is_penalty)
_PROMPT_PENALTIES = frozenset(field.name for field in SAMPLING_FIELDS if field.sees_prompt)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked; resolved, in range.

    Attributes:
        values: Numbers by their names in SAMPLING_FIELDS, without the defaults.
        logit_bias: Pairs of token id and shift.
        seed: Of continuation 0; drawn at random if the client gave none.
        allowed_ids: Tokens that can be sampled; empty: all.
        banned: Sequences of two tokens and more that the output shall not have.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    allowed_ids: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, _DEFAULTS[name])

    @property
    def sees_output(self) -> bool:
        """Whether sampling depends on the tokens sampled before."""
        return bool(self.banned) or not _PENALTIES.isdisjoint(self.values)

    @property
    def has_prompt_penalty(self) -> bool:
        """Whether it depends on the prompt's tokens besides."""
        return not _PROMPT_PENALTIES.isdisjoint(self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConditions:
    """When a sequence ends; resolved, in range.

    Attributes:
        max_tokens: Output tokens at most; prompt and output fit the context together.
        min_tokens: No other condition holds before this many.
        stop_token_ids: The request's own and, unless it ignores them, the model's.
        has_stop_strings: Whether each sequence's TextStream may end it.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    has_stop_strings: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """What to return besides tokens."""

    text: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()
    echo: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing is."""
        return not (self.text or self.logprobs or self.prompt_logprobs or self.echo)

    @property
    def num_scores(self) -> int:
        """Log probabilities that come with each that is asked for, itself included."""
        return 1 + self.top_logprobs + len(self.logprob_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability, the likeliest alternatives, likeliest first, and those of the tokens
    in OutputOptions.logprob_ids."""

    token_id: int
    logprob: float
    top_ids: Int32Array
    top_logprobs: Float32Array
    given_logprobs: Float32Array


class Columns(NamedTuple):
    """New tokens of many requests.

    Attributes:
        tags: uint32 [R].
        num_tokens: int32 [R], at least 1 each.
        token_ids: int32 [sum(num_tokens)], requests end to end.
    """

    tags: npt.NDArray[np.uint32]
    num_tokens: Int32Array
    token_ids: Int32Array


NO_COLUMNS = Columns(np.zeros(0, np.uint32), np.zeros(0, np.int32), np.zeros(0, np.int32))


class TextStream(Protocol):
    """Turns a sequence's tokens into text as they come, and looks for its stop strings."""

    def feed(self, token_ids: Int32Array, *, may_stop: bool) -> str | None:
        """Adds tokens. Returns the stop string that they completed, if they did."""
        ...

    def close(self) -> None:
        """Makes what was held back ready: no token follows. Harmless to call again."""
        ...

    def take(self) -> str:
        """Returns the text since the last call."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One client's call: what its continuations share.

    Attributes:
        request_id: Unique among the live requests of its caller.
        prompt: int32, at least one token.
        priority: Higher is scheduled first and preempted last; see WaitingQueue.
        n: Number of its continuations.
        arrival_time: On the event loop's clock, in seconds.
        deadline: On the same clock; None if there is none.
        listener: Woken when there is something new.
        tag: The caller's number for this request on its stream; 0 outside GenerateMany.
        is_columnar: Whether the listener takes its tokens as columns (`Listener.take_columns`).
        caller: Who sent it, and may cancel it.
        cache_salt: What the names of its blocks begin with (prefix_cache.py).
        hides_cached: Whether its caller is not told how much the prefix cache had.
        grammar: What its outputs keep to, as executors get it; empty: nothing.
        grammar_after: Tokens behind which they do; empty: from the first on.
        prompt_text: Of the prompt, if it is to be echoed with text.
        attempt: Of resuming it; 0: nothing came of it before.
        age_s: How long before its arrival it was first sent.
        tells_begin: Whether its caller is still to be told what it takes to resume it.
        served: Of the group that it was given to; None before.
        turn: Its order among those of its caller, set on submission: seconds, and its number. Less is
            bound first, and gives way last.
        expiry: The timer behind `deadline`.
    """

    request_id: str
    prompt: Int32Array
    sampling: SamplingParams
    stop: StopConditions
    output: OutputOptions
    listener: "Listener"
    arrival_time: float
    n: InitVar[int] = 1
    priority: int = 0
    deadline: float | None = None
    tag: int = 0
    is_columnar: bool = False
    caller: Caller = ()
    cache_salt: bytes = b""
    hides_cached: bool = False
    grammar: str = ""
    grammar_after: tuple[int, ...] = ()
    prompt_text: str = ""
    attempt: int = 0
    age_s: float = 0.0
    tells_begin: bool = True
    served: "ServedModel | None" = None
    turn: tuple[float, int] = field(init=False)
    expiry: asyncio.TimerHandle | None = field(default=None, init=False)
    sequences: "list[Sequence]" = field(init=False)

    def __post_init__(self, n: int) -> None:
        self.turn = (self.arrival_time, 0)
        self.sequences = [Sequence(self, index) for index in range(n)]

    @property
    def is_live(self) -> bool:
        return not all(sequence.is_ended for sequence in self.sequences)

    @property
    def is_exact(self) -> bool:
        """Whether its outputs are a function of its seed, however their steps fell."""
        draws_drafts = self.served is not None and self.served.draws_drafts
        return not (draws_drafts and "temperature" in self.sampling.values)

    @property
    def has_begun(self) -> bool:
        """Whether some of it has run, so that it has tokens or had blocks."""
        return any(sequence.progress.start_time is not None for sequence in self.sequences)


@dataclass(slots=True)
class Suspicion:
    """What speaks against a sequence: it was in lost steps, and has not proven itself since.

    Attributes:
        num_losses: How often in a row.
        num_losses_alone: How often nobody else was in the lost steps, or no other suspect of two losses.
        num_output_tokens: Output tokens that it had at the last loss.
        max_running: How many suspects with as many losses may run at a time.
    """

    num_losses: int = 0
    num_losses_alone: int = 0
    num_output_tokens: int = 0
    max_running: int = 1


@dataclass(slots=True)
class Progress:
    """When things happened to a sequence, on the event loop's clock, and how often."""

    start_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None  # when it last gave up a row
    end_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    gave_way: bool = False  # when it last gave up its row
    num_drafts: int = 0  # of its steps, that could have been accepted; up to date when not bound
    num_accepted_drafts: int = 0
    # Of when its group was last lost, until it is bound again: tokens whose KV was there, and where.
    num_computed_tokens: int = 0
    kv_id: str = ""

    def has_kept_kv(self, kv_ids: Collection[str]) -> bool:
        """Whether it had KV that a rank of these still has."""
        return self.num_computed_tokens > 0 and self.kv_id != "" and self.kv_id in kv_ids


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request.

    Attributes:
        tokens: int32, prompt and output. While bound, a view of the table's row, longer than what it
            holds and with only those tokens that were known when it was bound.
        table: The table that holds it while it is bound to a rank, else None.
        row: Its row there.
        num_taken: Tokens handed to the listener, prompt included; kept here while not bound.
        num_resumed: Output tokens that it came with (resume.py).
        text: Set where the client wants text or gave stop strings.
        logprobs: One per output token that the listener has not taken yet, if asked for.
        prompt_logprobs: One per prompt token from the second on, if asked for.
        block_hashes: Names of its full blocks, as far as anybody asked (prefix_cache.py).
        hashed_size: Tokens of these blocks.
        flow: Its caller's in its group.
        suspicion: Set while its steps may be what executors die of (waiting_queue.py).
        num_clearings: How often it was suspected and cleared, while no executor was lost whose
            steps it was not in.
        finish_reason: Set when it ended well.
        error: Set when it ended otherwise.
    """

    request: Request
    index: int
    tokens: Int32Array = field(init=False)
    table: "SequenceTable | None" = None
    row: int = 0
    num_taken: int = field(init=False)
    num_resumed: int = 0
    text: TextStream | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    block_hashes: list[bytes] = field(default_factory=list)
    hashed_size: int = 0
    group: int = 0
    dp_rank: int = 0
    flow: Flow = NO_FLOW
    suspicion: Suspicion | None = None
    num_clearings: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    error: RpcError | None = None

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt
        self.num_taken = self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.tokens) if self.table is None else int(self.table.num_tokens[self.row])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_interrupted(self) -> bool:
        """Whether its caller has had tokens and waits for more while it runs them again: not if it gave way."""
        return self.num_output_tokens > 0 and not self.progress.gave_way

    @property
    def min_len(self) -> int:
        """Prompt and output tokens below which no stop token ends it."""
        request = self.request
        # Where there is a grammar, executors know when it may end.
        return len(request.prompt) + (0 if request.grammar else request.stop.min_tokens)

    @property
    def max_len(self) -> int:
        """Prompt and output tokens at most."""
        return len(self.request.prompt) + self.request.stop.max_tokens

    @property
    def was_let_in(self) -> bool:
        """Whether it was taken before, here or by another router: limits of the queue are for others."""
        return self.progress.start_time is not None or self.request.attempt > 0

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether its prompt has to be computed whole, past the prefix cache."""
        asked_for = self.request.output.prompt_logprobs and self.index == 0
        return asked_for and self.num_output_tokens == 0

    @property
    def seed(self) -> int:
        """64 bits; another for each continuation of a request."""
        return (self.request.sampling.seed + self.index * 0x9E3779B97F4A7C15) % (1 << 64)

    @property
    def turn(self) -> tuple[float, int, int]:
        """Sorts sequences of a flow: less is bound first and gives way last."""
        return (*self.request.turn, self.index)

    @property
    def order(self) -> tuple[bool, float, float, int, int]:
        """Sorts bound sequences: less gives way last."""
        return (*self.flow.last_key, *self.turn)

    @property
    def is_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def end_at(self, token: Int32Array, length: int) -> bool:
        """Sets the finish reason if a token ends it. Returns whether it does.

        Args:
            token: int32 [1].
            length: Prompt and output tokens up to it.
        """
        stop, may_stop = self.request.stop, length >= self.min_len
        if stop.has_stop_strings:
            assert self.text is not None
            is_long = length >= self.num_prompt_tokens + stop.min_tokens
            self.stop_string = self.text.feed(token, may_stop=is_long)
        if self.stop_string is not None:
            self.finish_reason = FinishReason.STOP
        elif may_stop and (token_id := int(token[0])) in stop.stop_token_ids:
            self.finish_reason, self.stop_token_id = FinishReason.STOP, token_id
        elif length >= self.max_len:
            self.finish_reason = FinishReason.LENGTH
        return self.is_ended

    def take_tokens(self) -> Int32Array:
        """Returns the output tokens since the last call."""
        if self.table is not None:
            return self.table.take_tokens(self.row)
        taken = self.tokens[self.num_taken :]
        self.num_taken = len(self.tokens)
        return taken


# ---- listeners


class Listener:
    """One call's side of its sequences. Made by `Listeners.open`, given back by `Listeners.close`.

    Attributes:
        index: What the table's `listener` column holds for its sequences.
        ended: Sequences that ended since the owner last looked; it takes them from the left.
    """

    def __init__(self, index: int, is_waiting: npt.NDArray[np.bool_]) -> None:
        self.index = index
        self.ended: deque[Sequence] = deque()
        self._is_waiting = is_waiting
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        is_waiting[index] = True

    async def wait(self) -> None:
        """Returns once there was news since the last call. Only its owner calls it."""
        if not self._has_news:
            # An asyncio.Event takes twice as long, once for each message of each stream.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_news = False
        self._is_waiting[self.index] = True

    def wake(self) -> None:
        """Says that there is news."""
        self._is_waiting[self.index] = False
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Listeners:
    """Every open listener, and which of them wait, as one array.

    A step may touch thousands of sequences, and most listeners are one step behind or not waiting
    at all. So the engine marks listeners in one array operation and wakes only the waiting ones;
    tokens stay in the SequenceTable until their listener comes for them. A slow listener thus costs
    nobody anything, and what it has not read is bounded by its own max_tokens.
    """

    def __init__(self, max_listeners: int) -> None:
        self._is_waiting = np.zeros(max_listeners + 1, dtype=np.bool_)
        self._has_news = np.zeros(max_listeners + 1, dtype=np.bool_)
        self._listeners: list[Listener | None] = [None] * (max_listeners + 1)
        self._free = list(range(max_listeners, NO_LISTENER, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_open(self) -> int:
        return len(self._listeners) - 1 - len(self._free)

    def open(self) -> Listener:
        """Returns a new listener. The caller has seen that `num_free` is not 0."""
        index = self._free.pop()
        listener = Listener(index, self._is_waiting)
        self._listeners[index] = listener
        return listener

    def close(self, listener: Listener) -> None:
        """Forgets a listener whose sequences have all ended."""
        assert self._listeners[listener.index] is listener
        self._listeners[listener.index] = None
        self._is_waiting[listener.index] = False
        self._free.append(listener.index)

    def wake(self, indices: Int32Array, has_news: npt.NDArray[np.bool_]) -> None:
        """Wakes the listeners that wait for rows with news.

        Args:
            indices: int32 [R], of each row's listener.
            has_news: bool [R].
        """
        woken = self._is_waiting.nonzero()[0].tolist()
        if len(woken) > FEW:
            self._has_news[:] = False
            self._has_news[indices[has_news]] = True
            self._has_news &= self._is_waiting
            woken = np.flatnonzero(self._has_news).tolist()
        else:  # a look for each of them takes a tenth of that, and the first row's needs none
            row = int(has_news.argmax())
            first = int(indices[row]) if has_news[row] else NO_LISTENER
            woken = [i for i in woken if i == first or np.count_nonzero(has_news & (indices == i))]
        for index in woken:
            listener = self._listeners[index]
            assert listener is not None, "a live sequence keeps its listener open"
            listener.wake()

    def wake_all(self) -> None:
        """Wakes every open listener."""
        for listener in self._listeners:
            if listener is not None:
                listener.wake()
