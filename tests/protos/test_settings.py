"""A setting is written once: flag, variable, help and check must all come of that."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from protos import __version__
from protos.settings import (
    ADDRESS,
    ON_OFF,
    above,
    at_least,
    check_settings,
    check_variables,
    command,
    folder_with,
    one_of,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class Base:
    log_level: str = "info"
    """Least severe level."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    folder: Path = setting(rule=folder_with("config.json"))
    """Folder of a
    model."""
    groups: tuple[tuple[str, ...], ...] = setting((), flag="--group")
    """Addresses."""
    listen: str = setting("127.0.0.1:1", ADDRESS)
    """Where to serve."""
    sizes: tuple[int, ...] | None = setting(None, unset="by 8")
    """Sizes."""
    count: int = setting(3, at_least(1), variables=("SHORT_COUNT",))
    """How many."""
    wait_s: float = setting(0.5, above(0, ", or it never waits"))
    """Seconds."""
    graphs: str = setting("on", ON_OFF)
    """Graphs."""
    kind: str | None = setting(None, one_of("a", "b"))
    """Kind."""

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.fixture(autouse=True)
def _logging_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.settings.configure_logging", lambda level="info": None)


seen: list[Config] = []


@command(Config, "tool")
def main(config: Config) -> None:
    """Does what a tool does."""
    seen.append(config)
    if config.kind == "b":
        raise OSError("the port is taken")
    if config.listen == "taken.example:1":
        raise ValueError("a file is none")


def run(*args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    seen.clear()
    result = CliRunner().invoke(main, args, env=env)
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_flags_and_variables_become_values_of_the_fields_types(folder: str):
    env = {
        "LOCKSTEP_TOOL_FOLDER": folder,
        "LOCKSTEP_TOOL_GROUPS": "a:1,b:2 c:3",
        "LOCKSTEP_TOOL_SIZES": "1,2,40",
        "LOCKSTEP_TOOL_WAIT_S": "2",
    }
    assert run("--count", "7", "--kind", "a", env=env)[0] == 0
    expected = Config(
        folder=Path(folder),
        groups=(("a:1", "b:2"), ("c:3",)),
        sizes=(1, 2, 40),
        count=7,
        wait_s=2.0,
        kind="a",
    )
    assert seen == [expected]
    assert run("--group", "a:1", "--group", "b:2,c:3", "--wait-s", "3", env=env)[0] == 0
    assert seen[0].groups == (("a:1",), ("b:2", "c:3"))
    assert seen[0].wait_s == 3.0


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SHORT_COUNT": "77"}, 77),
        ({"LOCKSTEP_TOOL_COUNT": "78"}, 78),
        ({"SHORT_COUNT": "77", "LOCKSTEP_TOOL_COUNT": "78"}, 78),
    ],
)
def test_a_settings_own_variable_comes_before_its_others(
    folder: str, env: dict[str, str], expected: int
):
    run("--folder", folder, env=env)
    assert seen[0].count == expected


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("folder", Path("/nowhere"), "folder=/nowhere: need a folder that holds a config.json"),
        ("count", 0, "count=0: need at least 1"),
        ("wait_s", 0.0, "wait_s=0.0: need more than 0, or it never waits"),
        ("wait_s", float("nan"), "wait_s=nan: need more than 0"),
        ("wait_s", float("inf"), "wait_s=inf: need more than 0"),
        ("graphs", "yes", "graphs=yes: need one of on, off"),
        ("kind", "c", "kind=c: need one of a, b"),
        *(
            ("listen", address, f"listen={address}: need host:port, such as 127.0.0.1:50051")
            for address in ("9090", "host:", ":9090", "host:70000", "http://host:1", "::1:80")
        ),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_what_does(
    folder: str, name: str, value: Any, problem: str
):
    settings = {"folder": Path(folder), name: value}
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        Config(**settings)


@pytest.mark.parametrize("address", ["a:0", "10.0.0.1:65535", "[::1]:1", "[fe80::1%eth0]:1"])
def test_an_address_is_a_host_and_a_port(folder: str, address: str):
    assert Config(folder=Path(folder), listen=address).listen == address


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("LOCKSTEP_TOOL_COUNTS", "did you mean LOCKSTEP_TOOL_COUNT?"),
        ("LOCKSTEP_TOOL_GROUP", "did you mean LOCKSTEP_TOOL_GROUPS?"),
        ("LOCKSTEP_TOOL_PORT", "no such setting; --help"),
        ("LOCKSTEP_TOOL_ELSEWHERE_ENTIRELY", "no such setting; --help"),
    ],
)
def test_a_variable_that_is_no_setting_stops_the_start_with_a_guess(
    folder: str, name: str, guess: str
):
    exit_code, output = run("--folder", folder, env={name: "a-secret"})
    assert exit_code == 2
    assert name in output
    assert guess in output
    assert "a-secret" not in output
    assert not seen


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((), "Missing option '--folder'"),
        (("--folder",), "requires an argument"),
        (("--cuont", "7"), "No such option '--cuont'. Did you mean '--count'"),
        (("--count", "many"), "'many' is not a valid integer"),
        (("--folder", "FOLDER", "more"), "unexpected extra argument (more)"),
        (("--folder", "FOLDER", "--listen", "taken.example:1"), "a file is none"),
    ],
)
def test_a_start_that_cannot_be_is_refused_in_one_line(
    folder: str, args: tuple[str, ...], problem: str
):
    exit_code, output = run(*[folder if arg == "FOLDER" else arg for arg in args])
    assert exit_code == 2
    lines = output.splitlines()
    assert len(lines) == 1 + (problem == "a file is none")  # behind its configuration
    assert "cannot_start" in lines[-1]
    assert problem in lines[-1]


def test_variables_of_others_are_left_alone():
    others = [
        "LOCKSTEP_ELSE_COUNTS",
        "LOCKSTEP_FUZZ",
        "PATH",
        # Kubernetes sets these for Services named lockstep-tool and lockstep-tool-pods.
        *("LOCKSTEP_TOOL_SERVICE_HOST", "LOCKSTEP_TOOL_SERVICE_PORT_GRPC", "LOCKSTEP_TOOL_PORT"),
        *("LOCKSTEP_TOOL_PORT_50051_TCP_ADDR", "LOCKSTEP_TOOL_PODS_SERVICE_HOST"),
        "LOCKSTEP_TOOL_PODS_PORT",
    ]
    check_variables(others, "LOCKSTEP_TOOL_", {"LOCKSTEP_TOOL_COUNT"})


def test_help_is_the_reference():
    exit_code, output = run("--help")
    text = " ".join(output.split())
    assert exit_code == 0
    assert "Does what a tool does." in text
    assert "--folder PATH Folder of a model. [a folder that holds a config.json]" in text
    assert "[env var: LOCKSTEP_TOOL_FOLDER; required]" in text
    assert "[env var: LOCKSTEP_TOOL_COUNT, SHORT_COUNT; default: 3]" in text
    assert "[env var: LOCKSTEP_TOOL_SIZES; default: (by 8)]" in text
    assert text.index("--kind") < text.index("--log-level"), "own settings come first"


def test_a_program_tells_its_version():
    assert run("--version") == (0, f"lockstep-tool {__version__}\n")


def test_every_setting_has_a_description():
    @dataclass(frozen=True)
    class Undescribed:
        log_level: str = "info"

    with pytest.raises(KeyError, match="log_level"):
        command(Undescribed, "tool")


PROGRAM = "from tests.protos.test_settings import main; main()"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--folder", "/nowhere"), "folder=/nowhere: need a folder"),
        (("--kind", "b"), "the port is taken"),
    ],
)
def test_a_start_that_fails_is_one_line_and_an_exit_code(
    folder: str, args: tuple[str, ...], problem: str
):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *args],
        capture_output=True,
        text=True,
        check=False,
        env={"LOCKSTEP_TOOL_FOLDER": folder, **os.environ},
    )
    assert done.returncode == 2
    line = json.loads(done.stderr.splitlines()[-1])
    assert line["event"] == "cannot_start"
    assert problem in line["problem"]


def test_a_value_of_another_type_is_refused_by_the_flag(folder: str):
    for flag, value in (("--sizes", "1,x"), ("--count", "many")):
        exit_code, output = run("--folder", folder, flag, value)
        assert exit_code == 2
        assert flag in output
