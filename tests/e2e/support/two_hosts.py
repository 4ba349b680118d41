"""Run of a group over a network: ``... two_hosts cut|gone PREFIX LOG_DIR``.

Runs on the router's host of tests/e2e/support/hosts.py, where it starts the router, and an executor on each
of the two others. Asks the demo's problems, and lets many streams run; fails if an executor is lost or suspected
meanwhile, however slow the network is and whatever frames it loses. Then, while they run once more, "cut"
cuts one executor off for some seconds, and fails if a stream is not whole or the cut was not noticed; "gone"
cuts one of an elastic group off for good, and fails if the other one does not go on with all streams. Each
fails if an answer is wrong.
"""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.local.demo import SEED, ask_all, draw_requests, idle_group
from deploy.local.demo_tasks import token_ids
from deploy.local.launch import DEMO_MODEL
from deploy.local.processes import Process
from router.client import Client, Options
from tests.e2e.conftest import EXECUTOR_ARGS, FLOAT32_ARGS
from tests.e2e.support.hosts import Hosts
from tests.e2e.support.logs import records
from tests.e2e.support.stacks import group_with_problem

ROUTER = "router"
EXECUTORS = ("0", "1")
PORT = 50051
NUM_REQUESTS = 20
NUM_STREAMS = 8
NUM_TOKENS = {"cut": 160, "gone": 16}
CUT_S = 10.0
STOP_TIMEOUT_S = 20.0
ELASTIC = ("--min-dp-size", "1", "--max-dp-size", str(len(EXECUTORS)), *FLOAT32_ARGS)


def start(hosts: Hosts, name: str, args: list[str], log_dir: Path) -> Process:
    """Starts ``python ARGS`` on a host."""
    command = [*hosts.command(name), sys.executable, *args]
    code = f"import os; os.execvp({command[0]!r}, {command!r})"
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return Process(name, ["-c", code], log_path=log_dir / f"{name}.log", env=env)


def placed(rank: int) -> tuple[str, ...]:
    """Returns the flags of an executor that has its place from its start."""
    return ("--dp-rank", str(rank), "--dp-size", str(len(EXECUTORS)), *EXECUTOR_ARGS)


@asynccontextmanager
async def stack(hosts: Hosts, log_dir: Path, *, is_elastic: bool = False) -> AsyncIterator[str]:
    """Runs a router and its executors, each on its host. Yields the router's address."""
    processes = []
    token = log_dir / "token"
    token.write_text(secrets.token_hex())
    try:
        for rank, name in enumerate(EXECUTORS):
            args = [
                *("-m", "executor", "--model", str(DEMO_MODEL), "--listen", f"0.0.0.0:{PORT}"),
                *("--advertised-host", hosts.address(name), "--plaintext", "on"),
                *("--auth-tokens", str(token)),
                *(ELASTIC if is_elastic else placed(rank)),
            ]
            processes.append(start(hosts, name, args, log_dir))
        for process in processes:
            await process.event("listening")
        group = ",".join(f"{hosts.address(name)}:{PORT}" for name in EXECUTORS)
        if is_elastic:
            group += f"?size={len(EXECUTORS)}&min=1"
        args = [
            *("-m", "router", "--listen", f"{hosts.address(ROUTER)}:{PORT}", "--group", group),
            *("--plaintext", "on", "--executor-plaintext", "on", "--executor-token", str(token)),
            *("--tokenizer", str(DEMO_MODEL), "--min-step-deadline-s", "2"),
        ]
        processes.append(start(hosts, ROUTER, args, log_dir))
        yield (await processes[-1].event("listening"))["address"]
    finally:
        await asyncio.gather(*(process.stop(STOP_TIMEOUT_S) for process in reversed(processes)))


async def wait_until_ready(client: Client) -> None:
    while not await client.health("readiness"):
        await asyncio.sleep(0.02)


async def read_streams(client: Client, num_tokens: int, tokens: list[list[int]]) -> None:
    """Fills in every stream's tokens as they come."""
    greedy: Options = {"max_tokens": num_tokens, "ignore_eos": True}

    async def read(number: int) -> None:
        prompt = token_ids(f"\n{number}+25=")
        async for delta in client.generate(prompt, **greedy):
            tokens[number] += delta.token_ids

    await asyncio.gather(*map(read, range(len(tokens))))


async def run(kind: str, hosts: Hosts, log_dir: Path) -> None:
    entered = stack(hosts, log_dir, is_elastic=kind == "gone")
    async with entered as address, Client(address) as client:
        await wait_until_ready(client)
        answers = await ask_all(client, draw_requests(SEED, NUM_REQUESTS))
        assert all(answer.is_right for answer in answers)
        undisturbed: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        await read_streams(client, NUM_TOKENS[kind], undisturbed)
        group = await idle_group(client)
        events = ("group_lost", "executor_silent")
        log = log_dir / f"{ROUTER}.log"
        assert (group.epoch, [records(log, event) for event in events]) == (1, [[], []])
        await cut_off(hosts, client, undisturbed, comes_back=kind == "cut")


async def cut_off(
    hosts: Hosts, client: Client, undisturbed: list[list[int]], *, comes_back: bool
) -> None:
    """Cuts an executor off while streams run, and checks that it was noticed and they are whole.

    Args:
        hosts: With the cable.
        client: Of the router.
        undisturbed: Tokens of each stream where nothing is cut.
        comes_back: Whether it is plugged in again.
    """
    num_tokens, total = len(undisturbed[0]), sum(map(len, undisturbed))
    tokens: list[list[int]] = [[] for _ in undisturbed]
    reading = asyncio.create_task(read_streams(client, num_tokens, tokens))
    while not all(tokens) or sum(map(len, tokens)) < total // 4:
        await asyncio.sleep(0.01)
    hosts.set_link(EXECUTORS[1], "down")
    assert sum(map(len, tokens)) < total
    if comes_back:
        await asyncio.sleep(CUT_S)
        async with asyncio.timeout(120):
            await group_with_problem(client, hosts.address(EXECUTORS[1]))
        hosts.set_link(EXECUTORS[1], "up")
        plugged_in = time.monotonic()
        await wait_until_ready(client)
        print(f"ready {time.monotonic() - plugged_in:.1f} s after it was plugged in again")
    async with asyncio.timeout(120):
        await reading
    assert tokens == undisturbed
    group = await idle_group(client)
    assert group.epoch > 1
    assert len(group.ranks) == (len(EXECUTORS) if comes_back else 1)
    assert group.num_waiting == sum(rank.num_used_blocks for rank in group.ranks) == 0
    hosts.set_link(EXECUTORS[1], "up")  # or its end would take as long as it may


if __name__ == "__main__":
    _, kind, prefix, folder = sys.argv
    asyncio.run(run(kind, Hosts(prefix, (ROUTER, *EXECUTORS)), Path(folder)))
