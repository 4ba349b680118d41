"""Waiting queue that isolates poison requests: the scheduler's view of the waiting queue.

A lost step says only which sequences it ran, and most losses are no request's fault. So each
sequence of a lost step is a suspect until it has gained a few tokens, and suspects run in parts:

    lost once       an eighth of them at a time, beside everybody else
    lost again      an eighth of those again, and nothing else begins until they are done
    ...             the suspects become fewer with each loss, down to one that runs alone
    lost alone      twice: its step kills executors, and it is not tried again

Proven sequences go on running. No sequence is failed for a step that others were in.

Some steps kill only now and then, after more tokens than the proof takes. So a sequence that is
suspected again and again has to gain ever more of them, unless executors are lost without it, too.
"""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain

from router.requests.request import Request, Sequence, Suspicion
from router.requests.waiting_queue import WaitingQueue

PARTS = 8  # that suspects of one kind are tried in
PROOF_TOKENS = 4  # a step of prompts, and decodes: whichever of them might be fatal
MAX_LOSSES_ALONE = 2
FREE_CLEARINGS = 4  # without a longer proof: that many are bad luck
PROOF_GROWTH = 4  # for each further one
MAX_PROOF_TOKENS = 1024


class Quarantine:
    """Suspects in front, a part of them at a time; behind them, the queue of all others.

    Args:
        others: That queue.
    """

    def __init__(self, others: WaitingQueue) -> None:
        self._others = others
        self._suspects: list[Sequence] = []  # that wait, in the order in which they are tried
        self._running: set[Sequence] = set()  # handed out, and not proven yet
        self._running_losses = 0  # the most of any of them
        self._head: Sequence | None = None  # what `peek` returned, if it is a suspect

    def __len__(self) -> int:
        return len(self._others) + len(self._suspects)

    @property
    def num_tokens(self) -> int:
        """Tokens that wait, prompt and output."""
        return self._others.num_tokens + sum(len(s.tokens) for s in self._suspects)

    @property
    def has_room(self) -> bool:
        """Whether a small request would be taken."""
        return self._others.has_room

    def submit(self, request: Request) -> None:
        """Queues a new request. See WaitingQueue."""
        self._others.submit(request)

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence that ran before, here or elsewhere. It is never refused."""
        if sequence.suspicion is None:
            self._others.push(sequence)
            return
        if sequence in self._running:
            self._running.remove(sequence)
            self._running_losses = max(map(_num_losses, self._running), default=0)
        insort(self._suspects, sequence, key=_trial_order)

    def peek(self) -> Sequence | None:
        """Returns the sequence that may begin next."""
        self._head = None
        if not self._suspects and not self._running:
            return self._others.peek()
        suspect = self._suspects[0] if self._suspects else None
        num_losses = self._running_losses or _num_losses(self._suspects[0])
        if suspect and not may_run(suspect, num_losses, len(self._running)):
            suspect = None
        # The order here is the order on the ranks too, or two sequences would preempt each other
        # for ever.
        other = self._others.peek() if num_losses <= 1 else None
        if suspect is None or (other is not None and _priority(other) < _priority(suspect)):
            return other
        self._head = suspect
        return suspect

    def pop(self) -> Sequence:
        """Takes out the sequence that `peek` has just returned."""
        if self._head is None:
            return self._others.pop()
        suspect, self._head = self._suspects.pop(0), None
        self._running.add(suspect)
        self._running_losses = max(self._running_losses, _num_losses(suspect))
        return suspect

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
        counts = Counter(map(_num_losses, self._suspects))
        for suspect in self._suspects:
            assert suspect.suspicion is not None
            suspect.suspicion.max_running = -(-counts[_num_losses(suspect)] // PARTS)

    def clear_proven(self) -> None:
        """Clears running suspects that are proven, or ended. Call it before each step."""
        if not self._running:
            return
        for suspect in [s for s in self._running if s.is_ended or is_proven(s)]:
            suspect.suspicion = None
            suspect.num_clearings += 1
            self._running.remove(suspect)
        self._running_losses = max(map(_num_losses, self._running), default=0)

    def clear_bystanders(self, lost: Collection[Sequence]) -> None:
        """Forgets old suspicions of sequences that wait now and were not in the lost steps."""
        for sequence in set(self).difference(lost):
            if sequence.suspicion is not None and is_repeat_suspect(sequence):
                sequence.suspicion.num_losses = 1
                sequence.suspicion.num_losses_alone = 0
            sequence.num_clearings = 0
        self._suspects.sort(key=_trial_order)


def may_run(suspect: Sequence, num_losses: int, num_running: int) -> bool:
    """Whether the first suspect of the queue may run now.

    Args:
        num_losses: Of the running suspects; if there are none, of the first one.
        num_running: Suspects that run and have not proven themselves.
    """
    assert suspect.suspicion is not None
    return _num_losses(suspect) == num_losses and num_running < suspect.suspicion.max_running


def is_proven(sequence: Sequence) -> bool:
    """Whether a sequence has lived through steps such as it was lost in."""
    suspicion = sequence.suspicion
    if suspicion is None:
        return True
    num_gained = sequence.num_output_tokens - suspicion.num_output_tokens
    return num_gained >= proof_tokens(sequence.num_clearings)


def is_repeat_suspect(sequence: Sequence) -> bool:
    """Whether it was cleared so often that its proof is longer than usual."""
    return sequence.num_clearings > FREE_CLEARINGS


def proof_tokens(num_clearings: int) -> int:
    """Returns how many tokens a suspect has to gain that was cleared so often before."""
    num_longer = max(0, num_clearings - FREE_CLEARINGS)
    tokens: int = PROOF_TOKENS * PROOF_GROWTH**num_longer
    return min(tokens, MAX_PROOF_TOKENS)


def note_loss(sequences: Collection[Sequence], *, is_alone: bool) -> list[Sequence]:
    """Notes a loss against the live sequences of the lost steps. Returns the guilty ones.

    Args:
        sequences: Bound or not, with the tokens that they have now.
        is_alone: Whether the lost steps ran one sequence and nothing else.
    """
    guilty = []
    for sequence in sequences:
        suspicion = sequence.suspicion
        if suspicion is None or is_proven(sequence):
            sequence.num_clearings += suspicion is not None
            suspicion = sequence.suspicion = Suspicion()
        suspicion.num_losses += 1
        suspicion.num_losses_alone += is_alone
        suspicion.num_output_tokens = sequence.num_output_tokens
        if suspicion.num_losses_alone >= MAX_LOSSES_ALONE:
            guilty.append(sequence)
    return guilty


def _num_losses(suspect: Sequence) -> int:
    assert suspect.suspicion is not None
    return suspect.suspicion.num_losses


def _priority(sequence: Sequence) -> tuple[float, int, int]:
    return (*sequence.request.priority_key, sequence.index)


def _trial_order(suspect: Sequence) -> tuple[bool, int, float, int, int]:
    """Sorts suspects: most losses first, whose proof is short, so that all can go on.

    Repeat suspects, whose proof is long, run with the fewest losses first: an executor may be lost
    meanwhile, and then it was not the others.
    """
    is_old, num_losses = is_repeat_suspect(suspect), _num_losses(suspect)
    return (is_old, num_losses if is_old else -num_losses, *_priority(suspect))
