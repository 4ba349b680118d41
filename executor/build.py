"""Settings to objects: the only place in the executor that constructs.

checkpoint ─▶ model ─┐
settings ─▶ KV pool ─┼─▶ forward pass ─▶ runners, their registries and backends ─▶ worker
            attention┘
"""

from collections.abc import Callable
from dataclasses import asdict

import structlog
import torch

from executor.config import ExecutorConfig, resolve_max_model_len
from executor.devices import open_device
from executor.fingerprint import fingerprint
from executor.graph.backend import RunnerBackend
from executor.graph.capture_sizes import (
    GraphSizes,
    capture_alignment,
    decode_capture_sizes,
    prefill_capture_sizes,
)
from executor.graph.cuda_graph_buffer_registry import (
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from executor.graph.input_buffers import fresh_input_buffer_pool
from executor.kv_pool import KVPool
from executor.layers.dp_communicator import DpCommunicator
from executor.models import load_model
from executor.models.config import ModelConfig
from executor.parallel import RankGroup, join_group
from executor.runners import GraphRunner
from executor.runners.by_layout import RunnerByLayout
from executor.runners.decode import DecodeRunner
from executor.runners.eager import EagerRunner
from executor.runners.forward_pass import ForwardPass
from executor.runners.prefill_breakable import BreakablePrefillRunner
from executor.runners.prefill_piecewise import PiecewisePrefillRunner
from executor.sampler import Sampler
from executor.step_columns import StepLimits
from executor.worker import Worker
from protos.executor.v1 import executor_pb2 as pb

log = structlog.stdlib.get_logger(__name__)

DEFAULT_CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85  # of what is free after loading; the rest is for activations and graphs
PROGRESS_STEPS = 10  # log lines while a model loads
PADDED_SEQ_LEN = 1  # a padded sequence attends to one key of the scratch block


def build_worker(config: ExecutorConfig) -> tuple[Worker, pb.DescribeResponse]:
    """Loads the model and builds everything around it.

    Returns:
        The worker, and what Describe says of it.

    Raises:
        CheckpointError: The model's files are not what the model needs.
        CaptureError: A graph does not fit in memory.
        ValueError: The model and the settings do not fit one another.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model_config = ModelConfig.from_dir(config.model)
    dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    device = open_device(config, dtype)
    max_model_len = resolve_max_model_len(
        config.max_model_len, model_config.max_position_embeddings
    )
    communicator = DpCommunicator(
        topology=config.topology,
        max_tokens_per_rank=config.budget.max_num_batched_tokens,
        hidden_size=model_config.hidden_size,
        dtype=dtype,
        top_k=model_config.num_experts_per_tok,
        device=device.torch_device,
    )
    model = load_model(
        config.model,
        model_config,
        dtype=dtype,
        device=device.torch_device,
        topology=config.topology,
        communicator=communicator,
        kernels=device.kernels(model_config, dtype),
        on_progress=_log_progress(),
    )
    shape = model_config.kv_shape(config.block_size, dtype)
    kv_pool = KVPool(
        shape,
        num_blocks=config.num_kv_blocks
        or _num_kv_blocks(config, device.torch_device, shape.bytes_per_block),
        num_rows=config.num_rows,
        max_blocks_per_row=-(-max_model_len // config.block_size),
        device=device.torch_device,
    )
    graph_sizes = plan_graph_sizes(config, max_model_len)
    forward_pass = ForwardPass(
        stages=model.stages,
        compute_logits=model.compute_logits,
        attention=device.attention(model_config, kv_pool, graph_sizes.decode),
        kv_pool=kv_pool,
        num_heads=model_config.num_attention_heads,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        dtype=dtype,
        topology=config.topology,
    )
    limits = StepLimits(
        topology=config.topology,
        budget=config.budget,
        num_rows=kv_pool.num_rows,
        num_kv_blocks=kv_pool.num_blocks,
        block_size=config.block_size,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        graph_sizes=graph_sizes,
    )
    with fresh_input_buffer_pool():
        runner = build_runners(config, forward_pass, graph_sizes, device.new_backend)
    if config.world_size == 1:  # else at the first Join: captured passes make collective calls
        with torch.inference_mode():
            runner.capture()
    worker = Worker(
        limits=limits,
        kv_pool=kv_pool,
        sampler=Sampler(
            kv_pool.num_rows, model_config.vocab_size, device.torch_device, filters=device.filters
        ),
        runner=runner,
        communicator=communicator,
        form_group=_form_group(config) if config.world_size > 1 else None,
        device=device.torch_device,
    )
    log.info(
        "loaded",
        device=str(device.torch_device),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        num_kv_blocks=kv_pool.num_blocks,
        kv_cache_bytes=kv_pool.num_blocks * kv_pool.bytes_per_block,
        decode_graphs=len(graph_sizes.decode),
        prefill_graphs=len(graph_sizes.extend),
        **asdict(config.budget),
    )
    return worker, _describe(config, model_config, limits, dtype)


def plan_graph_sizes(config: ExecutorConfig, max_model_len: int) -> GraphSizes:
    """Returns what to capture, which is also what Describe tells the router to plan with.

    Raises:
        ValueError: The operator listed sizes of which none is left.
    """
    alignment = capture_alignment(config.attn_tp_size)
    decode: tuple[int, ...] = ()
    extend: tuple[int, ...] = ()
    if config.decode_graphs == "on":
        decode = decode_capture_sizes(
            config.max_num_seqs, alignment=alignment, listed=config.decode_graph_sizes
        )
    if config.prefill_graphs != "off":
        most = min(config.max_num_batched_tokens, config.num_rows * max_model_len)
        extend = prefill_capture_sizes(most, alignment=alignment, listed=config.prefill_graph_sizes)
        if extend[-1] > most:
            raise ValueError(
                f"prefill_graph_sizes has {extend[-1]}: {config.num_rows} sequences of "
                f"{max_model_len} tokens make {most} at most, so no step is larger"
            )
    return GraphSizes(decode, extend)


def build_runners(
    config: ExecutorConfig,
    forward_pass: ForwardPass,
    graph_sizes: GraphSizes,
    new_backend: Callable[[], RunnerBackend],
) -> RunnerByLayout:
    """Builds the runners that the settings ask for. Nothing is captured yet.

    Args:
        config: The settings.
        forward_pass: What to run.
        graph_sizes: From ``plan_graph_sizes``.
        new_backend: Makes the backend of one runner.
    """
    budget, device = config.budget, forward_pass.kv_pool.device
    decode_backend, prefill_backend = new_backend(), new_backend()
    decode = prefill = None
    if graph_sizes.decode:
        decode = DecodeRunner(
            forward_pass,
            build_decode_registry(
                device=device,
                max_bs=graph_sizes.decode[-1],
                max_num_token=graph_sizes.decode[-1],
                seq_len_fill_value=PADDED_SEQ_LEN,
                cache_loc_dtype=torch.int64,
                enable_num_token_non_padded=True,
                register_global_num_tokens=False,
            ),
            decode_backend,
            graph_sizes.decode,
        )
    if graph_sizes.extend:
        prefill = _prefill_runner(config, forward_pass, graph_sizes.extend, prefill_backend)
    eager = EagerRunner(
        forward_pass,
        build_eager_registry(
            device=device,
            max_bs=budget.max_num_seqs,
            max_num_token=budget.max_num_batched_tokens,
            cache_loc_dtype=torch.int64,
        ),
    )
    binds_group = config.world_size > 1 and not decode_backend.outlives_group
    return RunnerByLayout(eager, decode=decode, prefill=prefill, binds_group=binds_group)


def _prefill_runner(
    config: ExecutorConfig,
    forward_pass: ForwardPass,
    sizes: tuple[int, ...],
    backend: RunnerBackend,
) -> GraphRunner:
    registry = build_prefill_registry(
        device=forward_pass.kv_pool.device,
        max_bs=config.max_num_seqs,
        max_num_token=sizes[-1],
        cache_loc_dtype=torch.int64,
        enable_num_token_non_padded=True,
    )
    if config.prefill_graphs == "piecewise":
        return PiecewisePrefillRunner(forward_pass, registry, backend, sizes)
    return BreakablePrefillRunner(forward_pass, registry, backend, sizes)


def _form_group(config: ExecutorConfig) -> Callable[..., RankGroup]:
    return lambda epoch, host, port: join_group(
        host,
        port,
        epoch=epoch,
        rank=config.topology.world_rank,
        world_size=config.world_size,
        bind_host=config.peer_host,
        timeout_s=config.peer_timeout_s,
    )


def _describe(
    config: ExecutorConfig, model_config: ModelConfig, limits: StepLimits, dtype: torch.dtype
) -> pb.DescribeResponse:
    budget, graph_sizes = limits.budget, limits.graph_sizes
    model = pb.ModelInfo(
        architecture=model_config.architecture,
        fingerprint=fingerprint(config.model),
        vocab_size=model_config.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        block_size=config.block_size,
    )
    agreement = {
        "model_fingerprint": model.fingerprint,
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "max_model_len": limits.max_model_len,
        "dp_size": config.dp_size,
        "attn_tp_size": config.attn_tp_size,
        "ep_size": config.topology.num_expert_parts,
        "decode_graph_sizes": list(graph_sizes.decode),
        "extend_graph_sizes": list(graph_sizes.extend),
        "prefill_graphs": config.prefill_graphs,
        **asdict(budget),
    }
    return pb.DescribeResponse(
        coordinates=pb.Coordinates(
            dp_rank=config.dp_rank,
            dp_size=config.dp_size,
            attn_tp_rank=config.attn_tp_rank,
            attn_tp_size=config.attn_tp_size,
            ep_rank=config.topology.ep_rank,
            ep_size=config.topology.num_expert_parts,
        ),
        model=model,
        num_kv_blocks=limits.num_kv_blocks,
        num_rows=config.num_rows,
        budget=pb.TokenBudget(**asdict(budget)),
        graph_sizes=pb.GraphSizes(
            decode=graph_sizes.decode,
            extend=graph_sizes.extend,
            extend_runner=f"prefill_{config.prefill_graphs}" if graph_sizes.extend else "",
        ),
        agreement={name: str(value) for name, value in agreement.items()},
    )


def _num_kv_blocks(config: ExecutorConfig, device: torch.device, bytes_per_block: int) -> int:
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
