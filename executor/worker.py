"""The executor's core: a function from StepRequest to StepResponse, and the tensors behind it.

    any step            read ─▶ stage ─────────▶ run ─────▶ sample ─▶ answer
    speculative step    read ─▶ stage ─▶ draft ─▶ verify ─▶ accept ─▶ answer
    with a draft model                                                  └▶ draft-extend ─▶ next step

Knows no policy and no network but the group's collectives. One thread calls it. A step that samples
ends when its tokens are on the host. No tokens wait for draft-extend: a GPU is given it before the
host waits for them, and runs it while the next step is read and staged; where the host computes,
``catch_up`` runs it, once the answer is out. On a GPU log probabilities are computed behind it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from executor.answers import Answers, Gained
from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.batch.kv_pool import KVPool
from executor.batch.limits import RowProgress, StepLimits
from executor.batch.read_step import StepColumns, read_step
from executor.batch.staging import Copier, ReadBack, Staged, StepStager
from executor.errors import JoinFailed, PeerLost
from executor.metrics import Measures
from executor.model.sampling.sampler import Sampler
from executor.parallel.join_attempt import JoinAttempt
from executor.parallel.process_groups import EpochGroups
from executor.runners.select import RunnerByLayout
from executor.speculative.speculator import Speculator
from executor.speculative.verifier import Verifier
from executor.step_check import StepCheck
from executor.step_told import describe_told, told_by
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


class Behind(NamedTuple):
    """What a step has left to be run behind its answer.

    Attributes:
        run: Runs it.
        groups: In which it meets its peers.
    """

    run: Callable[[], None]
    groups: EpochGroups | None


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
        copier: How columns get there; the device's own way if None. Where memory is shared, it is
            the host that computes.
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
        copier = copier or Copier(device)
        self._stager = StepStager(limits, kv_pool, copier)
        depth = 0 if limits.speculation is None else limits.speculation.num_draft_steps
        self._answers = Answers(sampler, limits.topology, device)
        self._sampled = ReadBack(limits.budget.max_num_seqs * (depth + 2), copier)
        self._host_computes = copier.is_shared
        self._behind: Behind | None = None
        self._rows = RowProgress.empty(kv_pool.row_num_blocks)
        self._measures = measures or Measures()

    @property
    def has_peers(self) -> bool:
        """Whether a step takes other executors, which would wait for this one."""
        return self._form_group is not None

    @property
    def is_behind(self) -> bool:
        """Whether the last step has left something for ``catch_up``."""
        return self._behind is not None

    @torch.inference_mode()
    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        """Runs one step, and first what the one before it has left.

        Raises:
            InvalidStep: The step does not fit; nothing has changed.
            StepDisagreement: Another executor was told otherwise. So is every other error: rows
                are in no known state until the next join.
            PeerLost: Another executor left the group, or did not begin the step.
            Exception: The forward pass failed.
        """
        self.catch_up()
        measures = self._measures
        measures.begin_step()
        groups, check = self._groups, self._check
        if groups is None and self.has_peers:
            raise PeerLost("this executor has left its group")
        columns = read_step(request, self._limits, self._rows)
        if check is not None:  # after all that may refuse the step: peers then learn of that too
            told, part = told_by(request), request.ranks[0].SerializeToString
            check.begin(told, part, partial(describe_told, request))
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
        ranks = self._answers.results(columns, gained)
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
    def catch_up(self) -> None:
        """Runs what the last step has left behind its answer, if anything.

        Its peers do so too and meet it there, so it is not to wait until there is another step.

        Raises:
            PeerLost: Another executor left the group. As after every other error, rows are in no
                known state until the next join.
            Exception: The forward pass of the draft model failed.
        """
        behind, self._behind = self._behind, None
        if behind is None or behind.groups is not self._groups:
            return
        self._measures.begin_phase()
        behind.run()
        if self._groups is not behind.groups:
            raise PeerLost("this executor left its group while it caught up behind a step")
        self._measures.end_phase("draft")

    @torch.inference_mode()
    def join(self, epoch: int, store_address: str, attempt: JoinAttempt | None = None) -> None:
        """Leaves any older group, forgets all rows, joins the group of an epoch and captures.

        Returns when every member has joined and this one can step.

        Args:
            epoch: The group's.
            store_address: Where its members find one another, host:port.
            attempt: What another thread calls off, and then `leave`; None: nobody does.

        Raises:
            JoinFailed: Another member did not come in time, graphs were not captured, or the
                attempt was called off. This one is in no group.
        """
        attempt = attempt or JoinAttempt(epoch)
        self.leave()
        self._behind = None
        self._rows.reset()
        groups: EpochGroups | None = None
        if self._form_group is not None:
            groups = self._groups = attempt.form(self._form_group, store_address)
            size = self._limits.topology.attn_tp_size
            self._check = StepCheck(groups, size, self._measures)
        problem = "its group cannot be used"
        try:
            attempt.check()  # who called it off may have left before there were groups to leave
            if groups is not None:
                for member in self._members:
                    member.join(groups)
            problem = "graphs were not captured"
            self._runner.capture()
            attempt.check()
        except Exception as error:
            self.leave()  # or the others would wait for this one in their next collective
            attempt.check()
            raise JoinFailed(f"epoch {epoch}: {problem}: {error}") from error

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
            self._rows.start(rows)
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
        scored = self._answers.take_scored(columns, logits)
        self._sampled.begin(tokens)
        if self._speculation is not None:
            self._rows.num_tokens[columns.rows] = columns.num_computed_tokens + columns.num_tokens
            self._rows.num_tokens[staged.arrays.sampled_rows] += 1
            speculator = self._speculation.speculator
            if speculator.extends(columns):
                self._put_behind(partial(speculator.extend, columns, batch, tokens))
            else:
                self._rows.is_followed[columns.rows] = False
        return Gained(None, self._sampled.wait(), scored)

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
        scored = self._answers.take_scored(columns, logits)
        gained = torch.cat((accepted.num_tokens.unsqueeze(1), accepted.tokens), dim=1)
        self._sampled.begin(gained.flatten())
        self._put_behind(partial(speculator.extend_accepted, verification, accepted))
        table = self._sampled.wait().reshape(gained.shape)
        num_tokens = table[:, 0].copy()
        self._rows.num_tokens[rows] += num_tokens
        is_gained = np.arange(table.shape[1] - 1) < num_tokens[:, None]
        return Gained(num_tokens, table[:, 1:][is_gained], scored)

    def _put_behind(self, run: Callable[[], None]) -> None:
        """Has something run that the step's tokens, on their way to the host, do not wait for."""
        self._measures.end_phase("sample")
        self._behind = Behind(run, self._groups)
        if not self._host_computes:  # this only begins it
            self.catch_up()

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


def _nothing() -> None:
    """An executor alone has nobody to wait for."""
