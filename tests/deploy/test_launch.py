"""Launcher: a stack is ready when a router is."""

import asyncio
from typing import Any

import pytest

from deploy.local.launch import LocalStack
from router.api.health import Health
from tests.router.support.fake_engines import listening


class _Running:
    """A router's process that does not end."""

    has_ended = False

    async def exited(self) -> int:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


@pytest.mark.parametrize("driver", [0, 1])
async def test_a_stack_of_two_routers_is_ready_whichever_of_them_drives(driver: int):
    healths = Health(), Health()
    healths[driver].set_ready(True)
    async with listening(healths[0].add_to) as one, listening(healths[1].add_to) as other:
        stack = LocalStack(num_routers=2, ready_timeout_s=5.0)
        running: Any = [_Running(), _Running()]
        stack.addresses, stack.routers = [one, other], running
        await stack.wait_until_ready()
