"""Executor of the draft tests. Imports no Transformers: processes start here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from executor.model.families import read_spec
from executor.parallel.layout import DpPaddingMode, Topology
from tests.executor.support.drafts.drafting import DraftRank, Entries
from tests.executor.support.ranks.attention_tp_ranks import MAX_ROWS, communicators
from tests.executor.support.ranks.ranks import join, topology_of
from tests.executor.support.serving import layout_of


@dataclass(frozen=True, slots=True)
class Drafting:
    """What each DP rank runs.

    Attributes:
        prompts: Of each DP rank, tokens of some rows that the target runs first.
        steps: Of each draft pass, each DP rank's entries, maybe none.
    """

    prompts: Sequence[Mapping[int, Sequence[int]]]
    steps: Sequence[Sequence[Entries]]


Answer = list[dict[int, Any]]  # of each pass, of each row, hidden states and logits as arrays


def draft_on_ranks(
    rank: int,
    port: int,
    target: Path,
    drafts: Mapping[str, Path],
    sizes: tuple[int, int],
    drafting: Drafting,
) -> dict[tuple[str, str], Answer]:
    """Runs the same passes with each draft, in both padding modes.

    Args:
        rank: World rank.
        port: Of the ranks' store.
        target: Checkpoint.
        drafts: By name.
        sizes: DP ranks, and executors of each.
        drafting: What to run.

    Returns:
        By name and padding mode.
    """
    dp_size, attn_tp_size = sizes
    topology = topology_of(rank, dp_size, attn_tp_size)
    groups = join(port, topology)
    answers = {}
    for name, path in drafts.items():
        for mode in DpPaddingMode:
            members = communicators(read_spec(target), topology, MAX_ROWS)
            served = DraftRank(
                target,
                path,
                topology=topology,
                communicator=members[0],
                attn_tp_communicator=members[1],
            )
            for member in members:
                member.join(groups)
            answers[name, mode.name] = run_passes(served, topology, mode, drafting)
    groups.close()
    return answers


def run_passes(
    served: DraftRank, topology: Topology, mode: DpPaddingMode, drafting: Drafting
) -> Answer:
    """Returns what one executor's share of the passes yields."""
    layout = partial(layout_of, padding_mode=mode, topology=topology)
    own, prompts = topology.dp_rank, drafting.prompts
    served.target.step(prompts[own], layout([sum(map(len, x.values())) for x in prompts]))
    answer: Answer = []
    for offset, entries in enumerate(drafting.steps):
        if served.config.algorithm == "frozen_kv_mtp":
            one_each = [{row: (ids[:1], x[:1]) for row, (ids, x) in e.items()} for e in entries]
            given = layout([len(e) for e in one_each])
            drafted = [served.step_frozen(one_each[own], offset, given)]
        else:
            given = layout([sum(len(ids) for ids, _ in e.values()) for e in entries])
            layers = range(served.model.num_layers)
            drafted = [served.step(entries[own], layer, given) for layer in layers]
        answer += [{row: [x.numpy() for x in both] for row, both in d.items()} for d in drafted]
    return answer
