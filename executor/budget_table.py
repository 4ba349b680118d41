"""The budget for people: what is sized, by which bound, its tokens and bytes.

what                                     bound                        tokens          bytes
hidden states of a DP rank               max_num_batched_tokens         2048       16777216
...
"""

from dataclasses import dataclass

from executor.budget import FLOAT32_BYTES, TokenBudget


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One size that follows from the budget.

    Attributes:
        what: What is sized.
        bound: The setting or size that it follows from.
        tokens: Its rows at most, one per token.
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
    gathered, logits = budget.max_gathered_tokens, budget.max_logits_rows
    is_logits_limit = logits == budget.max_num_logits
    lines = [
        BudgetLine(
            "hidden states of a DP rank", _row_bound(budget), per_rank, per_rank * hidden_bytes
        ),
        BudgetLine(
            "hidden states of an executor between attention calls",
            f"those / attn_tp_size={budget.attn_tp_size}",
            shard,
            shard * hidden_bytes,
        ),
        BudgetLine(
            "logits of a DP rank",
            "max_num_logits" if is_logits_limit else "largest decode graph * num_tokens_per_bs",
            logits,
            logits * budget.vocab_size * FLOAT32_BYTES,
        ),
    ]
    if budget.world_size > 1:
        lines.insert(
            2,
            BudgetLine(
                "rows gathered for experts, with ids and weights",
                f"those * {budget.world_size} executors",
                gathered,
                gathered * budget.gather_bytes_per_token,
            ),
        )
    if budget.moe_a2a == "flashinfer":
        lines.append(
            BudgetLine(
                "all-to-all workspace, tokens of an EP rank",
                _a2a_bound(budget),
                budget.a2a_max_num_tokens,
                budget.a2a_workspace_bytes,
            )
        )
    elif budget.moe_a2a == "torch":
        lines.append(
            BudgetLine(
                "all-to-all, rows sent and received",
                "2 * rows gathered",
                2 * gathered,
                2 * gathered * budget.gather_bytes_per_token,
            )
        )
    is_gather_limit = budget.max_moe_rows == gathered
    lines.append(
        BudgetLine(
            "rows that experts see in a pass",
            "hidden states of all executors"
            if is_gather_limit
            else f"all-to-all tokens * ep_size={budget.ep_size}",
            budget.max_moe_rows,
            budget.max_moe_rows * hidden_bytes,
        )
    )
    return tuple(lines)


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
    return "default" if is_default else "hidden states of a DP rank"
