"""Router program: processes that it starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
import router.__main__
import grpc
import uvloop

async def start():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process = await asyncio.create_subprocess_exec("true")
    assert await process.wait() == 0
    await server.stop(None)

uvloop.run(start())
"""


def test_nothing_of_grpc_runs_in_a_process_that_is_started():
    """Its threads would: they ended two in a hundred by SIGSEGV where calls came at once."""
    env = {**os.environ, "GRPC_VERBOSITY": "INFO"}
    env.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "fork" not in ended.stderr


def test_a_container_s_first_process_ends_when_told_to_while_it_imports(tmp_path: Path) -> None:
    """It gets only signals that it handles: here, others would end it by the signal."""
    (tmp_path / "uvloop.py").write_text("import signal; signal.raise_signal(signal.SIGTERM)")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-m", "router"], env=env, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
