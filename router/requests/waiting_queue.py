"""Waiting queue of one group: bounded, ordered by flow, priority and arrival, safe from poison.

Priority is a head start in time. A request goes before all requests that came less than
`priority_step_s` earlier for each level of priority that it has above theirs:

    time of arrival            0 s         4 s          10 s        16 s
    priority 0              ───a────────────────────────────────────b───▶
    priority 1                           ───────────────c────────────────▶   c, a, b  at 11 s a level
                                                                             a, c, b  at 9 s

A high priority thus means a short wait, and no priority means an endless one: a request that has
waited for as long as all levels are worth goes before all that come. Where step times are known, a
prompt stands besides behind shorter ones for as long as it takes to run, times a weight: it delays them
little, and by no more than that. So two requests of one caller have their turns for good, and those of
callers that are told apart go by what each was given (`flows.py`). Who gives way is last in the same order.
`Quarantine` stands before the queue and holds back the sequences of lost steps.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain, count

from protos.transport.interceptors import Caller
from router.errors import QueueFull
from router.requests.callers import DEFAULTS, CallerSettings
from router.requests.flows import Line, num_urgent, resumed_size
from router.requests.request import Request, Sequence, Suspicion

PRIORITY_STEP_S = 10.0
MAX_RESUMED_TOKENS = 4_000_000
FLOW_SHARE = 0.9  # of the queue, for a flow without a limit

MUCH_ROOM = 8  # times what waits, at least, is each limit then

PARTS = 8  # that suspects of one kind are tried in
PROOF_TOKENS = 4  # a step of prompts, and decodes: whichever of them might be fatal
MAX_LOSSES_ALONE = 2
FREE_CLEARINGS = 4  # without a longer proof: that many are bad luck
PROOF_GROWTH = 4  # for each further one
MAX_PROOF_TOKENS = 1024

_ARRIVALS = count(1)  # at any group: a request that moves keeps its place


class WaitingQueue:
    """Sequences that no rank runs yet, or runs no more because others needed its blocks.

    Args:
        max_sequences: Waiting at most; more are refused.
        max_tokens: Prompt tokens waiting at most. One request that is longer by itself may
            still wait where no other does.
        max_resumed_tokens: Likewise of resumed requests, prompts and outputs, for which the others are
            not; of one flow, nine tenths of it.
        priority_step_s: Seconds of waiting that one level of priority is worth; the same at every
            group. 0 is the order of arrival.
        callers: How callers that are told apart share the queue.

    Attributes:
        line: Their flows, and the order among them.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_tokens: int,
        max_resumed_tokens: int = MAX_RESUMED_TOKENS,
        priority_step_s: float = PRIORITY_STEP_S,
        callers: CallerSettings = DEFAULTS,
    ) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._max_resumed_tokens = max_resumed_tokens
        self._priority_step_s = priority_step_s
        self._callers = callers
        self._waiting: set[Sequence] = set()
        self.line = Line(self._waiting, lambda caller: callers.limits_of(caller).weight)
        self.num_tokens = 0
        self._num_let_in = self._num_let_in_tokens = 0  # before, and limits are not for them
        self._num_resumed_tokens = 0
        self._token_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence that waits, in no order."""
        return iter(tuple(self._waiting))

    @property
    def has_room(self) -> bool:
        """Whether one continuation of a prompt of one token would fit."""
        return not self._waiting or (
            self._num_counted < self._max_sequences and self._num_counted_tokens < self._max_tokens
        )

    @property
    def are_new(self) -> bool:
        """Whether none of those that wait ran before, here or elsewhere."""
        return not self._num_let_in

    @property
    def has_much_room(self) -> bool:
        """Whether what waits is a small part of what may, also of the flow of the first."""
        parts = [(len(self), self._max_sequences), (self.num_tokens, self._max_tokens)]
        first = self.peek()
        if first is not None and first.request.caller:
            max_sequences, max_tokens = self._most_of(first.request.caller)
            parts += (first.flow.num_waiting, max_sequences), (first.flow.num_tokens, max_tokens)
        return all(MUCH_ROOM * num_waiting <= most for num_waiting, most in parts)

    @property
    def _num_counted(self) -> int:
        """Sequences that its limit is for."""
        return len(self) - self._num_let_in

    @property
    def _num_counted_tokens(self) -> int:
        return self.num_tokens - self._num_let_in_tokens

    def order_by_length(self, token_s: float) -> None:
        """Says how many seconds each prompt token sets a new request back in the line."""
        self._token_s = token_s

    def submit(self, request: Request) -> None:
        """Queues all continuations of a new request that have not ended, or none.

        Raises:
            QueueFull: There is no room.
        """
        new = [sequence for sequence in request.sequences if not sequence.is_ended]
        if request.attempt:
            self._check_resumed(request.caller, sum(map(resumed_size, new)))
        else:
            self._check_new(request, len(new))
        behind_s = len(request.prompt) * self._token_s - request.priority * self._priority_step_s
        sent_time = request.arrival_time - request.age_s
        request.turn = (sent_time + behind_s, next(_ARRIVALS))
        for sequence in new:
            self.push(sequence)

    def _check_new(self, request: Request, num_new: int) -> None:
        value = self._num_counted + num_new
        if value > self._max_sequences:
            raise QueueFull(
                f"{self._num_counted} sequences wait and {num_new} more would exceed "
                f"max_waiting_sequences={self._max_sequences}: try again in a second",
                metadata={"value": value, "limit": self._max_sequences},
            )
        num_tokens = len(request.prompt) * num_new
        value = self._num_counted_tokens + num_tokens
        if self._waiting and value > self._max_tokens:
            raise QueueFull(
                f"{self._num_counted_tokens} prompt tokens wait and {num_tokens} more would exceed "
                f"max_waiting_tokens={self._max_tokens}: try again in a second",
                metadata={"value": value, "limit": self._max_tokens},
            )
        self._check_flow(request.caller, num_new, num_tokens)

    def _check_resumed(self, caller: Caller, num_tokens: int) -> None:
        """Refuses more tokens to compute again than may wait; the first request may be of any size."""
        for num_waiting, most, of in (
            (self._num_resumed_tokens, self._max_resumed_tokens, ""),
            (
                self.line.flow_of(caller).num_resumed_tokens if caller else 0,
                int(FLOW_SHARE * self._max_resumed_tokens),
                f" of the flow {'/'.join(caller)}",
            ),
        ):
            value = num_waiting + num_tokens
            if num_waiting and value > most:
                raise QueueFull(
                    f"{num_waiting} tokens of resumed requests{of} wait and {num_tokens} more would "
                    f"exceed max_resumed_tokens={most}: try again in a second",
                    metadata={"value": value, "limit": most},
                )

    def _check_flow(self, caller: Caller, num_new: int, num_tokens: int) -> None:
        """Refuses more than a flow may have waiting; its first request may be of any size."""
        if not caller:
            return
        flow = self.line.flow_of(caller)
        flow.weight = self._callers.limits_of(caller).weight
        counts = flow.num_waiting - flow.num_let_in, flow.num_tokens - flow.num_let_in_tokens
        for what, num_waiting, num_more, most in zip(
            ("sequences", "tokens"),
            counts,
            (num_new, num_tokens),
            self._most_of(caller),
            strict=True,
        ):
            if flow.num_waiting and num_waiting + num_more > most:
                name = "/".join(caller)
                raise QueueFull(
                    f"{num_waiting} {what} of the flow {name} wait and {num_more} more would exceed "
                    f"max_flow_waiting_{what}={most}: try again in a second",
                    metadata={"flow": name, "value": num_waiting + num_more, "limit": most},
                )

    def _most_of(self, caller: Caller) -> tuple[int, int]:
        """Returns the sequences and the prompt tokens that a flow may have waiting."""
        own, of_each = self._callers.limits_of(caller), self._callers
        max_sequences, max_tokens = own.max_waiting_sequences, own.max_waiting_tokens
        if max_sequences is None:
            share = int(FLOW_SHARE * self._max_sequences)
            max_sequences = of_each.max_flow_waiting_sequences or share
        if max_tokens is None:
            max_tokens = of_each.max_flow_waiting_tokens or int(FLOW_SHARE * self._max_tokens)
        return max_sequences, max_tokens

    def push(self, sequence: Sequence, *, is_back: bool = False) -> None:
        """Queues a sequence by its request's priority. Preempted ones are never refused.

        Args:
            sequence: It.
            is_back: Whether it was taken aside.
        """
        self._waiting.add(sequence)
        self._count(sequence, 1)
        self.line.push(sequence, is_back=is_back)

    def peek(self) -> Sequence | None:
        """Returns the first of the queue."""
        return self.line.peek()

    def pop(self, *, is_aside: bool = False) -> Sequence:
        """Takes the first of the queue; `peek` has just returned it.

        Args:
            is_aside: Whether it is put back in this plan: its flow keeps what slots it had.
        """
        sequence = self.line.pop()
        self._leave(sequence, is_aside=is_aside)
        return sequence

    def backlog(self, most: float) -> float:
        """Returns the tokens that wait and may make steps longer. See Line."""
        return self.line.backlog(most)

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue, if it is there."""
        if sequence in self._waiting:
            self._leave(sequence)

    def _leave(self, sequence: Sequence, *, is_aside: bool = False) -> None:
        self._waiting.remove(sequence)
        self._count(sequence, -1)
        self.line.leave(sequence, is_aside=is_aside)

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_tokens = sign * len(sequence.tokens)
        self.num_tokens += num_tokens
        if sequence.was_let_in:
            self._num_let_in += sign
            self._num_let_in_tokens += num_tokens
        self._num_resumed_tokens += sign * resumed_size(sequence)


# ---- quarantine


class Quarantine:
    """Waiting queue that isolates poison requests: suspects in front, and all others behind them.

    A lost step says only which sequences it ran, and most losses are no request's fault. So each
    sequence of a lost step is a suspect until it has gained a few tokens, and suspects that are lost
    again run in parts:

        lost once       all at a time, beside everybody else
        lost again      an eighth of them at a time, and nothing else begins until they are done
        ...             the suspects become fewer with each loss, down to one that runs alone
        lost alone      after a loss in which it was the only suspect: its step kills executors, and it
                        is not tried again

    Proven sequences go on running. No sequence is failed unless it is lost alone.

    Some steps kill only now and then, after more tokens than the proof takes. So a sequence that is
    suspected again and again has to gain ever more of them, unless executors are lost without it, too.

    Args:
        others: Their queue.
        may_try: Whether suspects that wait here may begin: each may cost an executor. Until then all
            others run, and then a new epoch has to begin: beside others no suspect is alone.
    """

    def __init__(self, others: WaitingQueue, may_try: Callable[[], bool] = lambda: True) -> None:
        self._others = others
        self._may_try = may_try
        self._suspects: list[Sequence] = []  # lost more than once, that wait, as they are tried
        self._running: dict[Sequence, int] = {}  # handed out, and not proven yet: their losses
        self._num_running: Counter[int] = Counter()  # of these, by their losses
        self._head: Sequence | None = None  # what `peek` returned, if it is a suspect
        self._have_others_begun = False  # in this epoch, while suspects might not

    def __len__(self) -> int:
        return len(self._others) + len(self._suspects)

    @property
    def num_tokens(self) -> int:
        """Tokens that wait, prompt and output."""
        return self._others.num_tokens + sum(len(s.tokens) for s in self._suspects)

    def backlog(self, most: float) -> float:
        """Returns the tokens that wait and may make steps longer. See Line."""
        return self._others.backlog(most) + sum(map(num_urgent, self._suspects))

    @property
    def line(self) -> Line:
        return self._others.line

    def order_by_length(self, token_s: float) -> None:
        self._others.order_by_length(token_s)

    @property
    def are_new(self) -> bool:
        """Whether none of those that wait ran before, here or elsewhere."""
        return not self._suspects and self._others.are_new

    @property
    def has_much_room(self) -> bool:
        """Whether what waits, but for suspects, is a small part of what may."""
        return self._others.has_much_room

    @property
    def has_room(self) -> bool:
        """Whether a small request would be taken."""
        return self._others.has_room

    def submit(self, request: Request) -> None:
        """Queues a new request. See WaitingQueue."""
        self._others.submit(request)

    def push(self, sequence: Sequence, *, is_back: bool = False) -> None:
        """Queues a sequence that ran before, here or elsewhere. It is never refused."""
        self._end_trial(sequence)
        if not _is_isolated(sequence):
            self._others.push(sequence, is_back=is_back)
            return
        sequence.flow = self.line.flow_of(sequence.request.caller)
        insort(self._suspects, sequence, key=_trial_order)

    def peek(self) -> Sequence | None:
        """Returns the sequence that may begin next."""
        num_losses = max(self._num_running, default=0)
        self._head = None
        if self._suspects and not self.holds_suspects:
            self._head = self._next_suspect(num_losses)
            return self._head
        return None if num_losses > 1 else self._others.peek()

    @property
    def holds_suspects(self) -> bool:
        """Whether there are suspects that may not begin."""
        return bool(self._suspects) and not self._may_try()

    @property
    def wants_border(self) -> bool:
        """Whether suspects may begin, and not alone but in another epoch."""
        return self._have_others_begun and bool(self._suspects) and self._may_try()

    def _next_suspect(self, num_losses: int) -> Sequence | None:
        """Returns the suspect that may begin beside those that run, whose losses are as many.

        Of several it is the one that the line puts first: in another order than that in which
        sequences give way, two of them would preempt each other for ever.
        """
        if not self._suspects:
            return None
        first = self._suspects[0]
        assert first.suspicion is not None
        if len(self._running) >= first.suspicion.max_running:
            return None
        if self._running and _num_losses(first) != num_losses:
            return None
        if not self.line.are_many:
            return first
        num_alike = bisect_right(self._suspects, _trial(first), key=_trial)
        firsts = {each.request.caller: each for each in self._suspects[num_alike - 1 :: -1]}
        return min(firsts.values(), key=self.line.place_of)

    def pop(self, *, is_aside: bool = False) -> Sequence:
        """Takes out the sequence that `peek` has just returned. See WaitingQueue."""
        if (sequence := self._head) is None:
            sequence = self._others.pop(is_aside=is_aside)
            self._have_others_begun |= bool(self._suspects)
        else:
            self._head = None
            self._suspects.remove(sequence)
        if sequence.suspicion is not None:
            self._running[sequence] = num_losses = _num_losses(sequence)
            self._num_running[num_losses] += 1
        return sequence

    def _end_trial(self, sequence: Sequence) -> None:
        """Notes that a sequence runs no more, or is proven."""
        if (num_losses := self._running.pop(sequence, 0)) and self._num_running[num_losses] == 1:
            del self._num_running[num_losses]
        elif num_losses:
            self._num_running[num_losses] -= 1

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue, if it is there."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        else:
            self._others.discard(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence that waits, in no order."""
        return chain(self._suspects, self._others)

    def set_max_running(self) -> None:
        """Says how many suspects are tried at a time, once all of an epoch wait again."""
        self._have_others_begun = False
        counts = Counter(map(_num_losses, self._suspects))
        for suspect in self._suspects:
            assert suspect.suspicion is not None
            suspect.suspicion.max_running = max(1, counts[_num_losses(suspect)] // PARTS)

    def clear_proven(self) -> None:
        """Clears running suspects that are proven, or ended. Call it before each step."""
        for suspect in [s for s in self._running if s.is_ended or is_proven(s)]:
            suspect.suspicion = None
            suspect.num_clearings += 1
            self._end_trial(suspect)

    def clear_bystanders(self, lost: Collection[Sequence]) -> None:
        """Forgets old suspicions of sequences that wait now and were not in the lost steps."""
        for sequence in set(self).difference(lost):
            if sequence.suspicion is not None and is_repeat_suspect(sequence):
                sequence.suspicion.num_losses = 1
                sequence.suspicion.num_losses_alone = 0
            sequence.num_clearings = 0
        suspects, self._suspects = self._suspects, []
        for sequence in suspects:
            self.push(sequence)


SequenceQueue = WaitingQueue | Quarantine
"""What the scheduler takes waiting sequences from, and gives preempted ones back to."""


def note_loss(sequences: SequenceOf[Sequence], num_run: int) -> list[Sequence]:
    """Notes a loss against the live sequences of the lost steps. Returns the guilty ones.

    Args:
        sequences: Bound or not, with the tokens that they have now.
        num_run: Sequences that the lost steps ran, those among them that have ended meanwhile.
    """
    guilty, only_suspect = [], _only_suspect(sequences, num_run)
    for sequence in sequences:
        suspicion = sequence.suspicion
        if suspicion is None or is_proven(sequence):
            sequence.num_clearings += suspicion is not None
            suspicion = sequence.suspicion = Suspicion()
        suspicion.num_losses += 1
        suspicion.num_losses_alone += sequence is only_suspect
        suspicion.num_output_tokens = sequence.num_output_tokens
        if num_run == 1 and suspicion.num_losses_alone >= MAX_LOSSES_ALONE:
            guilty.append(sequence)
    return guilty


def _only_suspect(sequences: SequenceOf[Sequence], num_run: int) -> Sequence | None:
    """Returns the sequence that was lost alone, or isolated and beside others that were cleared before."""
    if len(sequences) < num_run:  # it may have been one that has ended
        return None
    if num_run == 1:
        return sequences[0]
    suspects = [each for each in sequences if not (each.num_clearings and is_proven(each))]
    return suspects[0] if len(suspects) == 1 and _is_isolated(suspects[0]) else None


def is_proven(sequence: Sequence) -> bool:
    """Whether a sequence has lived through steps such as it was lost in.

    One that was cleared often has to gain more tokens for it.
    """
    if sequence.suspicion is None:
        return True
    num_longer = max(0, sequence.num_clearings - FREE_CLEARINGS)
    num_needed: int = min(PROOF_TOKENS * PROOF_GROWTH**num_longer, MAX_PROOF_TOKENS)
    return sequence.num_output_tokens - sequence.suspicion.num_output_tokens >= num_needed


def is_repeat_suspect(sequence: Sequence) -> bool:
    """Whether it was cleared so often that its proof is longer than usual."""
    return sequence.num_clearings > FREE_CLEARINGS


def is_last_suspect(sequence: Sequence) -> bool:
    """Whether it was lost as the only suspect, so that it is failed when it is lost alone."""
    return sequence.suspicion is not None and sequence.suspicion.num_losses_alone > 0


def _is_isolated(sequence: Sequence) -> bool:
    """Whether it waits apart: it was lost more than once."""
    return sequence.suspicion is not None and sequence.suspicion.num_losses > 1


def _num_losses(suspect: Sequence) -> int:
    assert suspect.suspicion is not None
    return suspect.suspicion.num_losses


def _trial(suspect: Sequence) -> tuple[bool, int]:
    """Sorts suspects: most losses first, whose proof is short, so that all can go on.

    Repeat suspects, whose proof is long, run with the fewest losses first: an executor may be lost
    meanwhile, and then it was not the others.
    """
    is_old, num_losses = is_repeat_suspect(suspect), _num_losses(suspect)
    return is_old, num_losses if is_old else -num_losses


def _trial_order(suspect: Sequence) -> tuple[bool, int, float, int, int]:
    return (*_trial(suspect), *suspect.turn)
