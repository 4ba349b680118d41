"""The GPU suite itself, without a GPU: a typo in it cannot wait for one, and it claims nothing."""

import os
import re
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch

from tests.gpu.__main__ import RESULTS, ROOT, Ladder, judge
from tests.gpu.figures.models import MEASUREMENTS
from tests.gpu.rungs import RUNGS, Rung
from tests.gpu.support import carried, machine
from tests.gpu.support.production import PRODUCTION, settings_of
from tests.gpu.support.results import NOT_RUN, RESULTS_PATH, RUN, put, read, replace_rows


def run_suite(*args: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python in this repository, with no GPU in sight."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    return subprocess.run(
        [sys.executable, "-m", *args],
        cwd=ROOT,
        env={**kept, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_without_a_gpu_each_rung_says_that_it_has_not_run(tmp_path: Path) -> None:
    results = tmp_path / "results.md"
    done = run_suite("tests.gpu", "--results", str(results))
    assert done.returncode == 3, done.stdout + done.stderr
    reason = "not run: PyTorch finds no CUDA device here"
    committed = {name: row[0] for name, row in read(RESULTS, "Rungs").items()}
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(said) == [rung.name for rung in RUNGS]
    for name, result in said.items():
        assert result == (reason if committed[name].startswith(NOT_RUN) else committed[name])
    assert {name: row[0] for name, row in read(results, "Rungs").items()} == said


def test_every_test_and_measurement_runs_where_a_cpu_stands_in(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    before = RESULTS.read_text()
    results, report = tmp_path / "results.md", tmp_path / "report.xml"
    results.write_text(before)
    places = {RESULTS_PATH: str(results), RUN: "today, none", "LOCKSTEP_GPU_TESTS_ON": "cpu"}
    pytest_args = ("pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    done = run_suite(*pytest_args, **places)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(
        r"in part: \d+ of \d+ passed; skipped: needs a Hopper GPU: .*", judge(report)
    )
    for rung in RUNGS:
        for title in rung.tables:
            assert any(row[-1] == "today, none" for row in read(results, title).values()), title
    assert RESULTS.read_text() == before, "a CPU's results are no results"


def test_results_have_a_row_for_each_rung_and_a_table_for_each_measurement() -> None:
    """So that no rung is added whose row says nothing, and no row claims what was not run."""
    rows = read(RESULTS, "Rungs")
    assert [(name, row[2]) for name, row in rows.items()] == [(x.name, x.what) for x in RUNGS]
    measured = [rung for rung in RUNGS if rung.tables]
    assert {rung.name for rung in measured} == set(MEASUREMENTS)
    runs = read(RESULTS, "Runs")
    for title in ("Rungs", *(title for rung in measured for title in rung.tables)):
        for result, *_, run in read(RESULTS, title).values():
            assert run in runs or (run == "-" and result.startswith(f"{NOT_RUN}: "))


def test_all_rungs_together_take_no_longer_than_a_gpu_is_lent() -> None:
    assert sum(rung.limit_s for rung in RUNGS) <= 1800
    for rung in RUNGS:
        files = [part.partition("::")[0] for part in rung.tests if ".py" in part]
        assert files
        assert all((ROOT / file).exists() for file in files)
    [dispatch] = [rung for rung in RUNGS if rung.name == "dispatch"]
    tests = [rung for rung in RUNGS if not rung.tables]
    assert (dispatch, dispatch.env) == (tests[-1], {"CUDA_MODULE_LOADING": "EAGER"})


FAKES = {
    "passes": ("def test_it(): pass", "passed: 1"),
    "skips": ("import pytest\ndef test_it(): pytest.skip('no such GPU')", "skipped: no such GPU"),
    "fails": (
        "def test_that(): pass\ndef test_it(): raise RuntimeError('out of memory')",
        "failed: 1 of 2; test_it: RuntimeError: out of memory",
    ),
    "dies": ("import os\ndef test_it(): os._exit(9)", "failed: exit code 9, at .*::test_it"),
    "hangs": (
        "import subprocess\n"
        "def test_it(): subprocess.run(['sh', '-c', 'echo $$ > PID; exec sleep 60'])",
        "failed: not done after 5 s, at .*::test_it",
    ),
}


def ended(pid: int) -> bool:
    """Returns whether a process ends, or has and nobody has asked."""
    for _ in range(1000):
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/cmdline").read_bytes():
                time.sleep(0.01)
                continue
        return True
    return False


def test_a_rung_that_hangs_dies_fails_or_skips_is_said_to_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid, rungs = tmp_path / "pid", []
    for name in ("hangs", "dies", "fails", "skips", "passes"):
        file = tmp_path / f"{name}.py"
        file.write_text(FAKES[name][0].replace("PID", str(pid)))
        limit_s = 5.0 if name == "hangs" else 60.0  # in which it has begun, on a busy machine
        rungs.append(Rung(name, "what", (str(file), "-c", "/dev/null"), limit_s, ("Figures",)))
    path = tmp_path / "results.md"
    empty = "".join(f"| {name} | not run: no GPU | - | - | - |\n" for name in ("never", *FAKES))
    path.write_text(
        f"## Rungs\n\n| a | b | c | d | e |\n| - | - | - | - | - |\n{empty}\n"
        "## Figures\n\n| figure | value | run |\n| - | - | - |\n| 1 | not run: no GPU | - |\n"
    )
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    ladder = Ladder(path, rungs, sys.executable, env)
    first, *rest = ladder.chosen([], None)
    assert first is rungs[0]
    ladder.run([first], "today", 60.0)
    assert ladder.chosen([], None) == rest, "what has a result is not run again"
    assert ladder.chosen([], "skips") == rungs[-2:]
    assert ladder.chosen(["hangs"], None) == [first]
    assert ended(int(pid.read_text())), "what a rung started ends with it"
    ladder.run(rest[:-1], "today", 600.0)
    assert ladder.report() == 1
    figure = read(path, "Figures")["1"]
    assert figure == ["not run: rung skips skipped: no such GPU", "-"]
    ladder.run([rest[-1], first], "today", 0.5)
    rows = ladder.rows
    for name, (result, seconds, what, run) in rows.items():
        if name != "never":
            assert re.fullmatch(FAKES[name][1], result), result
            assert (what, run, seconds.isdecimal()) == ("what", "today", True)
    assert rows["never"][0] == "not run: no GPU"
    assert path.with_suffix(".log").read_text().count("out of memory") >= 1
    assert [each.name for each in tmp_path.glob("*.new")] == []


def test_results_are_written_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.md"
    old = "## A\n\n| a | b |\n| - | - |\n| 1 | 2 |\n"
    path.write_text(old)

    def die(new: Path, target: Path) -> None:
        assert "| 1 | 3 |" in new.read_text(), "all is written by then"
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        put(path, "A", {"1": ["3"]})
    monkeypatch.undo()
    assert path.read_text() == old
    put(path, "A", {"1": ["3"]})
    assert path.read_text() == old.replace("2", "3")


def test_kernels_and_packages_are_unpacked_where_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the packages that are there already, in an environment that is made once."""
    monkeypatch.setattr(carried, "ENVIRONMENT", tmp_path / "environment")
    for name, file in (("packages", "flashinfer/__init__.py"), ("kernels", "aot/norm/norm.so")):
        path = tmp_path / name / file
        path.parent.mkdir(parents=True)
        path.write_text("")
        folder = file.partition("/")[0]
        with tarfile.open(tmp_path / name / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(tmp_path / name / folder, folder)
    python = carried.make_environment(tmp_path / "packages")
    assert carried.make_environment(tmp_path / "packages") == python
    carried.add_kernels([tmp_path / "kernels/kernels.tar.xz"], python)
    find = "import flashinfer, numpy; print(flashinfer.__path__[0])"
    done = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    package = Path(done.stdout.strip())
    assert package.is_relative_to(tmp_path / "environment")
    assert (package / "data/aot/norm/norm.so").exists()


def test_without_a_network_nothing_is_installed_from_one() -> None:
    """``make gpu`` ended at pip there, before any test."""
    command = ["make", "--dry-run", "--always-make", "gpu", "GPU_PYTHON=python3", "WHEELS=carried"]
    # Of `make test ARGS=...` it would have these, too.
    given = {"ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
    own = {name: value for name, value in os.environ.items() if name not in given}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    words = done.stdout.replace("\\\n", " ").split()
    assert words == ["python3", "-m", "tests.gpu", "--wheels", "carried"]


def test_kernels_of_the_overlays_for_gpus_are_the_same_and_the_suite_runs_them() -> None:
    assert settings_of("gpu-node") == settings_of("multi-node") == PRODUCTION
    assert machine.Gpu.moe_runner == PRODUCTION["moe_runner"] == "cutlass"


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
