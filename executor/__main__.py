"""Executor program, ``python -m executor``: from settings to an executor that serves until stopped.

PyTorch is imported when it is needed and not before, so that ``--help`` answers at once and OpenMP
reads its settings in time.
"""

import asyncio
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import uvloop

from executor.config import ExecutorConfig
from executor.metrics import STORE_STRANGER, Measures, Numbers, collector
from executor.server.supervisor import STUCK, Life, supervise
from protos.memory import uncollected
from protos.settings import BAD_CONFIGURATION, command
from protos.transport.addresses import is_loopback

if TYPE_CHECKING:
    from executor.server.service import ExecutorServicer

log = structlog.stdlib.get_logger(__name__)

FAREWELL_S = 1.0  # for a router to ask why its stream ended, which gRPC may not have passed on
OPENBLAS = "OPENBLAS_NUM_THREADS"
STOP_GRACE_S = 0.5  # for calls that no step holds up, such as a Watch of the health service


@command(ExecutorConfig, "executor")
def main(config: ExecutorConfig) -> None:
    """Runs one executor of a Lockstep group: one model on one accelerator, driven by a router."""
    if config.check == "on":
        from executor.build.check import check  # imports PyTorch

        sys.exit(0 if check(config, print) else BAD_CONFIGURATION)
    # While it imports. By itself the kernel drops the signal where this is a container's first process.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log would write past ours
    # A waiting OpenMP thread that spins starves the other processes of a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Weights and caches in huge pages, where the kernel gives them on demand: a step on a CPU reads all
    # of them, and looks up fewer addresses. PyTorch reads it when it first allocates.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _keep_in(config.peer_host)
    _spare_survivors()
    life = Life()
    if config.max_restarts:
        _preload()
        life = supervise(config.max_restarts)  # which goes on here in each process that it forks
    exit_code = uvloop.run(serve(config, life))
    sys.stderr.flush()
    # Not sys.exit, which would wait for a compute thread that loads or waits for lost peers.
    os._exit(exit_code)


def _preload() -> None:
    """Imports what takes long, and starts no thread."""
    given = os.environ.get(OPENBLAS)
    os.environ[OPENBLAS] = "1"  # NumPy's, which has nothing to compute here
    with uncollected():
        import numpy  # noqa: F401

        del os.environ[OPENBLAS]  # PyTorch's, where it has one, takes what it was given
        if given is not None:
            os.environ[OPENBLAS] = given
        import executor.build.executor
        import executor.server.service  # noqa: F401


async def serve(config: ExecutorConfig, life: Life) -> int:
    """Serves until SIGTERM or SIGINT; a second one ends it at once. Returns the exit code."""
    with uncollected():
        from executor.parallel.rendezvous import StorePort
        from executor.server.service import ExecutorServicer

    stopped = asyncio.Event()
    at_once = asyncio.Event()

    def stop() -> None:
        (at_once if stopped.is_set() else stopped).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    measures = Measures(life.num_restarts)
    refuse = partial(measures.add_refusal, STORE_STRANGER)
    host = config.peer_host or "127.0.0.1"
    stores = StorePort(host, bind_host=config.bind_host, on_refused=refuse)
    servicer = ExecutorServicer(
        is_first=config.topology.world_rank == 0,
        store_host=host,
        open_store=stores.open,
        store_address=stores.address,
        measures=measures,
        stuck_after_s=config.peer_timeout_s,
    )
    _serve_metrics(config, servicer, measures)
    health_server = await config.serve_health(servicer.add_health_to, servicer.refusals)
    server, _ = await servicer.start(config)
    exit_code = await _load(servicer, config, measures, stopped)
    if exit_code is None:
        life.note_ready()
        log.info("ready_to_join", pid=os.getpid())
        exit_code = await _serve_until(stopped, servicer.stuck)
    log.info("stopping")
    if exit_code == STUCK:
        at_once.set()  # its step never ends
    await _stop(servicer, server, config.stop_timeout_s, at_once)
    if health_server is not None:
        await health_server.stop(STOP_GRACE_S)
    return exit_code


async def _serve_until(stopped: asyncio.Event, stuck: asyncio.Event) -> int:
    """Returns, with the exit code, when the process is to stop or its step is stuck."""
    await _first(stopped, stuck)
    return STUCK if stuck.is_set() else 0


async def _first(*ends: asyncio.Event | asyncio.Task[None], timeout_s: float | None = None) -> None:
    """Returns when one of the events is set, one of the tasks is done, or the time is over."""
    waits = [asyncio.create_task(end.wait()) for end in ends if isinstance(end, asyncio.Event)]
    tasks = [end for end in ends if isinstance(end, asyncio.Task)]
    await asyncio.wait([*waits, *tasks], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _serve_metrics(
    config: ExecutorConfig, servicer: "ExecutorServicer", measures: Measures
) -> None:
    """Opens the port for metrics if there is to be one; it ends with the process.

    Raises:
        OSError: The address cannot be bound.
    """
    if config.metrics_listen is None:
        return
    from executor.build.devices import memory_in_use  # imports PyTorch

    def numbers() -> Numbers:
        return Numbers(
            measures,
            config.topology.dp_rank if config.max_dp_size is None else servicer.dp_rank,
            config.attn_tp_rank,
            servicer.num_kv_blocks,
            sum(expert >= 0 for expert in servicer.resident_experts),
            servicer.epoch,
            memory_in_use(),
        )

    config.serve_metrics(collector(numbers), measures.add_refusal)


async def _load(
    servicer: "ExecutorServicer", config: ExecutorConfig, measures: Measures, stopped: asyncio.Event
) -> int | None:
    """Loads the model. Returns an exit code if the process should end instead of serve."""
    with uncollected():
        from executor.build.executor import build_worker
    loading = asyncio.create_task(servicer.load(lambda: build_worker(config, measures)))
    await _first(loading, stopped)
    if not loading.done():
        return 0
    try:
        loading.result()
    except (OSError, ValueError) as error:
        log.error("cannot_start", problem=str(error))
        return BAD_CONFIGURATION
    except Exception as error:  # such as PyTorch's, of memory or a driver
        log.exception("cannot_start", problem=f"{type(error).__name__}: {error}")
        return BAD_CONFIGURATION
    return None


async def _stop(
    servicer: "ExecutorServicer", server: Any, timeout_s: float, at_once: asyncio.Event
) -> None:
    """Lets the step in flight finish, for `timeout_s` or until a second signal."""
    is_driven = servicer.is_driven
    finishing = asyncio.create_task(servicer.stop())
    await _first(finishing, at_once, timeout_s=timeout_s)
    if finishing.done() and is_driven:
        await _first(at_once, timeout_s=FAREWELL_S)
    if finishing.done():
        finishing.result()
    else:
        finishing.cancel()
        log.warning(
            "step_not_finished",
            epoch=servicer.epoch,
            timeout_s=timeout_s,
            second_signal=at_once.is_set(),
        )
    await server.stop(grace=STOP_GRACE_S)
    log.info("stopped")


def _keep_in(peer_host: str | None) -> None:
    """Has NCCL listen on loopback where all peers are there, unless the operator set an interface.

    By itself it takes an address that other machines reach, and identifies no caller.

    Args:
        peer_host: None of one that listens on every address, and whose peers may be anywhere.
    """
    if peer_host is not None and is_loopback(f"{peer_host}:0"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _spare_survivors() -> None:
    """Has PyTorch's watchdog of NCCL leave the process alone when a peer is lost, unless told otherwise.

    By itself it ends the process up to a minute later, when that has long joined the next epoch.

    Source: PyTorch, ProcessGroupNCCL.hpp, SHOULD_TEAR_DOWN and TORCH_NCCL_ENABLE_MONITORING.
    """
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        os.environ.setdefault(f"TORCH_NCCL_{name}", "0")


if __name__ == "__main__":
    main(prog_name="python -m executor")
