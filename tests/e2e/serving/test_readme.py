"""The README is the first thing that anyone reads: what it claims must hold."""

import asyncio
import re
import subprocess
import sys

import pytest

from deploy.local.launch import LocalStack
from deploy.local.processes import ROOT
from executor.__main__ import main as executor_main
from protos.serving.v1 import serving_pb2
from router.__main__ import main as router_main

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DEFAULT_ADDRESS = "127.0.0.1:50051"


def test_every_variable_that_is_named_exists():
    commands = (router_main, executor_main)
    known = {name for main in commands for o in main.params for name in o.envvar or ()}

    for path in (ROOT / "README.md", *ROOT.glob("*/README.md")):
        named = set(re.findall(r"\bLOCKSTEP_(?:ROUTER|EXECUTOR)_\w+", path.read_text()))
        assert named <= known, path


@pytest.mark.parametrize("example", EXAMPLES)
async def test_the_python_examples_run(stack: LocalStack, example: str):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", example.replace(DEFAULT_ADDRESS, stack.address)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()

    assert process.returncode == 0, output.decode()
    assert "42" in output.decode()


def test_every_reason_that_the_proto_lists_is_explained():
    proto = (ROOT / "protos/serving/v1/serving.proto").read_text()
    listed = set(re.findall(r"^//   ([A-Z_]+) +([A-Z_]+) ", proto, re.MULTILINE))

    assert listed
    assert set(re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \|", README, re.MULTILINE)) == listed


def test_every_method_and_target_that_is_named_exists():
    service = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    makefile = (ROOT / "Makefile").read_text()

    for method in re.findall(rf"{service.full_name}/(\w+)", README):
        assert method in service.methods_by_name
    for target in re.findall(r"\bmake ([a-z]+)\b", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
