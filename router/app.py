"""Application: builds every object of the router, wires them, and runs them until it is stopped.

    SIGTERM ──── delay ────▶ ──────── grace ────────▶ ─── flush ──▶ the server stops
       NOT_SERVING,            new requests: UNAVAILABLE,  what is left ends with UNAVAILABLE,
       requests still taken    running ones finish         behind the tokens that it has

The delay is for load balancers, which take a moment to see NOT_SERVING. UNAVAILABLE is what the
published retry policy sends again, elsewhere. A second SIGTERM or SIGINT ends both waits at once.

Where another router stands by for all groups, there is nothing to wait for but steps in flight: it gets them
at once, and live requests end with UNAVAILABLE to go on there.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

import grpc
import structlog

from protos import __version__
from protos.serving.v1 import serving_pb2_grpc
from protos.telemetry.scrapes import NO_PAGES, Page
from protos.transport.admission import Refusals
from protos.transport.health import SERVICE_NAME
from protos.transport.interceptors import RequestReader
from protos.transport.limits import MAX_OPTION
from protos.transport.reflection import enable_reflection
from router.api import constraints
from router.api.chat import ChatRenderer, read_templates
from router.api.generate import UNSHARED, GenerationServicer
from router.api.health import SERVICE, Health
from router.api.text import Tokenizer
from router.config import RouterConfig
from router.engine.engine import Engine
from router.engine.engines import Engines, Observer
from router.executors.attendance import new_router_id
from router.executors.discovery import find_addresses, strength_of
from router.executors.group import ExecutorGroup
from router.requests.request import Listeners
from router.requests.waiting_queue import WaitingQueue
from router.telemetry.prometheus import collector
from router.telemetry.request_log import RequestLog
from router.telemetry.status_page import status_pages

log = structlog.stdlib.get_logger(__name__)

DRAIN_POLL_S = 0.02
FLUSH_S = 1.0  # for the last messages of calls whose requests were ended
STOP_GRACE_S = 0.5  # for calls that have no request to finish, such as a Watch


async def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT, and then until the running calls have ended.

    Raises:
        OSError: The address to listen at is taken.
        ValueError: The tokenizer or the chat template is none.
    """
    signals = StopSignals()
    signals.listen()
    cleanup = AsyncExitStack()
    cleanup.callback(constraints.end_worker)
    tokenizer = _open_tokenizer(config, cleanup)
    interceptors, observers = _start_tracing(config, cleanup)
    observers = [RequestLog(lambda group: by_group[group].ids()), *observers]
    router_id = new_router_id()
    engines = Engines(
        Listeners(config.max_calls),
        failover_after_s=config.failover_after_s,
        observers=observers,
        router_id=router_id.hex(),
    )
    groups = [_connect(config, addresses, router_id) for addresses in config.groups]
    by_group = [
        _build_engine(config, engines, number, group) for number, group in enumerate(groups)
    ]
    engines.drive(by_group)
    engines.on_standby = partial(warm_up, engines, tokenizer)
    health = Health()
    servicer = GenerationServicer(engines, tokenizer, __version__, config)
    refusals = Refusals(engines.measures.add_refusal)
    metrics_port = config.serve_metrics(
        collector(engines, __version__), engines.measures.add_refusal, pages_of(config, engines)
    )
    if metrics_port is not None:
        cleanup.push_async_callback(asyncio.to_thread, metrics_port.close)
    health_server = await config.serve_health(health.add_to, refusals)
    if health_server is not None:
        cleanup.push_async_callback(health_server.stop, STOP_GRACE_S)
    server = await start_server(config, engines, servicer, health, refusals, interceptors)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(engine.run()) for engine in by_group]
            running.append(tasks.create_task(engines.keep_history()))
            engines.watch_readiness(partial(_publish_readiness, health))
            await signals.asked.wait()
            engines.watch_readiness(None)  # from here on, readiness is the drain's
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


def warm_up(engines: Engines, tokenizer: Tokenizer | None) -> None:
    """Starts processes that requests may need: when this router takes over, all of those come at once."""
    if engines.model is not None and engines.model.supports_constraints:
        constraints.warm_up()
    if tokenizer is not None and tokenizer.chat is not None:
        tokenizer.chat.warm_up()


def pages_of(config: RouterConfig, engines: Engines) -> Mapping[str, Page]:
    """Returns the pages of the port for metrics beside the metrics, by path."""
    if config.status_page == "off":
        return NO_PAGES
    return status_pages(engines, __version__, tells_operators=config.tells_scrapes)


def _open_tokenizer(config: RouterConfig, cleanup: AsyncExitStack) -> Tokenizer | None:
    file = config.tokenizer_file
    if file is None:
        return None
    templates = read_templates(file.parent, config.chat_template, config.chat_template_timeout_s)
    if templates is None:
        return Tokenizer(file)
    chat = ChatRenderer(templates)
    cleanup.push_async_callback(chat.close)
    return Tokenizer(file, chat)


def _connect(config: RouterConfig, addresses: tuple[str, ...], router_id: bytes) -> ExecutorGroup:
    opener = config.opener(addresses)
    strength = strength_of(addresses)
    return ExecutorGroup(find_addresses(addresses), config, opener, strength, router_id)


def _build_engine(
    config: RouterConfig, engines: Engines, number: int, group: ExecutorGroup
) -> Engine:
    waiting = WaitingQueue(
        max_sequences=config.max_waiting_sequences,
        max_tokens=config.max_waiting_tokens,
        max_resumed_tokens=config.max_resumed_tokens,
        priority_step_s=config.priority_step_s,
        callers=config,
    )
    return Engine(
        number,
        group,
        waiting,
        engines.listeners,
        config,
        on_end=engines.on_end,
        logs_blocks=config.vllm_engine == "on",
    )


async def start_server(
    config: RouterConfig,
    engines: Engines,
    servicer: GenerationServicer,
    health: Health,
    refusals: Refusals,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> grpc.aio.Server:
    """Opens the public port and returns its server.

    Args:
        refusals: Where refused calls are counted.
        interceptors: Of every call that is not refused, before its handler runs.

    Raises:
        OSError: The address cannot be bound.
    """
    server = grpc.aio.server(
        interceptors=[
            *config.interceptors(refusals),  # first: a caller that may not call gets nothing done
            *interceptors,
            RequestReader(config, refusals, checks=servicer.checks(), unshared=UNSHARED),
        ],
        options=server_options(config),
    )
    serving_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    health.add_to(server)
    services = _add_vllm_engine(config, server, engines, servicer, health)
    enable_reflection(server, (SERVICE, SERVICE_NAME, *services))
    await config.start(server)
    return server


def _start_tracing(
    config: RouterConfig, cleanup: AsyncExitStack
) -> tuple[list[grpc.aio.ServerInterceptor], list[Observer]]:
    """Returns the interceptors and observers that make traces, if there are to be any."""
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
        generation,
        engines,
        config.tokenizer_file,
        __version__,
        is_ready=lambda: health.is_ready,
        settings=config,
    )
    vllm_engine.add_vllm_engine(server, servicer)
    health.add_name(vllm_engine.SERVICE)
    return (vllm_engine.SERVICE,)


def server_options(config: RouterConfig) -> list[tuple[str, int]]:
    """Returns gRPC's options for the public port."""
    options = [
        *config.server_options(),
        ("grpc.keepalive_time_ms", 60_000),
        # A stream that nobody reads yet holds 64 KiB. With the probe it would hold what comes within
        # a round trip, which callers can make a lot.
        ("grpc.http2.bdp_probe", 0),
    ]
    if config.max_connection_age_s:
        # gRPC spreads it by a tenth. No max_connection_age_grace_ms: past it, streams are killed.
        age_ms = min(max(1, round(config.max_connection_age_s * 1000)), MAX_OPTION)
        options.append(("grpc.max_connection_age_ms", age_ms))
    return options


class StopSignals:
    """Counts SIGTERM and SIGINT.

    Attributes:
        asked: Set by the first.
        at_once: Set by the second.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self) -> None:
        """Takes the signals of this process, from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.receive)

    def receive(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()


async def drain(
    engines: Engines, health: Health, *, delay_s: float, grace_s: float, at_once: asyncio.Event
) -> None:
    """Returns when no call is open, or the open calls had their grace.

    Args:
        delay_s: How long new requests are still taken, if no other router takes the groups.
        grace_s: How long running ones may then go on.
        at_once: Set to wait no longer.
    """
    health.set_ready(False)
    engines.begin_drain(delay_s=delay_s, grace_s=grace_s)
    loop = asyncio.get_running_loop()
    end = loop.time() + grace_s  # the time to leave groups is of the grace, too
    if not await _hand_over(engines, grace_s, at_once):
        await _wait(lambda: False, delay_s, at_once)
        end += delay_s
    engines.shut_down()
    # Calls, not requests: one whose client reads slowly still has tokens to deliver.
    await _wait(lambda: not engines.listeners.num_open, end - loop.time(), at_once)
    num_cut = engines.num_live
    engines.cancel_all()
    await _wait(lambda: not engines.listeners.num_open, FLUSH_S, asyncio.Event())
    log.info("drained", cut_requests=num_cut, cut_calls=engines.listeners.num_open)


async def _hand_over(engines: Engines, timeout_s: float, at_once: asyncio.Event) -> bool:
    """Leaves the groups to other routers, if they would take them. Returns whether it has."""
    leaving = asyncio.create_task(engines.hand_over())
    asked = asyncio.create_task(at_once.wait())
    await asyncio.wait((leaving, asked), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    is_over = leaving.done()
    leaving.cancel()
    return is_over and leaving.result()


async def _wait(is_done: Callable[[], bool], timeout_s: float, at_once: asyncio.Event) -> None:
    """Returns when it is done, the time is over, or `at_once` is set."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not (is_done() or at_once.is_set()) and (left_s := deadline - loop.time()) > 0:
        await asyncio.sleep(min(left_s, DRAIN_POLL_S))


def _publish_readiness(health: Health, is_ready: bool) -> None:
    health.set_ready(is_ready)
    log.info("readiness", is_ready=is_ready)
