"""What all DP ranks must do alike, decided once per step. Pure functions."""

from bisect import bisect_left
from collections.abc import Sequence

from router.scheduling.step import Agreement, DpPaddingMode, GraphMiss


def fill_level(
    num_decodes: Sequence[int], num_prompt_tokens: Sequence[int], *, max_tokens: int, floor: int
) -> int:
    """Returns the number of tokens up to which every rank fills its step with prompt tokens.

    A step is as long as its fullest rank, so ranks fill up to one level, as water does. That
    level is what the rank with the least to do can reach; below ``floor`` it does not go, or a
    short prompt on one rank would hold up a long one on another. The level bounds prompts
    alone: decodes always run.

    Args:
        num_decodes: [dp_size] tokens that each rank runs anyway.
        num_prompt_tokens: [dp_size] prompt tokens that each rank could run.
        max_tokens: Upper bound of a rank's tokens.
        floor: The least level, unless ``max_tokens`` is below.
    """
    reachable = [
        decodes + prompt
        for decodes, prompt in zip(num_decodes, num_prompt_tokens, strict=True)
        if prompt > 0
    ]
    if not reachable:
        return 0
    return min(max_tokens, max(floor, min(reachable), *num_decodes))


def agree(
    num_tokens: Sequence[int],
    num_logits: Sequence[int],
    *,
    has_extend: bool,
    num_sequences: Sequence[int],
    attn_tp_size: int = 1,
    decode_graph_sizes: Sequence[int] = (),
    extend_graph_sizes: Sequence[int] = (),
    num_draft_tokens: int = 0,
    num_draft_rows: Sequence[int] = (),
    num_sampled: Sequence[int] = (),
) -> Agreement:
    """Decides padding and graph from each DP rank's counts.

    A rank that replayed another graph, or laid out its gather otherwise, would leave the rest
    waiting in a collective. Only the router sees every rank, so it decides and nobody votes.

    Args:
        num_tokens: [dp_size] tokens of each rank; at least one is not 0. They are sent as they
            are: rounding up for attention TP is every executor's own arithmetic.
        num_logits: [dp_size] rows of logits of each rank.
        has_extend: Whether any rank runs prompt tokens.
        num_sequences: [dp_size] sequences of each rank.
        attn_tp_size: Executors that share a rank's rows.
        decode_graph_sizes: Captured sizes in sequences, ascending; may be empty.
        extend_graph_sizes: Captured sizes in tokens, ascending; may be empty.
        num_draft_tokens: Tokens that each sequence verifies, and `num_tokens` counts them all; 0:
            the step is not speculative.
        num_draft_rows: [dp_size] rows that the draft model runs behind a step that is not
            speculative; empty where it runs none.
        num_sampled: [dp_size] sequences that sample; empty likewise.
    """
    assert max(num_tokens) > 0, "an idle system takes no step"
    if has_extend:
        picked = pick_extend_graph_size(num_tokens, extend_graph_sizes)
    else:
        picked = pick_graph_size(max(num_sequences), decode_graph_sizes)
    graph_size, graph_miss = (None, picked) if isinstance(picked, GraphMiss) else (picked, None)
    if graph_size is not None:
        padding_mode = DpPaddingMode.MAX_LEN  # a captured collective has one size
    else:
        padding_mode = pick_padding_mode(
            num_tokens, has_extend=has_extend, attn_tp_size=attn_tp_size
        )
    return Agreement(
        tuple(num_tokens),
        tuple(num_logits),
        has_extend,
        padding_mode,
        graph_size,
        graph_miss,
        num_draft_tokens,
        tuple(num_draft_rows),
        tuple(num_sampled),
    )


def pick_graph_size(size: int, captured: Sequence[int]) -> int | GraphMiss:
    """Returns the smallest captured size that fits, or why none does."""
    if not captured:
        return GraphMiss.NOT_CAPTURED
    index = bisect_left(captured, size)
    return captured[index] if index < len(captured) else GraphMiss.TOO_LARGE


def pick_extend_graph_size(num_tokens: Sequence[int], captured: Sequence[int]) -> int | GraphMiss:
    """Returns the graph for an extend, or why running eagerly is the better choice.

    A rank without tokens has nothing to lay into a graph's attention metadata, and more than
    half a graph of padding costs more than its launches save.
    """
    picked = pick_graph_size(max(num_tokens), captured)
    if isinstance(picked, GraphMiss):
        return picked
    if min(num_tokens) == 0:
        return GraphMiss.IDLE_RANK
    return GraphMiss.MOSTLY_PADDING if picked > 2 * max(num_tokens) else picked


def pick_padding_mode(
    num_tokens: Sequence[int], *, has_extend: bool, attn_tp_size: int = 1
) -> DpPaddingMode:
    """Picks the gather that moves fewer bytes.

    An all-reduce sends each row twice and an all-gather once, so MAX_LEN wins until more than
    half of its rows are padding. Prompts are too uneven to bet on that. What is gathered are the
    equal shards of ``attn_tp_size`` executors, so a rank's rows count as their next multiple.

    Source: SGLang, srt/layers/dp_attention.py, DpPaddingMode.get_dp_padding_mode.
    """
    if len(num_tokens) == 1:
        return DpPaddingMode.MAX_LEN
    if has_extend:
        return DpPaddingMode.SUM_LEN
    if attn_tp_size > 1:
        num_tokens = [-(-count // attn_tp_size) for count in num_tokens]  # a common factor less
    if 2 * sum(num_tokens) < max(num_tokens) * len(num_tokens):
        return DpPaddingMode.SUM_LEN
    return DpPaddingMode.MAX_LEN


def pick_rank(
    num_cached_tokens: Sequence[int], work: Sequence[float], candidates: Sequence[int]
) -> int:
    """Picks the DP rank for a new sequence: a cached prefix counts for as much as it saves.

    Args:
        num_cached_tokens: [dp_size] prompt tokens that each rank would not have to run.
        work: [dp_size] what each rank carries, in tokens.
        candidates: Ranks that can run the sequence in the next step; at least one.
    """
    return min(
        candidates, key=lambda rank: (work[rank] - num_cached_tokens[rank], work[rank], rank)
    )
