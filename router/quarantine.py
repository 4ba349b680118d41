"""The waiting line as the scheduler sees it: finds whose steps kill executors, and fails no other.

A lost step says only who was in it, and most losses are nobody's fault. So whoever was in one is
suspected until it has gained a few tokens, and while there are suspects they run in parts:

    lost once       an eighth of them at a time, beside everybody else
    lost again      an eighth of those again, and nobody else begins until they are done
    ...             the suspects become fewer with each loss, down to one that runs alone
    lost alone      twice: its step kills executors, and it is not tried again

Those who prove themselves go on running. Nobody is failed for a step that others were in.
"""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain

from router.admission import Admission
from router.request import Request, Sequence, Suspicion

PARTS = 8  # that suspects of one kind are tried in
PROOF_TOKENS = 4  # a step of prompts, and decodes: whichever of them might be fatal
MAX_LOSSES_ALONE = 2


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
        num_losses = max(self._num_losses_on_trial, *map(_num_losses, self._suspects[:1]), 0)
        suspect = self._suspects[0] if self._suspects else None
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
            self._on_trial.remove(suspect)
        self._num_losses_on_trial = max(map(_num_losses, self._on_trial), default=0)


def may_be_tried(suspect: Sequence, num_losses: int, num_on_trial: int) -> bool:
    """Whether the first suspect in line may run now.

    Args:
        num_losses: The most of any suspect, in line or on trial; those are tried first.
        num_on_trial: Suspects that run and have not proven themselves.
    """
    assert suspect.suspicion is not None
    return _num_losses(suspect) == num_losses and num_on_trial < suspect.suspicion.trial_size


def is_proven(sequence: Sequence) -> bool:
    """Whether a sequence has lived through steps such as it was lost in."""
    suspicion = sequence.suspicion
    return suspicion is None or (
        sequence.num_output_tokens - suspicion.num_output_tokens >= PROOF_TOKENS
    )


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


def _turn(suspect: Sequence) -> tuple[int, float, int, int]:
    return (-_num_losses(suspect), *_standing(suspect))
