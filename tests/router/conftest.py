"""The router's tests meet its peers in one process, where a moment's delay is no loss."""

from pathlib import Path

import pytest

from router.api.text import Tokenizer
from router.client import resume
from router.executors import group as executor_client
from tests.router.support.fake_engines import byte_tokenizer

LONG_S = 120.0  # beyond what any of them takes, also on a busy machine


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers, answers in time; a test whose subject is such a limit sets its own."""
    monkeypatch.setattr(executor_client, "DESCRIBE_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(executor_client, "PROBE_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(resume, "ANSWER_GRACE_S", LONG_S)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path)
