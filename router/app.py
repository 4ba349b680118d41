"""Builds every object of the router, wires them, and runs them until told to stop."""

import asyncio
import signal
from importlib.metadata import PackageNotFoundError, version

import grpc
import structlog

from protos.serving.v1 import serving_pb2_grpc
from router.admission import Admission
from router.cell import Cell
from router.config import RouterConfig
from router.discovery import find_addresses
from router.engine import Engine
from router.executor_client import ExecutorGroup
from router.frontend import SERVER_OPTIONS, GenerationServicer
from router.health import Health, enable_reflection
from router.readers import Readers
from router.tokenizer import Tokenizer

log = structlog.stdlib.get_logger(__name__)

POLL_S = 0.05  # how often readiness and the end of draining are looked at


async def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        OSError: The address to listen at is taken.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tokenizer = None if config.tokenizer_file is None else Tokenizer(config.tokenizer_file)
    cell = Cell(Readers(config.max_calls))
    groups = [_connect(config, addresses) for addresses in config.groups]
    engines = [_build_engine(config, cell, number, group) for number, group in enumerate(groups)]
    cell.drive(engines)
    health = Health()
    server = await _start_server(config, GenerationServicer(cell, tokenizer, _version()), health)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(engine.run()) for engine in engines]
            running.append(tasks.create_task(_keep_ready(health, cell)))
            await stopped.wait()
            running.pop().cancel()
            await _drain(config, health, cell)
            for task in running:
                task.cancel()
    finally:
        await server.stop(grace=1.0)
        for group in groups:
            await group.close()
    log.info("stopped")


def _connect(config: RouterConfig, addresses: tuple[str, ...]) -> ExecutorGroup:
    return ExecutorGroup(
        find_addresses(addresses),
        config.model_name,
        form_timeout_s=config.form_timeout_s,
        step_timeout_s=config.step_timeout_s,
    )


def _build_engine(config: RouterConfig, cell: Cell, number: int, group: ExecutorGroup) -> Engine:
    admission = Admission(
        max_sequences=config.max_waiting_sequences, max_tokens=config.max_waiting_tokens
    )
    return Engine(
        number,
        group,
        admission,
        cell.readers,
        pipeline_depth=config.pipeline_depth,
        min_chunk_tokens=config.min_chunk_tokens,
        retry_delay_s=config.retry_delay_s,
        on_end=cell.on_end,
    )


async def _start_server(
    config: RouterConfig, servicer: GenerationServicer, health: Health
) -> grpc.aio.Server:
    # Without SO_REUSEPORT a second router at one address fails, rather than taking half its calls.
    server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.so_reuseport", 0)])
    serving_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    await health.start(server)
    enable_reflection(server)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise OSError(f"listen={config.listen}: the address cannot be bound: {error}") from error
    await server.start()
    host = config.listen.rpartition(":")[0]
    log.info("listening", address=f"{host}:{port}")
    return server


async def _keep_ready(health: Health, cell: Cell) -> None:
    was_ready = False
    while True:
        if cell.is_ready != was_ready:
            was_ready = cell.is_ready
            await health.set_ready(was_ready)
            log.info("readiness", is_ready=was_ready)
        await asyncio.sleep(POLL_S)


async def _drain(config: RouterConfig, health: Health, cell: Cell) -> None:
    """Turns away what is new, lets finish what runs, and ends what is left after the grace."""
    log.info("draining", live_requests=cell.num_live, grace_s=config.shutdown_grace_s)
    await health.set_ready(False)
    await asyncio.sleep(config.shutdown_delay_s)
    cell.shut_down()
    deadline = asyncio.get_running_loop().time() + config.shutdown_grace_s
    while cell.num_live and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL_S)
    cell.cancel_all()


def _version() -> str:
    try:
        return version("lockstep")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was not installed
