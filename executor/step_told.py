"""What a step tells every executor alike: as bytes to compare, and as words for the error."""

from protos.executor.v1 import executor_pb2 as pb


def told_by(request: pb.StepRequest) -> bytes:
    """Returns what every executor must have been told, as bytes that are the same everywhere."""
    agreement = request.agreement.SerializeToString(deterministic=True)
    return b"%d %d " % (request.epoch, request.step_id) + agreement


def describe_told(request: pb.StepRequest) -> str:
    """Returns the same for people, who compare it with what another executor was told."""
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
