"""A pool of input buffers for each test."""

from collections.abc import Iterator

import pytest

from executor.graph.input_buffers import InputBufferPool, fresh_input_buffer_pool


@pytest.fixture(autouse=True)
def pool() -> Iterator[InputBufferPool]:
    with fresh_input_buffer_pool() as fresh:
        yield fresh
