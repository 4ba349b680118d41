"""Settings of an executor, checked once at start and never changed after."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from executor.budget.token_budget import check_step_limits
from executor.parallel.layout import Capacity, Topology
from protos.executor.grammars import MAX_GRAMMAR_BYTES
from protos.settings import ON_OFF, Rule, above, at_least, folder_with, one_of, setting
from protos.transport.addresses import is_loopback
from protos.transport.port import ServiceConfig

DEFAULT_MAX_MODEL_LEN = 32768  # a checkpoint may claim a million tokens, whose KV fits nowhere
SEQUENCE_BYTES = 24576  # of a step, besides ids of tokens and blocks: biases, banned sequences
WILDCARD_HOSTS = ("0.0.0.0", "[::]")
CHECKPOINT = folder_with("config.json")


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig(ServiceConfig):
    """Every setting of an executor: its own, and of its ports."""

    model: Path = setting(rule=CHECKPOINT)
    """Folder of a Hugging Face checkpoint."""
    check: str = setting("off", ON_OFF)
    """on reads only what the model's files say of themselves, prints what this executor would hold and
    what is refused, and ends: exit code 0, or 2 if it would not start."""
    anonymous_callers: str = setting("off", ON_OFF)
    """on lets callers off loopback drive this executor without a certificate or a token."""
    advertised_host: str | None = setting(None, unset="the host of --listen")
    """Host at which the group's other executors reach this one."""
    dp_rank: int = 0
    """This executor's data-parallel rank."""
    dp_size: int = 1
    """Data-parallel ranks of the group."""
    max_dp_size: int | None = setting(None, at_least(1), unset="it stands where dp_rank says")
    """Makes this executor elastic: the router gives it a place at each Join, in groups of at most so many
    data-parallel ranks, or keeps it as a spare."""
    min_dp_size: int | None = setting(None, at_least(1), unset="one less than max_dp_size")
    """Data-parallel ranks of the smallest group of an elastic executor, which holds all experts: the
    fewer, the more expert slots each executor has."""
    node_rank: int = setting(0, at_least(0))
    """Number of this executor's node, where dp_rank counts within the node."""
    dp_ranks_per_node: int = setting(0, at_least(0))
    """Data-parallel ranks that each node before this one adds to dp_rank."""
    attn_tp_rank: int = 0
    """Number of this executor, from 0, among the executors of its DP rank."""
    attn_tp_size: int = 1
    """Executors that share the attention of one DP rank."""
    ep_size: int | None = setting(None, at_least(1), unset="one per executor")
    """Parts that the experts fall into, a divisor of the group's executors; some parts may have one
    expert more. Executors with the same part share each of its experts; 1 turns expert parallelism
    off."""
    moe_dense_tp_size: int | None = setting(
        None,
        Rule(
            "1, to hold dense MLPs whole on every executor, or nothing, to split them over the group",
            lambda size: size == 1,
        ),
        unset="split over the group",
    )
    """Executors that each dense MLP is split over."""
    dtype: str = setting("auto", one_of("auto", "float32", "bfloat16"))
    """Type of weights, activations and KV; auto is the checkpoint's."""
    device: str = setting(
        "auto",
        Rule("one of auto, cpu, cuda, cuda:N", re.compile(r"auto|cpu|cuda(:\d+)?").fullmatch),
    )
    """auto is CUDA where there is a GPU that can run this; cuda:1 is the second. Without a number,
    the executors of a group take the GPUs of their machine in turn."""
    block_size: int = setting(16, at_least(1))
    """Tokens per KV block."""
    max_num_seqs: int = 64
    """Sequences in one step, and rows of the block table."""
    max_num_batched_tokens: int = 2048
    """Tokens in one step."""
    max_num_logits: int | None = setting(None, unset="max_num_seqs + 256")
    """Rows of logits in one step; those above max_num_seqs score prompt tokens."""
    max_model_len: int | None = setting(
        None, at_least(2), unset=f"the checkpoint's, at most {DEFAULT_MAX_MODEL_LEN}"
    )
    """Prompt and output tokens of one sequence."""
    num_kv_blocks: int | None = setting(None, at_least(2), unset="as many as kv_cache_bytes hold")
    """Blocks of the KV pool, the scratch block included, spill blocks for drafts not."""
    kv_cache_bytes: int | None = setting(
        None, at_least(1), unset="1 GiB on the CPU, most of the free memory on CUDA"
    )
    """Size of the KV pool, spill blocks for drafts included."""
    decode_graphs: str = setting("on", ON_OFF)
    """Whether steps without prompt tokens replay graphs."""
    decode_graph_sizes: tuple[int, ...] | None = setting(
        None, unset="1,2,4,8, then by 8 and more to max_num_seqs, rounded up"
    )
    """Numbers of sequences to capture, such as 1,2,4,8: multiples of attn_tp_size."""
    prefill_graphs: str = setting("breakable", one_of("breakable", "piecewise", "off"))
    """How steps with prompt tokens replay graphs. On a CPU breakable takes as long as eager,
    piecewise up to 3 % longer (tests/bench/executor/bench_runners.py); not measured on a GPU."""
    prefill_graph_sizes: tuple[int, ...] | None = setting(
        None, unset="by 4, then coarser, to max_num_batched_tokens"
    )
    """Numbers of tokens to capture, such as 64,256,1024."""
    moe_a2a: str = setting("none", one_of("none", "torch", "flashinfer"))
    """How tokens reach their experts in steps in which no rank extends: none gathers all tokens on
    every executor; torch and flashinfer send each only to the executors of its experts, which takes
    ep_size of all executors."""
    moe_a2a_extend: str = setting("all-gather", one_of("all-gather", "all-to-all"))
    """The same for the other steps; all-to-all is the one of moe_a2a."""
    max_dispatch_tokens_per_rank: int | None = setting(
        None,
        at_least(1),
        unset="tokens of the largest step that does not gather; with prompts at least 4096",
        variables=("LOCKSTEP_MAX_DISPATCH_TOKENS_PER_RANK",),
    )
    """Tokens that one EP rank can send in FlashInfer's all-to-all, whose workspace it sizes; nothing
    else uses it."""
    quantized_dispatch: str = setting("off", one_of("off", "mxfp8", "nvfp4"))
    """How hidden states travel in FlashInfer's all-to-all: as they are, in FP8 with a scale for each 32,
    or in FP4 with one for each 16, which takes 52 % or 28 % of bfloat16's bytes. Experts read what was
    rounded, so answers change."""
    moe_runner: str = setting("auto", one_of("auto", "grouped", "cutlass", "cutedsl"))
    """Kernels of the experts on CUDA: PyTorch's grouped products, FlashInfer's fused CUTLASS
    kernels, or FlashInfer's kernels in CuTe's DSL. auto is cutlass for experts that stay quantised,
    and wherever its kernels are prebuilt or once compiled for this GPU, else grouped."""
    quantized_weights: str = setting("auto", one_of("auto", "keep", "dequantize"))
    """Whether weights that a checkpoint has in FP8 blocks or MXFP4 stay so in memory: auto where there
    are kernels for them (FlashInfer on a Hopper GPU), keep refuses to start elsewhere, dequantize never.
    The kernels for FP8 round activations to FP8, too."""
    weights: str = setting("auto", one_of("auto", "int8"))
    """int8 quantises projections, experts and the head at load, with a scale for each row: half the bytes
    of bfloat16, by the kernels of a CPU only. auto leaves them to dtype and quantized_weights."""
    draft_model: Path | None = setting(None, CHECKPOINT, unset="no speculative decoding")
    """Folder of a draft model, which may be the model itself if that has MTP layers."""
    num_draft_steps: int | None = setting(
        None, at_least(1), unset="3, or the draft model's layers if there are several"
    )
    """Drafts one after another."""
    draft_topk: int = setting(1, at_least(1))
    """Drafts that each step goes on from: 1 is a chain, more a tree."""
    num_draft_tokens: int | None = setting(
        None, at_least(2), unset="num_draft_steps * draft_topk + 1"
    )
    """Tokens that a sequence verifies at once, its last one included."""
    draft_sampling: str = setting("match", one_of("match", "rejection"))
    """How drafts of sequences that sample are accepted. match: a draft must be the token that plain
    decoding would have sampled, so a seed gives the same text with and without drafts. rejection:
    drafts are drawn at the request's temperature and accepted by chance; only the distribution is
    that of plain decoding. Chains only."""
    flashinfer_pdl: str = setting("auto", one_of("auto", "on", "off"))
    """Whether FlashInfer's kernels may start before the one ahead has ended: auto where the GPU lets them,
    from compute capability 9.0 on."""
    num_threads: int | None = setting(None, at_least(1), unset="PyTorch decides")
    """Threads of one CPU operator."""
    triton_kernels: str = setting("auto", one_of("auto", "off"))
    """Whether kernels in Triton spare decodes on CUDA launches beside FlashInfer's: auto where Triton is
    installed and compiles them."""
    peer_timeout_s: float = setting(60.0, above(0))
    """Longest wait for another member of the group inside a step, at most 15 s of it while a group
    forms, and for a step whose epoch is over; past it the step is stuck, and the process ends."""
    stop_timeout_s: float = setting(30.0, above(0))
    """Longest wait for the step in flight at the end of the process."""
    max_restarts: int = setting(0, at_least(0))
    """How often a supervisor, a parent that has imported PyTorch and the like, starts this executor again
    when it was killed or stuck, without 60 s of service in between. 0: there is none, and whatever
    started the executor sees it end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_callers()
        self._check_ranks()
        self._check_experts()
        self._check_drafts()
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"num_kv_blocks={self.num_kv_blocks} and kv_cache_bytes={self.kv_cache_bytes} "
                f"both size the KV pool: set one of them"
            )
        if self.weights == "int8" and self.quantized_weights == "keep":
            raise ValueError(
                "weights=int8 with quantized_weights=keep: weights cannot become int8 and stay as they "
                "are stored; set one of the two to auto"
            )
        self._check_graph_sizes("decode_graph_sizes", "max_num_seqs")
        self._check_graph_sizes("prefill_graph_sizes", "max_num_batched_tokens")
        check_step_limits(self.max_num_batched_tokens, self.max_num_seqs, self.num_logits)

    def _check_callers(self) -> None:
        if self.identifies_callers or self.anonymous_callers == "on" or is_loopback(self.listen):
            return
        raise ValueError(
            f"listen={self.listen}: any caller that reaches it could drive this executor, and have "
            f"it join a group of theirs: set auth_tokens, and executor_token of the router, so that "
            f"callers need a token; or tls_client_ca, so that they need a certificate; or, where the "
            f"network itself keeps others out, anonymous_callers=on"
        )

    def _check_ranks(self) -> None:
        self._check_elastic()
        if self.node_rank and not self.dp_ranks_per_node:
            raise ValueError(
                f"node_rank={self.node_rank}: need dp_ranks_per_node, which is not set"
            )
        if self.dp_ranks_per_node and self.dp_rank >= self.dp_ranks_per_node:
            raise ValueError(
                f"dp_rank={self.dp_rank} with dp_ranks_per_node={self.dp_ranks_per_node}: dp_rank "
                f"counts within the node, from 0 to {self.dp_ranks_per_node - 1}"
            )
        topology = self.topology  # checks itself
        is_rendezvous = topology.world_size > 1 and topology.world_rank == 0
        if is_rendezvous and self.advertised_host is None and self.host in WILDCARD_HOSTS:
            raise ValueError(
                f"advertised_host is not set and listen={self.listen} names no host: the first "
                f"executor of a group needs one that the others can reach"
            )

    def _check_elastic(self) -> None:
        if self.max_dp_size is None:
            if self.min_dp_size is not None:
                raise ValueError(
                    f"min_dp_size={self.min_dp_size} without max_dp_size: it is for elastic executors; "
                    f"set max_dp_size, or leave it out"
                )
            return
        if (self.min_dp_size or 1) > self.max_dp_size:
            raise ValueError(
                f"min_dp_size={self.min_dp_size} is above max_dp_size={self.max_dp_size}: swap them"
            )
        for each in ("dp_rank", "dp_size", "node_rank", "dp_ranks_per_node", "ep_size"):
            given = getattr(self, each)
            if given != type(self).__dataclass_fields__[each].default:
                raise ValueError(
                    f"{each}={given} with max_dp_size={self.max_dp_size}: the router says where an "
                    f"elastic executor stands, and each is an EP rank; leave {each} out"
                )
        if self.moe_a2a == "flashinfer":
            raise ValueError(
                f"moe_a2a=flashinfer with max_dp_size={self.max_dp_size}: its workspace is for groups of "
                f"one size; set moe_a2a to none or torch"
            )

    def _check_experts(self) -> None:
        if self.moe_a2a_extend == "all-to-all" and self.moe_a2a == "none":
            raise ValueError(
                "moe_a2a_extend=all-to-all with moe_a2a=none: there is no all-to-all; set moe_a2a to "
                "torch or flashinfer, or moe_a2a_extend=all-gather"
            )
        if self.quantized_dispatch != "off" and self.moe_a2a != "flashinfer":
            raise ValueError(
                f"quantized_dispatch={self.quantized_dispatch} with moe_a2a={self.moe_a2a}: only "
                f"FlashInfer's all-to-all sends it; set moe_a2a=flashinfer or quantized_dispatch=off"
            )
        if self.moe_a2a != "none" and self.topology.num_expert_parts != self.world_size:
            raise ValueError(
                f"moe_a2a={self.moe_a2a} with ep_size={self.ep_size}: every executor of an "
                f"all-to-all is an EP rank, so set ep_size={self.world_size} or moe_a2a=none"
            )

    def _check_drafts(self) -> None:
        if self.draft_model is None:
            for each in ("num_draft_steps", "draft_topk", "num_draft_tokens", "draft_sampling"):
                if getattr(self, each) != type(self).__dataclass_fields__[each].default:
                    raise ValueError(
                        f"{each}={getattr(self, each)} without draft_model: there is nothing to "
                        f"draft with; set draft_model, or leave {each} out"
                    )
        if self.draft_sampling == "rejection" and self.draft_topk > 1:
            raise ValueError(
                f"draft_sampling=rejection with draft_topk={self.draft_topk}: only chains are drawn; "
                f"set draft_topk=1 or draft_sampling=match"
            )

    def _check_graph_sizes(self, name: str, bound: str) -> None:
        sizes, limit = getattr(self, name), getattr(self, bound)
        most = -(-limit // self.attn_tp_size) * self.attn_tp_size  # as the default sizes are
        wrong = [size for size in sizes or () if not 1 <= size <= most]
        if wrong:
            reach = f"{bound}={limit}"
            if most > limit:
                reach = f"{most} ({reach} to a multiple of attn_tp_size={self.attn_tp_size})"
            raise ValueError(f"{name} has {wrong[0]}: a size is 1 to {reach}, as no step is larger")

    @property
    def host(self) -> str:
        """Host of `listen`."""
        return self.listen.rpartition(":")[0]

    @property
    def peer_host(self) -> str | None:
        """Host at which the other members reach this executor; None if no setting names one."""
        if self.advertised_host is not None:
            return self.advertised_host.strip("[]")
        return None if self.host in WILDCARD_HOSTS else self.host.strip("[]")

    @property
    def bind_host(self) -> str | None:
        """Host that the sockets for the other members listen on; None is only `peer_host`.

        Every address only where `listen` is every address too: an operator who names one address
        wants no other to be open.
        """
        if self.advertised_host is not None and self.host in WILDCARD_HOSTS:
            return self.host.strip("[]")
        return None

    @property
    def world_size(self) -> int:
        """Executors of the group; of the largest, if it is elastic."""
        return self.topology.world_size

    @property
    def capacity(self) -> Capacity:
        """What this executor is built for: the group that its settings describe, or several."""
        if self.max_dp_size is None:
            return self.topology.capacity
        least = self.min_dp_size or max(1, self.max_dp_size - 1)
        return replace(self.topology.capacity, min_dp_size=least)

    @property
    def is_alone(self) -> bool:
        """Whether it never has peers."""
        return self.world_size == 1 and not self.capacity.is_elastic

    @property
    def topology(self) -> Topology:
        """Coordinates of this executor in its group; in the largest, if it is elastic, until a Join."""
        return Topology(
            dp_rank=self.node_rank * self.dp_ranks_per_node + self.dp_rank,
            dp_size=self.max_dp_size or self.dp_size,
            attn_tp_rank=self.attn_tp_rank,
            attn_tp_size=self.attn_tp_size,
            ep_size=self.ep_size,
        )

    @property
    def num_logits(self) -> int:
        """``max_num_logits``, resolved."""
        return self.max_num_seqs + 256 if self.max_num_logits is None else self.max_num_logits

    @property
    def default_message_bytes(self) -> int:
        """Bytes of the largest step.

        Each token has an id and one that is scored; each sequence its prompt and output, for
        penalties, its blocks in both lists, where all of them are cached, and its grammar.
        """
        length = self.max_model_len or DEFAULT_MAX_MODEL_LEN
        num_ids = length + 2 * -(-length // self.block_size)
        sequence_bytes = 4 * num_ids + SEQUENCE_BYTES + MAX_GRAMMAR_BYTES
        return 8 * self.max_num_batched_tokens + self.max_num_seqs * sequence_bytes + 65536

    @property
    def gathers_experts(self) -> bool:
        """Whether routed experts get their rows by an all-gather, in any phase."""
        return self.moe_a2a == "none" or self.moe_a2a_extend == "all-gather"


def resolve_max_model_len(asked: int | None, model_max_len: int) -> int:
    """Returns the tokens that one sequence may have.

    Args:
        asked: The operator's setting.
        model_max_len: Positions that the checkpoint was trained for.

    Raises:
        ValueError: More was asked for than the model has positions.
    """
    if asked is None:
        return min(model_max_len, DEFAULT_MAX_MODEL_LEN)
    if asked > model_max_len:
        raise ValueError(f"max_model_len={asked}: the checkpoint has {model_max_len} positions")
    return asked
