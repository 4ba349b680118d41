"""Step codec: StepPlan to StepRequests, StepResponses to a StepResult."""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NoReturn
from zlib import crc32

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from protos.executor.sampling_fields import FLOAT32, INT32, SAMPLING_FIELDS
from protos.executor.step_checksums import agreement_crc32, part_crc32
from protos.executor.v1 import executor_pb2 as pb
from router.requests.request import Int32Array, Request
from router.scheduling.columns import INT32_BYTES
from router.scheduling.step import (
    LAST_SAMPLED,
    Agreement,
    BatchMode,
    DecodeColumns,
    PaddingMode,
    RankBatch,
    RowFailure,
    RowStart,
    Scores,
    Scoring,
    StepPlan,
    StepResult,
)

LENGTH_DELIMITED = 2  # wire type
MAX_KNOWN_BYTES = 1 << 16  # of a field whose length is kept as it stands on the wire
MAX_KNOWN_HEADS = 1 << 14  # of decodes' columns, kept likewise: sizes recur from step to step

# By BatchMode, whose members are the indices: hashing one would take 300 ns.
_IDLE, _DECODE = int(BatchMode.IDLE), int(BatchMode.DECODE)
FORWARD_MODES = (pb.FORWARD_MODE_IDLE, pb.FORWARD_MODE_DECODE, pb.FORWARD_MODE_EXTEND)
PADDING_MODES = {
    PaddingMode.MAX_LEN: pb.DP_PADDING_MODE_MAX_LEN,
    PaddingMode.SUM_LEN: pb.DP_PADDING_MODE_SUM_LEN,
}
TIME_BITS = 44  # of what a step took, in nanoseconds: nearly five hours
MAX_NAMED = 8  # ranks, in an error


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
_START_COLUMNS = {
    name: _Field(pb.RowStarts, name) for name in pb.RowStarts.DESCRIPTOR.fields_by_name
}
_NO_COLUMNS = (b"",) * len(_COLUMNS)
_LAST_SAMPLED, _ONE = (np.int32(value).tobytes() for value in (LAST_SAMPLED, 1))
DECODE_COLUMNS = (  # that a rank which only decodes may send
    *("rows", "num_computed_tokens", "num_tokens"),
    *("num_new_blocks", "new_block_ids", "new_window_block_ids"),
)


def encode_step(plan: StepPlan, epoch: int, step_id: int) -> tuple[list[bytes], int]:
    """Returns each DP rank's StepRequest, serialised, and the CRC-32 of the agreement in them.

    What all ranks get alike is serialised once: messages put end to end are one message with the
    fields of both (protobuf encoding, "Last One Wins"). Columns are copied as they are: to fill a
    message and serialise it takes twice as long.
    """
    agreement, checksum = _encode_agreement(plan.agreement)
    alike = pb.StepRequest(epoch=epoch, step_id=step_id).SerializeToString() + agreement
    requests = _encode_decodes(alike, plan.decodes)
    if not plan.chunks:
        return requests, checksum
    for (rank, chunks), starts in zip(
        plan.chunks.items(), _encode_all_starts(plan.chunks.values()), strict=True
    ):
        requests[rank] = _encode_mixed(alike, rank, plan.decodes, chunks, starts)
    return requests, checksum


def _encode_decodes(alike: bytes, decodes: DecodeColumns) -> list[bytes]:
    """Returns each DP rank's StepRequest if it only decodes: bytes of all ranks, cut."""
    row_set, computed, limits, num_new_blocks, new_block_ids, windows, block_cuts = decodes
    columns = (computed, limits, num_new_blocks, new_block_ids, windows)
    num_computed, num_tokens, num_new, block_ids, window_ids = map(_to_bytes, columns)
    has_limits, has_windows = limits is not None, windows is not None
    requests, end, last = [], 0, 0
    for rank, (rows, num_blocks) in enumerate(zip(row_set.local_rows, block_cuts[1:], strict=True)):
        # In line: a loop over the columns, or a call for each rank, would take as long again.
        start, end, first, last = end, end + len(rows), last, num_blocks * INT32_BYTES
        head = _encode_heads(rank)[_DECODE if rows else _IDLE]
        at_part, at_rows, at_computed, at_tokens, at_new, at_ids, at_windows = _column_heads(
            len(head), end - start, last - first, has_limits, has_windows
        )
        pieces = [alike, at_part, head, at_rows, rows, at_computed, num_computed[start:end]]
        if at_new:
            pieces += at_new, num_new[start:end], at_ids, block_ids[first:last]
        if has_limits or has_windows:
            pieces += at_tokens, num_tokens[start:end], at_windows, window_ids[first:last]
        requests.append(b"".join(pieces))
    return requests


@lru_cache(maxsize=MAX_KNOWN_HEADS)
def _column_heads(
    num_head_bytes: int, num_bytes: int, num_block_bytes: int, has_limits: bool, has_windows: bool
) -> tuple[bytes, ...]:
    """Returns what stands on the wire before the columns of a DP rank that only decodes.

    Not by rank: few are read again and again, and stay in the processor's caches.

    Args:
        num_head_bytes: Of what its RankStep begins with.
        num_bytes: Of a column of its rows.
        num_block_bytes: Of a column of their new blocks.

    Returns:
        Before the RankStep, and before each of DECODE_COLUMNS; b"" if that is not sent.
    """
    of_new = num_bytes if num_block_bytes else 0
    of_windows = num_block_bytes if has_windows else 0
    sizes = num_bytes, num_bytes, num_bytes * has_limits, of_new, num_block_bytes, of_windows
    heads = [
        _COLUMNS[name][size] if size else b""
        for name, size in zip(DECODE_COLUMNS, sizes, strict=True)
    ]
    num_column_bytes = sum(sizes) + sum(map(len, heads))
    if num_bytes:
        at_sequences = _SEQUENCES[num_column_bytes]
        heads[0] = at_sequences + heads[0]
        num_column_bytes += len(at_sequences)
    return _PART[num_head_bytes + num_column_bytes], *heads


def _to_bytes(column: Int32Array | None) -> bytes:
    return b"" if column is None else column.tobytes()


def _encode_mixed(
    alike: bytes, rank: int, decodes: DecodeColumns, chunks: RankBatch, starts: bytes
) -> bytes:
    """Returns the StepRequest of a DP rank that runs chunks behind its decodes.

    Args:
        starts: The RowStarts of its chunks, serialised; b"": none begins.
    """
    head, pieces, ahead = _encode_heads(rank)[chunks.mode], list[Any](), _NO_COLUMNS
    if starts:
        head += _STARTS[len(starts)] + starts
    if decodes.row_set.num_rows[rank]:
        ahead = _decodes_ahead(rank, decodes)
    for field, first, second in zip(_COLUMNS.values(), ahead, chunks[1:11], strict=True):
        if second is not None:
            pieces += (field[len(first) + second.nbytes], first, second)
    sequences = b"".join(pieces)
    head += _SEQUENCES[len(sequences)]
    return b"".join((alike, _PART[len(head) + len(sequences)], head, sequences))


def _decodes_ahead(rank: int, decodes: DecodeColumns) -> tuple[bytes, ...]:
    """Returns a rank's decodes as its columns are where chunks follow, which have no defaults."""
    part = slice(*decodes.row_set.cuts[rank : rank + 2])
    blocks = slice(*decodes.block_cuts[rank : rank + 2])
    count, num_new, windows = part.stop - part.start, decodes.num_new_blocks, b""
    if decodes.new_window_block_ids is not None:
        windows = decodes.new_window_block_ids[blocks].tobytes()
    zeros = bytes(INT32_BYTES * count)
    return (
        decodes.row_set.local_rows[rank],
        decodes.num_computed_tokens[part].tobytes(),
        count * _LAST_SAMPLED,
        count * _ONE,
        zeros if num_new is None else num_new[part].tobytes(),
        decodes.new_block_ids[blocks].tobytes(),
        windows,
        count * b"\1",
        zeros,
        b"",
    )


@cache
def _encode_heads(rank: int) -> tuple[bytes, ...]:
    """Returns a RankStep of nothing but the rank and the mode, for each BatchMode."""
    steps = [pb.RankStep(dp_rank=rank, forward_mode=mode) for mode in FORWARD_MODES]
    return tuple(step.SerializeToString() for step in steps)


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


def _encode_all_starts(batches: Collection[RankBatch]) -> list[bytes]:
    """Returns the RowStarts of each, serialised: columns of all of them, cut, if they are plain."""
    starts = [start for batch in batches for start in batch.starts]
    columns, cuts = {}, accumulate((len(batch.starts) for batch in batches), initial=0)
    if not any(_has_lists(start.sequence.request) for start in starts):
        columns = _plain_columns(starts) if starts else {}
        return [
            b"".join(
                _START_COLUMNS[name][(last - first) * size] + data[first * size : last * size]
                for name, (data, size) in columns.items()
                if first < last
            )
            for first, last in pairwise(cuts)
        ]
    encoded = []
    for batch in batches:
        message = pb.RowStarts()
        if batch.starts:
            encode_starts(message, batch.starts)
        encoded.append(message.SerializeToString())
    return encoded


def encode_starts(columns: pb.RowStarts, starts: Sequence[RowStart]) -> None:
    """Fills the columns of the rows that begin; columns of nothing but defaults stay empty."""
    for name, (data, _) in _plain_columns(starts).items():
        setattr(columns, name, data)
    if any(_has_lists(start.sequence.request) for start in starts):
        _encode_lists(columns, starts)


def _plain_columns(starts: Sequence[RowStart]) -> dict[str, tuple[bytes, int]]:
    """Returns the columns that have a number for each row, by name, and the bytes of each number."""
    requests = [start.sequence.request for start in starts]
    sampling = [request.sampling for request in requests]
    rows = np.array([start.row for start in starts], np.int32)
    arrays: dict[str, npt.NDArray[Any]] = {"rows": rows}
    given = frozenset().union(*(params.values for params in sampling))
    for field in SAMPLING_FIELDS:
        if field.name in given:
            values = [params[field.name] for params in sampling]
            arrays[field.name] = np.array(values, field.dtype)
    others: dict[str, tuple[list[int], npt.DTypeLike]] = {
        "seed": ([start.sequence.seed for start in starts], np.uint64),
        "scores_output": ([request.output.logprobs for request in requests], np.uint8),
        "num_top_logprobs": ([request.output.top_logprobs for request in requests], np.int32),
    }
    arrays.update((name, np.array(*column)) for name, column in others.items() if any(column[0]))
    return {name: (array.tobytes(), array.itemsize) for name, array in arrays.items()}


def _has_lists(request: Request) -> bool:
    """Whether it has any of the parameters of `_encode_lists`."""
    sampling = request.sampling
    return bool(
        request.grammar
        or request.stop.min_tokens
        or request.output.logprob_ids
        or sampling.logit_bias
        or sampling.allowed_ids
        or sampling.sees_output
    )


def _encode_lists(columns: pb.RowStarts, starts: Sequence[RowStart]) -> None:
    """Fills the columns of what few requests have: lists of tokens, mostly."""
    requests = [start.sequence.request for start in starts]
    sampling = [request.sampling for request in requests]
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
    responses: Sequence[pb.StepResponse], plan: StepPlan, vocab_size: int
) -> StepResult:
    """Returns what the DP ranks answered.

    Args:
        responses: One of each rank.
        plan: What they were sent.
        vocab_size: Token ids are below it.

    Raises:
        WrongAnswer: One is for another rank, has too many or too few tokens, or some that are none.
    """
    columns, gains, failures = [], dict[int, Int32Array](), list[RowFailure]()
    for rank, (response, num_sampled) in enumerate(zip(responses, plan.num_sampled, strict=True)):
        # In line: a call for each rank would take as long again.
        parts = response.ranks
        if len(parts) != 1 or (part := parts[0]).dp_rank != rank:
            raise _for_others(parts, rank)
        column, num_due = part.next_token_ids, num_sampled
        if part.num_next_tokens:
            gains[rank] = _check_gains(part.num_next_tokens, plan, rank)
            num_due = int(gains[rank].sum())
        if len(column) != num_due * INT32_BYTES:
            raise _wrong_length(column, num_sampled, num_due, rank)
        columns.append(column)
        if part.grammar_failures:
            failures += _read_failures(part, plan.batch(rank))
    # All ranks end to end: a comparison for each would take ten times as long.
    tokens = np.frombuffer(b"".join(columns), INT32)
    if (place := _place_outside(tokens, vocab_size)) is not None:
        ends = list(accumulate(len(column) // INT32_BYTES for column in columns))
        raise _outside(bisect_right(ends, place), "next_token_ids", tokens[place], vocab_size)
    queued_ns = [response.queued_ns for response in responses]
    forward_ns = [response.forward_ns for response in responses]
    if max(*queued_ns, *forward_ns) >> TIME_BITS:
        _refuse_times(queued_ns, forward_ns)
    scores = {
        rank: _read_scores(responses[rank].ranks[0], scorings, vocab_size)
        for rank, scorings in plan.scorings.items()
    }
    all_gains = _join_gains(gains, plan.num_sampled) if gains else None
    return StepResult(tokens, all_gains, queued_ns, forward_ns, failures, scores)


def _join_gains(gains: Mapping[int, Int32Array], num_sampled: Sequence[int]) -> Int32Array:
    """Returns the gains of all ranks, those that said none having gained 1 each."""
    joined = np.ones(sum(num_sampled), dtype=np.int32)
    ends = list(accumulate(num_sampled))
    for rank, gained in gains.items():
        joined[ends[rank] - len(gained) : ends[rank]] = gained
    return joined


def _read_failures(part: pb.RankResult, batch: RankBatch) -> list[RowFailure]:
    rank, rows = part.dp_rank, set(batch.rows.tolist())
    failures = [RowFailure(rank, failure.row, failure.problem) for failure in part.grammar_failures]
    if strange := {failure.row for failure in failures} - rows:
        problem = f"grammar_failures has row {min(strange)}, which the step does not run"
        raise WrongAnswer(rank, problem)
    return failures


def _refuse_times(queued_ns: Sequence[int], forward_ns: Sequence[int]) -> NoReturn:
    times = list(zip(queued_ns, forward_ns, strict=True))
    rank = times.index(max(times, key=max))
    queued, forward = times[rank]
    raise WrongAnswer(
        rank, f"queued_ns={queued} and forward_ns={forward}, below {1 << TIME_BITS} each"
    )


def _for_others(parts: Sequence[pb.RankResult], rank: int) -> WrongAnswer:
    answered = [part.dp_rank for part in parts[:MAX_NAMED]]
    return WrongAnswer(rank, f"it answered for the ranks {answered}, not for itself")


def _wrong_length(column: bytes, num_sampled: int, num_due: int, rank: int) -> WrongAnswer:
    given = "" if num_due == num_sampled else f", whose num_next_tokens add up to {num_due}"
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


def _check_gains(gains: bytes, plan: StepPlan, rank: int) -> Int32Array:
    """Returns how many tokens each sampling sequence of a rank gained."""
    num_sampled = plan.num_sampled[rank]
    if len(gains) != num_sampled * INT32_BYTES:
        raise WrongAnswer(
            rank,
            f"a column of {len(gains)} bytes of num_next_tokens for {num_sampled} sequences that "
            f"sample, which take {num_sampled * INT32_BYTES}",
        )
    gained = np.frombuffer(gains, INT32)
    limits = np.ones_like(gained)
    if plan.limits is not None:
        limits = plan.limits[slice(*plan.decodes.row_set.cuts[rank : rank + 2])]
    is_wrong = (gained < 1) | (gained > limits)
    if is_wrong.any():
        batch, place = plan.batch(rank), int(is_wrong.argmax())
        rows = batch.rows if batch.samples is None else batch.rows[batch.samples != 0]
        limit = limits[place]
        raise WrongAnswer(
            rank,
            f"num_next_tokens has {gained[place]} for row {rows[place]}, which gains "
            + (f"1 to {limit} in this step" if limit > 1 else "1 in this step"),
        )
    return gained


def _read_scores(part: pb.RankResult, scorings: Sequence[Scoring], vocab_size: int) -> Scores:
    """Returns the log probabilities that were asked for."""
    num_scores, num_top, num_given = 0, 0, 0
    for scoring in scorings:
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
    return Scores(
        np.frombuffer(part.logprobs, FLOAT32),
        top_ids,
        np.frombuffer(part.top_logprobs, FLOAT32),
        np.frombuffer(part.given_logprobs, FLOAT32),
    )
