"""The executor's core: a function from StepRequest to StepResponse, and the tensors behind it.

Knows no policy and no network but the group's collectives. One thread calls it.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from executor.columns import Int64Array
from executor.errors import JoinFailed
from executor.forward_batch import ForwardBatch
from executor.kv_pool import KVPool
from executor.layers.dp_communicator import DpCommunicator
from executor.logits import score
from executor.parallel import RankGroup
from executor.runners import Runner
from executor.sampler import RowStarts, Sampler
from executor.step_columns import RowProgress, StepColumns, StepLimits, read_step
from protos.executor.v1 import executor_pb2 as pb


class Worker:
    """Runs the steps of one DP rank.

    Args:
        limits: What a step must fit in.
        kv_pool: Keys, values and block table.
        sampler: Sampling state of each row.
        runner: Takes a batch to logits.
        communicator: The model's collectives, which join a group here.
        form_group: Forms the group of an epoch, given the epoch and the store's host and port;
            raises RuntimeError if a member does not come. None for a world of one.
        device: Where the model runs.
    """

    def __init__(
        self,
        *,
        limits: StepLimits,
        kv_pool: KVPool,
        sampler: Sampler,
        runner: Runner,
        communicator: DpCommunicator,
        form_group: Callable[[int, str, int], RankGroup] | None,
        device: torch.device,
    ) -> None:
        self._limits = limits
        self._kv_pool = kv_pool
        self._sampler = sampler
        self._runner = runner
        self._communicator = communicator
        self._form_group = form_group
        self._group: RankGroup | None = None
        self._device = device
        self._rows = RowProgress.empty(kv_pool.row_num_blocks)

    @torch.inference_mode()
    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        """Runs one step.

        Raises:
            InvalidStep: The step does not fit; nothing has changed.
            Exception: The forward pass failed. Rows are in no known state until the next join.
        """
        start_ns = time.perf_counter_ns()
        columns = read_step(request, self._limits, self._rows)
        if columns.starts is not None:
            self._start_rows(columns.starts)
        self._write_blocks(columns)
        logits = self._runner.run(self._build_batch(columns))
        tokens = self._sample(columns, logits)
        result = pb.RankResult(dp_rank=self._limits.dp_rank, next_token_ids=_int32(tokens))
        self._score(columns, logits, tokens, result)
        return pb.StepResponse(
            epoch=request.epoch,
            step_id=request.step_id,
            ranks=[result],
            forward_ns=time.perf_counter_ns() - start_ns,
        )

    def join(self, epoch: int, store_address: str) -> None:
        """Leaves any older group, forgets all rows and joins the group of an epoch.

        Returns when every member has joined.

        Raises:
            JoinFailed: Another member did not come in time. This one is in no group.
        """
        self.leave()
        self._rows.reset()
        if self._form_group is None:
            return
        host, _, port = store_address.rpartition(":")
        if not host or not port.isdecimal():
            raise JoinFailed(f"store_address={store_address!r}: need host:port, as Prepare gave it")
        try:
            group = self._form_group(epoch, host.strip("[]"), int(port))
        except RuntimeError as error:
            raise JoinFailed(
                f"epoch {epoch}: no group formed over the store at {store_address}: {error}"
            ) from error
        self._communicator.join(group)
        self._group = group

    def leave(self) -> None:
        """Leaves the group, so that peers inside a collective fail now instead of waiting.

        May be called from another thread; a step that waits for peers then fails too.
        """
        group, self._group = self._group, None
        if group is not None:
            group.close()
            self._communicator.leave()

    def _start_rows(self, starts: RowStarts) -> None:
        self._sampler.start(starts)
        self._rows.is_live[starts.rows] = True
        self._rows.has_sampled[starts.rows] = False

    def _write_blocks(self, columns: StepColumns) -> None:
        kept, new = columns.num_kept_blocks, columns.num_new_blocks
        if (kept + new != self._kv_pool.row_num_blocks[columns.rows]).any() or new.any():
            self._kv_pool.append_blocks(columns.rows, kept, new, columns.new_block_ids)

    def _build_batch(self, columns: StepColumns) -> ForwardBatch:
        rows, computed, num_tokens = columns.rows, columns.num_computed_tokens, columns.num_tokens
        input_ids = torch.from_numpy(columns.token_ids).to(self._device)
        unknown = np.flatnonzero(columns.token_ids < 0)
        if unknown.size:
            row_of = np.repeat(rows, num_tokens)[unknown]
            last = self._sampler.last_tokens[self._index(row_of)]
            input_ids[self._index(unknown)] = last
        return ForwardBatch.from_columns(
            rows=rows,
            num_computed=computed,
            num_tokens=num_tokens,
            input_ids=input_ids,
            out_cache_loc=self._kv_pool.out_cache_loc(rows, computed, num_tokens),
            layout=columns.layout,
            logits_indices=columns.logits_indices,
        )

    def _sample(self, columns: StepColumns, logits: torch.Tensor) -> Int64Array:
        """Returns one token for each sequence that samples, on the host."""
        sequences = columns.logits_sequence[columns.is_sampled]
        if not sequences.size:
            return np.empty(0, dtype=np.int64)
        if not columns.is_sampled.all():
            logits = logits[self._index(np.flatnonzero(columns.is_sampled))]
        rows = columns.rows[sequences]
        seq_lens = (columns.num_computed_tokens + columns.num_tokens)[sequences]
        tokens: Int64Array = self._sampler.sample(logits, rows, seq_lens).cpu().numpy()
        self._rows.has_sampled[rows] = True
        return tokens

    def _score(
        self,
        columns: StepColumns,
        logits: torch.Tensor,
        tokens: Int64Array,
        result: pb.RankResult,
    ) -> None:
        """Fills in the log probabilities that were asked for."""
        rows = columns.rows[columns.logits_sequence]
        wanted = np.flatnonzero(~columns.is_sampled | self._sampler.scores_output[rows])
        if not wanted.size:
            return
        token_ids = np.empty(len(rows), dtype=np.int64)
        token_ids[columns.is_sampled] = tokens
        token_ids[~columns.is_sampled] = columns.scored_ids
        logprobs, top_ids, top_logprobs = score(
            logits[self._index(wanted)],
            self._index(token_ids[wanted]),
            self._sampler.num_top_logprobs[rows[wanted]],
        )
        result.logprobs = _float32(logprobs)
        result.top_ids = _int32(top_ids.cpu().numpy())
        result.top_logprobs = _float32(top_logprobs)

    def _index(self, values: Int64Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _int32(values: Int64Array) -> bytes:
    return values.astype("<i4").tobytes()


def _float32(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().astype("<f4").tobytes()
