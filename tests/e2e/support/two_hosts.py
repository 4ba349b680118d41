"""Run of a group over a network, and its cable cut: ``... two_hosts PREFIX LOG_DIR``.

Runs on the router's host of tests/e2e/support/hosts.py, where it starts the router, and an executor on each
of the two others. Asks the demo's problems; then, while many streams run, cuts one executor off for
some seconds. Prints what came of it, as JSON in the last line.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deploy.local.demo import SEED, ask_all, draw_requests, idle_group
from deploy.local.demo_tasks import token_ids
from deploy.local.launch import DEMO_MODEL
from deploy.local.processes import Process
from router.client import Client, Options
from tests.e2e.conftest import EXECUTOR_ARGS
from tests.e2e.support.hosts import Hosts
from tests.e2e.support.stacks import group_with_problem

ROUTER = "router"
EXECUTORS = ("0", "1")
PORT = 50051
NUM_REQUESTS = 60
NUM_STREAMS = 16
NUM_TOKENS = 300
CUT_S = 10.0
STOP_TIMEOUT_S = 20.0
GREEDY: Options = {"max_tokens": NUM_TOKENS, "ignore_eos": True}


@dataclass
class Report:
    """What a run did.

    Attributes:
        num_right: Answers to the demo's problems.
        num_whole: Streams whose tokens were the same as without a cut.
        problem: What the router gave as the reason while the cable was cut.
        num_tokens_before: That the streams had when it was cut.
        num_tokens_during: That came while it was.
        recovery_s: From the moment when it was plugged in again until the group was ready.
        epochs: Of the group, before and after.
        num_left: Sequences and blocks at the end.
    """

    num_right: int = 0
    num_whole: int = 0
    problem: str = ""
    num_tokens_before: int = 0
    num_tokens_during: int = 0
    recovery_s: float = 0.0
    epochs: list[int] = field(default_factory=list)
    num_left: int = 0


def start(hosts: Hosts, name: str, args: list[str], log_dir: Path) -> Process:
    """Starts ``python ARGS`` on a host."""
    command = [*hosts.command(name), sys.executable, *args]
    code = f"import os; os.execvp({command[0]!r}, {command!r})"
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return Process(name, ["-c", code], log_path=log_dir / f"{name}.log", env=env)


@asynccontextmanager
async def stack(hosts: Hosts, log_dir: Path) -> AsyncIterator[str]:
    """Runs a router and its executors, each on its host. Yields the router's address."""
    processes = []
    try:
        for rank, name in enumerate(EXECUTORS):
            args = [
                *("-m", "executor", "--model", str(DEMO_MODEL), "--listen", f"0.0.0.0:{PORT}"),
                *("--advertised-host", hosts.address(name), "--plaintext", "on"),
                *("--dp-rank", str(rank), "--dp-size", str(len(EXECUTORS)), *EXECUTOR_ARGS),
            ]
            processes.append(start(hosts, name, args, log_dir))
        for process in processes:
            await process.event("listening")
        group = ",".join(f"{hosts.address(name)}:{PORT}" for name in EXECUTORS)
        args = [
            *("-m", "router", "--listen", f"{hosts.address(ROUTER)}:{PORT}", "--group", group),
            *("--plaintext", "on", "--executor-plaintext", "on"),
            *("--tokenizer", str(DEMO_MODEL), "--min-step-deadline-s", "2"),
        ]
        processes.append(start(hosts, ROUTER, args, log_dir))
        yield (await processes[-1].event("listening"))["address"]
    finally:
        await asyncio.gather(*(process.stop(STOP_TIMEOUT_S) for process in reversed(processes)))


async def wait_until_ready(client: Client) -> None:
    while not await client.health("readiness"):
        await asyncio.sleep(0.02)


async def read_streams(client: Client, tokens: list[list[int]]) -> None:
    """Fills in every stream's tokens as they come."""

    async def read(number: int) -> None:
        prompt = token_ids(f"\n{number}+25=")
        async for delta in client.generate(prompt, **GREEDY):
            tokens[number] += delta.token_ids

    await asyncio.gather(*map(read, range(len(tokens))))


async def run(hosts: Hosts, log_dir: Path) -> Report:
    report = Report()
    async with stack(hosts, log_dir) as address, Client(address) as client:
        await wait_until_ready(client)
        answers = await ask_all(client, draw_requests(SEED, NUM_REQUESTS))
        report.num_right = sum(answer.is_right for answer in answers)
        undisturbed: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        await read_streams(client, undisturbed)
        report.epochs.append((await idle_group(client)).epoch)

        tokens: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        reading = asyncio.create_task(read_streams(client, tokens))
        while not all(tokens) or sum(map(len, tokens)) < NUM_STREAMS * NUM_TOKENS // 4:
            await asyncio.sleep(0.01)
        hosts.set_link(EXECUTORS[1], "down")
        report.num_tokens_before = sum(map(len, tokens))
        await asyncio.sleep(CUT_S)
        async with asyncio.timeout(120):  # with nothing to do, it notices by keepalive
            group = await group_with_problem(client, hosts.address(EXECUTORS[1]))
        report.problem = group.problem
        report.num_tokens_during = sum(map(len, tokens)) - report.num_tokens_before
        hosts.set_link(EXECUTORS[1], "up")
        plugged_in = time.monotonic()
        await wait_until_ready(client)
        report.recovery_s = time.monotonic() - plugged_in
        await reading
        report.num_whole = sum(map(list.__eq__, tokens, undisturbed))
        group = await idle_group(client)
        report.epochs.append(group.epoch)
        report.num_left = group.num_waiting + sum(rank.num_used_blocks for rank in group.ranks)
    return report


def main() -> None:
    prefix, log_dir = sys.argv[1], Path(sys.argv[2])
    report = asyncio.run(run(Hosts(prefix, (ROUTER, *EXECUTORS)), log_dir))
    print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    main()
