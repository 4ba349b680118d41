"""The picture is read in a hurry, on whatever terminal there is."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from deploy.local.ports import held_port
from protos.serving.v1 import serving_pb2 as pb
from router import top
from router.api.generate import GenerationServicer
from router.client import Client
from tests.router.support.fake_engines import FakeEngines, generation, listening
from tests.router.support.statuses import FORMING, rank, ready

PROBLEM = (
    "Describe of executor 10.0.0.7:50061 failed: UNAVAILABLE: failed to connect to all addresses; "
    "last error: UNKNOWN: ipv4:10.0.0.7:50061: Failed to connect to remote host: Connection refused"
)


UNFORMED = pb.GroupStatus(group=1, state=FORMING, problem=PROBLEM)


def render(*groups: pb.GroupStatus, width: int = 100, **status: Any) -> str:
    """Returns the picture of a router with groups, as a pipe would get it."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(top.picture(pb.GetStatusResponse(groups=groups, **status)), crop=False)
    return capture.get()


def of_groups(*groups: pb.GroupStatus, width: int = 100) -> list[str]:
    """Returns the lines of the groups only."""
    lines = render(*groups, width=width).splitlines()
    return lines[2 : next(i for i, line in enumerate(lines) if line.startswith("last ev"))]


def test_shows_each_rank_with_its_tokens_blocks_and_time():
    lines = of_groups(ready(rank(0), rank(1, last_step_tokens=4), step=1234))
    [first, second] = [line for line in lines if re.match(r" +[01] +8 ", line)]

    assert lines[0].startswith("group 0 READY")
    assert "step 1,234" in lines[0]
    assert first.count(top.FULL) > second.count(top.FULL)
    assert "30%" in first
    assert "4.1 ms" in first
    assert "25%" in first
    assert first.rstrip().endswith("3")


def test_bars_are_relative_to_the_rank_with_most_tokens():
    text = render(ready(rank(0, last_step_tokens=512), rank(1)))
    [full, some] = re.findall(rf" 8 ([{top.FULL}{top.EMPTY}]+) ", text)
    assert full == top.FULL * len(full)
    assert some == top.FULL + top.EMPTY * (len(some) - 1)  # not nothing, so it shows


def test_used_and_cached_blocks_share_a_bar():
    text = render(ready(rank(0, num_used_blocks=50, num_cached_blocks=50)))
    [bar] = re.findall(rf"[{top.FULL}{top.PART}{top.EMPTY}]*{top.PART}[{top.EMPTY}]*", text)
    used, cached, free = (bar.count(part) for part in (top.FULL, top.PART, top.EMPTY))
    assert used == cached > 0
    assert abs(free - used) <= 1


def test_says_what_keeps_a_group_from_forming_in_full_on_any_terminal():
    for width in (40, 80, 200):
        lines = of_groups(ready(rank(0)), UNFORMED, width=width)
        start = next(i for i, line in enumerate(lines) if line.startswith("group 1 FORMING"))
        told = " ".join(" ".join(lines[start + 1 :]).split())
        assert told.replace(" ", "").startswith(PROBLEM.replace(" ", ""))


def test_a_queue_is_shown_as_its_share_of_what_is_live():
    text = render(ready(rank(0), num_waiting=8, num_waiting_tokens=4000), width=80)
    [bar] = re.findall(rf"waiting ([{top.FULL}{top.EMPTY}]+) 8 of 16 sequences, 4,000 tokens", text)
    assert bar.count(top.FULL) * 2 == len(bar)


def test_what_comes_of_drafts_is_shown_where_there_is_a_draft_model():
    status = pb.SpeculationStatus(algorithm="eagle", state=pb.SPECULATION_STATE_DRAFTING)
    assert "drafts" not in render(ready(rank(0)))
    assert "  drafts: eagle, drafting\n" in render(ready(rank(0), speculation=status))
    status.state = pb.SPECULATION_STATE_PAUSED
    status.num_drafts, status.num_accepted_drafts, status.tokens_per_step = 300, 45, 1.4501
    assert "  drafts: eagle, paused, 1.45 tokens per step, 15% accepted\n" in render(
        ready(rank(0), speculation=status)
    )


def test_executors_that_do_not_beat_are_told_by_rank():
    def member(rank: int, state: str, late_ms: int = 0, tp: int = 0) -> pb.MemberStatus:
        status = pb.MemberStatus(dp_rank=rank, attn_tp_rank=tp, state=f"MEMBER_STATE_{state}")
        status.beat_late_duration.FromMilliseconds(late_ms)
        return status

    assert "executors" not in render(ready(rank(0)))
    well = [member(0, "ATTENTIVE", 3), member(1, "ATTENTIVE", 12)]
    text = render(ready(rank(0), members=well))
    assert "  executors: 2 attentive, last beats at most 12 ms late\n" in text
    ill = [*well, member(2, "SILENT"), member(3, "SUSPECT", tp=1), member(4, "SUSPECT")]
    text = render(ready(rank(0), members=ill))
    assert "2 attentive, 1 silent (rank 2), 2 suspect (rank 3.1, 4), last beats" in text
    text = render(ready(rank(0), members=[member(0, "UNATTENDED")] * 2))
    assert "  executors: 2 unattended\n" in text


def test_an_elastic_group_tells_what_it_should_have_and_its_spares():
    assert "elastic" not in render(ready(rank(0)))
    elastic = pb.ElasticStatus(target_dp_size=3, min_dp_size=2, changes={"first": 1, "shrink": 2})
    text = render(ready(rank(0), elastic=elastic))
    assert "elastic: 3 ranks wanted, 2 at least; spares: none; formed: 1 first, 2 shrink\n" in text
    for state in ("STAGED", "HELD_OFF", "STAGED"):
        elastic.spares.add(state=f"SPARE_STATE_{state}")
    assert "spares: 2 staged, 1 held off;" in render(ready(rank(0), elastic=elastic))


@pytest.mark.parametrize("name", ["user=[/b]", "user=[red]bob", "user=:smile:"])
def test_a_flow_is_shown_by_the_name_that_its_caller_gave_it(name: str):
    flows = [pb.FlowStatus(flow=name), pb.FlowStatus(flow="other")]
    assert name in render(ready(rank(0), flows=flows))


def test_flows_are_told_with_what_they_get_the_greatest_first():
    assert "flow" not in render(ready(rank(0)))
    small = [pb.FlowStatus(flow=f"x\x1b-{n}", num_waiting=1, num_served_tokens=4) for n in range(9)]
    flood = pb.FlowStatus(flow="flood", num_waiting=1200, num_running=64, served_share=0.875)
    lines = of_groups(ready(rank(0), flows=[*small, flood]), width=80)
    start = next(i for i, line in enumerate(lines) if "flow" in line)
    assert lines[start + 1].split() == ["flood", "1,200", "64", "88%", "0"]
    assert lines[start + 2].split() == ["x", "-0", "1", "0", "0%", "4"]
    assert lines[start + 1 + top.MAX_FLOWS].split() == ["2", "more", "2", "0", "0%", "8"]


def test_says_how_well_step_times_are_known():
    cost = pb.StepCostStatus(num_steps=1200, is_known=True, mean_error=0.034, base_s=8e-3)
    cost.row_s, cost.mean_s = 6e-6, 14e-6
    text = "within 3.4% on average, 8.00 ms a step, 20.0 us a token on every rank"
    assert text in render(ready(step_cost=cost))
    few = pb.StepCostStatus(num_steps=12)
    assert "step time: 12 steps seen, too few to tell" in render(ready(step_cost=few))


def test_the_last_minutes_are_a_line_and_rates():
    rates = pb.History(steps_per_s=[10, 30], total_tokens_per_s=[100, 1300])
    rates.output_tokens_per_s.extend([0, 350, 700, 1000])
    text = render(ready(rank(0), history=rates))
    assert "30 steps/s, 1,300 tokens/s with prompts" in text
    assert re.search(r"  output +▁▃▆█ 1,000 tokens/s *\n", text)
    assert "/s" not in render(ready(rank(0)))


def test_says_what_the_router_does():
    status = {"model": "demo", "version": "1.2.3", "num_live_requests": 4}
    told = "router {}  demo, 4 live requests, 1.2.3"
    assert render(is_ready=True, **status).startswith(told.format("READY"))
    assert render(**status).startswith(told.format("NOT READY"))
    assert render(is_draining=True, **status).startswith(told.format("DRAINING"))
    assert "4 live requests, 3 resumed so far, 1.2.3" in render(num_resumed_requests=3, **status)
    assert "the router has no groups" in render()


def test_shows_what_last_happened_and_lets_it_not_drive_the_terminal():
    assert "last events: none" in render()
    lost = pb.Event(name="group_lost", level="warning", group=1, epoch=2, details="steps=2")
    lost.problem = "10.0.0.7:50061 \x1b[2Jhangs"
    lost.time.FromJsonString("2026-11-23T12:03:11Z")
    drain = pb.Event(name="draining", level="info", details="grace_s=30.0")
    lines = render(events=[drain, lost]).splitlines()[-2:]
    assert lines[0].split()[1:] == ["info", "router", "draining", "grace_s=30.0"]
    shown = " ".join(lines[1].split()[1:])
    assert shown == "warning group 1 group lost 10.0.0.7:50061 [2Jhangs; steps=2"


@pytest.mark.parametrize("width", [1, 40, 52, 59, 60, 80, 99, 100, 250])
@pytest.mark.parametrize(
    "groups",
    [
        [],
        [UNFORMED],
        [ready()],
        [ready(rank(0, last_step_tokens=0, num_used_blocks=0, step_ns=0))],
        [ready(*[rank(number, last_step_tokens=number * 900) for number in range(16)]), UNFORMED],
        [ready(rank(0, num_free_blocks=0, num_used_blocks=0, num_cached_blocks=0))],
        [ready(history=pb.History(output_tokens_per_s=range(300)))],
    ],
)
def test_no_line_is_wider_than_the_terminal(groups: list[pb.GroupStatus], width: int):
    text = render(*groups, width=width)
    assert text.strip()
    assert max(map(len, text.splitlines())) <= width


def test_a_terminal_that_is_too_narrow_cuts_lines_instead_of_breaking_them():
    console = Console(file=io.StringIO(), width=20, height=50)
    with console.capture() as capture:
        console.print(top.Fitted(top.picture(pb.GetStatusResponse(groups=[ready(rank(0))]))))
    assert capture.get().splitlines()[2] == "group 0 READY    epo"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_bar_characters_gets_others(encoding: str):
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding, errors="strict"), width=100)
    with console.capture() as capture:
        console.print(top.picture(pb.GetStatusResponse(groups=[ready(rank(0))])))
    assert "########################" in capture.get()
    assert top.FULL not in capture.get()


def test_a_problem_cannot_drive_the_terminal():
    assert "\x1b" not in render(pb.GroupStatus(problem="bad\x1b[2Jname\nend"))


async def test_prints_one_picture_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    servicer = servicer_of(ready(rank(0)), UNFORMED)
    async with listening(generation(servicer)) as target:
        await top.watch(Client(target), target, 1.0, top.new_console(once=False))
    printed = capsys.readouterr().out
    assert "group 0 READY" in printed
    assert "\x1b" not in printed


class Screen(io.StringIO):
    """A terminal that keeps what `watch` draws, picture by picture."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.pictures: list[str] = []
        self._has_drawn = asyncio.Event()
        self.console = Console(file=self, force_terminal=True, width=100, height=lines)

    def write(self, text: str) -> int:
        self.pictures.append(re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text))
        self._has_drawn.set()
        return len(text)

    async def shows(self, text: str) -> str:
        """Waits for a picture, from the next one on, that has a text in it."""
        start = len(self.pictures)
        while True:
            for picture in self.pictures[start:]:
                if text in picture:
                    return picture
            self._has_drawn.clear()
            await self._has_drawn.wait()


@asynccontextmanager
async def watching(target: str, lines: int = 50) -> AsyncIterator[Screen]:
    screen = Screen(lines)
    drawing = asyncio.create_task(top.watch(Client(target), target, 0.01, screen.console))
    try:
        yield screen
    finally:
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing


async def test_the_picture_comes_back_with_the_router():
    servicer = servicer_of(ready(rank(0)))
    with held_port() as port:
        async with watching(f"127.0.0.1:{port}") as screen:
            async with listening(generation(servicer), port=port):
                await screen.shows("READY")
            await screen.shows(f"127.0.0.1:{port} does not answer: ")
            async with listening(generation(servicer), port=port):
                await screen.shows("READY")


async def test_a_router_that_is_stuck_is_said_to_be(monkeypatch: pytest.MonkeyPatch):
    """Else the last picture would stay, and look well."""
    servicer = servicer_of(ready(rank(0)))
    going_on, answer = asyncio.Event(), servicer.GetStatus

    async def wait(request: Any, context: Any) -> Any:
        await going_on.wait()
        return await answer(request, context)

    with held_port() as port:
        async with watching(f"127.0.0.1:{port}") as screen:
            async with listening(generation(servicer), port=port):
                await screen.shows("READY")
            monkeypatch.setattr(top, "ANSWER_S", 0.2)  # of the first, a late answer is the last
            servicer.GetStatus = wait
            async with listening(generation(servicer), port=port):
                await screen.shows("no answer for 0.2 s")
                going_on.set()
                await screen.shows("READY")


async def test_a_low_terminal_says_what_it_leaves_out():
    group = ready(*[rank(number) for number in range(16)])
    service = generation(servicer_of(group))
    async with listening(service) as target, watching(target, lines=8) as screen:
        shown = await screen.shows("more lines")
    assert len(shown.splitlines()) == 8
    num_lines = render(group).count("\n") + 2  # under a title and an empty line
    assert f"… {num_lines - 7} more lines" in shown


def servicer_of(*groups: pb.GroupStatus) -> Any:
    engines = FakeEngines()
    engines.groups = [*groups]
    return GenerationServicer(engines, None, version="1.2.3")  # type: ignore[arg-type]


def test_a_router_that_is_not_there_is_an_error_for_people():
    result = CliRunner().invoke(top.main, ["127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1 does not answer" in result.output
    assert "Traceback" not in result.output


def test_a_pause_of_nothing_is_refused():
    result = CliRunner().invoke(top.main, ["127.0.0.1:1", "--interval-s", "0"])
    assert result.exit_code == 2
    assert "need more than 0 seconds" in result.output
