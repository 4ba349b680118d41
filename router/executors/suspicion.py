"""Suspicion of executors that have fallen silent. Pure: times are passed in, by whatever clock.

    sign      sign                            limit              limit + SECOND_SIGN_S
    ──┼─────────┼───────────────────────────────┼──────────────────────┼──────▶
      └── gap ──┘                               │ SUSPECT              │ SILENT: lost
                └── silence, less what this ────┘
                    router was late itself        SILENT: lost, if another member waits for it

A sign of life is a beat, or the answer of a step, in place of which no beat is sent. The limit follows
the gaps between a member's signs: the largest of the last minute counts four times. A gap that ended a
suspicion counts as any other, also where the member was lost by mistake, so the same pause costs an
epoch once a minute and member at most.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from protos.executor.beats import BEAT_S

GAP_FACTOR = 4
GAP_WINDOW_S = 60.0
MAX_LIMIT_S = 3.0  # of what is learnt; an operator may set more
IDLE_LIMIT_S = 2.0  # while no step runs, nobody waits
SECOND_SIGN_S = 0.2  # more, of a member that nobody waits for
MAX_QUIET_S = 60.0  # that a member may announce
MIN_SILENT_AFTER_MS = 2 * round(1000 * BEAT_S)
MIN_GAP_S = MIN_SILENT_AFTER_MS / 1000 / GAP_FACTOR  # that is learnt


class MemberState(Enum):
    """What its beats say of a member."""

    UNATTENDED = "unattended"  # there are none: nothing is known of it
    ATTENTIVE = "attentive"
    SUSPECT = "suspect"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Beat:
    """One beat of a member. See AttendResponse."""

    instance_id: str = ""
    epoch: int = 0
    step_id: int = 0
    waits_for_peers: bool = False
    late_s: float = 0.0
    quiet_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Silence:
    """Why a member counts as lost.

    Attributes:
        name: Whose.
        seconds: Without a sign of life.
        waiting: Members that wait for it.
    """

    name: str
    seconds: float
    waiting: tuple[str, ...]


@dataclass(slots=True)
class _Member:
    time: float  # of the last sign
    beat: Beat
    has_answered: bool = False  # since that beat: what it says is over
    excused_s: float = 0.0  # of the silence since, in which this router was late itself
    state: MemberState = MemberState.ATTENTIVE
    gaps: deque[tuple[float, float]] = field(default_factory=deque)  # (end, length), ever shorter

    @property
    def is_attended(self) -> bool:
        return self.state in (MemberState.ATTENTIVE, MemberState.SUSPECT)

    @property
    def quiet_s(self) -> float:
        return 0.0 if self.has_answered else min(self.beat.quiet_s, MAX_QUIET_S)

    def note_sign(self, now: float) -> MemberState:
        """Notes a sign of life. Returns the state before."""
        before, self.state = self.state, MemberState.ATTENTIVE
        if before is not MemberState.UNATTENDED and not self.quiet_s:
            self._add_gap(now, self.silence_s(now))
        self.time, self.excused_s = now, 0.0
        return before

    def _add_gap(self, now: float, gap_s: float) -> None:
        if not MIN_GAP_S < gap_s <= MAX_LIMIT_S:
            return  # no limit that may be learnt would have spared it, or it is below all limits
        while self.gaps and self.gaps[-1][1] <= gap_s:
            self.gaps.pop()
        self.gaps.append((now, gap_s))

    def largest_gap_s(self, now: float) -> float:
        while self.gaps and self.gaps[0][0] < now - GAP_WINDOW_S:
            self.gaps.popleft()
        return self.gaps[0][1] if self.gaps else 0.0

    def silence_s(self, now: float) -> float:
        return now - self.time - self.excused_s


class Suspicion:
    """Tells members that are silent from those that are late or wait.

    Args:
        silent_after_s: The least limit.

    Attributes:
        outcomes: Suspicions by what came of them: "cleared" by a beat; "lost"; and "false", those of
            the lost that beat again in the same process.
    """

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._members: dict[str, _Member] = {}
        self.outcomes = Counter(dict.fromkeys(("cleared", "lost", "false"), 0))

    def note_beat(self, name: str, now: float, beat: Beat) -> bool:
        """Notes a beat. Returns whether it is news that this member is there."""
        member = self._members.get(name)
        if member is None or member.beat.instance_id != beat.instance_id:
            self._members[name] = _Member(now, beat)
            return True
        before = member.note_sign(now)
        member.beat, member.has_answered = beat, False
        self.outcomes["false"] += before is MemberState.SILENT
        self.outcomes["cleared"] += before is MemberState.SUSPECT
        return before in (MemberState.SILENT, MemberState.UNATTENDED)

    def note_answer(self, name: str, now: float) -> None:
        """Notes the answer of a step, which counts as a beat that says nothing."""
        member = self._members.get(name)
        if member is not None and member.is_attended:
            self.outcomes["cleared"] += member.note_sign(now) is MemberState.SUSPECT
            member.has_answered = True

    def note_quick_answers(self, name: str, last: float) -> None:
        """Notes answers none of which was more than MIN_GAP_S behind the sign before it: they teach nothing.

        Args:
            name: Whose.
            last: When the last of them came, which may have been noted before.
        """
        member = self._members.get(name)
        if member is None or last <= member.time or not member.is_attended:
            return
        if member.state is MemberState.SUSPECT:
            member.state = MemberState.ATTENTIVE
            self.outcomes["cleared"] += 1
        member.time, member.excused_s, member.has_answered = last, 0.0, True

    def note_end(self, name: str) -> None:
        """Notes that there is no way for a member's beats now. One that is silent stays so."""
        member = self._members.get(name)
        if member is not None and member.state is not MemberState.SILENT:
            member.state = MemberState.UNATTENDED

    def forget(self, name: str) -> None:
        """Forgets a member that is none any more."""
        self._members.pop(name, None)

    def excuse(self, late_s: float) -> None:
        """Takes off every silence what this router's own event loop was late."""
        for member in self._members.values():
            member.excused_s += late_s

    def state(self, name: str) -> MemberState:
        """Returns what is known of a member."""
        member = self._members.get(name)
        return MemberState.UNATTENDED if member is None else member.state

    def last_beat(self, name: str) -> tuple[float, Beat] | None:
        """Returns when a member's last sign of life came, and its last beat; None if it never beat."""
        member = self._members.get(name)
        return None if member is None else (member.time, member.beat)

    def limit_s(self, name: str, now: float, *, is_idle: bool) -> float:
        """Returns after how long a silence a member is suspect."""
        member = self._members[name]
        learnt_s = min(GAP_FACTOR * member.largest_gap_s(now), MAX_LIMIT_S)
        idle_s = IDLE_LIMIT_S if is_idle else 0.0
        return max(self._silent_after_s, learnt_s, member.quiet_s, idle_s)

    def has_silence(self, now: float) -> bool:
        """Whether somebody's is as long as the least limit: if nobody's is, there is nothing to judge."""
        for member in self._members.values():
            if now - member.time >= self._silent_after_s and member.is_attended:
                return True
        return False

    def judge(self, now: float, epoch: int, *, is_idle: bool) -> list[Silence]:
        """Returns the members that are lost since the last call.

        Args:
            now: The time.
            epoch: The group's; beats of others tell nothing of who waits in it.
            is_idle: Whether no step is under way.
        """
        limits = {
            name: self.limit_s(name, now, is_idle=is_idle)
            for name, member in self._members.items()
            if member.is_attended
        }
        quiet = {
            name
            for name, limit_s in limits.items()
            if self._members[name].silence_s(now) >= limit_s
        }
        waiting = self._waiting(epoch, besides=quiet)
        lost = []
        for name in quiet:
            member = self._members[name]
            member.state = MemberState.SUSPECT
            if waiting or member.silence_s(now) >= limits[name] + SECOND_SIGN_S:
                member.state = MemberState.SILENT
                self.outcomes["lost"] += 1
                lost.append(Silence(name, now - member.time, waiting))
        return lost

    def _waiting(self, epoch: int, besides: Collection[str]) -> tuple[str, ...]:
        """Returns who says that it waits for others of its epoch."""
        return tuple(
            name
            for name, member in self._members.items()
            if name not in besides
            and member.state is MemberState.ATTENTIVE
            and member.beat.waits_for_peers
            and not member.has_answered
            and member.beat.epoch == epoch
        )
