"""The picture is read in a hurry, on whatever terminal there is."""

import re

import pytest
from click.testing import CliRunner

from router import top
from router.client import Client
from router.health import Health
from router.status import GraphCount, GroupState, GroupStatus, RankStatus
from router.top import Frame, render
from tests.router.fake_cell import FakeCell, serve

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


def test_a_router_that_is_not_there_is_an_error_for_people():
    result = CliRunner().invoke(top.main, ["127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1 does not answer" in result.output
    assert "Traceback" not in result.output


def test_a_pause_of_nothing_is_refused():
    result = CliRunner().invoke(top.main, ["127.0.0.1:1", "--interval-s", "0"])
    assert result.exit_code == 2
    assert "need more than 0 seconds" in result.output
