"""``python -m executor``: settings to objects, then serve until told to stop.

The only place that constructs. PyTorch is imported when it is needed and not before, so that
``--help`` answers at once and OpenMP reads its settings in time.
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

from executor.config import DEVICES, DTYPES, ExecutorConfig, resolve_max_model_len
from protos.logs import configure_logging

if TYPE_CHECKING:
    import torch

    from executor.models.config import ModelConfig
    from executor.server import ExecutorServicer
    from executor.worker import Worker
    from protos.executor.v1 import executor_pb2 as pb

log = structlog.stdlib.get_logger(__name__)

BAD_CONFIGURATION = 2
DEFAULT_CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85  # of what is free after loading; the rest is for activations
PROGRESS_STEPS = 10  # log lines while a model loads


def build_worker(config: ExecutorConfig) -> "tuple[Worker, pb.DescribeResponse]":
    """Loads the model and builds everything around it.

    Returns:
        The worker, and what Describe says of it.

    Raises:
        CheckpointError: The model's files are not what the model needs.
        ValueError: The model and the settings do not fit one another.
    """
    import torch

    from executor.kv_pool import KVPool
    from executor.layers.attention import TorchAttention
    from executor.layers.dp_communicator import DpCommunicator
    from executor.models import load_model
    from executor.models.config import ModelConfig
    from executor.parallel import ExpertParallel, join_group
    from executor.runners.eager import EagerRunner
    from executor.sampler import Sampler
    from executor.step_columns import StepLimits
    from executor.worker import Worker

    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model_config = ModelConfig.from_dir(config.model)
    device = _device(config)
    dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    budget = config.budget
    max_model_len = resolve_max_model_len(
        config.max_model_len, model_config.max_position_embeddings
    )
    communicator = DpCommunicator(
        dp_rank=config.dp_rank,
        dp_size=config.dp_size,
        max_tokens_per_rank=budget.max_num_batched_tokens,
        hidden_size=model_config.hidden_size,
        dtype=dtype,
        top_k=model_config.num_experts_per_tok,
        device=device,
    )
    model = load_model(
        config.model,
        model_config,
        dtype=dtype,
        device=device,
        ep=ExpertParallel(config.dp_rank, config.world_size),
        communicator=communicator,
        on_progress=_log_progress(),
    )
    shape = model_config.kv_shape(config.block_size, dtype)
    max_blocks_per_row = -(-max_model_len // config.block_size)
    kv_pool = KVPool(
        shape,
        num_blocks=config.num_kv_blocks or _num_kv_blocks(config, device, shape.bytes_per_block),
        num_rows=config.num_rows,
        max_blocks_per_row=max_blocks_per_row,
        device=device,
    )
    attention = TorchAttention(
        model_config.num_attention_heads,
        model_config.num_key_value_heads,
        model_config.head_dim,
        dtype=dtype,
    )
    runner = EagerRunner(
        plan=lambda batch: attention.init_forward_metadata_out_graph(batch, kv_pool),
        forward=lambda batch: model.forward(batch, attention),
        compute_logits=model.compute_logits,
    )
    limits = StepLimits(
        dp_rank=config.dp_rank,
        dp_size=config.dp_size,
        budget=budget,
        num_rows=kv_pool.num_rows,
        num_kv_blocks=kv_pool.num_blocks,
        block_size=config.block_size,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
    )
    worker = Worker(
        limits=limits,
        kv_pool=kv_pool,
        sampler=Sampler(kv_pool.num_rows, model_config.vocab_size, device),
        runner=runner,
        communicator=communicator,
        form_group=None
        if config.world_size == 1
        else lambda epoch, host, port: join_group(
            host,
            port,
            epoch=epoch,
            rank=config.dp_rank,
            world_size=config.world_size,
            bind_host=config.peer_host,
            timeout_s=config.peer_timeout_s,
        ),
        device=device,
    )
    log.info(
        "loaded",
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        num_kv_blocks=kv_pool.num_blocks,
        kv_cache_bytes=kv_pool.num_blocks * kv_pool.bytes_per_block,
        **asdict(budget),
    )
    return worker, _describe(config, model_config, dtype, max_model_len, kv_pool.num_blocks)


def _describe(
    config: ExecutorConfig,
    model_config: "ModelConfig",
    dtype: "torch.dtype",
    max_model_len: int,
    num_kv_blocks: int,
) -> "pb.DescribeResponse":
    from executor.fingerprint import fingerprint
    from protos.executor.v1 import executor_pb2 as pb

    budget = config.budget
    model = pb.ModelInfo(
        architecture=model_config.architecture,
        fingerprint=fingerprint(config.model),
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        block_size=config.block_size,
    )
    agreement = {
        "model_fingerprint": model.fingerprint,
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "max_model_len": max_model_len,
        "dp_size": config.dp_size,
        "attn_tp_size": config.attn_tp_size,
        "ep_size": config.world_size,
        **asdict(budget),
    }
    return pb.DescribeResponse(
        coordinates=pb.Coordinates(
            dp_rank=config.dp_rank,
            dp_size=config.dp_size,
            attn_tp_rank=0,
            attn_tp_size=config.attn_tp_size,
            ep_rank=config.dp_rank,
            ep_size=config.world_size,
        ),
        model=model,
        num_kv_blocks=num_kv_blocks,
        num_rows=config.num_rows,
        budget=pb.TokenBudget(**asdict(budget)),
        graph_sizes=pb.GraphSizes(),
        agreement={name: str(value) for name, value in agreement.items()},
    )


def _device(config: ExecutorConfig) -> "torch.device":
    import torch

    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ValueError("device=cuda: PyTorch finds no CUDA device here; need cpu or auto")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _num_kv_blocks(config: ExecutorConfig, device: "torch.device", bytes_per_block: int) -> int:
    import torch

    kv_bytes = config.kv_cache_bytes
    if kv_bytes is None and device.type == "cuda":
        kv_bytes = int(torch.cuda.mem_get_info(device)[0] * CUDA_KV_SHARE)
    kv_bytes = kv_bytes or DEFAULT_CPU_KV_BYTES
    num_blocks = kv_bytes // bytes_per_block
    if num_blocks < 2:
        raise ValueError(
            f"kv_cache_bytes={kv_bytes}: a block takes {bytes_per_block} bytes; need the scratch "
            f"block and one more, {2 * bytes_per_block} bytes"
        )
    return num_blocks


def _log_progress() -> Callable[[int, int], None]:
    def on_progress(num_loaded: int, num_tensors: int) -> None:
        tenth = num_loaded * PROGRESS_STEPS // num_tensors
        if tenth > (num_loaded - 1) * PROGRESS_STEPS // num_tensors:
            log.info("loading", tensors=num_loaded, of=num_tensors)

    return on_progress


async def serve(config: ExecutorConfig) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code."""
    from executor.parallel import open_store
    from executor.server import ExecutorServicer

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    host = config.peer_host or "127.0.0.1"
    servicer = ExecutorServicer(
        is_first=config.dp_rank == 0,
        store_host=host,
        open_store=lambda: open_store(host, timeout_s=config.peer_timeout_s),
    )
    server, port = await servicer.start(config.listen)
    log.info("listening", address=f"{config.host}:{port}")
    exit_code = await _load(servicer, config, stopped)
    if exit_code is None:
        log.info("ready_to_join")
        await stopped.wait()
        exit_code = 0
    log.info("stopping")
    await _stop(servicer, server, config.stop_timeout_s)
    return exit_code


async def _load(
    servicer: "ExecutorServicer", config: ExecutorConfig, stopped: asyncio.Event
) -> int | None:
    """Loads the model. Returns an exit code if the process should end instead of serve."""
    loading = asyncio.create_task(servicer.load(lambda: build_worker(config)))
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


async def _stop(servicer: "ExecutorServicer", server: Any, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(servicer.stop(), timeout_s)
    except TimeoutError:
        log.warning("compute_thread_busy", waited_s=timeout_s)
    await server.stop(grace=1.0)


def _option(field: str, help_text: str, type_: Any = str) -> Callable[[Any], Any]:
    """Declares the flag of a field of ExecutorConfig, with the field's default."""
    default = ExecutorConfig.__dataclass_fields__[field].default
    return click.option(
        "--" + field.replace("_", "-"),
        help=help_text,
        type=type_,
        required=default is MISSING,
        default=None if default is MISSING else default,
        show_default=default is not None,
        show_envvar=True,
    )


@click.command(context_settings={"auto_envvar_prefix": "LOCKSTEP_EXECUTOR"})
@_option("model", "Folder of a Hugging Face checkpoint.", Path)
@_option("listen", "host:port to listen on; port 0 takes a free one.")
@_option("advertised_host", "Host at which the group's other executors reach this one.")
@_option("dp_rank", "This executor's data-parallel rank.", int)
@_option("dp_size", "Data-parallel ranks of the group.", int)
@_option("attn_tp_size", "Executors per DP rank; 1 today.", int)
@_option("ep_size", "Executors that share the experts.  [default: all]", int)
@_option("dtype", "Type of weights and KV.", click.Choice(DTYPES))
@_option("device", "Where to run.", click.Choice(DEVICES))
@_option("block_size", "Tokens per KV block.", int)
@_option("max_num_seqs", "Sequences in one step.", int)
@_option("max_num_batched_tokens", "Tokens in one step.", int)
@_option("max_num_logits", "Rows of logits in one step.", int)
@_option("max_model_len", "Tokens of one sequence.  [default: the checkpoint's]", int)
@_option("num_kv_blocks", "Blocks of the KV pool, scratch block included.", int)
@_option("kv_cache_bytes", "Size of the KV pool.  [default: 1 GiB on the CPU]", int)
@_option("num_threads", "Threads of one CPU operator.", int)
@_option("peer_timeout_s", "Longest wait for another executor.", float)
@_option("stop_timeout_s", "Longest wait for the step in flight.", float)
@click.option("--log-level", default="info", show_default=True, show_envvar=True)
def main(log_level: str, **settings: Any) -> None:
    """Runs one executor of a Lockstep group: one model on one accelerator, driven by a router."""
    configure_logging(log_level)
    # A waiting OpenMP thread that spins starves the other processes of a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        config = ExecutorConfig(**settings)
    except ValueError as error:
        log.error("cannot_start", problem=str(error))
        sys.exit(BAD_CONFIGURATION)
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


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    main()
