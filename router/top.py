"""``python -m router.top HOST:PORT``: a live picture of every group and rank of a router.

Plain text and ANSI colours. On a terminal it is drawn anew each second, at the terminal's size;
anywhere else one frame is printed. The picture comes from GetStatus alone. A router that is gone or
stuck is said to be, and the picture is back when it is.
"""

import asyncio
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import grpc

from protos.transport.errors import ErrorDetails
from router.client import CallFailed, Client, TimedOut, TlsFiles
from router.client.status import GroupState, GroupStatus, RankStatus, SpeculationStatus

HOME, CLEAR_REST, CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"
# Without a cursor, and long lines cut by a terminal that is narrower than the picture.
BEGIN, END = "\x1b[?25l\x1b[?7l", "\x1b[?25h\x1b[?7h"
RESET, BOLD, DIM, RED, GREEN, YELLOW = (f"\x1b[{code}m" for code in (0, 1, 2, 31, 32, 33))
MIN_WIDTH = 40
ANSWER_S = 5.0  # a router that takes longer is stuck, and an old picture would hide it
MAX_BAR = 24
FULL, PART, EMPTY = "█", "▒", "·"
ASCII = str.maketrans({FULL: "#", PART: "+", EMPTY: "."})


@dataclass(frozen=True, slots=True)
class Frame:
    """What GetStatus said at one moment.

    Attributes:
        time: In seconds, of any steady clock.
        groups: By number.
    """

    time: float
    groups: Sequence[GroupStatus]


def render(now: Frame, width: int, *, before: Frame | None = None, colours: bool = False) -> str:
    """Returns the picture: lines of at most `width` characters, colours not counted.

    Args:
        now: What to draw.
        width: Of the terminal; below MIN_WIDTH the picture is as wide as that.
        before: An earlier frame, for what takes two: tokens and steps per second.
        colours: Whether to use ANSI colours.
    """
    width = max(width, MIN_WIDTH)
    lines: list[str] = []
    for group in now.groups:
        lines += _group_lines(group, width, _Rates.between(before, now, group), colours)
        lines.append("")
    if not now.groups:
        lines.append("the router has no groups")
    return "\n".join(lines).rstrip("\n") + "\n"


@dataclass(frozen=True, slots=True)
class _Rates:
    """Per second, between two frames of one epoch; None where there are no two."""

    steps: float | None = None
    tokens: float | None = None

    @classmethod
    def between(cls, before: Frame | None, now: Frame, group: GroupStatus) -> "_Rates":
        old = next((g for g in before.groups if g.group == group.group), None) if before else None
        if before is None or old is None or old.epoch != group.epoch or now.time <= before.time:
            return cls()
        seconds = now.time - before.time
        tokens = _total_tokens(group) - _total_tokens(old)
        return cls((group.step - old.step) / seconds, tokens / seconds)


def _total_tokens(group: GroupStatus) -> int:
    return sum(rank.total_tokens for rank in group.ranks)


def _group_lines(group: GroupStatus, width: int, rates: _Rates, colours: bool) -> list[str]:
    is_ready = group.state is GroupState.READY
    paint = _painter(colours)
    parts = [f"epoch {group.epoch}", f"step {group.step:,}"]
    if rates.steps is not None and rates.tokens is not None:
        parts += [f"{rates.steps:,.0f} steps/s", f"{rates.tokens:,.0f} tokens/s"]
    if group.last_step_age_s is not None:
        parts.append(f"last step {_seconds(group.last_step_age_s)} ago")
    title = f"group {group.group} "
    state = f"{group.state.name:<8}"
    rest = _cut(" ".join(["", *_join_with_dots(parts)]), width - len(title) - len(state))
    lines = [paint(title, BOLD) + paint(state, GREEN if is_ready else RED) + rest]
    if group.problem:
        problem = "".join(c if c.isprintable() else " " for c in group.problem)
        wrapped = textwrap.wrap(problem, width, initial_indent="  ", subsequent_indent="  ")
        lines += [paint(line, YELLOW) for line in wrapped]  # whole: an operator must read it
    lines.append(_cut(_queue(group, min(MAX_BAR, width // 4)), width))
    if group.ranks:
        lines += _rank_lines(group.ranks, width, paint)
    elif is_ready:
        lines.append("  no ranks")
    if group.speculation is not None:
        lines.append(paint(_cut("  drafts: " + _drafts(group.speculation), width), DIM))
    if group.graphs:
        lines.append(paint(_cut("  steps by what ran them: " + _graphs(group), width), DIM))
    return lines


def _queue(group: GroupStatus, bar: int) -> str:
    """Returns what waits, as a share of all live sequences."""
    num_waiting = group.num_waiting
    num_live = num_waiting + sum(rank.num_running for rank in group.ranks)
    return (
        f"  waiting {_bar(bar, num_waiting / max(1, num_live))} "
        f"{num_waiting:,} of {num_live:,} sequences, {group.num_waiting_tokens:,} tokens"
    )


def _rank_lines(
    ranks: Sequence[RankStatus], width: int, paint: Callable[[str, str], str]
) -> list[str]:
    """Returns a table: its numbers take 51 columns, two bars share what is left."""
    bar = min(MAX_BAR, (width - 51) // 2)
    most_tokens = max(1, *(rank.last_step_tokens for rank in ranks))
    if bar < 4:
        header, bar = "rank  run tokens   kv%     step", 0
    else:
        tokens, kv = "tokens in the last step", "KV used, cached"
        if bar < len(tokens) - 7:
            tokens, kv = "tokens", "KV"
        header = f"rank  run  {tokens:<{bar + 7}} {kv:<{bar + 5}}     step  prefix preempted"
    lines = [paint(_cut(header, width), DIM)]
    for rank in ranks:
        num_blocks = rank.num_used_blocks + rank.num_cached_blocks + rank.num_free_blocks
        used = rank.num_used_blocks / max(1, num_blocks)
        cached = rank.num_cached_blocks / max(1, num_blocks)
        tokens, step = f"{rank.last_step_tokens:>6,}", _seconds(rank.last_step_s)
        if bar:
            line = (
                f"{rank.dp_rank:>4} {rank.num_running:>4}  "
                f"{_bar(bar, rank.last_step_tokens / most_tokens)} {tokens}"
                f" {_bar(bar, used, cached)} {used:>4.0%} {step:>8}"
                f" {rank.prefix_hit_rate:>7.0%} {rank.num_preemptions:>9,}"
            )
        else:
            line = f"{rank.dp_rank:>4} {rank.num_running:>4} {tokens} {used:>5.0%} {step:>8}"
        lines.append(_cut(line, width))
    return lines


def _graphs(group: GroupStatus) -> str:
    """Returns the steps by runner and, of those without a graph, by reason."""
    counts: dict[str, int] = {}
    for count in group.graphs:
        name = f"{count.runner} ({count.miss})" if count.miss else count.runner
        counts[name] = counts.get(name, 0) + count.num_steps
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def _drafts(status: SpeculationStatus) -> str:
    """Returns whether the group drafts, and what comes of it."""
    parts = [status.algorithm, status.state.name.lower()]
    if status.tokens_per_step is not None:
        accepted = status.num_accepted_drafts / max(1, status.num_drafts)
        parts += [f"{status.tokens_per_step:.2f} tokens per step", f"{accepted:.0%} accepted"]
    return ", ".join(part for part in parts if part)


def _bar(width: int, full: float, part: float = 0.0) -> str:
    """Returns a bar of two shares of its width; whatever is not nothing shows."""
    num_full = _cells(width, full)
    num_part = min(width - num_full, _cells(width, part))
    return FULL * num_full + PART * num_part + EMPTY * (width - num_full - num_part)


def _cells(width: int, share: float) -> int:
    return min(width, max(round(width * share), 1 if share > 0 else 0))


def _seconds(seconds: float) -> str:
    """Returns a duration in at most 8 characters."""
    if seconds == 0:
        return "-"
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds / 3600:.1f} h"


def _join_with_dots(parts: Sequence[str]) -> list[str]:
    return [part + " ·" for part in parts[:-1]] + list(parts[-1:])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _painter(colours: bool) -> Callable[[str, str], str]:
    return (lambda text, code: code + text + RESET) if colours else (lambda text, code: text)


async def watch(client: Client, address: str, interval_s: float, *, once: bool) -> None:
    """Draws until interrupted, or once.

    Args:
        client: Of the router, not opened yet.
        address: The router's, to be shown.
        interval_s: Between two pictures.
        once: Whether to draw one alone.

    Raises:
        CallFailed: The router does not answer, and never has.
    """
    before: Frame | None = None
    async with client:
        while True:
            try:
                frame = Frame(time.monotonic(), await _ask(client))
                text = render(frame, _size().columns, before=before, colours=not once)
                before = frame
            except CallFailed as error:
                if before is None:
                    raise
                text = f"{address} does not answer: {error}\n"
            if once:
                _write(text)
                return
            lines = f"{address}   {time.strftime('%H:%M:%S')}   Ctrl-C ends\n\n" + text
            shown = _fit(lines.splitlines(), _size().lines - 1)
            # Each line clears what an earlier, longer one left; no flicker, unlike a clear screen.
            _write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in shown) + CLEAR_REST)
            await asyncio.sleep(interval_s)


async def _ask(client: Client) -> list[GroupStatus]:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await client.get_status()
    except TimeoutError as error:
        problem = f"no answer for {ANSWER_S:g} s"
        raise TimedOut(grpc.StatusCode.DEADLINE_EXCEEDED, problem, ErrorDetails()) from error


def _fit(lines: Sequence[str], height: int) -> list[str]:
    """Returns what a terminal has room for, and says how much that leaves out."""
    if len(lines) <= height:
        return list(lines)
    shown = max(0, height - 1)
    return [*lines[:shown], f"… {len(lines) - shown} more lines: make the window taller"]


def _size() -> os.terminal_size:
    return shutil.get_terminal_size((100, 24))


def _write(text: str) -> None:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = text.translate(ASCII).replace("·", "|").replace("…", ">")
    sys.stdout.write(text)
    sys.stdout.flush()


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
    """Shows what every group and rank of the router at HOST:PORT is doing."""
    if ca is None and (cert or key):
        raise click.UsageError("--cert and --key go with --ca: without TLS nobody sees them")
    try:
        tls = None if ca is None else TlsFiles(cert, key, ca)
        client = Client(address, tls, token=token, plaintext=plaintext)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if interval_s <= 0:
        raise click.UsageError(f"interval_s={interval_s}: need more than 0 seconds")
    once = once or not sys.stdout.isatty()
    try:
        if not once:
            signal.signal(
                signal.SIGTERM, signal.default_int_handler
            )  # it, too, gives the cursor back
            _write(BEGIN)
        asyncio.run(watch(client, address, interval_s, once=once))
    except KeyboardInterrupt:
        pass
    except CallFailed as error:
        raise click.ClickException(f"{address} does not answer: {error}") from error
    finally:
        if not once:
            _write(END)


if __name__ == "__main__":
    main(prog_name="python -m router.top")
