"""Logs are read by more people than secrets are for."""

import json
import subprocess
import sys

import pytest

SECRET = "a-secret-in-a-variable"
# Where a package that prints variables is at hand, as rich may be, structlog would use it.
PROGRAM = """
import sys, types
{prepare}
talkative = types.ModuleType("better_exceptions")
talkative.format_exception = lambda kind, error, tb: [repr(tb.tb_next.tb_frame.f_locals)]
sys.modules["better_exceptions"] = talkative
from protos.telemetry.logs import configure_logging
import structlog
configure_logging()
log = structlog.stdlib.get_logger("here")
def call(token):
    raise ValueError("it went wrong")
try:
    call("-".join(("a", "secret", "in", "a", "variable")))
except ValueError:
    log.exception("failed", request_id="mine")
"""
TERMINAL = "sys.stderr.isatty = lambda: True"


def written(prepare: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.replace("{prepare}", prepare)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("prepare", ["", TERMINAL])
def test_a_traceback_shows_where_but_no_value_of_a_variable(prepare: str) -> None:
    log = written(prepare)

    assert "it went wrong" in log
    assert "in call" in log
    assert SECRET not in log


def test_without_a_terminal_each_event_is_a_line_of_json() -> None:
    [line] = written("").splitlines()

    event = json.loads(line)
    assert (event["event"], event["level"], event["request_id"]) == ("failed", "error", "mine")


def test_a_library_that_logs_by_itself_is_written_likewise_with_all_that_it_says() -> None:
    say = 'logging.getLogger("lib").warning("files_not_reloaded", extra={"setting": "tls"})'
    line, _ = written(
        f"import logging, protos.telemetry.logs as ours; ours.configure_logging(); {say}"
    ).splitlines()

    event = json.loads(line)
    assert (event["event"], event["level"], event["setting"]) == (
        "files_not_reloaded",
        "warning",
        "tls",
    )
