"""What an operator can set for one executor, checked once at start and never changed after."""

import re
from dataclasses import dataclass
from pathlib import Path

from executor.budget.token_budget import check_step_limits
from executor.parallel.topology import Topology
from protos.telemetry.metrics import split_address
from protos.transport.port import PortSecurity, is_loopback

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda", "cuda:N")
ON_OFF = ("on", "off")
PREFILL_GRAPHS = ("breakable", "piecewise", "off")
MOE_RUNNERS = ("grouped", "cutlass", "cutedsl")
MOE_A2A = ("none", "torch", "flashinfer")
MOE_A2A_EXTEND = ("all-gather", "all-to-all")
DRAFT_SAMPLING = ("match", "rejection")
DEFAULT_MAX_MODEL_LEN = 32768  # a checkpoint may claim a million tokens, whose KV fits nowhere
WILDCARD_HOSTS = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig(PortSecurity):
    """Settings of one executor. None stands for "derive it", as its attribute says.

    Attributes, besides those of PortSecurity for `listen`:
        model: Folder of a Hugging Face checkpoint.
        listen: ``host:port`` of the gRPC server; port 0 takes any free port.
        advertised_host: Host at which the other executors reach this one; None is the host of
            ``listen``.
        dp_rank: 0 to ``dp_size - 1``.
        dp_size: Data-parallel ranks of the group.
        attn_tp_rank: 0 to ``attn_tp_size - 1``.
        attn_tp_size: Executors that share the attention of one DP rank.
        ep_size: Parts that the experts fall into, a divisor of the group's executors; None is one
            per executor. Executors with the same part share each of its experts; 1 turns expert
            parallelism off.
        moe_dense_tp_size: 1 holds dense MLPs whole on every executor; None splits them over the
            group.
        dtype: Type of weights, activations and KV; ``auto`` is the checkpoint's.
        device: ``auto`` is CUDA where there is one that can run this; ``cuda:1`` is the second.
        block_size: Tokens per KV block.
        max_num_seqs: Sequences in one step, and lines of the block table.
        max_num_batched_tokens: Tokens in one step.
        max_num_logits: Rows of logits in one step; None is ``max_num_seqs`` and room to score
            256 prompt tokens.
        max_model_len: Prompt and output tokens of one sequence; None is the checkpoint's, at
            most DEFAULT_MAX_MODEL_LEN.
        num_kv_blocks: Blocks of the KV pool, the scratch block included, spill blocks for drafts
            not (kv_pool.py); None derives it from ``kv_cache_bytes``, of which they take a part.
        kv_cache_bytes: Size of the KV pool; None is 1 GiB on the CPU, and most of the memory
            left after loading on CUDA.
        decode_graphs: Whether steps without prompt tokens replay graphs.
        decode_graph_sizes: Numbers of sequences to capture, multiples of ``attn_tp_size``; None is
            1, 2, 4, 8, then by 8 and more to ``max_num_seqs``, rounded up to such.
        prefill_graphs: How steps with prompt tokens replay graphs, if they do. On a CPU breakable
            takes as long as eager, piecewise up to 3 % longer (tests/bench/executor/bench_runners.py); on a
            GPU nobody has measured yet (tests/gpu).
        prefill_graph_sizes: Numbers of tokens to capture, likewise; None is by 4, then coarser, to
            ``max_num_batched_tokens``.
        moe_a2a: How tokens reach their experts in steps in which no rank extends: ``none`` gathers
            all of them on every executor; ``torch`` and ``flashinfer`` send each to the executors
            of its experts alone, which takes ``ep_size`` of all executors.
        moe_a2a_extend: The same for the other steps: ``all-to-all`` is what ``moe_a2a`` says.
        max_dispatch_tokens_per_rank: Tokens that one EP rank can send in FlashInfer's all-to-all,
            whose workspace it sizes; None is what a step may bring that does not gather, and at least
            A2A_DEFAULT_TOKENS if that has prompts. Nothing else uses it.
        moe_runner: What runs the experts on CUDA: PyTorch's grouped products, FlashInfer's fused
            CUTLASS kernels, or those that it writes in CuTe's DSL.
        draft_model: Folder of a draft model for speculative decoding, which may be ``model`` itself
            if that has MTP layers; None decodes one token at a time.
        num_draft_steps: Drafts one after another; None is 3, or the draft model's layers if there
            are several.
        draft_topk: Drafts that each step goes on from: 1 is a chain, more a tree.
        num_draft_tokens: Tokens that a sequence verifies at once, its last one included; None is
            ``num_draft_steps * draft_topk + 1``.
        draft_sampling: How drafts of sequences that sample are accepted. ``match``: a draft must be
            the token that plain decoding would have sampled, so a seed gives the same text with and
            without drafts. ``rejection``: drafts are drawn at the request's temperature and
            accepted by chance; only the distribution is that of plain decoding. Chains only.
        flashinfer_pdl: Whether FlashInfer's kernels may start before the one ahead has ended.
        num_threads: Threads of one CPU operator; None leaves it to PyTorch.
        peer_timeout_s: Longest wait for another member of the group inside a step, at most 15 s
            of it while a group forms, and for a step whose epoch is over; past it the step is stuck,
            and the process ends.
        stop_timeout_s: Longest wait for the step in flight when told to stop.
        metrics_listen: Where Prometheus may scrape metrics, host:port; None is nowhere.
    """

    model: Path
    listen: str = "127.0.0.1:50051"
    advertised_host: str | None = None
    dp_rank: int = 0
    dp_size: int = 1
    attn_tp_rank: int = 0
    attn_tp_size: int = 1
    ep_size: int | None = None
    moe_dense_tp_size: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_logits: int | None = None
    max_model_len: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    decode_graphs: str = "on"
    decode_graph_sizes: tuple[int, ...] | None = None
    prefill_graphs: str = "breakable"
    prefill_graph_sizes: tuple[int, ...] | None = None
    moe_a2a: str = "none"
    moe_a2a_extend: str = "all-gather"
    max_dispatch_tokens_per_rank: int | None = None
    moe_runner: str = "grouped"
    draft_model: Path | None = None
    num_draft_steps: int | None = None
    draft_topk: int = 1
    num_draft_tokens: int | None = None
    draft_sampling: str = "match"
    flashinfer_pdl: str = "off"
    num_threads: int | None = None
    peer_timeout_s: float = 60.0
    stop_timeout_s: float = 30.0
    metrics_listen: str | None = None

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise ValueError(f"model={self.model}: need a folder that holds a config.json")
        _split_address(self.listen)
        if self.health_listen is not None:
            _split_address(self.health_listen, "health_listen")
        if self.metrics_listen is not None:
            split_address(self.metrics_listen)  # raises what is wrong with it
        self._check_callers()
        self._check_ranks()
        for field, choices in (
            ("dtype", DTYPES),
            ("decode_graphs", ON_OFF),
            ("prefill_graphs", PREFILL_GRAPHS),
            ("moe_a2a", MOE_A2A),
            ("moe_a2a_extend", MOE_A2A_EXTEND),
            ("moe_runner", MOE_RUNNERS),
            ("draft_sampling", DRAFT_SAMPLING),
            ("flashinfer_pdl", ON_OFF),
        ):
            if getattr(self, field) not in choices:
                raise ValueError(
                    f"{field}={getattr(self, field)}: need one of {', '.join(choices)}"
                )
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is None:
            raise ValueError(f"device={self.device}: need one of {', '.join(DEVICES)}")
        self._check_experts()
        self._check_drafts()
        self._check_sizes()
        self._check_graph_sizes("decode_graph_sizes", "max_num_seqs")
        self._check_graph_sizes("prefill_graph_sizes", "max_num_batched_tokens")
        check_step_limits(self.max_num_batched_tokens, self.max_num_seqs, self.num_logits)

    def _check_callers(self) -> None:
        self.check_security(self.listen, metrics_listen=self.metrics_listen)
        if self.tls_cert is not None and not self.asks_who_calls and not is_loopback(self.listen):
            raise ValueError(
                f"listen={self.listen}: anybody who reaches it could drive this executor: set "
                f"tls_client_ca, so that the router needs a certificate, or auth_tokens, so that it "
                f"needs a token"
            )

    def _check_ranks(self) -> None:
        topology = self.topology  # checks itself
        is_rendezvous = topology.world_size > 1 and topology.world_rank == 0
        if is_rendezvous and self.advertised_host is None and self.host in WILDCARD_HOSTS:
            raise ValueError(
                f"advertised_host is not set and listen={self.listen} names no host: the first "
                f"executor of a group needs one that the others can reach"
            )

    def _check_experts(self) -> None:
        if self.moe_dense_tp_size not in (None, 1):
            raise ValueError(
                f"moe_dense_tp_size={self.moe_dense_tp_size}: need 1, to hold dense MLPs whole on "
                f"every executor, or nothing, to split them over the group"
            )
        if self.moe_a2a_extend == "all-to-all" and self.moe_a2a == "none":
            raise ValueError(
                "moe_a2a_extend=all-to-all with moe_a2a=none: there is no all-to-all; set moe_a2a to "
                "torch or flashinfer, or moe_a2a_extend=all-gather"
            )
        if self.moe_a2a != "none" and self.topology.num_expert_parts != self.world_size:
            raise ValueError(
                f"moe_a2a={self.moe_a2a} with ep_size={self.ep_size}: every executor of an "
                f"all-to-all is an EP rank, so set ep_size={self.world_size} or moe_a2a=none"
            )

    def _check_drafts(self) -> None:
        defaults = {"num_draft_steps": None, "draft_topk": 1, "num_draft_tokens": None}
        if self.draft_model is None:
            for field, default in (*defaults.items(), ("draft_sampling", "match")):
                if getattr(self, field) != default:
                    raise ValueError(
                        f"{field}={getattr(self, field)} without draft_model: there is nothing to "
                        f"draft with; set draft_model, or leave {field} out"
                    )
            return
        if not (self.draft_model / "config.json").is_file():
            raise ValueError(
                f"draft_model={self.draft_model}: need a folder that holds a config.json"
            )
        if self.draft_sampling == "rejection" and self.draft_topk > 1:
            raise ValueError(
                f"draft_sampling=rejection with draft_topk={self.draft_topk}: only chains are drawn; "
                f"set draft_topk=1 or draft_sampling=match"
            )

    def _check_sizes(self) -> None:
        smallest = {
            "block_size": 1,
            "max_model_len": 2,  # a prompt token and an output token
            "num_kv_blocks": 2,  # the scratch block and one more
            "kv_cache_bytes": 1,
            "max_dispatch_tokens_per_rank": 1,
            "num_threads": 1,
            "num_draft_steps": 1,
            "draft_topk": 1,
            "num_draft_tokens": 2,
        }
        for field, least in smallest.items():
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"{field}={value}: need at least {least}")
        for field in ("peer_timeout_s", "stop_timeout_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"{field}={getattr(self, field)}: need seconds above 0")
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"num_kv_blocks={self.num_kv_blocks} and kv_cache_bytes={self.kv_cache_bytes} "
                f"both size the KV pool: set one of them"
            )

    def _check_graph_sizes(self, field: str, bound: str) -> None:
        sizes, limit = getattr(self, field), getattr(self, bound)
        most = -(-limit // self.attn_tp_size) * self.attn_tp_size  # as the default sizes are
        wrong = [size for size in sizes or () if not 1 <= size <= most]
        if wrong:
            reach = f"{bound}={limit}"
            if most > limit:
                reach = f"{most} ({reach} to a multiple of attn_tp_size={self.attn_tp_size})"
            raise ValueError(
                f"{field} has {wrong[0]}: a size is 1 to {reach}, as no step is larger"
            )

    @property
    def host(self) -> str:
        return _split_address(self.listen)[0]

    @property
    def peer_host(self) -> str | None:
        """Host at which the other members reach this executor; None if nothing says so."""
        if self.advertised_host is not None:
            return self.advertised_host
        return None if self.host in WILDCARD_HOSTS else self.host.strip("[]")

    @property
    def bind_host(self) -> str | None:
        """Where what the other members reach listens; None is at `peer_host` alone.

        On every address only where `listen` is too: who names one wants no other to be open.
        """
        if self.advertised_host is not None and self.host in WILDCARD_HOSTS:
            return self.host.strip("[]")
        return None

    @property
    def world_size(self) -> int:
        """Executors of the group."""
        return self.topology.world_size

    @property
    def topology(self) -> Topology:
        """This executor's place in its group."""
        return Topology(
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            attn_tp_rank=self.attn_tp_rank,
            attn_tp_size=self.attn_tp_size,
            ep_size=self.ep_size,
        )

    @property
    def num_rows(self) -> int:
        """Lines of the block table."""
        return self.max_num_seqs

    @property
    def num_logits(self) -> int:
        """``max_num_logits``, resolved."""
        return self.max_num_seqs + 256 if self.max_num_logits is None else self.max_num_logits

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


def _split_address(address: str, field: str = "listen") -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:\s]+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"{field}={address}: need host:port, such as 127.0.0.1:50051 or [::]:0")
    return match[1], int(match[2])
