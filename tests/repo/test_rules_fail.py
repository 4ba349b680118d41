"""Rules of the structure, each shown something that breaks it."""

from pathlib import Path

import pytest

from tests.repo import rules
from tests.repo.source import code_lines

LONG = "def long() -> None:\n" + "    print()\n" * rules.MAX_FUNCTION_LINES
BREAKS = {
    "upward_imports": ("router/errors.py", "from router.engine.engine import Engine"),
    "foreign_imports": ("protos/settings.py", "import router.config"),
    "messages_inside": ("router/errors.py", "from protos.serving.v1 import serving_pb2"),
    "client_imports": ("router/client/client.py", "from router.errors import Rejected"),
    "early_flashinfer": ("executor/worker.py", "import flashinfer"),
    "shared_test_modules": ("tests/router/test_top.py", "from tests.router.test_app import STOP"),
    "long_functions": ("deploy/local/demo.py", LONG),
    "code_from_outside": ("protos/settings.py", "import pickle"),
    "unnamed_ideas": ("executor/worker.py", '"""How a step runs."""'),
}


@pytest.mark.parametrize("rule", BREAKS)
def test_a_break_is_found(tmp_path: Path, rule: str) -> None:
    name, source = BREAKS[rule]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)

    [found] = getattr(rules, rule)(tmp_path)

    assert name in found


@pytest.mark.parametrize(
    "line",
    ["from torch import load", "weights = torch.load(path)", "x = eval(text)", "import marshal"],
)
def test_what_runs_code_that_it_finds_in_data_is_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "executor/model/weights.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"def read() -> None:\n    {line}\n")

    [found] = rules.code_from_outside(tmp_path)

    assert str(path) in found


@pytest.mark.parametrize(
    "line",
    [
        'MODEL = "router.engine.engine:Engine"',
        'importlib.import_module("router.engine.engine")',
    ],
)
def test_a_module_named_by_a_string_is_an_import(tmp_path: Path, line: str) -> None:
    path = tmp_path / "router/errors.py"
    path.parent.mkdir()
    path.write_text(line)

    assert list(rules.upward_imports(tmp_path))


def test_a_module_without_a_layer_is_found(tmp_path: Path) -> None:
    path = tmp_path / "router/helpers.py"
    path.parent.mkdir()
    path.write_text("")

    [found] = rules.upward_imports(tmp_path)

    assert "say in LAYERS where helpers stands" in found


def test_a_folder_may_show_fourteen_entries_and_what_counts_as_none() -> None:
    files = [f"router/module_{number}.py" for number in range(rules.MAX_ENTRIES)]
    uncounted = ["router/__init__.py", "router/README.md", "router/step_pb2.py"]

    assert not list(rules.full_folders([*files, *uncounted]))
    [found] = rules.full_folders([*files, "router/api/generate.py"])
    assert "router shows 15 entries" in found


def test_only_code_counts_as_a_code_line() -> None:
    source = '''"""Module."""

import os

# A comment.
def join(path: str) -> str:
    """Joins."""
    return os.path.join(
        path,
        "name",
    )
'''
    assert code_lines(source) == {6, 8, 9, 10, 11}
