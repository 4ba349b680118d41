"""Probes of real processes: green while there is work, however long it takes; red when one hangs.

The prefill lasts 3 s in the gate. The run of 30 s:

    LOCKSTEP_TEST_PREFILL_S=30 pytest tests/e2e/recovery/test_health_e2e.py -k prefill -s
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.demo import idle_group
from deploy.local.demo_tasks import token_ids
from deploy.local.launch import LocalStack
from protos.serving.v1.serving_pb2 import MEMBER_STATE_SILENT, MEMBER_STATE_UNATTENDED
from router.api.health import SERVICE
from router.client import GROUP_STATE_FORMING, Client, Unavailable
from tests.e2e.conftest import PATIENT, PATIENT_STEPS
from tests.e2e.support.logs import logged, records
from tests.e2e.support.stacks import demo_model_with, group_with_problem, paused, served
from tests.e2e.support.streams import long_streams

PREFILL_S = float(os.environ.get("LOCKSTEP_TEST_PREFILL_S", "3"))
MAX_PROMPT_TOKENS = 32_000
ROUTER_NAMES = ("liveness", "readiness", "", SERVICE)
EXECUTOR_NAMES = ("liveness", "readiness")
STATUS = health_pb2.HealthCheckResponse


# ---- a long prefill


@asynccontextmanager
async def probing(stack: LocalStack) -> AsyncIterator[Counter[tuple[str, str, int]]]:
    """Asks for health during the block, as a kubelet does, one name of a process after the other.

    Yields the answers, by address, name and status.
    """
    answers: Counter[tuple[str, str, int]] = Counter()

    async def probe(address: str, names: Sequence[str]) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                for name in names:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                    answers[address, name, answer.status] += 1
                await asyncio.sleep(0.05)

    tasks = [
        asyncio.create_task(probe(stack.address, ROUTER_NAMES)),
        asyncio.create_task(probe(stack.executor_addresses[0], EXECUTOR_NAMES)),
    ]
    try:
        yield answers
        assert not any(task.done() for task in tasks), "a probe failed"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
    # It takes prompts that it was never trained on.
    model = demo_model_with(tmp_path, max_position_embeddings=MAX_PROMPT_TOKENS + 16)
    settings = {"model": model, "executor_args": executor_args}
    async with served(tmp_path, dp_size=1, **settings) as (stack, client):
        num_tokens, seconds, answers = 2000, 0.0, Counter[tuple[str, str, int]]()
        while seconds < PREFILL_S or min(answers.values()) < 3:
            assert num_tokens < MAX_PROMPT_TOKENS, (seconds, answers)
            if seconds:  # attention grows with the square, the rest does not
                growth = min(max(1.1 * (PREFILL_S / seconds) ** 0.5, 1.1), 4.0)
                num_tokens = min(int(num_tokens * growth), MAX_PROMPT_TOKENS)
            async with probing(stack) as answers:
                seconds = await prefill_s(client, num_tokens)
        print(f"{num_tokens} tokens in a step of {seconds:.1f} s: {sum(answers.values())} probes")
        [group] = await client.get_status()
        assert (group.epoch, group.problem) == (1, "")
        assert {status for _, _, status in answers} == {STATUS.SERVING}
        asked = {(address, name) for address, name, _ in answers}
        assert len(asked) == len(ROUTER_NAMES) + len(EXECUTOR_NAMES)


# ---- an executor that hangs, and one that is told to stop


STEP_TIMEOUT_S = 6


def on_both_ranks(client: Client) -> list[tuple[Client, str]]:
    return [(client, "\n17+25="), (client, "\nrev lockstep=")]


@asynccontextmanager
async def watched(stack: LocalStack, name: str) -> AsyncIterator[Any]:
    """Yields a Watch of one of the router's names."""
    async with grpc.aio.insecure_channel(stack.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=name)
        )
        yield call
        call.cancel()


async def until_status(watch: Any, status: int) -> None:
    while (await watch.read()).status != status:
        pass


SECONDS = str(STEP_TIMEOUT_S)
OVERDUE = ("--step-timeout-s", SECONDS, "--min-step-deadline-s", SECONDS, "--silent-after-ms", "0")


@pytest.mark.parametrize(
    ("router_args", "problem", "state"),
    [
        (OVERDUE, f"within {STEP_TIMEOUT_S} s", MEMBER_STATE_UNATTENDED),
        (PATIENT_STEPS, "is silent", MEMBER_STATE_SILENT),
    ],
    ids=["deadline", "beats"],
)
async def test_a_stopped_executor_turns_readiness_red_and_is_named(
    router_args: Sequence[str], problem: str, state: int, tmp_path: Path
):
    async with (
        served(tmp_path, router_args=router_args) as (stack, client),
        watched(stack, "readiness") as watch,
        long_streams(*on_both_ranks(client)),
    ):
        named = f"executor {stack.executor_addresses[1]} (dp_rank 1, attn_tp_rank 0)"
        await until_status(watch, STATUS.SERVING)
        stack.executors[1].pause()
        try:
            group = await group_with_problem(client, named)
            await until_status(watch, STATUS.NOT_SERVING)
            assert group.state == GROUP_STATE_FORMING
            assert [m.state for m in group.members if m.dp_rank == 1] == [state]
            assert not await client.health("readiness")
            assert await client.health("liveness")
            *_, lost = await logged(stack.router, "group_lost")
        finally:
            stack.executors[1].resume()
        assert named in lost["problem"]
        assert problem in lost["problem"]
        await until_status(watch, STATUS.SERVING)


async def test_an_executor_that_is_told_to_stop_says_so_and_nothing_is_lost(tmp_path: Path):
    async with served(tmp_path) as (stack, client):
        async with long_streams(*on_both_ranks(client)):
            exit_code = await stack.replace_executor(1)
        assert exit_code == 0
        await logged(stack.router, "group_ready", 2)
        [left] = records(stack.router.log_path, "group_left")
        assert stack.executor_addresses[1] in left["problem"]
        assert records(stack.router.log_path, "group_lost") == []
        assert (await idle_group(client)).problem == ""


async def test_a_second_signal_ends_a_router_at_once_with_the_tokens_so_far(tmp_path: Path):
    begun, ids = asyncio.Event(), []

    async def stream(client: Client) -> None:
        async for delta in client.generate(token_ids("\n17+25="), max_tokens=900, ignore_eos=True):
            ids.extend(delta.token_ids)
            begun.set()

    stopping = ("--shutdown-delay-s", "600", "--shutdown-grace-s", "600")
    async with (
        served(tmp_path, router_args=(*PATIENT, *stopping)) as (stack, _),
        Client(stack.address, resume=False) as client,
    ):
        streaming = asyncio.create_task(stream(client))
        await begun.wait()
        with paused(stack):  # so that the stream cannot end by itself
            os.kill(stack.router.pid, signal.SIGTERM)
            await stack.router.event("draining")
            assert not streaming.done()
            os.kill(stack.router.pid, signal.SIGTERM)
            with pytest.raises(Unavailable) as caught:
                await streaming
            assert await stack.router.exited() == 0
        assert caught.value.reason == "SHUTTING_DOWN"
        [drained] = records(stack.router.log_path, "drained")
        assert (drained["cut_requests"], drained["cut_calls"]) == (1, 0)
        assert 0 < len(ids) < 900
