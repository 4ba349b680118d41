"""The suite, each file of tests in a process of its own: what ends one's CUDA context ends no other's.

python -m tests.gpu [arguments of pytest]
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
# Its kernels wait for one another: one whose code is loaded late would keep the others waiting.
LAST = HERE / "test_all_to_all.py"
LIMIT_S = 1200.0  # for a file, kernels that have to be compiled first included
NOTHING_CHOSEN = 5  # pytest's exit code where -k leaves no test of a file


def files() -> list[Path]:
    """Returns the files of tests, in the order in which they run."""
    return [*sorted({*HERE.glob("test_*.py")} - {LAST}), LAST]


def run(arguments: Sequence[str]) -> list[str]:
    """Runs every file. Returns the names of those that failed or took too long."""
    failed = []
    for file in files():
        command = [sys.executable, "-m", "pytest", str(file), *arguments]
        loading = {"CUDA_MODULE_LOADING": "EAGER"} if file == LAST else {}
        try:
            done = subprocess.run(command, timeout=LIMIT_S, env={**os.environ, **loading})
        except subprocess.TimeoutExpired:
            failed.append(f"{file.name} (not done after {LIMIT_S:.0f} s)")
            continue
        if done.returncode not in (0, NOTHING_CHOSEN):
            failed.append(file.name)
    return failed


if __name__ == "__main__":
    if problems := run(sys.argv[1:]):
        sys.exit(f"failed: {', '.join(problems)}")
