"""Application teams install the client's wheel beside grpcio and protobuf, and nothing else of ours."""

import asyncio
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

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


def batch_line(name: str, prompt: str) -> dict[str, Any]:
    """A line that asks for the same either way: as a text or, if the name is even, as a chat."""
    body = {"max_tokens": 8, "temperature": 0, "prompt": f"\n{prompt}"}
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    if int(name.split()[1]) % 2 == 0:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": prompt}]
        line["url"] = "/v1/chat/completions"
    return line


async def test_a_batch_that_was_killed_goes_on_with_each_line_once(
    stack: LocalStack, installed: Path, tmp_path: Path
):
    """It is one of the wheel's, with nothing but grpcio and protobuf beside it."""
    prompts = {f"line {number}": f"{number}+25=" for number in range(40)}
    lines = [batch_line(name, prompt) for name, prompt in prompts.items()]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines))
    command = [sys.executable, "-S", "-m", "lockstep_client.batch", str(source), str(target)]

    async def start(window: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(*command, "--router", stack.address, "--window", str(window)),
            cwd=installed.parent,
            env={"PYTHONPATH": str(installed)},
            stderr=subprocess.PIPE,
        )

    first = await start(window=1)
    while not target.exists() or b"\n" not in target.read_bytes():
        await asyncio.sleep(0.005)
    first.kill()
    await first.communicate()
    assert 0 < len(target.read_text().splitlines()) < len(lines)

    second = await start(window=64)
    _, said = await second.communicate()
    assert second.returncode == 0, said.decode()
    assert f"{len(lines)} of {len(lines)} lines, 0 with an error" in said.decode()
    outputs = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(output["custom_id"] for output in outputs) == sorted(prompts)
    async with stack.client() as client:
        for output in outputs[::13]:  # texts and chats
            expected = await client.complete(f"\n{prompts[output['custom_id']]}", max_tokens=8)
            [choice] = output["response"]["body"]["choices"]
            assert expected.text in (choice.get("text"), choice.get("message", {}).get("content"))


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


def test_the_archive_has_the_public_api_and_no_time(tmp_path: Path):
    path = build_archive(tmp_path)
    assert path.read_bytes()[4:8] == bytes(4), "gzip's header would have the time of building"
    with tarfile.open(path) as archive:
        folder = f"lockstep-protos-{__version__}"
        file = archive.extractfile(f"{folder}/protos/serving/v1/serving.proto")
        assert file is not None
        assert file.read() == (ROOT / "protos/serving/v1/serving.proto").read_bytes()
