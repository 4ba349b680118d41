"""Compiled kernels: the tile that this CPU runs, the build, the cache of what was built, and calls.

    src/*  ──g++ -fopenmp, a tile──▶  <cache>/TILE-SOURCES-COMPILER.so  ──checksum, ctypes──▶  kernels

The library is not linked with an OpenMP runtime: its symbols come from the one that PyTorch has
loaded, so that there is one pool of threads. ctypes releases the GIL in every call.

Nothing is compiled for the machine at hand, but for a tile, which is chosen at each start by what the
CPU can do: a cache or an image made on another machine never brings an illegal instruction. Where
there are no kernels, callers run plain PyTorch.
"""

import ctypes
import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

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
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

# Of each tile, the best first: flags of /proc/cpuinfo, and of the compiler.
_AVX512 = (
    {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx2", "fma"},
    "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx2 -mfma -DTILE_LANES=16"
    ' -DTILE="tile_avx512.h"',
)
_TILES = {
    "amx": (
        {*_AVX512[0], "amx_tile", "amx_bf16"},
        f"{_AVX512[1]} -mamx-tile -mamx-bf16 -DTILE_AMX",
    ),
    "avx512": _AVX512,
    "avx2": ({"avx2", "fma"}, '-mavx2 -mfma -DTILE_LANES=8 -DTILE="tile_avx2.h"'),
}
TILES = tuple(_TILES)

# The arguments of each kernel, as its source declares them: p pointer, i int64_t, f float; a struct
# is its fields. Kernels are numbered in this order.
KERNELS = {
    "add_norm": "pipppiif",
    "arg_max": "pipii",
    "attention": "iiiiipf iiiiippppp pppiiipppp",
    "attention_float32": "iiiiipf iiiiippppp pppiiipppp",
    "linear": "piippppiiii",
    "moe": "ppppppppppiiiiifff",
    "prepare_heads": "piipppiiiiif",
    "route": "iiiiiiif pipppppppii",
    "silu_and_mul": "ppii",
}
LANES = 16  # widths of rows that most kernels take are multiples of it
_WORDS = {"p": "Q", "i": "q", "f": "f4x", " ": ""}
_PACK = {
    name: partial(struct.Struct("<q" + "".join(_WORDS[kind] for kind in kinds)).pack, number)
    for number, (name, kinds) in enumerate(KERNELS.items())
}

Note = Callable[[bytes, tuple[Any, ...]], None]  # takes a call, and what it was given

_LOG = structlog.stdlib.get_logger(__name__)


class NoKernels(Exception):
    """There are no kernels to be had here. Says why."""


class Library:
    """The kernels of a tile.

    Args:
        path: Of the compiled library.

    Attributes:
        replay: Takes noted calls, joined, and their number. Makes them again, one after another,
            with what is now where their pointers lead.
    """

    def __init__(self, path: Path) -> None:
        self.replay = ctypes.CDLL(str(path)).replay
        self.replay.argtypes, self.replay.restype = (ctypes.c_char_p, ctypes.c_int64), None
        self._thread = _Thread()

    def __call__(self, kernel: str, *arguments: Tensor | float | None) -> None:
        """Calls a kernel. Where it takes pointers, it is given tensors, or None."""
        call = _PACK[kernel](*[x.data_ptr() if type(x) is Tensor else x or 0 for x in arguments])
        self.replay(call, 1)
        if self._thread.note is not None:
            self._thread.note(call, arguments)

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Has each call of this thread noted once it is made."""
        self._thread.note = note
        try:
            yield
        finally:
            self._thread.note = None


class _Thread(threading.local):
    note: Note | None = None


def by_row(x: Tensor) -> tuple[Any, ...]:
    """Returns x with the numbers of its last dimension side by side, and its other strides."""
    *strides, last = x.stride()
    if last == 1:
        return x, *strides
    x = x.contiguous()
    return x, *x.stride()[:-1]


def load() -> Library | None:
    """Returns the kernels; None where there are none. The first call may compile, for some seconds."""
    return find()[0]


def find() -> tuple[Library | None, str]:
    """Returns the kernels, and why there are none or no better ones, which is logged once."""
    return _find(os.environ.get(CHOICE) or "auto")


@cache
def _find(choice: str) -> tuple[Library | None, str]:
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
    problem = "; ".join(dict.fromkeys(problems))
    if problem:
        running = "another tile" if kernels else "slower, in plain PyTorch"
        _LOG.warning("no_cpu_kernels", problem=problem, running=running)
    return kernels, problem


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
    if chosen := [tile for tile in runnable if choice in ("auto", tile)]:
        return chosen
    found = f"of {', '.join(TILES)} it runs {', '.join(runnable) or 'none'}"
    raise NoKernels(f"{CHOICE}={choice} does not fit this CPU ({platform.machine()}): {found}")


def _cpu_flags() -> set[str]:
    """Returns what the CPU and the kernel beneath can do."""
    info = _CPU_INFO.read_text() if _CPU_INFO.exists() else ""
    return {word for line in re.findall("^flags.*", info, re.M)[:1] for word in line.split()}


@cache
def load_tile(tile: str) -> Library:
    """Returns the kernels of a tile that this CPU runs, built if the cache has none.

    Raises:
        NoKernels: They cannot be built or loaded, or the kernel beneath refuses AMX.
    """
    try:
        with built(tile) as path:
            if tile == "amx":
                _ask_for_amx()
            return Library(path)
    except OSError as error:
        raise NoKernels(f"cannot load the library: {error}") from error


def _ask_for_amx() -> None:
    """Asks Linux for the registers of AMX, for all threads of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA):
        raise NoKernels(f"no AMX for this process: {os.strerror(ctypes.get_errno())}")


@contextmanager
def built(tile: str) -> Iterator[Path]:
    """Gives a tile's library, which this CPU need not run: from the cache, or compiled and kept there.

    One that cannot be kept is gone afterwards; where it is loaded, it stays so.

    Raises:
        NoKernels: It cannot be compiled.
    """
    compiler, folder = _compiler(), _cache_folder()
    sources = _digest(tile, *_flags(tile), *(p.read_text() for p in sorted(_SOURCES.iterdir())))
    # An image without a compiler takes any that was built of these sources.
    name = f"{tile}-{sources}-{_digest(compiler) if compiler else '*'}.so"
    for path in (Path(folder, found) for found in glob.glob(name, root_dir=folder)):
        if _is_whole(path):
            yield path
            return
        _LOG.warning("cpu_kernels_damaged", path=str(path), doing="compiling them again")
    if not compiler:
        raise NoKernels(f"no {_COMPILER} here, and nothing built in {folder}")
    with tempfile.TemporaryDirectory(prefix="lockstep-cpu-kernels-") as own:
        library = Path(own, name)
        _compile(tile, library)
        _LOG.info("cpu_kernels_built", tile=tile, path=str(folder))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                os.replace(shutil.copy(library, beside), folder / name)  # whole, as others look
        except OSError as error:
            _LOG.warning("cpu_kernels_not_kept", folder=str(folder), problem=str(error))
        yield library


def _cache_folder() -> Path:
    if folder := os.environ.get(CACHE):
        return Path(folder)
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # this user has no home
        caches = os.devnull  # which no folder can be made in
    return Path(caches, "lockstep", "cpu_kernels")


@cache
def _compiler() -> str:
    """Returns the compiler's path and version; nothing if there is none."""
    path = shutil.which(_COMPILER)
    if path is None:
        return ""
    return path + subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True).stdout


def _flags(tile: str) -> list[str]:
    return [*_FLAGS, *_TILES[tile][1].split(), *shlex.split(os.environ.get(EXTRA_FLAGS, ""))]


def _compile(tile: str, library: Path) -> None:
    """Compiles a tile's library, and writes it with its checksum behind it."""
    objects, flags = library.with_suffix(".o"), _flags(tile)
    # In two steps: linking with -fopenmp would bring in an OpenMP runtime of the system's.
    of_linker = [flag for flag in flags if flag.startswith("-fsanitize")]
    for arguments in (
        (*flags, "-c", f"{_SOURCES}/kernels.cpp", "-o", str(objects)),
        (*of_linker, "-shared", str(objects), "-o", str(library)),
    ):
        done = subprocess.run((_COMPILER, *arguments), capture_output=True, text=True)
        if done.returncode:
            raise NoKernels(f"{_COMPILER} failed: {done.stderr.strip()[-500:]}")
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())


def _is_whole(path: Path) -> bool:
    """Returns whether it is as it was built: what is cut short would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
