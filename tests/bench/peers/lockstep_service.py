"""Lockstep as a whole: a router, an executor and a client, three processes on real sockets.

python -m tests.bench.peers.lockstep_service CHECKPOINT
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from deploy.local.launch import LocalStack
from tests.bench.peers.workload import measure_service
from tests.bench.support.quiet import quiet


async def main(folder: Path) -> None:
    stack = LocalStack(folder, dp_size=1)
    async with stack, stack.client() as client, client.many() as many:

        async def generate(prompt: list[int], num_tokens: int) -> AsyncIterator[int]:
            async for delta in many.generate(prompt, max_tokens=num_tokens, ignore_eos=True):
                yield len(delta.token_ids)

        await measure_service(generate)


if __name__ == "__main__":
    quiet()
    asyncio.run(main(Path(sys.argv[1])))
