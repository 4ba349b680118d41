"""Limit of every asynchronous test, the order of tests: those with long files first, what
collections of garbage look through, and Triton's interpreter."""

import asyncio
import functools
import gc
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads as it is imported

LIMIT_S = 600.0  # beyond what any of them takes, also on a busy machine
# So that at the end no core waits for another's long file.
LONGEST_FIRST = ("tests/e2e/", "tests/together/", "tests/sim/", "tests/executor/runners/")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Spares collections of garbage the million objects that are made here, and stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST_FIRST))
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = bounded(item.obj)


def bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Returns the test, with an end to its waiting."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        limit = asyncio.timeout(LIMIT_S)
        try:
            async with limit:
                await test(*args, **kwargs)
        except TimeoutError:
            if not limit.expired():
                raise
            pytest.fail(f"had not ended after {LIMIT_S:.0f} s: what it waits for never came")

    return run
