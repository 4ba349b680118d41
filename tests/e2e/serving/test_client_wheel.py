"""Application teams install the client's wheel beside grpcio and protobuf, and nothing else of ours."""

import asyncio
import re
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from deploy.local.launch import LocalStack
from deploy.local.processes import ROOT
from deploy.release.dist import build_archive, build_wheel
from protos import __version__

README = (ROOT / "router" / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# What `pip install grpcio protobuf` brings, and the tests' environment has.
DEPENDENCIES = ("grpc", "google/protobuf", "google/_upb", "typing_extensions.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that has the wheel and what it needs."""
    folder = tmp_path_factory.mktemp("empty")
    wheel = build_wheel(folder)
    packages = folder / "packages"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--quiet", "--target", str(packages), str(wheel)], check=True)
    for name in DEPENDENCIES:
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).symlink_to(Path(sysconfig.get_path("platlib")) / name)
    return packages


@pytest.mark.parametrize("example", EXAMPLES)
async def test_the_readmes_examples_run_with_the_wheel(
    stack: LocalStack, installed: Path, example: str
):
    code = example.replace("router.client", "lockstep_client")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-c", code.replace("127.0.0.1:50051", stack.address)),
        cwd=installed.parent,
        env={"PYTHONPATH": str(installed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()

    assert process.returncode == 0, output.decode()
    assert "42" in output.decode()


def test_the_wheel_is_typed_and_says_what_it_needs(installed: Path):
    [wheel] = [each for each in distributions(path=[str(installed)]) if each.files]
    assert isinstance(wheel, Distribution)
    assert (wheel.name, wheel.version) == ("lockstep-client", __version__)
    assert [line.split(">")[0] for line in wheel.requires or ()] == ["grpcio", "protobuf"]
    names = {str(file) for file in wheel.files or ()}
    assert {
        "lockstep_client/py.typed",
        "lockstep_client/protos/serving/v1/serving_pb2.pyi",
    } <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lockstep_client"}


def test_the_archive_has_the_public_api(tmp_path: Path):
    with tarfile.open(build_archive(tmp_path)) as archive:
        folder = f"lockstep-protos-{__version__}"
        file = archive.extractfile(f"{folder}/protos/serving/v1/serving.proto")
        assert file is not None
        assert file.read() == (ROOT / "protos/serving/v1/serving.proto").read_bytes()
