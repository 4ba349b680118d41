"""Long greedy streams, of which a fault must not change a token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deploy.local.demo_tasks import token_ids
from router.client import Client, Many

PROMPT = "\n17+25="
LONG_TOKENS = 160  # past the answer: the model goes on with problems of its own


async def long_stream(
    asker: Client | Many,
    begun: asyncio.Event | None = None,
    *,
    prompt: str = PROMPT,
    num_tokens: int = LONG_TOKENS,
) -> list[int]:
    """Returns many greedy tokens; sets the event at the first."""
    ids: list[int] = []
    async for delta in asker.generate(token_ids(prompt), max_tokens=num_tokens, ignore_eos=True):
        ids += delta.token_ids
        if begun is not None:
            begun.set()
    return ids


@asynccontextmanager
async def long_streams(*asked: tuple[Client | Many, str]) -> AsyncIterator[None]:
    """Has a stream of each prompt, one after another until the end of the block; checks them all."""
    expected = await asyncio.gather(*[long_stream(asker, prompt=prompt) for asker, prompt in asked])
    begun, is_over = [asyncio.Event() for _ in asked], asyncio.Event()

    async def ask_on(asker: Client | Many, prompt: str, event: asyncio.Event) -> list[list[int]]:
        answers = []
        while not is_over.is_set():
            answers.append(await long_stream(asker, event, prompt=prompt))
        return answers

    streams = [
        asyncio.create_task(ask_on(*ask, event)) for ask, event in zip(asked, begun, strict=True)
    ]
    await asyncio.gather(*[event.wait() for event in begun])
    yield
    is_over.set()
    for answers, ids in zip(await asyncio.gather(*streams), expected, strict=True):
        assert answers == [ids] * len(answers)
