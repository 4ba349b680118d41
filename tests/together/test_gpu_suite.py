"""The GPU suite itself, without a GPU: a typo in it cannot wait for one, and it claims nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch

from tests.gpu import __main__ as suite
from tests.gpu.bench_gpu import DECODES, LIMIT, PREFILLS, REGISTRY, TRANSFORMERS
from tests.gpu.support import machine
from tests.gpu.support.results import CHECKS_TABLE, GROUPS, MACHINE_TABLE, replace_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/gpu/RESULTS.md"
NOT_RUN = "not run yet: no GPU was available"
TITLES = [MACHINE_TABLE, CHECKS_TABLE, "Memory bandwidth"]
TITLES += [title for title, _ in (DECODES, LIMIT, PREFILLS, REGISTRY, TRANSFORMERS)]


def run_suite(*args: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs the suite as ``make gpu`` does, with no GPU in sight."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", *args],
        cwd=ROOT,
        env={**kept, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def rows_of(text: str, title: str) -> dict[str, str]:
    """Returns the rows of a table by their first cells."""
    found = re.search(rf"^## {title}\n[^#]*?((?:^\|.*\n)+)", text, re.MULTILINE)
    assert found is not None, title
    return {line.split("|")[1].strip(): line for line in found[1].splitlines()[2:]}


def test_without_a_gpu_everything_is_skipped_with_a_reason() -> None:
    before = RESULTS.read_text()
    done = run_suite("-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert re.search(r"\d{2,} skipped", summary), summary
    assert not re.search(r"passed|failed|error", summary), summary
    reasons = {line.partition(": ")[2] for line in done.stdout.splitlines() if "SKIPPED" in line}
    assert reasons == {"needs a GPU: PyTorch finds no CUDA device here"}
    assert RESULTS.read_text() == before


def test_every_test_and_measurement_runs_where_a_cpu_stands_in(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    before = RESULTS.read_text()
    results = tmp_path / "results.md"
    results.write_text(before)
    done = run_suite("-q", LOCKSTEP_GPU_TESTS_ON="cpu", LOCKSTEP_GPU_RESULTS=str(results))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs a Hopper GPU" in done.stdout
    assert len(re.findall("^SKIPPED", done.stdout, re.MULTILINE)) == 1, "only fa3 may be skipped"

    written = results.read_text()
    checks = rows_of(written, CHECKS_TABLE)
    assert checks.keys() == GROUPS.keys()
    for row in checks.values():
        assert re.search(r"\| \d+ passed", row), row
        assert "failed" not in row
    for title in TITLES:
        changed = {key: row for key, row in rows_of(written, title).items() if NOT_RUN not in row}
        assert changed, f"nothing was written under {title}"
    assert "a CPU stood in" in rows_of(written, MACHINE_TABLE)["GPU"]
    assert RESULTS.read_text() == before, "a CPU's results are no results"


def test_every_file_has_a_process_and_kernels_that_spin_for_one_another_come_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One trap ends the CUDA context of its process, and with it all tests behind it."""
    ran: list[tuple[str, str | None]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        name = Path(command[3]).name
        ran.append((name, env.get("CUDA_MODULE_LOADING")))
        return SimpleNamespace(returncode={"test_ops.py": 1, "test_bench.py": 5}.get(name, 0))

    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.setattr(suite.subprocess, "run", run)
    assert suite.run(["-k", "some"]) == ["test_ops.py"]
    assert [name.removesuffix(".py") for name, _ in ran[:-1]] == sorted(
        GROUPS.keys() - {"test_all_to_all"}
    )
    assert ran[-1] == ("test_all_to_all.py", "EAGER")
    assert {loading for _, loading in ran[:-1]} == {None}


def test_the_machine_asks_pytorch_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stand-in never runs: with no GPU, only names and arguments can be checked."""
    answers: dict[str, Any] = {
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(
            name="Some GPU", total_memory=80 << 30, memory_clock_rate=1_000, memory_bus_width=80
        ),
        "memory_allocated": 10,
        "memory_reserved": 20,
        "mem_get_info": (30, 40),
        "empty_cache": None,
        "synchronize": None,
        "set_sync_debug_mode": None,
        "Stream": None,
    }
    for name, answer in answers.items():
        real = getattr(torch.cuda, name)
        stand_in: Any = create_autospec(real) if name != "Stream" else Mock()
        stand_in.return_value = answer
        monkeypatch.setattr(torch.cuda, name, stand_in)
    gpu = machine.Gpu()
    assert gpu.results == RESULTS
    assert gpu.memory() == (10, 20)
    assert gpu.free_bytes() == 30
    assert gpu.bandwidth() == 2 * 1e6 * 10
    assert gpu.facts()["GPU"] == "Some GPU, 80 GiB"
    assert gpu.has_fa3
    assert not gpu.no_grouped_graphs
    with gpu.waiting_refused():
        torch.cuda.set_sync_debug_mode.assert_called_with("error")  # type: ignore[attr-defined]
    torch.cuda.set_sync_debug_mode.assert_called_with("default")  # type: ignore[attr-defined]
    gpu.new_backend()
    gpu.discard()
    assert not gpu.copier().is_shared


def test_results_are_replaced_row_by_row() -> None:
    text = "# A\n\n## Other\n\n| a | b |\n| --- | --- |\n| 1 | old |\n\n## Steps\n\nHow.\n\n"
    text += "| size | ms | date |\n| --- | --- | --- |\n| 1 | old | then |\n| 8 | old | then |\n\nEnd.\n"
    new = replace_rows(text, "Steps", {"8": ("2.0", "now"), "32": ("a|b", "now")})
    assert new == text.replace("| 8 | old | then |\n", "| 8 | 2.0 | now |\n| 32 | a/b | now |\n")
    with pytest.raises(ValueError, match="no table under the heading 'Step'"):
        replace_rows(text, "Step", {})
    with pytest.raises(ValueError, match="Steps, 8: 2 cells, the table has 3"):
        replace_rows(text, "Steps", {"8": ("2.0",)})


def test_the_results_claim_nothing_that_was_not_run() -> None:
    """A row either says so, or has the date of the run that wrote it."""
    text = RESULTS.read_text()
    for title in TITLES:
        for row in rows_of(text, title).values():
            is_dated = re.search(r"\| \d{4}-\d\d-\d\d \|$", row) or title == MACHINE_TABLE
            assert NOT_RUN in row or is_dated, row
