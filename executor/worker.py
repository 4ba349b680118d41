"""The executor's core: a function from StepRequest to StepResponse, and the tensors behind it.

Knows no policy and no network but the group's collectives. One thread calls it. A step that samples
ends when its tokens are on the host, so the device waits while the next step is read and staged.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from executor.columns import Int64Array
from executor.errors import JoinFailed, PeerLost
from executor.forward_batch import ForwardBatch, ForwardMode
from executor.kv_pool import KVPool
from executor.logits import score
from executor.measures import Measures
from executor.parallel import EpochGroups
from executor.runners.by_layout import RunnerByLayout
from executor.sampler import PARAMETER_WIDTH, Sampler
from executor.staging import (
    Copier,
    ReadBack,
    Staged,
    StagingBuffer,
    StepInputs,
    copier_for,
    to_device,
)
from executor.step_check import StepCheck
from executor.step_columns import RowProgress, StepColumns, StepLimits, read_step
from protos.executor.v1 import executor_pb2 as pb

NUM_SLOTS = 3  # the router's steps in flight, 2, and one


class GroupMember(Protocol):
    """What talks to other executors, through groups that come and go with epochs."""

    def join(self, groups: EpochGroups) -> None:
        """Uses these groups from now on. Every executor's member must be called."""

    def leave(self) -> None:
        """Forgets them. They are closed already; another thread may be inside a call."""


class Worker:
    """Runs the steps of one executor.

    Args:
        limits: What a step must fit in.
        kv_pool: Keys, values and block table.
        sampler: Sampling state of each row.
        runner: Takes a batch to logits, once it has captured.
        members: What talks to the other executors. It joins in this order, and leaves here.
        form_group: Forms the groups of an epoch, given the epoch and the store's host and port;
            raises RuntimeError if a member does not come. None for a world of one.
        device: Where the model runs.
        can_abort_device: Whether collectives run on the device and leaving the group ends them.
            A graph is then launched before it is known that all were told the same: only reading
            its results waits for peers. Not so an eager pass, which can fill the launch queue.
        copier: How columns get there; the device's own way if None.
        measures: Gets the steps' times and sizes; None: nobody asks for them.
    """

    def __init__(
        self,
        *,
        limits: StepLimits,
        kv_pool: KVPool,
        sampler: Sampler,
        runner: RunnerByLayout,
        members: Sequence[GroupMember],
        form_group: Callable[[int, str, int], EpochGroups] | None,
        device: torch.device,
        can_abort_device: bool = False,
        copier: Copier | None = None,
        measures: Measures | None = None,
    ) -> None:
        self._limits = limits
        self._kv_pool = kv_pool
        self._sampler = sampler
        self._runner = runner
        self._members = members
        self._can_abort_device = can_abort_device
        self._form_group = form_group
        self._groups: EpochGroups | None = None
        self._check: StepCheck | None = None
        self._device = device
        copier = copier or copier_for(device)
        self._capacity = _capacity(limits)
        self._staging = StagingBuffer(self._capacity, NUM_SLOTS, copier)
        self._sampled = ReadBack(limits.budget.max_num_seqs, copier)
        self._rows = RowProgress.empty(kv_pool.row_num_blocks)
        self._measures = measures or Measures()

    @property
    def has_peers(self) -> bool:
        """Whether a step takes other executors, which would wait for this one."""
        return self._form_group is not None

    @torch.inference_mode()
    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        """Runs one step.

        Raises:
            InvalidStep: The step does not fit; nothing has changed.
            StepDisagreement: Another executor was told otherwise. So is every other error: rows
                are in no known state until the next join.
            PeerLost: Another executor left the group, or did not begin the step.
            Exception: The forward pass failed.
        """
        measures = self._measures
        measures.begin_step()
        groups, check = self._groups, self._check
        columns = read_step(request, self._limits, self._rows)
        if check is not None:  # after all that may refuse the step: peers then learn of that too
            check.begin(_told(request), request.ranks[0].SerializeToString)
        staged = self._stage(columns)
        self._update_rows(columns, staged)
        batch = self._build_batch(columns, staged)
        measures.end_phase("fill")
        checks_late = self._can_abort_device and columns.layout.graph_size is not None
        if check is not None and not checks_late:
            check.finish(partial(_describe_told, request))
            measures.end_phase("peers")
        logits = self._runner.run(batch)
        measures.end_phase("forward")
        if check is not None and checks_late:
            check.finish(partial(_describe_told, request))
            measures.end_phase("peers")
        tokens = self._sample(staged, logits)
        if self._groups is not groups:  # NCCL ends the collectives of a group that is left
            raise PeerLost("this executor left its group during the step")
        ranks = self._results(columns, logits, tokens)
        measures.end_phase("sample")
        forward_ns = measures.end_step(
            batch.forward_mode.name.lower(),
            num_tokens=columns.layout.num_tokens,
            num_rows=columns.layout.num_rows,
            is_replay=columns.layout.graph_size is not None,
        )
        return pb.StepResponse(
            epoch=request.epoch, step_id=request.step_id, ranks=ranks, forward_ns=forward_ns
        )

    @torch.inference_mode()
    def join(self, epoch: int, store_address: str) -> None:
        """Leaves any older group, forgets all rows, joins the group of an epoch and captures.

        Returns when every member has joined and this one can step.

        Raises:
            JoinFailed: Another member did not come in time, or graphs were not captured. This
                one is in no group.
        """
        self.leave()
        self._rows.reset()
        if self._form_group is not None:
            groups = self._form(self._form_group, epoch, store_address)
            self._groups = groups
            self._check = StepCheck(groups.host, self._limits.topology.attn_tp_size)
        problem = "its group cannot be used"
        try:
            if self._groups is not None:
                for member in self._members:
                    member.join(self._groups)
            problem = "graphs were not captured"
            self._runner.capture()
        except Exception as error:
            self.leave()  # or the others would wait for this one in their next collective
            raise JoinFailed(f"epoch {epoch}: {problem}: {error}") from error

    def _form(
        self, form_group: Callable[[int, str, int], EpochGroups], epoch: int, store_address: str
    ) -> EpochGroups:
        host, _, port = store_address.rpartition(":")
        if not host or not port.isdecimal():
            raise JoinFailed(f"store_address={store_address!r}: need host:port, as Prepare gave it")
        try:
            return form_group(epoch, host.strip("[]"), int(port))
        except RuntimeError as error:
            raise JoinFailed(
                f"epoch {epoch}: no group formed over the store at {store_address}: {error}"
            ) from error

    def leave(self) -> None:
        """Leaves the group, so that peers inside a collective fail now instead of waiting.

        May be called from another thread; a step that waits for peers then fails too.
        """
        groups, self._groups, self._check = self._groups, None, None
        if groups is not None:
            groups.close()
            for member in self._members:
                member.leave()

    def _stage(self, columns: StepColumns) -> Staged:
        """Writes the host's block table, then all columns to a slot, and sends it."""
        rows, starts, is_sampled = columns.rows, columns.starts, columns.is_sampled
        row_of, positions = _flatten(rows, columns.num_computed_tokens, columns.num_tokens)
        seq_lens = columns.num_computed_tokens + columns.num_tokens
        unknown = np.flatnonzero(columns.token_ids < 0)
        sequences = columns.logits_sequence[is_sampled]
        places = self._write_blocks(columns)
        num_tokens, num_starts = len(row_of), 0 if starts is None else len(starts.rows)
        staged = self._staging.begin(
            StepInputs(
                input_ids=num_tokens,
                positions=num_tokens,
                out_cache_loc=num_tokens,
                req_pool_indices=len(rows),
                seq_lens=len(rows),
                logits_indices=len(is_sampled),
                sampled_rows=len(sequences),
                sampled_positions=len(sequences),
                sampled_at=len(sequences) if len(sequences) < len(is_sampled) else 0,
                unknown_rows=len(unknown),
                unknown_at=len(unknown) if len(unknown) < num_tokens else 0,
                block_places=len(places),
                block_ids=len(places),
                start_rows=num_starts,
                start_parameters=num_starts * PARAMETER_WIDTH,
            )
        )
        to = staged.arrays
        to.input_ids[:] = columns.token_ids
        to.positions[:] = positions
        self._kv_pool.locate(row_of, positions, out=to.out_cache_loc)
        to.req_pool_indices[:] = rows
        to.seq_lens[:] = seq_lens
        to.logits_indices[:] = columns.logits_indices
        to.sampled_rows[:] = rows[sequences]
        to.sampled_positions[:] = seq_lens[sequences]
        if to.sampled_at.size:
            to.sampled_at[:] = np.flatnonzero(is_sampled)
        to.unknown_rows[:] = row_of[unknown]
        if to.unknown_at.size:
            to.unknown_at[:] = unknown
        if places.size:
            to.block_places[:] = places
            to.block_ids[:] = columns.new_block_ids
        if starts is not None:
            to.start_rows[:] = starts.rows
            starts.pack_parameters(to.start_parameters)
        self._staging.send(staged)
        return staged

    def _write_blocks(self, columns: StepColumns) -> Int64Array:
        """Writes the host's block table. Returns the places to stage for the device's."""
        pool, none = self._kv_pool, columns.rows[:0]
        kept, new, ids = columns.num_kept_blocks, columns.num_new_blocks, columns.new_block_ids
        if not ids.size and (kept == pool.row_num_blocks[columns.rows]).all():
            return none
        places = pool.append_blocks_on_host(columns.rows, kept, new, ids)
        if pool.is_table_shared:
            return none
        if len(places) > self._capacity.block_places:
            pool.write_blocks(self._to_device(places), self._to_device(ids))
            return none
        return places

    def _update_rows(self, columns: StepColumns, staged: Staged) -> None:
        """Brings up to date what the device remembers of each row, before the forward pass."""
        tensors = staged.tensors
        if columns.starts is not None:
            rows = columns.starts.rows
            self._sampler.start(columns.starts, tensors.start_rows, tensors.start_parameters)
            self._rows.is_live[rows] = True
            self._rows.has_sampled[rows] = False
        if staged.arrays.block_places.size:
            self._kv_pool.write_blocks(tensors.block_places, tensors.block_ids)

    def _build_batch(self, columns: StepColumns, staged: Staged) -> ForwardBatch:
        arrays, tensors = staged.arrays, staged.tensors
        last_tokens = self._sampler.last_tokens
        if arrays.unknown_at.size:
            last = last_tokens.index_select(0, tensors.unknown_rows)
            tensors.input_ids.index_copy_(0, tensors.unknown_at, last)
        elif arrays.unknown_rows.size:
            torch.index_select(last_tokens, 0, tensors.unknown_rows, out=tensors.input_ids)
        mode = ForwardMode.of(len(arrays.input_ids), len(columns.rows))
        is_extend = mode is ForwardMode.EXTEND
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(columns.rows),
            input_ids=tensors.input_ids,
            positions=tensors.positions,
            out_cache_loc=tensors.out_cache_loc,
            req_pool_indices=tensors.req_pool_indices,
            seq_lens=tensors.seq_lens,
            seq_lens_cpu=torch.from_numpy(arrays.seq_lens),
            layout=columns.layout,
            logits_indices=tensors.logits_indices,
            extend_prefix_lens_cpu=columns.num_computed_tokens if is_extend else None,
            extend_seq_lens_cpu=columns.num_tokens if is_extend else None,
        )

    def _sample(self, staged: Staged, logits: torch.Tensor) -> Int64Array:
        """Returns one token for each sequence that samples, on the host."""
        arrays, tensors = staged.arrays, staged.tensors
        rows, seq_lens = arrays.sampled_rows, arrays.sampled_positions
        if not rows.size:
            return rows
        if arrays.sampled_at.size:
            logits = logits.index_select(0, tensors.sampled_at)
        at, positions = tensors.sampled_rows, tensors.sampled_positions
        tokens = self._sampled.read(self._sampler.sample(logits, rows, seq_lens, at, positions))
        self._rows.has_sampled[rows] = True
        return tokens

    def _results(
        self, columns: StepColumns, logits: torch.Tensor, tokens: Int64Array
    ) -> list[pb.RankResult]:
        """Returns what this executor answers: one of its DP rank's executors does, for all."""
        topology = self._limits.topology
        if topology.attn_tp_rank > 0:
            return []
        result = pb.RankResult(dp_rank=topology.dp_rank, next_token_ids=_int32(tokens))
        self._score(columns, logits, tokens, result)
        return [result]

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
            logits[self._to_device(wanted)],
            self._to_device(token_ids[wanted]),
            self._sampler.num_top_logprobs[rows[wanted]],
        )
        result.logprobs = _float32(logprobs)
        result.top_ids = _int32(top_ids.cpu().numpy())
        result.top_logprobs = _float32(top_logprobs)

    def _to_device(self, values: Int64Array) -> torch.Tensor:
        return to_device(values, self._device)


def _told(request: pb.StepRequest) -> bytes:
    """Returns what every executor must have been told, as bytes that are the same everywhere."""
    agreement = request.agreement.SerializeToString(deterministic=True)
    return b"%d %d " % (request.epoch, request.step_id) + agreement


def _describe_told(request: pb.StepRequest) -> str:
    agreement = request.agreement
    parts = [
        f"step_id={request.step_id}",
        f"global_num_tokens={list(agreement.global_num_tokens)}",
        f"global_num_tokens_for_logprob={list(agreement.global_num_tokens_for_logprob)}",
        f"has_extend={agreement.has_extend}",
        f"padding_mode={pb.DpPaddingMode.Name(agreement.padding_mode)}",
        f"graph_size={agreement.graph_size if agreement.HasField('graph_size') else None}",
    ]
    return " ".join(parts)


def _capacity(limits: StepLimits) -> StepInputs[int]:
    """Returns the most entries of each column of a step."""
    budget = limits.budget
    num_tokens, num_seqs = budget.max_step_tokens, budget.max_num_seqs
    # Blocks for all of a step's tokens, and one each. Prefixes found in the cache bring more; a
    # step with that many goes another way.
    num_blocks = num_tokens // limits.block_size + 2 * num_seqs
    return StepInputs(
        input_ids=num_tokens,
        positions=num_tokens,
        out_cache_loc=num_tokens,
        req_pool_indices=num_seqs,
        seq_lens=num_seqs,
        logits_indices=budget.max_num_logits,
        sampled_rows=num_seqs,
        sampled_positions=num_seqs,
        sampled_at=num_seqs,
        unknown_rows=num_tokens,
        unknown_at=num_tokens,
        block_places=num_blocks,
        block_ids=num_blocks,
        start_rows=num_seqs,
        start_parameters=num_seqs * PARAMETER_WIDTH,
    )


def _flatten(
    rows: Int64Array, num_computed: Int64Array, num_tokens: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Returns each token's row and its position in the sequence."""
    ends = np.cumsum(num_tokens)
    total = int(ends[-1]) if ends.size else 0
    if total == len(rows):
        return rows, num_computed
    shift = num_computed - (ends - num_tokens)
    return np.repeat(rows, num_tokens), np.arange(total) + np.repeat(shift, num_tokens)


def _int32(values: Int64Array) -> bytes:
    return values.astype("<i4").tobytes()


def _float32(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().astype("<f4").tobytes()
