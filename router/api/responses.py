"""Responses of serving.proto, from what the engine knows of sequences and errors."""

from google.protobuf.duration_pb2 import Duration

from protos.serving.v1 import serving_pb2
from protos.transport.errors import RpcError
from router.api.text import OutputText
from router.engine.status import duration
from router.requests.request import FinishReason, Sequence, TokenLogprob
from router.scheduling.step import ServedModel

_FINISH_REASONS = {
    FinishReason.STOP: serving_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: serving_pb2.FINISH_REASON_LENGTH,
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
        tagged.retry_delay.CopyFrom(duration(error.retry_delay_s))
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

    def since_arrival(time: float | None) -> Duration | None:
        return None if time is None else duration(time - arrival_time)

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
