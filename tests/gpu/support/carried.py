"""Packages and prebuilt kernels that were carried to a machine without a network."""

import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENT = Path(__file__).parents[3] / ".venv-gpu"


def make_environment(folder: Path) -> str:
    """Makes a virtual environment above this Python's packages. Returns its Python.

    Args:
        folder: Wheels, and archives (tar.xz) of what a folder of packages holds.
    """
    python, done = ENVIRONMENT / "bin/python", ENVIRONMENT / "complete"
    if done.exists():
        return str(python)
    venv.create(ENVIRONMENT, clear=True, symlinks=True)
    [site] = ENVIRONMENT.glob("lib/python*/site-packages")
    below = [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    (site / "below.pth").write_text("\n".join(below))
    for archive in folder.glob("*.tar.xz"):
        unpack(archive, site)
    if wheels := sorted(folder.glob("*.whl")):
        install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([python, *install, *wheels], check=True)
    done.touch()
    return str(python)


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def add_kernels(archives: Sequence[Path], python: str) -> None:
    """Unpacks prebuilt kernels to where FlashInfer looks for them first."""
    find = "import importlib.util as u; s = u.find_spec('flashinfer'); print(s.origin if s else '')"
    found = subprocess.run([python, "-c", find], stdout=subprocess.PIPE, text=True, check=True)
    if not (package := found.stdout.strip()):
        sys.exit("kernels need FlashInfer, which is not installed: carry its wheel (--wheels)")
    for archive in archives:
        unpack(archive, Path(package).parent / "data")
