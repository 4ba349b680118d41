"""Token budget: the most that a step may carry, and every size that follows from it.

    limits of a step ─┐            / attn_tp_size                * executors
    graph sizes ──────┴▶ rows of a DP rank ─▶ rows of an executor ─▶ gathered rows ─▶ experts
    speculative width      (padding included)          └─▶ all-to-all: tokens per EP rank, bytes

Nothing is sized by a batch that happens to come first: a small one would pass, and the first large
one after it would not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

A2A_DEFAULT_TOKENS = 4096  # per EP rank where prompts go by all-to-all, unless a step brings more
A2A_MAX_EP_SIZE = 64  # kMaxRanks of its kernels
A2A_TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)  # SWITCH_TOP_K of its kernels
FLOAT32_BYTES = 4

A2A_ALIGNMENT = 128  # bytes, of every region of its workspace
_A2A_AUX_TOP_K = 22  # its bookkeeping is sized for the largest
_ROUTING_BYTES = 8  # per expert of a token: its id, int32, and its weight, float32


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """The most that one step may carry, and what is sized by it. The same on all executors.

    The router plans within the first three; the executor refuses a step that exceeds them.

    Attributes:
        max_num_batched_tokens: Tokens of a DP rank in a step, before padding.
        max_num_seqs: Its sequences.
        max_num_logits: Its rows of logits: sampled tokens and scored prompt tokens together.
        num_tokens_per_bs: Tokens that a sequence runs where no rank extends: ``num_draft_tokens``
            or more with speculation, else 1.
        draft_lookahead: Rows that the draft model has more than the target for a sequence that
            samples.
        decode_graph_size: Sequences of the largest decode graph, 0 without. Alignment may have
            brought it above ``max_num_seqs``.
        extend_graph_size: Tokens of the largest prefill graph, 0 without.
        dp_size: DP ranks.
        attn_tp_size: Executors of each DP rank.
        ep_size: Parts that the experts fall into.
        hidden_size: Width of hidden states.
        itemsize: Bytes of an element of them.
        top_k: Experts per token.
        vocab_size: Width of logits.
        a2a_extends: Whether steps in which a rank extends reach experts by all-to-all, too.
        quantized_dispatch: ``nvfp4`` or ``mxfp8`` if the all-to-all may send hidden states so.
        max_dispatch_tokens_per_rank: Tokens that one EP rank can send in FlashInfer's all-to-all;
            None derives it.

    Raises:
        ValueError: The sizes do not fit one another. Says which to set, and to what.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_logits: int
    num_tokens_per_bs: int = 1
    draft_lookahead: int = 0
    decode_graph_size: int = 0
    extend_graph_size: int = 0
    dp_size: int = 1
    attn_tp_size: int = 1
    ep_size: int = 1
    hidden_size: int = 1
    itemsize: int = FLOAT32_BYTES
    top_k: int = 0
    vocab_size: int = 1
    a2a_extends: bool = False
    quantized_dispatch: str | None = None
    max_dispatch_tokens_per_rank: int | None = None

    def __post_init__(self) -> None:
        check_step_limits(self.max_num_batched_tokens, self.max_num_seqs, self.max_num_logits)
        sizes = ("num_tokens_per_bs", "dp_size", "attn_tp_size", "ep_size")
        widths = ("hidden_size", "itemsize", "vocab_size")
        check_least(1, **{name: getattr(self, name) for name in (*sizes, *widths)})
        counts = ("top_k", "decode_graph_size", "extend_graph_size")
        check_least(0, **{name: getattr(self, name) for name in counts})

    @property
    def world_size(self) -> int:
        """Executors of the group."""
        return self.dp_size * self.attn_tp_size

    # Rows of hidden states and logits

    @cached_property
    def max_step_tokens(self) -> int:
        """Real tokens of a DP rank in any step."""
        return max(self.max_num_batched_tokens, self.max_num_seqs * self.num_tokens_per_bs)

    @cached_property
    def decode_graph_tokens(self) -> int:
        """Rows of the largest decode graph, 0 without."""
        return self.decode_graph_size * self.num_tokens_per_bs

    @cached_property
    def max_tokens_per_rank(self) -> int:
        """Rows of a DP rank in any step, padding included: a multiple of ``attn_tp_size``."""
        return _round_up(max(self.row_bounds.values()), self.attn_tp_size)

    @cached_property
    def max_decode_tokens_per_rank(self) -> int:
        """The same where no rank extends, verify and draft-extend included."""
        width = max(self.num_tokens_per_bs, 1 + self.draft_lookahead)
        return _round_up(
            max(self.max_num_seqs * width, self.decode_graph_tokens), self.attn_tp_size
        )

    @cached_property
    def max_shard_tokens_per_rank(self) -> int:
        """Rows of an executor between attention calls in any step, padding included."""
        return self.max_tokens_per_rank // self.attn_tp_size

    @cached_property
    def max_gathered_tokens(self) -> int:
        """Rows of all executors together in any step, padding included."""
        return self.world_size * self.max_shard_tokens_per_rank

    @cached_property
    def max_logits_rows(self) -> int:
        """Rows of logits of a DP rank in any step: a decode graph computes its padding's too."""
        speculative = self.max_num_seqs * self.num_tokens_per_bs
        return max(self.max_num_logits, speculative, self.decode_graph_tokens)

    # Experts

    @cached_property
    def gather_bytes_per_token(self) -> int:
        """Bytes of a token in an all-gather, with its experts' ids and weights."""
        return dispatch_bytes_per_token(self.hidden_size, self.top_k, itemsize=self.itemsize)

    @cached_property
    def a2a_least_tokens(self) -> int:
        """Tokens that a step may bring an EP rank to send by all-to-all."""
        extends = self.a2a_extends
        rows = self.max_tokens_per_rank if extends else self.max_decode_tokens_per_rank
        return rows // self.attn_tp_size

    @cached_property
    def a2a_max_num_tokens(self) -> int:
        """Tokens that one EP rank can send in FlashInfer's all-to-all.

        Never times ``ep_size``: the workspace already has a place per source for as many.

        Raises:
            ValueError: ``max_dispatch_tokens_per_rank`` is below what a step may bring.
        """
        cap, least = self.max_dispatch_tokens_per_rank, self.a2a_least_tokens
        if cap is None:
            return max(least, A2A_DEFAULT_TOKENS) if self.a2a_extends else least
        if cap < least:
            others = "max_num_batched_tokens, max_num_seqs" if self.a2a_extends else "max_num_seqs"
            raise ValueError(
                f"max_dispatch_tokens_per_rank={cap}, but a step may bring {least} tokens to an EP "
                f"rank (attn_tp_size={self.attn_tp_size} of them share a DP rank's): raise "
                f"max_dispatch_tokens_per_rank to {least}, or lower {others} or the graph sizes"
            )
        return cap

    @cached_property
    def a2a_dispatch_bytes_per_token(self) -> int:
        """Bytes of a token on its way to its experts, with their ids and weights."""
        return dispatch_bytes_per_token(
            self.hidden_size, self.top_k, itemsize=self.itemsize, quantized=self.quantized_dispatch
        )

    @cached_property
    def a2a_combine_bytes_per_token(self) -> int:
        """Bytes of a token on its way back."""
        return self.hidden_size * self.itemsize

    @cached_property
    def a2a_workspace_bytes(self) -> int:
        """Memory of each EP rank for FlashInfer's all-to-all."""
        return a2a_workspace_size_per_rank(
            ep_size=self.ep_size,
            max_num_tokens=self.a2a_max_num_tokens,
            dispatch_payload_size_per_token=self.a2a_dispatch_bytes_per_token,
            combine_payload_size_per_token=self.a2a_combine_bytes_per_token,
        )

    @property
    def row_bounds(self) -> dict[str, int]:
        """What each setting alone would make of ``max_tokens_per_rank``, before alignment."""
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens
            + self.max_num_seqs * self.draft_lookahead,
            "max_num_seqs * num_tokens_per_bs": self.max_num_seqs * self.num_tokens_per_bs,
            "largest decode graph * num_tokens_per_bs": self.decode_graph_tokens,
            "largest prefill graph": self.extend_graph_size,
        }


def check_step_limits(max_num_batched_tokens: int, max_num_seqs: int, max_num_logits: int) -> None:
    """Checks that a step in which every sequence decodes fits.

    Raises:
        ValueError: Names the setting that is too small.
    """
    check_least(1, max_num_seqs=max_num_seqs)
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens} is below "
            f"max_num_seqs={max_num_seqs}: a full decode step would not fit"
        )
    if max_num_logits < max_num_seqs:
        raise ValueError(
            f"max_num_logits={max_num_logits} is below max_num_seqs="
            f"{max_num_seqs}: a step in which every sequence samples would not fit"
        )


def dispatch_bytes_per_token(
    hidden_size: int, top_k: int, *, itemsize: int, quantized: str | None = None
) -> int:
    """Returns the most bytes that a dispatched token takes: hidden state, expert ids and weights.

    Args:
        hidden_size: H.
        top_k: K.
        itemsize: Bytes of an element, 2 in bfloat16: 2H + 8K.
        quantized: Format in which the hidden state may travel as well, so that the larger of both
            counts: ``nvfp4`` takes H/2 and a scale byte per 16, ``mxfp8`` H and one per 32.

    Raises:
        ValueError: A size is too small, or the format is unknown or does not divide H.
    """
    check_least(1, hidden_size=hidden_size, itemsize=itemsize)
    check_least(0, top_k=top_k)
    hidden_bytes = [hidden_size * itemsize]
    if quantized is not None:
        formats = {"nvfp4": (16, hidden_size // 2), "mxfp8": (32, hidden_size)}
        if quantized not in formats:
            raise ValueError(
                f"quantized_dispatch={quantized}: need one of {', '.join(formats)}, or none"
            )
        per_scale, value_bytes = formats[quantized]
        if hidden_size % per_scale:
            raise ValueError(
                f"quantized_dispatch={quantized} has a scale per {per_scale} values, which do not "
                f"divide hidden_size={hidden_size}"
            )
        hidden_bytes.append(value_bytes + hidden_size // per_scale)
    return max(hidden_bytes) + _ROUTING_BYTES * top_k


def a2a_workspace_size_per_rank(
    *,
    ep_size: int,
    max_num_tokens: int,
    dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_num_experts: int = 0,
) -> int:
    """Returns the bytes that FlashInfer's all-to-all takes of each EP rank's memory.

    Args:
        ep_size: EP ranks. The size has a place per source, so it grows with them by itself.
        max_num_tokens: Tokens that **one** EP rank sends at most.
        dispatch_payload_size_per_token: Bytes of a token on its way to its experts.
        combine_payload_size_per_token: Bytes of a token on its way back.
        eplb_num_experts: Experts whose load it gathers; 0 for none.

    Raises:
        ValueError: A size is too small.

    Source: FlashInfer 0.7.2, moe_a2a_get_workspace_size_per_rank, with which
    tests/executor/budget/test_token_budget.py compares it where the library's module is there.
    """
    check_least(
        1,
        ep_size=ep_size,
        max_num_tokens=max_num_tokens,
        dispatch_payload_size_per_token=dispatch_payload_size_per_token,
        combine_payload_size_per_token=combine_payload_size_per_token,
    )
    check_least(0, eplb_num_experts=eplb_num_experts)
    aux_bytes = 0
    for part in (
        8 + 8 * ep_size,
        4 * ep_size,
        4 * ep_size,
        max_num_tokens * _A2A_AUX_TOP_K * 4,
        max_num_tokens * _A2A_AUX_TOP_K * 4,
        ep_size * eplb_num_experts * 4,
    ):
        aux_bytes = _round_up(aux_bytes + part, A2A_ALIGNMENT)
    num_places = ep_size * max_num_tokens
    return (
        aux_bytes
        + _round_up(num_places * dispatch_payload_size_per_token, A2A_ALIGNMENT)
        + _round_up(num_places * combine_payload_size_per_token, A2A_ALIGNMENT)
    )


def check_flashinfer_a2a(ep_size: int, top_k: int) -> None:
    """Checks that FlashInfer's all-to-all has a kernel for these sizes.

    Raises:
        ValueError: Names the nearest sizes that it has one for.
    """
    if not 1 <= ep_size <= A2A_MAX_EP_SIZE:
        raise ValueError(
            f"ep_size={ep_size}: moe_a2a=flashinfer takes 1 to {A2A_MAX_EP_SIZE} EP ranks; use "
            f"{min(max(ep_size, 1), A2A_MAX_EP_SIZE)} executors, or moe_a2a=none or torch"
        )
    if top_k not in A2A_TOP_KS:
        raise ValueError(
            f"num_experts_per_tok={top_k}: moe_a2a=flashinfer has no kernel for it (the nearest "
            f"are for {_nearest(A2A_TOP_KS, top_k)}); use moe_a2a=none or torch"
        )


def check_least(least: int, **values: int) -> None:
    """Checks that none of the values is below the least.

    Raises:
        ValueError: Names the first that is.
    """
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}={value}: need at least {least}")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _nearest(sizes: Sequence[int], given: int) -> str:
    below = [size for size in sizes if size < given][-1:]
    above = [size for size in sizes if size > given][:1]
    return " and ".join(str(size) for size in below + above)
