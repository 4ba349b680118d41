"""Gateway service: its answers, and how gateways end what they asked for."""

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from protos.serving.v1 import serving_pb2
from protos.transport.error_details import error_details
from protos.transport.interceptors import Caller
from router import config
from router.api import constraints, vllm_engine
from router.api.text import Tokenizer
from router.config import RouterConfig
from router.errors import QueueFull
from router.requests.request import FinishReason
from tests.repo.source import ROOT, imports_of, modules_of
from tests.router.support.calls import PROMPT, failure
from tests.router.support.fake_engines import MODEL, FakeEngines
from tests.router.support.requests import scored
from tests.router.support.statuses import FORMING, rank, ready
from tests.router.support.vllm_calls import answers, calling, connected, generate, generating

MESSAGE_FILES = {"vllm_engine.py", "vllm_kv_events.py", "vllm_messages.py"}


# ---- answers


async def test_a_stream_has_each_token_once_and_then_the_end():
    async with generating() as (engines, call, [sequence]):
        engines.give(sequence, [10, 11])
        first = (await call.read()).chunk
        sequence.progress.num_cached_tokens = 2
        sequence.progress.num_drafts, sequence.progress.num_accepted_drafts = 9, 4
        engines.give(sequence, [12])
        engines.finish(sequence)
        chunk, complete = await answers(call)

        assert (list(first.token_ids), list(chunk.token_ids)) == ([10, 11], [12])
        assert [(c.prompt_tokens, c.completion_tokens) for c in (first, chunk)] == [(3, 2), (3, 1)]
        assert not first.HasField("output_logprobs")
        assert complete.finish_reason == "length"
        assert not complete.output_ids
        assert (complete.prompt_tokens, complete.completion_tokens) == (3, 3)
        assert complete.cached_tokens == 2
        assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (9, 4)


async def test_without_a_stream_there_is_one_message_per_continuation():
    async with generating(stream=False, n=2) as (engines, call, [first, second]):
        for token_id in (10, 11, 12):
            engines.give(second, [token_id])
            engines.give(first, [token_id + 10])
        engines.finish(second)
        engines.give(first, [23])
        engines.finish(first, FinishReason.STOP)
        completes = await answers(call)

        assert [(c.index, list(c.output_ids), c.finish_reason) for c in completes] == [
            (1, [10, 11, 12], "length"),
            (0, [20, 21, 22, 23], "stop"),
        ]
        assert [c.completion_tokens for c in completes] == [3, 4]


async def test_a_stream_of_several_continuations_names_each():
    async with generating(n=2) as (engines, call, [first, second]):
        engines.give(second, [10])
        engines.finish(second)
        engines.give(first, [20])
        engines.finish(first)
        messages = [(type(m).__name__, m.index) for m in await answers(call)]

        for index in (0, 1):
            kinds = [kind for kind, of in messages if of == index]
            assert kinds == ["GenerateStreamChunk", "GenerateComplete"]


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_stand_beside_their_tokens(stream: bool):
    asked = {"stream": stream, "logprobs": 2, "prompt_logprobs": 1}
    async with generating(**asked) as (engines, call, [sequence]):
        assert sequence.request.output.top_logprobs == 2
        sequence.prompt_logprobs += [scored(6, 1, 2), scored(7, 3, 4)]
        sequence.logprobs.append(scored(10, 10, 11))
        engines.give(sequence, [10])
        received = [(await call.read()).chunk] if stream else []
        sequence.logprobs.append(scored(12, 12, 13))
        engines.give(sequence, [12])
        engines.finish(sequence)
        received += await answers(call)

        if stream:
            assert not received.pop().HasField("output_logprobs")  # all have been sent
        outputs = [message.output_logprobs for message in received]
        assert [token_id for output in outputs for token_id in output.token_ids] == [10, 12]
        assert [value for o in outputs for value in o.token_logprobs] == [-1.25, -1.5]
        tops = [top for output in outputs for top in output.top_logprobs]
        assert [list(top.token_ids) for top in tops] == [[10, 11], [12, 13]]
        assert [list(top.values) for top in tops] == [[-1, -2], [-1, -2]]
        [prompt] = [m.input_logprobs for m in received if m.HasField("input_logprobs")]
        assert list(prompt.token_ids) == PROMPT
        values = [
            entry.value if entry.HasField("value") else None for entry in prompt.token_logprobs
        ]
        assert values == [None, -0.75, -0.875]
        assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [1], [3]]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_of_one_token_has_its_token_beside_no_log_probability(stream: bool):
    message = generate(stream=stream, prompt_logprobs=1)
    message.tokenized.input_ids[:] = [5]
    engines = FakeEngines()
    async with connected(engines) as stub:
        call = stub.Generate(message)
        [sequence] = (await engines.arrivals.get()).sequences
        engines.give(sequence, [10])
        engines.finish(sequence)
        received = await answers(call)

    [prompt] = [m.input_logprobs for m in received if m.HasField("input_logprobs")]
    assert list(prompt.token_ids) == [5]
    assert [entry.HasField("value") for entry in prompt.token_logprobs] == [False]


async def test_log_probabilities_without_alternatives_have_none():
    async with generating(stream=False, logprobs=0) as (engines, call, [sequence]):
        sequence.logprobs.append(scored(10))
        engines.give(sequence, [10])
        engines.finish(sequence)
        [complete] = await answers(call)

        assert list(complete.output_logprobs.token_ids) == [10]
        assert not complete.output_logprobs.top_logprobs


async def test_what_stopped_it_is_told_but_for_the_models_own_end(tokenizer: Tokenizer):
    asked = {"n": 3, "stream": False, "stop": ["END"], "stop_token_ids": [9]}
    async with generating(tokenizer, **asked) as (engines, call, [by_string, by_token, by_eos]):
        engines.give(by_string, tokenizer.encode("no END"))
        for sequence, token_id in ((by_token, 9), (by_eos, 2)):
            sequence.stop_token_id = token_id
            engines.give(sequence, [token_id])
            engines.finish(sequence, FinishReason.STOP)
        first, second, third = sorted(await answers(call), key=lambda c: c.index)

        assert [c.finish_reason for c in (first, second, third)] == ["stop"] * 3
        assert first.matched_stop_str == "END"
        assert first.completion_tokens == len("no END")
        assert second.matched_token_id == 9
        assert third.WhichOneof("matched_stop") is None


# ---- two kinds of cancellation


async def test_abort_ends_the_request_and_its_stream_well():
    async with calling(n=2) as (engines, stub, call, [first, second]):
        engines.give(first, [10])
        await call.read()
        engines.finish(second)
        assert (await call.read()).complete.index == 1
        await stub.Abort(pb.AbortRequest(request_ids=["nobody", "mine"]))

        assert not first.request.is_live  # before anybody has read anything
        [complete] = await answers(call)
        assert (complete.index, complete.finish_reason) == (0, "abort")
        assert (complete.prompt_tokens, complete.completion_tokens) == (3, 1)
        assert await call.code() is grpc.StatusCode.OK


async def test_abort_ends_a_request_well_whose_grammar_is_being_built(
    monkeypatch: pytest.MonkeyPatch,
):
    begun = asyncio.Event()

    async def build(kind: str, text: str, caller: Caller) -> str:
        begun.set()
        await asyncio.Event().wait()  # for ever
        raise AssertionError

    monkeypatch.setattr(constraints._kept, "grammar_of", build)
    async with connected(FakeEngines()) as stub:
        call = stub.Generate(generate(regex="a+", n=2))
        reading = asyncio.ensure_future(answers(call))
        await begun.wait()
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))

        async with asyncio.timeout(30):
            assert [answer.finish_reason for answer in await reading] == ["abort"] * 2
        assert await call.code() is grpc.StatusCode.OK


async def test_a_text_has_its_number_of_tokens_in_each_answer_also_where_it_is_aborted(
    tokenizer: Tokenizer,
):
    message = pb.GenerateRequest(request_id="mine", text="hi there", stream=True)
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        call = stub.Generate(message)
        request = await engines.arrivals.get()
        engines.give(request.sequences[0], [10])
        chunk = (await call.read()).chunk
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        [complete] = await answers(call)

    assert chunk.prompt_tokens == complete.prompt_tokens == len(request.prompt)


async def test_abort_without_a_stream_returns_the_tokens_so_far():
    async with calling(stream=False) as (engines, stub, call, [mine]):
        other = stub.Generate(generate(request_id="other"))
        others = await engines.arrivals.get()
        engines.give(mine, [10, 11])
        while mine.num_taken < len(PROMPT) + 2:
            await stub.HealthCheck(pb.HealthCheckRequest())  # lets the server get at it
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        [complete] = await answers(call)

        assert (list(complete.output_ids), complete.finish_reason) == ([10, 11], "abort")
        assert others.is_live
        other.cancel()


async def test_abort_of_the_empty_id_ends_none_of_those_without_one(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(vllm_engine, "ABORT_GRACE_S", 0.0)
    async with calling(request_id="") as (engines, stub, call, [sequence]):
        await stub.Abort(pb.AbortRequest())
        await stub.Abort(pb.AbortRequest(request_ids=[""]))
        for _ in range(10):
            await stub.HealthCheck(pb.HealthCheckRequest())  # lets the server get at it
        assert sequence.request.is_live
        engines.give(sequence, [10])
        engines.finish(sequence)
        assert [answer.index for answer in await answers(call)] == [0, 0]


async def test_a_full_router_does_not_read_what_a_gateway_sends():
    engines = FakeEngines()
    engines.refusal = QueueFull("too much waits", retry_delay_s=1.0)
    async with connected(engines) as stub:
        error = await failure(stub.Generate(generate(regex="a+")))  # which is never taken
        assert error_details(error).reason == "QUEUE_FULL"
    assert engines.measures.refused["QUEUE_FULL"] == 1


async def test_a_client_that_does_not_read_cannot_keep_an_aborted_call(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(vllm_engine, "ABORT_GRACE_S", 0.05)
    async with calling() as (engines, stub, call, [sequence]):
        for _ in range(6):  # more than the connection takes that nobody reads from
            engines.give(sequence, [1 << 20] * (1 << 20))
            for _ in range(50):
                await stub.HealthCheck(pb.HealthCheckRequest())  # lets the server get at it
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))

        assert not engines.live
        await engines.idle()
        async with asyncio.timeout(30.0):
            error = await failure(call)  # once it reads on
        assert error_details(error).reason == "CANCELLED"


async def test_a_timeout_that_is_an_error_of_the_router_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch,
):
    async def fail(*_: Any, **__: Any) -> None:
        raise TimeoutError

    engines = FakeEngines()
    async with connected(engines) as stub:
        monkeypatch.setattr(vllm_engine.GenerationServicer, "run", fail)
        error = await failure(stub.Generate(generate()))
    assert error.code() is not grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reset_ends_the_request_without_abort(stream: bool):
    async with generating(stream=stream) as (engines, call, [sequence]):
        engines.give(sequence, [10])
        call.cancel()
        await engines.idle()
        assert not sequence.request.is_live


# ---- what gateways ask besides


async def test_health_is_what_the_router_says_of_itself():
    engines, is_ready = FakeEngines(), False
    async with connected(engines, is_ready=lambda: is_ready) as stub:
        engines.groups = [serving_pb2.GroupStatus(state=FORMING, problem="nobody is there")]
        answer = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "nobody is there")
        engines.groups = []
        answer = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "the router is shutting down")
        is_ready = True
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_the_model_is_described_once_it_is_known():
    engines = FakeEngines(model=None)
    async with connected(engines) as stub:
        error = await failure(stub.GetModelInfo(pb.GetModelInfoRequest()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        engines.model = MODEL
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())

        assert info.served_model_name == "tiny-moe"
        assert info.is_generation
        assert (info.max_context_length, info.max_req_input_len) == (100, 99)
        assert info.vocab_size == 1000
        assert list(info.architectures) == ["Qwen3MoeForCausalLM"]
        assert list(info.eos_token_ids) == [2]
        assert info.tokenizer_path == ""


GROUPS = [
    ready(
        rank(0, num_running=5, num_cached_blocks=10, num_free_blocks=60, prefix_hit_rate=0.5),
        rank(1, num_running=1, num_used_blocks=0, num_cached_blocks=0, prefix_hit_rate=0.0),
        num_waiting=3,
        num_waiting_tokens=1001,
        block_size=16,
        max_num_seqs=64,
    ),
    serving_pb2.GroupStatus(group=1, state=FORMING, num_waiting=2, num_waiting_tokens=40),
]


async def test_the_server_is_one_rank_to_gateways_since_it_balances_its_own():
    async with calling() as (engines, stub, call, _):
        engines.groups = GROUPS
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        call.cancel()

        assert (info.data_parallel_size, info.active_requests) == (1, 1)
        assert (info.max_num_seqs, info.block_size) == (128, 16)
        assert info.server_type == "lockstep"
        assert info.uptime_seconds > 0


async def test_loads_are_those_of_each_rank_and_what_waits_is_counted_once():
    engines = FakeEngines()
    engines.groups = GROUPS
    async with connected(engines) as stub:
        answer = await stub.GetLoads(pb.GetLoadsRequest())

        first, second, unformed = answer.loads
        assert (answer.version, answer.dp_rank_count) == ("1.2.3", 3)
        assert [load.dp_rank for load in answer.loads] == [0, 1, 2]
        assert [load.num_running_reqs for load in answer.loads] == [5, 1, 0]
        assert [load.num_waiting_reqs for load in answer.loads] == [2, 1, 2]
        assert [load.num_total_reqs for load in answer.loads] == [7, 2, 2]
        assert [load.num_waiting_uncached_tokens for load in answer.loads] == [250, 500, 40]
        assert (first.token_usage, second.token_usage) == (0.3, 0.0)
        assert (first.num_used_tokens, first.max_total_num_tokens) == (480, 1600)
        assert (first.cache_hit_rate, first.max_running_requests) == (0.5, 64)
        assert unformed.max_total_num_tokens == 0
        answer = await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
        assert [load.dp_rank for load in answer.loads] == [1]


async def test_the_tokenizer_comes_as_an_archive_in_chunks(tmp_path: Path):
    path = tmp_path / "other-name.json"
    path.write_bytes(np.random.default_rng(0).bytes(200_000))  # nothing that can be packed
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "..."}')
    (tmp_path / "model.safetensors").write_bytes(b"much")
    async with connected(FakeEngines(), tokenizer_file=path) as stub:
        for _ in range(2):
            chunks = [c async for c in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]

            archive = b"".join(chunk.data for chunk in chunks)
            assert len(chunks) == 4
            assert [bool(chunk.sha256) for chunk in chunks] == [False, False, False, True]
            assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
            with zipfile.ZipFile(io.BytesIO(archive)) as file:
                assert set(file.namelist()) == {"tokenizer.json", "tokenizer_config.json"}
                assert file.read("tokenizer.json") == path.read_bytes()


def test_equal_tokenizers_make_equal_archives(tmp_path: Path):
    archives = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
        archives.append(vllm_engine.zip_tokenizer(tmp_path / name / "tokenizer.json"))

    assert archives[0] == archives[1]


async def test_without_a_tokenizer_the_gateway_is_told_to_bring_one():
    async with connected(FakeEngines()) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="has no tokenizer") as caught:
            await stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("method", "request_type"),
    [("Embed", pb.EmbedRequest), ("StartProfile", common_pb2.StartProfileRequest)],
)
async def test_what_the_router_does_not_do_is_unimplemented(method: str, request_type: Any):
    async with connected(FakeEngines()) as stub:
        error = await failure(getattr(stub, method)(request_type()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert error_details(error).reason == "UNIMPLEMENTED"
        assert error.details() == f"this router does not have vllm.grpc.engine.VllmEngine/{method}"


# ---- without the package


def test_only_the_service_itself_needs_the_package():
    """So that a router starts without it; app.py imports the service where it is wanted."""
    for path in modules_of(ROOT / "router"):
        names = imports_of(path, in_functions=False)
        needs_it = any(name.startswith(("smg_grpc_proto", "router.vllm_")) for name in names)
        assert needs_it == (path.name in MESSAGE_FILES), path


def test_wanting_the_service_without_the_package_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    def settings(value: str) -> RouterConfig:
        return RouterConfig(groups=(("127.0.0.1:1",),), vllm_engine=value)

    settings("on")
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    settings("off")
    with pytest.raises(ValueError, match="pip install smg-grpc-proto"):
        settings("on")
