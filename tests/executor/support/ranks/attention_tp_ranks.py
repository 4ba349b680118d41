"""Executor of the attention-TP tests. Imports no Transformers: processes start here."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.model.families import read_spec
from executor.model.spec import ModelSpec
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.epochs import JoinAttempt
from executor.parallel.layout import DpPaddingMode, Place, Topology
from executor.parallel.process_groups import EpochGroups
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.ranks.ranks import HOST, SECRET, join, topology_of
from tests.executor.support.serving import Rank, layout_of

MAX_ROWS = 64

# Of each DP rank, new tokens of some rows.
Step = tuple[Mapping[int, Sequence[int]], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A way to serve a checkpoint with several executors.

    Attributes:
        shape: Names the checkpoint.
        ep_size: Parts of the experts.
        moe_dense_tp_size: 1 or None.
        padding_mode: Of all its steps.
    """

    shape: str
    ep_size: int | None
    moe_dense_tp_size: int | None
    padding_mode: DpPaddingMode


def serve_cases(
    rank: int,
    port: int,
    paths: Mapping[str, Path],
    sizes: tuple[int, int],
    cases: Sequence[Case],
    steps: Sequence[Step],
) -> list[dict[int, Any]]:
    """Runs the same steps in every case.

    Args:
        rank: World rank.
        port: Of the ranks' store.
        paths: Checkpoint of each shape.
        sizes: DP ranks, and executors of each.
        cases: To run.
        steps: To run.

    Returns:
        By case, the logits of each row's tokens, as arrays.
    """
    dp_size, attn_tp_size = sizes
    topology = topology_of(rank, dp_size, attn_tp_size)
    groups = join(port, topology)
    served = [
        _serve(groups, paths[case.shape], replace(topology, ep_size=case.ep_size), case, steps)
        for case in cases
    ]
    groups.close()
    return served


def communicators(
    config: ModelSpec, topology: Topology, max_rows: int, gathered_size: int | None = None
) -> tuple[DpCommunicator, AttnTpCommunicator]:
    """Returns both of an executor, for steps of up to ``max_rows`` rows per DP rank.

    ``gathered_size`` is the width of its widest rows, that of hidden states if None.
    """
    shard = -(-max_rows // topology.attn_tp_size)
    return (
        DpCommunicator(
            place=Place(topology),
            max_tokens_per_rank=shard,
            hidden_size=config.hidden_size,
            top_k=config.top_k,
            dtype=config.dtype,
        ),
        AttnTpCommunicator(
            capacity=topology.capacity,
            max_shard_tokens_per_rank=shard,
            hidden_size=config.hidden_size,
            dtype=config.dtype,
            max_logits_rows=max_rows,
            vocab_slice=-(-config.vocab_size // topology.attn_tp_size),
            gathered_size=gathered_size,
        ),
    )


def _serve(
    groups: EpochGroups, path: Path, topology: Topology, case: Case, steps: Sequence[Step]
) -> dict[int, Any]:
    communicator, attn_tp_communicator = communicators(read_spec(path), topology, MAX_ROWS)
    served = Rank(
        path,
        topology=topology,
        communicator=communicator,
        attn_tp_communicator=attn_tp_communicator,
        moe_dense_tp_size=case.moe_dense_tp_size,
    )
    communicator.join(groups)
    attn_tp_communicator.join(groups)
    logits: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for step in steps:
        counts = [sum(map(len, tokens.values())) for tokens in step]
        layout = layout_of(counts, case.padding_mode, topology)
        for row, of_row in served.step(step[topology.dp_rank], layout).items():
            logits[row].append(of_row.clone())
    return {row: torch.cat(parts).numpy() for row, parts in logits.items()}


@dataclass(frozen=True, slots=True)
class Answered:
    """What a worker did with some steps.

    Attributes:
        responses: One per step.
        last_tokens: What it remembers of every row, after each step.
        output_counts: What it has counted in the end, of each row and token, for penalties.
    """

    responses: list[pb.StepResponse]
    last_tokens: list[list[int]]
    output_counts: list[list[int]]


def answer_steps(
    rank: int,
    port: int,
    path: Path,
    settings: Mapping[str, Any],
    requests: Sequence[pb.StepRequest],
) -> dict[str, Answered]:
    """Runs steps on a worker that shares a DP rank with another, as the executor builds it.

    Args:
        rank: 0 or 1.
        port: Of the ranks' store.
        path: Checkpoint.
        settings: Of ``ExecutorConfig``.
        requests: Steps.

    Returns:
        What it answered, and what it answered in a second run in which rank 1 sees other logits.
    """
    config = ExecutorConfig(model=path, attn_tp_rank=rank, attn_tp_size=2, **settings)
    worker, _ = build_worker(config)
    answered = {}
    for epoch, name in enumerate(("alike", "at odds"), start=1):
        if name == "at odds" and rank == 1:
            run = worker._runner.run
            worker._runner.run = lambda batch, run=run: -run(batch)  # type: ignore
        worker.join(epoch, f"{HOST}:{port}", JoinAttempt(epoch, SECRET))
        worker._sampler.last_tokens.zero_()
        answered[name] = Answered([], [], [])
        for request in requests:
            request.epoch = epoch
            response = worker.execute(request)
            response.epoch, response.forward_ns = 1, 0
            answered[name].responses.append(response)
            answered[name].last_tokens.append(worker._sampler.last_tokens.tolist())
        answered[name].output_counts.extend(worker._sampler._output_counts.tolist())
        worker.leave()
    return answered
