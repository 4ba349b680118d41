"""Restarts of real executors by their supervisors."""

import os
import signal
import sys
from pathlib import Path

import pytest

from deploy.local import processes
from deploy.local.launch import DEMO_MODEL
from deploy.local.ports import held_port
from deploy.local.processes import Process
from tests.e2e.conftest import EXECUTOR_ARGS
from tests.e2e.support.fork_server import start_anew
from tests.e2e.support.logs import logged, records
from tests.e2e.support.stacks import served, serving_pid
from tests.e2e.support.streams import long_streams
from tests.support.scraping import scrape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a supervisor takes Linux")


async def test_a_killed_process_is_started_again_and_no_token_is_lost(tmp_path: Path):
    """Then the executor is told to stop, in the middle of steps."""
    args = ("--max-restarts", "2", *EXECUTOR_ARGS)
    async with served(tmp_path, executor_args=args) as (stack, client):
        executor = stack.executors[1]
        async with long_streams((client, "\n17+25="), (client, "\nrev lockstep=")):
            killed = await serving_pid(executor)
            assert killed != executor.pid
            os.kill(killed, signal.SIGKILL)
            await logged(stack.router, "group_ready", 2)
            assert await serving_pid(executor, 2) not in (killed, executor.pid)
            assert await stack.replace_executor(1) == 0
            await logged(stack.router, "group_ready", 3)
        [again] = records(executor.log_path, "restarting")
        assert again["served_s"] > 0
        assert again["restarts_left"] == 1
        assert records(executor.log_path, "step_not_finished") == []
        assert len(records(stack.router.log_path, "group_lost")) == 1
        assert len(records(stack.router.log_path, "group_left")) == 1


async def test_what_an_executor_imports_starts_no_thread_and_its_ports_are_free_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "spawn", start_anew)
    args = ["-m", "executor", "--model", str(DEMO_MODEL), "--max-restarts", "1"]
    with held_port() as port, held_port() as health_port, held_port() as metrics_port:
        args += ["--listen", f"127.0.0.1:{port}", "--health-listen", f"127.0.0.1:{health_port}"]
        args += ["--metrics-listen", f"127.0.0.1:{metrics_port}"]
        # With two threads, as libraries would start no pools for one.
        env = {"OMP_NUM_THREADS": "2"}
        executor = Process("executor", args, log_path=tmp_path / "executor.log", env=env)
        serving = await serving_pid(executor)
        assert records(executor.log_path, "restarts_off") == []
        os.kill(serving, signal.SIGKILL)
        await serving_pid(executor, 2)
        samples = await scrape(f"127.0.0.1:{metrics_port}")
        assert await executor.stop(60) == 0
    assert samples["lockstep_executor_restarts_total"] == {(): 1.0}
