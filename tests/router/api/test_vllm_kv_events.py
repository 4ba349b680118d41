"""A gateway sends prompts where it believes that their beginnings are cached: it must not err."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
from smg_grpc_proto.generated import common_pb2 as pb

from protos.transport.error_details import error_details
from router.api import vllm_kv_events
from router.api.vllm_kv_events import BlockFeed
from router.requests.callers import CallerSettings
from router.scheduling.kv import block_log
from router.scheduling.kv.block_log import BlockLog, BlockRun
from router.scheduling.kv.prefix_cache import PrefixCache, extend_block_hashes
from router.scheduling.step import sequence_capacity
from tests.router.support.block_table import NAME_BYTES, BlockTable
from tests.router.support.calls import failure
from tests.router.support.fake_engines import FakeEngines
from tests.router.support.fake_rank import expected_output
from tests.router.support.running_engines import complete, running
from tests.router.support.stepper import Stepper, make_shape
from tests.router.support.vllm_calls import answers, connected, generate

SALTS = [b"a" * 16, b"b" * 16]


@asynccontextmanager
async def subscribed(
    feed: BlockFeed, salt: bytes, may_read: asyncio.Event | None = None
) -> AsyncIterator[BlockTable]:
    """Yields the table of one subscriber, which reads nothing before it may."""
    table = BlockTable()

    async def write(batch: Any) -> None:
        if may_read is not None:
            await may_read.wait()
        table.apply(pb.KvEventBatch.FromString(batch.SerializeToString()))

    task = asyncio.create_task(feed.serve(salt, write))
    try:
        yield table
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task  # raises what did not fit its table


async def settled(feed: BlockFeed) -> None:
    """Returns when subscribers have read all that there is for them, or do not read."""
    feed.flush()
    for _ in range(50):
        await asyncio.sleep(0)


def logs_of(epochs: list[Stepper]) -> list[BlockLog | None]:
    return [cache.log for cache in epochs[-1].scheduler.caches]


def check(caches: list[PrefixCache], tables: list[BlockTable]) -> None:
    """Asserts that the tables, one for each salt, have each block of the caches once."""
    for rank, cache in enumerate(caches):
        told = [t.check(rank, cache, salt) for t, salt in zip(tables, SALTS, strict=True)]
        names = {name for name in cache._block_of if len(name) == NAME_BYTES}
        assert set().union(*told) == names
        assert sum(map(len, told)) == len(names)


@pytest.mark.parametrize("seed", [*range(7), 31])  # 31: a name comes to the same block again
async def test_a_subscribers_table_is_what_is_cached_after_every_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    rng = random.Random(seed)
    monkeypatch.setattr(vllm_kv_events, "FLUSH_S", 1e9)
    monkeypatch.setattr(block_log, "HELD_SHARE", rng.choice([1, 2]))
    monkeypatch.setattr(vllm_kv_events, "CHUNK_BLOCKS", rng.choice([1, 3, 512]))
    monkeypatch.setattr(vllm_kv_events, "MAX_PENDING_BLOCKS", limit := rng.choice([2, 1 << 16]))
    kv_window = rng.choice([0, 0, 9])
    least = next(n for n in range(20) if sequence_capacity(n, 4, kv_window) >= 32)
    sizes = {"num_blocks": least + rng.randint(0, 30), "kv_window": kv_window}
    world = Stepper(make_shape(dp_size=2, max_model_len=32, **sizes), logs_blocks=True)
    epochs = [world]
    feed = BlockFeed(lambda: logs_of(epochs), counted := Counter())
    may_read = asyncio.Event()
    async with (
        subscribed(feed, SALTS[0]) as a,
        subscribed(feed, SALTS[1]) as b,
        subscribed(feed, SALTS[0], may_read) as slow,
    ):
        for turn in range(120):
            act(epochs, rng)
            await settled(feed)
            check(epochs[-1].scheduler.caches, [a, b])
            if turn == 60:
                async with subscribed(feed, SALTS[0]) as late:
                    for number in range(60):  # while its snapshot is taken
                        act(epochs, rng)
                        if number % 12 == 0:
                            await asyncio.sleep(0)
                    await settled(feed)
                    check(epochs[-1].scheduler.caches, [late, b])
        may_read.set()
        await settled(feed)
        check(epochs[-1].scheduler.caches, [slow, b])
    assert counted["new"] == 4
    assert (counted["slow"] > 0) == (limit == 2)
    assert all(log._events is None for log in logs_of(epochs) if log)


def act(epochs: list[Stepper], rng: random.Random) -> None:
    """Does one of all things that may happen to a group."""
    world = epochs[-1]
    match rng.choice(["submit"] * 3 + ["plan"] * 4 + ["commit"] * 4 + ["rare"]):
        case "submit":
            prompt, salt = rng.choices([1, 2], k=rng.randint(1, 24)), rng.choice(SALTS)
            world.submit(prompt, max_tokens=rng.randint(1, 8), cache_salt=salt)
        case "plan" if len(world.in_flight) < 2:
            world.plan()
        case "commit" if world.in_flight:
            world.commit()
        case "rare" if rng.random() < 0.5:
            for cache in world.scheduler.caches:
                cache.pool.evict_all()
        case "rare" if rng.random() < 0.5:
            world.lose()
        case "rare" if rng.random() < 0.6:
            world.scheduler.abandon()
            after = Stepper(world.shape, logs_blocks=True)
            for sequence in [*world.admission]:
                after.admission.push(sequence)
            epochs.append(after)


def named(cache: PrefixCache, tokens: list[int], *, salt: bytes, place: int = 0) -> None:
    """Names blocks of two tokens each, of which the first `place` were named before."""
    names: list[bytes] = [salt]
    extend_block_hashes(names, np.array([0, 0, *tokens], np.int32), 2, salt)
    new, blocks = names[place:], cache.pool.acquire(len(names) - 1 - place)
    assert cache.log is not None
    cache.insert(new[1:], blocks)
    content = np.array(tokens[2 * place :], np.int32).reshape(-1, 2)
    cache.log.store(BlockRun(salt, place, new, blocks, content))
    cache.pool.release(blocks)


async def test_events_come_by_grpc_with_tokens_parents_and_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_kv_events, "FLUSH_S", 0.01)
    engines, cache = FakeEngines(), PrefixCache(10, is_logged=True)
    engines.logs, salt = [None, cache.log], CallerSettings().cache_salt(())
    large = [1, 2**31 - 1]
    named(cache, [*large, 3, 4], salt=salt)
    named(cache, [7, 7], salt=SALTS[0])
    async with connected(engines) as stub:
        call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        chunk = await call.read()
        named(cache, [*large, 3, 4, 5, 6, 5, 6], salt=salt, place=2)
        cache.pool.evict_all()
        batch = await call.read()
        call.cancel()

    cleared, first = chunk.events
    assert (chunk.snapshot.index, chunk.snapshot.count, chunk.snapshot.blocks) == (0, 1, 2)
    assert cleared.HasField("cleared")
    root, child = first.stored.blocks
    assert not first.stored.HasField("parent_block_hash")
    assert (list(root.token_ids), root.block_size) == (large, 2)
    assert list(child.token_ids) == [3, 4]
    stored, removed = batch.events
    assert (chunk.dp_rank, batch.dp_rank) == (1, 1)
    assert batch.sequence_number == chunk.sequence_number + 1
    assert stored.stored.parent_block_hash == child.block_hash
    assert [list(block.token_ids) for block in stored.stored.blocks] == [[5, 6], [5, 6]]
    [third, fourth] = stored.stored.blocks
    removed_blocks = [child, root, fourth, third]  # the last of a prefix first
    assert list(removed.removed.block_hashes) == [block.block_hash for block in removed_blocks]


def fail(error: Exception) -> None:
    raise error


async def test_an_error_while_events_are_gathered_leaves_no_table_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(vllm_kv_events, "FLUSH_S", 0.01)
    engines, cache = FakeEngines(), PrefixCache(10, is_logged=True)
    engines.logs = [cache.log]
    async with connected(engines) as stub:
        call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        assert (await call.read()).snapshot.count == 1
        take, errors = BlockLog.take, [ValueError("once")]
        monkeypatch.setattr(
            BlockLog, "take", lambda log: fail(errors.pop()) if errors else take(log)
        )
        with structlog.testing.capture_logs() as lines:
            assert (await call.read()).snapshot.count == 1
        call.cancel()
    assert lines[0]["event"] == "kv_events_failed"


async def test_nobody_can_go_on_where_an_earlier_subscription_ended():
    async with connected(FakeEngines()) as stub:
        request = pb.SubscribeKvEventsRequest(start_sequence_number=7)
        error = await failure(stub.SubscribeKvEvents(request))
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE  # gateways then start over from 0
    assert error_details(error).reason == "HISTORY_GONE"


async def test_a_router_whose_group_has_not_formed_has_nothing_cached():
    engines = FakeEngines()
    engines.logs = [None]
    async with connected(engines) as stub:
        call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        chunk = await call.read()
        call.cancel()
    assert [event.WhichOneof("data") for event in chunk.events] == ["cleared"]


# ---- FlushCache


async def test_what_was_flushed_is_computed_again():
    async with running() as engines:
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        await complete(engines, "a", prompt, max_tokens=6)
        hit = await complete(engines, "b", prompt, max_tokens=6)
        num_dropped, num_left = engines.flush_cache()
        missed = await complete(engines, "c", prompt, max_tokens=6)
    assert (hit.sequences[0].progress.num_cached_tokens, num_left) == (8, 0)
    assert num_dropped == 3
    assert missed.sequences[0].progress.num_cached_tokens == 0


def test_blocks_of_an_answer_are_used_until_no_step_in_flight_runs_it():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    [*_, stop] = expected_output(prompt, 3, ())
    world = Stepper(make_shape(dp_size=1))
    [cache] = world.scheduler.caches
    request = world.submit(prompt, max_tokens=20, stop_token_ids=(stop,))
    world.plan()
    while request.is_live:
        world.plan()
        world.commit()
    assert len(world.in_flight) == 1
    cache.pool.evict_all()
    num_left = cache.num_named
    assert num_left > 0
    world.commit()
    assert cache.pool.evict_all() == num_left
    assert cache.num_named == 0


async def test_a_flush_waits_for_steps_that_run_what_has_ended(monkeypatch: pytest.MonkeyPatch):
    engines = FakeEngines()
    flushes = [(5, 2), (0, 2), (2, 0)]
    monkeypatch.setattr(engines, "flush_cache", lambda: flushes.pop(0))
    async with connected(engines) as stub:
        answer = await stub.FlushCache(pb.FlushCacheRequest())
    assert (answer.success, answer.message, flushes) == (True, "7 blocks dropped", [])


async def test_a_flush_waits_for_requests_and_says_what_they_keep():
    engines = FakeEngines()
    async with connected(engines) as stub:
        engines.flushed = (5, 2)
        call = stub.Generate(generate())
        request = await engines.arrivals.get()
        answer = await stub.FlushCache(pb.FlushCacheRequest(timeout_s=0.01))
        engines.finish(request.sequences[0])
        await answers(call)
        assert not answer.success
        assert answer.message.startswith(
            "5 blocks dropped; 2 stay, since running requests use them"
        )
        engines.flushed = (5, 0)
        answer = await stub.FlushCache(pb.FlushCacheRequest())
        assert (answer.success, answer.message) == (True, "5 blocks dropped")
        error = await failure(stub.FlushCache(pb.FlushCacheRequest(timeout_s=float("nan"))))
        assert error_details(error).field == "timeout_s"
