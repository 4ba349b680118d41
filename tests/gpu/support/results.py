"""Results of a run in RESULTS.md: rows of its tables are replaced, all else stays.

A table is found by the heading above it, a row by its first cell. A row that nobody has run keeps
what it says, so a partial run claims nothing about the rest.
"""

import datetime
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.support.machine import Machine

Rows = Mapping[str, Sequence[str]]  # first cell to the other cells

MACHINE_TABLE = "Where it ran"
CHECKS_TABLE = "Checks"

# What each file of tests is about.
GROUPS = {
    "test_ops": "norms, rotation, activation and experts against PyTorch on the CPU",
    "test_attention": "attention and stored keys against PyTorch on the CPU, graphs' wrappers too",
    "test_attention_trees": "attention under tree masks, likewise, and masks of replays",
    "test_all_to_all": "FlashInfer's all-to-all between ranks on one GPU, against all experts on one",
    "test_runners": "replays against eager runs, poisoned tails, idle ranks, capturing again",
    "test_sampling": "filters and samples against PyTorch on the CPU; a seed's token in a captured graph",
    "test_staging": "columns of a step; decode steps that wait only to read their tokens",
    "test_stack": "the demo's requests through router and executor",
    "test_bench": "the measurements below ran to their end",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Measurements under one heading of RESULTS.md.

    Attributes:
        title: The heading.
        columns: Their names, without the date, which comes last.
        rows: First cell to the other cells.
    """

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = [self.columns, *((key, *cells) for key, cells in self.rows.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        ]
        return "\n".join([self.title, *padded])


@dataclass(slots=True)
class Outcomes:
    """How the tests of each file ended."""

    by_group: dict[str, dict[str, int]] = field(default_factory=dict)
    reasons: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, report: Any) -> None:
        """Counts a test once, by pytest's report of its call, or of the stage that ended it."""
        if report.when != "call" and report.passed:
            return
        group = Path(report.nodeid.partition("::")[0]).stem
        counts = self.by_group.setdefault(group, {})
        counts[report.outcome] = counts.get(report.outcome, 0) + 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[group].add(str(report.longrepr[2]).removeprefix("Skipped: "))

    def cell(self, group: str) -> str:
        counts = self.by_group[group]
        parts = [
            f"{counts[outcome]} {outcome}"
            for outcome in ("passed", "failed", "skipped")
            if outcome in counts
        ]
        reasons = "; ".join(sorted(self.reasons[group]))
        return ", ".join(parts) + (f" ({reasons})" if reasons else "")


def write_outcomes(machine: Machine, outcomes: Outcomes) -> None:
    """Writes how the tests ended, if results are wanted."""
    rows = {group: (GROUPS[group], outcomes.cell(group)) for group in outcomes.by_group}
    _write(machine, CHECKS_TABLE, rows)


def publish(machine: Machine, table: Table) -> None:
    """Prints measurements, and writes them if results are wanted."""
    print(f"\n{table}", flush=True)
    _write(machine, table.title, table.rows)


def _write(machine: Machine, title: str, rows: Rows) -> None:
    if machine.results is None:
        return
    today = datetime.date.today().isoformat()
    text = machine.results.read_text(encoding="utf-8")
    facts = {"Date": today, **machine.facts()}
    text = replace_rows(text, MACHINE_TABLE, {name: (fact,) for name, fact in facts.items()})
    dated = {key: (*cells, today) for key, cells in rows.items()}
    machine.results.write_text(replace_rows(text, title, dated), encoding="utf-8")


def replace_rows(text: str, title: str, rows: Rows) -> str:
    """Returns the text with these rows in the table under that heading; new ones come last.

    Args:
        text: Markdown.
        title: Of a heading of second level.
        rows: As many cells each as the table has columns after the first.

    Raises:
        ValueError: There is no such table, or a row has another number of cells.
    """
    found = re.search(rf"^## {re.escape(title)}\n[^#]*?((?:^\|.*\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no table under the heading {title!r}")
    header, rule, *body = found[1].splitlines()
    width = len(_cells(header))
    lines = {_cells(line)[0]: line for line in body}
    for key, cells in rows.items():
        if len(cells) + 1 != width:
            raise ValueError(f"{title}, {key}: {len(cells) + 1} cells, the table has {width}")
        escaped = [cell.replace("|", "/").replace("\n", " ") for cell in (key, *cells)]
        lines[key] = f"| {' | '.join(escaped)} |"
    table = "".join(f"{line}\n" for line in (header, rule, *lines.values()))
    return text[: found.start(1)] + table + text[found.end(1) :]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
