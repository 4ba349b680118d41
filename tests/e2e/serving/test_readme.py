"""READMEs: their examples run, and all that they name exists."""

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
from router.client.batch import argument_parser as batch_parser
from router.top import main as top_main

READMES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in sorted([ROOT / "README.md", *ROOT.glob("*/README.md")])
}
ALL = "\n".join(READMES.values())
EXAMPLES = re.findall(r"```python\n(.*?)```", ALL, re.DOTALL)
DEFAULT_ADDRESS = "127.0.0.1:50051"
PROGRAMS = (router_main, executor_main, top_main)
FLAG = re.compile(r"(?<![\w-])--[a-z0-9]+(?:-[a-z0-9]+)*\b(?!-\*)")
# Lines that run other programs, whose flags are not ours.
FOREIGN = re.compile(r"(pip|smg|docker|kubectl|grpcurl|curl|docker compose|promtool|openssl) ")


def own_text() -> str:
    """The READMEs without commands of other programs, continued lines included."""
    joined = re.sub(r"\\\n", " ", ALL)
    return "\n".join(line for line in joined.splitlines() if not FOREIGN.search(line))


def test_every_flag_that_is_named_exists():
    flags = {flag for main in PROGRAMS for option in main.params for flag in option.opts}
    flags |= set(FLAG.findall(batch_parser().format_help()))
    named = set(FLAG.findall(own_text()))

    # Of every program, of the demo, of the attacks, of benches, of SMG, of docker build.
    named -= {"--help", "--speculative", "--only", "--envoy", "--require", "--model-path"}
    named -= {"--trace", "--loads", "--flows", "--subscribers", "--output", "--build-arg"}
    named -= {"--front", "--ranks", "--cost", "--skip"}
    assert named <= flags | {"--tls", "--executor"}  # --tls-*: a family


def test_every_variable_that_is_named_exists():
    commands = (router_main, executor_main)
    known = {name for main in commands for o in main.params for name in o.envvar or ()}

    assert set(re.findall(r"\bLOCKSTEP_(?:ROUTER|EXECUTOR)_\w+", ALL)) <= known


def test_every_file_that_is_named_exists():
    for name, text in READMES.items():
        for link in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name}: {link}"
        for path in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.[a-z]+)`", text):
            places = (ROOT, (ROOT / name).parent)
            assert any((place / path).exists() for place in places), f"{name}: {path}"


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
    table = READMES["protos/README.md"]
    assert set(re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \|", table, re.MULTILINE)) == listed


def test_every_method_and_target_that_is_named_exists():
    service = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    makefile = (ROOT / "Makefile").read_text()

    for method in re.findall(rf"{service.full_name}/(\w+)", ALL):
        assert method in service.methods_by_name
    for target in re.findall(r"(?:`|^ {4})make ([a-z-]+)\b", ALL, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


SIZES = sorted(set(re.findall(r"DP=.*A2A=\w+", (ROOT / "Makefile").read_text())))


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_that_the_makefile_names_together_fit_one_another(sizes: str):
    flags = {"DP": "--dp-size", "TP": "--attn-tp-size", "EP": "--ep-size", "A2A": "--moe-a2a"}
    given = [f"{flags[name]}={value}" for name, value in re.findall(r"(\w+)=(\w+)", sizes)]
    command = [*(sys.executable, "-m", "executor", "--model", "deploy/demo_model"), *given]

    subprocess.run([*command, "--check", "on"], cwd=ROOT, check=True, capture_output=True)
