"""Settings to objects: the only place in the executor that constructs.

checkpoint ─▶ model ─┐
settings ─▶ KV pool ─┼─▶ forward pass ─▶ runners, their registries and backends ─▶ worker
            attention┘
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import structlog
import torch

from executor.budget import TokenBudget
from executor.budget_table import budget_table
from executor.config import ExecutorConfig, resolve_max_model_len
from executor.devices import Device, open_device
from executor.fingerprint import fingerprint
from executor.graph.backend import RunnerBackend
from executor.graph.capture_sizes import GraphSizes
from executor.graph.cuda_graph_buffer_registry import (
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from executor.graph.input_buffers import fresh_input_buffer_pool
from executor.kv_pool import KVPool
from executor.layers.attn_tp_communicator import AttnTpCommunicator
from executor.layers.dp_communicator import DpCommunicator
from executor.layers.lm_head import vocab_slice
from executor.measures import Measures
from executor.models import load_model
from executor.models.config import ModelConfig
from executor.moe.dispatch import new_dispatcher, require_capturable
from executor.moe.layer import Dispatcher
from executor.parallel import EpochGroups, join_group
from executor.runners import GraphRunner
from executor.runners.by_layout import RunnerByLayout
from executor.runners.decode import DecodeRunner
from executor.runners.eager import EagerRunner
from executor.runners.forward_pass import ForwardPass
from executor.runners.prefill_breakable import BreakablePrefillRunner
from executor.runners.prefill_piecewise import PiecewisePrefillRunner
from executor.sampler import Sampler
from executor.sizes import check_model_fits, plan_budget, plan_graph_sizes, splits_dense
from executor.step_columns import StepLimits
from executor.topology import require_mlp_tp_gather
from executor.worker import GroupMember, Worker
from protos.executor.v1 import executor_pb2 as pb

log = structlog.stdlib.get_logger(__name__)

DEFAULT_CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85  # of what is free after loading; the rest is for activations and graphs
PROGRESS_STEPS = 10  # log lines while a model loads
PADDED_SEQ_LEN = 1  # a padded sequence attends to one key of the scratch block


def build_worker(
    config: ExecutorConfig, measures: Measures | None = None
) -> tuple[Worker, pb.DescribeResponse]:
    """Loads the model and builds everything around it.

    Args:
        config: Every setting.
        measures: Gets the steps' times and sizes; None: nobody asks for them.

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
    check_model_fits(config, model_config)
    has_split_dense = splits_dense(config, model_config)
    graph_sizes = plan_graph_sizes(config, max_model_len, has_split_dense=has_split_dense)
    budget = plan_budget(config, model_config, dtype, graph_sizes)
    for line in budget_table(budget, config.moe_runner):
        log.info("token_budget", **asdict(line))
    communicator, attn_tp_communicator = _communicators(config, model_config, dtype, budget, device)
    dispatcher, dispatch_members = _dispatcher(
        config, model_config, dtype, graph_sizes, budget, communicator, device
    )
    model = load_model(
        config.model,
        model_config,
        dtype=dtype,
        device=device.torch_device,
        topology=config.topology,
        communicator=communicator,
        attn_tp_communicator=attn_tp_communicator,
        dispatcher=dispatcher,
        moe_dense_tp_size=config.moe_dense_tp_size,
        kernels=device.kernels(model_config, dtype, budget),
        on_progress=_log_progress(),
    )
    num_heads = len(model_config.attention_share(config.topology).q_heads)
    shape = model_config.kv_shape(config.block_size, dtype, config.topology)
    kv_pool = KVPool(
        shape,
        num_blocks=config.num_kv_blocks
        or _num_kv_blocks(config, device.torch_device, shape.bytes_per_block),
        num_rows=config.num_rows,
        max_blocks_per_row=-(-max_model_len // config.block_size),
        device=device.torch_device,
    )
    forward_pass = ForwardPass(
        stages=model.stages,
        compute_logits=model.compute_logits,
        attention=device.attention(num_heads, kv_pool, graph_sizes.decode, budget),
        kv_pool=kv_pool,
        num_heads=num_heads,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        dtype=dtype,
        topology=config.topology,
        require_mlp_tp_gather=require_mlp_tp_gather(
            config.topology,
            gathers_experts=config.gathers_experts,
            splits_dense=has_split_dense,
        ),
    )
    limits = StepLimits(
        topology=config.topology,
        budget=budget,
        num_rows=kv_pool.num_rows,
        num_kv_blocks=kv_pool.num_blocks,
        block_size=config.block_size,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        graph_sizes=graph_sizes,
    )
    with fresh_input_buffer_pool():
        runner = build_runners(config, budget, forward_pass, graph_sizes, device.new_backend)
    if config.world_size == 1:  # else at the first Join: captured passes make collective calls
        with torch.inference_mode():
            runner.capture()
    worker = Worker(
        limits=limits,
        kv_pool=kv_pool,
        sampler=Sampler(
            kv_pool.num_rows,
            model_config.vocab_size,
            device.torch_device,
            agree=attn_tp_communicator.agree if config.attn_tp_size > 1 else None,
            filters=device.filters,
        ),
        runner=runner,
        members=[communicator, attn_tp_communicator, *dispatch_members],
        form_group=_form_group(config, device.torch_device) if config.world_size > 1 else None,
        device=device.torch_device,
        # FlashInfer's kernels wait for a lost peer for minutes, and nothing ends that.
        can_abort_device=device.torch_device.type == "cuda" and not dispatch_members,
        measures=measures,
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
    )
    return worker, _describe(config, model_config, limits, dtype, device.torch_device)


def _communicators(
    config: ExecutorConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    budget: TokenBudget,
    device: Device,
) -> tuple[DpCommunicator, AttnTpCommunicator]:
    """Returns what reaches the whole group, and what reaches the executors of this DP rank."""
    communicator = DpCommunicator(
        topology=config.topology,
        max_tokens_per_rank=budget.max_shard_tokens_per_rank,
        hidden_size=model_config.hidden_size,
        dtype=dtype,
        top_k=model_config.num_experts_per_tok,
        device=device.torch_device,
    )
    attn_tp_communicator = AttnTpCommunicator(
        topology=config.topology,
        max_shard_tokens_per_rank=budget.max_shard_tokens_per_rank,
        hidden_size=model_config.hidden_size,
        dtype=dtype,
        max_logits_rows=budget.max_logits_rows,
        vocab_slice=vocab_slice(model_config.vocab_size, config.attn_tp_size),
        device=device.torch_device,
    )
    return communicator, attn_tp_communicator


def _dispatcher(
    config: ExecutorConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    graph_sizes: GraphSizes,
    budget: TokenBudget,
    communicator: DpCommunicator,
    device: Device,
) -> tuple[Dispatcher, list[GroupMember]]:
    """Returns what takes rows to their experts, and what of it must join each epoch's groups."""
    flashinfer = None
    if config.moe_a2a == "flashinfer" and config.world_size > 1:
        flashinfer = device.all_to_all(model_config, dtype, config.topology, budget)
    dispatcher = new_dispatcher(
        config.moe_a2a,
        config.moe_a2a_extend,
        communicator=communicator,
        num_experts=model_config.num_experts,
        hidden_size=model_config.hidden_size,
        dtype=dtype,
        top_k=model_config.num_experts_per_tok,
        device=device.torch_device,
        flashinfer=flashinfer,
    )
    if device.torch_device.type == "cuda":  # elsewhere a replay is a plain call
        require_capturable(
            dispatcher,
            has_decode_graphs=bool(graph_sizes.decode),
            has_prefill_graphs=bool(graph_sizes.extend),
        )
    return dispatcher, [] if flashinfer is None else [flashinfer]


def build_runners(
    config: ExecutorConfig,
    budget: TokenBudget,
    forward_pass: ForwardPass,
    graph_sizes: GraphSizes,
    new_backend: Callable[[], RunnerBackend],
) -> RunnerByLayout:
    """Builds the runners that the settings ask for. Nothing is captured yet.

    Args:
        config: The settings.
        budget: What buffers are sized by.
        forward_pass: What to run.
        graph_sizes: From ``plan_graph_sizes``.
        new_backend: Makes the backend of one runner.
    """
    device = forward_pass.kv_pool.device
    decode_backend, prefill_backend = new_backend(), new_backend()
    decode = prefill = None
    if graph_sizes.decode:
        decode = DecodeRunner(
            forward_pass,
            build_decode_registry(
                device=device,
                max_bs=budget.decode_graph_size,
                max_num_token=budget.decode_graph_tokens,
                seq_len_fill_value=PADDED_SEQ_LEN,
                cache_loc_dtype=torch.int64,
                enable_num_token_non_padded=True,
                **_row_counts(forward_pass),
            ),
            decode_backend,
            graph_sizes.decode,
        )
    if graph_sizes.extend:
        prefill = _prefill_runner(config, budget, forward_pass, graph_sizes.extend, prefill_backend)
    eager = EagerRunner(
        forward_pass,
        build_eager_registry(
            device=device,
            max_bs=budget.max_num_seqs,
            max_num_token=budget.max_tokens_per_rank,
            cache_loc_dtype=torch.int64,
        ),
    )
    binds_group = config.world_size > 1 and not decode_backend.outlives_group
    return RunnerByLayout(eager, decode=decode, prefill=prefill, binds_group=binds_group)


def _prefill_runner(
    config: ExecutorConfig,
    budget: TokenBudget,
    forward_pass: ForwardPass,
    sizes: tuple[int, ...],
    backend: RunnerBackend,
) -> GraphRunner:
    registry = build_prefill_registry(
        device=forward_pass.kv_pool.device,
        max_bs=budget.max_num_seqs,
        max_num_token=budget.extend_graph_size,
        cache_loc_dtype=torch.int64,
        enable_num_token_non_padded=True,
        **_row_counts(forward_pass),
    )
    if config.prefill_graphs == "piecewise":
        return PiecewisePrefillRunner(forward_pass, registry, backend, sizes)
    return BreakablePrefillRunner(forward_pass, registry, backend, sizes)


def _row_counts(forward_pass: ForwardPass) -> dict[str, Any]:
    """Returns how a graph's registry counts rows: this executor's own, and those of all ranks."""
    topology = forward_pass.topology
    return {
        "require_gathered_buffer": forward_pass.require_gathered_buffer,
        "require_mlp_tp_gather": forward_pass.require_mlp_tp_gather,
        "register_global_num_tokens": forward_pass.require_gathered_buffer,
        "attn_tp_size": topology.attn_tp_size,
        "attn_tp_rank": topology.attn_tp_rank,
        "num_dp_ranks": topology.dp_size,
    }


def _form_group(
    config: ExecutorConfig, device: torch.device
) -> Callable[[int, str, int], EpochGroups]:
    return lambda epoch, host, port: join_group(
        host,
        port,
        epoch=epoch,
        topology=config.topology,
        device=device,
        bind_host=config.peer_host,
        timeout_s=config.peer_timeout_s,
    )


def _describe(
    config: ExecutorConfig,
    model_config: ModelConfig,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
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
        "device": device.type,  # the collectives of one cannot reach the other
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "max_model_len": limits.max_model_len,
        "moe_dense_tp_size": config.moe_dense_tp_size,
        "moe_a2a_extend": config.moe_a2a_extend,
        "moe_runner": config.moe_runner,
        "flashinfer_pdl": config.flashinfer_pdl,
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
        budget=pb.TokenBudget(
            max_num_batched_tokens=budget.max_num_batched_tokens,
            max_num_seqs=budget.max_num_seqs,
            max_num_logits=budget.max_num_logits,
            lines=[
                pb.BudgetLine(**asdict(line)) for line in budget_table(budget, config.moe_runner)
            ],
        ),
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
