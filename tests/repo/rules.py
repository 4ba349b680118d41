"""Rules of the structure: import layers, entries of a folder, sizes of functions, first lines.

To change the structure, change the lists here first. A rule is a function that yields what breaks
it under a root folder.
"""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.repo.source import PRODUCT, ROOT, code_lines, imports_of, is_generated, modules_of

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
        {"worker", "model.drafts"},
        {"model.families"},
        {"model.decoder"},
        {"runners", "model.moe"},
        {"speculative", "model.layers"},
        {"model.sampling", "config", "server"},
        {"batch"},
        {"parallel"},
        {"graph", "metrics", "model.spec", "model.flashinfer", "model.triton"},
        {"model.weights", "model.cpu_kernels"},
        {"budget", "errors"},
    ],
}

# Names that a folder must not import from. Tests of both sides stand in tests/together and e2e.
OTHER_TESTS = {"deploy", "tests.together", "tests.e2e"}
FOREIGN = {
    "router": {"executor", "deploy", "tests", "torch"},
    "executor": {"router", "deploy", "tests"},
    "protos": {"router", "executor", "deploy", "tests", "torch"},
    "tests/router": {"executor", "torch", "tests.executor", *OTHER_TESTS},
    "tests/sim": {"executor", "torch", "tests.executor", *OTHER_TESTS},
    "tests/executor": {"router", "tests.router", "tests.sim", *OTHER_TESTS},
    "tests/support": {"executor", "router", "tests.executor", "tests.router", *OTHER_TESTS},
}
ALLOWED = {"deploy.local.ports.held_port"}

# Packages that may name a generated message; the others have dataclasses, arrays and tensors.
MESSAGE_USERS = {
    "router": {"app", "api", "client", "engine", "executors", "telemetry", "top"},
    "executor": {"build", "worker", "server", "batch", "__main__"},
}

MAX_ENTRIES = 14
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}  # "path:function": the reason; at most five

# What runs code that it finds in data.
RUNNING_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
}
RUNNING_CALLS = {
    *("eval", "exec", "compile", "builtins.eval", "builtins.exec"),
    *("torch.load", "torch.hub.load", "torch.jit.load", "np.load", "numpy.load", "yaml.load"),
}

# A module's first line is a noun phrase of the field.
QUESTIONS = {"what", "which", "how", "who", "whom", "whose", "whether", "where", "when", "why"}


def layer_name(dotted: str, package: str) -> str:
    """Name in LAYERS of a module or of something that it defines; "" for the package itself."""
    names = {name for layer in LAYERS[package] for name in layer}
    parts = dotted.split(".")[1:]
    two = ".".join(parts[:2])
    return two if two in names else parts[0] if parts else ""


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def upward_imports(root: Path) -> Iterator[str]:
    for package, layers in LAYERS.items():
        depths = {name: depth for depth, layer in enumerate(layers) for name in layer}
        for path in modules_of(root / package):
            here = layer_name(module_name(path, root), package)
            if not here or any(name.startswith(f"{here}.") for name in depths):
                continue  # the __init__ of a package, or of one that holds packages
            if here not in depths:
                yield f"{path}: say in LAYERS where {here} stands"
                continue
            for name in imports_of(path):
                there = layer_name(name, package) if name.split(".")[0] == package else ""
                if there and there not in depths:
                    yield f"{path} imports {name}, which LAYERS does not have"
                elif there and there != here and depths[here] >= depths[there]:
                    yield f"{path} imports {name}, not below it"


def foreign_imports(root: Path) -> Iterator[str]:
    for folder, foreign in FOREIGN.items():
        for path in modules_of(root / folder):
            for name in imports_of(path) - ALLOWED:
                if any(f"{name}.".startswith(f"{top}.") for top in foreign):
                    yield f"{path} imports {name}"


def messages_inside(root: Path) -> Iterator[str]:
    for package, users in MESSAGE_USERS.items():
        for path in modules_of(root / package):
            generated = {name for name in imports_of(path) if "_pb2" in name}
            if generated and layer_name(module_name(path, root), package) not in users:
                yield f"{path} imports {generated}"


def client_imports(root: Path) -> Iterator[str]:
    """The client library must not bring the router along."""
    for path in modules_of(root / "router/client"):
        for name in imports_of(path):
            if name.startswith("router.") and not name.startswith("router.client"):
                yield f"{path} imports {name}"


def early_flashinfer(root: Path) -> Iterator[str]:
    """The package must import, and its tests run, on a machine without FlashInfer."""
    for path in modules_of(root / "executor"):
        tops = {name.split(".")[0] for name in imports_of(path, in_functions=False)}
        if "flashinfer" in tops:
            yield f"{path}: import it in the function that calls it"


def shared_test_modules(root: Path) -> Iterator[str]:
    for path in modules_of(root / "tests"):
        for name in imports_of(path):
            if name.startswith("tests.") and ".test_" in name:
                yield f"{path} imports {name}: move what they share to support/"


def full_folders(files: list[str]) -> Iterator[str]:
    entries: dict[Path, set[str]] = {}
    for file in map(Path, files):
        if file.name in {"__init__.py", "README.md"} or is_generated(file):
            continue
        for path in [file, *file.parents[:-1]]:
            entries.setdefault(path.parent, set()).add(path.name)
    for folder, names in entries.items():
        visible = {name for name in names if not name.startswith(".")}
        if len(visible) > MAX_ENTRIES:
            yield f"{folder} shows {len(visible)} entries: {sorted(visible)}"


def long_functions(root: Path) -> Iterator[str]:
    for path in (path for package in PRODUCT for path in modules_of(root / package)):
        source = path.read_text()
        lines = code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = sum(node.lineno <= line <= (node.end_lineno or 0) for line in lines)
                name = f"{path.relative_to(root)}:{node.name}"
                if size > MAX_FUNCTION_LINES and name not in LONG_FUNCTIONS:
                    yield f"{name} has {size} code lines"


def code_from_outside(root: Path) -> Iterator[str]:
    """Bytes from outside are read by formats that cannot run anything."""
    for path in (path for package in PRODUCT for path in modules_of(root / package)):
        for node in ast.walk(ast.parse(path.read_text())):
            found = {ast.unparse(node.func)} if isinstance(node, ast.Call) else set()
            for name in found & RUNNING_CALLS:
                yield f"{path}:{node.lineno} calls {name}"
        for name in imports_of(path):
            if name.split(".")[0] in RUNNING_MODULES or name in RUNNING_CALLS:
                yield f"{path} imports {name}"


def unnamed_ideas(root: Path) -> Iterator[str]:
    for path in (path for package in PRODUCT for path in modules_of(root / package)):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if not docstring:
            yield f"{path} has no docstring"
        elif docstring.split()[0].strip(",:").lower() in QUESTIONS:
            yield f"{path} begins with {docstring.split()[0]}: name the thing"


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
