"""Probes of real processes: green while there is work, however long it takes; red when one hangs.

The prefill lasts 3 s in the gate. The run of 30 s:

    LOCKSTEP_TEST_PREFILL_S=30 pytest tests/e2e/test_health_e2e.py -k prefill -s
"""

import asyncio
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.demo import idle_group, token_ids
from deploy.launch import DEMO_MODEL, LocalStack
from router.client import Client, GroupStatus, Unavailable
from router.health import SERVICE
from tests.e2e.conftest import EXECUTOR_ARGS

PREFILL_S = float(os.environ.get("LOCKSTEP_TEST_PREFILL_S", "3"))
MAX_PROMPT_TOKENS = 32_000
ROUTER_NAMES = ("liveness", "readiness", "", SERVICE)
EXECUTOR_NAMES = ("liveness", "readiness")
STATUS = health_pb2.HealthCheckResponse
LONG_TOKENS = 150


# ---- a long prefill


def long_context_model(folder: Path) -> Path:
    """Copies the demo model, and lets it take prompts that it was never trained on."""
    model = folder / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = MAX_PROMPT_TOKENS + 16
    (model / "config.json").write_text(json.dumps(config))
    return model


class Probes:
    """Asks for health as a kubelet does, one name after the other, and counts the answers."""

    def __init__(self, stack: LocalStack) -> None:
        self._asked = [(stack.address, name) for name in ROUTER_NAMES]
        self._asked += [(stack.executor_addresses[0], name) for name in EXECUTOR_NAMES]
        self.answers: Counter[tuple[str, str, int]] = Counter()

    async def run(self) -> None:
        """Probes until cancelled; whatever is cancelled with it was not answered."""
        async with (
            grpc.aio.insecure_channel(self._asked[0][0]) as router,
            grpc.aio.insecure_channel(self._asked[-1][0]) as executor,
        ):
            stubs = {
                self._asked[0][0]: health_pb2_grpc.HealthStub(router),
                self._asked[-1][0]: health_pb2_grpc.HealthStub(executor),
            }
            while True:
                for address, name in self._asked:
                    request = health_pb2.HealthCheckRequest(service=name)
                    answer = await stubs[address].Check(request)
                    self.answers[address, name, answer.status] += 1
                await asyncio.sleep(0.05)


async def prefill_s(client: Client, num_tokens: int) -> float:
    """Returns how long a prompt's one step took. No two prompts share a prefix."""
    prompt = [3 + (num_tokens + place * place) % 256 for place in range(num_tokens)]
    completion = await client.complete(prompt, max_tokens=1, ignore_eos=True)
    return completion.first_token_s


async def test_a_long_prefill_keeps_all_probes_green(tmp_path: Path):
    size = str(MAX_PROMPT_TOKENS + 16)
    executor_args = (
        *("--dtype", "float32", "--max-model-len", size, "--max-num-batched-tokens", size),
        *("--num-kv-blocks", "2100", "--prefill-graphs", "off", "--max-num-seqs", "4"),
    )
    stack = LocalStack(
        long_context_model(tmp_path), dp_size=1, executor_args=executor_args, log_dir=tmp_path
    )
    async with stack, stack.client() as client:
        num_tokens, seconds = 2000, 0.0
        while seconds < PREFILL_S and num_tokens < MAX_PROMPT_TOKENS:
            if seconds:  # attention grows with the square, the rest does not
                growth = min(1.1 * (PREFILL_S / seconds) ** 0.5, 4.0)
                num_tokens = min(int(num_tokens * growth), MAX_PROMPT_TOKENS)
            probes = Probes(stack)
            probing = asyncio.create_task(probes.run())
            seconds = await prefill_s(client, num_tokens)
            assert not probing.done(), "a probe failed"
            probing.cancel()
            answers = probes.answers
        print(f"{num_tokens} tokens in a step of {seconds:.1f} s: {sum(answers.values())} probes")
        assert seconds >= PREFILL_S

        [group] = await client.get_status()
        assert (group.epoch, group.problem) == (1, "")
        assert {status for _, _, status in answers} == {STATUS.SERVING}
        asked = {(address, name) for address, name, _ in answers}
        assert len(asked) == len(ROUTER_NAMES) + len(EXECUTOR_NAMES)
        assert min(answers.values()) >= 3


# ---- an executor that hangs, and one that is told to stop


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """A router and two executors; steps are overdue after 3 s."""
    stack = LocalStack(
        dp_size=2,
        executor_args=EXECUTOR_ARGS,
        router_args=(
            *("--step-timeout-s", "3", "--min-step-deadline-s", "3"),
            *("--shutdown-delay-s", "600", "--shutdown-grace-s", "600"),
        ),
        log_dir=tmp_path_factory.mktemp("pair"),
    )
    async with stack:
        yield stack


@asynccontextmanager
async def long_streams(client: Client) -> AsyncIterator[list[asyncio.Task[list[int]]]]:
    """Runs a stream for each rank and yields when all have begun; checks them at the end."""
    prompts = [token_ids(text) for text in ("\n17+25=", "\nrev lockstep=")]
    expected = [await client.complete(prompt, **OPTIONS) for prompt in prompts]
    begun = [asyncio.Event() for _ in prompts]
    streams = [
        asyncio.create_task(tokens_of(client, prompt, event))
        for prompt, event in zip(prompts, begun, strict=True)
    ]
    await asyncio.gather(*[event.wait() for event in begun])
    yield streams
    assert await asyncio.gather(*streams) == [completion.token_ids for completion in expected]


OPTIONS: Any = {"max_tokens": LONG_TOKENS, "ignore_eos": True}


async def tokens_of(client: Client, prompt: list[int], begun: asyncio.Event) -> list[int]:
    ids: list[int] = []
    async for delta in client.generate(prompt, **OPTIONS):
        ids += delta.token_ids
        begun.set()
    return ids


@asynccontextmanager
async def watched(stack: LocalStack, name: str) -> AsyncIterator[Any]:
    """Yields a Watch of one of the router's names."""
    async with grpc.aio.insecure_channel(stack.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=name)
        )
        yield call
        call.cancel()


def records(stack: LocalStack, event: str) -> list[dict[str, Any]]:
    lines = (stack.log_dir / "router.log").read_text().splitlines()
    written = [json.loads(line) for line in lines if line.startswith("{")]  # gRPC logs, too
    return [record for record in written if record["event"] == event]


async def troubled_group(client: Client) -> GroupStatus:
    """Returns the group's status once it says what its problem is."""
    while not (group := (await client.get_status())[0]).problem:
        await asyncio.sleep(0.05)
    return group


async def test_a_stopped_executor_turns_readiness_red_and_is_named(pair: LocalStack):
    async with (
        pair.client() as client,
        watched(pair, "readiness") as watch,
        asyncio.timeout(90),
        long_streams(client),
    ):
        assert (await watch.read()).status == STATUS.SERVING
        os.kill(pair.executors[1].pid, signal.SIGSTOP)
        try:
            assert (await watch.read()).status == STATUS.NOT_SERVING
            assert await client.health("liveness")
            group = await troubled_group(client)
            [lost] = records(pair, "group_lost")
        finally:
            os.kill(pair.executors[1].pid, signal.SIGCONT)
        named = f"executor {pair.executor_addresses[1]} (dp_rank 1, attn_tp_rank 0)"
        assert named in lost["problem"]
        assert "within 3 s" in lost["problem"]
        assert named in group.problem
        assert (await watch.read()).status == STATUS.SERVING


async def test_an_executor_that_is_told_to_stop_says_so_and_nothing_is_lost(pair: LocalStack):
    num_lost = len(records(pair, "group_lost"))
    async with pair.client() as client, asyncio.timeout(90), long_streams(client):
        exit_code = await pair.replace_executor(1)
    assert exit_code == 0
    [left] = records(pair, "group_left")
    assert pair.executor_addresses[1] in left["problem"]
    assert len(records(pair, "group_lost")) == num_lost
    async with pair.client() as client:
        assert (await idle_group(client)).problem == ""


async def test_a_second_signal_ends_a_router_at_once_with_the_tokens_so_far(pair: LocalStack):
    begun, ids = asyncio.Event(), []

    async def stream(client: Client) -> None:
        async for delta in client.generate(token_ids("\n17+25="), max_tokens=900, ignore_eos=True):
            ids.extend(delta.token_ids)
            begun.set()

    async with pair.client() as client, asyncio.timeout(90):
        streaming = asyncio.create_task(stream(client))
        await begun.wait()
        os.kill(pair.router.pid, signal.SIGTERM)
        await pair.router.event("draining")
        assert not streaming.done()
        os.kill(pair.router.pid, signal.SIGTERM)
        with pytest.raises(Unavailable) as caught:
            await streaming
        assert await pair.router.exited() == 0
    assert caught.value.reason == "SHUTTING_DOWN"
    [drained] = records(pair, "drained")
    assert (drained["cut_requests"], drained["cut_calls"]) == (1, 0)
    assert 0 < len(ids) < 900
