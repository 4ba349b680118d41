"""If these fail, a client built from the .proto files does not fit what this repository runs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos").glob("*/v1/*.proto"))

# buf and protoc's plugins are programs beside the Python that runs this, active or not.
BIN = Path(sys.executable).parent
ENV = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def protoc(*options: str) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *options]
    names = [str(path.relative_to(ROOT)) for path in PROTOS]
    done = subprocess.run([*command, *names], cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_committed_code_is_what_the_protos_give(tmp_path: Path) -> None:
    """To make it so: the options below, with the repository's root as the output."""
    protoc(
        f"--python_out={tmp_path}",
        f"--mypy_out=quiet:{tmp_path}",
        f"--grpc_python_out={tmp_path}",
        f"--mypy_grpc_out=quiet:{tmp_path}",
    )
    generated = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")}
    committed = {path.relative_to(ROOT) for path in (ROOT / "protos").rglob("*_pb2*.py*")}
    committed = {path for path in committed if path.suffix in (".py", ".pyi")}
    assert generated == committed
    for path in sorted(generated):
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is stale"


def buf(*args: str, root: Path = ROOT) -> tuple[int, str]:
    command = [str(BIN / "buf"), *args]
    done = subprocess.run(command, cwd=root, env=ENV, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


COMPARED = ("breaking", "protos", "--against", "protos/released.binpb")


@pytest.mark.parametrize("args", [("lint", "protos"), COMPARED])
def test_buf_finds_no_fault(args: tuple[str, ...]) -> None:
    assert buf(*args) == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("uint32 num_waiting = 7;", "", 'field "7" with name "num_waiting" .* was deleted'),
        ("uint32 num_waiting = 7;", "uint64 num_waiting = 7;", "changed type"),
        ("uint32 num_waiting = 7;", "uint32 waiting = 7;", "changed name"),
        ("uint32 num_waiting = 7;", 'reserved 7; reserved "num_waiting";', None),
        ("uint32 num_waiting = 7;", "uint32 num_waiting = 7; uint32 new = 1000;", None),
        ("  rpc Cancel(CancelRequest) returns (CancelResponse);", "", 'RPC "Cancel"'),
    ],
)
def test_a_change_that_breaks_clients_of_the_last_release_is_found(
    tmp_path: Path, old: str, new: str, problem: str | None
) -> None:
    shutil.copytree(ROOT / "protos" / "serving", tmp_path / "protos" / "serving")
    for name in ("buf.yaml", "released.binpb"):
        shutil.copy(ROOT / "protos" / name, tmp_path / "protos")
    path = tmp_path / "protos" / "serving" / "v1" / "serving.proto"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    exit_code, output = buf(*COMPARED, root=tmp_path)
    assert (exit_code == 0) == (problem is None), output
    assert re.search(problem or "^$", output), output


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorSet:
    path = tmp_path_factory.mktemp("protos") / "descriptors"
    protoc(f"--descriptor_set_out={path}", "--include_source_info")
    return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())


# Fields of a descriptor whose entries are declarations, by their numbers in descriptor.proto.
DECLARING: dict[type, dict[int, str]] = {
    descriptor_pb2.FileDescriptorProto: {4: "message_type", 5: "enum_type", 6: "service"},
    descriptor_pb2.DescriptorProto: {2: "field", 3: "nested_type", 4: "enum_type"},
    descriptor_pb2.EnumDescriptorProto: {2: "value"},
    descriptor_pb2.ServiceDescriptorProto: {2: "method"},
}


def declarations(owner: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields the path and the name of all that a descriptor declares."""
    for number, field in DECLARING.get(type(owner), {}).items():
        for index, entry in enumerate(getattr(owner, field)):
            path = (*place, number, index)
            if field == "nested_type" and entry.options.map_entry:
                continue
            yield path, f"{owner.name}.{entry.name}" if place else entry.name
            yield from declarations(entry, path)


def uncommented(file: descriptor_pb2.FileDescriptorProto) -> list[str]:
    """Names of what the file declares without a comment."""
    commented = {
        tuple(location.path)
        for location in file.source_code_info.location
        if location.leading_comments.strip() or location.trailing_comments.strip()
    }
    return [name for path, name in declarations(file) if path not in commented]


def test_everything_in_a_contract_has_a_comment(
    descriptors: descriptor_pb2.FileDescriptorSet,
) -> None:
    assert len(descriptors.file) == len(PROTOS) >= 2
    for file in descriptors.file:
        assert uncommented(file) == [], file.name


def test_a_missing_comment_is_found(descriptors: descriptor_pb2.FileDescriptorSet) -> None:
    file = descriptor_pb2.FileDescriptorProto()
    file.CopyFrom(descriptors.file[0])
    del file.source_code_info.location[:]
    names = uncommented(file)
    assert {"ExecutorService.Step", "StepRequest", "StepRequest.epoch"} <= set(names)
