"""Structure of the repository as data: imports point down these lists.

To change the structure, change the list first.
"""

from pathlib import Path

import pytest

from tests.repo.source import ROOT, imports_of, modules_of

# A package may import from the sets below its own, and from its own modules. "model.layers" is a
# package within a package that has a place of its own.
LAYERS = {
    "router": [
        {"__main__"},
        {"app"},
        {"api", "telemetry", "config"},
        {"engine", "executors"},
        {"scheduling", "top"},
        {"requests", "client"},
        {"errors"},
    ],
    "executor": [
        {"__main__"},
        {"build"},
        {"worker", "model.families"},
        {"runners", "model.moe"},
        {"speculative", "model.layers"},
        {"model.sampling", "config", "server"},
        {"batch"},
        {"parallel"},
        {"graph", "metrics", "model.weights", "model.flashinfer"},
        {"budget", "errors"},
    ],
}

# Packages that may name a generated message; the others have dataclasses, arrays and tensors.
MESSAGE_USERS = {
    "router": {"app", "api", "client", "engine", "executors", "telemetry", "top"},
    "executor": {
        "answers",
        "batch",
        "build",
        "served",
        "server",
        "step_stream",
        "step_told",
        "worker",
    },
}


def layer_name(dotted: str, package: str) -> str:
    """Name in LAYERS of a module or of something that it defines; "" for the package itself."""
    names = {name for layer in LAYERS[package] for name in layer}
    parts = dotted.split(".")[1:]
    two = ".".join(parts[:2])
    return two if two in names else parts[0] if parts else ""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_down(package: str) -> None:
    depths = {name: depth for depth, layer in enumerate(LAYERS[package]) for name in layer}
    for path in modules_of(ROOT / package):
        here = layer_name(module_name(path), package)
        if here not in depths:
            continue
        for name in imports_of(path):
            there = layer_name(name, package) if name.split(".")[0] == package else ""
            if there in depths and there != here:
                assert depths[here] < depths[there], f"{path} imports {name}, not below it"


@pytest.mark.parametrize(
    ("package", "foreign"),
    [
        ("router", {"executor", "deploy", "tests", "torch"}),
        ("executor", {"router", "deploy", "tests"}),
        ("protos", {"router", "executor", "deploy", "tests", "torch"}),
    ],
)
def test_neither_side_knows_the_other(package: str, foreign: set[str]) -> None:
    for path in modules_of(ROOT / package):
        tops = {name.split(".")[0] for name in imports_of(path)}
        assert not tops & foreign, f"{path} imports {tops & foreign}"


@pytest.mark.parametrize(
    ("folder", "foreign"),
    [
        (
            "router",
            {"executor", "torch", "deploy", "tests.executor", "tests.together", "tests.e2e"},
        ),
        ("sim", {"executor", "torch", "deploy", "tests.executor", "tests.together", "tests.e2e"}),
        (
            "executor",
            {"router", "deploy", "tests.router", "tests.sim", "tests.together", "tests.e2e"},
        ),
        (
            "support",
            {"executor", "router", "deploy", "tests.executor", "tests.router", "tests.e2e"},
        ),
    ],
)
def test_the_tests_of_either_side_run_without_the_other(folder: str, foreign: set[str]) -> None:
    """Tests of both stand in tests/together and tests/e2e."""
    for path in modules_of(ROOT / "tests" / folder):
        for name in imports_of(path) - {"deploy.local.ports.held_port"}:
            top, _, rest = name.partition(".")
            package = f"{top}.{rest.partition('.')[0]}" if top == "tests" else top
            assert package not in foreign, f"{path} imports {name}"


@pytest.mark.parametrize("package", MESSAGE_USERS)
def test_generated_messages_are_named_only_at_the_edges(package: str) -> None:
    for path in modules_of(ROOT / package):
        if layer_name(module_name(path), package) not in MESSAGE_USERS[package]:
            generated = {name for name in imports_of(path) if "_pb2" in name}
            assert not generated, f"{path} imports {generated}"


def test_flashinfer_is_imported_only_where_it_is_used() -> None:
    """The package must import, and its tests run, on a machine without it."""
    for path in modules_of(ROOT / "executor"):
        tops = {name.split(".")[0] for name in imports_of(path, in_functions=False)}
        assert "flashinfer" not in tops, f"{path}: import it in the function that calls it"
