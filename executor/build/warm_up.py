"""Warm-up of an elastic executor: a prompt and its decodes, before a group waits for its first step.

A process' first pass takes far longer than those after it: its buffers get their memory as they are first
written, and libraries load what they need as it is first called. A group that grows, or whose member a
spare replaces, would wait for that in its first steps.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from executor.model.sampling.sampler import Sampler
from executor.parallel.process_groups import EpochGroups, RankGroup
from executor.runners.dummy_batches import dummy_decode, dummy_extend
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import RunnerSelection
from executor.worker import GroupMember

NUM_TOKENS = 128  # of the prompt, at most


@torch.inference_mode()
def warm_up(
    forward_pass: ForwardPass,
    runner: RunnerSelection,
    sampler: Sampler,
    members: Sequence[GroupMember],
    *,
    max_tokens: int,
    decode_sizes: Sequence[int],
) -> None:
    """Runs padding through the model, as in a group of the largest size whose experts are nowhere.

    Args:
        forward_pass, runner, sampler, members: The worker's, which is in no group yet.
        max_tokens: Of a rank in a step.
        decode_sizes: Sequences that decode graphs are captured for, ascending; may be empty.
    """
    topology = forward_pass.place.topology
    world = EchoGroup(topology.world_rank, topology.world_size)
    attn_tp = None
    if topology.attn_tp_size > 1:
        attn_tp = EchoGroup(topology.attn_tp_rank, topology.attn_tp_size)
    groups = EpochGroups(0, world, attn_tp, world)
    for member in members:
        member.join(groups)
    try:
        runner.capture()
        size = topology.attn_tp_size  # of whose rows a dummy batch has a multiple
        num_tokens = min(NUM_TOKENS, max_tokens, forward_pass.max_seq_len) // size * size
        prompt = dummy_extend(forward_pass, max(num_tokens, size))
        batches = [replace(prompt, layout=replace(prompt.layout, graph_size=None))]
        batches += [dummy_decode(forward_pass, size) for size in decode_sizes[-1:]]
        for batch in batches:
            logits = runner.run(batch)[: forward_pass.kv_pool.num_rows]
            rows = np.arange(len(logits))
            sampler.sample(logits, rows, rows + 1)
    finally:
        for member in members:
            member.leave()


class EchoGroup(RankGroup):
    """A group of which this process is the only one: the others seem to do what it does."""

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        if len(x):
            out.view(-1, *x.shape).copy_(x)

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> None:
        """Leaves the others' rows as they are."""

    def reduce_scatter(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        scratch: torch.Tensor,
        counts: Sequence[int] | None = None,
    ) -> None:
        out.copy_(x[: len(out)])

    def all_reduce(self, x: torch.Tensor) -> None:
        """Leaves it as it is."""

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        self.all_gather(out, x)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Leaves it as it is."""

    def close(self) -> None:
        """Nobody is there who waits."""
