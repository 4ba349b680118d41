"""The budget for people: what is sized, by which bound, its tokens and bytes.

what                             bound                                         tokens      bytes
hidden states of a DP rank       max_num_batched_tokens                          2048   16777216
hidden states of an executor     hidden states of a DP rank / attn_tp_size=2     1024    8388608
...

Each line is logged by itself, so a bound is a setting or another line by its name. On a CPU a
reduce-scatter takes scratch besides, as much as the rows that it sums. What is kept of rows, graphs and
drafts is in ``budget_state.py``, what attention allocates in ``layers/attention_workspace.py``.
"""

from dataclasses import dataclass

from executor.budget.token_budget import FLOAT32_BYTES, TokenBudget

RANK_ROWS = "hidden states of a DP rank"
EXECUTOR_ROWS = "hidden states of an executor"  # between attention calls
GATHERED_ROWS = "rows gathered for experts, with ids and weights"
LOGITS = "logits of a DP rank"
A2A_TOKENS = "all-to-all workspace, tokens of an EP rank"


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One size that follows from the budget.

    Attributes:
        what: What is sized.
        bound: The setting or size that it follows from.
        tokens: Its rows at most: of tokens, or of sequences. 0 if it has none.
        bytes: What they take.
    """

    what: str
    bound: str
    tokens: int
    bytes: int


def budget_table(budget: TokenBudget, moe_runner: str = "grouped") -> tuple[BudgetLine, ...]:
    """Returns what is sized, each size after those that it follows from.

    Args:
        budget: The sizes.
        moe_runner: What runs the experts, as in ExecutorConfig.
    """
    hidden_bytes = budget.a2a_combine_bytes_per_token
    per_rank, shard = budget.max_tokens_per_rank, budget.max_shard_tokens_per_rank
    shard_bound = f"{RANK_ROWS} / attn_tp_size={budget.attn_tp_size}"
    lines = [
        _line(RANK_ROWS, _row_bound(budget), per_rank, hidden_bytes),
        _line(EXECUTOR_ROWS, shard_bound, shard, hidden_bytes),
    ]
    if budget.attn_tp_size > 1:
        lines += [
            _line("rows gathered for attention", RANK_ROWS, per_rank, hidden_bytes),
            _line("rows that attention sums", RANK_ROWS, per_rank, hidden_bytes),
            _line("sums of attention", EXECUTOR_ROWS, shard, hidden_bytes),
        ]
    return (*lines, *_logits_lines(budget), *_expert_lines(budget, moe_runner))


def _logits_lines(budget: TokenBudget) -> list[BudgetLine]:
    rows, attn_tp_size = budget.max_logits_rows, budget.attn_tp_size
    bound = "largest decode graph * num_tokens_per_bs"
    if rows == budget.max_num_logits:
        bound = "max_num_logits"
    elif rows > budget.decode_graph_tokens:
        bound = "max_num_seqs * num_tokens_per_bs"
    num_columns = -(-budget.vocab_size // attn_tp_size) * attn_tp_size  # equal shares
    lines = [_line(LOGITS, bound, rows, num_columns * FLOAT32_BYTES)]
    if attn_tp_size > 1:
        lines.append(_line("logits as gathered", LOGITS, rows, num_columns * budget.itemsize))
    return lines


def _expert_lines(budget: TokenBudget, moe_runner: str) -> list[BudgetLine]:
    hidden_bytes, row_bytes = budget.a2a_combine_bytes_per_token, budget.gather_bytes_per_token
    shard, gathered = budget.max_shard_tokens_per_rank, budget.max_gathered_tokens
    gathered_bound, lines = EXECUTOR_ROWS, []
    if budget.world_size > 1:
        sent = "rows sent for experts, with ids and weights"
        lines += [
            _line(sent, EXECUTOR_ROWS, shard, row_bytes),
            _line(
                GATHERED_ROWS,
                f"{EXECUTOR_ROWS} * {budget.world_size} executors",
                gathered,
                row_bytes,
            ),
            _line("sums of experts", EXECUTOR_ROWS, shard, hidden_bytes),
        ]
        gathered_bound = GATHERED_ROWS
    a2a_bound = f"{A2A_TOKENS} * ep_size={budget.ep_size}"
    if budget.moe_a2a == "flashinfer":
        num_bytes = budget.a2a_workspace_bytes
        lines.append(
            BudgetLine(A2A_TOKENS, _a2a_bound(budget), budget.a2a_max_num_tokens, num_bytes)
        )
    elif budget.moe_a2a == "torch":
        what = "all-to-all, rows packed, sent and received"
        bound = f"{EXECUTOR_ROWS} * (1 + 2 * {budget.world_size} executors)"
        lines.append(_line(what, bound, shard + 2 * gathered, row_bytes))
    if moe_runner == "cutedsl":
        what, rows = "CuteDSL wrapper, rows by all-gather", budget.cutedsl_all_gather_tokens
        lines.append(_line(what, gathered_bound, rows, hidden_bytes))
        if budget.moe_a2a == "flashinfer":
            what, rows = "CuteDSL wrapper, rows by all-to-all", budget.cutedsl_all_to_all_tokens
            lines.append(_line(what, a2a_bound, rows, hidden_bytes))
    bound = gathered_bound if budget.max_moe_rows == gathered else a2a_bound
    lines.append(_line("rows that experts see in a pass", bound, budget.max_moe_rows, hidden_bytes))
    return lines


def _line(what: str, bound: str, tokens: int, bytes_per_token: int) -> BudgetLine:
    return BudgetLine(what, bound, tokens, tokens * bytes_per_token)


def _row_bound(budget: TokenBudget) -> str:
    bounds = budget.row_bounds
    bound = max(bounds, key=bounds.__getitem__)
    if bounds[bound] == budget.max_tokens_per_rank:
        return bound
    return f"{bound}, to a multiple of attn_tp_size={budget.attn_tp_size}"


def _a2a_bound(budget: TokenBudget) -> str:
    if budget.max_dispatch_tokens_per_rank is not None:
        return "max_dispatch_tokens_per_rank"
    is_default = budget.a2a_max_num_tokens > budget.max_tokens_per_rank
    return "default" if is_default else RANK_ROWS
