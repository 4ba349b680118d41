"""What a client is told, as messages of serving.proto, from what the engine knows."""

from google.protobuf import duration_pb2

from protos.serving.v1 import serving_pb2
from protos.transport.errors import RpcError
from router.api.text.output_text import OutputText
from router.client.status import (
    GroupState,
    GroupStatus,
    RankStatus,
    SpeculationState,
    SpeculationStatus,
)
from router.requests.request import FinishReason, Sequence, TokenLogprob
from router.scheduling.model import ServedModel

_FINISH_REASONS = {
    FinishReason.STOP: serving_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: serving_pb2.FINISH_REASON_LENGTH,
}
_GROUP_STATES = {
    GroupState.FORMING: serving_pb2.GROUP_STATE_FORMING,
    GroupState.READY: serving_pb2.GROUP_STATE_READY,
}
_SPECULATION_STATES = {
    SpeculationState.DRAFTING: serving_pb2.SPECULATION_STATE_DRAFTING,
    SpeculationState.PAUSED: serving_pb2.SPECULATION_STATE_PAUSED,
    SpeculationState.OFF: serving_pb2.SPECULATION_STATE_OFF,
}


def take_response(sequence: Sequence) -> serving_pb2.GenerateResponse | None:
    """Returns what is new of a sequence, its finish included, or None if nothing is."""
    request, output = sequence.request, sequence.request.output
    is_finished = sequence.finish_reason is not None
    token_ids = sequence.take_tokens()
    if not (len(token_ids) or is_finished):
        return None
    response = serving_pb2.GenerateResponse(
        request_id=request.request_id, index=sequence.index, token_ids=token_ids.tolist()
    )
    if output.text:
        text = sequence.text
        assert isinstance(text, OutputText), "a request that wants text was given one"
        if not request.stop.has_stop_strings:  # else the engine has fed it
            text.feed(token_ids, may_stop=False)
        if sequence.is_ended:
            text.close()
        response.text = text.take()
    if output.logprobs:
        response.logprobs.extend(map(_logprob, sequence.logprobs))
        sequence.logprobs.clear()
    if output.prompt_logprobs and sequence.index == 0:
        response.prompt_logprobs.extend(map(_logprob, sequence.prompt_logprobs))
        sequence.prompt_logprobs.clear()
    if is_finished:
        response.finish.CopyFrom(_finish(sequence))
    return response


def tagged_error(tag: int, error: RpcError) -> serving_pb2.TaggedError:
    code, _ = error.code.value
    tagged = serving_pb2.TaggedError(
        tag=tag, code=code, reason=error.reason, message=str(error), field=error.field or ""
    )
    if error.retry_delay_s is not None:
        tagged.retry_delay.CopyFrom(_duration(error.retry_delay_s))
    return tagged


def model_response(model: ServedModel, *, has_tokenizer: bool) -> serving_pb2.GetModelResponse:
    return serving_pb2.GetModelResponse(
        name=model.name,
        architecture=model.architecture,
        fingerprint=model.fingerprint,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        has_tokenizer=has_tokenizer,
    )


def group_message(status: GroupStatus) -> serving_pb2.GroupStatus:
    age_s = status.last_step_age_s
    return serving_pb2.GroupStatus(
        group=status.group,
        state=_GROUP_STATES[status.state],
        problem=status.problem,
        epoch=status.epoch,
        step=status.step,
        last_step_age=None if age_s is None else _duration(age_s),
        num_waiting=status.num_waiting,
        num_waiting_tokens=status.num_waiting_tokens,
        ranks=[_rank_message(rank) for rank in status.ranks],
        graphs=[
            serving_pb2.GraphCount(
                runner=count.runner, size=count.size, miss=count.miss, num_steps=count.num_steps
            )
            for count in status.graphs
        ],
        speculation=None if status.speculation is None else _speculation(status.speculation),
    )


def _speculation(status: SpeculationStatus) -> serving_pb2.SpeculationStatus:
    return serving_pb2.SpeculationStatus(
        algorithm=status.algorithm,
        state=_SPECULATION_STATES[status.state],
        num_steps=status.num_steps,
        num_drafts=status.num_drafts,
        num_accepted_drafts=status.num_accepted_drafts,
        tokens_per_step=status.tokens_per_step,
    )


def _rank_message(rank: RankStatus) -> serving_pb2.RankStatus:
    return serving_pb2.RankStatus(
        dp_rank=rank.dp_rank,
        address=rank.address,
        num_running=rank.num_running,
        last_step_tokens=rank.last_step_tokens,
        total_tokens=rank.total_tokens,
        num_used_blocks=rank.num_used_blocks,
        num_cached_blocks=rank.num_cached_blocks,
        num_free_blocks=rank.num_free_blocks,
        prefix_hit_rate=rank.prefix_hit_rate,
        num_preemptions=rank.num_preemptions,
        last_step_time=_duration(rank.last_step_s) if rank.last_step_s else None,
    )


def _logprob(logprob: TokenLogprob) -> serving_pb2.TokenLogprob:
    return serving_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        top=[
            serving_pb2.TopLogprob(token_id=token_id, logprob=value)
            for token_id, value in zip(
                logprob.top_ids.tolist(), logprob.top_logprobs.tolist(), strict=True
            )
        ],
    )


def _finish(sequence: Sequence) -> serving_pb2.Finish:
    assert sequence.finish_reason is not None
    progress, arrival_time = sequence.progress, sequence.request.arrival_time

    def since_arrival(time: float | None) -> duration_pb2.Duration | None:
        return None if time is None else _duration(time - arrival_time)

    return serving_pb2.Finish(
        reason=_FINISH_REASONS[sequence.finish_reason],
        stop_token_id=sequence.stop_token_id,
        stop_string=sequence.stop_string,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=progress.num_cached_tokens,
        num_completion_tokens=sequence.num_output_tokens,
        num_preemptions=progress.num_preemptions,
        queue_time=since_arrival(progress.start_time),
        first_token_time=since_arrival(progress.first_token_time),
        total_time=since_arrival(progress.end_time),
        group=sequence.group,
        dp_rank=sequence.dp_rank,
        num_drafts=progress.num_drafts,
        num_accepted_drafts=progress.num_accepted_drafts,
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
