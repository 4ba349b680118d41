"""Start-up table of the token budget: each size, its bound, its tokens and bytes.

what                             bound                                         tokens      bytes
hidden states of a DP rank       max_num_batched_tokens                          2048   16777216
hidden states of an executor     hidden states of a DP rank / attn_tp_size=2     1024    8388608
...

Each line is logged by itself, so a bound is a setting or another line by its name. On a CPU a
reduce-scatter takes scratch besides, as much as the rows that it sums. These are the lines that follow
from the budget; owners of other memory report theirs once it is made (``build/memory.py``).
"""

from dataclasses import dataclass

from executor.budget.token_budget import FLOAT32_BYTES, TokenBudget

RANK_ROWS = "hidden states of a DP rank"
EXECUTOR_ROWS = "hidden states of an executor"  # between attention calls
LOGITS = "logits of a DP rank"
A2A_TOKENS = "all-to-all workspace, tokens of an EP rank"


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One size that follows from the budget.

    Attributes:
        what: What is sized.
        bound: The setting or size that it follows from.
        tokens: Its rows at most: of tokens, sequences, or slots of experts. 0 if it has none.
        bytes: What they take.
    """

    what: str
    bound: str
    tokens: int
    bytes: int


def budget_table(budget: TokenBudget) -> tuple[BudgetLine, ...]:
    """Returns what is sized, each size after those that it follows from."""
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
    return (*lines, *_logits_lines(budget), *_expert_lines(budget))


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


def _expert_lines(budget: TokenBudget) -> list[BudgetLine]:
    if budget.world_size == 1:
        return []
    hidden_bytes, row_bytes = budget.a2a_combine_bytes_per_token, budget.gather_bytes_per_token
    shard, gathered = budget.max_shard_tokens_per_rank, budget.max_gathered_tokens
    bound = f"{EXECUTOR_ROWS} * {budget.world_size} executors"
    return [
        _line("rows sent for experts, with ids and weights", EXECUTOR_ROWS, shard, row_bytes),
        _line("rows gathered for experts, with ids and weights", bound, gathered, row_bytes),
        _line("sums of experts", EXECUTOR_ROWS, shard, hidden_bytes),
    ]


def _line(what: str, bound: str, tokens: int, bytes_per_token: int) -> BudgetLine:
    return BudgetLine(what, bound, tokens, tokens * bytes_per_token)


def _row_bound(budget: TokenBudget) -> str:
    bounds = budget.row_bounds
    bound = max(bounds, key=bounds.__getitem__)
    if bounds[bound] == budget.max_tokens_per_rank:
        return bound
    return f"{bound}, to a multiple of attn_tp_size={budget.attn_tp_size}"


def a2a_bound(budget: TokenBudget) -> str:
    """Returns what decides on ``a2a_max_num_tokens``: a setting, or another line."""
    if budget.max_dispatch_tokens_per_rank is not None:
        return "max_dispatch_tokens_per_rank"
    if budget.a2a_extends:
        is_default = budget.a2a_max_num_tokens > budget.a2a_least_tokens
        return "default" if is_default else RANK_ROWS
    decoding = budget.max_num_seqs * budget.num_tokens_per_bs
    is_graph = budget.decode_graph_tokens > decoding
    return f"{'largest decode graph' if is_graph else 'max_num_seqs'} * num_tokens_per_bs"
