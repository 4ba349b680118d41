"""Fixtures of tests that build runners, which run by themselves where they are imported."""

from collections.abc import Iterator

import pytest

from executor.graph.input_buffers import fresh_input_buffer_pool
from tests.executor.support.recording.recording_backend import known_world


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    """Spares each capture the million objects that a run has imported."""
    with known_world():
        yield


@pytest.fixture(autouse=True)
def own_buffers() -> Iterator[None]:
    with fresh_input_buffer_pool():
        yield
