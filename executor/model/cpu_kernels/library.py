"""Compiled kernels: the tile that this CPU runs, the build, the cache of what was built.

    src/*  ──g++ -fopenmp, a tile──▶  <cache>/TILE-SOURCES-COMPILER.so  ──checksum, ctypes──▶  kernels

The library is not linked with an OpenMP runtime: its symbols come from the one that PyTorch has
loaded, so that there is one pool of threads. ctypes releases the GIL in every call.

Nothing is compiled for the machine at hand, but for a tile, which is chosen at each start by what the
CPU can do: a cache or an image made on another machine never brings an illegal instruction. Where
there are no kernels, callers run plain PyTorch.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import structlog

from executor.model.cpu_kernels.calls import noted

CHOICE = "LOCKSTEP_CPU_KERNELS"  # auto, a tile, or off
CACHE = "LOCKSTEP_CPU_KERNELS_CACHE"  # a folder
EXTRA_FLAGS = "LOCKSTEP_CPU_KERNELS_FLAGS"  # for the compiler: sanitizers

_SOURCES = Path(__file__).with_name("src")
_COMPILER = "g++"
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"),
    "-ffp-contract=off",  # a product and a sum are one operation where the source says so
    "-Wno-maybe-uninitialized",  # g++ 12 finds some in its own headers
)
_CPU_INFO = Path("/proc/cpuinfo")

# Of each tile, the best first: flags of /proc/cpuinfo, and of the compiler.
_TILES = {
    "avx512": (
        {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx2", "fma"},
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx2 -mfma -DTILE_LANES=16",
    ),
    "avx2": ({"avx2", "fma"}, "-mavx2 -mfma -DTILE_LANES=8"),
}
TILES = tuple(_TILES)

# The arguments of each kernel, as its source declares them: p pointer, i int64_t, f float.
SIGNATURES = {
    "add_norm": "pipppiif",
    "arg_max": "pipii",
    "attention": "ppp",
    "linear": "piippppiiii",
    "moe": "ppppppppppiiiiifff",
    "prepare_heads": "piipppiiiiif",
    "route": "ppipppppppii",
    "silu_and_mul": "ppii",
    "replay": "pi",  # the last: it numbers the others in this order
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}

Library = ctypes.CDLL

_LOG = structlog.stdlib.get_logger(__name__)


class NoKernels(Exception):
    """There are no kernels to be had here. Says why."""


def load() -> Library | None:
    """Returns the kernels, or None after a line in the log that says why there are none.

    The first call may compile, for some seconds.
    """
    return _load_or_log(os.environ.get(CHOICE) or "auto")


def require() -> Library:
    """Returns the kernels.

    Raises:
        NoKernels: There are none. Says why.
    """
    kernels, problem = _first_loaded(os.environ.get(CHOICE) or "auto")
    if kernels is None:
        raise NoKernels(problem)
    return kernels


@cache
def _load_or_log(choice: str) -> Library | None:
    kernels, problem = _first_loaded(choice)
    if problem:
        running = "another tile" if kernels else "slower, in plain PyTorch"
        _LOG.warning("no_cpu_kernels", problem=problem, running=running)
    return kernels


@cache
def _first_loaded(choice: str) -> tuple[Library | None, str]:
    """Returns the kernels of the best tile that can be had, and why there are no better ones."""
    kernels, problems = None, []
    try:
        for tile in choose(choice):
            try:
                kernels = load_tile(tile)
                break
            except NoKernels as error:
                problems.append(str(error))
    except NoKernels as error:
        problems.append(str(error))
    return kernels, "; ".join(dict.fromkeys(problems))


def choose(choice: str) -> list[str]:
    """Returns the tiles to try for ``auto``, the best first, or the one that is asked for.

    Raises:
        NoKernels: This CPU runs none, or not that one; or ``off`` is asked for.
    """
    if choice == "off":
        raise NoKernels(f"{CHOICE}=off")
    if choice not in ("auto", *TILES):
        raise NoKernels(f"{CHOICE}={choice}: need one of auto, {', '.join(TILES)}, off")
    runnable = [tile for tile in TILES if _TILES[tile][0] <= _cpu_flags()]
    if not runnable:
        raise NoKernels(f"this CPU has neither of {', '.join(TILES)} ({platform.machine()})")
    if choice == "auto":
        return runnable
    if choice not in runnable:
        raise NoKernels(f"{CHOICE}={choice}, but this CPU runs only {', '.join(runnable)}")
    return [choice]


def _cpu_flags() -> set[str]:
    """Returns what the CPU and the kernel beneath can do."""
    if not _CPU_INFO.exists():
        return set()
    for line in _CPU_INFO.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


@cache
def load_tile(tile: str) -> Library:
    """Returns the kernels of a tile that this CPU runs, built if the cache has none.

    Raises:
        NoKernels: They cannot be built or loaded.
    """
    try:
        path = built(tile)
        kernels = ctypes.CDLL(str(path))
        if path.parent != _cache_folder():  # it stays loaded, and an executor ends without a word
            _own_folder().cleanup()
        for number, (name, kinds) in enumerate(SIGNATURES.items()):
            function = getattr(kernels, name)
            function.argtypes = [_TYPES[kind] for kind in kinds]
            function.restype = None
            if name != "replay":
                setattr(kernels, name, noted(function, number, kinds))
    except (OSError, AttributeError) as error:
        raise NoKernels(f"cannot load the library: {error}") from error
    return kernels


def built(tile: str) -> Path:
    """Returns a tile's library, which this CPU need not run; compiles it if the cache has none.

    Raises:
        NoKernels: It cannot be compiled.
    """
    compiler, folder = _compiler(), _cache_folder()
    sources = _digest(tile, *_flags(tile), *(p.read_text() for p in sorted(_SOURCES.iterdir())))
    if compiler is None:  # an image without one: any that was built of these sources
        found = [path for path in folder.glob(f"{tile}-{sources}-*.so") if _is_whole(path)]
        if not found:
            raise NoKernels(f"no {_COMPILER} here, and nothing built in {folder}")
        return min(found)
    name = f"{tile}-{sources}-{_digest(compiler)}.so"
    if _is_whole(folder / name):
        return folder / name
    try:
        return _kept(tile, folder / name)
    except OSError as error:
        _LOG.warning("cpu_kernels_not_kept", folder=str(folder), problem=str(error))
        return _kept(tile, Path(_own_folder().name, name))


def _cache_folder() -> Path:
    if folder := os.environ.get(CACHE):
        return Path(folder)
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:  # this user has no home
        caches = os.devnull  # which no folder can be made in
    return Path(caches, "lockstep", "cpu_kernels")


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder that ends with the process, if it ends in an orderly way."""
    return tempfile.TemporaryDirectory(prefix="lockstep-cpu-kernels-")


def _kept(tile: str, path: Path) -> Path:
    """Returns where a tile's library is, which one process at a time builds if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name("lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        is_whole = _is_whole(path)
        if path.exists() and not is_whole:
            _LOG.warning("cpu_kernels_damaged", path=str(path), doing="compiling them again")
        if not is_whole:
            _build(tile, path)
    return path


@cache
def _compiler() -> str | None:
    """Returns the compiler's path and version."""
    path = shutil.which(_COMPILER)
    if path is None:
        return None
    version = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True)
    return f"{path} {version.stdout.strip()}"


def _flags(tile: str) -> list[str]:
    of_tile = [*_TILES[tile][1].split(), f'-DTILE="tile_{tile}.h"']
    return [*_FLAGS, *of_tile, *shlex.split(os.environ.get(EXTRA_FLAGS, ""))]


def _build(tile: str, path: Path) -> None:
    """Compiles a tile's library, and writes it with its checksum behind it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        object_file, library = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        # In two steps: linking with -fopenmp would bring in an OpenMP runtime of the system's.
        flags = [flag for flag in _flags(tile) if flag.startswith("-fsanitize")]
        _run(_COMPILER, *_flags(tile), "-c", _SOURCES / "kernels.cpp", "-o", object_file)
        _run(_COMPILER, *flags, "-shared", object_file, "-o", library)
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        library.rename(path)
    _LOG.info("cpu_kernels_built", tile=tile, path=str(path))


def _run(*command: str | Path) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise NoKernels(f"{_COMPILER} failed: {error.stderr.strip()[-500:]}") from error


def _is_whole(path: Path) -> bool:
    """Returns whether it is there as it was built: what is cut short would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
