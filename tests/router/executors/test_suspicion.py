"""If these fail, a stopped executor holds its group up for seconds, or a busy one costs epochs."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from protos.executor.beats import BEAT_S
from router.executors.suspicion import (
    GAP_FACTOR,
    GAP_WINDOW_S,
    IDLE_LIMIT_S,
    MAX_LIMIT_S,
    MAX_QUIET_S,
    SECOND_SIGN_S,
    Beat,
    MemberState,
    Silence,
    Suspicion,
)

LIMIT_S = 0.45
TICK_S = 0.05
BEAT = Beat("first", epoch=1)
SEEDS = range(100)


@dataclass
class World:
    """Virtual time in which members beat and a router looks after them, unless it stands still.

    Attributes:
        stalls: When the router does nothing, as (begin, end); beats wait for it.
        lost: Who was lost, and when.
    """

    stalls: Sequence[tuple[float, float]] = ()
    is_idle: bool = False
    lost: list[tuple[float, Silence]] = field(default_factory=list)
    suspicion: Suspicion = field(default_factory=lambda: Suspicion(LIMIT_S))

    def run(self, until: float, **members: Iterable[float]) -> None:
        """Runs it from 0 s on: members by the times at which they beat."""
        self.run_beats(until, [(t, name, BEAT) for name, times in members.items() for t in times])

    def run_beats(
        self,
        until: float,
        beats: Iterable[tuple[float, str, Beat]],
        answers: Iterable[tuple[float, str]] = (),
    ) -> None:
        events: list[tuple[float, int, Callable[[float], None]]] = []
        for time, name, beat in beats:
            events.append(
                (self._handled(time), 1, lambda now, n=name, b=beat: self._beat(n, now, b))
            )
        for time, name in answers:
            events.append(
                (self._handled(time), 1, lambda now, n=name: self.suspicion.note_answer(n, now))
            )
        planned = 0.0
        while planned < until:
            woken = self._handled(planned)
            late_s = woken - planned
            events.append((woken, 0, lambda now, late_s=late_s: self._tick(now, late_s)))
            planned = woken + TICK_S
        for time, _, happen in sorted(events, key=lambda event: event[:2]):
            if time < until:
                happen(time)

    def _handled(self, time: float) -> float:
        """Returns when the router comes to what happens at a time."""
        return max((end for begin, end in self.stalls if begin <= time < end), default=time)

    def _beat(self, name: str, now: float, beat: Beat) -> None:
        self.suspicion.note_beat(name, now, beat)

    def _tick(self, now: float, late_s: float) -> None:
        self.suspicion.excuse(late_s)
        judged = self.suspicion.judge(now, 1, is_idle=self.is_idle)
        self.lost += [(now, silence) for silence in judged]


def regular(until: float, start: float = 0.0) -> list[float]:
    return [start + i * BEAT_S for i in range(int((until - start) / BEAT_S))]


def jittered(rng: random.Random, until: float, largest_gap_s: float) -> list[float]:
    """Beats whose gaps are the usual one or, now and then, any up to a largest."""
    times = [0.0]
    while times[-1] < until:
        is_late = rng.random() < 0.2
        times.append(times[-1] + (rng.uniform(BEAT_S, largest_gap_s) if is_late else BEAT_S))
    return times


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_is_lost_whose_gaps_stay_below_the_limit(seed: int) -> None:
    rng, world = random.Random(seed), World()
    world.run(60.0, a=jittered(rng, 60.0, LIMIT_S - 0.01), b=jittered(rng, 60.0, LIMIT_S - 0.01))
    assert world.lost == []
    assert set(world.suspicion.outcomes.values()) == {0}


@pytest.mark.parametrize("seed", SEEDS)
def test_who_stops_is_lost_neither_before_the_limit_nor_long_after_it(seed: int) -> None:
    rng, world = random.Random(seed), World()
    largest_gap_s = rng.uniform(BEAT_S, 0.8)
    last = rng.uniform(1.0, 30.0)
    times = [time for time in jittered(rng, last, largest_gap_s) if time <= last]
    world.run(40.0, a=times, b=jittered(rng, 40.0, 0.2))
    gaps = [after - before for before, after in pairwise(times)]
    limit_s = max(LIMIT_S, min(GAP_FACTOR * max(gaps, default=0.0), MAX_LIMIT_S))
    lost_at, silence = next((when, s) for when, s in world.lost if when > times[-1])
    assert silence.name == "a"
    assert limit_s + SECOND_SIGN_S <= lost_at - times[-1] <= limit_s + SECOND_SIGN_S + 2 * TICK_S
    assert silence.seconds == lost_at - times[-1]
    assert world.suspicion.state("a") is MemberState.SILENT
    assert world.suspicion.state("b") is MemberState.ATTENTIVE


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_router_was_late_itself_costs_nobody_an_epoch(seed: int) -> None:
    rng, stalls, end = random.Random(seed), list[tuple[float, float]](), 0.0
    while end < 30.0:
        begin = end + rng.expovariate(1.0)
        end = begin + rng.uniform(0.0, 5.0)
        stalls.append((begin, end))
    world = World(stalls)
    world.run(30.0, a=regular(30.0, rng.uniform(0, BEAT_S)), b=jittered(rng, 30.0, 0.3))
    assert world.lost == []
    assert world.suspicion.outcomes["cleared"] == 0


def test_the_routers_own_delay_is_excused_once() -> None:
    world = World([(1.0, 4.0)])
    world.run(10.0, a=regular(0.99), b=regular(10.0))
    [(when, silence)] = world.lost
    assert silence.name == "a"
    assert 4.0 + LIMIT_S <= when <= 4.0 + LIMIT_S + SECOND_SIGN_S + TICK_S


def waits(times: Iterable[float], name: str, epoch: int = 1) -> list[tuple[float, str, Beat]]:
    """Beats of a member that waits for others once a second has passed."""
    return [(t, name, replace(BEAT, epoch=epoch, waits_for_peers=t > 1.0)) for t in times]


def test_a_member_that_another_one_waits_for_is_lost_at_once() -> None:
    world = World()
    stopped = [(time, "a", BEAT) for time in regular(1.01)]
    world.run_beats(5.0, [*stopped, *waits(regular(5.0), "b")])
    [(when, silence)] = world.lost
    assert (silence.name, silence.waiting) == ("a", ("b",))
    last = stopped[-1][0]
    assert LIMIT_S <= when - last < LIMIT_S + 2 * TICK_S


@pytest.mark.parametrize("epoch", [0, 2])
def test_one_that_waits_in_another_epoch_is_no_second_sign(epoch: int) -> None:
    world = World()
    stopped = [(time, "a", BEAT) for time in regular(1.01)]
    world.run_beats(5.0, [*stopped, *waits(regular(5.0), "b", epoch)])
    [(when, silence)] = world.lost
    assert silence.waiting == ()
    assert when - stopped[-1][0] >= LIMIT_S + SECOND_SIGN_S


def test_a_member_that_answers_steps_need_not_beat_and_is_lost_as_soon_once_it_does_not() -> None:
    world = World()
    answers = [(time, "a") for time in np.arange(0.1, 10.0, 0.02).tolist()]
    world.run_beats(20.0, [(0.0, "a", BEAT), *((t, "b", BEAT) for t in regular(20.0))], answers)
    [(when, silence)] = world.lost
    assert LIMIT_S + SECOND_SIGN_S <= when - answers[-1][0] <= LIMIT_S + SECOND_SIGN_S + 2 * TICK_S
    assert silence.seconds == when - answers[-1][0]


@pytest.mark.parametrize("kinds", ["ba", "bab", "baa"])
def test_gaps_between_answers_and_beats_are_learnt_as_those_between_beats(kinds: str) -> None:
    suspicion, now = Suspicion(LIMIT_S), 0.0
    for kind, gap_s in zip(kinds, [*[0.1] * (len(kinds) - 2), 0.3, 0.0], strict=True):
        if kind == "b":
            suspicion.note_beat("a", now, BEAT)
        else:
            suspicion.note_answer("a", now)
        now += gap_s
    assert suspicion.limit_s("a", now, is_idle=False) == pytest.approx(GAP_FACTOR * 0.3)


def test_an_answer_clears_a_suspicion_and_ends_what_the_last_beat_said() -> None:
    suspicion = Suspicion(LIMIT_S)
    for name in ("a", "b"):
        suspicion.note_beat(name, 0.0, replace(BEAT, waits_for_peers=True, quiet_s=1.0))
    suspicion.judge(1.1, 1, is_idle=False)
    assert suspicion.state("a") is MemberState.SUSPECT
    suspicion.note_answer("a", 1.1)
    assert suspicion.outcomes == {"cleared": 1, "lost": 0, "false": 0}
    assert suspicion.limit_s("a", 1.1, is_idle=False) == LIMIT_S  # nor is an announced gap learnt
    assert suspicion.judge(1.15, 1, is_idle=False) == []  # for want of a second sign
    assert suspicion.state("b") is MemberState.SUSPECT


def test_quick_answers_are_signs_that_teach_nothing_and_undo_none_that_came_later() -> None:
    suspicion = Suspicion(LIMIT_S)
    suspicion.note_beat("a", 0.0, replace(BEAT, waits_for_peers=True))
    suspicion.note_beat("b", 0.0, BEAT)
    suspicion.note_quick_answers("a", 0.4)  # since the last look
    assert suspicion.limit_s("a", 0.4, is_idle=False) == LIMIT_S
    suspicion.note_quick_answers("b", -0.1)
    suspicion.judge(0.46, 1, is_idle=False)
    assert suspicion.state("a") is MemberState.ATTENTIVE
    assert suspicion.state("b") is MemberState.SUSPECT, "nobody waits for it any more"
    suspicion.note_quick_answers("b", 0.46)
    assert suspicion.state("b") is MemberState.ATTENTIVE
    assert suspicion.outcomes == {"cleared": 1, "lost": 0, "false": 0}
    assert suspicion.judge(0.84, 1, is_idle=False) == []


def test_a_beat_clears_a_suspicion() -> None:
    suspicion = Suspicion(LIMIT_S)
    suspicion.note_beat("a", 0.0, BEAT)
    suspicion.judge(LIMIT_S, 1, is_idle=False)
    assert suspicion.state("a") is MemberState.SUSPECT
    assert not suspicion.note_beat("a", LIMIT_S, BEAT)
    assert suspicion.state("a") is MemberState.ATTENTIVE
    assert suspicion.outcomes == {"cleared": 1, "lost": 0, "false": 0}


@pytest.mark.parametrize("time", [0.3, LIMIT_S, 2.0])
def test_there_is_nothing_to_judge_before_the_least_limit(time: float) -> None:
    suspicion = Suspicion(LIMIT_S)
    suspicion.note_beat("a", 0.0, BEAT)
    suspicion.note_beat("b", 0.0, BEAT)
    suspicion.note_end("b")
    assert suspicion.has_silence(time) == (time >= LIMIT_S)
    suspicion.note_end("a")
    assert not suspicion.has_silence(time)


@pytest.mark.parametrize("note", [Suspicion.note_answer, Suspicion.note_quick_answers])
def test_answers_are_no_signs_where_there_is_no_way_for_beats(
    note: Callable[[Suspicion, str, float], None],
) -> None:
    suspicion = Suspicion(LIMIT_S)
    note(suspicion, "a", 0.0)
    assert suspicion.last_beat("a") is None
    suspicion.note_beat("a", 0.0, BEAT)
    suspicion.note_end("a")
    note(suspicion, "a", 0.1)
    assert suspicion.state("a") is MemberState.UNATTENDED


def test_two_that_stop_at_once_are_both_lost() -> None:
    world = World()
    world.run(5.0, a=regular(1.01), b=regular(1.01), c=regular(5.0))
    assert {silence.name for _, silence in world.lost} == {"a", "b"}


def test_a_group_with_nothing_to_do_is_patient() -> None:
    world = World(is_idle=True)
    world.run(10.0, a=[0.0])
    [(when, _)] = world.lost
    assert IDLE_LIMIT_S + SECOND_SIGN_S <= when <= IDLE_LIMIT_S + SECOND_SIGN_S + 2 * TICK_S


@pytest.mark.parametrize(("announced_s", "spared_s"), [(8.0, 8.0), (1e6, MAX_QUIET_S)])
def test_an_announced_pause_is_granted_up_to_a_limit_and_not_learnt(
    announced_s: float, spared_s: float
) -> None:
    world = World()
    quiet = replace(BEAT, quiet_s=announced_s)
    world.run_beats(spared_s + 2, [(0.0, "a", quiet)])
    [(when, _)] = world.lost
    assert spared_s + SECOND_SIGN_S <= when <= spared_s + SECOND_SIGN_S + 2 * TICK_S

    suspicion = Suspicion(LIMIT_S)
    suspicion.note_beat("a", 0.0, quiet)
    suspicion.note_beat("a", 2.0, BEAT)
    assert suspicion.limit_s("a", 2.0, is_idle=False) == LIMIT_S


def test_a_false_alarm_is_counted_and_the_same_pause_spared_for_a_minute() -> None:
    pause_s, world = 0.7, World()
    pauses = [5.0, 15.0, 30.0, 70.0]

    def is_paused(time: float) -> bool:
        return any(begin < time < begin + pause_s for begin in pauses)

    times = [time for time in regular(80.0) if not is_paused(time)]
    world.run(80.0, a=times)
    assert len(world.lost) == 1
    assert world.suspicion.outcomes == {"cleared": 0, "lost": 1, "false": 1}
    now = times[-1] + GAP_WINDOW_S + 1
    assert world.suspicion.limit_s("a", now, is_idle=False) == LIMIT_S


def test_a_pause_that_no_limit_would_spare_is_not_learnt() -> None:
    suspicion = Suspicion(LIMIT_S)
    suspicion.note_beat("a", 0.0, BEAT)
    suspicion.note_beat("a", MAX_LIMIT_S + 0.1, BEAT)
    assert suspicion.limit_s("a", MAX_LIMIT_S + 0.1, is_idle=False) == LIMIT_S


def test_another_process_at_the_address_is_no_false_alarm_and_inherits_nothing() -> None:
    world = World()
    world.run(3.0, a=[0.0, 0.4])
    assert world.suspicion.state("a") is MemberState.SILENT
    assert world.suspicion.note_beat("a", 3.0, replace(BEAT, instance_id="second"))
    assert world.suspicion.outcomes["false"] == 0
    assert world.suspicion.limit_s("a", 3.0, is_idle=False) == LIMIT_S


def test_a_member_without_a_way_for_beats_is_left_to_pings_and_deadlines() -> None:
    world = World()
    world.run(1.0, a=regular(1.0))
    world.suspicion.note_end("a")
    back = 1.0 + MAX_LIMIT_S - 0.1  # so late as a gap may be to be learnt, if this were one
    assert world.suspicion.judge(back, 1, is_idle=False) == []
    assert world.suspicion.state("a") is MemberState.UNATTENDED
    assert world.suspicion.note_beat("a", back, BEAT)
    assert world.suspicion.limit_s("a", back, is_idle=False) == LIMIT_S
    world.suspicion.forget("a")
    assert world.suspicion.last_beat("a") is None


def test_a_silent_member_stays_so_until_it_beats() -> None:
    world = World()
    world.run(5.0, a=regular(1.0))
    world.suspicion.note_end("a")
    assert world.suspicion.state("a") is MemberState.SILENT
    assert world.suspicion.note_beat("a", 6.0, BEAT)
    assert not world.suspicion.note_beat("a", 6.1, BEAT)
    assert world.suspicion.state("a") is MemberState.ATTENTIVE
