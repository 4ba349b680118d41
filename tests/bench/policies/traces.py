"""Recorded loads: when requests came, how long they were, and what prompts had in common.

`azure_conversations.csv` has times, prompt and output tokens. `mooncake_conversations.csv` has, beside
these, the names of the prompt's blocks of 512 tokens, each with all before it, as ranges. An operator's
own trace is a file of either form; Mooncake's and Azure's originals are read, too.
"""

import csv
import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from tests.bench.policies.world import Job

DATA = Path(__file__).parents[1] / "data"
OWN = {
    "azure": DATA / "azure_conversations.csv",
    "mooncake": DATA / "mooncake_conversations.csv",
}
MAX_PROMPT, MAX_OUTPUT = 30_000, 1_500  # what is longer is cut
FAR = 1 << 24  # beyond all names of a trace


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace; names as of `Job`."""

    time: float
    num_prompt: int
    num_output: int
    names: tuple[int, ...] = ()


def read_trace(path: Path, count: int, skipped: int = 0) -> list[Arrival]:
    """Returns so many requests of a trace behind those that are skipped, the first at 0 s."""
    with path.open(newline="") as file:
        lines = (line for line in file if line.strip() and not line.startswith("#"))
        read = _read_json if path.suffix == ".jsonl" else _read_csv
        arrivals = list(islice(read(lines), skipped, skipped + count))
    if not arrivals:
        raise SystemExit(f"{path} has no request behind the {skipped} that --skip leaves out")
    start = arrivals[0].time
    cut = [
        Arrival(
            one.time - start,
            min(max(1, one.num_prompt), MAX_PROMPT),
            min(max(1, one.num_output), MAX_OUTPUT),
            one.names,
        )
        for one in arrivals
    ]
    return list(_spread(cut))


def _read_csv(lines: Iterator[str]) -> Iterator[Arrival]:
    rows = csv.reader(lines)
    has_names = len(next(rows)) == 4
    for row in rows:
        if has_names:
            names = tuple(name for part in row[3].split() for name in _names_of(part))
            yield Arrival(float(row[0]), int(row[1]), int(row[2]), names)
        else:
            time = datetime.datetime.fromisoformat(row[0][:26]).timestamp()
            yield Arrival(time, int(row[1]), int(row[2]))


def _names_of(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def _read_json(lines: Iterator[str]) -> Iterator[Arrival]:
    for line in lines:
        row = json.loads(line)
        length, names = row["input_length"], tuple(row["hash_ids"])
        yield Arrival(row["timestamp"] / 1e3, length, row["output_length"], names)


def _spread(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """Yields requests of one stamp evenly over the time until the next stamp."""
    groups = [list(group) for _, group in groupby(arrivals, key=lambda one: one.time)]
    for group, following in zip(groups, [*groups[1:], groups[-1]], strict=True):
        width = following[0].time - group[0].time
        for index, one in enumerate(group):
            time = one.time + width * index / len(group)
            yield Arrival(time, one.num_prompt, one.num_output, one.names)


def jobs_at(arrivals: Sequence[Arrival], rate: float | None, *, copy: int = 0) -> list[Job]:
    """Returns jobs that come at so many a second on average; None: all at once.

    Another copy of them has other prompts.
    """
    own = len(arrivals) / max(arrivals[-1].time, 1e-9)
    factor = 0.0 if rate is None else own / rate
    return [
        Job(
            copy * len(arrivals) + number,
            one.time * factor,
            one.num_prompt,
            one.num_output,
            tuple(name + copy * FAR for name in one.names),
        )
        for number, one in enumerate(arrivals)
    ]
