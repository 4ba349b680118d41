"""A whole Lockstep on this machine: one router and a group of executors, as real processes.

    async with LocalStack(Path("deploy/demo_model"), dp_size=2) as stack:
        async with stack.client() as client:
            print((await client.complete("\\n17+25=")).text)

The demo, `make serve`, the end-to-end tests and the benchmarks all start it this way. Leaving the
block stops every process, also after an error or Ctrl-C; on Linux they end even if this process
is killed.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.ports import held_port
from deploy.local.processes import Process, ProcessEnded
from protos.settings import BAD_CONFIGURATION
from router.api.health import READINESS
from router.client import CallFailed, Client, TlsFiles
from router.client.client import channel_opener

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
STOP_TIMEOUT_S = 30.0  # for each process, before it is killed


class LocalStack:
    """A router and its groups of executors on loopback, running within `async with`.

    Args:
        model: Folder of a Hugging Face checkpoint. Its tokenizer.json, if there is one, is the
            router's.
        dp_size: DP ranks.
        attn_tp_size: Executors of each.
        num_groups: Groups of `dp_size * attn_tp_size` executors each.
        executor_args: Flags for every executor.
        rank_args: Further flags for one executor, by its number.
        router_args: Flags for the router.
        listen: host:port of the router; port 0 takes a free one. The free ones of router and
            executors stay theirs until the block ends, also while they are started again.
        log_dir: Where each process's log goes; None is a folder that goes with the stack.
        tls: How clients connect; None is plain text.
        token: File of the token that clients send; None: none.
        waits_for_ready: Whether to wait, on entry, until the router takes requests.
        ready_timeout_s: Longest wait for that.

    Attributes:
        address: Where the router listens.
        router: Its process.
        executors: Their processes, by number: in the first group dp_rank * attn_tp_size +
            attn_tp_rank, and in each further one what follows.
        on_restart: Told, in words, of each executor that `supervise` starts again.
    """

    address: str
    router: Process

    def __init__(
        self,
        model: Path = DEMO_MODEL,
        *,
        dp_size: int = 2,
        attn_tp_size: int = 1,
        num_groups: int = 1,
        executor_args: Sequence[str] = (),
        rank_args: Mapping[int, Sequence[str]] | None = None,
        router_args: Sequence[str] = (),
        listen: str = "127.0.0.1:0",
        log_dir: Path | None = None,
        tls: TlsFiles | None = None,
        token: Path | None = None,
        waits_for_ready: bool = True,
        ready_timeout_s: float = 120.0,
    ) -> None:
        self._model = model.resolve()
        self._dp_size = dp_size
        self._attn_tp_size = attn_tp_size
        self._num_groups = num_groups
        self._executor_args = executor_args
        self._rank_args = rank_args or {}
        self._router_args = router_args
        self._listen = listen
        self._log_dir = log_dir
        self._tls = tls
        self._token = token
        self._waits_for_ready = waits_for_ready
        self._ready_timeout_s = ready_timeout_s
        self._cleanup = contextlib.ExitStack()
        self._started: list[Process] = []
        self.executors: list[Process] = []
        self.executor_addresses: list[str] = []
        self.on_restart: Callable[[str], None] = lambda _: None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop()

    def client(self) -> Client:
        """Returns a client of the router, to be opened by `async with`."""
        return Client(self.address, self._tls, token=self._token)

    @property
    def num_executors(self) -> int:
        return self._num_groups * self._group_size

    @property
    def _group_size(self) -> int:
        return self._dp_size * self._attn_tp_size

    async def kill_executor(self, dp_rank: int, attn_tp_rank: int = 0) -> None:
        """Ends an executor without warning; returns when it is gone."""
        await self.executors[dp_rank * self._attn_tp_size + attn_tp_rank].kill()

    async def restart_executor(self, dp_rank: int, attn_tp_rank: int = 0) -> None:
        """Kills an executor and starts it again at the same address; returns when it listens."""
        await self.kill_executor(dp_rank, attn_tp_rank)
        await self._start_again(dp_rank * self._attn_tp_size + attn_tp_rank)

    async def supervise_executors(self) -> None:
        """Starts every executor again that ends, at the same address, until it is cancelled.

        Raises:
            ProcessEnded: One says that its settings are wrong, so that the next one would, too.
        """

        async def supervise(number: int) -> None:
            while (exit_code := await self.executors[number].exited()) != BAD_CONFIGURATION:
                name, address = self.executors[number].name, self.executor_addresses[number]
                self.on_restart(f"{name} ended with exit code {exit_code}, and is started again")
                self.executors[number] = self._start_executor(number, address)
            self._raise_if_ended()

        await _first_of([supervise(number) for number in range(self.num_executors)])

    async def supervise(self) -> None:
        """Does so until the router ends.

        Raises:
            ProcessEnded: It has, or an executor says that its settings are wrong.
        """
        await _first_of([self.supervise_executors(), self.router.exited()])
        self._raise_if_ended()

    async def replace_executor(self, world_rank: int, timeout_s: float = 60.0) -> int:
        """Tells an executor to stop, and starts it again at the same address when it has.

        Returns, when the new one listens, the exit code of the old.

        Args:
            timeout_s: How long it may take before it is killed.
        """
        await self.executors[world_rank].stop(timeout_s)
        exit_code = await self.executors[world_rank].exited()
        await self._start_again(world_rank)
        return exit_code

    async def restart_router(self, timeout_s: float = 60.0) -> int:
        """Tells the router to stop, and starts it again at the same address when it has.

        Returns, when the new one takes requests, the exit code of the old.

        Args:
            timeout_s: How long it may drain before it is killed.
        """
        await self.router.stop(timeout_s)
        exit_code = await self.router.exited()
        self._listen = self.address
        self.router = self._start_router()
        await self.router.event("listening")
        await self.wait_until_ready()
        return exit_code

    async def wait_until_ready(self) -> None:
        """Returns when the router takes requests.

        Raises:
            ProcessEnded: The router or an executor ended first.
            TimeoutError: It took too long; says what the router gives as the reason.
        """
        ready = asyncio.ensure_future(self._watch_readiness())
        ends = [asyncio.ensure_future(process.exited()) for process in self._current]
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise TimeoutError(
                f"no group formed in {self._ready_timeout_s:.0f} s: {await self._problem()}"
            ) from None
        finally:
            for task in (ready, *ends):
                task.cancel()
            await asyncio.gather(ready, *ends, return_exceptions=True)
        self._raise_if_ended()

    @property
    def log_dir(self) -> Path:
        """Where the logs are, one file for each process."""
        assert self._log_dir is not None, "known within `async with`"
        return self._log_dir

    @property
    def left_running(self) -> list[str]:
        """Processes that were started, by name, and still run. Empty after the block."""
        return [process.name for process in self._started if process.is_left]

    # ---- starting and stopping

    async def _start(self) -> None:
        if self._log_dir is None:
            folder = tempfile.TemporaryDirectory(prefix="lockstep-")
            self._log_dir = Path(self._cleanup.enter_context(folder))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for number in range(self.num_executors):
            self.executors.append(self._start_executor(number, self._held("127.0.0.1:0")))
        for executor in self.executors:
            self.executor_addresses.append((await executor.event("listening"))["address"])
        self._listen = self._held(self._listen)
        self.router = self._start_router()
        self.address = (await self.router.event("listening"))["address"]
        if self._waits_for_ready:
            await self.wait_until_ready()

    def _held(self, listen: str) -> str:
        """Returns the address with a port of this stack's own, if it may be any."""
        if listen != "127.0.0.1:0":
            return listen
        return f"127.0.0.1:{self._cleanup.enter_context(held_port())}"

    async def _start_again(self, number: int) -> None:
        executor = self._start_executor(number, self.executor_addresses[number])
        self.executors[number] = executor
        await executor.event("listening")

    def _start_executor(self, number: int, listen: str) -> Process:
        group, world_rank = divmod(number, self._group_size)
        dp_rank, attn_tp_rank = divmod(world_rank, self._attn_tp_size)
        name = f"executor-{dp_rank}"
        if self._num_groups > 1:
            name = f"group-{group}-{name}"
        args = [
            *("-m", "executor", "--model", str(self._model), "--listen", listen),
            *("--dp-rank", str(dp_rank), "--dp-size", str(self._dp_size)),
        ]
        if self._attn_tp_size > 1:
            name += f".{attn_tp_rank}"
            args += ["--attn-tp-rank", str(attn_tp_rank)]
            args += ["--attn-tp-size", str(self._attn_tp_size)]
        args += [*self._executor_args, *self._rank_args.get(number, ())]
        return self._start_process(name, args)

    def _start_router(self) -> Process:
        args = [
            *("-m", "router", "--listen", self._listen, "--model-name", self._model.name),
        ]
        for first in range(0, self.num_executors, self._group_size):
            addresses = self.executor_addresses[first : first + self._group_size]
            args += ["--group", ",".join(addresses)]
        if (self._model / "tokenizer.json").is_file():
            args += ["--tokenizer", str(self._model)]
        return self._start_process("router", [*args, *self._router_args])

    def _start_process(self, name: str, args: Sequence[str]) -> Process:
        log_path = self.log_dir / f"{name}.log"
        process = Process(name, args, log_path=log_path, env=_thread_settings(self.num_executors))
        self._started.append(process)
        return process

    async def _stop(self) -> None:
        # The router first: it lets go of its executors, which then have nothing to wait for.
        for group in ([p for p in self._started if p.name == "router"], self.executors):
            await asyncio.gather(*[process.stop(STOP_TIMEOUT_S) for process in group])
        self._cleanup.close()

    # ---- waiting

    @property
    def _current(self) -> list[Process]:
        return [*self.executors, self.router]

    async def _watch_readiness(self) -> None:
        opener = channel_opener(self.address, self._tls, self._token)
        async with opener.open(self.address, ()) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stub lacks methods
            request = health_pb2.HealthCheckRequest(service=READINESS)
            try:
                async for response in stub.Watch(request):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await self.router.exited()  # it was ending, and its log says why

    async def _problem(self) -> str:
        try:
            async with self.client() as client:
                return "; ".join(group.problem for group in await client.get_status())
        except CallFailed as error:
            return str(error)

    def _raise_if_ended(self) -> None:
        for process in self._current:
            if process.has_ended:
                raise ProcessEnded(
                    f"{process.name} ended; the end of its log ({process.log_path}):\n"
                    f"{process.log_tail}"
                )


async def _first_of(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Runs all until one returns or raises, and raises what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _thread_settings(num_executors: int) -> dict[str, str]:
    """Shares the cores out. OpenMP threads that spin while they wait would starve the others."""
    settings = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // num_executors)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def num_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
