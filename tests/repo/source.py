"""Source files as data: the tracked Python files, their imports, and their code lines."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("router", "executor", "protos", "deploy")
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MODULE_NAME = re.compile(r"(?:router|executor|protos|deploy|tests)(?:\.[a-z_0-9]+)+")


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


def modules_of(package: Path) -> list[Path]:
    """Hand-written Python files under ``package``."""
    return sorted(path for path in package.rglob("*.py") if not is_generated(path))


def statements(node: ast.AST, *, in_functions: bool) -> Iterator[ast.AST]:
    """Nodes that run; what stands under `if TYPE_CHECKING` does not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
            continue
        yield child
        yield from statements(child, in_functions=in_functions)


def is_ours(name: str) -> bool:
    """Whether a dotted name begins with a module of this repository: a host's may look like one."""
    start = ROOT.joinpath(*name.split(".")[:2])
    return start.is_dir() or start.with_suffix(".py").is_file()


@cache
def imports_of(path: Path, *, in_functions: bool = True) -> frozenset[str]:
    """Full names of all that a file imports, "package.module.name" included.

    A string that is the name of a module, with or without ":attribute", counts as an import.
    """
    names = set()
    for node in statements(ast.parse(path.read_text()), in_functions=in_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if MODULE_NAME.fullmatch(name) and is_ours(name):
                names.add(name)
    return frozenset(names)


def is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code: no blank, comment, docstring or import line."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring(node):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines
