"""The picture is read in a hurry, on whatever terminal there is."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from deploy.local.ports import held_port
from protos.serving.v1 import serving_pb2_grpc
from router import top
from router.api.generate import GenerationServicer
from router.api.health import Health
from router.client import Client
from router.client.status import (
    GraphCount,
    GroupState,
    GroupStatus,
    RankStatus,
    SpeculationState,
    SpeculationStatus,
)
from router.top import Frame, render
from tests.router.support.fake_cell import FakeCell, serve

PROBLEM = (
    "Describe of executor 10.0.0.7:50061 failed: UNAVAILABLE: failed to connect to all addresses; "
    "last error: UNKNOWN: ipv4:10.0.0.7:50061: Failed to connect to remote host: Connection refused"
)


def rank(number: int, **fields: float) -> RankStatus:
    defaults = {
        "num_running": 8,
        "last_step_tokens": 8,
        "last_step_s": 0.0041,
        "num_used_blocks": 30,
        "num_cached_blocks": 20,
        "num_free_blocks": 50,
        "prefix_hit_rate": 0.25,
        "num_preemptions": 3,
    }
    return RankStatus(dp_rank=number, **{**defaults, **fields})  # type: ignore[arg-type]


def ready(*ranks: RankStatus, **fields: int) -> GroupStatus:
    graphs = (
        GraphCount("decode", 8, "", 70),
        GraphCount("decode", 16, "", 30),
        GraphCount("eager", 0, "idle_rank", 5),
    )
    return GroupStatus(
        group=0, state=GroupState.READY, epoch=2, ranks=ranks, graphs=graphs, **fields
    )


FORMING = GroupStatus(group=1, state=GroupState.FORMING, problem=PROBLEM)


def test_shows_each_rank_with_its_tokens_blocks_and_time():
    text = render(Frame(0.0, [ready(rank(0), rank(1, last_step_tokens=4), step=1234)]), 100)
    lines = text.splitlines()
    [first, second] = [line for line in lines if re.match(r" +[01] +8 ", line)]

    assert lines[0].startswith("group 0 READY")
    assert "step 1,234" in lines[0]
    assert first.count(top.FULL) > second.count(top.FULL)
    assert "30%" in first
    assert "4.1 ms" in first
    assert "25%" in first
    assert first.rstrip().endswith("3")


def test_bars_are_relative_to_the_rank_with_most_tokens():
    text = render(Frame(0.0, [ready(rank(0, last_step_tokens=512), rank(1))]), 100)
    [full, some] = re.findall(rf"8  ([{top.FULL}{top.EMPTY}]+) ", text)
    assert full == top.FULL * len(full)
    assert some == top.FULL + top.EMPTY * (len(some) - 1)  # not nothing, so it shows


def test_used_and_cached_blocks_share_a_bar():
    text = render(Frame(0.0, [ready(rank(0, num_used_blocks=50, num_cached_blocks=50))]), 100)
    [bar] = re.findall(rf"[{top.FULL}{top.PART}{top.EMPTY}]*{top.PART}[{top.EMPTY}]*", text)
    used, cached, free = (bar.count(part) for part in (top.FULL, top.PART, top.EMPTY))
    assert used == cached > 0
    assert abs(free - used) <= 1


def test_says_what_keeps_a_group_from_forming_in_full_on_any_terminal():
    for width in (40, 80, 200):
        lines = render(Frame(0.0, [ready(rank(0)), FORMING]), width).splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("group 1 FORMING"))
        told = " ".join(" ".join(lines[start + 1 :]).split())
        assert told.replace(" ", "").startswith(PROBLEM.replace(" ", ""))


def test_a_queue_is_shown_as_its_share_of_what_is_live():
    text = render(Frame(0.0, [ready(rank(0), num_waiting=8, num_waiting_tokens=4000)]), 80)
    [bar] = re.findall(rf"waiting ([{top.FULL}{top.EMPTY}]+) 8 of 16 sequences, 4,000 tokens", text)
    assert bar.count(top.FULL) * 2 == len(bar)


def test_what_comes_of_drafts_is_shown_where_there_is_a_draft_model():
    status = SpeculationStatus(algorithm="eagle", state=SpeculationState.DRAFTING)
    assert "drafts" not in render(Frame(0.0, [ready(rank(0))]), 100)
    assert "  drafts: eagle, drafting\n" in render(
        Frame(0.0, [replace(ready(rank(0)), speculation=status)]), 100
    )
    status = replace(
        status,
        state=SpeculationState.PAUSED,
        num_drafts=300,
        num_accepted_drafts=45,
        tokens_per_step=1.4501,
    )
    assert "  drafts: eagle, paused, 1.45 tokens per step, 15% accepted\n" in render(
        Frame(0.0, [replace(ready(rank(0)), speculation=status)]), 100
    )


def test_rates_take_two_frames_of_one_epoch():
    old = Frame(10.0, [ready(rank(0, total_tokens=100), step=50)])
    new = Frame(12.0, [ready(rank(0, total_tokens=700), step=110)])
    assert "30 steps/s · 300 tokens/s" in render(new, 120, before=old)
    assert "steps/s" not in render(new, 120)
    other_epoch = Frame(10.0, [GroupStatus(group=0, state=GroupState.READY, epoch=1)])
    assert "steps/s" not in render(new, 120, before=other_epoch)


@pytest.mark.parametrize("width", [1, 40, 52, 59, 60, 80, 99, 100, 250])
@pytest.mark.parametrize(
    "groups",
    [
        [],
        [FORMING],
        [ready()],
        [ready(rank(0, last_step_tokens=0, num_used_blocks=0, last_step_s=0.0))],
        [ready(*[rank(number, last_step_tokens=number * 900) for number in range(16)]), FORMING],
        [ready(rank(0, num_free_blocks=0, num_used_blocks=0, num_cached_blocks=0))],
    ],
)
def test_no_line_is_wider_than_the_terminal(groups: list[GroupStatus], width: int):
    text = render(Frame(0.0, groups), width)
    assert text.strip()
    assert max(map(len, text.splitlines())) <= max(width, top.MIN_WIDTH)
    coloured = render(Frame(0.0, groups), width, colours=True)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == text


def test_a_problem_cannot_drive_the_terminal():
    group = GroupStatus(group=0, state=GroupState.FORMING, problem="bad\x1b[2Jname\nend")
    assert "\x1b" not in render(Frame(0.0, [group]), 80)


async def test_prints_one_picture_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    cell = FakeCell()
    cell.groups = [ready(rank(0)), FORMING]
    async with serve(cell, health=Health()) as target:
        await top.watch(Client(target), target, 1.0, once=True)
    printed = capsys.readouterr().out
    assert "group 0 READY" in printed
    assert "\x1b" not in printed


class Screen:
    """Takes what `watch` draws, picture by picture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lines: int = 50) -> None:
        self.pictures: list[str] = []
        monkeypatch.setattr(top, "_write", self.pictures.append)
        size = os.terminal_size((100, lines))
        monkeypatch.setattr(top, "_size", lambda: size)

    async def shows(self, text: str) -> str:
        """Waits for a picture, from the next one on, that has a text in it."""
        start = len(self.pictures)
        async with asyncio.timeout(120):
            while True:
                for picture in self.pictures[start:]:
                    if text in picture:
                        return picture
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(target: str) -> AsyncIterator[None]:
    drawing = asyncio.create_task(top.watch(Client(target), target, 0.01, once=False))
    try:
        yield
    finally:
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing


async def test_the_picture_comes_back_with_the_router(monkeypatch: pytest.MonkeyPatch):
    screen = Screen(monkeypatch)
    cell = FakeCell()
    cell.groups = [ready(rank(0))]
    stub = servicer_of(cell)
    with held_port() as port:
        server, port = await start(stub, port)
        async with watching(f"127.0.0.1:{port}"):
            await screen.shows("READY")
            await server.stop(None)
            await screen.shows(f"127.0.0.1:{port} does not answer: ")
            server, _ = await start(stub, port)
            await screen.shows("READY")
        await server.stop(None)


async def test_a_router_that_is_stuck_is_said_to_be(monkeypatch: pytest.MonkeyPatch):
    """Else the last picture would stay, and look well."""
    screen = Screen(monkeypatch)
    cell = FakeCell()
    cell.groups = [ready(rank(0))]
    servicer = servicer_of(cell)
    going_on, answer = asyncio.Event(), servicer.GetStatus

    async def wait(request: Any, context: Any) -> Any:
        await going_on.wait()
        return await answer(request, context)

    with held_port() as port:
        server, port = await start(servicer, port)
        async with watching(f"127.0.0.1:{port}"):
            await screen.shows("READY")
            monkeypatch.setattr(top, "ANSWER_S", 0.2)  # of the first, a late answer is the last
            servicer.GetStatus = wait
            await server.stop(None)
            server, _ = await start(servicer, port)
            await screen.shows("no answer for 0.2 s")
            going_on.set()
            await screen.shows("READY")
        await server.stop(None)


async def test_a_low_terminal_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch):
    screen = Screen(monkeypatch, lines=8)
    cell = FakeCell()
    cell.groups = [ready(*[rank(number) for number in range(16)])]
    server, port = await start(servicer_of(cell), 0)
    async with watching(f"127.0.0.1:{port}"):
        picture = await screen.shows("more lines")
    await server.stop(None)
    assert picture.count("\n") == 7  # the last line of a terminal stays empty, or it would scroll
    all_of_it = render(Frame(0.0, cell.groups), 100).count("\n") + 2
    assert f"… {all_of_it - 6} more lines" in picture


def servicer_of(cell: FakeCell) -> Any:
    return GenerationServicer(cell, None, version="1.2.3")  # type: ignore[arg-type]


async def start(servicer: Any, port: int) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    serving_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


def test_a_router_that_is_not_there_is_an_error_for_people():
    result = CliRunner().invoke(top.main, ["127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1 does not answer" in result.output
    assert "Traceback" not in result.output


def test_a_pause_of_nothing_is_refused():
    result = CliRunner().invoke(top.main, ["127.0.0.1:1", "--interval-s", "0"])
    assert result.exit_code == 2
    assert "need more than 0 seconds" in result.output
