"""Step codec: StepPlan to StepRequests, StepResponses to a StepResult."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NoReturn
from zlib import crc32

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from protos.executor.sampling_fields import FLOAT32, INT32, SAMPLING_FIELDS
from protos.executor.step_checksums import agreement_crc32, part_crc32
from protos.executor.v1 import executor_pb2 as pb
from router.requests.request import Int32Array
from router.scheduling.step import (
    NO_FLOATS,
    NO_INTS,
    Agreement,
    BatchMode,
    PaddingMode,
    RankBatch,
    RankResult,
    RowStart,
    StepPlan,
    StepResult,
)

LENGTH_DELIMITED = 2  # wire type
MAX_KNOWN_BYTES = 1 << 16  # of a field whose length is kept as it stands on the wire

# By BatchMode, whose members are the indices: hashing one would take 300 ns.
FORWARD_MODES = (pb.FORWARD_MODE_IDLE, pb.FORWARD_MODE_DECODE, pb.FORWARD_MODE_EXTEND)
PADDING_MODES = {
    PaddingMode.MAX_LEN: pb.DP_PADDING_MODE_MAX_LEN,
    PaddingMode.SUM_LEN: pb.DP_PADDING_MODE_SUM_LEN,
}
INT32_BYTES = INT32.itemsize
TIME_BITS = 44  # of what a step took, in nanoseconds: nearly five hours
MAX_NAMED = 8  # ranks, in an error
new_tuple = tuple.__new__  # a NamedTuple's own takes twice as long


class WrongAnswer(ValueError):
    """A DP rank answered what no executor can mean.

    Attributes:
        rank: Which one.
    """

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(problem)
        self.rank = rank


class _Field(dict[int, bytes]):
    """A length-delimited field: what stands before its bytes on the wire, by their number.

    Source: protobuf encoding, "Length-Delimited Records".

    Args:
        message: Whose field it is.
        name: Its name.
    """

    def __init__(self, message: type[Message], name: str) -> None:
        number = message.DESCRIPTOR.fields_by_name[name].number
        self._tag = _varint(number << 3 | LENGTH_DELIMITED)

    def __missing__(self, num_bytes: int) -> bytes:
        before = self._tag + _varint(num_bytes)
        if num_bytes < MAX_KNOWN_BYTES:
            self[num_bytes] = before
        return before


def _varint(value: int) -> bytes:
    """Returns a number as protobuf has it: seven bits a byte, the lowest first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


_PART = _Field(pb.StepRequest, "ranks")
_STARTS = _Field(pb.RankStep, "starts")
_SEQUENCES = _Field(pb.RankStep, "sequences")
_COLUMNS = {name: _Field(pb.SequenceColumns, name) for name in RankBatch._fields[1:11]}
_ROWS, _NUM_COMPUTED = _COLUMNS["rows"], _COLUMNS["num_computed_tokens"]
_NUM_NEW_BLOCKS, _NEW_BLOCK_IDS = _COLUMNS["num_new_blocks"], _COLUMNS["new_block_ids"]
_NEW_WINDOW_BLOCK_IDS = _COLUMNS["new_window_block_ids"]


def encode_step(plan: StepPlan, epoch: int, step_id: int) -> tuple[list[bytes], int]:
    """Returns each DP rank's StepRequest, serialised, and the CRC-32 of the agreement in them.

    What all ranks get alike is serialised once: messages put end to end are one message with the
    fields of both (protobuf encoding, "Last One Wins"). Columns are copied once, from their arrays
    into the request: to fill a message and serialise it takes twice as long.
    """
    agreement, checksum = _encode_agreement(plan.agreement)
    alike = pb.StepRequest(epoch=epoch, step_id=step_id).SerializeToString() + agreement
    requests = []
    for rank, batch in enumerate(plan.batches):
        # In line, and unpacked once: a loop over all columns would take twice as long.
        mode, rows, computed, tokens, num_tokens, num_new, blocks, windows, samples, *_ = batch
        head, columns = _encode_heads(rank)[mode], b""
        if size := rows.nbytes:
            pieces: list[Any] = [_ROWS[size], rows, _NUM_COMPUTED[size], computed]
            if num_new is not None and blocks is not None:
                num_bytes = blocks.nbytes
                pieces += (_NUM_NEW_BLOCKS[size], num_new, _NEW_BLOCK_IDS[num_bytes], blocks)
                if windows is not None:
                    pieces += (_NEW_WINDOW_BLOCK_IDS[num_bytes], windows)
            if not (tokens is None and num_tokens is None and samples is None):
                head += _encode_rest(batch, pieces)
            columns = b"".join(pieces)
            head += _SEQUENCES[len(columns)]
        requests.append(b"".join((alike, _PART[len(head) + len(columns)], head, columns)))
    return requests, checksum


@cache
def _encode_heads(rank: int) -> tuple[bytes, ...]:
    """Returns a RankStep of nothing but the rank and the mode, for each BatchMode."""
    steps = [pb.RankStep(dp_rank=rank, forward_mode=mode) for mode in FORWARD_MODES]
    return tuple(step.SerializeToString() for step in steps)


def _encode_rest(batch: RankBatch, pieces: list[Any]) -> bytes:
    """Adds the columns that steps without prompts and drafts do not have. Returns the starts."""
    for name in ("token_ids", "num_tokens", "samples", "num_scored", "scored_ids"):
        column = getattr(batch, name)
        if column is not None:
            pieces += (_COLUMNS[name][column.nbytes], column)
    if not batch.starts:
        return b""
    columns = pb.RowStarts()
    encode_starts(columns, batch.starts)
    starts = columns.SerializeToString()
    return _STARTS[len(starts)] + starts


@lru_cache(maxsize=1)  # as long as no sequence comes or goes, the next step's is the same
def _encode_agreement(agreement: Agreement) -> tuple[bytes, int]:
    """Returns a StepRequest of nothing but the agreement, and the agreement's CRC-32."""
    message = pb.StepAgreement(
        global_num_tokens=agreement.global_num_tokens,
        global_num_tokens_for_logprob=agreement.global_num_tokens_for_logprob,
        has_extend=agreement.has_extend,
        padding_mode=PADDING_MODES[agreement.padding_mode],
        graph_size=agreement.graph_size,
        num_draft_tokens=agreement.num_draft_tokens,
        global_num_tokens_for_draft=agreement.global_num_tokens_for_draft,
        global_num_sampled=agreement.global_num_sampled,
    )
    encoded = pb.StepRequest(agreement=message).SerializeToString()
    return encoded, crc32(encoded)


def encode_starts(columns: pb.RowStarts, starts: Sequence[RowStart]) -> None:
    """Fills the columns of the rows that begin; columns of nothing but defaults stay empty."""
    requests = [start.sequence.request for start in starts]
    sampling = [request.sampling for request in requests]
    columns.rows = _bytes([start.row for start in starts], np.int32)
    for field in SAMPLING_FIELDS:
        if any(field.name in params.values for params in sampling):
            values = [params[field.name] for params in sampling]
            setattr(columns, field.name, _bytes(values, field.dtype))
    columns.seed = _column([start.sequence.seed for start in starts], np.uint64)
    columns.scores_output = _column([r.output.logprobs for r in requests], np.uint8)
    columns.num_top_logprobs = _column([r.output.top_logprobs for r in requests], np.int32)
    if any(r.output.logprob_ids for r in requests):
        logprob_ids = [r.output.logprob_ids for r in requests]
        columns.num_logprob_ids, columns.logprob_ids = _ragged(logprob_ids)
    if any(request.stop.min_tokens for request in requests):
        ends = [len(r.prompt) + r.stop.min_tokens if r.stop.min_tokens else 0 for r in requests]
        columns.suppressed_until = _column(ends, np.int32)
        ids = [r.stop.stop_token_ids if r.stop.min_tokens else () for r in requests]
        columns.num_suppressed_ids, columns.suppressed_ids = _ragged(ids)
    if any(params.logit_bias for params in sampling):
        ids = [tuple(token_id for token_id, _ in params.logit_bias) for params in sampling]
        columns.num_biases, columns.bias_ids = _ragged(ids)
        biases = [bias for params in sampling for _, bias in params.logit_bias]
        columns.biases = _bytes(biases, np.float32)
    if any(request.grammar for request in requests):
        grammars = list(dict.fromkeys(r.grammar for r in requests if r.grammar))
        columns.grammars.extend(grammars)
        numbers = {grammar: number for number, grammar in enumerate(["", *grammars])}
        columns.grammar_of = _bytes([numbers[r.grammar] for r in requests], np.int32)
        if any(r.grammar_after for r in requests):
            columns.num_begin_ids, columns.begin_ids = _ragged([r.grammar_after for r in requests])
    if any(params.allowed_ids for params in sampling):
        allowed = [params.allowed_ids for params in sampling]
        columns.num_allowed_ids, columns.allowed_ids = _ragged(allowed)
    if any(params.banned for params in sampling):
        columns.num_banned = _column([len(params.banned) for params in sampling], np.int32)
        sequences = [ids for params in sampling for ids in params.banned]
        columns.banned_lens, columns.banned_ids = _ragged(sequences)
    if any(params.sees_output for params in sampling):
        prompts = [r.prompt.tolist() if r.sampling.has_prompt_penalty else [] for r in requests]
        columns.num_prompt_ids, columns.prompt_ids = _ragged(prompts)
    if any(r.grammar or r.sampling.sees_output for r in requests):
        columns.num_output_ids, columns.output_ids = _ragged([_known_output(s) for s in starts])


def _known_output(start: RowStart) -> Sequence[int]:
    """Returns the output so far of a sequence whose next token depends on all of it."""
    sequence = start.sequence
    if not (sequence.request.grammar or sequence.request.sampling.sees_output):
        return ()
    output: list[int] = sequence.tokens[sequence.num_prompt_tokens : sequence.num_tokens].tolist()
    return output


def _ragged(parts: Sequence[Sequence[int]]) -> tuple[bytes, bytes]:
    """Returns the lengths of the parts, and the parts end to end."""
    lens = _column([len(part) for part in parts], np.int32)
    return lens, _bytes([value for part in parts for value in part], np.int32)


def _column(values: Sequence[float], dtype: npt.DTypeLike) -> bytes:
    """Returns a column whose default is 0."""
    return _bytes(values, dtype) if any(values) else b""


def _bytes(values: Sequence[float], dtype: npt.DTypeLike) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def ran_as_sent(responses: Sequence[pb.StepResponse], num_peers: int, checksum: int) -> bool:
    """Whether all executors ran the agreement that was sent, and attention-TP peers the same part.

    Args:
        responses: One per executor, those of attention-TP peers side by side.
        num_peers: Executors of a DP rank.
        checksum: Of the agreement that was sent.
    """
    agreements = [answer.agreement_crc32 for answer in responses]
    if agreements.count(checksum) != len(agreements):
        return False
    return num_peers == 1 or all(
        answer.part_crc32 == responses[index - index % num_peers].part_crc32
        for index, answer in enumerate(responses)
    )


def difference(response: pb.StepResponse, sent: bytes) -> str:
    """Says what an executor ran otherwise than it was sent; "" if nothing."""
    request = pb.StepRequest.FromString(sent)
    differing = []
    if response.agreement_crc32 != agreement_crc32(request):
        differing.append("another agreement")
    if response.part_crc32 != part_crc32(request):
        differing.append("another part")
    return " and ".join(differing)


def decode_step(
    responses: Sequence[pb.StepResponse], batches: Sequence[RankBatch], vocab_size: int
) -> StepResult:
    """Returns what the DP ranks answered for their batches.

    Args:
        responses: One of each rank.
        batches: What each was sent.
        vocab_size: Token ids are below it.

    Raises:
        WrongAnswer: One is for another rank, has too many or too few tokens, or some that are none.
    """
    columns, gains, failing, has_scores = [], [], [], False
    for rank, (response, batch) in enumerate(zip(responses, batches, strict=True)):
        # In line: a call for each rank would take 2 us of a step's 27.
        parts = response.ranks
        if len(parts) != 1 or (part := parts[0]).dp_rank != rank:
            raise _for_others(parts, rank)
        column, gained, samples = part.next_token_ids, None, batch.samples
        num_sampled = len(batch.rows) if samples is None else int(np.count_nonzero(samples))
        if part.num_next_tokens:
            gained = _check_gains(part.num_next_tokens, batch, num_sampled, rank)
        if len(column) != (num_sampled if gained is None else int(gained.sum())) * INT32_BYTES:
            raise _wrong_length(column, num_sampled, gained, rank)
        columns.append(column)
        gains.append(gained)
        if part.grammar_failures:
            failing.append(rank)
        if batch.scorings:
            has_scores = True
    # All ranks end to end: a comparison for each would take ten times as long.
    tokens = np.frombuffer(b"".join(columns), INT32)
    if (place := _place_outside(tokens, vocab_size)) is not None:
        ends = list(accumulate(len(column) // INT32_BYTES for column in columns))
        raise _outside(bisect_right(ends, place), "next_token_ids", tokens[place], vocab_size)
    results, start, times = [], 0, 0
    for response, column, gained in zip(responses, columns, gains, strict=True):
        end = start + len(column) // INT32_BYTES
        queued_ns, forward_ns = response.queued_ns, response.forward_ns
        times |= queued_ns | forward_ns
        fields = (
            tokens[start:end],
            NO_FLOATS,
            NO_INTS,
            NO_FLOATS,
            queued_ns,
            forward_ns,
            gained,
            (),
            NO_FLOATS,
        )
        results.append(new_tuple(RankResult, fields))
        start = end
    if times >> TIME_BITS:
        _refuse_times(results)
    for rank in failing:
        failures = _read_failures(responses[rank].ranks[0], batches[rank])
        results[rank] = results[rank]._replace(failures=failures)
    if has_scores:
        for rank, batch in enumerate(batches):
            if batch.scorings:
                part = responses[rank].ranks[0]
                results[rank] = _with_scores(results[rank], part, batch, vocab_size)
    return tuple(results)


def _read_failures(part: pb.RankResult, batch: RankBatch) -> list[tuple[int, str]]:
    failures = [(failure.row, failure.problem) for failure in part.grammar_failures]
    if strange := {row for row, _ in failures}.difference(batch.rows.tolist()):
        problem = f"grammar_failures has row {min(strange)}, which the step does not run"
        raise WrongAnswer(part.dp_rank, problem)
    return failures


def _refuse_times(results: Sequence[RankResult]) -> NoReturn:
    times = [(result.queued_ns, result.forward_ns) for result in results]
    rank = times.index(max(times, key=max))
    queued_ns, forward_ns = times[rank]
    raise WrongAnswer(
        rank, f"queued_ns={queued_ns} and forward_ns={forward_ns}, below {1 << TIME_BITS} each"
    )


def _for_others(parts: Sequence[pb.RankResult], rank: int) -> WrongAnswer:
    answered = [part.dp_rank for part in parts[:MAX_NAMED]]
    return WrongAnswer(rank, f"it answered for the ranks {answered}, not for itself")


def _wrong_length(
    column: bytes, num_sampled: int, gained: Int32Array | None, rank: int
) -> WrongAnswer:
    num_due = num_sampled if gained is None else int(gained.sum())
    given = "" if gained is None else f", whose num_next_tokens add up to {num_due}"
    return WrongAnswer(
        rank,
        f"a column of {len(column)} bytes of next_token_ids for {num_sampled} sequences that "
        f"sample{given}, which take {num_due * INT32_BYTES}",
    )


def _place_outside(token_ids: Int32Array, vocab_size: int) -> int | None:
    """Returns where the first id is that no token has; None: nowhere."""
    ids = token_ids.view(np.uint32)  # of which the negative ones are the largest
    if len(ids) == 0 or np.maximum.reduce(ids) < vocab_size:
        return None
    return int((ids >= vocab_size).argmax())


def _outside(rank: int, name: str, token_id: int, vocab_size: int) -> WrongAnswer:
    return WrongAnswer(rank, f"{name} has {token_id}, where ids are 0 to {vocab_size - 1}")


def _check_gains(gains: bytes, batch: RankBatch, num_sampled: int, rank: int) -> Int32Array | None:
    """Returns how many tokens each sampling sequence gained; None: 1 each."""
    if len(gains) != num_sampled * INT32_BYTES:
        raise WrongAnswer(
            rank,
            f"a column of {len(gains)} bytes of num_next_tokens for {num_sampled} sequences that "
            f"sample, which take {num_sampled * INT32_BYTES}",
        )
    gained = np.frombuffer(gains, INT32)
    # Only a decode that drafts has `num_tokens`: what each may gain.
    limits = batch.num_tokens if batch.mode is BatchMode.DECODE else None
    is_wrong = (gained < 1) | (gained > (1 if limits is None else limits))
    if is_wrong.any():
        rows = batch.rows if batch.samples is None else batch.rows[batch.samples != 0]
        place = int(is_wrong.argmax())
        limit = 1 if limits is None else limits[place]
        raise WrongAnswer(
            rank,
            f"num_next_tokens has {gained[place]} for row {rows[place]}, which gains "
            + (f"1 to {limit} in this step" if limit > 1 else "1 in this step"),
        )
    return gained if len(gained) and gained.max() > 1 else None


def _with_scores(
    result: RankResult, part: pb.RankResult, batch: RankBatch, vocab_size: int
) -> RankResult:
    """Returns a rank's result with the log probabilities that were asked for."""
    num_scores, num_top, num_given = 0, 0, 0
    for scoring in batch.scorings:
        count, output = len(scoring.scored_ids), scoring.sequence.request.output
        count += scoring.sample_index is not None
        num_scores += count
        num_top += count * output.top_logprobs
        num_given += count * len(output.logprob_ids)
    columns = (part.logprobs, part.top_ids, part.top_logprobs, part.given_logprobs)
    came = tuple(map(len, columns))
    due = (4 * num_scores, 4 * num_top, 4 * num_top, 4 * num_given)
    if came != due:
        raise WrongAnswer(
            part.dp_rank,
            f"{came} bytes of logprobs, top_ids, top_logprobs and given_logprobs, where {due} are due",
        )
    top_ids = np.frombuffer(part.top_ids, INT32)
    if (place := _place_outside(top_ids, vocab_size)) is not None:
        raise _outside(part.dp_rank, "top_ids", top_ids[place], vocab_size)
    return result._replace(
        logprobs=np.frombuffer(part.logprobs, FLOAT32),
        top_ids=top_ids,
        top_logprobs=np.frombuffer(part.top_logprobs, FLOAT32),
        given_logprobs=np.frombuffer(part.given_logprobs, FLOAT32),
    )
