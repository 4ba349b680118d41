"""Terminal view of a router: ``python -m router.top HOST:PORT``.

Every group and rank and the last events as GetStatus has them: on a terminal drawn anew each second,
anywhere else printed once. A router that is gone or stuck is reported as such until it answers again.
"""

import asyncio
import io
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC
from operator import attrgetter
from pathlib import Path

import click
import grpc
from google.protobuf.duration_pb2 import Duration
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import ErrorDetails
from router.client import CallFailed, Client, TimedOut, TlsFiles

ANSWER_S = 5.0  # a router that takes longer is stuck, and an old picture would hide it
MIN_WIDTH = 40  # a narrower terminal cuts what is drawn for this width
BARS_WIDTH = 60  # a narrower table has numbers only
MAX_BAR = 24
MAX_EVENTS = 8
MAX_FLOWS = 8
FLOW_COLUMNS = ("served_share", "num_running", "num_waiting", "num_served_tokens")
FULL, PART, EMPTY = "█", "▒", "·"
LEVELS = "▁▂▃▄▅▆▇█"
COLOURS = {"warning": "yellow", "error": "red"}


class Bar:
    """Bar of at most two shares of its width, from the left; a share above 0 shows."""

    def __init__(self, *shares: float) -> None:
        self._shares = shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        characters = "#+." if options.ascii_only else FULL + PART + EMPTY
        width, bar = min(MAX_BAR, options.max_width), ""
        for character, share in zip(characters, self._shares, strict=False):
            num_cells = max(round(width * share), 1 if share > 0 else 0)
            bar += character * min(num_cells, width - len(bar))
        yield Segment(bar.ljust(width, characters[-1]))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(4, options.max_width), min(MAX_BAR, options.max_width))


class Sparkline:
    """Last values of a series, as high as their share of the largest."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        levels = " .:-=+*#" if options.ascii_only else LEVELS
        width = min(MAX_BAR, options.max_width)
        most, last = max((1, *self._values)), self._values[-width:]
        line = "".join(levels[round((len(levels) - 1) * value / most)] for value in last)
        yield Segment(line.rjust(width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(4, options.max_width), min(MAX_BAR, options.max_width))


class Fitted:
    """As much of a picture as a terminal has room for, and how much that leaves out."""

    def __init__(self, picture: RenderableType) -> None:
        self._picture = picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=max(MIN_WIDTH, options.max_width), height=None)
        lines = console.render_lines(self._picture, wide)
        num_shown = len(lines)
        if num_shown > options.size.height:
            num_shown = options.size.height - 1
            note = f"… {len(lines) - num_shown} more lines: make the window taller"
            lines = [*lines[:num_shown], [Segment(note)]]
        for line in lines:
            yield from (*line, Segment.line())


def picture(status: pb.GetStatusResponse) -> Group:
    """Returns what is drawn of a router's status."""
    state, colour = ("READY", "green") if status.is_ready else ("NOT READY", "red")
    if status.groups and all(g.state == pb.GROUP_STATE_STANDBY for g in status.groups):
        state, colour = "STANDBY", "yellow"
    if status.is_draining:
        state, colour = "DRAINING", "yellow"
    facts = [status.model or "no model yet", f"{status.num_live_requests:,} live requests"]
    if status.router_id:
        facts.insert(0, status.router_id[:8])
    if status.num_resumed_requests:
        facts.append(f"{status.num_resumed_requests:,} resumed so far")
    about = ", ".join((*facts, status.version))
    parts: list[RenderableType] = [_line(("router ", "bold"), (state, colour), f"  {about}"), ""]
    for group in status.groups:
        parts += [*_group(group), ""]
    if not status.groups:
        parts += ["the router has no groups", ""]
    return Group(*parts, *_events(status.events))


def _events(events: Sequence[pb.Event]) -> Iterator[RenderableType]:
    yield _line(("last events", "bold"), "" if events else ": none")
    for event in events[:MAX_EVENTS]:
        time = event.time.ToDatetime(UTC).astimezone().strftime("%H:%M:%S")
        of = f"group {event.group}" if event.HasField("group") else "router"
        name = event.name.replace("_", " ")
        said = _printable("; ".join(filter(None, (event.problem, event.details))))
        level = (f"{event.level:<7} ", COLOURS.get(event.level, ""))
        yield _line((f"  {time} ", "dim"), level, f"{of:<8} {name:<17} ", (said, "dim"))


def _group(group: pb.GroupStatus) -> Iterator[RenderableType]:
    history, facts = group.history, [f"epoch {group.epoch}", f"step {group.step:,}"]
    if history.steps_per_s:
        facts.append(f"{history.steps_per_s[-1]:,} steps/s")
        facts.append(f"{history.total_tokens_per_s[-1]:,} tokens/s with prompts")
    if group.HasField("last_step_age"):
        facts.append(f"last step {_duration(group.last_step_age)} ago")
    if group.num_standbys:
        facts.append(f"{group.num_standbys} standing by")
    state = pb.GroupState.Name(group.state).removeprefix("GROUP_STATE_")
    is_ready = state == "READY"
    shown = (f"{state:<8}", {"READY": "green", "STANDBY": "yellow"}.get(state, "red"))
    yield _line((f"group {group.group} ", "bold"), shown, " " + ", ".join(facts))
    if group.problem:  # whole: an operator must read it
        yield Padding(Text(_printable(group.problem), "yellow"), (0, 0, 0, 2))
    num_live = group.num_waiting + sum(rank.num_running for rank in group.ranks)
    load = Table.grid(Column(width=9), Column(), Column(no_wrap=True), padding=(0, 1, 0, 0))
    if history.output_tokens_per_s:
        output = history.output_tokens_per_s
        load.add_row("  output", Sparkline(output), f"{output[-1]:,} tokens/s")
    load.add_row(
        "  waiting",
        Bar(group.num_waiting / max(1, num_live)),
        f"{group.num_waiting:,} of {num_live:,} sequences, {group.num_waiting_tokens:,} tokens",
    )
    yield load
    if group.ranks:
        yield _RankTable(group.ranks)
    elif is_ready:
        yield "  no ranks"
    if group.flows:
        yield _flows(group.flows)
    if group.members:
        yield _line(("  executors: " + _members(group.members), "dim"))
    if group.HasField("elastic"):
        yield _line(("  elastic: " + _elastic(group.elastic), "dim"))
    if group.HasField("speculation"):
        yield _line(("  drafts: " + _drafts(group.speculation), "dim"))
    if group.step_cost.num_steps:
        yield _line(("  step time: " + _step_cost(group.step_cost), "dim"))
    if group.graphs:
        yield _line(("  steps by what ran them: " + _graphs(group.graphs), "dim"))


class _RankTable:
    """Ranks of a group; a narrow table has no bars, and only the last step."""

    def __init__(self, ranks: Sequence[pb.RankStatus]) -> None:
        self._ranks = ranks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        has_bars = options.max_width >= BARS_WIDTH
        headers = ["rank", "run", "tokens", "kv%", "step"]
        if has_bars:
            headers = ["rank", "run", "tokens in the last step", "", "KV used, cached", ""]
            headers += ["step", "prefix", "preempted"]
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for header in headers:
            is_bar = " " in header  # these give way to the numbers
            title = Text(header, no_wrap=True, overflow="ellipsis")
            table.add_column(title, justify="left" if is_bar else "right", no_wrap=not is_bar)
        most_tokens = max(1, *(rank.last_step_tokens for rank in self._ranks))
        for rank in self._ranks:
            num_blocks = rank.num_used_blocks + rank.num_cached_blocks + rank.num_free_blocks
            used = rank.num_used_blocks / max(1, num_blocks)
            cached = rank.num_cached_blocks / max(1, num_blocks)
            cells: list[RenderableType] = [str(rank.dp_rank), str(rank.num_running)]
            cells += [Bar(rank.last_step_tokens / most_tokens)] * has_bars
            cells += [f"{rank.last_step_tokens:,}"]
            cells += [Bar(used, cached)] * has_bars
            cells += [f"{used:.0%}", _duration(rank.last_step_duration)]
            cells += [f"{rank.prefix_hit_rate:.0%}", f"{rank.num_preemptions:,}"] * has_bars
            table.add_row(*cells)
        yield table


def _flows(flows: Sequence[pb.FlowStatus]) -> Table:
    """Returns a line for each of the flows that have most: what waits and runs, and what they get."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    name = Text("flow", no_wrap=True, overflow="ellipsis")
    table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=MAX_BAR + 8)
    for header in ("waiting", "run", "share of 10 s", "tokens in all"):
        table.add_column(header, justify="right")
    shown = sorted(flows, key=attrgetter(*FLOW_COLUMNS), reverse=True)
    if rest := shown[MAX_FLOWS:]:
        sums = {name: sum(map(attrgetter(name), rest)) for name in FLOW_COLUMNS}
        shown[MAX_FLOWS:] = [pb.FlowStatus(flow=f"{len(rest)} more", **sums)]
    for flow in shown:
        table.add_row(
            Text(_printable(flow.flow) or "-"),  # a caller chose it: no markup of ours
            f"{flow.num_waiting:,}",
            f"{flow.num_running:,}",
            f"{flow.served_share:.0%}",
            f"{flow.num_served_tokens:,}",
        )
    return table


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _elastic(elastic: pb.ElasticStatus) -> str:
    """Returns what an elastic group should have, has besides, and how it changed."""
    counts = Counter(
        pb.SpareState.Name(spare.state).removeprefix("SPARE_STATE_").lower().replace("_", " ")
        for spare in elastic.spares
    )
    spares = ", ".join(f"{count} {word}" for word, count in counts.items()) or "none"
    changes = ", ".join(f"{count} {name}" for name, count in sorted(elastic.changes.items()))
    return (
        f"{elastic.target_dp_size} ranks wanted, {elastic.min_dp_size} at least; spares: {spares}; "
        f"formed: {changes}"
    )


def _members(members: Sequence[pb.MemberStatus]) -> str:
    """Returns what beats say of a group's executors, with the ranks of those that are late."""
    ranks: dict[str, list[str]] = {}
    for member in members:
        word = pb.MemberState.Name(member.state).removeprefix("MEMBER_STATE_").lower()
        rank = str(member.dp_rank) + f".{member.attn_tp_rank}" * (member.attn_tp_rank > 0)
        ranks.setdefault(word, []).append(rank)
    parts = [
        f"{len(found)} {word}" + f" (rank {', '.join(found)})" * (word in ("suspect", "silent"))
        for word, found in ranks.items()
    ]
    if "attentive" in ranks:
        latest_ms = max(m.beat_late_duration.ToNanoseconds() for m in members) / 1e6
        parts.append(f"last beats at most {latest_ms:.0f} ms late")
    return ", ".join(parts)


def _graphs(graphs: Sequence[pb.GraphCount]) -> str:
    """Returns the steps by runner and, of those without a graph, by reason."""
    counts: Counter[str] = Counter()
    for count in graphs:
        counts[f"{count.runner} ({count.miss})" if count.miss else count.runner] += count.num_steps
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def _drafts(status: pb.SpeculationStatus) -> str:
    """Returns whether a group drafts, and what comes of it."""
    state = pb.SpeculationState.Name(status.state).removeprefix("SPECULATION_STATE_").lower()
    parts = [status.algorithm, state]
    if status.HasField("tokens_per_step"):
        accepted = status.num_accepted_drafts / max(1, status.num_drafts)
        parts += [f"{status.tokens_per_step:.2f} tokens per step", f"{accepted:.0%} accepted"]
    return ", ".join(part for part in parts if part)


def _step_cost(cost: pb.StepCostStatus) -> str:
    """Returns what a group's steps take: how well that is known, a step, and a prompt's token."""
    if not cost.is_known:
        return f"{cost.num_steps:,} steps seen, too few to tell"
    return (
        f"predicted within {cost.mean_error:.1%} on average, {1e3 * cost.base_s:.2f} ms a step, "
        f"{1e6 * (cost.row_s + cost.mean_s):.1f} us a token on every rank"
    )


def _duration(duration: Duration) -> str:
    """Returns a duration in at most 8 characters."""
    seconds = duration.ToNanoseconds() / 1e9
    if seconds == 0:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds / 3600:.1f} h"


def new_console(*, once: bool) -> Console:
    """Returns the console on standard output; one that is drawn on once counts as no terminal."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # a terminal without "…" gets "?"
    if once or not out.isatty() or Console().is_dumb_terminal:
        return Console(force_terminal=False, width=shutil.get_terminal_size((100, 24)).columns)
    return Console(force_terminal=True)


async def watch(client: Client, address: str, interval_s: float, console: Console) -> None:
    """Draws until interrupted; once where the console is no terminal.

    Args:
        client: Of the router, not opened yet.
        address: The router's, to be shown.
        interval_s: Between two pictures.
        console: Where to draw.

    Raises:
        CallFailed: The router does not answer, and never has.
    """
    async with client:
        status = await _ask(client)
        if not console.is_terminal:
            console.print(picture(status), crop=False)
            return
        drawn: RenderableType = picture(status)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                title = Text(f"{address}   {time.strftime('%H:%M:%S')}   Ctrl-C ends\n")
                live.update(Fitted(Group(title, drawn)), refresh=True)
                await asyncio.sleep(interval_s)
                try:
                    drawn = picture(await _ask(client))
                except CallFailed as error:
                    drawn = Text(f"{address} does not answer: {error}")


async def _ask(client: Client) -> pb.GetStatusResponse:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await client.get_router_status()
    except TimeoutError as error:
        problem = f"no answer for {ANSWER_S:g} s"
        raise TimedOut(grpc.StatusCode.DEADLINE_EXCEEDED, problem, ErrorDetails()) from error


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--interval-s", default=1.0, show_default=True, help="Seconds between two pictures.")
@click.option("--once", is_flag=True, help="Print one picture and end, as without a terminal.")
@click.option("--ca", type=Path, help="CA certificates of the router, in PEM; without: plain text.")
@click.option("--cert", type=Path, help="Certificate to show the router, in PEM; with --ca.")
@click.option("--key", type=Path, help="Its private key, in PEM.")
@click.option("--token", type=Path, help="File whose first line is a token that the router takes.")
@click.option("--plaintext", is_flag=True, help="Send the token off this machine in plain text.")
def main(
    address: str,
    interval_s: float,
    once: bool,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    token: Path | None,
    plaintext: bool,
) -> None:
    """Shows every group and rank of the router at HOST:PORT."""
    if ca is None and (cert or key):
        raise click.UsageError("--cert and --key go with --ca: without TLS nobody sees them")
    try:
        tls = None if ca is None else TlsFiles(cert, key, ca)
        client = Client(address, tls, token=token, plaintext=plaintext)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if interval_s <= 0:
        raise click.UsageError(f"interval_s={interval_s}: need more than 0 seconds")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it, too, restores the terminal
    try:
        asyncio.run(watch(client, address, interval_s, new_console(once=once)))
    except KeyboardInterrupt:
        pass
    except CallFailed as error:
        raise click.ClickException(f"{address} does not answer: {error}") from error


if __name__ == "__main__":
    main(prog_name="python -m router.top")
