"""The machine itself: packages that servers and tests need, and kernels that executors load."""

import os
import shutil
import tomllib
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from executor.model.flashinfer.operators import FlashInferOps
from tests.gpu.support.machine import IS_STAND_IN, Machine
from tests.gpu.support.modules import FEW_HEADS, MODULES, OF_ALL_TO_ALL
from tests.support.paths import ROOT

TESTS_NEED = ("pytest", "pytest-asyncio", "packaging")


def needed() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["executor"], *TESTS_NEED]
    pins = (ROOT / "deploy/requirements-flashinfer.txt").read_text().splitlines()
    lines += [pin for pin in pins if pin.startswith(("apache-tvm-ffi", "flashinfer-python"))]
    requirements = map(Requirement, lines)
    return [each for each in requirements if each.marker is None or each.marker.evaluate()]


def test_packages_are_there_and_new_enough() -> None:
    wrong = []
    for requirement in needed():
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    assert not wrong, f"carry wheels (tests/gpu/README.md): {', '.join(wrong)}"


def test_triton_compiles(machine: Machine) -> None:
    """Else executors run without its kernels, and say so in their log only."""
    assert IS_STAND_IN or machine.triton is not None


def test_kernels_are_prebuilt_or_there_is_a_compiler(ops: FlashInferOps) -> None:
    missing = [name for name in (*MODULES, *FEW_HEADS, *OF_ALL_TO_ALL) if not ops.has_built(name)]
    can_compile = "FLASHINFER_DISABLE_JIT" not in os.environ and shutil.which("ninja")
    assert IS_STAND_IN or can_compile or not missing, missing
