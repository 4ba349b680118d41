"""The README is the first thing that anyone reads: what it claims must hold."""

import asyncio
import re
import subprocess
import sys

import click
import pytest

from deploy.local.launch import LocalStack
from deploy.local.processes import ROOT
from executor.__main__ import main as executor_main
from protos.serving.v1 import serving_pb2
from router.__main__ import main as router_main

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DEFAULT_ADDRESS = "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("command", "prefix"),
    [(router_main, "LOCKSTEP_ROUTER"), (executor_main, "LOCKSTEP_EXECUTOR")],
)
def test_every_flag_is_listed_with_its_variable_and_default(command: click.Command, prefix: str):
    for option in command.params:
        [flag] = option.opts
        variable = option.envvar or f"{prefix}_{option.name}".upper()
        if not isinstance(variable, str):  # any of several; the row's text names the others
            variable = variable[0]
        [row] = re.findall(rf"^\| `{flag}` \| `{variable}` \| (.*?) \|", README, re.MULTILINE)
        if option.required:
            assert row == "required"
        elif isinstance(option.default, str):
            assert row == f"`{option.default}`"
        elif isinstance(option.default, int | float):
            assert float(row) == option.default


def test_no_flag_is_listed_that_does_not_exist():
    flags = {flag for main in (router_main, executor_main) for o in main.params for flag in o.opts}

    assert set(re.findall(r"^\| `(--[a-z0-9-]+)`", README, re.MULTILINE)) == flags


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
