"""Start-up: a wrong setting is named; processes start, stop and die in good order."""

import asyncio
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from deploy.local import processes
from deploy.local.launch import LocalStack
from deploy.local.processes import ROOT, Process, ProcessEnded
from tests.e2e.support.fork_server import start_anew
from tests.e2e.support.logs import records
from tests.e2e.support.stacks import demo_model_with, group_with_problem

BAD_CONFIGURATION = 2


def truncate(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


@pytest.mark.parametrize(
    ("config", "file", "damage", "named"),
    [
        ({}, "config.json", Path.unlink, "config.json"),
        ({"architectures": ["NoSuchModel"]}, None, None, "NoSuchModel"),
        ({}, "model.safetensors", truncate, "model.safetensors"),
        ({}, "model.safetensors", Path.unlink, "safetensors"),
    ],
    ids=["no config", "unknown architecture", "truncated weights", "no weights"],
)
async def test_an_executor_with_a_bad_checkpoint_says_so_in_a_line_and_exits(
    tmp_path: Path, config: Any, file: str | None, damage: Any, named: str
):
    model = demo_model_with(tmp_path, **config)
    if file is not None:
        damage(model / file)
    args = ("-m", "executor", "--model", str(model), "--listen", "127.0.0.1:0")
    executor = Process("executor", args, log_path=tmp_path / "executor.log", env={})

    exit_code = await executor.exited()

    log = executor.log_path.read_text()
    assert "Traceback" not in log
    written = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    errors = [record for record in written if record["level"] not in ("info", "debug")]
    assert [error["event"] for error in errors] == ["cannot_start"]
    assert named in errors[0]["problem"]
    assert exit_code == BAD_CONFIGURATION


async def test_a_stack_that_cannot_start_shows_why_and_leaves_nothing_running(tmp_path: Path):
    stack = LocalStack(demo_model_with(tmp_path, architectures=["NoSuchModel"]), dp_size=2)

    with pytest.raises(ProcessEnded, match="NoSuchModel"):
        async with stack:
            pass

    assert stack.left_running == []


async def test_executors_that_differ_are_named_with_the_field_and_both_values(tmp_path: Path):
    stack = LocalStack(
        dp_size=2,
        rank_args={1: ("--block-size", "32")},
        log_dir=tmp_path,
        waits_for_ready=False,
    )
    async with stack, stack.client() as client:
        group = await group_with_problem(client, "block_size")

        for address in stack.executor_addresses:
            assert address in group.problem
        assert "block_size=16" in group.problem
        assert "block_size=32" in group.problem
        assert not await client.health("readiness")
        assert await client.health("liveness")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_the_router_serves_without_importing_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "spawn", start_anew)
    async with LocalStack(dp_size=1, log_dir=tmp_path) as stack:
        assert "libtorch" not in Path(f"/proc/{stack.router.pid}/maps").read_text()
        assert "libtorch" in Path(f"/proc/{stack.executors[0].pid}/maps").read_text()


@asynccontextmanager
async def make_serve(log_dir: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Runs what `make serve` runs; gives what it says; stops it by Ctrl-C: it ends in good order."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.local.serve", "--listen", "127.0.0.1:0"),
        *("--log-dir", str(log_dir)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        said = await process.stdout.readuntil(b"Ctrl-C stops it.")
        yield process, said.decode()
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0
    for name in ("router", "executor-0", "executor-1"):
        assert records(log_dir / f"{name}.log", "stopped")


@pytest.mark.parametrize(("setting", "page"), [("on", "http://127.0.0.1:9/"), ("off", "")])
async def test_no_link_is_printed_to_a_status_page_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, setting: str, page: str
):
    stack = LocalStack()
    stack.routers = [AsyncMock(event=AsyncMock(return_value={"address": "127.0.0.1:9"}))]
    monkeypatch.setenv("LOCKSTEP_ROUTER_STATUS_PAGE", setting)
    assert await stack.status_page() == page


def child_of(pid: int, *args: str) -> int:
    """Returns the child of a process that was given these arguments."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    given = " ".join(args)
    [child] = [
        int(child)
        for child in children
        if given in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    ]
    return child


@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
async def test_make_serve_starts_an_executor_that_dies_again_and_ends_at_ctrl_c(tmp_path: Path):
    async with make_serve(tmp_path) as (process, _):
        assert process.stdout is not None
        os.kill(child_of(process.pid, "--dp-rank 1"), signal.SIGKILL)
        await process.stdout.readuntil(b"executor-1 ended with exit code -9")
        while len(records(tmp_path / "router.log", "group_ready")) < 2:
            await asyncio.sleep(0.05)
        child_of(process.pid, "--dp-rank 1")


async def test_what_make_serve_says_to_run_runs_without_an_activated_environment(tmp_path: Path):
    async with make_serve(tmp_path) as (_, said):
        [command] = re.findall(r"What it is doing: (.+)", said)
        top = await asyncio.create_subprocess_exec(
            *shlex.split(command), cwd=ROOT, env={"PATH": "/usr/bin"}, stdout=subprocess.PIPE
        )
        assert b"READY" in (await top.communicate())[0]


ORPHAN_MAKER = """
import asyncio, json, sys
from pathlib import Path
from deploy.local.processes import Process

async def main():
    args = ("-m", "router", "--listen", "127.0.0.1:0", "--group", "127.0.0.1:1")
    router = Process("router", args, log_path=Path(sys.argv[1]), env={})
    await router.event("listening")
    print(json.dumps({"event": "started", "pid": router.pid}), flush=True)
    await router.exited()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is noticed on Linux only")
async def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path):
    args = ("-c", ORPHAN_MAKER, str(tmp_path / "router.log"))
    parent = Process("parent", args, log_path=tmp_path / "parent.log", env={})
    child_pid = (await parent.event("started"))["pid"]
    handle = os.pidfd_open(child_pid)
    await parent.kill()
    ended, _, _ = await asyncio.to_thread(select.select, [handle], [], [], 120)
    os.close(handle)
    assert ended
