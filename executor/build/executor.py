"""Construction of an executor: with its neighbours, the only place that constructs.

settings, checkpoints ─▶ blueprint ─▶ model ─────┐
                                  └─▶ KV pool ───┼─▶ forward pass ─▶ runners ─┬─▶ worker
                                      attention ─┘                    drafts ─┘
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

import structlog
import torch
from llguidance import LLTokenizer

from executor.batch.kv_pool import KVPool
from executor.batch.read_step import StepLimits
from executor.budget.report import BudgetLine, budget_table
from executor.build.describe import describe
from executor.build.devices import AttentionGraphs, Device, open_device
from executor.build.drafts import Drafts, build_drafts
from executor.build.grammars import load_tokenizer
from executor.build.keeping import plan_keeping
from executor.build.memory import held_lines, later_lines, new_kv_pool, num_kv_blocks
from executor.build.plan import Blueprint
from executor.build.runners import build_runners
from executor.build.warm_up import warm_up
from executor.config import ExecutorConfig
from executor.graph.input_buffers import fresh_input_buffer_pool
from executor.metrics import Measures
from executor.model.decoder.expert_loader import ElasticExperts
from executor.model.decoder.kernels import Kernels, Peers
from executor.model.decoder.sizes import attention_of, attention_share
from executor.model.drafts.draft import DraftModel, load_draft_model
from executor.model.families import Model, load_model
from executor.model.layers.linear import vocab_slice
from executor.model.moe.dispatch import new_dispatcher, require_capturable
from executor.model.moe.layer import Dispatcher, DispatchSetup
from executor.model.sampling.constraints import Constraints
from executor.model.sampling.sampler import Sampler
from executor.model.weights import Loader
from executor.model.weights.kept import Keeping
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.epochs import FormGroup
from executor.parallel.expert_places import ExpertPlaces, places_at_start
from executor.parallel.layout import Place, require_mlp_tp_gather
from executor.parallel.process_groups import EpochGroups, join_group
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import RunnerSelection
from executor.worker import GroupMember, Worker
from protos.executor.v1 import executor_pb2 as pb

log = structlog.stdlib.get_logger(__name__)

MAX_GRAMMAR_THREADS = 4
PROGRESS_STEPS = 10  # log lines while a model loads


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
    _warn_of_many_threads()
    blueprint = Blueprint.of(config)
    device = open_device(config, blueprint.dtype)
    lines = _logged(budget_table(blueprint.budget))
    place = Place(config.topology)
    peers, places = _peers(blueprint, device, place)
    dispatcher = peers.dispatcher
    lines += _logged(dispatcher.lines())
    model, draft, kernels, keeping = _models(blueprint, device, peers)
    expert_slots = [*model.expert_slots, *(() if draft is None else draft.expert_slots)]
    experts = None
    if config.capacity.is_elastic:
        experts = _elastic_experts(blueprint, place, places, model, draft)
    kv_pool = new_kv_pool(blueprint, device.torch_device)
    forward_pass = _forward_pass(blueprint, device, model, kv_pool, place)
    agree = peers.attn_tp.agree if config.attn_tp_size > 1 else None
    tokenizer = load_tokenizer(config.model, blueprint.model)
    sampler = _sampler(blueprint, device, agree, tokenizer)
    runner, drafts = _runners(blueprint, device, forward_pass, draft, sampler, agree)
    lines += _logged(
        held_lines(
            blueprint,
            dispatcher=dispatcher,
            kernels=kernels,
            expert_slots=expert_slots,
            sampler=sampler,
            runner=runner,
            forward_pass=forward_pass,
            drafts=drafts,
        )
    )
    later = _logged(later_lines(blueprint, device.torch_device, dispatcher, kernels))
    lines += later + _logged(device.attention_lines())
    kv_pool.allocate(num_kv_blocks(blueprint, kv_pool, dispatcher, later))
    members: list[GroupMember] = [*device.members, peers.communicator, peers.attn_tp, dispatcher]
    _prepare(blueprint, forward_pass, runner, sampler, members)
    limits = _step_limits(blueprint, kv_pool, place, takes_grammars=tokenizer is not None)
    worker = Worker(
        limits=limits,
        kv_pool=kv_pool,
        sampler=sampler,
        runner=runner,
        speculation=None if drafts is None else drafts.speculation,
        members=members,
        form_group=None if config.is_alone else _form_group(config, device.torch_device, place),
        experts=experts,
        device=device.torch_device,
        measures=measures,
    )
    _log_loaded(blueprint, device, kv_pool)
    return worker, describe(
        blueprint, limits, device.torch_device, lines, keeping, expert_slots=expert_slots
    )


def _peers(blueprint: Blueprint, device: Device, place: Place) -> tuple[Peers, ExpertPlaces]:
    """Returns the ways to other executors, and where these have their experts."""
    config, num_experts = blueprint.config, blueprint.model.num_experts
    communicator, attn_tp = _communicators(blueprint, device, place)
    places = places_at_start(config.topology, config.capacity, num_experts, device.torch_device)
    peers = Peers(
        communicator=communicator,
        attn_tp=attn_tp,
        dispatcher=_dispatcher(blueprint, communicator, device, places),
        moe_dense_tp_size=config.moe_dense_tp_size,
    )
    return peers, places


def _models(
    blueprint: Blueprint, device: Device, peers: Peers
) -> tuple[Model, DraftModel | None, list[Kernels], Keeping]:
    """Returns the target, its draft if it has one, the kernels of each, and what the target keeps."""
    config, max_rows, draft_config = blueprint.config, peers.dispatcher.max_rows, blueprint.draft
    keeping = plan_keeping(blueprint, device, blueprint.model, config.model)
    kernels = [device.kernels(blueprint.model, blueprint.dtype, max_rows, keeping)]
    model = load_model(
        config.model,
        blueprint.model,
        dtype=blueprint.dtype,
        device=device.torch_device,
        peers=peers,
        kernels=kernels[0],
        aux_layers=() if draft_config is None else draft_config.aux_layers,
        on_progress=_log_progress(),
    )
    if config.draft_model is None or draft_config is None:
        return model, None, kernels, keeping
    of_draft = plan_keeping(blueprint, device, draft_config.layers, config.draft_model)
    kernels += [device.kernels(draft_config.layers, blueprint.dtype, max_rows, of_draft)]
    draft = load_draft_model(
        config.draft_model,
        draft_config,
        model,
        kernels=kernels[1],
        on_progress=_log_progress(),
    )
    return model, draft, kernels, keeping


def _elastic_experts(
    blueprint: Blueprint,
    place: Place,
    places: ExpertPlaces,
    model: Model,
    draft: DraftModel | None,
) -> ElasticExperts:
    """Returns the experts that an elastic executor will load, once the checkpoints are seen to have them.

    Raises:
        CheckpointError: One of them is missing, or does not fit.
    """
    config = blueprint.config
    target = Loader(config.model, blueprint.model.quantization)
    models: list[tuple[Model | DraftModel, Loader]] = [(model, target)]
    if draft is not None and config.draft_model is not None and blueprint.draft is not None:
        models.append((draft, Loader(config.draft_model, blueprint.draft.layers.quantization)))
    experts = ElasticExperts(config.capacity, place, places, models, places.slot_of_expert.device)
    experts.check()
    return experts


def _logged(lines: tuple[BudgetLine, ...]) -> tuple[BudgetLine, ...]:
    """Logs part of the budget's table, and returns it."""
    for line in lines:
        log.info("token_budget", **asdict(line))
    return lines


def _forward_pass(
    blueprint: Blueprint, device: Device, model: Model, kv_pool: KVPool, place: Place
) -> ForwardPass:
    config, draft, budget = blueprint.config, blueprint.draft, blueprint.budget
    graphs = [AttentionGraphs(blueprint.graph_sizes.decode)]
    if (plan := blueprint.speculation) is not None:
        graphs.append(graphs[0]._replace(width=plan.num_draft_tokens, has_tree=plan.is_tree))
    attention = attention_of(blueprint.model)
    num_heads = len(attention_share(attention, config.capacity).q_heads)
    features = None
    if draft is not None:
        size = (budget.max_tokens_per_rank, draft.feature_size)
        features = torch.zeros(size, dtype=blueprint.dtype, device=device.torch_device)
    return ForwardPass(
        stages=model.stages,
        compute_logits=model.compute_logits,
        attention=device.attention(
            num_heads, kv_pool, graphs, budget, attention.scale, model.attention_layers
        ),
        kv_pool=kv_pool,
        num_heads=num_heads,
        hidden_size=blueprint.model.hidden_size,
        vocab_size=blueprint.model.vocab_size,
        dtype=blueprint.dtype,
        place=place,
        require_mlp_tp_gather=require_mlp_tp_gather(
            config.topology,
            gathers_experts=config.gathers_experts,
            splits_dense=blueprint.has_split_dense,
        ),
        features=features,
        max_len=blueprint.max_model_len,
    )


def _runners(
    blueprint: Blueprint,
    device: Device,
    forward_pass: ForwardPass,
    draft: DraftModel | None,
    sampler: Sampler,
    agree: Callable[[torch.Tensor], None] | None,
) -> tuple[RunnerSelection, Drafts | None]:
    """Returns the target's runners, and what a draft model adds to them. Nothing is captured yet.

    All their graphs read inputs from the same buffers: they replay one after another.
    """
    with fresh_input_buffer_pool():
        drafts = None
        if draft is not None:
            drafts = build_drafts(blueprint, device, draft, forward_pass, sampler, agree=agree)
        runner = build_runners(
            blueprint.config,
            blueprint.budget,
            forward_pass,
            blueprint.graph_sizes,
            device.new_backend,
            speculation=blueprint.speculation,
            draft_runners=() if drafts is None else drafts.runners,
        )
    return runner, drafts


def _prepare(
    blueprint: Blueprint,
    forward_pass: ForwardPass,
    runner: RunnerSelection,
    sampler: Sampler,
    members: Sequence[GroupMember],
) -> None:
    """Does what takes no peers of all that would hold up the first steps."""
    config = blueprint.config
    if config.is_alone:  # else at the first Join: captured passes make collective calls
        with torch.inference_mode():
            runner.capture()
    elif config.capacity.is_elastic and forward_pass.kv_pool.device.type == "cpu":
        most, sizes = config.max_num_batched_tokens, blueprint.graph_sizes.decode
        warm_up(forward_pass, runner, sampler, members, max_tokens=most, decode_sizes=sizes)


def _sampler(
    blueprint: Blueprint,
    device: Device,
    agree: Callable[[torch.Tensor], None] | None,
    tokenizer: LLTokenizer | None,
) -> Sampler:
    """Returns the sampler. Grammars are for the one executor of a DP rank whose tokens count."""
    config, plan, constraints = blueprint.config, blueprint.speculation, None
    if tokenizer is not None and config.attn_tp_rank == 0:
        constraints = Constraints(
            tokenizer,
            config.max_num_seqs,
            device.torch_device,
            max_nodes=1 if plan is None else plan.num_draft_tokens,
            num_threads=min(torch.get_num_threads(), MAX_GRAMMAR_THREADS),
        )
    return Sampler(
        config.max_num_seqs,
        blueprint.model.vocab_size,
        device.torch_device,
        agree=agree,
        filters=device.filters,
        constraints=constraints,
    )


def _step_limits(
    blueprint: Blueprint, kv_pool: KVPool, place: Place, *, takes_grammars: bool
) -> StepLimits:
    config = blueprint.config
    return StepLimits(
        place=place,
        budget=blueprint.budget,
        num_kv_blocks=kv_pool.num_blocks,
        block_size=config.block_size,
        vocab_size=blueprint.model.vocab_size,
        max_model_len=blueprint.max_model_len,
        graph_sizes=blueprint.graph_sizes,
        speculation=blueprint.speculation,
        kv_window=kv_pool.shape.window or 0,
        takes_grammars=takes_grammars,
    )


def _communicators(
    blueprint: Blueprint, device: Device, place: Place
) -> tuple[DpCommunicator, AttnTpCommunicator]:
    """Returns what reaches the whole group, and what reaches the executors of this DP rank."""
    config, budget, dtype = blueprint.config, blueprint.budget, blueprint.dtype
    model_config, draft = blueprint.model, blueprint.draft
    communicator = DpCommunicator(
        place=place,
        max_tokens_per_rank=budget.max_shard_tokens_per_rank,
        hidden_size=model_config.hidden_size,
        dtype=dtype,
        top_k=model_config.top_k,
        device=device.torch_device,
    )
    attn_tp_communicator = AttnTpCommunicator(
        capacity=config.capacity,
        max_shard_tokens_per_rank=budget.max_shard_tokens_per_rank,
        hidden_size=model_config.hidden_size,
        dtype=dtype,
        max_logits_rows=budget.max_logits_rows,
        vocab_slice=vocab_slice(model_config.vocab_size, config.attn_tp_size),
        gathered_size=model_config.hidden_size if draft is None else draft.gathered_size,
        device=device.torch_device,
    )
    return communicator, attn_tp_communicator


def _dispatcher(
    blueprint: Blueprint, communicator: DpCommunicator, device: Device, places: ExpertPlaces
) -> Dispatcher:
    """Returns what takes rows to their experts."""
    config, graph_sizes = blueprint.config, blueprint.graph_sizes
    setup = DispatchSetup(
        communicator=communicator,
        budget=blueprint.budget,
        places=places,
        dtype=blueprint.dtype,
        device=device.torch_device,
        ops=device.ops,
    )
    dispatcher = new_dispatcher(config.moe_a2a, config.moe_a2a_extend, setup)
    if device.torch_device.type == "cuda":  # elsewhere a replay is a plain call
        require_capturable(
            config.moe_a2a,
            dispatcher,
            has_decode_graphs=bool(graph_sizes.decode),
            has_prefill_graphs=bool(graph_sizes.extend),
        )
    return dispatcher


def _form_group(
    config: ExecutorConfig, device: torch.device, place: Place
) -> FormGroup[EpochGroups]:
    def form_group(epoch: int, host: str, port: int, secret: bytes) -> EpochGroups:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # this thread's own, which begins on the first one
        return join_group(
            host,
            port,
            secret,
            epoch=epoch,
            topology=place.topology,
            device=device,
            bind_host=config.peer_host,
            timeout_s=config.peer_timeout_s,
        )

    return form_group


def _log_progress() -> Callable[[int, int], None]:
    def on_progress(num_loaded: int, num_tensors: int) -> None:
        tenth = num_loaded * PROGRESS_STEPS // num_tensors
        if tenth > (num_loaded - 1) * PROGRESS_STEPS // num_tensors:
            log.info("loading", tensors=num_loaded, of=num_tensors)

    return on_progress


def _log_loaded(blueprint: Blueprint, device: Device, kv_pool: KVPool) -> None:
    log.info(
        "loaded",
        device=str(device.torch_device),
        dtype=str(blueprint.dtype).removeprefix("torch."),
        max_model_len=blueprint.max_model_len,
        num_kv_blocks=kv_pool.num_blocks,
        num_spill_blocks=kv_pool.num_spill_blocks,
        kv_cache_bytes=kv_pool.num_physical_blocks * kv_pool.all_bytes_per_block,
        decode_graphs=len(blueprint.graph_sizes.decode),
        prefill_graphs=len(blueprint.graph_sizes.extend),
        speculation="off" if blueprint.speculation is None else blueprint.speculation.algorithm,
    )
    size = blueprint.config.attn_tp_size
    if size > 1 and kv_pool.shape.latent_dim is not None:
        log.warning(
            "latents_on_every_executor",
            attn_tp_size=size,
            kv_bytes_per_token=kv_pool.bytes_per_block // kv_pool.block_size,
            instead="more dp_size keeps each sequence's latents once",
        )


def _warn_of_many_threads() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if torch.get_num_threads() > (cores or 1):
        log.warning("more_threads_than_cores", threads=torch.get_num_threads(), cores=cores)
