"""Messages of vllm.grpc.engine as our own, both ways.

A request becomes one of serving.proto, which read_request then checks like any other; what is
there but has no counterpart is refused by name, never left out. Answers are made from the
responses that a caller of our own API would get.
"""

from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from protos.executor.sampling_fields import SAMPLING_FIELDS
from protos.serving.v1 import serving_pb2
from protos.transport.errors import RpcError
from router.api.unknown_fields import refuse_unknown_fields
from router.errors import InvalidRequest
from router.scheduling.step import ServedModel

# The package brings no types that mypy can use.
Message = Any

# Fields that serving.proto has no word for, and what to do instead.
_UNSUPPORTED = {
    **dict.fromkeys(
        ("kv_transfer_params", "kv_transfer_params_json"), "prompts are not prefilled elsewhere"
    ),
    **dict.fromkeys(("mm_inputs", "extra_mm_inputs", "media_refs"), "the model takes text only"),
}
_UNSUPPORTED_SAMPLING = {
    "structural_tag": "output cannot be constrained in parts; send a grammar",
    "truncate_prompt_tokens": "prompts are never cut; send what is to be read",
}

# Where a field of serving.proto comes from; the longest beginning that fits counts.
_FIELD_NAMES = {
    "token_ids.ids": "tokenized.input_ids",
    "prompt": "input",
    "n": "sampling_params.n",
    "sampling": "sampling_params",
    "stop": "sampling_params",
    "stop.stop_strings": "sampling_params.stop",
    "constraint": "sampling_params",
    "constraint.choices.values": "sampling_params.choice",
    "output": "sampling_params",
    "output.top_logprobs": "sampling_params.logprobs",  # or prompt_logprobs; the larger counts
}

_FINISH_REASONS = {
    serving_pb2.FINISH_REASON_STOP: "stop",
    serving_pb2.FINISH_REASON_LENGTH: "length",
}
ABORTED = "abort"


def read_generate(request: Message) -> serving_pb2.GenerateRequest:
    """Returns the request as our own API would have got it, its values not checked yet.

    Raises:
        InvalidRequest: It asks for something that our API has no field for.
    """
    refuse_unknown_fields(request)
    params = request.sampling_params
    _refuse_unsupported(request)
    message = serving_pb2.GenerateRequest(
        request_id=request.request_id,
        sampling=_read_sampling(params),
        stop=serving_pb2.StopConditions(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            stop_strings=params.stop,
            ignore_eos=params.ignore_eos,
        ),
        output=serving_pb2.OutputOptions(
            logprobs=params.HasField("logprobs"),
            prompt_logprobs=params.HasField("prompt_logprobs"),
            top_logprobs=max(_num_top(params, "logprobs"), _num_top(params, "prompt_logprobs")),
            # The gateway makes the text; these say what stop strings are looked for in.
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        ),
        n=params.n,
        constraint=_read_constraint(params),
    )
    match request.WhichOneof("input"):
        case "tokenized":
            message.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            message.text = request.text
    return message


def use_field_names(error: RpcError) -> None:
    """Makes an error of our own API name the field that the caller of this one filled in."""
    beginnings = [name for name in _FIELD_NAMES if error.field and _begins(error.field, name)]
    if error.field and beginnings:
        ours = max(beginnings, key=len)
        theirs = _FIELD_NAMES[ours] + error.field.removeprefix(ours)
        problem = str(error).removeprefix(f"{error.field}: ")
        error.field, error.args = theirs, (f"{theirs}: {problem}",)


class Answers:
    """Turns the responses to one request into this service's messages.

    Args:
        request: What they answer. If it wants a stream, tokens go out as they come; else all
            tokens of a continuation in one message.
    """

    def __init__(self, request: Message) -> None:
        params = request.sampling_params
        self._prompt_ids = request.tokenized.input_ids
        self._num_prompt_tokens = len(self._prompt_ids)  # of a text: when its output begins
        self._is_streamed: bool = request.stream
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._num_top = _num_top(params, "logprobs")
        self._scores_prompt: bool = params.HasField("prompt_logprobs")  # and has not yet
        self._num_prompt_top = _num_top(params, "prompt_logprobs")
        self._n: int = params.n or 1
        self._ends: dict[int, Message] = {}
        self._sent: set[int] = set()

    def add(self, response: serving_pb2.GenerateResponse) -> list[Message]:
        """Returns what to send now, in order."""
        if response.HasField("begin"):
            self._num_prompt_tokens = response.begin.num_prompt_tokens
        complete = self._end(response.index)
        complete.completion_tokens += len(response.token_ids)
        answers = []
        if not self._is_streamed:
            complete.output_ids.extend(response.token_ids)
            self._add_logprobs(complete, response)
        elif response.token_ids:
            chunk = pb.GenerateStreamChunk(
                index=response.index,
                token_ids=response.token_ids,
                prompt_tokens=complete.prompt_tokens,
                completion_tokens=len(response.token_ids),  # of this chunk, as vLLM counts them
            )
            self._add_logprobs(chunk, response)
            answers.append(pb.GenerateResponse(chunk=chunk))
        if response.HasField("finish"):
            self._sent.add(response.index)
            self._finish(complete, response.finish)
            answers.append(pb.GenerateResponse(complete=complete))
        return answers

    def abort(self) -> list[Message]:
        """Returns the ends of all continuations that have none yet."""
        ends = [self._end(index) for index in range(self._n) if index not in self._sent]
        for complete in ends:
            complete.finish_reason = ABORTED
        return [pb.GenerateResponse(complete=complete) for complete in ends]

    def _end(self, index: int) -> Message:
        """Returns the last message of a continuation, as far as it is known."""
        if index not in self._ends:
            self._ends[index] = pb.GenerateComplete(
                index=index, prompt_tokens=self._num_prompt_tokens
            )
        return self._ends[index]

    def _finish(self, complete: Message, finish: serving_pb2.Finish) -> None:
        complete.finish_reason = _FINISH_REASONS[finish.reason]
        complete.prompt_tokens = finish.num_prompt_tokens
        complete.cached_tokens = finish.num_cached_tokens
        complete.spec_draft_tokens = finish.num_drafts
        complete.spec_accepted_tokens = finish.num_accepted_drafts
        if finish.HasField("stop_string"):
            complete.matched_stop_str = finish.stop_string
        elif finish.HasField("stop_token_id") and finish.stop_token_id in self._stop_token_ids:
            complete.matched_token_id = finish.stop_token_id  # the model's own are not told

    def _add_logprobs(self, answer: Message, response: serving_pb2.GenerateResponse) -> None:
        for entry in response.logprobs:
            answer.output_logprobs.token_logprobs.append(entry.logprob)
            answer.output_logprobs.token_ids.append(entry.token_id)
            _add_top(answer.output_logprobs, entry, self._num_top)
        if self._scores_prompt and response.index == 0:  # they come with its first tokens
            self._scores_prompt = False
            _add_prompt_logprobs(
                answer.input_logprobs,
                self._prompt_ids[0],
                list(response.prompt_logprobs),
                self._num_prompt_top,
            )


def model_info(model: ServedModel) -> Message:
    return pb.GetModelInfoResponse(
        # No path: a gateway on another machine would look for it there. It has --model-path, or
        # asks for the tokenizer.
        model_path=model.name,
        served_model_name=model.name,
        is_generation=True,
        max_context_length=model.max_model_len,
        max_req_input_len=model.max_prompt_tokens,
        vocab_size=model.vocab_size,
        architectures=[model.architecture],
        eos_token_ids=model.eos_token_ids,
    )


def server_info(groups: list[serving_pb2.GroupStatus], num_live: int, uptime_s: float) -> Message:
    return pb.GetServerInfoResponse(
        active_requests=num_live,
        uptime_seconds=uptime_s,
        server_type="lockstep",
        data_parallel_size=1,  # which rank a request runs on is the router's to say
        max_num_seqs=sum(group.max_num_seqs * len(group.ranks) for group in groups),
        block_size=max((group.block_size for group in groups), default=0),
    )


def loads(groups: list[serving_pb2.GroupStatus]) -> list[Message]:
    """Returns the load of every DP rank, numbered on from group to group.

    What waits in a group waits for any of its ranks, so each is given an equal share. A group
    that has not formed counts as one rank that runs nothing.
    """
    entries: list[Message] = []
    for group in groups:
        ranks = group.ranks or [serving_pb2.RankStatus()]
        for index, rank in enumerate(ranks):
            num_waiting = _share(group.num_waiting, index, len(ranks))
            num_waiting_tokens = _share(group.num_waiting_tokens, index, len(ranks))
            num_blocks = rank.num_used_blocks + rank.num_cached_blocks + rank.num_free_blocks
            usage = rank.num_used_blocks / max(1, num_blocks)
            load = pb.SchedulerLoad(
                dp_rank=len(entries),
                num_running_reqs=rank.num_running,
                num_waiting_reqs=num_waiting,
                num_total_reqs=rank.num_running + num_waiting,
                num_used_tokens=rank.num_used_blocks * group.block_size,
                max_total_num_tokens=num_blocks * group.block_size,
                token_usage=usage,
                utilization=usage,
                cache_hit_rate=rank.prefix_hit_rate,
                max_running_requests=group.max_num_seqs if group.ranks else 0,
                # Before a rank is chosen, the best guess: as much is cached of them as of others.
                num_waiting_uncached_tokens=round(num_waiting_tokens * (1 - rank.prefix_hit_rate)),
            )
            entries.append(load)
    return entries


def _share(count: int, index: int, num_shares: int) -> int:
    each, left = divmod(count, num_shares)
    return each + (index < left)


def _refuse_unsupported(request: Message) -> None:
    params = request.sampling_params
    for prefix, message, reasons in (
        ("", request, _UNSUPPORTED),
        ("sampling_params.", params, _UNSUPPORTED_SAMPLING),
    ):
        for field, _ in message.ListFields():
            if field.name in reasons:
                problem = f"this router does not support it: {reasons[field.name]}"
                raise InvalidRequest(prefix + field.name, problem)
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise InvalidRequest(
            "data_parallel_rank",
            f"{request.data_parallel_rank} is not 0: this router says which rank runs a request; "
            f"leave it out",
            value=request.data_parallel_rank,
            limit=0,
        )
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name) and getattr(params, name) < 0:
            raise InvalidRequest(
                f"sampling_params.{name}",
                f"{getattr(params, name)} is below 0; say how many alternatives, or 0 for none",
                value=getattr(params, name),
                limit=0,
            )
    if params.HasField("prompt_logprobs") and request.WhichOneof("input") != "tokenized":
        raise InvalidRequest(
            "sampling_params.prompt_logprobs", "they need the prompt's token ids; send tokenized"
        )


def _read_sampling(params: Message) -> serving_pb2.SamplingParams:
    """Numbers that cannot be absent mean by 0 what vLLM takes it for: their default."""
    if negative := [token_id for token_id in params.logit_bias if token_id < 0]:
        raise InvalidRequest(
            f"sampling_params.logit_bias[{negative[0]}]",
            f"{negative[0]} is no token",
            value=negative[0],
            limit=0,
        )
    known = params.DESCRIPTOR.fields_by_name
    numbers: dict[str, Any] = {
        field.name: getattr(params, field.name) or field.default
        for field in SAMPLING_FIELDS
        if field.name in known
    }
    numbers["temperature"] = params.temperature if params.HasField("temperature") else 1.0
    sampling = serving_pb2.SamplingParams(**numbers, logit_bias=dict(params.logit_bias))
    if params.HasField("seed") and params.seed != -1:  # -1 is none, as in vLLM
        sampling.seed = params.seed % (1 << 64)
    return sampling


def _read_constraint(params: Message) -> serving_pb2.Constraint | None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            return serving_pb2.Constraint(json_schema=params.json_schema)
        case "regex":
            return serving_pb2.Constraint(regex=params.regex)
        case "grammar":
            return serving_pb2.Constraint(grammar=params.grammar)
        case "json_object" if params.json_object:
            return serving_pb2.Constraint(json_object=serving_pb2.JsonObject())
        case "choice":
            choices = serving_pb2.Choices(values=params.choice.choices)
            return serving_pb2.Constraint(choices=choices)
    return None


def _num_top(params: Message, name: str) -> int:
    return getattr(params, name) if params.HasField(name) else 0


def _begins(path: str, name: str) -> bool:
    """Whether ``name`` is the field itself or one that it lies in."""
    return path == name or path.startswith((f"{name}.", f"{name}["))


def _add_prompt_logprobs(
    answer: Message, first_id: int, entries: list[serving_pb2.TokenLogprob], num_top: int
) -> None:
    """The first token of a prompt has none."""
    answer.token_ids.append(first_id)
    answer.token_logprobs.add()
    if num_top:
        answer.top_logprobs.add()
    for entry in entries:
        answer.token_ids.append(entry.token_id)
        answer.token_logprobs.add(value=entry.logprob)
        _add_top(answer, entry, num_top)


def _add_top(answer: Message, entry: serving_pb2.TokenLogprob, num_top: int) -> None:
    if num_top:
        answer.top_logprobs.add(
            token_ids=[top.token_id for top in entry.top[:num_top]],
            values=[top.logprob for top in entry.top[:num_top]],
        )
