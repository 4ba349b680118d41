"""The executor's core: a function from StepRequest to StepResponse, and the tensors behind it.

    any step            read ─▶ stage ─────────▶ run ─────▶ sample ─▶ answer
    speculative step    read ─▶ stage ─▶ draft ─▶ verify ─▶ accept ─▶ answer
    with a draft model                                        └▶ draft-extend

Knows no policy and no network but the group's collectives. One thread calls it. A step that samples
ends when its tokens are on the host, so the device waits while the next step is read and staged.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

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
from executor.sampler import Sampler
from executor.speculative.speculator import Speculator
from executor.speculative.verifier import Verifier
from executor.staging import Copier, ReadBack, Staged, copier_for, to_device
from executor.step_check import StepCheck
from executor.step_columns import StepColumns, read_step
from executor.step_limits import RowProgress, StepLimits
from executor.step_stager import StepStager
from protos.executor.v1 import executor_pb2 as pb


class GroupMember(Protocol):
    """What talks to other executors, through groups that come and go with epochs."""

    def join(self, groups: EpochGroups) -> None:
        """Uses these groups from now on. Every executor's member must be called."""

    def leave(self) -> None:
        """Forgets them. They are closed already; another thread may be inside a call."""


class Speculation(NamedTuple):
    """What a draft model adds to a worker."""

    speculator: Speculator
    verifier: Verifier


class Gained(NamedTuple):
    """What the sequences of a step gained, on the host.

    Attributes:
        num_tokens: [S], tokens of each sequence that samples; None: 1 each.
        tokens: [sum(num_tokens)].
        scored_logits: On the device, the rows of logits that are scored; None if none are.
    """

    num_tokens: Int64Array | None
    tokens: Int64Array
    scored_logits: torch.Tensor | None


class Worker:
    """Runs the steps of one executor.

    Args:
        limits: What a step must fit in.
        kv_pool: Keys, values and block table.
        sampler: Sampling state of each row.
        runner: Takes a batch to logits, once it has captured.
        speculation: The draft model's part; None without one.
        members: What talks to the other executors. It joins in this order, and leaves here.
        form_group: Forms the groups of an epoch, given the epoch and the store's host and port;
            raises RuntimeError if a member does not come. None for a world of one.
        device: Where the model runs.
        can_abort_device: Whether collectives run on the device and leaving the group ends them.
            A graph is then launched before it is known that all were told the same: only reading
            its results waits for peers. Not so an eager pass, which can fill the launch queue. Where
            collectives run on the host, a pass waits no sooner than at its first one.
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
        speculation: Speculation | None = None,
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
        self._speculation = speculation
        self._members = members
        self._can_abort_device = can_abort_device
        self._form_group = form_group
        self._groups: EpochGroups | None = None
        self._check: StepCheck | None = None
        self._device = device
        copier = copier or copier_for(device)
        self._stager = StepStager(limits, kv_pool, copier)
        depth = 0 if limits.speculation is None else limits.speculation.num_draft_steps
        self._sampled = ReadBack(limits.budget.max_num_seqs * (depth + 2), copier)
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
            told, part = _told(request), request.ranks[0].SerializeToString
            check.begin(told, part, partial(_describe_told, request))
        staged = self._stager.stage(columns)
        self._update_rows(columns, staged)
        batch = self._build_batch(columns, staged)
        if check is not None and not self._runs_ahead(check, columns):
            check.finish()
        measures.end_phase("fill")
        settle = _nothing if check is None else check.finish
        if columns.num_draft_tokens:
            gained = self._speculate(columns, batch, settle)
        else:
            gained = self._run(columns, staged, batch, settle)
        if self._groups is not groups:  # NCCL ends the collectives of a group that is left
            raise PeerLost("this executor left its group during the step")
        ranks = self._results(columns, gained)
        measures.end_phase("sample")
        forward_ns = measures.end_step(
            "verify" if columns.num_draft_tokens else batch.forward_mode.name.lower(),
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
            size = self._limits.topology.attn_tp_size
            self._check = StepCheck(groups, size, self._measures)
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

    def _runs_ahead(self, check: StepCheck, columns: StepColumns) -> bool:
        """Whether the forward pass may begin before all are known to have been told the same."""
        is_graph = columns.layout.graph_size is not None
        return check.holds_collectives or (self._can_abort_device and is_graph)

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
        if self._speculation is not None:
            self._speculation.speculator.start(columns)

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

    def _run(
        self,
        columns: StepColumns,
        staged: Staged,
        batch: ForwardBatch,
        settle: Callable[[], None],
    ) -> Gained:
        """Runs a step in which every sequence that samples gains one token.

        Args:
            settle: Returns once all executors are known to have been told the same.
        """
        logits = self._runner.run(batch)
        settle()
        self._measures.end_phase("forward")
        tokens = self._sample(staged, logits)
        scored = self._take_scored(columns, logits)
        if self._speculation is not None:
            self._speculation.speculator.follow(columns, batch, tokens)
            self._measures.end_phase("draft")
            ran = columns.num_computed_tokens + columns.num_tokens
            self._rows.num_tokens[columns.rows] = ran
            self._rows.num_tokens[staged.arrays.sampled_rows] += 1
        sampled = self._sampled.read(tokens) if len(tokens) else staged.arrays.sampled_rows
        return Gained(None, sampled, scored)

    def _speculate(
        self, columns: StepColumns, batch: ForwardBatch, settle: Callable[[], None]
    ) -> Gained:
        """Runs a step in which every sequence gains a token, and drafts that are accepted.

        The arguments are those of ``_run``.
        """
        assert self._speculation is not None, "else the step was refused"
        speculator, verifier = self._speculation.speculator, self._speculation.verifier
        measures, rows, at = self._measures, columns.rows, batch.req_pool_indices
        drafts = speculator.draft(columns, at)
        measures.end_phase("draft")
        batch, verification = verifier.batch(columns, batch, drafts)
        logits = self._runner.verify(batch)
        settle()
        measures.end_phase("forward")
        accepted = verifier.accept(verification, logits)
        last = accepted.tokens.gather(1, (accepted.num_tokens - 1).unsqueeze(1)).squeeze(1)
        self._sampler.remember(last, rows, at)
        scored = self._take_scored(columns, logits)
        measures.end_phase("sample")
        speculator.follow_accepted(verification, accepted)
        measures.end_phase("draft")
        gained = torch.cat((accepted.num_tokens.unsqueeze(1), accepted.tokens), dim=1)
        table = self._sampled.read(gained.flatten()).reshape(gained.shape)
        num_tokens = table[:, 0].copy()
        self._rows.num_tokens[rows] += num_tokens
        is_gained = np.arange(table.shape[1] - 1) < num_tokens[:, None]
        return Gained(num_tokens, table[:, 1:][is_gained], scored)

    def _sample(self, staged: Staged, logits: torch.Tensor) -> torch.Tensor:
        """Returns one token for each sequence that samples, int64 [S] on the device."""
        arrays, tensors = staged.arrays, staged.tensors
        rows, seq_lens = arrays.sampled_rows, arrays.sampled_positions
        if not rows.size:
            return tensors.sampled_rows
        if arrays.sampled_at.size:
            logits = logits.index_select(0, tensors.sampled_at)
        at, positions = tensors.sampled_rows, tensors.sampled_positions
        tokens = self._sampler.sample(logits, rows, seq_lens, at, positions)
        self._rows.has_sampled[rows] = True
        return tokens

    def _take_scored(self, columns: StepColumns, logits: torch.Tensor) -> torch.Tensor | None:
        """Returns a copy of the rows of logits that are scored: a draft's take their place."""
        wanted = self._scored_rows(columns)
        return logits[self._to_device(wanted)] if wanted.size else None

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

    def _results(self, columns: StepColumns, gained: Gained) -> list[pb.RankResult]:
        """Returns what this executor answers: one of its DP rank's executors does, for all."""
        topology = self._limits.topology
        if topology.attn_tp_rank > 0:
            return []
        result = pb.RankResult(dp_rank=topology.dp_rank, next_token_ids=_int32(gained.tokens))
        if gained.num_tokens is not None:
            result.num_next_tokens = _int32(gained.num_tokens)
        if gained.scored_logits is not None:
            self._score(columns, gained, gained.scored_logits, result)
        return [result]

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
            logits, self._to_device(token_ids[wanted]), self._sampler.num_top_logprobs[rows]
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
        f"num_draft_tokens={agreement.num_draft_tokens}",
        f"global_num_tokens_for_draft={list(agreement.global_num_tokens_for_draft)}",
        f"global_num_sampled={list(agreement.global_num_sampled)}",
        f"padding_mode={pb.DpPaddingMode.Name(agreement.padding_mode)}",
        f"graph_size={agreement.graph_size if agreement.HasField('graph_size') else None}",
    ]
    return " ".join(parts)


def _nothing() -> None:
    """An executor alone has nobody to wait for."""


def _int32(values: Int64Array) -> bytes:
    return values.astype("<i4").tobytes()


def _float32(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().astype("<f4").tobytes()
