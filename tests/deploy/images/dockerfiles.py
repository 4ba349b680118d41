"""Dockerfiles as data: their instructions, not the shell inside them."""

import json
import re
from pathlib import Path

from deploy.local.processes import ROOT

FOLDER = ROOT / "deploy" / "docker"
FILES = {
    "lockstep-router": FOLDER / "router.Dockerfile",
    "lockstep-executor": FOLDER / "executor.Dockerfile",
    "lockstep-executor-cpu": FOLDER / "executor-cpu.Dockerfile",
}


def instructions(path: Path) -> list[tuple[str, str]]:
    """Returns each instruction with its arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def last(path: Path, name: str) -> str:
    """Returns the arguments of the last instruction of a name: the one that holds."""
    return [rest for found, rest in instructions(path) if found == name][-1]


def entrypoint(path: Path) -> list[str]:
    """Returns the command that a container runs; its args come behind."""
    return list(json.loads(last(path, "ENTRYPOINT")))


def copied(path: Path) -> list[tuple[Path, str]]:
    """Returns each file or folder that is copied from the repository, and where to."""
    pairs = []
    for name, rest in instructions(path):
        if name == "COPY" and not rest.startswith("--from="):
            *sources, target = rest.split()
            pairs += [(ROOT / source, target) for source in sources]
    return pairs


def environment(path: Path) -> dict[str, str]:
    """Returns the variables that the image's last stage sets."""
    found: dict[str, str] = {}
    for name, rest in instructions(path):
        if name == "FROM":
            found = {}
        elif name == "ENV":
            found |= dict(pair.split("=", 1) for pair in rest.split())
    return found


def in_repository(path: Path, value: str) -> str:
    """Returns a path inside the image as the path here that was copied to it."""
    for source, target in copied(path):
        if target.startswith("/opt/"):
            if value == target:
                return str(source)
            if value == str(Path(target).parent) and source.is_file():
                return str(source.parent)
    return value
