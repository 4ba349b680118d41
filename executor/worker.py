"""Worker: the steps of one executor, from StepRequest to StepResponse, and the tensors behind them.

                        ┌──────────────────── launch ───────────────────────┐   ┌ finish ┐
    any step            read ─▶ stage ─────────▶ run ─────▶ sample ─▶ score ─▶ … ─▶ answer
    speculative step    read ─▶ stage ─▶ draft ─▶ verify ─▶ accept ─▶ score ─▶ … ─▶ answer
    with a draft model                                                  └▶ draft-extend ─▶ next step

It knows no policy, and no network but the group's collectives. On a GPU a step's tokens are on
their way to the host when `launch` returns, and the next step may be launched before they are read:
it finds them on the device. Behind a speculative step it waits for them first, because the length of
a sequence depends on how many drafts were accepted. One thread launches, another may finish.

No tokens wait for draft-extend: a GPU is given it behind their copy; where the host computes, it is
deferred until the answer is out.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.columns import Int64Array
from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.batch.kv_pool import KVPool
from executor.batch.placement import Loaded, Placement
from executor.batch.read_step import RowProgress, StepColumns, StepLimits, read_step
from executor.batch.staging import Copier, ReadBack, Staged, StepStager, to_device
from executor.errors import JoinFailed, PeerLost
from executor.metrics import Measures, StepTimes
from executor.model.decoder.expert_loader import ElasticExperts
from executor.model.sampling.constraints import HostDrafts
from executor.model.sampling.logits import cut_scores, score
from executor.model.sampling.sampler import Sampler
from executor.parallel.epochs import FormGroup, JoinAttempt
from executor.parallel.process_groups import EpochGroups
from executor.runners.target import RunnerSelection
from executor.speculative.speculator import Speculator
from executor.speculative.tree import Drafts
from executor.speculative.verifier import Verifier
from protos.executor.step_checksums import agreement_crc32, part_crc32
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


class DeferredDraftExtend(NamedTuple):
    """Draft-extend of a step, to be run once its answer is out.

    Attributes:
        run: Runs it.
        groups: The epoch's, in which peers run it too.
    """

    run: Callable[[], None]
    groups: EpochGroups | None


class Scores(NamedTuple):
    """Log probabilities of a step.

    Attributes:
        found: What ``score`` returned, on its way to the host.
        num_top: int64 [N], likeliest tokens wanted of each row.
        num_given: int64 [N], tokens that each row asks for by name.
    """

    found: ReadBack
    num_top: Int64Array
    num_given: Int64Array


class Pending(NamedTuple):
    """A step that was launched and not answered yet.

    Attributes:
        request: The step.
        columns: Its columns.
        forward_mode: What this executor ran in it.
        groups: The epoch's, of which its collectives are.
        gained: On its way to the host, int64: [S] tokens; of a speculative step [B, 1 + D + 1] how
            many tokens each sequence gained, and these.
        scores: Log probabilities; None if none were asked for.
        failures: Rows that cannot keep to their grammar, and why, once that is known; None: none has one.
        times: When it began, and when it had been launched.
        is_done: Whether all of it is on the host.
    """

    request: pb.StepRequest
    columns: StepColumns
    forward_mode: ForwardMode
    groups: EpochGroups | None
    gained: ReadBack
    scores: Scores | None
    failures: Future[list[tuple[int, str]]] | None
    times: StepTimes
    is_done: bool


class Worker:
    """Runs the steps of one executor.

    Args:
        limits: What a step must fit in.
        kv_pool: Keys, values and block tables.
        sampler: Sampling state of each row.
        runner: Takes a batch to logits, once it has captured.
        speculation: The draft model's part; None without one.
        members: What talks to the other executors. It joins in this order, and leaves here.
        form_group: Forms the groups of an epoch; raises RuntimeError if a member does not come. None
            if it never has peers.
        experts: Its place and its experts, if it is elastic; None: it stands where it was started.
        device: Where the model runs.
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
        runner: RunnerSelection,
        speculation: Speculation | None = None,
        members: Sequence[GroupMember],
        form_group: FormGroup[EpochGroups] | None,
        experts: ElasticExperts | None = None,
        device: torch.device,
        copier: Copier | None = None,
        measures: Measures | None = None,
    ) -> None:
        self._limits = limits
        self._kv_pool = kv_pool
        self._sampler = sampler
        self._runner = runner
        self._speculation = speculation
        self._members = members
        self._form_group = form_group
        self.experts = experts
        self._groups: EpochGroups | None = None
        self._device = device
        self._copier = copier or Copier(device)
        self._stager = StepStager(limits, kv_pool, self._copier)
        self._before: Pending | None = None  # the step launched last
        self._deferred: DeferredDraftExtend | None = None
        self._rows = RowProgress.empty(kv_pool.row_num_blocks)
        self._measures = measures or Measures()

    @property
    def has_peers(self) -> bool:
        """Whether a step takes other executors, which would wait for this one."""
        if self.experts is not None:
            return self._limits.topology.world_size > 1
        return self._form_group is not None

    @property
    def waits_for_peers(self) -> bool:
        """Whether a step has waited for other executors for 100 ms or more; any thread may ask."""
        groups = self._groups
        return groups is not None and groups.is_waiting

    @property
    def has_deferred(self) -> bool:
        """Whether the last step has left something for ``run_deferred``."""
        return self._deferred is not None

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        """Launches one step and finishes it."""
        return self.finish(self.launch(request))

    @torch.inference_mode()
    def launch(self, request: pb.StepRequest) -> Pending:
        """Runs one step but for its answer, after what the one before it has deferred.

        A GPU has it all to do when this returns, behind the steps before it.

        Raises:
            InvalidStep: The step does not fit; nothing has changed.
            PeerLost: Another executor left the group. As after every other error, rows are in no
                known state until the next join.
            Exception: The forward pass failed, or that of a step before.
        """
        self.run_deferred()
        measures = self._measures
        measures.begin_step()
        self._note_accepted()
        groups = self._groups
        if groups is None and self.has_peers:
            raise PeerLost("this executor has left its group")
        columns = read_step(request, self._limits, self._rows)
        staged = self._stager.stage(columns)
        self._update_rows(columns, staged)
        batch = self._build_batch(columns, staged)
        measures.end_phase("fill")
        run = self._speculate if columns.num_draft_tokens else self._run
        gained, scores = run(columns, staged, batch)
        failures = self._note_gains(staged, gained)
        times, is_done = measures.launched(), self._copier.is_shared
        mode = batch.forward_mode
        pending = Pending(request, columns, mode, groups, gained, scores, failures, times, is_done)
        self._before = pending
        return pending

    def finish(self, pending: Pending) -> pb.StepResponse:
        """Waits until a step has run, and returns its answer. Call it in the order of launches.

        Any thread may, also while the next step is launched.

        Raises:
            PeerLost: Another executor left the group.
            Exception: The forward pass failed.
        """
        request, layout = pending.request, pending.columns.layout
        gained = pending.gained.wait()
        if self._groups is not pending.groups:  # NCCL ends the collectives of a group that is left
            raise PeerLost("this executor left its group during the step")
        ranks = self._results(pending, gained)
        is_speculative = pending.columns.num_draft_tokens > 0
        forward_ns = self._measures.end_step(
            pending.times,
            "verify" if is_speculative else pending.forward_mode.name.lower(),
            num_tokens=layout.num_tokens,
            num_rows=layout.num_rows,
            is_replay=layout.graph_size is not None,
        )
        return pb.StepResponse(
            epoch=request.epoch,
            step_id=request.step_id,
            agreement_crc32=agreement_crc32(request),
            part_crc32=part_crc32(request),
            ranks=ranks,
            forward_ns=forward_ns,
        )

    @torch.inference_mode()
    def run_deferred(self) -> None:
        """Runs what the last step has deferred, if anything.

        Its peers do so too and meet it there, so it is not to wait until there is another step.

        Raises:
            PeerLost: Another executor left the group. As after every other error, rows are in no
                known state until the next join.
            Exception: The forward pass of the draft model failed.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is None or deferred.groups is not self._groups:
            return
        self._measures.begin_phase()
        deferred.run()
        if self._groups is not deferred.groups:
            raise PeerLost("this executor left its group during a deferred draft-extend")
        self._measures.end_phase("draft")

    @torch.inference_mode()
    def join(
        self,
        epoch: int,
        store_address: str,
        attempt: JoinAttempt | None = None,
        placement: Placement | None = None,
    ) -> Loaded:
        """Leaves any older group, forgets all rows, joins the group of an epoch and captures.

        Returns when every member has joined and this one can step: what it had to load.

        Args:
            epoch: The group's.
            store_address: Where its members find one another, host:port.
            attempt: What another thread calls off, and then `leave`; None: nobody does.
            placement: Where an elastic executor stands from now on.

        Raises:
            LoadFailed: Its experts cannot be read. It is in no group.
            JoinFailed: Another member did not come in time, graphs were not captured, or the
                attempt was called off. This one is in no group.
        """
        attempt = attempt or JoinAttempt(epoch)
        self.leave()
        for member in self._members:  # those that joined a group as another thread left it
            member.leave()
        self._before = self._deferred = None
        self._rows.reset()
        if placement is not None:
            assert self.experts is not None, "else the placement was refused"
            self.experts.take(placement)
        groups: EpochGroups | None = None
        if self._form_group is not None and self.has_peers:
            groups = self._groups = attempt.form(self._form_group, store_address)
        problem = "its group cannot be used"
        try:
            attempt.check()  # who called it off may have left before there were groups to leave
            if groups is not None:
                for member in self._members:
                    member.join(groups)
            loaded = Loaded()
            if placement is not None and self.experts is not None:
                begun_ns = time.perf_counter_ns()
                num_bytes = self.experts.load(placement.slots, lambda _: attempt.check())
                loaded = Loaded(num_bytes, time.perf_counter_ns() - begun_ns)
            problem = "graphs were not captured"
            self._runner.capture()
            attempt.check()
            return loaded
        except Exception as error:
            self.leave()  # or the others would wait for this one in their next collective
            attempt.check()
            if isinstance(error, JoinFailed):
                raise
            raise JoinFailed(f"epoch {epoch}: {problem}: {error}") from error

    def leave(self) -> None:
        """Leaves the group, so that peers inside a collective fail now instead of waiting.

        May be called from another thread; a step that waits for peers then fails too.
        """
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.close()
            for member in self._members:
                member.leave()

    def _note_accepted(self) -> None:
        """Brings lengths up to date behind a speculative step. Waits until its tokens are known."""
        before = self._before
        if before is not None and before.columns.num_draft_tokens:
            columns = before.columns
            num_tokens = columns.num_computed_tokens + 1 + before.gained.wait()[:, 0]
            self._rows.num_tokens[columns.rows] = num_tokens

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
            extend_seq_lens_cpu=columns.num_tokens if is_extend else None,
            window_cache_loc=tensors.window_cache_loc if self._limits.kv_window else None,
        )

    def _run(
        self, columns: StepColumns, staged: Staged, batch: ForwardBatch
    ) -> tuple[ReadBack, Scores | None]:
        """Runs a step in which every sequence that samples gains one token."""
        if self._sampler.constraints is not None:
            arrays = staged.arrays
            self._sampler.constraints.begin(arrays.sampled_rows, arrays.sampled_positions)
        logits = self._runner.run(batch)
        self._measures.end_phase("forward")
        tokens = self._sample(staged, logits)
        scores = self._score(columns, logits, tokens)
        gained = ReadBack(tokens, self._copier)
        self._measures.end_phase("sample")
        if self._speculation is not None:
            self._rows.num_tokens[columns.rows] = columns.num_computed_tokens + columns.num_tokens
            self._rows.num_tokens[staged.arrays.sampled_rows] += 1
            speculator = self._speculation.speculator
            if speculator.extends(columns):
                self._defer(partial(speculator.extend, columns, batch, tokens))
            else:
                self._rows.is_followed[columns.rows] = False
        return gained, scores

    def _speculate(
        self, columns: StepColumns, staged: Staged, batch: ForwardBatch
    ) -> tuple[ReadBack, Scores | None]:
        """Runs a step in which every sequence gains a token, and drafts that are accepted."""
        assert self._speculation is not None, "else the step was refused"
        speculator, verifier = self._speculation.speculator, self._speculation.verifier
        measures, at = self._measures, batch.req_pool_indices
        drafts = speculator.draft(columns, at)
        measures.end_phase("draft")
        batch, verification = verifier.batch(columns, batch, drafts)
        self._begin_masks(columns, verification.drafts)
        logits = self._runner.verify(batch)
        measures.end_phase("forward")
        accepted = verifier.accept(verification, logits)
        last = accepted.tokens.gather(1, (accepted.num_tokens - 1).unsqueeze(1)).squeeze(1)
        self._sampler.remember(last, columns.rows, at)
        scores = self._score(columns, logits, accepted.tokens[:, 0])
        table = torch.cat((accepted.num_tokens.unsqueeze(1), accepted.tokens), dim=1)
        gained = ReadBack(table, self._copier)
        measures.end_phase("sample")
        self._defer(partial(speculator.extend_accepted, verification, accepted))
        return gained, scores

    def _begin_masks(self, columns: StepColumns, drafts: Drafts) -> None:
        """Begins to fill the masks of a speculative step, if some of its rows are constrained."""
        constraints, rows = self._sampler.constraints, columns.rows
        if constraints is None or not constraints.is_constrained[rows].any():
            return
        parents = drafts.parents
        if parents is None:  # a chain
            parents = torch.arange(drafts.tokens.shape[1], device=self._device)
            parents = parents.expand_as(drafts.tokens)
        both = ReadBack(torch.stack((drafts.tokens, parents)), self._copier)
        seq_lens = columns.num_computed_tokens + 1
        constraints.begin(rows, seq_lens, lambda: HostDrafts(*both.wait()))

    def _note_gains(self, staged: Staged, gained: ReadBack) -> Future[list[tuple[int, str]]] | None:
        """Has grammars go on behind what a step gains. Returns the rows that cannot, and why."""
        constraints = self._sampler.constraints
        if constraints is None:
            return None
        return constraints.accept(staged.arrays.sampled_rows, gained.wait)

    def _defer(self, draft_extend: Callable[[], None]) -> None:
        """Has draft-extend run without the step's tokens, on their way to the host, waiting."""
        self._deferred = DeferredDraftExtend(draft_extend, self._groups)
        if not self._copier.is_shared:  # this only launches it
            self.run_deferred()

    def _sample(self, staged: Staged, logits: torch.Tensor) -> torch.Tensor:
        """Returns one token for each sequence that samples, int64 [S] on the device."""
        arrays, tensors = staged.arrays, staged.tensors
        rows, seq_lens = arrays.sampled_rows, arrays.sampled_positions
        if not rows.size:
            return tensors.sampled_rows
        if arrays.sampled_at.size:
            logits = logits.index_select(0, tensors.sampled_at)
        tokens = self._sampler.sample(logits, rows, seq_lens, tensors.sampled_rows)
        self._rows.has_sampled[rows] = True
        return tokens

    def _scored_rows(self, columns: StepColumns) -> Int64Array:
        """Returns the indices of the rows of logits that get log probabilities.

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
        self, columns: StepColumns, logits: torch.Tensor, tokens: torch.Tensor
    ) -> Scores | None:
        """Begins the log probabilities that are asked for, before draft-extend reuses the logits.

        Args:
            columns: The step.
            logits: [L, V].
            tokens: [S], sampled; of a speculative step the first that each sequence gained.
        """
        if not (columns.scored_ids.size or self._sampler.scores_output.any()):
            return None
        scored = self._scored_rows(columns)
        if not scored.size or columns.layout.attn_tp_rank > 0:
            return None
        if columns.num_draft_tokens:
            place = columns.logits_sequence
        else:  # of a row of logits among the tokens sampled, and those given behind them
            place = np.argsort(np.argsort(~columns.is_sampled, kind="stable"), kind="stable")
            tokens = torch.cat((tokens, to_device(columns.scored_ids, self._device)))
        sampler, rows = self._sampler, columns.rows[columns.logits_sequence[scored]]
        num_top, num_given = sampler.num_top_logprobs[rows], sampler.num_logprob_ids[rows]
        token_ids = tokens.index_select(0, to_device(place[scored], self._device))[:, None]
        if most := int(num_given.max()):
            given = to_device(sampler.logprob_ids[rows, :most], self._device)
            token_ids = torch.cat((token_ids, given), dim=1)
        logits = logits.index_select(0, to_device(scored, self._device))
        found = ReadBack(score(logits, token_ids, num_top), self._copier)
        return Scores(found, num_top, num_given)

    def _results(self, pending: Pending, gained: Int64Array) -> list[pb.RankResult]:
        """Returns what this executor answers: one of its DP rank's executors does, for all."""
        layout = pending.columns.layout
        if layout.attn_tp_rank > 0:
            return []
        result = pb.RankResult(dp_rank=layout.dp_rank)
        if pending.columns.num_draft_tokens:
            num_tokens, tokens = gained[:, 0], gained[:, 1:]
            result.num_next_tokens = _int32(num_tokens)
            gained = tokens[np.arange(tokens.shape[1]) < num_tokens[:, None]]
        result.next_token_ids = _int32(gained)
        for row, problem in pending.failures.result() if pending.failures is not None else ():
            result.grammar_failures.add(row=row, problem=problem)
        if pending.scores is not None:
            found, *counts = pending.scores
            logprobs, top_ids, top_logprobs, given = cut_scores(found.wait(), *counts)
            result.logprobs = _float32(logprobs)
            result.top_ids = _int32(top_ids)
            result.top_logprobs = _float32(top_logprobs)
            result.given_logprobs = _float32(given)
        return [result]


def _int32(values: Int64Array | npt.NDArray[np.int32]) -> bytes:
    return values.astype("<i4").tobytes()


def _float32(values: npt.NDArray[np.float32]) -> bytes:
    return values.astype("<f4").tobytes()
