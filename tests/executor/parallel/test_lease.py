"""If a lease ends too early, routers take a group from each other; too late, and nobody drives it."""

import pytest

from executor.errors import Held
from executor.parallel.lease import STANDBY_S, Lease
from protos.executor.lease import LEASE_MS

A, B = b"one router", b"another"


class World:
    """A lease, its clock, and how often its driver changed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_changes = 0
        self.lease = Lease(lambda: self.now, self._on_change)

    def _on_change(self, knows: bytes | None) -> None:
        self.num_changes += 1
        self.knows = knows

    def may_take(self, router_id: bytes) -> bool:
        try:
            self.lease.check(router_id)
        except Held:
            return False
        return True

    def attend(self, router_id: bytes, *, drives: bool) -> None:
        self.lease.attend(router_id)
        self.lease.note_beat(router_id, is_driver=drives, was_driver=False)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def driven(world: World) -> World:
    """A attends and drives with a Step stream, B attends."""
    world.attend(A, drives=False)
    world.lease.take(A)
    world.lease.note_beat(A, is_driver=True, was_driver=False)
    world.lease.note_steps(is_open=True)
    world.attend(B, drives=False)
    world.num_changes = 0
    return world


def test_an_executor_that_nobody_has_taken_is_anybodys(world: World):
    assert world.lease.driver is None
    assert world.may_take(A)
    assert world.may_take(B)


def test_its_driver_may_take_it_again_and_nobody_else(driven: World):
    assert driven.lease.driver is not None
    assert driven.lease.driver.is_held
    with pytest.raises(Held, match=A.hex()) as caught:
        driven.lease.check(B)
    assert caught.value.metadata["router_id"] == A.hex()
    assert driven.may_take(A)
    assert not driven.may_take(B)
    assert not driven.may_take(b"")
    assert driven.lease.num_standbys == 1


def test_a_silent_driver_loses_it_although_its_streams_are_open(driven: World):
    driven.now = (LEASE_MS - 1) / 1000
    assert not driven.may_take(B)
    driven.now = LEASE_MS / 1000
    assert driven.may_take(B)


@pytest.mark.parametrize("sign", ["beat", "step"])
def test_every_sign_of_life_begins_its_time_anew(driven: World, sign: str):
    driven.now = 0.5
    if sign == "beat":
        driven.lease.note_beat(A, is_driver=True, was_driver=True)
    else:
        driven.lease.note_step()
    driven.now = 1.0
    assert not driven.may_take(B)


def test_beats_of_others_are_no_sign_of_its_life(driven: World):
    driven.now = 0.7
    driven.lease.note_beat(B, is_driver=False, was_driver=False)
    assert driven.may_take(B)


def test_a_driver_that_dies_is_free_at_once_and_told(driven: World):
    driven.lease.note_steps(is_open=False)
    assert driven.knows == A, "its stream it was"
    assert not driven.may_take(B)  # it forms again, and goes on to say that it drives
    driven.lease.leave(A, was_driver=True)
    assert driven.may_take(B)
    assert driven.num_changes == 2
    assert driven.knows is None


def test_a_driver_that_says_so_has_left_and_stands_by(driven: World):
    driven.lease.note_steps(is_open=False)
    driven.num_changes = 0
    driven.lease.note_beat(A, is_driver=False, was_driver=True)
    assert driven.num_changes == 1
    assert driven.may_take(B)
    assert driven.lease.num_standbys == 2


def test_a_router_that_has_taken_it_keeps_it_until_its_first_beat(world: World):
    world.attend(A, drives=False)
    world.attend(B, drives=False)
    world.lease.take(A)
    world.lease.note_beat(A, is_driver=False, was_driver=False)  # sent before it did
    assert not world.may_take(B)
    world.lease.note_beat(A, is_driver=True, was_driver=False)
    world.lease.leave(A, was_driver=True)
    assert world.may_take(B)


def test_a_router_that_took_it_and_never_came_keeps_it_for_its_time_alone(world: World):
    world.lease.take(A)
    assert not world.may_take(B)
    world.now = LEASE_MS / 1000
    assert world.may_take(B)


def test_a_driver_without_beats_is_there_as_long_as_its_stream(world: World):
    world.lease.take(A)
    world.lease.note_steps(is_open=True)
    world.now = 3600.0
    assert not world.may_take(B)
    world.lease.note_steps(is_open=False)
    assert world.may_take(B)


def test_the_one_that_takes_over_holds_it_from_the_one_that_comes_back(driven: World):
    driven.now = 1.0
    driven.lease.take(B)
    assert driven.num_changes == 1
    driven.lease.note_steps(is_open=True)
    driven.lease.note_beat(A, is_driver=True, was_driver=True)
    assert not driven.may_take(A)


def test_calls_of_one_router_count_as_one_of_it(driven: World):
    driven.attend(B, drives=False)
    assert driven.lease.num_standbys == 1
    driven.lease.leave(B, was_driver=False)
    assert driven.lease.num_standbys == 1
    driven.lease.leave(B, was_driver=False)
    assert driven.lease.num_standbys == 0


def test_a_router_that_has_fallen_silent_does_not_stand_by_until_it_beats_again(driven: World):
    driven.now = STANDBY_S - 0.001
    assert driven.lease.num_standbys == 1
    driven.now = STANDBY_S
    assert driven.lease.num_standbys == 0
    driven.lease.note_beat(B, is_driver=False, was_driver=False)
    assert driven.lease.num_standbys == 1
