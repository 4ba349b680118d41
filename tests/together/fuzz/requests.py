"""Public requests as a hostile or broken client sends them, as the bytes of whole calls."""

import random
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from protos.serving.v1 import serving_pb2 as pb
from tests.together.fuzz.mutations import changed, damaged, filled, random_bytes

SERVICE = "/lockstep.serving.v1.GenerationService"
VLLM_SERVICE = "/vllm.grpc.engine.VllmEngine"
MEDIA = ("mm_inputs", "extra_mm_inputs", "media_refs")  # take long to fill, and nobody looks inside
IDS = ("", "same", "other", "i" * 128, "i" * 129, "\N{ROCKET}\n")  # so few that they meet


@dataclass(frozen=True, slots=True)
class Call:
    """One call. It closes its side after the messages, or leaves after the first answer."""

    method: str
    messages: tuple[bytes, ...]
    leaves_early: bool
    service: str = SERVICE


def right_request(rng: random.Random, vocab_size: int) -> pb.GenerateRequest:
    """Returns a request that can work, if no live one has its id."""
    request = pb.GenerateRequest(
        request_id=rng.choice(("", "", *IDS[:4])),
        sampling=pb.SamplingParams(
            temperature=rng.choice((0.0, 0.7)),
            top_p=rng.choice((0.9, 1.0)),
            top_k=rng.choice((0, 5)),
            logit_bias={rng.randrange(vocab_size): 1.0},
            seed=rng.getrandbits(64),
        ),
        stop=pb.StopConditions(max_tokens=rng.randint(1, 4), stop_token_ids=[1]),
        output=pb.OutputOptions(logprobs=rng.random() < 0.2, prompt_logprobs=rng.random() < 0.1),
        n=rng.choice((0, 1, 1, 2)),
        priority=rng.choice((0, -3, 100)),
    )
    if rng.random() < 0.5:
        request.token_ids.ids.extend(rng.randrange(vocab_size) for _ in range(rng.randint(1, 30)))
    else:
        request.text = rng.choice(("1+1=", "\n17+25=", "héé \N{ROCKET}"))
        request.stop.stop_strings.append("=")
    if rng.random() < 0.3:
        request.timeout.seconds = rng.choice((1, 5, 2**40))
    return request


def any_request(rng: random.Random, vocab_size: int) -> pb.GenerateRequest:
    """Returns a request that may be wrong, but is one."""
    kind = rng.random()
    if kind < 0.2:
        return right_request(rng, vocab_size)
    if kind < 0.4:
        return filled(rng, pb.GenerateRequest, rng.choice((0.2, 0.8)))
    request = changed(rng, right_request(rng, vocab_size))
    return changed(rng, request) if kind < 0.6 else request


def any_call(rng: random.Random, vocab_size: int) -> Call:
    """Returns a call of any method."""
    leaves_early = rng.random() < 0.1
    kind = rng.random()
    service = SERVICE
    if kind < 0.2:
        service = VLLM_SERVICE
        method, message = any_vllm_message(rng, vocab_size)
        messages = [message.SerializeToString()]
    elif kind < 0.65:
        messages = [any_request(rng, vocab_size).SerializeToString()]
        method = "Generate"
    elif kind < 0.85:
        method = "GenerateMany"
        messages = [
            _any_action(rng, vocab_size).SerializeToString() for _ in range(rng.randint(0, 4))
        ]
    elif kind < 0.95:
        method = "Cancel"
        messages = [pb.CancelRequest(request_id=rng.choice(IDS)).SerializeToString()]
    else:
        method = rng.choice(("GetModel", "GetStatus"))
        messages = [random_bytes(rng)]
    damage = rng.random()
    if damage < 0.25 and messages:
        at = rng.randrange(len(messages))
        messages[at] = damaged(rng, messages[at])
    elif damage < 0.35:
        messages = [random_bytes(rng)]
    elif damage < 0.37 and method != "GenerateMany":
        messages = []
    return Call(method, tuple(messages), leaves_early, service)


def any_vllm_message(rng: random.Random, vocab_size: int) -> tuple[str, Message]:
    """Returns a method of VllmEngine and what it gets from a gateway that may be wrong."""
    kind = rng.random()
    if kind < 0.1:
        return "Abort", vllm.AbortRequest(request_ids=rng.sample(IDS, rng.randint(0, 3)))
    if kind < 0.15:
        return "GetLoads", filled(rng, vllm.GetLoadsRequest)
    if kind < 0.2:
        method = rng.choice(("HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer"))
        return method, vllm.HealthCheckRequest()  # all of them are empty
    return "Generate", any_vllm_request(rng, vocab_size)


def any_vllm_request(rng: random.Random, vocab_size: int) -> Any:
    """Returns a request of VllmEngine that may be wrong, but is one."""
    kind = rng.random()
    if kind < 0.2:
        skipped = MEDIA if rng.random() < 0.9 else ()
        return filled(rng, vllm.GenerateRequest, rng.choice((0.2, 0.8)), skipped)
    request = vllm.GenerateRequest(
        request_id=rng.choice(("", "", *IDS[:4])),
        stream=rng.random() < 0.5,
        sampling_params=vllm.SamplingParams(
            temperature=rng.choice((0.0, 0.7)),
            max_tokens=rng.randint(1, 4),
            n=rng.choice((0, 1, 2)),
            stop_token_ids=[1],
            logprobs=rng.choice((None, 0, 2)),
            seed=rng.choice((None, -1, 7)),
        ),
    )
    if rng.random() < 0.7:
        ids = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        request.tokenized.input_ids.extend(ids)
    else:
        request.text = rng.choice(("1+1=", "\n17+25=", "héé \N{ROCKET}"))
    if kind < 0.4:
        return request
    if kind < 0.9:
        request.sampling_params.CopyFrom(changed(rng, request.sampling_params))
        return request
    return changed(rng, request)


def _any_action(rng: random.Random, vocab_size: int) -> pb.GenerateManyRequest:
    tag = rng.choice((0, 1, 1, 2, 2**32 - 1))
    if rng.random() < 0.2:
        return pb.GenerateManyRequest(tag=tag, cancel=pb.CancelTag())
    if rng.random() < 0.05:
        return filled(rng, pb.GenerateManyRequest)
    return pb.GenerateManyRequest(tag=tag, start=any_request(rng, vocab_size))
