"""Distributions of a release: the wheel of the client library, and an archive of the public API.

    python -m deploy.release.dist [dist]

The wheel is router/client as the package lockstep_client, with the modules of protos/ that it imports
inside. It needs grpcio and protobuf only; tests/e2e/serving/test_client_wheel.py holds it to that.
"""

import ast
import base64
import hashlib
import io
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path

from protos import __version__

ROOT = Path(__file__).parents[2]
PACKAGE = "lockstep_client"
CLIENT = Path("router/client")
GENERATED = Path("protos/serving/v1")
PUBLIC_API = (Path("protos/serving/v1/serving.proto"), Path("LICENSE"))


def main(folder: Path) -> None:
    """Writes both into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (build_wheel(folder), build_archive(folder)):
        print(path)


def build_wheel(folder: Path) -> Path:
    """Returns the path of the wheel of the client library, which it writes."""
    info = f"{PACKAGE}-{__version__}.dist-info"
    content = {_place(path): _renamed((ROOT / path).read_text()) for path in client_modules()} | {
        f"{PACKAGE}/py.typed": "",
        f"{info}/METADATA": _metadata(),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_text(),
    }
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")
    path = folder / f"{PACKAGE}-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in content.items():
            wheel.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return path


def build_archive(folder: Path) -> Path:
    """Returns the path of the archive of .proto files, which it writes: the same bytes each time."""
    path = folder / f"lockstep-protos-{__version__}.tar.gz"
    with (
        GzipFile(path, "wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for source in PUBLIC_API:
            data = (ROOT / source).read_bytes()
            entry = tarfile.TarInfo(f"lockstep-protos-{__version__}/{source}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def client_modules() -> list[Path]:
    """Returns the files of router/client and those that they import, all in this repository."""
    found: set[Path] = set()
    to_look_at = [path.relative_to(ROOT) for path in (ROOT / CLIENT).glob("*.py")]
    while to_look_at:
        path = to_look_at.pop()
        if path not in found:
            found.add(path)
            to_look_at += _imports(path)
    packages = {parent / "__init__.py" for path in found for parent in path.parents}
    typed = {path.with_suffix(".pyi") for path in found}
    beside = {path for path in packages | typed if (ROOT / path).exists()}
    return sorted((found | beside) - {Path("router/__init__.py")})


def _imports(path: Path) -> Iterator[Path]:
    """Yields the files of this repository that a file imports."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = Path(*node.module.split("."))
            names = [module, *(module / alias.name for alias in node.names)]
            yield from (
                each for name in names if (ROOT / (each := name.with_suffix(".py"))).exists()
            )


def _place(path: Path) -> str:
    """Returns where a file of this repository lies in the wheel."""
    inside = path.relative_to(CLIENT) if path.is_relative_to(CLIENT) else path
    return f"{PACKAGE}/{inside.as_posix()}"


def _renamed(text: str) -> str:
    """Returns a module's text with the names of packages as they are in the wheel."""
    text = re.sub(r"\brouter\.client\b", PACKAGE, text)
    return re.sub(
        r"\bprotos(?=\.(serving|transport)\b| import __version__)", f"{PACKAGE}.protos", text
    )


def _metadata() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Generated code refuses older libraries than the ones that it was made for.
    of_grpc = re.search(r"GRPC_GENERATED_VERSION = '(.+)'", _generated("serving_pb2_grpc.py"))
    of_protobuf = re.search(r"Protobuf Python Version: (.+)", _generated("serving_pb2.py"))
    assert of_grpc is not None
    assert of_protobuf is not None
    lines = [
        "Metadata-Version: 2.4",
        "Name: lockstep-client",
        f"Version: {__version__}",
        "Summary: Client library of Lockstep, which serves mixture-of-experts models over gRPC",
        f"Requires-Python: {project['requires-python']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Dist: grpcio>={of_grpc[1]}",
        f"Requires-Dist: protobuf>={of_protobuf[1]}",
    ]
    return "\n".join(lines) + "\n"


def _generated(name: str) -> str:
    return (ROOT / GENERATED / name).read_text()


def _record(content: dict[str, str], own: str) -> str:
    lines = []
    for name, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(text.encode())}")
    return "\n".join([*lines, f"{own},,"]) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
