"""``python -m executor``: settings to objects, then serve until told to stop.

PyTorch is imported when it is needed and not before, so that ``--help`` answers at once and OpenMP
reads its settings in time.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog

from executor.config import (
    DRAFT_SAMPLING,
    DTYPES,
    MOE_A2A,
    MOE_A2A_EXTEND,
    MOE_RUNNERS,
    ON_OFF,
    PREFILL_GRAPHS,
    ExecutorConfig,
)
from executor.metrics import Measures, Numbers, collector
from protos.telemetry.logs import configure_logging
from protos.telemetry.metrics import serve_metrics
from protos.transport.port import HELP as SECURITY_HELP
from protos.transport.port import PATHS, PLAINTEXT, is_loopback, serve_health

if TYPE_CHECKING:
    from executor.server import ExecutorServicer

log = structlog.stdlib.get_logger(__name__)

BAD_CONFIGURATION = 2
STUCK = 3
ENVIRONMENT = "LOCKSTEP_EXECUTOR"
FAREWELL_S = 1.0  # for a router to ask why its stream ended, which gRPC may not have told it
STOP_GRACE_S = 0.5  # for calls that no step holds up, such as a Watch of the health service


async def serve(config: ExecutorConfig) -> int:
    """Serves until SIGTERM or SIGINT; a second one ends it at once. Returns the exit code."""
    from executor.parallel.rendezvous import open_store
    from executor.server import ExecutorServicer

    stopped = asyncio.Event()
    at_once = asyncio.Event()

    def stop() -> None:
        (at_once if stopped.is_set() else stopped).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    measures = Measures()
    host = config.peer_host or "127.0.0.1"
    servicer = ExecutorServicer(
        is_first=config.topology.world_rank == 0,
        store_host=host,
        open_store=lambda: open_store(
            host, bind_host=config.bind_host, timeout_s=config.peer_timeout_s
        ),
        measures=measures,
        stuck_after_s=config.peer_timeout_s,
    )
    _serve_metrics(config, servicer, measures)
    health_server = await _serve_health(config, servicer)
    server, port = await servicer.start(config.listen, config)
    log.info("listening", address=f"{config.host}:{port}")
    exit_code = await _load(servicer, config, measures, stopped)
    if exit_code is None:
        log.info("ready_to_join")
        exit_code = await _serve_until(stopped, servicer.stuck)
    log.info("stopping")
    if exit_code == STUCK:
        at_once.set()  # its step is not worth to be waited for
    await _stop(servicer, server, config.stop_timeout_s, at_once)
    if health_server is not None:
        await health_server.stop(STOP_GRACE_S)
    return exit_code


async def _serve_until(stopped: asyncio.Event, stuck: asyncio.Event) -> int:
    """Returns when it is told to stop, or cannot go on: the exit code."""
    ends = [asyncio.create_task(event.wait()) for event in (stopped, stuck)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return STUCK if stuck.is_set() else 0


def _serve_metrics(
    config: ExecutorConfig, servicer: "ExecutorServicer", measures: Measures
) -> None:
    """Opens the port for metrics if there is to be one; it ends with the process.

    Raises:
        OSError: The address cannot be bound.
    """
    if config.metrics_listen is None:
        return
    from executor.build.devices import memory_in_use

    def numbers() -> Numbers:
        return Numbers(
            measures,
            config.dp_rank,
            config.attn_tp_rank,
            servicer.num_kv_blocks,
            servicer.epoch,
            memory_in_use(),
        )

    port = serve_metrics(config.metrics_listen, collector(numbers))
    host = config.metrics_listen.rpartition(":")[0]
    log.info("metrics_listening", address=f"{host}:{port.number}")


async def _serve_health(config: ExecutorConfig, servicer: "ExecutorServicer") -> Any | None:
    """Opens the port for probes if there is to be one; returns its server.

    Raises:
        OSError: The address cannot be bound.
    """
    if config.health_listen is None:
        return None
    server, port = await serve_health(config.health_listen, servicer.add_health_to)
    host = config.health_listen.rpartition(":")[0]
    log.info("health_listening", address=f"{host}:{port}")
    return server


async def _load(
    servicer: "ExecutorServicer",
    config: ExecutorConfig,
    measures: Measures,
    stopped: asyncio.Event,
) -> int | None:
    """Loads the model. Returns an exit code if the process should end instead of serve."""
    from executor.build.executor import build_worker

    loading = asyncio.create_task(servicer.load(lambda: build_worker(config, measures)))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        return 0
    stopping.cancel()
    try:
        loading.result()
    except ValueError as error:
        log.error("cannot_start", problem=str(error))
        return BAD_CONFIGURATION
    return None


async def _stop(
    servicer: "ExecutorServicer", server: Any, timeout_s: float, at_once: asyncio.Event
) -> None:
    """Lets the step in flight finish, for so long or until a second signal."""
    is_driven = servicer.is_driven
    finishing = asyncio.create_task(servicer.stop())
    hurrying = asyncio.create_task(at_once.wait())
    await asyncio.wait(
        {finishing, hurrying}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
    )
    if finishing.done() and is_driven:
        await asyncio.wait({hurrying}, timeout=FAREWELL_S)
    hurrying.cancel()
    if finishing.done():
        finishing.result()
    else:
        finishing.cancel()
        log.warning(
            "step_not_finished",
            epoch=servicer.epoch,
            timeout_s=timeout_s,
            told_twice=at_once.is_set(),
        )
    await server.stop(grace=STOP_GRACE_S)
    log.info("stopped")


def _option(
    field: str, help_text: str, type_: Any = str, *, variable: str | None = None
) -> Callable[[Any], Any]:
    """Declares the flag of a field of ExecutorConfig, with the field's default.

    Args:
        field: Names the flag and, behind LOCKSTEP_EXECUTOR_, its environment variable.
        help_text: What it sets.
        type_: What its text is read as.
        variable: Another environment variable that sets it, where the first does not.
    """
    default = ExecutorConfig.__dataclass_fields__[field].default
    return click.option(
        "--" + field.replace("_", "-"),
        help=help_text,
        type=type_,
        envvar=variable and [f"{ENVIRONMENT}_{field.upper()}", variable],
        required=default is MISSING,
        default=None if default is MISSING else default,
        show_default=default is not None,
        show_envvar=True,
    )


def _security_options(command: Any) -> Any:
    """Adds the flags of PortSecurity's fields."""
    for field, help_text in reversed(SECURITY_HELP.items()):
        type_ = Path if field in PATHS else click.Choice(PLAINTEXT) if field == "plaintext" else str
        command = _option(field, help_text, type_)(command)
    return command


def _sizes(text: str) -> tuple[int, ...]:
    """Reads a list of sizes: "1,2,4"."""
    return tuple(int(size) for size in text.split(","))


@click.command(context_settings={"auto_envvar_prefix": ENVIRONMENT})
@_option("model", "Folder of a Hugging Face checkpoint.", Path)
@_option("listen", "host:port to listen on; port 0 takes a free one.")
@_option("advertised_host", "Host at which the group's other executors reach this one.")
@_option("dp_rank", "This executor's data-parallel rank.", int)
@_option("dp_size", "Data-parallel ranks of the group.", int)
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    show_envvar=True,
    help="Of this executor's node; --dp-rank then counts within the node.",
)
@click.option(
    "--dp-ranks-per-node",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    show_envvar=True,
    help="What each node before this one adds to --dp-rank.",
)
@_option("attn_tp_rank", "This executor among those of its DP rank, from 0.", int)
@_option("attn_tp_size", "Executors per DP rank.", int)
@_option("ep_size", "Parts that the experts fall into.  [default: one per executor]", int)
@_option("moe_dense_tp_size", "1: dense MLPs whole everywhere.  [default: split over all]", int)
@_option("dtype", "Type of weights and KV.", click.Choice(DTYPES))
@_option("device", "Where to run: auto, cpu, cuda or cuda:N.")
@_option("block_size", "Tokens per KV block.", int)
@_option("max_num_seqs", "Sequences in one step.", int)
@_option("max_num_batched_tokens", "Tokens in one step.", int)
@_option("max_num_logits", "Rows of logits in one step.", int)
@_option("max_model_len", "Tokens of one sequence.  [default: the checkpoint's]", int)
@_option("num_kv_blocks", "Blocks of the KV pool, scratch block included.", int)
@_option("kv_cache_bytes", "Size of the KV pool.  [default: 1 GiB on the CPU]", int)
@_option("decode_graphs", "Replay graphs in decode steps.", click.Choice(ON_OFF))
@_option("decode_graph_sizes", "Sequences to capture, such as 1,2,4,8.", _sizes)
@_option("prefill_graphs", "Replay graphs in prefill steps.", click.Choice(PREFILL_GRAPHS))
@_option("prefill_graph_sizes", "Tokens to capture, such as 64,256,1024.", _sizes)
@_option("moe_a2a", "How tokens reach experts in decode steps.", click.Choice(MOE_A2A))
@_option("moe_a2a_extend", "The same in the other steps.", click.Choice(MOE_A2A_EXTEND))
@_option(
    "max_dispatch_tokens_per_rank",
    "Tokens that an EP rank sends at most.  [default: what a step may bring, at least 4096]",
    int,
    variable="LOCKSTEP_MAX_DISPATCH_TOKENS_PER_RANK",
)
@_option("draft_model", "Folder of a draft model.  [default: none]", Path)
@_option("num_draft_steps", "Drafts one after another.  [default: 3]", int)
@_option("draft_topk", "Drafts that each step goes on from; 1 is a chain.", int)
@_option("num_draft_tokens", "Tokens verified at once.  [default: steps * topk + 1]", int)
@_option("draft_sampling", "How drafts are accepted.", click.Choice(DRAFT_SAMPLING))
@_option("moe_runner", "What runs the experts on CUDA.", click.Choice(MOE_RUNNERS))
@_option("flashinfer_pdl", "Let kernels start early on CUDA.", click.Choice(ON_OFF))
@_option("num_threads", "Threads of one CPU operator.", int)
@_option("peer_timeout_s", "Longest wait for another executor.", float)
@_option("stop_timeout_s", "Longest wait for the step in flight.", float)
@_option("metrics_listen", "host:port for Prometheus to scrape.  [default: nowhere]")
@_security_options
@click.option("--log-level", default="info", show_default=True, show_envvar=True)
def main(log_level: str, node_rank: int, dp_ranks_per_node: int, **settings: Any) -> None:
    """Runs one executor of a Lockstep group: one model on one accelerator, driven by a router."""
    configure_logging(log_level)
    # A waiting OpenMP thread that spins starves the other processes of a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        settings["dp_rank"] += _first_dp_rank(node_rank, dp_ranks_per_node, settings["dp_rank"])
        config = ExecutorConfig(**settings)
    except ValueError as error:
        log.error("cannot_start", problem=str(error))
        sys.exit(BAD_CONFIGURATION)
    _keep_in(config.peer_host)
    log.info("configured", **{name: _plain(value) for name, value in asdict(config).items()})

    import uvloop

    try:
        exit_code = uvloop.run(serve(config))
    except OSError as error:
        log.error("cannot_start", problem=str(error))
        exit_code = BAD_CONFIGURATION
    sys.stderr.flush()
    # Not sys.exit, which would wait for a compute thread that loads or waits for lost peers.
    os._exit(exit_code)


def _first_dp_rank(node_rank: int, dp_ranks_per_node: int, rank_in_node: int) -> int:
    """Returns the first DP rank of a node.

    A manifest can give each pod its number and each container its own, but cannot calculate.

    Raises:
        ValueError: The node has fewer ranks than that.
    """
    if node_rank and not dp_ranks_per_node:
        raise ValueError(f"node_rank={node_rank}: need dp_ranks_per_node, which is not set")
    if dp_ranks_per_node and rank_in_node >= dp_ranks_per_node:
        raise ValueError(
            f"dp_rank={rank_in_node} with dp_ranks_per_node={dp_ranks_per_node}: dp_rank counts "
            f"within the node, from 0 to {dp_ranks_per_node - 1}"
        )
    return node_rank * dp_ranks_per_node


def _keep_in(peer_host: str | None) -> None:
    """Has NCCL listen on loopback where all peers are there, unless the operator says otherwise.

    Left to itself, it takes an address that other machines reach, and asks nobody who they are.
    """
    if peer_host is None or is_loopback(f"{peer_host}:0"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    main()
