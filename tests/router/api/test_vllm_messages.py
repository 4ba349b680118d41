"""Gateway messages: each field of a request on its own."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from protos.transport.error_details import error_details
from router.api import vllm_messages
from router.api.constraints import build_grammar
from router.api.text import Tokenizer
from router.api.vllm_messages import read_generate
from router.errors import QueueFull
from router.requests.callers import CallerSettings
from router.requests.request import OutputOptions, Request, SamplingParams, StopConditions
from tests.repo.source import ROOT
from tests.router.support.calls import PROMPT, SAMPLING, failure
from tests.router.support.fake_engines import MODEL, FakeEngines
from tests.router.support.vllm_calls import connected, generate

OBJECT, EBNF = '{"type": "object"}', 'root ::= "a" root | "b"'


async def arrived(message: Any, tokenizer: Tokenizer | None = None) -> Request:
    """Returns what becomes of a request, and cancels it."""
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        call = stub.Generate(message)
        request = await engines.arrivals.get()
        call.cancel()
    return request


async def test_what_a_gateway_leaves_out_is_what_vllm_takes_for_it():
    request = await arrived(generate())

    assert request.request_id == "mine"
    assert request.prompt.tolist() == PROMPT
    assert len(request.sequences) == 1
    assert request.sampling == SamplingParams({"temperature": 1}, seed=request.sampling.seed)
    assert request.stop == StopConditions(
        max_tokens=MODEL.max_model_len - len(PROMPT), stop_token_ids=MODEL.eos_token_ids
    )
    assert request.output == OutputOptions()


@pytest.mark.parametrize(
    ("params", "read", "value"),
    [
        (SAMPLING, lambda r: r.sampling.values, SAMPLING),
        ({"temperature": 0.0}, lambda r: r.sampling["temperature"], 0),
        ({"logit_bias": {9: 2.0}}, lambda r: r.sampling.logit_bias, ((9, 2.0),)),
        ({"seed": 0}, lambda r: r.sampling.seed, 0),
        ({"seed": 41}, lambda r: r.sampling.seed, 41),
        ({"seed": -2}, lambda r: r.sampling.seed, 2**64 - 2),
        ({"max_tokens": 11}, lambda r: r.stop.max_tokens, 11),
        ({"min_tokens": 3}, lambda r: r.stop.min_tokens, 3),
        ({"stop_token_ids": [8, 9]}, lambda r: r.stop.stop_token_ids, (8, 9, 2)),
        ({"ignore_eos": True}, lambda r: r.stop.stop_token_ids, ()),
        ({"stop": ["END"]}, lambda r: r.stop.has_stop_strings, True),
        ({"n": 3}, lambda r: len(r.sequences), 3),
        ({"logprobs": 0}, lambda r: (r.output.logprobs, r.output.top_logprobs), (True, 0)),
        ({"logprobs": 4}, lambda r: (r.output.logprobs, r.output.top_logprobs), (True, 4)),
        ({"prompt_logprobs": 0}, lambda r: r.output.prompt_logprobs, True),
        ({"json_schema": "{}"}, lambda r: r.grammar, build_grammar("json_schema", "{}")),
        ({"json_object": True}, lambda r: r.grammar, build_grammar("json_schema", OBJECT)),
        ({"json_object": False}, lambda r: r.grammar, ""),
        ({"regex": "a+"}, lambda r: r.grammar, build_grammar("regex", "a+")),
        ({"grammar": EBNF}, lambda r: r.grammar, build_grammar("grammar", EBNF)),
        (
            {"choice": pb.ChoiceConstraint(choices=["a", "b"])},
            lambda r: r.grammar,
            build_grammar("choices", '["a", "b"]'),
        ),
        # Of text, which the gateway makes.
        ({"skip_special_tokens": True}, lambda r: r.output.text, False),
        ({"include_stop_str_in_output": True}, lambda r: r.output.text, False),
    ],
)
async def test_each_field_arrives(
    params: dict[str, Any], read: Callable[[Request], Any], value: Any, tokenizer: Tokenizer
):
    assert read(await arrived(generate(**params), tokenizer)) == value


@pytest.mark.parametrize("is_set", [False, True])
def test_what_says_where_stop_strings_are_looked_for_is_passed_on(is_set: bool):
    message = generate(skip_special_tokens=is_set, include_stop_str_in_output=is_set)
    output = read_generate(message).output
    assert (output.skip_special_tokens, output.include_stop) == (is_set, is_set)


def test_no_field_is_left_out_without_a_word():
    """Of the package's release that is installed; one that is read, refused, or named in the README."""
    source = Path(vllm_messages.__file__).read_text()
    told = (ROOT / "router" / "README.md").read_text()
    names = [f.name for m in (pb.GenerateRequest, pb.SamplingParams) for f in m.DESCRIPTOR.fields]
    read = {name for name in names if name in SAMPLING or re.search(rf"\b{name}\b", source)}
    assert {name for name in names if name not in read and f"`{name}`" not in told} == set()


async def test_a_constraint_of_a_gateway_holds_from_the_first_token_set_or_not():
    for is_set in (False, True):
        request = await arrived(generate(regex="a+", grammar_from_first_token=is_set))
        assert (request.grammar, request.grammar_after) == (build_grammar("regex", "a+"), ())


async def test_without_a_seed_each_request_gets_one_of_its_own():
    seeds = {(await arrived(generate(**params))).sampling.seed for params in ({}, {"seed": -1})}

    assert len(seeds) == 2
    assert 2**64 - 1 not in seeds


async def test_a_text_prompt_is_encoded_here(tokenizer: Tokenizer):
    request = await arrived(pb.GenerateRequest(text="hi"), tokenizer)

    assert request.prompt.tolist() == tokenizer.encode("hi").tolist()
    assert request.request_id


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(kv_transfer_params=pb.KvTransferParams()),
        pb.GenerateRequest(kv_transfer_params_json="{}"),
        pb.GenerateRequest(mm_inputs=pb.MultimodalInputs()),
        pb.GenerateRequest(extra_mm_inputs=[pb.MultimodalInputs()]),
        pb.GenerateRequest(media_refs=pb.MediaRefs()),
        pb.GenerateRequest(data_parallel_rank=1),
        pb.GenerateRequest(data_parallel_rank=-1),
        pb.SamplingParams(structural_tag="{}"),
        pb.SamplingParams(truncate_prompt_tokens=5),
        pb.SamplingParams(logit_bias={-3: 1.0}),
        pb.SamplingParams(logprobs=-1),
        pb.SamplingParams(prompt_logprobs=-1),
        # What our own API refuses too, under their names.
        pb.SamplingParams(temperature=-1),
        pb.SamplingParams(top_p=1.5),
        pb.SamplingParams(min_p=float("nan")),
        pb.SamplingParams(logit_bias={1000: 1.0}),
        pb.SamplingParams(max_tokens=0),
        pb.SamplingParams(stop_token_ids=[8, 1000]),
        pb.SamplingParams(stop=["END"]),  # there is no tokenizer
        pb.SamplingParams(n=65),
        pb.SamplingParams(n=2**32 - 1),
        pb.SamplingParams(logprobs=21),
        pb.SamplingParams(json_schema="[]"),
        pb.SamplingParams(regex="(a"),
        pb.SamplingParams(grammar="root ::= nothing"),
        pb.SamplingParams(choice=pb.ChoiceConstraint()),
    ],
    ids=lambda message: str(message).replace("\n", " ").strip(),
)
async def test_what_cannot_be_done_is_refused_by_name(message: Any):
    [(given, _)] = message.ListFields()
    name = given.name
    if isinstance(message, pb.SamplingParams):
        name = f"sampling_params.{name}"
        message = pb.GenerateRequest(sampling_params=message)
    message.tokenized.input_ids.extend(PROMPT)
    engines = FakeEngines()
    async with connected(engines) as stub:
        error = await failure(stub.Generate(message))

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = error_details(error)
        assert details.reason == "INVALID_REQUEST"
        assert details.field.partition("[")[0] == name
        assert error.details().startswith(f"{details.field}: ")
        assert engines.arrivals.empty()


def tokens(*token_ids: int, **fields: Any) -> Any:
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=token_ids), **fields)


SCORED = pb.SamplingParams(prompt_logprobs=0)


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (pb.GenerateRequest(), "INVALID_REQUEST", "input"),
        (pb.GenerateRequest(text="hi"), "INVALID_REQUEST", "text"),  # there is no tokenizer
        (
            pb.GenerateRequest(text="hi", sampling_params=SCORED),
            "INVALID_REQUEST",
            "sampling_params.prompt_logprobs",
        ),
        (tokens(1, 1000), "INVALID_REQUEST", "tokenized.input_ids[1]"),
        (tokens(*[1] * 100), "PROMPT_TOO_LONG", "tokenized.input_ids"),
        (tokens(1, request_id="x" * 129), "INVALID_REQUEST", "request_id"),
        (
            tokens(*[1] * 50, sampling_params=SCORED),
            "INVALID_REQUEST",
            "sampling_params.prompt_logprobs",
        ),
    ],
)
async def test_a_prompt_that_cannot_be_run_is_refused(message: Any, reason: str, field: str):
    async with connected(FakeEngines(), settings=CallerSettings(max_request_outputs=40)) as stub:
        error = await failure(stub.Generate(message))

        details = error_details(error)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (details.reason, details.field) == (reason, field)


async def test_rank_0_is_the_only_one_that_a_gateway_knows_of():
    message = generate()
    message.data_parallel_rank = 0

    assert (await arrived(message)).prompt.tolist() == PROMPT


async def test_a_full_queue_and_a_repeated_id_are_answered_as_in_our_own_api():
    engines = FakeEngines()
    async with connected(engines) as stub:
        first = stub.Generate(generate())
        await engines.arrivals.get()
        error = await failure(stub.Generate(generate()))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert error_details(error).request_id == "mine"
        engines.refusal = QueueFull("too much waits", retry_delay_s=2.0)
        error = await failure(stub.Generate(generate(request_id="other")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_details(error).retry_delay_s == 2.0
        first.cancel()
