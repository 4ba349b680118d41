"""Results of runs in RESULTS.md: rows of its tables are replaced, all else stays.

A table is found by the heading above it, a row by its first cell. The second cell is its result, or
"not run" with the reason; the last one is the run that it is from, of the table of runs. The file is
replaced as a whole each time, so that whatever ends a process leaves the old one or the new one.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS_PATH = "LOCKSTEP_GPU_RESULTS"  # of the file; without it results are only printed
RUN = "LOCKSTEP_GPU_RUN"  # its day and GPU
NOT_RUN = "not run"

Rows = Mapping[str, Sequence[str]]  # first cell to the other cells


@dataclass(frozen=True, slots=True)
class Table:
    """Measurements under one heading of RESULTS.md.

    Attributes:
        title: The heading.
        columns: Their names, without the run, which comes last.
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


def publish(table: Table) -> None:
    """Prints measurements, and writes them if a file is named for them."""
    print(f"\n{table}", flush=True)
    if path := os.environ.get(RESULTS_PATH):
        run = os.environ[RUN]
        put(Path(path), table.title, {key: (*row, run) for key, row in table.rows.items()})


def read(path: Path, title: str) -> dict[str, list[str]]:
    """Returns the rows of the table under a heading. Raises ValueError if there is none."""
    table = _find(path.read_text(encoding="utf-8"), title)
    return {key: cells for key, *cells in map(_cells, table[1].splitlines()[2:])}


def put(path: Path, title: str, rows: Rows) -> None:
    """Replaces rows of a file, as ``replace_rows`` does."""
    text = replace_rows(path.read_text(encoding="utf-8"), title, rows)
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def explain(path: Path, title: str, reason: str, keys: Sequence[str] | None = None) -> None:
    """Says why rows have not run, those of the keys or all; what has run stays."""
    rows = read(path, title)
    changed = {
        key: (f"{NOT_RUN}: {reason}", *rest)
        for key, (result, *rest) in rows.items()
        if result.startswith(NOT_RUN) and (keys is None or key in keys)
    }
    put(path, title, changed)


def replace_rows(text: str, title: str, rows: Rows) -> str:
    """Returns the text with these rows in the table under that heading; new ones come last.

    Args:
        text: Markdown.
        title: Of a heading of second level.
        rows: As many cells each as the table has columns after the first.

    Raises:
        ValueError: There is no such table, or a row has another number of cells.
    """
    found = _find(text, title)
    header, rule, *body = found[1].splitlines()
    width = len(_cells(header))
    lines = {_cells(line)[0]: line for line in body}
    for key, cells in rows.items():
        if len(cells) + 1 != width:
            raise ValueError(f"{title}, {key}: {len(cells) + 1} cells, the table has {width}")
        escaped = [" ".join(cell.replace("|", "/").split()) for cell in (key, *cells)]
        lines[key] = f"| {' | '.join(escaped)} |"
    table = "".join(f"{line}\n" for line in (header, rule, *lines.values()))
    return text[: found.start(1)] + table + text[found.end(1) :]


def _find(text: str, title: str) -> re.Match[str]:
    found = re.search(rf"^## {re.escape(title)}\n[^#]*?((?:^\|.*\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no table under the heading {title!r}")
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
