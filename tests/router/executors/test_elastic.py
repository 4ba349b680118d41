"""Elastic groups: whom they form with, and when they grow, in virtual time."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from protos.executor.placement import GHOST
from router.errors import ExecutorLost, GroupMismatch
from router.executors.elastic import (
    MAX_JOIN_BYTES,
    Candidate,
    Change,
    ElasticPolicy,
    ElasticSettings,
    Formation,
    SpareState,
    Strength,
)

NUM_EXPERTS = 8
SETTINGS = ElasticSettings(first_form_wait_s=60, grow_after_s=30)
LARGE = MAX_JOIN_BYTES + 1  # bytes of an expert that no Join should load


def executor(name: str, instance: str = "a", **fields: object) -> Candidate:
    usual: dict[str, object] = {"num_experts": NUM_EXPERTS, "max_slots": NUM_EXPERTS}
    held = (GHOST,) * NUM_EXPERTS
    return Candidate(name, instance, **usual | {"held": held} | fields)  # type: ignore[arg-type]


def executors(names: Iterable[str], **fields: object) -> list[Candidate]:
    return [executor(name, **fields) for name in names]


def policy(size: int, least: int, now: float = 0.0) -> ElasticPolicy:
    return ElasticPolicy(Strength(size, least), SETTINGS, now)


def form(group: ElasticPolicy, now: float, candidates: list[Candidate]) -> Formation:
    formation = group.choose(now, candidates)
    group.note_formed(now, formation)
    return formation


def names(formation: Formation) -> str:
    return "".join(member.address for member in formation.members)


def staged(spare: Candidate, formation: Formation) -> Candidate:
    """The same, with the experts of its place."""
    row = formation.slots[formation.members.index(spare)]
    return replace(spare, held=row + spare.held[len(row) :])


def test_a_group_forms_with_as_many_as_it_should_have_and_the_rest_are_spares() -> None:
    formation = form(policy(2, 1), 0, executors("abc"))
    assert (names(formation), formation.change) == ("ab", Change.FIRST)
    assert formation.slots == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_before_the_first_forming_the_group_waits_for_all_for_a_while_and_then_for_the_least() -> (
    None
):
    group = policy(3, 2)
    with pytest.raises(
        ExecutorLost, match=r"2 .* answer, and it takes 3 to form it in the first 60 s"
    ):
        group.choose(59, executors("ab"))
    assert names(group.choose(60, executors("ab"))) == "ab"
    with pytest.raises(ExecutorLost, match=r"1 .* answer, and it takes 2 to form it$"):
        group.choose(61, executors("a"))


def test_a_group_whose_size_is_no_multiple_of_a_ranks_executors_waits_for_no_more_than_it_takes() -> (
    None
):
    places = [(name, rank) for name in "ab" for rank in range(2)]
    four = [executor(f"{name}{rank}", attn_tp_rank=rank, attn_tp_size=2) for name, rank in places]
    assert names(policy(5, 2).choose(0, four)) == "a0a1b0b1"


def test_a_router_that_comes_to_a_group_waits_for_those_that_were_in_it_and_not_for_more() -> None:
    group = policy(4, 1)
    both = executors("ab", num_placed=2)
    with pytest.raises(ExecutorLost, match=r"1 .* answer, and it takes 2 to form it in the first"):
        group.choose(0.1, both[:1])
    assert names(group.choose(0.1, both)) == "ab"
    assert names(group.choose(2.0, both[:1])) == "a"


@pytest.mark.parametrize("loads_ahead", [False, True])
def test_a_router_that_comes_to_a_group_prefers_those_that_were_in_it(loads_ahead: bool) -> None:
    before = form(policy(2, 1), 0, executors("bc"))
    members = [replace(staged(member, before), num_placed=2) for member in before.members]
    spare = executor("a", held=members[1].held if loads_ahead else (GHOST,) * NUM_EXPERTS)
    after = policy(2, 1).choose(1, [spare, *members])
    assert (names(after), [*map(after.missing, after.members)]) == ("bc", [0, 0])


def test_a_router_that_stands_by_makes_no_group_of_its_drivers_spares_but_after_a_while() -> None:
    group, spare = policy(1, 1), executors("c")
    group.note_held(100, ["a"])
    with pytest.raises(ExecutorLost, match=r"only spares answer, 1, .* for 59 s"):
        group.choose(101, spare)
    with pytest.raises(ExecutorLost, match="0 of the group's executors answer"):
        group.choose(101, [])
    assert names(group.choose(101, executors("a", instance="again") + spare)) == "a"
    assert names(group.choose(101, executors("d", num_placed=1) + spare)) == "d"
    assert names(group.choose(160, spare)) == "c"
    group.note_held(200, ["b"])
    with pytest.raises(ExecutorLost, match="only spares answer"):
        group.choose(201, executors("a"))
    form(group, 202, executors("b"))
    assert names(group.choose(203, spare)) == "c", "it drives, and has lost its own"


def test_a_router_that_stands_by_forgets_executors_that_its_driver_has_not_had_for_a_while() -> (
    None
):
    group, again = policy(1, 1), executors("a", instance="again")
    group.note_held(100, ["a", "b"])
    group.note_held(140, ["b"])
    assert names(group.choose(141, again)) == "a"
    group.note_held(180, ["b"])
    with pytest.raises(ExecutorLost, match="only spares answer"):
        group.choose(181, again)
    assert names(group.choose(240, again)) == "a", "none is waited for any more"


def test_an_executor_that_was_its_drivers_long_ago_is_a_spare_whenever_that_is_asked() -> None:
    group, again = policy(1, 1), executors("a", instance="again")
    group.note_held(100, ["a", "b"])
    group.note_held(159, ["b"])
    with pytest.raises(ExecutorLost, match="one is waited for, for 9 s"):
        group.choose(210, again)


def test_a_lost_executor_is_replaced_by_a_spare_and_the_others_keep_their_order() -> None:
    group = policy(3, 1)
    form(group, 0, executors("abcd"))
    formation = form(group, 10, executors("acd"))
    assert (names(formation), formation.change) == ("acd", Change.REPLACE)


def test_without_a_spare_the_group_goes_on_with_fewer_down_to_the_least() -> None:
    group = policy(3, 2)
    form(group, 0, executors("abc"))
    formation = form(group, 10, executors("bc"))
    assert (names(formation), formation.change) == ("bc", Change.SHRINK)
    assert {e for row in formation.slots for e in row} == set(range(NUM_EXPERTS))
    with pytest.raises(ExecutorLost, match=r"1 .* answer, and it takes 2"):
        group.choose(20, executors("c"))


def test_who_stays_loads_only_what_the_lost_one_had() -> None:
    group = policy(3, 1)
    before = form(group, 0, executors("abc"))
    held = {member.address: staged(member, before) for member in before.members}
    after = group.choose(10, [held["a"], held["c"]])
    assert [after.missing(member) for member in after.members] == [1, 2]


def test_a_spare_that_would_have_to_load_much_does_so_behind_the_traffic() -> None:
    group = policy(2, 1)
    before = form(group, 0, executors("abc", expert_bytes=LARGE))
    spares = executors("c", expert_bytes=LARGE)
    [(spare, target)] = group.review(5, spares).stages
    assert group.review(5, spares).states == {"c": SpareState.COLD}
    left = [staged(each, before) for each in before.members if each.address == "a"]
    assert names(group.choose(10, [*left, *spares])) == "a"
    ready = staged(spare, target)
    assert group.review(10, [ready]).states == {"c": SpareState.STAGED}
    lost = "b" if "b" not in {each.address for each in target.members} else "a"
    stays = executors({"a": "b", "b": "a"}[lost], expert_bytes=LARGE)
    assert group.choose(11, [*stays, ready]).change is Change.REPLACE


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("lost", ["b", "c"])
def test_of_two_spares_the_one_takes_a_place_that_has_loaded_the_experts_of_it(
    lost: str, least: int
) -> None:
    group, world = policy(2, least), executors("bcxy", expert_bytes=LARGE)
    before = form(group, 0, world)
    spares = [staged(spare, target) for spare, target in group.review(1, world[2:]).stages]
    stays = [staged(member, before) for member in before.members if member.address != lost]
    after = form(group, 2, [*stays, *spares])
    assert (after.change, [*map(after.missing, after.members)]) == (Change.REPLACE, [0, 0])


def test_two_places_go_to_spares_that_have_loaded_the_experts_of_one_each() -> None:
    group, world = policy(4, 1), executors("abcdvwxyz", expert_bytes=LARGE)
    before = form(group, 0, world)
    spares = {
        each.address: staged(each, target) for each, target in group.review(1, world[4:]).stages
    }
    assert spares["z"].held == spares["v"].held, "one more than there are places"
    stays = [staged(member, before) for member in before.members if member.address in "bc"]
    after = group.choose(2, [*stays, *map(spares.__getitem__, "vzwxy")])
    assert (names(after), [*map(after.missing, after.members)]) == ("bcvy", [0] * 4)


def test_of_two_places_one_goes_to_the_only_spare_that_has_loaded_experts() -> None:
    """Without it the others would load more, and be fewer."""
    size: dict[str, object] = {"num_experts": 12, "max_slots": 12, "held": (GHOST,) * 12}
    group, world = policy(4, 1), executors("abcdxy", expert_bytes=LARGE, **size)
    before = form(group, 0, world)
    [(spare, target)] = group.review(1, world[4:5]).stages
    x = staged(spare, target)
    stays = [staged(member, before) for member in before.members if member.address in "bc"]
    after = group.choose(2, [*stays, x, world[5]])
    assert (names(after), after.change) == ("bcx", Change.SHRINK)
    assert [*map(after.missing, after.members)] == [1, 1, 1]
    alone = group.choose(2, stays)
    assert [*map(alone.missing, alone.members)] == [3, 3]


def test_where_too_few_are_left_a_spare_loads_at_its_join() -> None:
    group = policy(2, 2)
    form(group, 0, executors("abc", expert_bytes=LARGE))
    formation = group.choose(10, executors("ac", expert_bytes=LARGE))
    assert (names(formation), formation.change) == ("ac", Change.REPLACE)


def test_a_group_grows_by_who_has_been_there_for_long_enough_and_has_its_experts() -> None:
    group, two = policy(3, 1), executors("ab", expert_bytes=LARGE)
    settled = [staged(m, f) for f in [form(group, 60, two)] for m in f.members]
    newcomer = executor("c", expert_bytes=LARGE)
    review = group.review(100, [newcomer])
    assert not review.grows
    [(spare, target)] = review.stages
    assert (spare, names(target), target.change) == (newcomer, "abc", Change.GROW)
    assert not group.review(140, [newcomer]).grows, "it lacks experts"
    ready = staged(spare, target)
    assert group.review(141, [ready]).grows
    formation = form(group, 141, [*settled, ready])
    assert (names(formation), formation.change) == ("abc", Change.GROW)


def test_a_group_grows_by_one_while_another_that_it_lacks_is_there_and_has_not_loaded() -> None:
    """Else it would end its epoch for nothing, each second for as long as that one loads."""
    group, [a, b, c] = policy(3, 1), executors("abc", expert_bytes=LARGE)
    member = staged(a, form(group, 60, [a]))
    [(_, target)] = group.review(61, [b]).stages
    ready = staged(b, target)
    assert group.review(91, [ready, c]).grows
    assert names(group.choose(91, [member, ready, c])) == "ab"


def test_who_was_away_in_between_is_counted_from_its_return() -> None:
    group = policy(2, 1)
    form(group, 60, executors("a"))
    group.review(61, executors("b"))
    group.review(80, [])
    group.review(81, executors("b"))
    assert not group.review(110, executors("b")).grows
    assert group.review(111, executors("b")).grows
    assert not group.review(112, [executor("b", "another process")]).grows


def test_a_group_grows_once_a_minute() -> None:
    group = policy(4, 1)
    form(group, 60, executors("a"))
    group.review(100, executors("b"))
    group.review(110, executors("bc"))
    assert group.review(130, executors("bc")).grows
    assert names(form(group, 130, executors("abc"))) == "abc", "whoever is there takes part"
    group.review(131, executors("d"))
    assert not group.review(189, executors("d")).grows
    assert group.review(190, executors("d")).grows


def test_an_executor_that_lost_its_place_is_held_off_ever_longer() -> None:
    group, now = policy(2, 1), 0.0
    form(group, now, executors("ab"))
    waits = []
    for number in range(7):
        now += 1
        assert form(group, now, executors("a")).change is Change.SHRINK
        lost, back = now, [executor("b", str(number))]
        while not group.review(now, back).grows:
            now += 1
        waits.append(now - lost)
        assert form(group, now, [executor("a"), *back]).change is Change.GROW
    assert waits[:5] == [60, 120, 240, 480, 960]
    assert max(waits) <= 1800
    for _ in range(7):
        group.note_failed(now, "b")
    assert group.held_off_until("b", now) == now + 1800


def test_executors_that_come_and_go_are_not_remembered_for_ever() -> None:
    group = policy(2, 1)
    form(group, 60, executors("a"))
    for minute in range(1, 200):
        name = f"spare {minute}"
        group.review(60 * minute, executors([name]))
        if minute % 3 == 1:
            group.note_failed(60 * minute, name)
        elif minute % 3 == 2:
            group.note_left(60 * minute, name)
    assert 1 + 40 <= len(group._history) <= 1 + 40 + 2, (
        "the member, and who left or was lost lately"
    )


def test_an_executor_that_was_told_to_stop_is_not_held_off_but_if_it_is_again_and_again() -> None:
    """So a group is as large as before soon after each executor that is updated."""
    group, now, waits = policy(2, 1), 0.0, []
    form(group, now, executors("ab"))
    for number in range(3):
        now += 1
        group.note_left(now, "b")
        form(group, now, executors("a"))
        left, back = now, [executor("b", str(number))]
        while not group.review(now, back).grows:
            now += 1
        waits.append(now - left)
        form(group, now, [executor("a"), *back])
    assert waits == [30, 60, 120]


def test_an_executor_that_dies_every_40_s_reshapes_its_group_12_times_an_hour_at_most() -> None:
    group = policy(2, 1)
    num_formings, members = 0, {("a", "a"), ("b", "0")}
    form(group, 0, [executor("a"), executor("b", "0")])
    for now in range(1, 3600):
        back = [executor("b", str(now // 40))] if now % 40 else []
        there = [executor("a"), *back]
        is_lost = not members <= {each.name for each in there}
        if is_lost or group.review(now, back).grows:
            formation = form(group, now, there)
            members = {each.name for each in formation.members}
            num_formings += 1
    assert num_formings <= 12


def test_a_held_off_executor_is_taken_where_the_group_could_not_serve_without_it() -> None:
    group = policy(2, 1)
    form(group, 0, executors("ab"))
    form(group, 10, executors("a"))
    formation = group.choose(11, [executor("b", "again")])
    assert names(formation) == "b"


def test_who_comes_back_before_the_group_has_formed_without_it_is_in_it_again() -> None:
    group = policy(2, 2)
    form(group, 0, executors("ab"))
    with pytest.raises(ExecutorLost):
        group.choose(1, executors("b"))
    formation = form(group, 2, [executor("a", "again"), executor("b")])
    assert (names(formation), formation.change) == ("ab", Change.REJOIN)


def test_an_executor_that_cannot_join_is_held_off() -> None:
    group = policy(3, 2)
    form(group, 0, executors("ab") + executors("c"))
    formation = group.choose(1, executors("abd"))
    assert names(formation) == "abd"
    group.note_failed(1, "d")
    assert names(group.choose(1, executors("abd"))) == "ab"


def test_newcomers_are_held_off_where_formings_with_them_fail() -> None:
    group = policy(3, 2)
    form(group, 0, executors("abc"))
    for _ in range(2):
        formation = group.choose(1, executors("abd"))
        assert names(formation) == "abd"
        group.note_not_formed(1, formation)
    assert names(form(group, 1, executors("abd"))) == "ab"


def fail_to_join(group: ElasticPolicy, now: float, candidates: list[Candidate], who: str) -> None:
    """Has two formings in a row fail as one executor cannot join."""
    for held_off in ([], [who]):
        formation = group.choose(now, candidates)
        assert who in names(formation)
        assert group.note_not_formed(now, formation, who) == held_off


def test_a_member_that_cannot_join_loses_its_place_for_ever_longer() -> None:
    group = policy(2, 1)
    form(group, 0, executors("ab"))
    fail_to_join(group, 10, executors("abc"), "a")
    assert group.held_off_until("a", 10) == 10 + 60
    assert names(form(group, 10, executors("abc"))) == "bc"
    form(group, 150, executors("ca"))
    fail_to_join(group, 200, executors("ca"), "a")
    assert group.held_off_until("a", 200) == 200 + 120
    assert names(form(group, 200, executors("ca"))) == "c"


def test_a_group_that_never_formed_holds_off_who_could_not_join() -> None:
    group = policy(2, 2)
    fail_to_join(group, 0, executors("abc"), "b")
    assert names(group.choose(0, executors("abc"))) == "ac"
    assert names(group.choose(0, executors("ab"))) == "ab", "it could not serve otherwise"


def attempts_without(
    group: ElasticPolicy, now: float, candidates: list[Candidate], broken: str, is_named: bool
) -> int:
    """Returns how many formings fail until one lacks an executor with which none can form."""
    for attempt in range(40):
        formation = group.choose(now + 5 * attempt, candidates)
        others = [each for each in names(formation) if each != broken]
        if len(others) == len(formation.members):
            return attempt
        failed = broken if is_named else others[0]
        group.note_not_formed(now + 5 * attempt, formation, failed)
    return 40


@pytest.mark.parametrize(
    ("size", "least", "order"), [(2, 2, "acb"), (2, 2, "cab"), (3, 2, "abcd"), (4, 2, "abcdef")]
)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_group_forms_without_an_executor_that_makes_others_fail(
    size: int, least: int, order: str, is_named: bool
) -> None:
    group = ElasticPolicy(Strength(size, least), replace(SETTINGS, first_form_wait_s=0), 0)
    assert attempts_without(group, 0, executors(order), "c", is_named) <= 12


def test_newcomers_are_not_held_off_for_ever_for_a_member_that_cannot_join() -> None:
    group = policy(3, 2)
    form(group, 0, executors("abx"))
    assert attempts_without(group, 10, executors("abcde"), "b", is_named=True) == 4
    assert names(group.choose(30, executors("abcde"))) == "ade"
    assert group.held_off_until("d", 30) == 0


def test_who_is_held_off_takes_a_place_only_behind_those_that_are_not() -> None:
    group = policy(3, 3)
    for address in "ab":
        group.note_failed(0, address)
    assert names(group.choose(0, executors("abcd"))) == "cda"


def test_peers_of_a_lost_executor_keep_their_place_only_with_another_of_its_rank() -> None:
    def peers(*places: str) -> list[Candidate]:
        return [executor(name, attn_tp_rank=int(name[1]), attn_tp_size=2) for name in places]

    group = policy(4, 2)
    form(group, 0, peers("a0", "a1", "b0", "b1", "c1"))
    after = form(group, 1, peers("a0", "b0", "b1", "c1"))
    assert [[member.address for member in team] for team in after.teams] == [
        ["a0", "c1"],
        ["b0", "b1"],
    ]
    alone = form(group, 2, peers("a0", "b0", "b1"))
    assert [member.address for member in alone.members] == ["b0", "b1"]


def test_what_executors_have_no_room_for_is_refused_with_what_they_have_room_for() -> None:
    group = policy(4, 2)
    with pytest.raises(GroupMismatch, match=r"4 executors answer.*groups of 1 to 3"):
        group.choose(0, executors("abcd", dp_sizes=range(1, 4)))
    group = policy(2, 1)
    form(group, 0, executors("ab", max_slots=4, held=(GHOST,) * 4))
    with pytest.raises(GroupMismatch, match="4 slots for 8 experts"):
        group.choose(1, executors("a", max_slots=4, held=(GHOST,) * 4))


def test_executors_with_other_settings_take_over_when_too_few_of_the_old_are_left() -> None:
    group = policy(2, 1)
    old = executors("ab", agreement=b"old")
    new = executors("cd", agreement=b"new")
    form(group, 0, old)
    review = group.review(100, new)
    assert not review.grows
    assert not review.stages
    assert review.states == dict.fromkeys("cd", SpareState.UNFIT)
    assert names(form(group, 101, [old[1], *new])) == "b"
    assert names(form(group, 102, new)) == "cd"


def test_a_group_goes_back_to_its_model_as_soon_as_enough_executors_have_it() -> None:
    """With another one the router serves nobody: who was there first would keep it from serving."""
    group = policy(2, 1)
    own = executors("ab", agreement=b"own", fingerprint="own")
    other = executors("cde", agreement=b"other", fingerprint="other")
    form(group, 0, own)
    assert names(form(group, 1, other)) == "cd"
    assert names(form(group, 2, [own[0], *other])) == "a"


def test_a_spare_with_less_room_for_kv_than_the_group_began_with_takes_no_place() -> None:
    """Sequences that were taken could not end there."""
    group = policy(2, 1)
    form(group, 0, [executor("a", max_len=4096), executor("b", max_len=2048)])
    small = executor("c", max_len=2047)
    assert group.review(100, [small]).states == {"c": SpareState.UNFIT}
    assert names(form(group, 101, [executor("a", max_len=4096), small])) == "a"
    assert not group.review(1000, [small]).grows
    with pytest.raises(ExecutorLost, match=r"sequences of 2048 tokens .*: c for 2047; start"):
        group.choose(1001, [small])
    same = executor("b", "again", max_len=2048)
    assert names(group.choose(1001, [executor("a", max_len=4096), same])) == "ab"


@pytest.mark.parametrize("room", [{"max_slots": 2}, {"dp_sizes": range(1, 3)}])
def test_a_spare_without_room_for_the_groups_size_hides_none_that_has_it(
    room: dict[str, object],
) -> None:
    group = policy(3, 1)
    form(group, 60, executors("ab"))
    spares = [executor("c", held=(6, 7), **room), executor("d")]
    group.review(61, spares)
    review = group.review(120, spares)
    assert review.grows
    assert review.states["c"] == SpareState.UNFIT
    assert names(group.choose(120, [*executors("ab"), *spares])) == "abd"
    assert names(group.choose(120, [*executors("a"), *spares])) == "ad"


def test_executors_without_room_for_the_groups_size_hide_none_that_it_cannot_serve_without() -> (
    None
):
    group = policy(3, 2)
    form(group, 0, executors("abd"))
    small = executor("c", max_slots=2, held=(6, 7))
    assert names(group.choose(1, [executor("a"), small, executor("d")])) == "ad"
    group.note_failed(1, "d")
    assert names(group.choose(1, [executor("a"), small, executor("d")])) == "ad"


def test_a_member_that_cannot_load_what_falls_to_it_stops_no_others() -> None:
    group = policy(3, 1)
    form(group, 0, executors("abc"))
    assert names(group.choose(1, executors("ab"))) == "ab"
    group.note_failed(1, "b")
    formation = form(group, 1, executors("ab"))
    assert (names(formation), formation.change) == ("a", Change.SHRINK)
    assert group.review(2, executors("b")).states == {"b": SpareState.HELD_OFF}


def test_suspects_wait_for_an_executor_to_spare_but_not_for_ever() -> None:
    group = policy(2, 1)
    form(group, 0, executors("ab"))
    assert group.may_try_suspects(0, num_spares=0)
    form(group, 1, executors("a"))
    assert not group.may_try_suspects(1, num_spares=0)
    assert not group.may_try_suspects(60, num_spares=0)
    assert group.may_try_suspects(61, num_spares=0)
    assert group.may_try_suspects(62, num_spares=1)
    assert not group.may_try_suspects(63, num_spares=0)


@pytest.mark.parametrize(("members", "spares"), [("ac", ""), ("a", "c")])
def test_suspects_wait_anew_for_an_executor_to_spare_where_there_was_one_in_between(
    members: str, spares: str
) -> None:
    """Whether or not there were suspects then."""
    group = policy(2, 1)
    form(group, 0, executors("ab"))
    form(group, 1, executors("a"))
    assert not group.may_try_suspects(1, num_spares=0)
    form(group, 10, executors(members))
    review = group.review(10, executors(spares))
    group.review(10, [staged(*each) for each in review.stages])
    form(group, 100, executors("a"))
    group.review(100, [])
    assert not group.may_try_suspects(100, num_spares=0)
    assert group.may_try_suspects(160, num_spares=0)


def test_an_executor_that_never_loads_lets_suspects_wait_no_longer_than_none() -> None:
    group = policy(2, 1)
    form(group, 0, executors("ab", expert_bytes=LARGE))
    form(group, 1, executors("a", expert_bytes=LARGE))
    assert not group.may_try_suspects(1, num_spares=0)
    for now in range(2, 61, 10):
        assert group.review(now, executors("c", expert_bytes=LARGE)).states == {
            "c": SpareState.COLD
        }
        assert not group.may_try_suspects(now, num_spares=0)
    assert group.may_try_suspects(61, num_spares=0)


def ranks_kept(one: Formation | None, other: Formation | None) -> list[list[tuple[str, str]]]:
    """The DP ranks of one group that the other has, in its order."""
    if one is None or other is None:
        return []
    ours, theirs = ([[each.name for each in team] for team in g.teams] for g in (one, other))
    return [team for team in ours if team in theirs]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_a_group_keeps_to_its_sizes_and_is_whole_again_in_the_end(
    seed: int,
) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 5)
    least = rng.randint(1, size)
    peers = rng.choice([1, 1, 2])
    strength = Strength(size * peers, least * peers)
    group = ElasticPolicy(strength, SETTINGS, 0.0)
    world = {
        f"{number}.{rank}": executor(
            f"{number}.{rank}",
            attn_tp_rank=rank,
            attn_tp_size=peers,
            max_slots=-(-NUM_EXPERTS // (least * peers)),
            expert_bytes=rng.choice([1, LARGE]),
        )
        for number in range(size + rng.randint(0, 2))
        for rank in range(peers)
    }
    there, formation, formed = set(world), None, 0
    for now in range(0, 6000, 10):
        if now < 1800 and rng.random() < 0.15:
            there ^= {name := rng.choice(sorted(world))}
            world[name] = replace(world[name], instance_id=str(now), held=(GHOST,) * NUM_EXPERTS)
        elif now == 1800:
            there = set(world)
        answering = [world[name] for name in sorted(there)]
        members = set() if formation is None else {each.name for each in formation.members}
        if members and members <= {each.name for each in answering}:
            review = group.review(now, [each for each in answering if each.name not in members])
            for spare, target in review.stages:
                if rng.random() < 0.5:
                    world[spare.address] = staged(spare, target)
            if not review.grows:
                continue
        before = formation
        grows = bool(members) and members <= {each.name for each in answering}
        try:
            formation = group.choose(now, answering)
        except ExecutorLost:
            formation = None
            continue
        assert not grows or formation.change is Change.GROW, "an epoch was ended for it"
        if rng.random() < 0.1:
            formation = None  # its forming failed, and nobody is to blame
            continue
        group.note_formed(now, formation)
        formed += 1
        assert least <= len(formation.teams) <= size
        assert len(set(formation.members)) == len(formation.members) == len(formation.slots)
        assert sorted(e for row in formation.slots for e in row if e != GHOST) == list(range(8))
        assert ranks_kept(before, formation) == ranks_kept(formation, before)
        assert all(
            [each.attn_tp_rank for each in team] == list(range(peers)) for team in formation.teams
        )
        for member, row in zip(formation.members, formation.slots, strict=True):
            held = row + member.held[len(row) :]
            world[member.address] = replace(world[member.address], held=held)
    assert formation is not None
    assert formed
    assert len(formation.teams) == size, "nothing was lost for more than an hour"
