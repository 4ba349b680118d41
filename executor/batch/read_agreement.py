"""Agreement of a step: the counts of every rank, the padding and the graph, alike for all ranks."""

from typing import NamedTuple

from executor.batch.limits import StepLimits
from executor.errors import InvalidStep
from executor.parallel.layout import DpLayout, DpPaddingMode
from protos.executor.v1 import executor_pb2 as pb

PADDING_MODES = {
    pb.DP_PADDING_MODE_MAX_LEN: DpPaddingMode.MAX_LEN,
    pb.DP_PADDING_MODE_SUM_LEN: DpPaddingMode.SUM_LEN,
}


class Agreement(NamedTuple):
    """The agreement as it was read. The attributes are those of ``StepColumns``."""

    layout: DpLayout
    draft_counts: tuple[int, ...]
    num_sampled: tuple[int, ...]


def read_width(message: pb.StepAgreement, limits: StepLimits) -> int:
    """Returns the tokens that each sequence runs in a speculative step, 0 in any other.

    Raises:
        InvalidStep: This executor takes no step of such a width.
    """
    width, plan = message.num_draft_tokens, limits.speculation
    if not width:
        return 0
    if plan is None:
        problem = "this executor has no draft model: start it with --draft-model"
    elif width != plan.num_draft_tokens:
        problem = f"need {plan.num_draft_tokens}, or 0 for a step that is not speculative"
    elif message.has_extend:
        problem = "with has_extend: a step that runs prompts is not speculative"
    else:
        return width
    raise _error("num_draft_tokens", f"num_draft_tokens={width}: {problem}")


def read_agreement(message: pb.StepAgreement, limits: StepLimits) -> Agreement:
    """Reads the agreement and checks it against the limits, which all ranks have alike.

    Raises:
        InvalidStep: With the field at fault, its value and what fits.
    """
    width, budget = message.num_draft_tokens, limits.budget
    most_tokens, most_logits = budget.max_num_batched_tokens, budget.max_num_logits
    if width:
        most_tokens = most_logits = budget.max_num_seqs * width
    counts = _read_counts(message, "global_num_tokens", most_tokens, limits)
    _read_counts(message, "global_num_tokens_for_logprob", most_logits, limits)
    draft_counts, num_sampled = _read_draft_counts(message, limits)
    return Agreement(_read_layout(message, counts, limits), draft_counts, num_sampled)


def check_own_counts(message: pb.StepAgreement, own: dict[str, int], part: pb.RankStep) -> None:
    """Checks that the agreement tells of this executor's part what it is.

    Args:
        message: The agreement.
        own: This part's count in each field of counts.
        part: This executor's.

    Raises:
        InvalidStep: With the field that tells otherwise.
    """
    for field, count in own.items():
        told = getattr(message, field)[part.dp_rank]
        if told != count:
            raise _error(field, f"{field} says {told} for this executor's part, which has {count}")
    if part.forward_mode == pb.FORWARD_MODE_EXTEND and not message.has_extend:
        raise _error("has_extend", "has_extend is not set, but this part's forward_mode is EXTEND")


def _error(field: str, problem: str) -> InvalidStep:
    return InvalidStep(problem, field=f"agreement.{field}")


def _read_counts(
    message: pb.StepAgreement, field: str, most: int, limits: StepLimits
) -> tuple[int, ...]:
    counts = tuple(getattr(message, field))
    if len(counts) != limits.topology.dp_size:
        raise _error(
            field, f"{field} has {len(counts)} entries; dp_size is {limits.topology.dp_size}"
        )
    if max(counts) > most:
        raise _error(field, f"{field} has {max(counts)}; the budget is {most}")
    return counts


def _read_draft_counts(
    message: pb.StepAgreement, limits: StepLimits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns every DP rank's tokens of the draft model, and its sequences that sample.

    Both are empty where the draft model runs nothing behind the step, or the same rows for each
    sequence.
    """
    most = {
        "global_num_tokens_for_draft": limits.budget.max_tokens_per_rank,
        "global_num_sampled": limits.budget.max_num_seqs,
    }
    given = [field for field in most if getattr(message, field)]
    if not given:  # the router does without drafts, or they need no counts
        return (), ()
    plan = limits.speculation
    if plan is None or not plan.extends or message.num_draft_tokens:
        raise _error(
            given[0],
            f"{given[0]} is set: only a step that is not speculative has it, and only where the "
            f"draft model keeps KV of its own",
        )
    tokens, sampled = (_read_counts(message, *item, limits) for item in most.items())
    return tokens, sampled


def _read_layout(
    message: pb.StepAgreement, counts: tuple[int, ...], limits: StepLimits
) -> DpLayout:
    """Returns the layout, which fits every buffer with what padding and a graph add."""
    if message.padding_mode not in PADDING_MODES:
        raise _error(
            "padding_mode", f"padding_mode={message.padding_mode}: need MAX_LEN or SUM_LEN"
        )
    graph_size, graph = None, ""
    if message.HasField("graph_size"):
        width = message.num_draft_tokens or 1
        _check_graph_size(message, [count // width for count in counts], limits)
        graph_size, graph = message.graph_size * width, f" of graph_size={message.graph_size}"
    most = limits.budget.max_tokens_per_rank
    if (num_rows := graph_size or max(counts)) > most:
        raise InvalidStep(
            f"the step{graph} has {num_rows} rows on a DP rank; the budget is {most}",
            field="agreement",
        )
    return DpLayout(
        counts,
        PADDING_MODES[message.padding_mode],
        limits.topology.dp_rank,
        graph_size,
        message.has_extend,
        limits.topology.attn_tp_rank,
        limits.topology.attn_tp_size,
    )


def _check_graph_size(message: pb.StepAgreement, counts: list[int], limits: StepLimits) -> None:
    kind = "extend" if message.has_extend else "decode"
    captured: tuple[int, ...] = getattr(limits.graph_sizes, kind)
    size = message.graph_size
    if size not in captured:
        sizes = (
            f"the {kind} graphs are {list(captured)}" if captured else f"there is no {kind} graph"
        )
        problem = f"is not captured: {sizes}"
    elif size < max(counts):
        problem = f"is below the {max(counts)} tokens of a rank"
    elif message.has_extend and min(counts) == 0:
        problem = "with has_extend, but a rank has no tokens: then every rank runs eagerly"
    elif message.padding_mode != pb.DP_PADDING_MODE_MAX_LEN:
        problem = "needs padding_mode MAX_LEN: a captured collective has one size"
    else:
        return
    raise _error("graph_size", f"graph_size={size} {problem}")
