"""Installation into the virtual environment, with one progress line for each stage.

``.venv/bin/python deploy/local/install.py run|dev`` is run by the Makefile, when nothing but pip is
installed. What pip prints goes to .venv/install.log, and to the terminal only if pip fails.
"""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from sysconfig import get_path

LOG = Path(sys.prefix, "install.log")
BAR_WIDTH = 24
REFRESH_S = 0.2
PINNED = ("-c", "constraints.txt")

# Of each stage: its name, about how many packages it brings, and what pip installs. PyTorch comes
# first: pip takes the build that its settings prefer, and later packages are content with it. Its modules
# are compiled beside what follows. Of what tests bring, few are ever imported: these are compiled then.
STAGES = {
    "run": (
        ("PyTorch", 10, ("--no-compile", *PINNED, "torch")),
        ("router and executor", 26, (*PINNED, "-e", ".[executor]")),
    ),
    "dev": (
        ("tests and linters", 66, ("--no-compile", *PINNED, "-e", ".[dev]")),
        (
            "FlashInfer",
            9,
            ("--no-compile", "--no-deps", "-r", "deploy/requirements-flashinfer.txt"),
        ),
    ),
}


def install(name: str, num_packages: int, args: tuple[str, ...]) -> int:
    """Runs pip beside a progress line. Returns its exit code."""
    is_terminal, begun = sys.stdout.isatty(), time.monotonic()
    if not is_terminal:
        print(f"Installing {name} ...", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    with LOG.open("w") as log:
        pip = subprocess.Popen(
            [*command, "--progress-bar", "off", *args], stdout=log, stderr=subprocess.STDOUT
        )
        while (exit_code := pip.poll()) is None:
            if is_terminal:
                paint(name, time.monotonic() - begun, *progress(num_packages))
            time.sleep(REFRESH_S)
    end, elapsed_s = "done" if exit_code == 0 else "failed", time.monotonic() - begun
    if is_terminal:
        paint(name, elapsed_s, float(exit_code == 0), f"{end}\n")
    else:
        print(f"  {end} after {elapsed_s:.0f} s", flush=True)
    return exit_code


def compile_beside(package: str) -> None:
    """Compiles a package's modules while this process goes on, and after it has ended.

    pip takes longer over that than over all else of PyTorch, and uses one core.
    """
    command = [sys.executable, "-m", "compileall", "-q", str(Path(get_path("purelib"), package))]
    subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def progress(num_packages: int) -> tuple[float, str]:
    """Returns about which share is done, and what pip is doing, both from its log."""
    log = LOG.read_text(errors="replace")
    if "\nInstalling collected packages" in log:
        return 0.9, "unpacking"
    num_found = len(re.findall(r"^Collecting ", log, re.MULTILINE))
    doing = re.findall(r"^(?:Collecting |  Downloading (?:\S*/)?)(.+)", log, re.MULTILINE)
    return min(0.8, 0.8 * num_found / num_packages), doing[-1] if doing else ""


def paint(name: str, elapsed_s: float, share: float, doing: str) -> None:
    """Paints the line again."""
    bar = ("#" * round(BAR_WIDTH * share)).ljust(BAR_WIDTH, ".")
    minutes, seconds = divmod(int(elapsed_s), 60)
    head = f"{name:<20} [{bar}] {minutes:2}:{seconds:02}  "
    room = shutil.get_terminal_size().columns - len(head) - 1
    print(f"\r\x1b[K{head}{doing[: max(room, 0)]}", end="", flush=True)


def main() -> int:
    """Returns the exit code."""
    for stage in STAGES[sys.argv[1]]:
        if exit_code := install(*stage):
            print(LOG.read_text(errors="replace"), file=sys.stderr)
            return exit_code
        if stage[0] == "PyTorch":
            compile_beside("torch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
