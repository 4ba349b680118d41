"""If this fails, an executor waits for a member that will never come while its router begins anew."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.build import executor as build
from executor.config import ExecutorConfig
from executor.errors import JoinFailed
from executor.parallel.epochs import JoinAttempt
from executor.parallel.layout import Place
from tests.executor.support.fake_worker import HeldGroups
from tests.executor.support.ranks.ranks import HOST, SECRET, TIMEOUT_S

STORE = f"{HOST}:1"


@pytest.fixture
def groups() -> Iterator[HeldGroups]:
    groups = HeldGroups()
    yield groups
    groups.may_form.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_the_groups_are_formed_at_the_address_that_prepare_gave():
    given: list[Any] = []

    def form(*place: Any) -> HeldGroups:
        given.append(place)
        return HeldGroups()

    JoinAttempt(7, SECRET).form(form, "[::1]:80")
    JoinAttempt(8, SECRET).form(form, "executor-0.test:81")
    assert given == [(7, "::1", 80, SECRET), (8, "executor-0.test", 81, SECRET)]
    for address in ("nowhere", ":80", "host:", "host:0", "host:65536", "host:000000080"):
        with pytest.raises(JoinFailed, match=f"store_address='{address}': need host:port"):
            JoinAttempt(9).form(form, address)
    assert len(given) == 2


def test_why_groups_did_not_form_is_told():
    def form(epoch: int, host: str, port: int, secret: bytes) -> HeldGroups:
        raise RuntimeError("rank 1 did not come")

    with pytest.raises(JoinFailed, match=f"epoch 3: no group .* at {STORE}: rank 1 did not come"):
        JoinAttempt(3).form(form, STORE)


def test_who_waits_for_members_that_never_come_is_free_when_the_attempt_is_called_off(
    groups: HeldGroups, pool: ThreadPoolExecutor
):
    attempt = JoinAttempt(4)
    joining = pool.submit(attempt.form, groups.form, STORE)
    assert groups.begun.wait(TIMEOUT_S)
    attempt.call_off("epoch 5 has begun")
    attempt.call_off("another reason")
    with pytest.raises(JoinFailed, match="epoch 4: epoch 5 has begun"):
        joining.result(TIMEOUT_S)
    assert not groups.may_form.is_set()

    groups.may_form.set()
    assert groups.is_closed.wait(TIMEOUT_S), "the others would take this executor for a member"


def test_an_attempt_that_was_called_off_before_it_came_to_forming_forms_nothing(groups: HeldGroups):
    attempt = JoinAttempt(4)
    attempt.call_off("epoch 5 has begun")
    with pytest.raises(JoinFailed, match="epoch 5 has begun"):
        attempt.form(groups.form, STORE)
    assert not groups.begun.is_set()


def test_groups_that_form_as_the_attempt_is_called_off_are_either_returned_or_closed(
    pool: ThreadPoolExecutor,
):
    """Called off by several threads, at the very moment."""
    for epoch in range(200):
        groups, attempt = HeldGroups(), JoinAttempt(epoch)
        joining = pool.submit(attempt.form, groups.form, STORE)
        assert groups.begun.wait(TIMEOUT_S)
        ends = [pool.submit(attempt.call_off, "over") for _ in range(2)]
        groups.may_form.set()
        for end in ends:
            end.result(TIMEOUT_S)
        if joining.exception(TIMEOUT_S) is None:
            assert groups.num_closed == 0
        else:
            assert groups.is_closed.wait(TIMEOUT_S)
            assert groups.num_closed == 1
        with pytest.raises(JoinFailed, match="over"):
            attempt.check()


def test_groups_between_gpus_form_on_the_gpu_of_the_executor(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """They form in a thread of their own, and every thread begins on the first GPU."""
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    monkeypatch.setattr(build, "join_group", lambda *place, epoch, **_: done.append(epoch))
    config = ExecutorConfig(model=tiny_checkpoint, dp_size=2, listen=f"{HOST}:1")
    for device in ("cuda:3", "cpu"):
        build._form_group(config, torch.device(device), Place(config.topology))(7, HOST, 1, SECRET)
    assert done == ["cuda:3", 7, 7]
