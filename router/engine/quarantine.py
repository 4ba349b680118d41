"""Waiting queue that isolates poison requests: the scheduler's view of the waiting queue.

A lost step says only who was in it, and most losses are nobody's fault. So whoever was in one is
suspected until it has gained a few tokens, and while there are suspects they run in parts:

    lost once       an eighth of them at a time, beside everybody else
    lost again      an eighth of those again, and nobody else begins until they are done
    ...             the suspects become fewer with each loss, down to one that runs alone
    lost alone      twice: its step kills executors, and it is not tried again

Those who prove themselves go on running. Nobody is failed for a step that others were in.

Some steps kill only now and then, after more tokens than the proof takes. So whoever is suspected
again and again has to gain ever more of them, unless executors are lost without it, too.
"""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain

from router.requests.request import Request, Sequence, Suspicion
from router.requests.waiting_queue import Admission

PARTS = 8  # that suspects of one kind are tried in
PROOF_TOKENS = 4  # a step of prompts, and decodes: whichever of them might be fatal
MAX_LOSSES_ALONE = 2
FREE_ACQUITTALS = 4  # without a longer proof: that many are bad luck
PROOF_GROWTH = 4  # for each further one
MAX_PROOF_TOKENS = 1024


class Quarantine:
    """Suspects in front, a part of them at a time; behind them, the line of everybody else.

    Args:
        admission: That line.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._suspects: list[Sequence] = []  # that wait, in the order in which they are tried
        self._on_trial: set[Sequence] = set()  # handed out, and not proven yet
        self._num_losses_on_trial = 0  # the most of any of them
        self._head: Sequence | None = None  # what `peek` returned, if it is a suspect

    def __len__(self) -> int:
        return len(self._admission) + len(self._suspects)

    @property
    def num_tokens(self) -> int:
        """Tokens that wait, prompt and output."""
        return self._admission.num_tokens + sum(len(s.tokens) for s in self._suspects)

    @property
    def has_room(self) -> bool:
        """Whether a small request would be taken."""
        return self._admission.has_room

    def submit(self, request: Request) -> None:
        """Lines up a new request. See Admission."""
        self._admission.submit(request)

    def push(self, sequence: Sequence) -> None:
        """Lines up a sequence that ran before, here or elsewhere. It is never refused."""
        if sequence.suspicion is None:
            self._admission.push(sequence)
            return
        if sequence in self._on_trial:
            self._on_trial.remove(sequence)
            self._num_losses_on_trial = max(map(_num_losses, self._on_trial), default=0)
        insort(self._suspects, sequence, key=_turn)

    def peek(self) -> Sequence | None:
        """Returns who may begin next."""
        self._head = None
        if not self._suspects and not self._on_trial:
            return self._admission.peek()
        suspect = self._suspects[0] if self._suspects else None
        num_losses = self._num_losses_on_trial or _num_losses(self._suspects[0])
        if suspect and not may_be_tried(suspect, num_losses, len(self._on_trial)):
            suspect = None
        # Whoever stands before another here does so on the ranks too, or they would take each
        # other's place for ever.
        other = self._admission.peek() if num_losses <= 1 else None
        if suspect is None or (other is not None and _standing(other) < _standing(suspect)):
            return other
        self._head = suspect
        return suspect

    def pop(self) -> Sequence:
        """Takes out whom `peek` has just returned."""
        if self._head is None:
            return self._admission.pop()
        suspect, self._head = self._suspects.pop(0), None
        self._on_trial.add(suspect)
        self._num_losses_on_trial = max(self._num_losses_on_trial, _num_losses(suspect))
        return suspect

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out of the line, if it is there."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        else:
            self._admission.discard(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody who waits, in no order."""
        return chain(self._suspects, self._admission)

    def share_out(self) -> None:
        """Says how many suspects are tried at a time, once all of an epoch wait again."""
        counts = Counter(map(_num_losses, self._suspects))
        for suspect in self._suspects:
            assert suspect.suspicion is not None
            suspect.suspicion.trial_size = -(-counts[_num_losses(suspect)] // PARTS)

    def acquit(self) -> None:
        """Lets go of those on trial who have gained tokens, or ended. Call it before each step."""
        if not self._on_trial:
            return
        for suspect in [s for s in self._on_trial if s.is_ended or is_proven(s)]:
            suspect.suspicion = None
            suspect.num_acquittals += 1
            self._on_trial.remove(suspect)
        self._num_losses_on_trial = max(map(_num_losses, self._on_trial), default=0)

    def exonerate(self, lost: Collection[Sequence]) -> None:
        """Forgets old suspicions of those who wait now and were not in the lost steps."""
        for sequence in set(self).difference(lost):
            if sequence.suspicion is not None and is_old_offender(sequence):
                sequence.suspicion.num_losses = 1
                sequence.suspicion.num_losses_alone = 0
            sequence.num_acquittals = 0
        self._suspects.sort(key=_turn)


def may_be_tried(suspect: Sequence, num_losses: int, num_on_trial: int) -> bool:
    """Whether the first suspect in line may run now.

    Args:
        num_losses: Of those on trial; if there are none, of the first in line.
        num_on_trial: Suspects that run and have not proven themselves.
    """
    assert suspect.suspicion is not None
    return _num_losses(suspect) == num_losses and num_on_trial < suspect.suspicion.trial_size


def is_proven(sequence: Sequence) -> bool:
    """Whether a sequence has lived through steps such as it was lost in."""
    suspicion = sequence.suspicion
    if suspicion is None:
        return True
    num_gained = sequence.num_output_tokens - suspicion.num_output_tokens
    return num_gained >= proof_tokens(sequence.num_acquittals)


def is_old_offender(sequence: Sequence) -> bool:
    """Whether it was acquitted so often that its proof is longer than usual."""
    return sequence.num_acquittals > FREE_ACQUITTALS


def proof_tokens(num_acquittals: int) -> int:
    """Returns how many tokens a suspect has to gain that was acquitted so often before."""
    num_longer = max(0, num_acquittals - FREE_ACQUITTALS)
    tokens: int = PROOF_TOKENS * PROOF_GROWTH**num_longer
    return min(tokens, MAX_PROOF_TOKENS)


def accuse(sequences: Collection[Sequence], *, is_alone: bool) -> list[Sequence]:
    """Notes a loss against the live sequences of the lost steps. Returns those that are guilty.

    Args:
        sequences: Bound or not; their tokens are those that they have.
        is_alone: Whether the lost steps ran one sequence and nothing else.
    """
    guilty = []
    for sequence in sequences:
        suspicion = sequence.suspicion
        if suspicion is None or is_proven(sequence):
            sequence.num_acquittals += suspicion is not None
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


def _standing(sequence: Sequence) -> tuple[float, int, int]:
    return (*sequence.request.turn, sequence.index)


def _turn(suspect: Sequence) -> tuple[bool, int, float, int, int]:
    """Sorts suspects: those with most losses first, for a short trial, so that all can go on.

    A long one is for those who have least against them first: an executor may be lost meanwhile, and
    then it was not the others.
    """
    is_old, num_losses = is_old_offender(suspect), _num_losses(suspect)
    return (is_old, num_losses if is_old else -num_losses, *_standing(suspect))
