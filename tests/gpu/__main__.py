"""Ladder of the GPU suite: rungs one after another, each a process of its own with a time limit.

    python -m tests.gpu                        every rung that RESULTS.md has no result of
    python -m tests.gpu --only nccl drafts     these, again
    python -m tests.gpu --from stack           this and all behind it, again
    python -m tests.gpu --budget 560           begins no rung that may not end in time; the next call goes on

What a rung leaves is written at once. Exit code: 0 if every rung has passed, 1 if one has failed, 3 if
one has not run, or in part only. README.md says how to carry all of it to a machine without a network.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple
from xml.etree import ElementTree

from tests.gpu.rungs import RUNGS, Rung
from tests.gpu.support import results
from tests.gpu.support.carried import add_kernels, make_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "RESULTS.md"
RUNS, RUNGS_TABLE = "Runs", "Rungs"
PROBE_LIMIT_S, END_S = 60.0, 5.0
SHOWN_LINES, SHOWN_CHARACTERS = 40, 300  # of a failure
PASSED, FAILED = "passed", "failed"


class Outcome(NamedTuple):
    """How a rung ended."""

    result: str
    seconds: float


def climb(rung: Rung, python: str, env: Mapping[str, str], log: BinaryIO) -> Outcome:
    """Runs a rung. One that takes too long is ended, and all that it started with it."""
    start, started = log.tell(), time.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Nobody has seen all warnings of the libraries on a GPU.
        pytest = [python, "-m", "pytest", "-v", "-W", "default", "-p", "no:cacheprovider"]
        pytest += ["-p", "pytest_asyncio.plugin"]  # and no others that a machine happens to have
        process = subprocess.Popen(
            [*pytest, f"--junitxml={report}", *rung.tests],
            cwd=ROOT,
            env={**env, **rung.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(rung.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        log.flush()
        lines = Path(log.name).read_bytes()[start:].decode(errors="replace").splitlines()
        if code is None:
            result = f"{FAILED}: not done after {rung.limit_s:.0f} s, at {_last(lines)}"
        elif not report.exists():
            result = f"{FAILED}: exit code {code}, at {_last(lines)}"
        else:
            result = judge(report)
    if result.startswith(FAILED):
        print(*lines[-SHOWN_LINES:], sep="\n")
    return Outcome(result, time.monotonic() - started)


def judge(report: Path) -> str:
    """Returns the result that a report of pytest's says. A skip is never a pass."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    ends = [(case.get("name"), end) for case in cases for end in case]
    problems = [(name, end) for name, end in ends if end.tag in ("failure", "error")]
    skips = [end.get("message", "") for _, end in ends if end.tag == "skipped"]
    if problems:
        name, end = problems[0]
        said = end.get("message", "").strip().splitlines()[-1:]
        message = f"{name}: {''.join(said)}"[:SHOWN_CHARACTERS]
        return f"{FAILED}: {len(problems)} of {len(cases)}; {message}"
    reasons = "; ".join(sorted({reason.removeprefix("Skipped: ") for reason in skips}))
    if len(skips) == len(cases):
        return f"skipped: {reasons or 'there was nothing to run'}"
    if skips:
        return f"in part: {len(cases) - len(skips)} of {len(cases)} passed; skipped: {reasons}"
    return f"{PASSED}: {len(cases)}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process, which first says where it is, and what it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)  # Python's fault handler writes all stacks
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process in the driver may not end
        process.wait(END_S)


def _last(lines: Sequence[str]) -> str:
    """Returns the last line that names a test, or the last of all."""
    said = [line for line in lines if line.strip()] or ["no output"]
    last = ([line for line in said if "::" in line] or said)[-1]
    return last.partition("Fatal Python error")[0].strip()[:SHOWN_CHARACTERS]


class Ladder:
    """Rungs, and the file of their results.

    Args:
        path: The file; a copy of the repository's is put there if there is none.
        rungs: In their order.
        python: Runs them.
        env: Of their processes.
    """

    def __init__(
        self, path: Path, rungs: Sequence[Rung], python: str, env: Mapping[str, str]
    ) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(RESULTS, path)
        self._path = path.resolve()  # as rungs run elsewhere
        self._rungs = rungs
        self._python = python
        self._env = env

    @property
    def rows(self) -> dict[str, list[str]]:
        """Row of each rung: its result, seconds, what it shows, the run."""
        return results.read(self._path, RUNGS_TABLE)

    def chosen(self, only: Sequence[str], first: str | None) -> list[Rung]:
        """Returns the rungs to run: those named, those from one on, or those without a result."""
        if first is not None:
            names = [rung.name for rung in self._rungs]
            return list(self._rungs[names.index(first) :])
        rows = self.rows
        return [
            rung
            for rung in self._rungs
            if (rung.name in only if only else rows[rung.name][0].startswith(results.NOT_RUN))
        ]

    def run(self, chosen: Sequence[Rung], run: str, budget_s: float) -> None:
        """Runs rungs until the next one may not end within the budget."""
        end = time.monotonic() + budget_s
        env = {**self._env, results.RESULTS_PATH: str(self._path), results.RUN: run}
        with self._path.with_suffix(".log").open("ab") as log:
            for place, rung in enumerate(chosen):
                if end - time.monotonic() < min(rung.limit_s, budget_s) and place:
                    self.explain(chosen[place:], f"{budget_s:.0f} s were over before; run again")
                    return
                result, seconds = climb(rung, self._python, env, log)
                row = (result, f"{seconds:.0f}", rung.what, run)
                results.put(self._path, RUNGS_TABLE, {rung.name: row})
                for title in rung.tables:
                    results.explain(self._path, title, f"rung {rung.name} {result}")
                print(f"{rung.name:>14}  {result}  ({seconds:.0f} s)", flush=True)

    def explain(self, rungs: Sequence[Rung], reason: str) -> None:
        """Says why rungs do not run; what has a result keeps it."""
        results.explain(self._path, RUNGS_TABLE, reason, [rung.name for rung in rungs])
        for rung in rungs:
            for title in rung.tables:
                results.explain(self._path, title, reason)

    def add_run(self, facts: Mapping[str, str]) -> str:
        """Writes down the machine, and returns the name of runs on it today."""
        run = f"{datetime.date.today().isoformat()}, {facts['GPU']}"
        results.put(self._path, RUNS, {run: [facts[name] for name in list(facts)[1:]]})
        return run

    def report(self) -> int:
        """Prints the result of each rung, and returns the exit code."""
        rows = self.rows
        found = [rows[rung.name][0] for rung in self._rungs]
        for rung, result in zip(self._rungs, found, strict=True):
            print(f"{rung.name:>14}  {result}")
        if any(result.startswith(FAILED) for result in found):
            return 1
        return 0 if all(result.startswith(PASSED) for result in found) else 3


def probe(python: str, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Returns why nothing can run here, empty if it can, and what the machine is."""
    command = [python, "-m", "tests.gpu.support.machine"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PROBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"PyTorch did not find out in {PROBE_LIMIT_S:.0f} s what GPU there is", {}
    if done.returncode:
        return f"no GPU can be asked for: {_last(done.stderr.splitlines())}", {}
    said = json.loads(done.stdout.splitlines()[-1])
    return said["problem"], said["facts"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    names = [rung.name for rung in RUNGS]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="GPU suite, by rungs")
    add = parser.add_argument
    add("--only", nargs="+", choices=names, default=[], metavar="RUNG", help=", ".join(names))
    add("--from", dest="first", choices=names, metavar="RUNG", help="the first to run")
    add("--budget", type=float, default=3600.0, metavar="SECONDS", help="of all rungs together")
    add(
        "--kernels", nargs="+", type=Path, default=[], metavar="ARCHIVE", help="nothing is compiled"
    )
    add("--wheels", type=Path, metavar="FOLDER", help="packages, for an environment of their own")
    add("--results", type=Path, default=RESULTS, metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(arguments)
    python = make_environment(options.wheels) if options.wheels else sys.executable
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    env.pop("CUDA_LAUNCH_BLOCKING", None)  # kernels that wait for one another would never end
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    env.setdefault("LOCKSTEP_CPU_KERNELS", "off")  # which take time to compile
    if options.kernels:
        add_kernels(options.kernels, python)
        env["FLASHINFER_DISABLE_JIT"] = "1"
    ladder = Ladder(options.results, RUNGS, python, env)
    chosen = ladder.chosen(options.only, options.first)
    problem, facts = probe(python, env)
    if not problem and facts["Driver"] == "none" and options.results == RESULTS:
        parser.error("results of a CPU are not those of a GPU: name another file with --results")
    if problem:
        ladder.explain(chosen, problem)
    else:
        ladder.run(chosen, ladder.add_run(facts), options.budget)
    return ladder.report()


if __name__ == "__main__":
    sys.exit(main())
