"""What an executor keeps on its device beside weights, KV and the buffers of collectives, before any
of it is made: for each row of the block table, for its graphs, for a draft model.

Part of the budget's table. The KV pool is sized by what this leaves of the memory that is free.
"""

from collections.abc import Iterator
from math import prod

import torch

from executor.batch.row_starts import PARAMETER_WIDTH
from executor.budget.report import RANK_ROWS, BudgetLine, budget_table
from executor.budget.speculation import SpeculationPlan
from executor.budget.token_budget import FLOAT32_BYTES
from executor.build.plan import Blueprint
from executor.graph.draft_slots import draft_extend_slots, eagle_draft_slots, frozen_kv_slots
from executor.graph.graph_slot import GraphSlot
from executor.model.families.draft_config import DraftConfig

INT64_BYTES = 8
_ROWS, _GRAPH = "max_num_seqs", "largest decode graph"
_VERIFIED = "max_num_seqs * num_draft_tokens"

# Of the sampler, for each token of the vocabulary: a bias (float32), whether it is suppressed and
# whether the prompt has it (bool), how often the output has it (int32).
_VOCABULARY_BYTES = 4 + 1 + 1 + 4

# Tensors as large as its result that ``Sampler.probabilities`` has at once, at most: those that sort
# and filter, with int64 indices, on top of the logits as edited and of what greedy rows get. Counted
# in tests/executor/build/test_memory.py; what a GPU's sort needs for itself comes on top.
PROBABILITY_COPIES = 12


def state_lines(blueprint: Blueprint) -> tuple[BudgetLine, ...]:
    """Returns what is kept, or comes and goes in a step, each line with the setting that bounds it."""
    config, budget = blueprint.config, blueprint.budget
    vocab, graph = blueprint.model.vocab_size, max(blueprint.graph_sizes.decode, default=0)
    row_bytes = vocab * _VOCABULARY_BYTES + (1 + PARAMETER_WIDTH) * INT64_BYTES
    lines = [_line("sampling state of each row", _ROWS, config.max_num_seqs, row_bytes)]
    if graph:
        lines.append(_line("logits of decode graphs", _GRAPH, graph, vocab * FLOAT32_BYTES))
    if blueprint.draft is None or blueprint.speculation is None:
        return tuple(lines)
    plan, itemsize = blueprint.speculation, blueprint.dtype.itemsize
    if graph:
        rows, bound = graph * plan.num_draft_tokens, f"{_GRAPH} * num_draft_tokens"
        lines.append(_line("logits of verify graphs", bound, rows, vocab * FLOAT32_BYTES))
    feature_bytes = blueprint.draft.feature_size * itemsize
    lines.append(
        _line("features of the target", RANK_ROWS, budget.max_tokens_per_rank, feature_bytes)
    )
    return (*lines, *_Drafts(blueprint, blueprint.draft, plan, graph).lines())


def full_table(blueprint: Blueprint) -> tuple[BudgetLine, ...]:
    """Returns the whole table but for what only attention's library can say."""
    return (
        *budget_table(blueprint.budget),
        *state_lines(blueprint),
    )


class _Drafts:
    """Lines of a draft model.

    R rows    S sequences of the largest graph, 0 without    D drafts on the longest path
    K drafts that each step goes on from    N tokens that each sequence verifies    V, H of the draft
    """

    def __init__(
        self, blueprint: Blueprint, draft: DraftConfig, plan: SpeculationPlan, graph: int
    ) -> None:
        self._blueprint = blueprint
        self._plan = plan
        self._graph = graph
        self._hidden_size = draft.layers.hidden_size
        self._hidden_bytes = self._hidden_size * blueprint.dtype.itemsize
        self._vocab_size = draft.vocab_size
        self._is_drawn = blueprint.config.draft_sampling == "rejection"
        self._is_multi = plan.algorithm == "multi_layer_eagle"
        self._has_passes = plan.algorithm != "eagle" or plan.num_draft_steps > 1

    def lines(self) -> Iterator[BudgetLine]:
        plan, graph, num_rows = self._plan, self._graph, self._blueprint.config.max_num_seqs
        first_bytes = self._num_first * (INT64_BYTES + FLOAT32_BYTES)
        state_bytes = first_bytes + (1 + plan.num_layers) * self._hidden_bytes
        yield _line("drafts and hidden states of each row", _ROWS, num_rows, state_bytes)
        if graph:
            yield _line("drafts of graphs", _GRAPH, graph, self._room_bytes)
            yield BudgetLine("inputs of draft graphs", _GRAPH, graph, self._input_bytes)
        if graph and plan.algorithm == "eagle" and plan.is_tree:
            masks = sum(step * plan.topk**2 for step in range(1, plan.num_draft_steps))
            yield _line("tree masks of draft graphs", _GRAPH, graph, masks)
        if self._is_drawn:
            yield from self._probability_lines()

    def _probability_lines(self) -> Iterator[BudgetLine]:
        """Lines of rejection sampling, which needs what each draft was drawn from."""
        plan, graph, num_rows = self._plan, self._graph, self._blueprint.config.max_num_seqs
        draft_bytes = self._vocab_size * FLOAT32_BYTES
        num_kept = plan.num_draft_steps if self._is_multi else 1
        kept = "probabilities of the first drafts of each row"
        yield _line(kept, f"{_ROWS} * drafts", num_rows * num_kept, draft_bytes)
        if graph:
            rows = graph * self._num_room_probs
            yield _line(
                "probabilities of drafts of graphs", f"{_GRAPH} * drafts", rows, draft_bytes
            )
        target_bytes = self._blueprint.model.vocab_size * FLOAT32_BYTES
        num_seqs = self._blueprint.budget.max_num_seqs
        p_rows, q_rows = num_seqs * plan.num_draft_tokens, num_seqs * (plan.num_draft_tokens - 1)
        p_bytes = target_bytes * PROBABILITY_COPIES
        yield _line("p of verified tokens, and work on it", _VERIFIED, p_rows, p_bytes)
        yield _line("q of drafts", f"{_ROWS} * drafts", q_rows, target_bytes)

    @property
    def _num_first(self) -> int:
        """Drafts that a step begins with: of the whole chain, or of the first level."""
        return self._plan.num_draft_steps if self._is_multi else self._plan.topk

    @property
    def _room_bytes(self) -> int:
        """What replays leave for each sequence, probabilities excepted."""
        plan, num_bytes = self._plan, 0
        if not self._is_multi and self._has_passes:  # tokens and parents
            num_bytes += 2 * (plan.num_draft_tokens - 1) * INT64_BYTES
        if plan.extends:
            outputs = (plan.num_layers - 1) * plan.num_extend_rows
            num_bytes += self._num_first * (INT64_BYTES + FLOAT32_BYTES)
            num_bytes += (1 + outputs) * self._hidden_bytes
        return num_bytes

    @property
    def _num_room_probs(self) -> int:
        plan = self._plan
        if self._is_multi:
            return plan.num_draft_steps
        drafted = plan.num_draft_tokens - 1 if self._has_passes else 0
        return drafted + int(plan.extends)

    @property
    def _extend_widths(self) -> tuple[int, ...]:
        """Rows of a sequence in draft-extends: behind a speculative step, and behind a decode."""
        plan = self._plan
        return (plan.num_extend_rows, plan.num_layers) if plan.extends else ()

    @property
    def _input_bytes(self) -> int:
        """What the graphs of all phases read on the device, each kind once: phases share them."""
        num_bytes: dict[tuple[str, int, torch.dtype], int] = {}
        for slots, width in self._inputs():
            for slot in slots:
                if slot.device is None:
                    numel = prod(slot.shape_fn(self._graph, self._graph * width))
                    num_bytes[slot.name, numel, slot.dtype] = numel * slot.dtype.itemsize
        return sum(num_bytes.values())

    def _inputs(self) -> Iterator[tuple[list[GraphSlot], int]]:
        """Yields what the graphs of each phase read, and their token rows per sequence."""
        plan, dtype, hidden_size = self._plan, self._blueprint.dtype, self._hidden_size
        if plan.algorithm == "eagle" and self._has_passes:
            slots = eagle_draft_slots(
                num_steps=plan.num_draft_steps,
                topk=plan.topk,
                hidden_size=hidden_size,
                dtype=dtype,
                drawn_vocab_size=self._vocab_size if self._is_drawn else 0,
            )
            yield slots, plan.topk
        if plan.algorithm == "frozen_kv_mtp":
            slots = frozen_kv_slots(
                num_steps=plan.num_draft_steps,
                hidden_size=hidden_size,
                dtype=dtype,
                is_drawn=self._is_drawn,
            )
            yield slots, plan.topk
        for width in self._extend_widths:
            slots = draft_extend_slots(
                width=width,
                hidden_size=hidden_size,
                dtype=dtype,
                num_layers=plan.num_layers,
                is_drawn=self._is_drawn,
            )
            yield slots, width


def _line(what: str, bound: str, tokens: int, bytes_per_token: int) -> BudgetLine:
    return BudgetLine(what, bound, tokens, tokens * bytes_per_token)
