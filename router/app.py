"""Builds every object of the router, wires them, and runs them until told to stop."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, version

import grpc
import structlog

from protos.serving.v1 import serving_pb2_grpc
from protos.telemetry.metrics import serve_metrics
from protos.transport.interceptors import RequestReader
from protos.transport.port import serve_health
from router.api.generate import SERVER_OPTIONS, GenerationServicer
from router.api.health import Health, enable_reflection
from router.api.text.tokenizer import Tokenizer
from router.config import RouterConfig
from router.drain import StopSignals, drain
from router.engine.engine import Engine
from router.engine.engines import Engines, Observer
from router.executors.discovery import find_addresses
from router.executors.group import ExecutorGroup
from router.executors.step_deadline import StepDeadline
from router.requests.listeners import Listeners
from router.requests.waiting_queue import Admission
from router.telemetry.prometheus import collector
from router.telemetry.request_log import Observers, RequestLog

log = structlog.stdlib.get_logger(__name__)

POLL_S = 0.05  # how often readiness is looked at
STOP_GRACE_S = 0.5  # for calls that have no request to finish, such as a Watch


async def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT, and then until what runs has ended (drain.py).

    Raises:
        OSError: The address to listen at is taken.
    """
    signals = StopSignals()
    signals.listen()
    tokenizer = None if config.tokenizer_file is None else Tokenizer(config.tokenizer_file)
    cleanup = AsyncExitStack()
    interceptors, observers = _start_tracing(config, cleanup)
    observers = [RequestLog(lambda group: by_group[group].ids()), *observers]
    engines = Engines(
        Listeners(config.max_calls),
        failover_after_s=config.failover_after_s,
        observer=Observers(observers),
    )
    groups = [_connect(config, addresses) for addresses in config.groups]
    by_group = [
        _build_engine(config, engines, number, group) for number, group in enumerate(groups)
    ]
    engines.drive(by_group)
    health = Health()
    servicer = GenerationServicer(engines, tokenizer, _version())
    _serve_metrics(config, engines, cleanup)
    await _serve_health(config, health, cleanup)
    server = await start_server(config, engines, servicer, health, interceptors)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(engine.run()) for engine in by_group]
            running.append(tasks.create_task(_keep_ready(health, engines)))
            await signals.asked.wait()
            running.pop().cancel()  # from here on, readiness is the drain's
            await drain(
                engines,
                health,
                delay_s=config.shutdown_delay_s,
                grace_s=config.shutdown_grace_s,
                at_once=signals.at_once,
            )
            for task in running:
                task.cancel()
    finally:
        await server.stop(grace=STOP_GRACE_S)
        for group in groups:
            await group.close()
        await cleanup.aclose()
    log.info("stopped")


def _connect(config: RouterConfig, addresses: tuple[str, ...]) -> ExecutorGroup:
    return ExecutorGroup(
        find_addresses(addresses),
        config.model_name,
        form_timeout_s=config.form_timeout_s,
        deadline=StepDeadline(
            factor=config.step_deadline_factor,
            min_s=config.min_step_deadline_s,
            max_s=config.step_timeout_s,
        ),
        opener=config.executor_security.opener(addresses),
    )


def _build_engine(
    config: RouterConfig, engines: Engines, number: int, group: ExecutorGroup
) -> Engine:
    admission = Admission(
        max_sequences=config.max_waiting_sequences,
        max_tokens=config.max_waiting_tokens,
        priority_step_s=config.priority_step_s,
    )
    return Engine(
        number,
        group,
        admission,
        engines.listeners,
        pipeline_depth=config.pipeline_depth,
        min_chunk_tokens=config.min_chunk_tokens,
        retry_delay_s=config.retry_delay_s,
        on_end=engines.on_end,
        overdue_s=config.step_timeout_s,
        drafts=config.drafts,
    )


async def start_server(
    config: RouterConfig,
    engines: Engines,
    servicer: GenerationServicer,
    health: Health,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> grpc.aio.Server:
    """Opens the public port and returns its server.

    Args:
        interceptors: What sees every call that may be made, before its handler does.

    Raises:
        OSError: The address cannot be bound.
    """
    # Who may not call is refused before anything else is done.
    measures = engines.measures
    interceptors = [*config.interceptors(measures.add_refusal), *interceptors]
    server = grpc.aio.server(
        interceptors=[
            *interceptors,
            RequestReader(servicer.checks(), measures.add_refusal),
        ],
        options=server_options(config),
    )
    serving_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    health.add_to(server)
    services = _add_vllm_engine(config, server, engines, servicer, health)
    enable_reflection(server, *services)
    port = config.open_port(server, config.listen)
    await server.start()
    host = config.listen.rpartition(":")[0]
    log.info("listening", address=f"{host}:{port}")
    return server


def _serve_metrics(config: RouterConfig, engines: Engines, cleanup: AsyncExitStack) -> None:
    """Opens the port for metrics if there is to be one, and has it closed.

    Raises:
        OSError: The address cannot be bound.
    """
    if config.metrics_listen is not None:
        port = serve_metrics(config.metrics_listen, collector(engines, _version()))
        cleanup.push_async_callback(asyncio.to_thread, port.close)
        host = config.metrics_listen.rpartition(":")[0]
        log.info("metrics_listening", address=f"{host}:{port.number}")


async def _serve_health(config: RouterConfig, health: Health, cleanup: AsyncExitStack) -> None:
    """Opens the port for probes if there is to be one, and has it closed.

    Raises:
        OSError: The address cannot be bound.
    """
    if config.health_listen is not None:
        server, port = await serve_health(config.health_listen, health.add_to)
        cleanup.push_async_callback(server.stop, STOP_GRACE_S)
        host = config.health_listen.rpartition(":")[0]
        log.info("health_listening", address=f"{host}:{port}")


def _start_tracing(
    config: RouterConfig, cleanup: AsyncExitStack
) -> tuple[list[grpc.aio.ServerInterceptor], list[Observer]]:
    """Returns what traces need of the server and of the engines; nothing if there are to be none."""
    if config.otlp_endpoint is None:
        return [], []
    from router.telemetry.tracing import CarrierInterceptor, start_tracing

    tracing = start_tracing(config.otlp_endpoint)
    cleanup.push_async_callback(asyncio.to_thread, tracing.close)
    return [CarrierInterceptor()], [tracing]


def _add_vllm_engine(
    config: RouterConfig,
    server: grpc.aio.Server,
    engines: Engines,
    generation: GenerationServicer,
    health: Health,
) -> tuple[str, ...]:
    """Adds the service for gateways if it is wanted. Returns the names of what was added."""
    if config.vllm_engine == "off":
        return ()
    # Imported here: a router without it starts without the package that has its messages.
    from router.api import vllm_engine

    servicer = vllm_engine.VllmEngineServicer(
        generation, engines, config.tokenizer_file, _version(), is_ready=lambda: health.is_ready
    )
    vllm_engine.add_vllm_engine(server, servicer)
    return (vllm_engine.SERVICE,)


def server_options(config: RouterConfig) -> list[tuple[str, int]]:
    """Returns what gRPC is told about the public port."""
    options = [
        *SERVER_OPTIONS,
        # A second router at one address shall fail, rather than take half its calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", config.max_connection_streams),
    ]
    if config.max_connection_age_s:
        # gRPC spreads it by a tenth. No max_connection_age_grace_ms: past it, streams are killed.
        age_ms = max(1, round(config.max_connection_age_s * 1000))
        options.append(("grpc.max_connection_age_ms", age_ms))
    return options


async def _keep_ready(health: Health, engines: Engines) -> None:
    was_ready = False
    while True:
        if engines.is_ready != was_ready:
            was_ready = engines.is_ready
            health.set_ready(was_ready)
            log.info("readiness", is_ready=was_ready)
        await asyncio.sleep(POLL_S)


def _version() -> str:
    try:
        return version("lockstep")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was not installed
