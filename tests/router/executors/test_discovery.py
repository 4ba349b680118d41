"""A name that resolves to part of a group must not become a group; a restarted pod must be found."""

import asyncio
import socket
import threading
from unittest.mock import AsyncMock, Mock

import pytest

from router.config import RouterConfig
from router.errors import ExecutorLost, ResolverFailed
from router.executors.discovery import (
    DnsGroup,
    Lookup,
    find_addresses,
    resolve_hosts,
    strength_of,
)
from router.executors.elastic import Strength
from tests.support.virtual_clock import on_virtual_clock


async def test_resolvers_that_hang_keep_no_thread_from_what_else_runs_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.wait() and [])
    asking = [asyncio.ensure_future(resolve_hosts("executor")) for _ in range(32)]
    await asyncio.sleep(0)  # they begin, and asyncio has no more threads than that
    try:
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: "it ran") == "it ran"
        assert not any(each.done() for each in asking)
    finally:
        answers.set()
        await asyncio.gather(*asking)


async def test_a_list_is_given_back_as_it_is() -> None:
    find = find_addresses(["b:2", "a:1"])

    assert list(await find()) == ["b:2", "a:1"]


async def test_every_host_has_an_executor_at_each_port() -> None:
    resolve = AsyncMock(return_value=["10.0.0.7", "fd00::8"])
    find = find_addresses(["dns:executor.lockstep.svc:50061-50062?size=4"], resolve)

    assert list(await find()) == [
        "10.0.0.7:50061",
        "10.0.0.7:50062",
        "[fd00::8]:50061",
        "[fd00::8]:50062",
    ]
    resolve.assert_awaited_with("executor.lockstep.svc")


async def test_the_name_is_asked_each_time_as_a_restarted_pod_has_a_new_address() -> None:
    resolve = AsyncMock(side_effect=[["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.9"]])
    find = find_addresses(["dns:executor:50061?size=2"], resolve)

    assert list(await find()) == ["10.0.0.1:50061", "10.0.0.2:50061"]
    assert list(await find()) == ["10.0.0.1:50061", "10.0.0.9:50061"]


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        ([], "executor resolves to 0 of 2 hosts (nothing)"),
        (["10.0.0.1"], "executor resolves to 1 of 2 hosts (10.0.0.1): waiting for size=2"),
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], "executor resolves to 3 of 2 hosts"),
    ],
)
async def test_half_a_group_is_none_and_the_error_counts(hosts: list[str], told: str) -> None:
    find = find_addresses(["dns:executor:50061?size=2"], AsyncMock(return_value=hosts))

    with pytest.raises(ExecutorLost) as caught:
        await find()
    assert told in str(caught.value)


class Resolver:
    """Takes its time over each question, then fails or says how many it was asked."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_asked = 0
        self._fails = fails

    async def find(self) -> list[str]:
        self.num_asked += 1
        answer = [f"answer {self.num_asked}"]
        await asyncio.sleep(5.0)
        if self._fails:
            raise ExecutorLost("no such name")
        return answer


@on_virtual_clock
async def test_a_look_up_that_takes_too_long_goes_on_for_who_asks_next() -> None:
    resolver = Resolver()
    lookup = Lookup(resolver.find)

    assert [await lookup.addresses(2.0) for _ in range(4)] == [None, None, ["answer 1"], None]
    assert resolver.num_asked == 2
    assert await lookup.addresses(None) == ["answer 2"]


@on_virtual_clock
async def test_what_a_look_up_found_behind_is_told_though_it_is_a_failure() -> None:
    lookup = Lookup(Resolver(fails=True).find)

    assert await lookup.addresses(2.0) is None
    with pytest.raises(ExecutorLost, match="no such name"):
        await lookup.addresses(None)


@on_virtual_clock
async def test_a_look_up_that_is_forgotten_answers_nobody() -> None:
    lookup = Lookup(Resolver().find)

    assert await lookup.addresses(2.0) is None
    lookup.forget()
    assert await lookup.addresses(None) == ["answer 2"]


async def test_the_systems_resolver_is_asked() -> None:
    assert await resolve_hosts("127.0.0.1") == ("127.0.0.1",)
    with pytest.raises(ExecutorLost, match=r"nobody\.invalid cannot be resolved"):
        await resolve_hosts("nobody.invalid")
    with pytest.raises(ExecutorLost, match="cannot be resolved"):
        await resolve_hosts("a" * 70 + ".example")  # no label is that long


@pytest.mark.parametrize(
    ("code", "kind"),
    [(socket.EAI_AGAIN, ResolverFailed), (socket.EAI_NONAME, ExecutorLost)],
)
async def test_a_resolver_that_gets_no_answer_is_told_from_a_name_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[ExecutorLost]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(code, "so it is")))
    with pytest.raises(ExecutorLost, match=r"executor cannot be resolved: .*so it is") as told:
        await resolve_hosts("executor")
    assert told.type is kind


async def test_a_host_with_two_families_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(name: str, port: None, *, type: int) -> list[object]:
        v4 = [(socket.AF_INET, type, 6, "", (f"10.0.0.{n}", 0)) for n in (2, 1, 2)]
        v6 = [(socket.AF_INET6, type, 6, "", (f"fd00::{n}", 0, 0, 0)) for n in (2, 1)]
        return [*v4, *v6]

    monkeypatch.setattr(socket, "getaddrinfo", both)

    assert await resolve_hosts("executor") == ("10.0.0.1", "10.0.0.2")


async def test_an_elastic_group_is_of_as_many_as_there_are() -> None:
    group = ["dns:executor:50061-50062?size=3&min=1"]
    find = find_addresses(group, AsyncMock(side_effect=[[], ["10.0.0.1", "10.0.0.2"]]))
    assert strength_of(group) == Strength(3, 1)

    assert list(await find()) == []
    assert len(await find()) == 4


async def test_a_list_may_be_an_elastic_group() -> None:
    group = ["a:1", "b:2", "c:3?size=2&min=1"]

    assert list(await find_addresses(group)()) == ["a:1", "b:2", "c:3"]
    assert strength_of(group) == Strength(2, 1)
    assert strength_of(["a:1", "b:2"]) is strength_of(["dns:executor:50061?size=2"]) is None
    RouterConfig(groups=(tuple(group),), executor_plaintext="on")


def test_size_counts_executors_not_hosts() -> None:
    assert DnsGroup.parse("dns:executor:50061-50068?size=16").num_hosts == 2


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ("dns:executor:50061", "need dns:NAME:PORT?size=N"),
        ("dns:executor?size=2", "need dns:NAME:PORT?size=N"),
        ("dns::50061?size=2", "need dns:NAME:PORT?size=N"),
        ("dns:executor:50061?size=two", "need dns:NAME:PORT?size=N"),
        ("dns:executor:50061?size=0", "size=0 executors cannot be shared out"),
        ("dns:executor:50061-50064?size=6", "size=6 executors cannot be shared out"),
        ("dns:executor:50064-50061?size=4", "ports go up"),
        ("dns:executor:99999?size=1", "ports go up"),
        ("dns:executor:50061?size=2,10.0.0.7:50061", "give it a --group of its own"),
        ("executor", "need host:port"),
        ("dns:executor:50061?size=2&min=3", "min=3 of size=2 executors: need min from 1 to size"),
        ("dns:executor:50061?size=2&min=0", "min=0 of size=2"),
        ("a:1,b:2?size=2&min=3", "min=3 of size=2"),
        ("a:1,b:2?size=3&min=1", "size=3, and there are 2 addresses"),
        ("a:1,b:2?size=2", "need ?size=N&min=M behind the last address"),
        ("a:1?size=2&min=1,b:2", "need host:port"),
    ],
)
def test_what_is_no_group_is_refused_at_start(group: str, told: str) -> None:
    with pytest.raises(ValueError, match=r"^group: ") as caught:
        RouterConfig(groups=(tuple(group.split(",")),))
    assert told in str(caught.value)


def test_a_name_and_addresses_may_stand_for_different_groups() -> None:
    groups = (("dns:executor:50061?size=2",), ("10.0.0.7:1", "10.0.0.7:2"))

    assert RouterConfig(groups=groups, executor_plaintext="on").groups == groups
    with pytest.raises(ValueError, match="given twice"):
        RouterConfig(groups=(groups[0], groups[0]), executor_plaintext="on")
