"""Elastic groups: which executors form one, where its experts go, and when it grows. Pure: times are passed in.

    SERVING(W) ── loss ──▶ choose ──┬─ newcomers that load little ───────────▶ form(W)      replace
       ▲                            ├─ the others are min or more ───────────▶ form(W - 1)  shrink
       │                            ├─ newcomers, whatever they load ────────▶ form         replace
       │                            └─ fewer than min ───────────────────────▶ wait
       └── form, at a border between steps ◀── review: staged, there for long enough, not held off   grow

A shrink is never held back, and growing is: who is back from a crash may crash again, and each change costs
callers a pause.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import zip_longest

from protos.executor.placement import GHOST, SlotMap, num_slots_for, place_experts
from protos.settings import above, at_least, setting
from router.errors import ExecutorLost, GroupMismatch

MAX_JOIN_BYTES = 256 << 20  # that a newcomer may load while callers wait: about 0.1 s of page cache
LOSS_WINDOW_S = 3600.0  # in which a lost place counts, and one leave as planned does not
MAX_HOLD_OFF = 60  # times grow_after_s: half an hour
GROW_INTERVAL = 2  # times grow_after_s: a minute
MAX_FAILURES = 2  # of formings, before somebody is held off for it
TAKEOVER_WAIT_S = 2.0  # for executors that were in the group, after this router's start
MAX_TRIAL_WAIT_S = 60.0  # for which suspects wait for an executor that may die of them


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """Settings of groups that may shrink and grow."""

    first_form_wait_s: float = setting(60.0, at_least(0))
    """Seconds for which a group with min= waits for size= executors before it first forms with fewer."""
    grow_after_s: float = setting(30.0, above(0))
    """Seconds for which an executor has to be there before a group that lacks one takes it in, which
    costs callers a short pause. A group grows once in twice so long, and an executor that lost its place k
    times in an hour is held off for 2^k times so long, 60 times at most."""
    stage_bytes_per_s: int = setting(0, at_least(0))
    """Bytes of experts that a spare loads in a second at most, on average, while its group serves, so that it
    leaves disk and memory to others. 0: as fast as it can."""


@dataclass(frozen=True, slots=True)
class Strength:
    """How many executors a group has.

    Attributes:
        size: As soon as they are there; any more are spares.
        least: With how many it still serves.
    """

    size: int
    least: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor that may be in a group, as it described itself.

    Attributes:
        attn_tp_rank: The only one that it can have; below `attn_tp_size`.
        dp_sizes: Of the groups that it can be in, from the least to the greatest.
        num_experts: Of a layer.
        max_slots: Its slots for them.
        held: [max_slots] the expert in each, or GHOST.
        expert_bytes: Of one expert.
        max_len: Tokens of the longest sequence that its KV has room for.
        agreement: What the executors of a group must have alike.
        fingerprint: Of their model, likewise; requests that were taken can end with no other.
        num_placed: Executors of the group that it was placed in last; 0: it never was.
    """

    address: str
    instance_id: str
    attn_tp_rank: int = 0
    attn_tp_size: int = 1
    dp_sizes: range = range(1, 1 << 12)
    num_experts: int = 0
    max_slots: int = 0
    held: tuple[int, ...] = ()
    expert_bytes: int = 0
    max_len: int = 0
    agreement: bytes = b""
    fingerprint: str = ""
    num_placed: int = 0

    @property
    def name(self) -> tuple[str, str]:
        """Which process it is, and where."""
        return self.address, self.instance_id


Team = tuple[Candidate, ...]  # the executors of one DP rank, by attn_tp_rank


class Change(StrEnum):
    """How a group comes out of a forming, beside the one before."""

    FIRST = "first"
    REJOIN = "rejoin"  # the same addresses
    REPLACE = "replace"  # as many, and others among them
    SHRINK = "shrink"
    GROW = "grow"


class SpareState(StrEnum):
    """What a spare is good for."""

    COLD = "cold"  # it would have to load experts
    STAGED = "staged"
    HELD_OFF = "held_off"  # it lost its place or could not join, and is not taken back yet
    UNFIT = "unfit"  # it is not like the group's executors, or has no room for what they have


@dataclass(frozen=True, slots=True)
class Formation:
    """A group that is to be formed.

    Attributes:
        teams: [dp_size] the executors of each DP rank.
        slots: [dp_size * attn_tp_size] experts of each executor, in the order of ranks.
    """

    change: Change
    teams: tuple[Team, ...]
    slots: SlotMap

    @property
    def members(self) -> tuple[Candidate, ...]:
        """In the order of ranks."""
        return tuple(member for team in self.teams for member in team)

    def missing(self, member: Candidate) -> int:
        """Returns how many experts a member has to load for its place."""
        row = self.slots[self.members.index(member)]
        held = zip_longest(member.held[: len(row)], row, fillvalue=GHOST)
        return sum(expert not in (GHOST, own) for own, expert in held)

    def num_bytes(self, member: Candidate) -> int:
        """Returns what these take."""
        return self.missing(member) * member.expert_bytes

    def can_join(self, member: Candidate) -> bool:
        """Whether a member would keep nobody waiting for its experts."""
        return self.num_bytes(member) <= MAX_JOIN_BYTES


@dataclass(frozen=True, slots=True)
class Review:
    """What is to be done beside the steps of a group.

    Attributes:
        grows: Whether the group is to be formed anew, as soon as no step runs.
        stages: Spares, each with the formation for which it should load its experts now.
        states: By address of each spare.
    """

    grows: bool = False
    stages: tuple[tuple[Candidate, Formation], ...] = ()
    states: Mapping[str, SpareState] = field(default_factory=dict)


@dataclass(slots=True)
class _History:
    """What is remembered of an address."""

    instance_id: str = ""
    since: float = 0.0  # there without a break; only if it is there
    is_there: bool = False
    losses: deque[float] = field(default_factory=deque)  # when it lost its place
    left: float = float("-inf")  # when it was last told to stop, and that was no loss


class ElasticPolicy:
    """Chooses a group's members.

    Args:
        strength: How many.
        settings: What the operator said.
        now: When the router began to look for them.

    Attributes:
        max_len: Tokens of the longest sequence that the first epoch had room for, another router's where
            one drove the group, which later ones have too; 0 before it.
    """

    def __init__(self, strength: Strength, settings: ElasticSettings, now: float) -> None:
        self._strength = strength
        self._settings = settings
        self._begun = now
        self.max_len = 0
        self._fingerprint = ""  # of the model of the first epoch
        self._teams: tuple[Team, ...] = ()  # of the last epoch
        self._held: dict[str, float] = {}  # when each was last seen to be another's
        self._lost_names: set[tuple[str, str]] = set()  # of them, whose place is lost already
        self._history: dict[str, _History] = {}
        self._grown = float("-inf")
        self._weak_since: float | None = None
        self._num_failures = 0  # of formings since the last epoch, or since somebody was blamed
        self._acquitted: tuple[str, list[str]] = ("", [])  # who could not join, and who was blamed

    @property
    def sizes(self) -> tuple[int, int]:
        """DP ranks that the group should have, and the least; of one executor each before the first epoch."""
        return self._sizes(self._members())

    def choose(self, now: float, candidates: Sequence[Candidate]) -> Formation:
        """Returns which group to form.

        Args:
            now: The time.
            candidates: All executors that answer.

        Raises:
            ExecutorLost: They are too few. Says how many are there.
            GroupMismatch: So many cannot be one group. Says what they have room for.
        """
        self._note(now, candidates)
        answering, candidates = candidates, self._alike(candidates)
        self._check_spares(now, candidates)
        size, _ = self._sizes(candidates)
        staying, newcomers = self._teams_of(candidates)
        staying = staying[:size]
        needed = self._needed(now, candidates)
        least = min(-(-needed // _num_peers(candidates)), size)
        free = [team for team in newcomers if not self._is_held_off(team, now)]
        plans = self._plans(staying, free, self._best(staying, free, size), least)
        alone = [plan for plan in plans if len(plan.teams) == len(staying)]
        spared = max((plan.num_bytes(each) for plan in alone for each in plan.members), default=0)
        for plan in plans:
            joining = (each for team in plan.teams if team in free for each in team)
            if all(plan.can_join(each) or plan.num_bytes(each) < spared for each in joining):
                return plan
        last = sorted(  # or the same would be tried for ever, where one of them is broken
            newcomers,
            key=lambda team: (
                not self._have_room(team),
                max(now, *(self.held_off_until(member.address, now) for member in team)),
            ),
        )[: size - len(staying)]
        plans = plans or self._plans(staying, last, last, least)
        if plans:
            return plans[0]
        everybody = [*staying, *last]
        if len(everybody) >= least:
            raise GroupMismatch(_room_of(everybody))
        is_early = needed > self._strength.least
        patience = f" in the first {self._settings.first_form_wait_s:g} s" if is_early else ""
        raise ExecutorLost(
            f"{len(candidates)} of the group's executors answer, and it takes {needed} to form it{patience}"
            + self._short_of_kv(answering)
        )

    def _check_spares(self, now: float, candidates: Sequence[Candidate]) -> None:
        """Checks that these are not spares alone of a group that another router may drive still.

        One that stands by, and loses the members from sight, would take its driver's spares from it.

        Raises:
            ExecutorLost: They are. Says for how long.
        """
        held = self._held_lately(now)
        if not candidates or not held:
            return
        if not any(each.num_placed or each.address in held for each in candidates):
            wait_s = max(held.values()) + self._settings.first_form_wait_s - now
            raise ExecutorLost(
                f"only spares answer, {len(candidates)}, and no executor of the group that another router drove: "
                f"one is waited for, for {wait_s:.0f} s"
            )

    def _needed(self, now: float, candidates: Sequence[Candidate]) -> int:
        """Returns how many executors it takes to form the group now.

        Before the first epoch those count that another router, or this one before it was started again,
        had in it: they are there already, or lost.
        """
        waited_s = now - self._begun
        if self._teams or waited_s >= self._settings.first_form_wait_s:
            return self._strength.least
        num_placed = max((candidate.num_placed for candidate in candidates), default=0)
        if num_placed and waited_s >= TAKEOVER_WAIT_S:
            return self._strength.least
        return max(
            min(num_placed or self._strength.size, self._strength.size), self._strength.least
        )

    def note_held(self, now: float, addresses: Iterable[str]) -> None:
        """Notes that another router drives these executors."""
        self._held = self._held_lately(now) | dict.fromkeys(addresses, now)

    def _held_lately(self, now: float) -> dict[str, float]:
        since = now - self._settings.first_form_wait_s
        return {address: time for address, time in self._held.items() if time > since}

    def note_formed(self, now: float, formation: Formation) -> None:
        """Notes that a group of `choose` has formed; its members hold what it says."""
        if formation.change is Change.GROW:
            self._grown = now
        held = dict(zip((each.name for each in formation.members), formation.slots, strict=True))
        self._teams = tuple(
            tuple(
                replace(each, held=held[each.name] + each.held[len(held[each.name]) :])
                for each in team
            )
            for team in formation.teams
        )
        self._fingerprint = self._fingerprint or formation.members[0].fingerprint
        self.max_len = self.max_len or min(each.max_len for each in formation.members)
        self._lost_names.clear()
        self._num_failures, self._acquitted = 0, ("", [])
        self._held.clear()

    def note_growing(self, now: float) -> None:
        """Notes that an epoch is ended to grow, which is not done again soon, whatever comes of it."""
        self._grown = now

    def note_not_formed(self, now: float, formation: Formation, failed: str = "") -> list[str]:
        """Notes that a group of `choose` did not form. Returns who is held off for it, the second time.

        Newcomers to a group are to blame, but a member that cannot join with others either is itself. Of
        a group that never formed it is who could not join, or the others if that one is held off for it
        already: a broken one may be what others fail for.

        Args:
            now: The time.
            formation: The group.
            failed: The address of the member that could not join; "": all could, or nobody knows.
        """
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return []
        self._num_failures = 0
        blamed = self._blamed(now, [member.address for member in formation.members], failed)
        for address in blamed:
            self.note_failed(now, address)
        return blamed

    def _blamed(self, now: float, members: Sequence[str], failed: str) -> list[str]:
        """Returns the addresses of those of a forming's members that are to blame for its failure."""
        known = {member.address for member in self._members()}
        newcomers = [address for address in members if address not in known]
        itself = [failed] * (failed in members)
        if known and newcomers:
            before, self._acquitted = self._acquitted, (failed, newcomers)
            is_again = failed in known and failed == before[0] and newcomers != before[1]
            return itself if is_again else newcomers
        if itself and self.held_off_until(failed, now) > now:
            return [each for each in members if self.held_off_until(each, now) <= now] or itself
        return itself

    def note_failed(self, now: float, address: str) -> None:
        """Notes that an executor could not join, which counts as a lost place: it stays no member."""
        self._history.setdefault(address, _History()).losses.append(now)
        self._teams = tuple(
            team for team in self._teams if address not in (member.address for member in team)
        )

    def note_left(self, now: float, address: str) -> None:
        """Notes that a member was told to stop: as in an update, so the first time in an hour it is no loss."""
        known = self._history.setdefault(address, _History())
        if now - known.left >= LOSS_WINDOW_S:
            known.left = now
            self._lost_names |= {each.name for each in self._members() if each.address == address}

    def review(self, now: float, spares: Sequence[Candidate]) -> Review:
        """Returns what to do while the group serves.

        Args:
            now: The time.
            spares: Executors that answer and are not in it.
        """
        self._note(now, [*self._members(), *spares])
        fit = [spare for spare in spares if self._is_fit(spare)]
        _, newcomers = self._teams_of([*self._members(), *fit])
        size, _ = self.sizes
        room = max(size - len(self._teams), 0)
        known = [team for team in newcomers if self._is_known(team, now)]
        joining = (known or newcomers)[:room]
        plan = self._plan([*self._teams, *joining]) if joining else None
        stages: list[tuple[Candidate, Formation]] = []
        if plan is not None:
            stages += [(each, plan) for team in joining for each in team if plan.missing(each)]
        is_time = now - self._grown >= GROW_INTERVAL * self._settings.grow_after_s
        late = [member for member, _ in stages if plan is not None and not plan.can_join(member)]
        grows = plan is not None and joining == known[:room] and is_time and not late
        stages += self._replacements([team for team in newcomers if team not in joining])
        ready = {member for team in newcomers for member in team} - {each for each, _ in stages}
        states = {
            spare.address: SpareState.UNFIT
            if spare not in fit
            else SpareState.HELD_OFF
            if self.held_off_until(spare.address, now) > now
            else SpareState.STAGED
            if spare in ready
            else SpareState.COLD
            for spare in spares
        }
        if self._is_whole(list(states.values()).count(SpareState.STAGED)):
            self._weak_since = None
        return Review(grows, tuple(stages), states)

    def held_off_until(self, address: str, now: float) -> float:
        """Returns until when the group does not grow by an executor for its earlier losses; 0: it may."""
        known = self._history.get(address)
        if known is None:
            return 0.0
        while known.losses and known.losses[0] <= now - LOSS_WINDOW_S:
            known.losses.popleft()
        if not known.losses:
            return 0.0
        times = min(1 << len(known.losses), MAX_HOLD_OFF)
        return known.losses[-1] + times * self._settings.grow_after_s

    def may_try_suspects(self, now: float, num_spares: int) -> bool:
        """Whether requests that may kill an executor run: with one to spare, or after they waited.

        One that has to load first is none to spare: the others would wait for it.

        Args:
            now: The time.
            num_spares: Executors that are not in the group and hold what they need for it.
        """
        if self._is_whole(num_spares):
            self._weak_since = None
            return True
        if self._weak_since is None:
            self._weak_since = now
        return now - self._weak_since >= MAX_TRIAL_WAIT_S

    def _is_whole(self, num_spares: int) -> bool:
        return len(self._members()) + num_spares >= self._strength.size

    # ---- who is there

    def _members(self) -> list[Candidate]:
        return [member for team in self._teams for member in team]

    def _note(self, now: float, candidates: Iterable[Candidate]) -> None:
        """Notes who is there, since when, and who lost a place."""
        there = {candidate.address: candidate for candidate in candidates}
        for address, known in self._history.items():
            known.is_there &= address in there
        for address, candidate in there.items():
            known = self._history.setdefault(address, _History())
            if not known.is_there or known.instance_id != candidate.instance_id:
                known.instance_id, known.since, known.is_there = candidate.instance_id, now, True
        names = {candidate.name for candidate in there.values()}
        for member in self._members():
            if member.name not in names | self._lost_names:
                self._lost_names.add(member.name)
                self._history[member.address].losses.append(now)
        for address, known in list(self._history.items()):
            self.held_off_until(address, now)  # forgets old losses
            is_forgotten = not known.losses and now - known.left >= LOSS_WINDOW_S
            if is_forgotten and not known.is_there:
                del self._history[address]

    def _is_held_off(self, team: Team, now: float) -> bool:
        return any(self.held_off_until(member.address, now) > now for member in team)

    def _is_known(self, team: Team, now: float) -> bool:
        """Whether a team has been there for so long that the group may grow by it."""
        since = max(self._history[member.address].since for member in team)
        return now - since >= self._settings.grow_after_s and not self._is_held_off(team, now)

    def _sizes(self, candidates: Sequence[Candidate]) -> tuple[int, int]:
        """Returns the DP ranks that the group should have, and the least."""
        peers = _num_peers(candidates)
        return self._strength.size // peers, -(-self._strength.least // peers)

    def _alike(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns those with room for its sequences that agree with the last epoch's members, or with most.

        Those of another model come into it only where those of its own are fewer than the least. While
        executors are replaced by others with new settings, so, the group goes on with the old ones until
        they are fewer than the least.
        """
        candidates = [each for each in candidates if each.max_len >= self.max_len]
        own = [each for each in candidates if each.fingerprint == self._fingerprint]
        candidates = own if len(own) >= self._strength.least else candidates
        counts = Counter(candidate.agreement for candidate in candidates)
        if not counts:
            return []
        [(chosen, _)] = counts.most_common(1)
        members = self._members()
        if members and counts[members[0].agreement] >= self._strength.least:
            chosen = members[0].agreement
        return [candidate for candidate in candidates if candidate.agreement == chosen]

    def _has_room(self, candidate: Candidate) -> bool:
        """Whether an executor could be in the group when that is as large as it should be."""
        size = max(self._strength.size // candidate.attn_tp_size, 1)
        num_slots = num_slots_for(candidate.num_experts, size * candidate.attn_tp_size)
        return size in candidate.dp_sizes and num_slots <= candidate.max_slots

    def _have_room(self, team: Team) -> bool:
        return all(map(self._has_room, team))

    def _is_fit(self, spare: Candidate) -> bool:
        """Whether a spare could be beside the members."""
        is_alike = spare.agreement == self._members()[0].agreement
        return is_alike and spare.max_len >= self.max_len and self._has_room(spare)

    def _short_of_kv(self, candidates: Sequence[Candidate]) -> str:
        """Says which executors have less room for KV than the group began with, if any have."""
        small = [each for each in candidates if each.max_len < self.max_len]
        if not small:
            return ""
        names = ", ".join(f"{each.address} for {each.max_len}" for each in small)
        return (
            f"; others have too little KV, for sequences of {self.max_len} tokens as the group has "
            f"served them: {names}; start them with as many blocks"
        )

    # ---- who stands where

    def _teams_of(self, candidates: Sequence[Candidate]) -> tuple[list[Team], list[Team]]:
        """Returns the DP ranks whose executors all stay, in their order, and those that could be new.

        Executors whose peers are gone are new ones. Those without room for the group's size come last of
        these; to a router that has no members yet, those come first that were placed before; then addresses
        that had a place, then who has been there for longest, then in the order given.
        """
        there = {candidate.name: candidate for candidate in candidates}
        staying = [
            tuple(there.pop(member.name) for member in team)
            for team in self._teams
            if all(member.name in there for member in team)
        ]
        ranks = {member.address: rank for rank, member in enumerate(self._members())}

        def preference(candidate: Candidate) -> tuple[bool, bool, int, float]:
            is_new = bool(ranks) or not candidate.num_placed
            rank = ranks.get(candidate.address, len(ranks))
            since = self._history[candidate.address].since
            return not self._has_room(candidate), is_new, rank, since

        others = sorted(there.values(), key=preference)
        if not others:
            return staying, []
        by_rank = [
            [each for each in others if each.attn_tp_rank == rank]
            for rank in range(others[0].attn_tp_size)
        ]
        return staying, list(zip(*by_rank, strict=False))

    def _best(self, staying: Sequence[Team], free: Sequence[Team], size: int) -> list[Team]:
        """Returns as many others as the DP ranks that stay lack, in the order of their use.

        They are chosen one after the other, so that few experts are loaded: of those with room for the
        group's size, the first that holds most experts which none before it holds; then the rest likewise.
        """

        def held(team: Team) -> set[int]:
            num_slots = num_slots_for(team[0].num_experts, size * len(team))
            return {expert for member in team for expert in member.held[:num_slots]} - {GHOST}

        def preference(team: Team) -> tuple[bool, int]:
            return self._have_room(team), len(held(team) - there)

        chosen, left = list[Team](), list(free)
        there = set[int]().union(*map(held, staying))
        while left and len(staying) + len(chosen) < size:
            chosen.append(best := max(left, key=preference))
            left.remove(best)
            there |= held(best)
        return chosen

    def _plans(
        self, staying: Sequence[Team], free: Sequence[Team], chosen: Sequence[Team], least: int
    ) -> list[Formation]:
        """Returns the groups of at least so many DP ranks: of all that are chosen, then of ever fewer.

        Those are left out first for which callers would wait, and then the last ones. Without room for the
        group's size none is in others than the first.

        Args:
            staying: In all of these groups.
            free: Others, in the order in which they stand.
            chosen: Those of them that join.
            least: DP ranks.
        """
        plans: list[Formation] = []
        joining = list(chosen)
        while True:
            plan = self._plan([*staying, *(team for team in free if team in joining)])
            have_room = len(joining) == len(chosen) or all(map(self._have_room, joining))
            if plan is not None and have_room and len(plan.teams) >= least:
                plans.append(plan)
            if not joining:
                return plans
            late = [team for team in joining if not self._is_quick(team, plan)]
            joining.remove((late or joining)[-1])

    def _is_quick(self, team: Team, plan: Formation | None) -> bool:
        """Whether a team keeps nobody from joining a group, nor waiting for its experts."""
        return self._have_room(team) and (plan is None or all(map(plan.can_join, team)))

    def _replacements(self, newcomers: Sequence[Team]) -> Iterable[tuple[Candidate, Formation]]:
        """Yields the spares that could take the place of no member yet, and whose they should."""
        for number, team in enumerate(newcomers):
            plans = [self._replacing(index, team) for index in range(len(self._teams))]
            if any(plan is not None and not any(map(plan.missing, team)) for plan in plans):
                continue
            plan = plans[number % len(plans)]
            if plan is not None:
                yield from ((member, plan) for member in team if plan.missing(member))

    def _replacing(self, index: int, team: Team) -> Formation | None:
        """Returns the group with a team in the place of one of its DP ranks."""
        return self._plan([*self._teams[:index], *self._teams[index + 1 :], team])

    def _plan(self, teams: Sequence[Team]) -> Formation | None:
        """Returns the group of these DP ranks, in an order that is theirs; None if it cannot be.

        Those that had a rank keep their order, and newcomers come last, but where one has the address
        of a member that is gone.
        """
        members = [member for team in teams for member in team]
        if not members or not all(len(teams) in member.dp_sizes for member in members):
            return None
        num_experts = members[0].num_experts
        num_slots = num_slots_for(num_experts, len(members))
        if num_slots > min(member.max_slots for member in members):
            return None
        old = {team[0].address: rank for rank, team in enumerate(self._teams)}
        ordered = tuple(sorted(teams, key=lambda team: old.get(team[0].address, len(old))))
        slots = place_experts(
            {member: member.held for member in members},
            [member for team in ordered for member in team],
            num_slots=num_slots,
            num_experts=num_experts,
        )
        return Formation(self._change_to(ordered), ordered, slots)

    def _change_to(self, teams: Sequence[Team]) -> Change:
        if not self._teams:
            return Change.FIRST
        if len(teams) != len(self._teams):
            return Change.GROW if len(teams) > len(self._teams) else Change.SHRINK
        before = {member.address for member in self._members()}
        now = {member.address for team in teams for member in team}
        return Change.REJOIN if before == now else Change.REPLACE


def _num_peers(candidates: Sequence[Candidate]) -> int:
    """Returns the executors of a DP rank."""
    return candidates[0].attn_tp_size if candidates else 1


def _room_of(teams: Sequence[Team]) -> str:
    """Says which groups some executors cannot be."""
    members = [member for team in teams for member in team]
    least = max(member.dp_sizes.start for member in members)
    most = min(member.dp_sizes.stop for member in members) - 1
    num_slots = min(member.max_slots for member in members)
    return (
        f"{len(members)} executors answer, {len(teams)} DP ranks, but they take part in groups of "
        f"{least} to {most}, each with {num_slots} slots for {members[0].num_experts} experts: start "
        f"them for as few as min= and as many as size= of the group have"
    )
