"""Fork server: processes of Lockstep without the seconds that importing PyTorch and gRPC takes.

The server imports both once in a test run, and starts neither a thread nor a channel. A process that
it forks has a session, a log and an environment of its own, and runs what ``python -m MODULE ARGS``
runs; it ends without taking the interpreter apart. Tests of starting up start real ones instead.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.local import processes
from deploy.local.child import die_with_parent
from deploy.local.processes import ROOT

start_anew = processes.spawn
THREADS = "OMP_NUM_THREADS"
PRELOADED = ("executor.build.executor", "executor.server.service", "router.app")


class Fork:
    """A forked process, as `Process` uses a Popen.

    Args:
        connection: To its parent, which tells its pid and then its exit code.
        output: Descriptor of what it writes.
    """

    def __init__(self, connection: socket.socket, output: int) -> None:
        self._told = connection.makefile()
        connection.close()
        self.stdout = os.fdopen(output, encoding="utf-8", errors="replace")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode


@contextmanager
def fork_server(folder: Path, python_path: str | None = None) -> Iterator[None]:
    """Has `Process` fork what runs a module off one server, within the block. Linux only.

    Args:
        folder: Gets the server's socket.
        python_path: PYTHONPATH of the server, and of what is forked off it: others start anew.
    """
    if sys.platform != "linux":
        yield
        return
    address = str(folder / "fork-server")
    command = [sys.executable, "-m", __name__, address]
    env = {**os.environ, THREADS: "1", "OMP_WAIT_POLICY": "PASSIVE"}
    env["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # as routers have it, before they import gRPC
    if python_path is not None:
        env["PYTHONPATH"] = python_path
    python_path = env.get("PYTHONPATH")
    server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"listening\n"

    def fork(args: Sequence[str], env: Mapping[str, str]) -> "Fork | subprocess.Popen[str]":
        if args[0] != "-m" or env.get("PYTHONPATH") != python_path:
            return start_anew(args, env)
        output, written = os.pipe()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        socket.send_fds(connection, [json.dumps([*args[1:], env]).encode()], [written])
        os.close(written)
        return Fork(connection, output)

    usual = processes.spawn
    processes.spawn = fork  # type: ignore[assignment]
    try:
        yield
    finally:
        processes.spawn = usual
        server.kill()
        server.communicate()


def serve(address: str) -> None:
    """Forks at each connection, until it is killed."""
    for module in PRELOADED:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    gc.freeze()  # a collection in a fork would copy the pages of all that was imported
    print("listening", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = os.getpid()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(server)
            listener.close()
            fork_one(connection)
            os._exit(0)
        connection.close()


def fork_one(connection: socket.socket) -> None:
    """Forks a process, tells its pid, waits for it and tells its exit code."""
    request, [output], _, _ = socket.recv_fds(connection, 1 << 20, 1)
    module, *args, env = json.loads(request)
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        os.setsid()
        die_with_parent(parent)
        connection.send(f"{os.getpid()}\n".encode())
        connection.close()
        become(module, args, env, output)
        return
    os.close(output)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.send(f"{status}\n".encode())


def become(module: str, args: list[str], env: dict[str, str], output: int) -> None:
    """Runs ``python -m MODULE ARGS`` in this process."""
    import torch

    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get(THREADS) or os.cpu_count() or 1))
    sys.argv = [module, *args]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ended.code or 0))


if __name__ == "__main__":
    serve(sys.argv[1])
