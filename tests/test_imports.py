"""The structure as data: imports point down these lists. To change it, change the list first."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module may import from the lines below its own. A package counts as one module.
LAYERS = {
    "router": [
        {"__main__", "top"},
        {"app", "client"},
        {"drain", "vllm_engine"},
        {"frontend", "health", "client_many"},
        {
            "frontend_many",
            "client_messages",
            "client_channel",
            "vllm_messages",
            "metrics",
            "tracing",
            "request_log",
        },
        {"validation", "responses", "cell"},
        {"engine", "tokenizer"},
        {"scheduler", "executor_client", "output_text"},
        {"drafting"},
        {
            "load",
            "row_blocks",
            "formation",
            "step_stream",
            "step_codec",
            "step_deadline",
            "quarantine",
            "measures",
        },
        {"group", "logprobs"},
        {"step_builder", "prefix_cache", "admission", "token_runs"},
        {"planner", "sequence_table", "token_gaps"},
        {"step"},
        {"request", "block_pool"},
        {"readers"},
        {"config"},
        {"speculation"},
        {"credentials"},
        {"discovery"},
        {"errors", "model", "status", "detokenizers", "stop_strings", "tokenizer_archive"},
    ],
    "executor": [
        {"__main__"},
        {"server", "metrics"},
        {"build", "step_stream", "served"},
        {"build_drafts", "build_kv", "describe"},
        {"build_runners", "budget_state"},
        {"worker", "devices", "blueprint"},
        {"runners", "sizes"},
        {"speculative"},
        {"step_stager", "answers"},
        {"step_columns"},
        {"step_layout", "row_starts", "step_told", "step_blocks"},
        {"sampler", "step_limits"},
        {"models", "graph"},
        {"moe", "sampling_fixed"},
        {"layers"},
        {"forward_batch", "staging", "step_check", "kv_pool", "logits", "weights", "columns"},
        {
            "config",
            "parallel",
            "dp_layout",
            "flashinfer_ops",
            "budget_table",
            "measures",
            "epochs",
            "join_attempt",
        },
        {
            "budget",
            "connections",
            "links",
            "rendezvous",
            "topology",
            "errors",
            "fingerprint",
            "speculation_plan",
        },
    ],
}

# Who may name a generated message; everybody else has dataclasses, arrays and tensors.
MESSAGE_USERS = {
    "router": {
        "app",
        "client",
        "client_many",
        "client_messages",
        "executor_client",
        "formation",
        "frontend",
        "frontend_many",
        "health",
        "responses",
        "step_codec",
        "step_stream",
        "validation",
        "vllm_engine",
        "vllm_messages",
    },
    "executor": {
        "answers",
        "build",
        "describe",
        "row_starts",
        "served",
        "server",
        "step_columns",
        "step_layout",
        "step_stream",
        "step_told",
        "worker",
    },
}

# What internal services import to call the router: it must not bring the router along.
CLIENT_LIBRARY = {"client", "client_channel", "client_many", "client_messages", "status"}

MAX_LINES = 450


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path, package: str) -> str:
    """Top-level module or package within ``package``."""
    return path.relative_to(ROOT / package).with_suffix("").parts[0]


def statements(node: ast.AST, *, in_functions: bool) -> Iterator[ast.AST]:
    """Everything that runs; what stands under `if TYPE_CHECKING` does not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
            continue
        yield child
        yield from statements(child, in_functions=in_functions)


def imports_of(path: Path, *, in_functions: bool = True) -> set[str]:
    """Full names of all that a file imports, "package.module.name" included."""
    names = set()
    for node in statements(ast.parse(path.read_text()), in_functions=in_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_down(package: str) -> None:
    depths = {name: depth for depth, layer in enumerate(LAYERS[package]) for name in layer}
    for path in modules_of(package):
        here = name_of(path, package)
        if here == "__init__":
            continue
        assert here in depths, f"{path}: say in LAYERS where {here} stands"
        for name in imports_of(path):
            top, *rest = name.split(".")
            if top == package and rest and rest[0] != here:
                assert rest[0] in depths, f"{path} imports {name}, which LAYERS does not have"
                assert depths[here] < depths[rest[0]], f"{path} imports {name}, not below it"


@pytest.mark.parametrize(
    ("package", "foreign"),
    [
        ("router", {"executor", "deploy", "tests", "torch"}),
        ("executor", {"router", "deploy", "tests"}),
        ("protos", {"router", "executor", "deploy", "tests", "torch"}),
    ],
)
def test_neither_side_knows_the_other(package: str, foreign: set[str]) -> None:
    for path in modules_of(package):
        tops = {name.split(".")[0] for name in imports_of(path)}
        assert not tops & foreign, f"{path} imports {tops & foreign}"


@pytest.mark.parametrize("package", MESSAGE_USERS)
def test_generated_messages_are_named_only_at_the_edges(package: str) -> None:
    for path in modules_of(package):
        if name_of(path, package) not in MESSAGE_USERS[package]:
            generated = {name for name in imports_of(path) if "_pb2" in name}
            assert not generated, f"{path} imports {generated}"


def test_the_client_library_stands_on_its_own() -> None:
    for name in CLIENT_LIBRARY:
        for imported in imports_of(ROOT / "router" / f"{name}.py"):
            top, *rest = imported.split(".")
            assert top != "router" or rest[0] in CLIENT_LIBRARY, f"{name} imports {imported}"


def test_flashinfer_is_imported_only_where_it_is_used() -> None:
    """The package must import, and its tests run, on a machine without it."""
    for path in modules_of("executor"):
        tops = {name.split(".")[0] for name in imports_of(path, in_functions=False)}
        assert "flashinfer" not in tops, f"{path}: import it in the function that calls it"


@pytest.mark.parametrize("package", ["router", "executor", "protos", "deploy"])
def test_no_file_holds_more_than_one_idea(package: str) -> None:
    for path in modules_of(package):
        if "_pb2" not in path.name:
            num_lines = len(path.read_text().splitlines())
            assert num_lines <= MAX_LINES, f"{path} has {num_lines} lines: split it"
