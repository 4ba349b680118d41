"""Reads what all ranks were told alike: every rank's counts, the padding, the graph to replay."""

from executor.batch.limits import StepLimits
from executor.budget.token_budget import TokenBudget
from executor.errors import InvalidStep
from executor.parallel.layout import DpLayout, DpPaddingMode
from protos.executor.v1 import executor_pb2 as pb

PADDING_MODES = {
    pb.DP_PADDING_MODE_MAX_LEN: DpPaddingMode.MAX_LEN,
    pb.DP_PADDING_MODE_SUM_LEN: DpPaddingMode.SUM_LEN,
}


def check_padded(layout: DpLayout, budget: TokenBudget) -> None:
    """Checks that the step fits every buffer, with what padding and a graph add to its tokens.

    The rows of the DP rank that has most bound the others: those of executors, those gathered.
    """
    rows = layout.max_num_tokens if layout.graph_size is None else layout.graph_size
    most = budget.max_tokens_per_rank
    if rows > most:
        graph = "" if layout.graph_size is None else f" of graph_size={layout.graph_size}"
        raise InvalidStep(
            f"the step{graph} has {rows} rows on a DP rank; the budget is {most}",
            field="agreement",
        )


def read_layout(agreement: pb.StepAgreement, limits: StepLimits) -> DpLayout:
    if agreement.padding_mode not in PADDING_MODES:
        raise InvalidStep(
            f"padding_mode={agreement.padding_mode}: need MAX_LEN or SUM_LEN",
            field="agreement.padding_mode",
        )
    counts = counts_by_rank(agreement, "global_num_tokens", limits)
    graph_size = None
    if agreement.HasField("graph_size"):
        width = agreement.num_draft_tokens or 1
        graph_size = agreement.graph_size * width
        _check_graph_size(agreement, tuple(count // width for count in counts), limits)
    mode = PADDING_MODES[agreement.padding_mode]
    topology = limits.topology
    return DpLayout(
        counts,
        mode,
        topology.dp_rank,
        graph_size,
        agreement.has_extend,
        topology.attn_tp_rank,
        topology.attn_tp_size,
    )


def read_draft_counts(
    agreement: pb.StepAgreement, limits: StepLimits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns every DP rank's tokens of the draft model, and its sequences that sample.

    Both are empty where the draft model runs nothing behind the step, or the same rows for each
    sequence.

    Raises:
        InvalidStep: They are there although nobody needs them, or one without the other.
    """
    fields = ("global_num_tokens_for_draft", "global_num_sampled")
    plan, is_followed = limits.speculation, any(getattr(agreement, field) for field in fields)
    if plan is not None and plan.extends and not agreement.num_draft_tokens:
        if not is_followed:  # the router does without drafts
            return (), ()
        first, second = (counts_by_rank(agreement, field, limits) for field in fields)
        return first, second
    for field in fields:
        if getattr(agreement, field):
            raise InvalidStep(
                f"{field} is set: only a step that is not speculative has it, and only where the "
                f"draft model keeps KV of its own",
                field=f"agreement.{field}",
            )
    return (), ()


def _check_graph_size(
    agreement: pb.StepAgreement, counts: tuple[int, ...], limits: StepLimits
) -> None:
    kind, captured = "decode", limits.graph_sizes.decode
    if agreement.has_extend:
        kind, captured = "extend", limits.graph_sizes.extend
    size, problem = agreement.graph_size, None
    if size not in captured:
        sizes = (
            f"the {kind} graphs are {list(captured)}" if captured else f"there is no {kind} graph"
        )
        problem = f"is not captured: {sizes}"
    elif size < max(counts):
        problem = f"is below the {max(counts)} tokens of a rank"
    elif agreement.has_extend and min(counts) == 0:
        problem = "with has_extend, but a rank has no tokens: then every rank runs eagerly"
    elif agreement.padding_mode != pb.DP_PADDING_MODE_MAX_LEN:
        problem = "needs padding_mode MAX_LEN: a captured collective has one size"
    if problem is not None:
        raise InvalidStep(f"graph_size={size} {problem}", field="agreement.graph_size")


def counts_by_rank(agreement: pb.StepAgreement, field: str, limits: StepLimits) -> tuple[int, ...]:
    counts = tuple(getattr(agreement, field))
    if len(counts) != limits.topology.dp_size:
        raise InvalidStep(
            f"{field} has {len(counts)} entries; dp_size is {limits.topology.dp_size}",
            field=f"agreement.{field}",
        )
    return counts
