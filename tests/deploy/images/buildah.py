"""Images built by buildah, and containers of them, in chroot isolation: no daemon, no namespaces."""

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deploy.local.processes import ROOT

# What a base needs that python:3.11-slim has.
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
BASE = "localhost/lockstep-test-python:3.11"


def run(*args: object, **options: Any) -> str:
    """Returns what a command prints.

    Raises:
        subprocess.CalledProcessError: It failed; what it said is on standard error.
    """
    command = [str(arg) for arg in args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def find_base(folder: Path) -> str | None:
    """Returns the name of an image with Python 3.11, made of Debian's packages if none can be had.

    Args:
        folder: Where Debian is unpacked.
    """
    pulled = subprocess.run(["buildah", "pull", "--quiet", "python:3.11-slim"], capture_output=True)
    if pulled.returncode == 0:
        return "python:3.11-slim"
    if (
        subprocess.run(
            ["buildah", "inspect", "--type", "image", BASE], capture_output=True
        ).returncode
        == 0
    ):
        return BASE
    if os.geteuid() or not shutil.which("debootstrap"):
        return None
    repositories = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
    mirror = repositories.split()[0]
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder, mirror)
    (folder / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    container = run("buildah", "from", "scratch").strip()
    run("buildah", "add", "--quiet", container, folder, "/")
    run("buildah", "commit", "--quiet", "--rm", container, BASE)
    return BASE


def build(image: str, dockerfile: Path, base: str, folder: Path) -> None:
    """Builds an image of this checkout, with packages from where this machine's pip takes them."""
    arguments = {
        "PYTHON_IMAGE": base,
        "REVISION": run("git", "rev-parse", "HEAD", cwd=ROOT).strip(),
    }
    settings, mounts = pip_settings()
    if "find-links" in settings:  # PyTorch may be there only
        arguments["TORCH_INDEX_URL"] = settings["find-links"].split()[0]
    config = configparser.RawConfigParser()
    config["global"] = settings
    with (folder / "pip.conf").open("w") as file:
        config.write(file)
    mounts |= {folder / "pip.conf": Path("/etc/pip.conf")}
    command = ["buildah", "build", "--quiet", "--layers", "--isolation", "chroot"]
    command += ["--file", str(dockerfile), "--tag", image]
    command += [f"--build-arg={name}={value}" for name, value in arguments.items()]
    command += [f"--volume={here}:{there}:ro" for here, there in mounts.items()]
    run(*command, ROOT)


def pip_settings() -> tuple[dict[str, str], dict[Path, Path]]:
    """Returns the settings of this machine's pip, and the files and folders that they name."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    lines = re.findall(r"^(\S+?)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    settings = {
        name: value for _, name, value in sorted(lines, key=lambda line: line[0] == ":env:")
    }
    named = " ".join(settings.values())
    indexes = {Path(name).parent for name in re.findall(r"file://(/\S+)", named)}  # files beside
    paths = indexes | {Path(name) for name in re.findall(r"(?:^|\s)(/\S+)", named)}
    return settings, {path: path for path in paths if path.exists()}


def config_of(image: str) -> dict[str, Any]:
    """Returns an image's OCI configuration: User, Labels, Entrypoint and others."""
    inspected = json.loads(run("buildah", "inspect", "--type", "image", image))
    found: dict[str, Any] = inspected["OCIv1"]["config"]
    return found


def size_of(image: str) -> str:
    """Returns the size of an image's files, of its base, too, for people."""
    [listed] = json.loads(run("buildah", "images", "--json", image))
    return str(listed["size"])


@contextmanager
def container(image: str, *args: str, log: Path) -> Iterator[None]:
    """Runs an image's program with arguments, and at the end of the block stops it by SIGTERM.

    Raises:
        subprocess.CalledProcessError: It did not end with code 0.
    """
    name = run("buildah", "from", image).strip()
    command = ["buildah", "run", "--isolation", "chroot", name, "--"]
    command += [*config_of(image)["Entrypoint"], *args]
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            yield
        finally:
            for pid in inside(process.pid):
                os.kill(pid, signal.SIGTERM)
            code = process.wait()
        if code:
            raise subprocess.CalledProcessError(code, command, log.read_text())
    finally:
        run("buildah", "rm", name)


def inside(session: int) -> list[int]:
    """Returns the processes of a session that are no buildah's, which would kill what it runs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        with suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(pid) == session and path.read_bytes().startswith(b"/opt/venv/"):
                found.append(pid)
    return found
