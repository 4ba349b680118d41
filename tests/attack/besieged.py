"""Stack to be attacked: processes of any checkout, and the memory that they take."""

import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from deploy.local import processes
from deploy.local.launch import LocalStack
from tests.attack.target import Attack, Outcome, Target

MIB = 1 << 20
MOST_MIB = 2500.0  # of a router; the attack ends there
SAMPLE_S = 0.02
# In float32 an answer does not depend on what else is in its batch.
EXECUTOR_ARGS = ("--dtype", "float32", "--num-kv-blocks", "400")
ROUTER_ARGS = ("--metrics-listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0")


@contextmanager
def processes_of(root: Path) -> Iterator[None]:
    """Has `Process` run the modules of another checkout, within the block."""
    env = {**os.environ, "PYTHONPATH": str(root)}
    asked = [
        sys.executable,
        "-c",
        "import router, executor; print(router.__file__, executor.__file__)",
    ]
    found = subprocess.run(asked, cwd=root, env=env, check=True, capture_output=True, text=True)
    assert all(file.startswith(f"{root}/") for file in found.stdout.split()), found.stdout
    usual = processes.spawn

    def spawn(
        args: Sequence[str], env: Mapping[str, str], _: Path = root
    ) -> "subprocess.Popen[str]":
        return usual(args, {**env, "PYTHONPATH": str(root)}, root)

    processes.spawn = spawn
    try:
        yield
    finally:
        processes.spawn = usual


def guarded_stack(folder: Path, *, asks_for_tokens: bool) -> LocalStack:
    """Returns a stack whose executors take the router's calls only, if so, and who calls the
    router has a token, too."""
    folder.mkdir(parents=True, exist_ok=True)
    executor_args, router_args, token = EXECUTOR_ARGS, ROUTER_ARGS, None
    if asks_for_tokens:
        token, inner = folder / "callers.token", folder / "executors.token"
        token.write_text("a-caller-of-the-router\nanother-caller-of-it\n")
        inner.write_text("the-router-of-executors\n")
        scrapes = folder / "scrapes.token"
        scrapes.write_text("the-prometheus-of-all\n")
        executor_args += ("--auth-tokens", str(inner))
        router_args += ("--auth-tokens", str(token), "--executor-token", str(inner))
        router_args += ("--metrics-tokens", str(scrapes))
    return LocalStack(
        executor_args=executor_args, router_args=router_args, log_dir=folder, token=token
    )


async def target_of(stack: LocalStack, **settings: float) -> Target:
    """Returns the ports of a running stack."""
    assert stack.log_dir is not None
    inner = stack.log_dir / "executors.token"
    return Target(
        public=stack.address,
        health=(await stack.router.event("health_listening"))["address"],
        metrics=(await stack.router.event("metrics_listening"))["address"],
        executors=tuple(stack.executor_addresses),
        pids=tuple(executor.pid for executor in stack.executors),
        log_dir=stack.log_dir,
        tokens=() if stack.token is None else tuple(stack.token.read_text().split()),
        executor_token=inner.read_text().strip() if inner.exists() else None,
        **settings,
    )


def rss_mib(pid: int) -> float:
    """Returns the memory that a process has; 0 if there is none such."""
    with suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


@dataclass
class Memory:
    """Memory of a process, in MiB.

    Attributes:
        before, peak: Until now.
    """

    pid: int
    before: float = 0.0
    peak: float = 0.0


@asynccontextmanager
async def watched(*pids: int) -> AsyncIterator[list[Memory]]:
    """Watches what processes take within the block."""
    watch = [Memory(pid, rss_mib(pid), rss_mib(pid)) for pid in pids]

    async def look() -> None:
        while True:
            for memory in watch:
                memory.peak = max(memory.peak, rss_mib(memory.pid))
            await asyncio.sleep(SAMPLE_S)

    looking = asyncio.create_task(look())
    try:
        yield watch
    finally:
        looking.cancel()


async def run_apart(attack: Attack, target: Target, router: Memory) -> Outcome:
    """Runs an attack in a process of its own; ends it where the router takes too much."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_attack, args=(attack, target, theirs), daemon=True)
    process.start()
    theirs.close()
    while process.is_alive() and router.peak < MOST_MIB and not ours.poll():
        await asyncio.sleep(SAMPLE_S)
    if router.peak >= MOST_MIB:
        process.kill()
        return Outcome(f"ended at {MOST_MIB:.0f} MiB of the router")
    return ours.recv() if ours.poll() else Outcome("", "the attacker died")


def _attack(attack: Attack, target: Target, result: "Pipe[Outcome, None]") -> None:
    result.send(attack(target))
