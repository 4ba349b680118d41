"""What an executor answers to a step: tokens, and the log probabilities that were asked for."""

from typing import NamedTuple

import numpy as np
import torch

from executor.batch.columns import Int64Array
from executor.batch.read_step import StepColumns
from executor.batch.staging import to_device
from executor.model.sampling.logits import score
from executor.model.sampling.sampler import Sampler
from executor.parallel.topology import Topology
from protos.executor.v1 import executor_pb2 as pb


class Gained(NamedTuple):
    """What the sequences of a step gained, on the host.

    Attributes:
        num_tokens: [S], tokens of each sequence that samples; None: 1 each.
        tokens: [sum(num_tokens)].
        scored_logits: On the device, from ``take_scored``.
    """

    num_tokens: Int64Array | None
    tokens: Int64Array
    scored_logits: torch.Tensor | None


class Answers:
    """Makes one executor's answers.

    Args:
        sampler: Knows which rows get log probabilities.
        topology: This executor's place in its group.
        device: Where the model runs.
    """

    def __init__(self, sampler: Sampler, topology: Topology, device: torch.device) -> None:
        self._sampler = sampler
        self._topology = topology
        self._device = device

    def take_scored(self, columns: StepColumns, logits: torch.Tensor) -> torch.Tensor | None:
        """Returns a copy of the rows of logits that are scored: a draft's take their place.

        None if none are.
        """
        wanted = self._scored_rows(columns)
        return logits[to_device(wanted, self._device)] if wanted.size else None

    def results(self, columns: StepColumns, gained: Gained) -> list[pb.RankResult]:
        """Returns what this executor answers: one of its DP rank's executors does, for all."""
        topology = self._topology
        if topology.attn_tp_rank > 0:
            return []
        result = pb.RankResult(dp_rank=topology.dp_rank, next_token_ids=_int32(gained.tokens))
        if gained.num_tokens is not None:
            result.num_next_tokens = _int32(gained.num_tokens)
        if gained.scored_logits is not None:
            self._score(columns, gained, gained.scored_logits, result)
        return [result]

    def _scored_rows(self, columns: StepColumns) -> Int64Array:
        """Returns which rows of logits get log probabilities.

        In a speculative step, these are of sequences that gain one token.
        """
        rows = columns.rows[columns.logits_sequence]
        is_scored = self._sampler.scores_output[rows]
        if columns.num_draft_tokens:
            is_scored[np.arange(len(rows)) % columns.num_draft_tokens > 0] = False
        else:
            is_scored |= ~columns.is_sampled
        return np.flatnonzero(is_scored)

    def _score(
        self,
        columns: StepColumns,
        gained: Gained,
        logits: torch.Tensor,
        result: pb.RankResult,
    ) -> None:
        """Fills in the log probabilities that were asked for."""
        token_ids = np.empty(len(columns.is_sampled), dtype=np.int64)
        if gained.num_tokens is not None:
            firsts = np.cumsum(gained.num_tokens) - gained.num_tokens
            token_ids[:: columns.num_draft_tokens] = gained.tokens[firsts]
        else:
            token_ids[columns.is_sampled] = gained.tokens
            token_ids[~columns.is_sampled] = columns.scored_ids
        wanted = self._scored_rows(columns)
        rows = columns.rows[columns.logits_sequence[wanted]]
        logprobs, top_ids, top_logprobs = score(
            logits, to_device(token_ids[wanted], self._device), self._sampler.num_top_logprobs[rows]
        )
        result.logprobs = _float32(logprobs)
        result.top_ids = _int32(top_ids.cpu().numpy())
        result.top_logprobs = _float32(top_logprobs)


def _int32(values: Int64Array) -> bytes:
    return values.astype("<i4").tobytes()


def _float32(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().astype("<f4").tobytes()
