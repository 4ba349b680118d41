"""Launcher: a router and groups of executors on this machine, as real processes.

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
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.ports import held_port
from deploy.local.processes import Process
from protos.settings import BAD_CONFIGURATION
from router.api.health import READINESS
from router.client import CallFailed, Client, TlsFiles
from router.client.client import channel_opener

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
ANY_PORT = "127.0.0.1:0"
METRICS_LISTEN = "LOCKSTEP_ROUTER_METRICS_LISTEN"
STATUS_PAGE = "LOCKSTEP_ROUTER_STATUS_PAGE"
STOP_TIMEOUT_S = 30.0  # for each process, before it is killed


@dataclass(eq=False)
class LocalStack:
    """A router and its groups of executors on loopback, running within `async with`.

    Attributes:
        model: Folder of a Hugging Face checkpoint. Its tokenizer.json, if there is one, is the
            router's.
        dp_size: DP ranks.
        attn_tp_size: Executors of each.
        num_groups: Groups of `dp_size * attn_tp_size` executors each.
        num_routers: Of them one drives, and the others stand by.
        min_dp_size: With how many DP ranks a group still serves; None: it is not elastic.
        spares: Further executors of each elastic group.
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
        addresses: Where each router listens.
        routers: Their processes.
        executors: Their processes, by number: in the first group dp_rank * attn_tp_size +
            attn_tp_rank and then its spares, and in each further one what follows. In an elastic group
            these are their ranks at first.
        on_restart: Is told, in words, of each executor that `supervise` starts again.
    """

    model: Path = DEMO_MODEL
    _: KW_ONLY
    dp_size: int = 2
    attn_tp_size: int = 1
    num_groups: int = 1
    num_routers: int = 1
    min_dp_size: int | None = None
    spares: int = 0
    executor_args: Sequence[str] = ()
    rank_args: Mapping[int, Sequence[str]] = field(default_factory=dict)
    router_args: Sequence[str] = ()
    listen: str = ANY_PORT
    log_dir: Path | None = None
    tls: TlsFiles | None = None
    token: Path | None = None
    waits_for_ready: bool = True
    ready_timeout_s: float = 120.0
    on_restart: Callable[[str], None] = field(default=lambda _: None)
    addresses: list[str] = field(init=False, default_factory=list)
    routers: list[Process] = field(init=False, default_factory=list)
    executors: list[Process] = field(init=False, default_factory=list)
    executor_addresses: list[str] = field(init=False, default_factory=list)
    _started: list[Process] = field(init=False, default_factory=list)
    _cleanup: contextlib.ExitStack = field(init=False, default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.model = self.model.resolve()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def router(self) -> Process:
        """The first router."""
        return self.routers[0]

    @property
    def address(self) -> str:
        """Where the first router listens."""
        return self.addresses[0]

    @property
    def target(self) -> str:
        """gRPC's name of all routers."""
        return self.address if self.num_routers == 1 else f"ipv4:{','.join(self.addresses)}"

    def client(self) -> Client:
        """Returns a client of the routers, to be opened by `async with`."""
        return Client(self.target, self.tls, token=self.token)

    async def status_page(self) -> str:
        """Returns where a browser finds the router's status page; empty if it is switched off.

        The router must have a port for metrics.
        """
        if os.environ.get(STATUS_PAGE) == "off":
            return ""
        return f"http://{(await self.router.event('metrics_listening'))['address']}/"

    @property
    def num_executors(self) -> int:
        return self.num_groups * self._group_size

    @property
    def _group_size(self) -> int:
        return self.dp_size * self.attn_tp_size + self.spares

    async def restart_executor(self, dp_rank: int, attn_tp_rank: int = 0) -> None:
        """Kills an executor and starts it again at the same address; returns when it listens."""
        world_rank = dp_rank * self.attn_tp_size + attn_tp_rank
        await self.executors[world_rank].kill()
        await self.start_again(world_rank)

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
        exit_code = await self.executors[world_rank].stop(timeout_s)
        await self.start_again(world_rank)
        return exit_code

    async def restart_router(self, timeout_s: float = 60.0) -> int:
        """Tells the router to stop, and starts it again at the same address when it has.

        Returns, when the new one takes requests, the exit code of the old.

        Args:
            timeout_s: How long it may drain before it is killed.
        """
        exit_code = await self.router.stop(timeout_s)
        await self.start_router_again()
        await self.wait_until_ready()
        return exit_code

    async def kill_router(self) -> None:
        """Kills the router and starts it again at the same address; returns when it takes requests."""
        await self.router.kill()
        await self.start_router_again()
        await self.wait_until_ready()

    async def start_router_again(self, number: int = 0) -> None:
        """Starts a router that has ended at the same address; returns when it listens."""
        self.routers[number] = self._start_router(number, self.addresses[number])
        await self.routers[number].event("listening")

    async def wait_until_ready(self) -> None:
        """Returns when a router takes requests, whichever of them drives.

        Raises:
            ProcessEnded: The router or an executor ended first.
            TimeoutError: It took too long; says what the router gives as the reason.
        """
        ends = [process.exited() for process in self._current]
        try:
            async with asyncio.timeout(self.ready_timeout_s):
                await _first_of([*map(self._watch_readiness, range(self.num_routers)), *ends])
        except TimeoutError:
            raise TimeoutError(
                f"no group formed in {self.ready_timeout_s:.0f} s: {await self._problem()}"
            ) from None
        self._raise_if_ended()

    @property
    def left_running(self) -> list[str]:
        """Processes that were started, by name, and still run. Empty after the block."""
        return [process.name for process in self._started if process.is_left]

    # ---- starting and stopping

    async def _start(self) -> None:
        if self.log_dir is None:
            folder = tempfile.TemporaryDirectory(prefix="lockstep-")
            self.log_dir = Path(self._cleanup.enter_context(folder))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for number in range(self.num_executors):
            self.executors.append(self._start_executor(number, self._held(ANY_PORT)))
        for executor in self.executors:
            self.executor_addresses.append((await executor.event("listening"))["address"])
        for number in range(self.num_routers):
            listen = self._held(ANY_PORT if number else self.listen)
            self.routers.append(self._start_router(number, listen))
            self.addresses.append((await self.routers[number].event("listening"))["address"])
        if self.waits_for_ready:
            await self.wait_until_ready()

    def _held(self, listen: str) -> str:
        """Returns the address with a port of this stack's own, if it may be any."""
        if listen != ANY_PORT:
            return listen
        return f"127.0.0.1:{self._cleanup.enter_context(held_port())}"

    async def start_again(self, number: int) -> None:
        """Starts an executor that has ended at the same address; returns when it listens."""
        executor = self._start_executor(number, self.executor_addresses[number])
        self.executors[number] = executor
        await executor.event("listening")

    def _start_executor(self, number: int, listen: str) -> Process:
        group, world_rank = divmod(number, self._group_size)
        dp_rank, attn_tp_rank = divmod(world_rank, self.attn_tp_size)
        name = f"executor-{dp_rank}"
        if self.num_groups > 1:
            name = f"group-{group}-{name}"
        args = [
            *("-m", "executor", "--model", str(self.model), "--listen", listen),
        ]
        if self.min_dp_size is None:
            args += ["--dp-rank", str(dp_rank), "--dp-size", str(self.dp_size)]
        else:
            args += ["--min-dp-size", str(self.min_dp_size), "--max-dp-size", str(self.dp_size)]
        if self.attn_tp_size > 1:
            name += f".{attn_tp_rank}"
            args += ["--attn-tp-rank", str(attn_tp_rank)]
            args += ["--attn-tp-size", str(self.attn_tp_size)]
        args += [*self.executor_args, *self.rank_args.get(number, ())]
        return self._start_process(name, args)

    def _start_router(self, number: int, listen: str) -> Process:
        name = f"router-{number}" if number else "router"
        args = ["-m", "router", "--listen", listen, "--model-name", self.model.name]
        for first in range(0, self.num_executors, self._group_size):
            addresses = self.executor_addresses[first : first + self._group_size]
            args += ["--group", ",".join(addresses) + self._sizes]
        if (self.model / "tokenizer.json").is_file():
            args += ["--tokenizer", str(self.model)]
        return self._start_process(name, [*args, *self.router_args])

    @property
    def _sizes(self) -> str:
        """What makes a group elastic, behind its addresses."""
        if self.min_dp_size is None:
            return ""
        size = self.dp_size * self.attn_tp_size
        return f"?size={size}&min={self.min_dp_size * self.attn_tp_size}"

    def _start_process(self, name: str, args: Sequence[str]) -> Process:
        assert self.log_dir is not None, "known within `async with`"
        log_path = self.log_dir / f"{name}.log"
        process = Process(name, args, log_path=log_path, env=_thread_settings(self.num_executors))
        self._started.append(process)
        return process

    async def _stop(self) -> None:
        # Routers first: they let go of their executors, which then have nothing to wait for.
        for group in ([p for p in self._started if p.name.startswith("router")], self.executors):
            await asyncio.gather(*[process.stop(STOP_TIMEOUT_S) for process in group])
        self._cleanup.close()

    # ---- waiting

    @property
    def _current(self) -> list[Process]:
        return [*self.executors, *self.routers]

    async def _watch_readiness(self, number: int) -> None:
        address = self.addresses[number]
        opener = channel_opener(address, self.tls, self.token)
        async with opener.open(address, ()) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stub lacks methods
            request = health_pb2.HealthCheckRequest(service=READINESS)
            try:
                async for response in stub.Watch(request):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await self.routers[number].exited()  # it was ending, and its log says why

    async def _problem(self) -> str:
        try:
            async with self.client() as client:
                return "; ".join(group.problem for group in await client.get_status())
        except CallFailed as error:
            return str(error)

    def _raise_if_ended(self) -> None:
        for process in self._current:
            if process.has_ended:
                raise process.ended()


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


def metrics_args() -> tuple[str, ...]:
    """Returns the router's flags for a port for metrics, unless the environment names one."""
    return () if METRICS_LISTEN in os.environ else ("--metrics-listen", ANY_PORT)


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
