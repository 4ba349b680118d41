"""StepPlan to StepRequests, StepResponse to RankResult. Columns as executor.proto lays them out."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from protos.executor.v1 import executor_pb2 as pb
from router.errors import ExecutorLost
from router.request import Request
from router.step import (
    Agreement,
    DpPaddingMode,
    ForwardMode,
    RankBatch,
    RankResult,
    RowStart,
    StepPlan,
)

FORWARD_MODES = {
    ForwardMode.IDLE: pb.FORWARD_MODE_IDLE,
    ForwardMode.DECODE: pb.FORWARD_MODE_DECODE,
    ForwardMode.EXTEND: pb.FORWARD_MODE_EXTEND,
}
PADDING_MODES = {
    DpPaddingMode.MAX_LEN: pb.DP_PADDING_MODE_MAX_LEN,
    DpPaddingMode.SUM_LEN: pb.DP_PADDING_MODE_SUM_LEN,
}


def encode_step(plan: StepPlan, epoch: int, step_id: int) -> list[pb.StepRequest]:
    """Returns each DP rank's request."""
    agreement = _encode_agreement(plan.agreement)
    return [
        pb.StepRequest(
            epoch=epoch, step_id=step_id, agreement=agreement, ranks=[_encode_batch(rank, batch)]
        )
        for rank, batch in enumerate(plan.batches)
    ]


def _encode_agreement(agreement: Agreement) -> pb.StepAgreement:
    return pb.StepAgreement(
        global_num_tokens=agreement.global_num_tokens,
        global_num_tokens_for_logprob=agreement.global_num_tokens_for_logprob,
        has_extend=agreement.has_extend,
        padding_mode=PADDING_MODES[agreement.padding_mode],
        graph_size=agreement.graph_size,
    )


def _encode_batch(rank: int, batch: RankBatch) -> pb.RankStep:
    if batch.mode is ForwardMode.IDLE:
        return pb.RankStep(dp_rank=rank, forward_mode=pb.FORWARD_MODE_IDLE)
    sequences = pb.SequenceColumns(
        rows=batch.rows.tobytes(),
        num_computed_tokens=batch.num_computed_tokens.tobytes(),
        token_ids=batch.token_ids.tobytes(),
    )
    if batch.num_tokens is not None:
        sequences.num_tokens = batch.num_tokens.tobytes()
    if batch.num_new_blocks is not None and batch.new_block_ids is not None:
        sequences.num_new_blocks = batch.num_new_blocks.tobytes()
        sequences.new_block_ids = batch.new_block_ids.tobytes()
    if batch.samples is not None:
        sequences.samples = batch.samples.tobytes()
    if batch.num_scored is not None and batch.scored_ids is not None:
        sequences.num_scored = batch.num_scored.tobytes()
        sequences.scored_ids = batch.scored_ids.tobytes()
    return pb.RankStep(
        dp_rank=rank,
        forward_mode=FORWARD_MODES[batch.mode],
        starts=encode_starts(batch.starts) if batch.starts else None,
        sequences=sequences,
    )


def encode_starts(starts: Sequence[RowStart]) -> pb.RowStarts:
    """Returns the columns of the rows that begin; columns of nothing but defaults stay empty."""
    requests = [start.sequence.request for start in starts]
    sampling = [request.sampling for request in requests]
    prompts = [r.prompt if r.sampling.repetition_penalty != 1.0 else () for r in requests]
    outputs = [_penalised_output(start) for start in starts]
    suppressed = [_suppressed_ids(request) for request in requests]

    def floats(get: Callable[[int], float], default: float) -> bytes:
        values = [get(i) for i in range(len(starts))]
        return _column(values, np.float32, default)

    return pb.RowStarts(
        rows=_bytes([start.row for start in starts], np.int32),
        temperature=floats(lambda i: sampling[i].temperature, 0.0),
        top_k=_column([s.top_k for s in sampling], np.int32, 0),
        top_p=floats(lambda i: sampling[i].top_p, 1.0),
        min_p=floats(lambda i: sampling[i].min_p, 0.0),
        repetition_penalty=floats(lambda i: sampling[i].repetition_penalty, 1.0),
        presence_penalty=floats(lambda i: sampling[i].presence_penalty, 0.0),
        frequency_penalty=floats(lambda i: sampling[i].frequency_penalty, 0.0),
        seed=_column([start.sequence.seed for start in starts], np.uint64, 0),
        scores_output=_column([r.output.logprobs for r in requests], np.uint8, 0),
        num_top_logprobs=_column([r.output.top_logprobs for r in requests], np.int32, 0),
        suppressed_until=_column([_suppressed_until(r) for r in requests], np.int32, 0),
        num_suppressed_ids=_column([len(ids) for ids in suppressed], np.int32, 0),
        suppressed_ids=_bytes(_flat(suppressed), np.int32),
        num_biases=_column([len(s.logit_bias) for s in sampling], np.int32, 0),
        bias_ids=_bytes([token_id for s in sampling for token_id, _ in s.logit_bias], np.int32),
        biases=_bytes([bias for s in sampling for _, bias in s.logit_bias], np.float32),
        num_prompt_ids=_column([len(ids) for ids in prompts], np.int32, 0),
        prompt_ids=_bytes(_flat(prompts), np.int32),
        num_output_ids=_column([len(ids) for ids in outputs], np.int32, 0),
        output_ids=_bytes(_flat(outputs), np.int32),
    )


def _penalised_output(start: RowStart) -> Sequence[int]:
    sequence = start.sequence
    if not sequence.request.sampling.has_output_penalty:
        return ()
    output: list[int] = sequence.tokens[sequence.num_prompt_tokens : sequence.num_tokens].tolist()
    return output


def _suppressed_until(request: Request) -> int:
    return len(request.prompt) + request.stop.min_tokens if request.stop.min_tokens else 0


def _suppressed_ids(request: Request) -> tuple[int, ...]:
    return request.stop.stop_token_ids if request.stop.min_tokens else ()


def _flat(parts: Iterable[Iterable[int]]) -> list[int]:
    return [value for part in parts for value in part]


def _column(values: Sequence[float], dtype: npt.DTypeLike, default: float) -> bytes:
    return b"" if all(value == default for value in values) else _bytes(values, dtype)


def _bytes(values: Sequence[float], dtype: npt.DTypeLike) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def decode_result(response: pb.StepResponse, batch: RankBatch, rank: int) -> RankResult:
    """Returns what a DP rank answered for its batch.

    Raises:
        ExecutorLost: It answered for another rank, or with too many or too few tokens.
    """
    if len(response.ranks) != 1 or response.ranks[0].dp_rank != rank:
        answered = [part.dp_rank for part in response.ranks]
        raise ExecutorLost(f"DP rank {rank} answered for the ranks {answered}, not for itself")
    part = response.ranks[0]
    result = RankResult(
        np.frombuffer(part.next_token_ids, dtype="<i4"),
        np.frombuffer(part.logprobs, dtype="<f4"),
        np.frombuffer(part.top_ids, dtype="<i4"),
        np.frombuffer(part.top_logprobs, dtype="<f4"),
        response.queued_ns,
        response.forward_ns,
    )
    num_sampled = len(batch.rows) if batch.samples is None else int(batch.samples.sum())
    if len(result.next_token_ids) != num_sampled:
        raise ExecutorLost(
            f"DP rank {rank} answered {len(result.next_token_ids)} tokens for {num_sampled} "
            f"sequences that sample"
        )
    if batch.scorings:
        _check_scores(result, batch, rank)
    return result


def _check_scores(result: RankResult, batch: RankBatch, rank: int) -> None:
    num_scores, num_top = 0, 0
    for scoring in batch.scorings:
        count = len(scoring.scored_ids) + (scoring.sample_index is not None)
        num_scores += count
        num_top += count * scoring.sequence.request.output.top_logprobs
    given = (len(result.logprobs), len(result.top_ids), len(result.top_logprobs))
    if given != (num_scores, num_top, num_top):
        raise ExecutorLost(
            f"DP rank {rank} answered {given} log probabilities, top ids and top log "
            f"probabilities; {(num_scores, num_top, num_top)} were asked for"
        )
