"""If this fails, an executor starts without its kernels, compiles at each start, or runs two pools."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch

from executor.model.cpu_kernels import library
from executor.model.cpu_kernels.linear import linear, pack
from executor.model.decoder.kernels import cpu_kernels
from executor.model.moe.experts import ExpertShare
from executor.model.moe.runner_grouped import GroupedMMRunner
from executor.parallel.layout import Topology
from tests.executor.model.cpu_kernels.kernel_cases import num_threads, random_bf16
from tests.executor.support.experts import new_spec

EVERY_START = ["cpu_kernels_built", "cpu_kernels_not_kept"]
SOURCES = Path(library.__file__).with_name("src")
ALL_FLAGS = "flags : avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the folder of an empty cache, with a compiler that is there at once: it copies."""
    [tile] = library.choose("avx2")
    compiler, real = tmp_path / "bin" / library._COMPILER, tmp_path / "real.so"
    compiler.parent.mkdir()
    with library.built(tile) as path:
        shutil.copy(path, real)
    compiler.write_text(
        f'#!/bin/sh\nfor last; do :; done\ncase "$1" in *version) echo 1;; *) cp {real} "$last";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=os.pathsep)
    monkeypatch.setenv(library.CACHE, str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget() -> None:
    """Forgets what was loaded, and the compiler."""
    for cached in (library.load_tile, library._find, library._compiler):
        cached.cache_clear()


@pytest.mark.parametrize("tile", library.TILES)
def test_each_tile_compiles_also_where_the_cpu_does_not_run_it(tile: str):
    arguments = *library._flags(tile), "-fsyntax-only", "-Wall", "-Werror"
    command = library._COMPILER, *arguments, str(SOURCES / "kernels.cpp")
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr


def test_kernels_and_their_arguments_are_numbered_and_named_as_the_sources_have_them():
    cases = re.findall(r"case (\d+): call\((\w+), ", Path(SOURCES, "kernels.cpp").read_text())
    assert cases == [(str(number), name) for number, name in enumerate(library.KERNELS)]
    sources = "".join(path.read_text() for path in SOURCES.glob("*.h"))
    for name, kinds in library.KERNELS.items():
        [declared] = re.findall(rf"^void {name}\((.*?)\)", sources, re.M | re.S)
        expanded = " ".join(kinds_of(argument, sources) for argument in declared.split(","))
        assert expanded.replace(" ", "") == kinds.replace(" ", ""), name


def kinds_of(declared: str, sources: str) -> str:
    """Returns the kinds of an argument, or of all fields of a struct."""
    *_, kind, name = declared.split()
    if kind.endswith("*") or name.startswith("*"):
        return "p"
    if kind in ("int64_t", "float"):
        return kind[0]
    template = kind.partition("<")[0]
    [body] = re.findall(rf"^struct {template} {{\n(.*?)\n(?:}};|\n)", sources, re.M | re.S)
    fields = re.findall(r"^  (?:const )?(\w+\*?) (.*?);", body, re.M)
    return "".join(
        kinds_of(f"{kind} {name}", sources) for kind, names in fields for name in names.split(", ")
    )


def test_threads_are_pytorchs(kernels: library.Library):
    x, weight = random_bf16(8, 1024), pack(random_bf16(1024, 1024))  # enough to be shared
    with num_threads(2):
        torch.zeros(1 << 20).exp()
        before = set(os.listdir("/proc/self/task"))
        linear(kernels, x, weight, 1024)
        assert set(os.listdir("/proc/self/task")) <= before
    maps = Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"\S*/lib[gi]?omp\S*", maps))) == 1


def test_a_user_without_a_home_compiles_for_each_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (library.CACHE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)
    forget()
    with structlog.testing.capture_logs() as lines, library.built("avx2") as path:
        assert path.exists()
    assert not path.exists()
    assert [line["event"] for line in lines] == EVERY_START


def test_what_is_built_is_found_again(folder: Path):
    library.load_tile("avx2")
    [built] = folder.glob("*.so")
    before = built.stat()
    forget()
    library.load_tile("avx2")
    assert built.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_library_is_compiled_again(folder: Path, damage: str):
    library.load_tile("avx2")
    [built] = folder.glob("*.so")
    content = built.read_bytes()
    built.unlink()  # this process has the old one mapped
    built.write_bytes({"cut": content[:5000], "changed": b"?" + content[1:], "empty": b""}[damage])
    forget()
    with structlog.testing.capture_logs() as lines:
        library.load_tile("avx2")
    assert [line["event"] for line in lines] == ["cpu_kernels_damaged", "cpu_kernels_built"]


def test_an_image_without_a_compiler_takes_what_was_built_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    library.load_tile("avx2")
    monkeypatch.setenv("PATH", "/nowhere")
    forget()
    library.load_tile("avx2")
    shutil.rmtree(folder)
    forget()
    with pytest.raises(library.NoKernels, match="no g\\+\\+ here"):
        library.load_tile("avx2")


def refused(*arguments: object) -> None:
    raise PermissionError(f"may not write {arguments}")


@pytest.mark.parametrize("problem", ["folder of another user", "no folder", "no such name"])
def test_kernels_that_cannot_be_kept_are_compiled_for_each_start_and_leave_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, problem: str
):
    if problem == "folder of another user":
        monkeypatch.setattr(shutil, "copy", refused)  # root may write anywhere
    elif problem == "no folder":
        folder.write_bytes(b"")
    else:
        monkeypatch.setenv(library.CACHE, str(folder / ("x" * 300)))
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent))
    with structlog.testing.capture_logs() as lines:
        assert library.load_tile("avx2")
    assert [line["event"] for line in lines] == EVERY_START
    assert not [*Path(tempfile.gettempdir()).glob("lockstep-cpu-kernels-*")]


def test_an_empty_variable_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    home = folder.parent / "home"
    monkeypatch.chdir(folder.parent)
    for name, value in ((library.CACHE, ""), (library.CHOICE, ""), ("XDG_CACHE_HOME", str(home))):
        monkeypatch.setenv(name, value)
    forget()
    assert library.load() is not None
    assert len([*home.glob("lockstep/cpu_kernels/*.so")]) == 1


def test_a_compiler_that_fails_says_what_it_said(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(library.EXTRA_FLAGS, "-broken")
    Path(shutil.which("g++") or "").write_text("#!/bin/sh\necho no room on disk >&2\nexit 1\n")
    forget()
    with pytest.raises(library.NoKernels, match="no room on disk"):
        library.load_tile("avx2")


@pytest.mark.parametrize("unknown", ["amx", "avx512bf16", "avx2"])
def test_a_compiler_too_old_for_the_best_tile_builds_the_next_and_says_so_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unknown: str
):
    (folder.parent / "cpuinfo").write_text(ALL_FLAGS)
    monkeypatch.setattr(library, "_CPU_INFO", folder.parent / "cpuinfo")
    monkeypatch.setenv(library.CHOICE, "auto")
    compiler = Path(shutil.which("g++") or "")
    refuses = f'case "$*" in *-m{unknown}*) echo unrecognized option >&2; exit 1;; esac'
    compiler.write_text(compiler.read_text().replace("\n", f"\n{refuses}\n", 1))
    forget()
    runs_one = unknown != "avx2"
    with structlog.testing.capture_logs() as lines:
        assert (library.load() is not None) is runs_one
    [line] = [line for line in lines if line["log_level"] == "warning"]
    assert line["problem"] == "g++ failed: unrecognized option"
    assert line["running"] == ("another tile" if runs_one else "slower, in plain PyTorch")


def test_where_linux_refuses_amx_the_next_tile_runs(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder.parent / "cpuinfo").write_text(ALL_FLAGS)
    monkeypatch.setattr(library, "_CPU_INFO", folder.parent / "cpuinfo")
    monkeypatch.setattr(library, "_XFEATURE_XTILEDATA", 62)  # there is none of this number
    monkeypatch.setenv(library.CHOICE, "auto")
    with structlog.testing.capture_logs() as lines:
        assert library.load() is not None
    [line] = [line for line in lines if line["log_level"] == "warning"]
    assert line["problem"].startswith("no AMX for this process: ")
    assert line["running"] == "another tile"
    assert len([*folder.glob("avx512-*.so")]) == 1


@pytest.mark.parametrize(
    ("flags", "choice", "problem"),
    [
        (ALL_FLAGS.replace("amx_bf16", ""), "amx", "of amx, avx512, avx2 it runs avx512, avx2"),
        ("avx2 fma", "avx512", "of amx, avx512, avx2 it runs avx2"),
        ("sse4_2", "auto", "of amx, avx512, avx2 it runs none"),
        ("sse4_2", "avx2", "of amx, avx512, avx2 it runs none"),
        ("avx2 fma", "neon", "need one of auto, amx, avx512, avx2, off"),
        ("avx2 fma", "off", "=off"),
    ],
)
def test_a_tile_that_the_cpu_does_not_run_leaves_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, choice: str, problem: str
):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(library, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setenv(library.CHOICE, choice)
    forget()
    with structlog.testing.capture_logs() as lines:
        assert library.load() is None
        assert library.load() is None
    forget()
    [line] = lines
    assert problem in line["problem"]


def test_the_best_tile_of_a_cpu_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(ALL_FLAGS)
    assert library.choose("auto") == ["amx", "avx512", "avx2"]
    (tmp_path / "cpuinfo").write_text("flags : avx2 fma avx512f")
    assert library.choose("auto") == ["avx2"]
    (tmp_path / "cpuinfo").unlink()
    with pytest.raises(library.NoKernels):
        library.choose("auto")


def test_experts_of_a_width_that_no_tile_takes_run_plainly_with_a_line_in_the_log(
    kernels: library.Library,  # or none would be taken
):
    sizes = {"hidden_size": 48, "num_experts": 4, "top_k": 2, "intermediate_size": 32}
    spec = new_spec(**sizes, dtype=torch.bfloat16)
    with structlog.testing.capture_logs() as lines:
        chosen = cpu_kernels(spec, dtype=spec.dtype)
    assert spec.moe is not None
    share = ExpertShare.of(Topology(), spec.moe)
    assert isinstance(chosen.new_experts(spec.moe, share).runner, GroupedMMRunner)
    assert [line["event"] for line in lines] == ["no_cpu_kernel_for_experts"]
