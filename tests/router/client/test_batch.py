"""Batch runner: each line is answered once, whatever comes between."""

import asyncio
import json
import resource
import signal
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protos.serving.v1 import serving_pb2 as pb
from router.client import Client, Completion, Finish, TokenLogprob
from router.client import batch as batch_module
from router.client.batch import Batch, BatchOutput, BatchRefused, main
from router.client.batch_lines import (
    CHAT,
    COMPLETIONS,
    LineRefused,
    answer_line,
    error_line,
    read_request,
)
from router.client.messages import Collector, to_request
from router.client.resume import Attempts, Resumption
from router.errors import QueueFull
from tests.router.support.fake_engines import FakeEngines, byte_tokenizer, serve


def line_of(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Paths of the input and the output; nothing waits long before it tries again."""
    monkeypatch.setattr(batch_module, "RETRY_S", 0.01)
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


FINISH = Finish(
    reason="stop",
    stop_token_id=None,
    stop_string=None,
    num_prompt_tokens=3,
    num_cached_tokens=1,
    num_completion_tokens=1,
    num_preemptions=0,
    queue_s=0.0,
    first_token_s=0.0,
    total_s=0.0,
    group=0,
    dp_rank=0,
)
COMPLETION = Completion(
    request_id="r",
    index=0,
    token_ids=[5],
    text="",
    logprobs=[],
    prompt_logprobs=[],
    finish=FINISH,
    first_token_s=0.0,
    total_s=0.0,
)


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Output lines by custom id, of which each is there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


@asynccontextmanager
async def batch_of(
    engines: FakeEngines, files: tuple[Path, Path], **settings: Any
) -> AsyncIterator[Batch]:
    source, target = files
    tokenizer = byte_tokenizer(source.parent)
    defaults = {"window": 4, "priority": -100, "patience_s": 60.0}
    async with serve(engines, tokenizer) as address:
        yield Batch(Client(address), source, target, **{**defaults, **settings})


async def run(engines: FakeEngines, files: tuple[Path, Path], **settings: Any) -> str:
    """Runs a batch and returns its last line of progress."""
    async with batch_of(engines, files, **settings) as batch:
        await batch.run()
    return batch.progress(1.0)


@pytest.fixture
def echoing() -> FakeEngines:
    engines = FakeEngines()
    engines.echoes = True
    return engines


def test_a_body_becomes_a_request_with_the_defaults_of_openai():
    body = {
        "model": "tiny-moe",
        "prompt": [1, 2],
        "stop": "end",
        "logit_bias": {"7": -1.5},
        "logprobs": 2,
        "seed": None,
        "min_tokens": 3,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    }
    request = read_request(line_of("a", **body), -7)
    assert to_request(request.prompt, request.options) == pb.GenerateRequest(
        model="tiny-moe",
        token_ids=pb.TokenIds(ids=[1, 2]),
        priority=-7,
        sampling=pb.SamplingParams(temperature=1, logit_bias={7: -1.5}),
        stop=pb.StopConditions(max_tokens=16, min_tokens=3, stop_strings=["end"]),
        constraint=pb.Constraint(json_schema='{"type": "object"}'),
        output=pb.OutputOptions(text=True, logprobs=True, top_logprobs=2),
    )


def test_what_only_this_api_has_is_passed_on_too():
    body = {"regex": "a+", "after_reasoning": True, "bad_words": ["b"], "bad_token_ids": [[7, 8]]}
    request = read_request(line_of("a", prompt="b", allowed_token_ids=[5], **body), 0)
    asked = to_request(request.prompt, request.options)
    assert asked.constraint == pb.Constraint(regex="a+", after_reasoning=True)
    assert asked.vocabulary == pb.Vocabulary(
        allowed_token_ids=[5], bad_words=["b"], bad_token_ids=[pb.TokenIds(ids=[7, 8])]
    )


def test_two_constraints_are_refused_instead_of_one_lost():
    line = line_of("a", prompt="b", response_format={"type": "json_object"}, regex="a+")
    with pytest.raises(LineRefused, match=r"^body: .*regex and json_object: an output has one"):
        read_request(line, 0)


def test_a_chat_becomes_a_request_as_long_as_it_may_be():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    body = {
        "messages": [
            {"role": "user", "content": "a?"},
            {"role": "assistant", "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "max_completion_tokens": None,
        "logprobs": True,
        "top_logprobs": 3,
    }
    request = read_request(line_of("a", CHAT, **body), 0)
    messages = [
        pb.ChatMessage(role="user", content="a?"),
        pb.ChatMessage(
            role="assistant", tool_calls=[pb.ToolCall(id="1", name="add", arguments='{"a": 1}')]
        ),
    ]
    assert to_request(request.prompt, request.options) == pb.GenerateRequest(
        chat=pb.Chat(
            messages=messages,
            tools=['{"type": "function", "function": {"name": "add"}}'],
            template_arguments='{"enable_thinking": false}',
        ),
        sampling=pb.SamplingParams(temperature=1),
        output=pb.OutputOptions(text=True, logprobs=True, top_logprobs=3),
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "function_call": {}}]}, "messages"),
        ({"messages": [{"role": "user", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [], "tools": {}}, "tools"),
        ({"messages": [], "tool_choice": "auto"}, "tool_choice"),
        ({"messages": [], "continue_final_message": 1}, "continue_final_message"),
        ({"messages": [], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [], "logprobs": 2}, "logprobs"),
        ({"messages": [], "max_completion_tokens": "all"}, "max_completion_tokens"),
        ({"messages": [], "prompt": "a"}, "prompt"),
    ],
)
def test_a_chat_that_cannot_be_asked_is_refused_by_its_field(body: dict[str, Any], field: str):
    with pytest.raises(LineRefused) as refused:
        read_request(line_of("a", CHAT, **body), 0)
    assert refused.value.field == f"body.{field}"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"url": "/v1/embeddings"}, "url"),
        ({"url": ["/v1/completions"]}, "url"),
        ({"method": "GET"}, "method"),
        ({"priority": 3}, "priority"),
        ({"body": []}, "body"),
        ({"best_of": 2}, "body.best_of"),
        ({"stream": True}, "body.stream"),
        ({"prompt": ["a", "b"]}, "body.prompt"),
        ({"prompt": [-1]}, "body.prompt"),
        ({"prompt": None}, "body.prompt"),
        ({"temperature": "hot"}, "body.temperature"),
        ({"n": -1}, "body.n"),
        ({"stop": 5}, "body.stop"),
        ({"stop_token_ids": "12"}, "body.stop_token_ids"),
        ({"choices": "yes"}, "body.choices"),
        ({"bad_words": "yes"}, "body.bad_words"),
        ({"bad_token_ids": [7]}, "body.bad_token_ids"),
        ({"logit_bias": {"the": 1}}, "body.logit_bias"),
        ({"logit_bias": [1]}, "body.logit_bias"),
        ({"logprobs": "all"}, "body.logprobs"),
        ({"prompt": "\ud800"}, "body.prompt"),
        ({"response_format": {"type": "xml"}}, "body.response_format"),
        ({"response_format": {"type": "json_object", "more": 1}}, "body.response_format"),
    ],
)
def test_a_line_that_cannot_be_asked_is_refused_by_its_field(changes: dict[str, Any], field: str):
    line = line_of("a", prompt="b")
    (line["body"] if field.startswith("body.") else line).update(changes)
    with pytest.raises(LineRefused, match=f"^{field}: ") as refused:
        read_request(line, 0)
    assert refused.value.field == field


def test_a_line_that_is_nested_too_deeply_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):
        schema = {"not": schema}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with pytest.raises(LineRefused, match=r"^body: it is nested too deeply"):
        read_request(line_of("a", prompt="b", response_format=form), 0)


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_log_probabilities_stand_where_openai_has_them(url: str):
    entries = [TokenLogprob(5, -0.5, ((5, -0.5), (7, -1.5)))]
    completion = replace(COMPLETION, text="five", logprobs=entries)
    line = answer_line(line_of("a", url), "tiny-moe", [completion])
    [choice] = line["response"]["body"]["choices"]
    if url == COMPLETIONS:
        assert choice["text"] == "five"
        assert choice["logprobs"] == {
            "tokens": ["token_id:5"],
            "token_logprobs": [-0.5],
            "top_logprobs": [{"token_id:5": -0.5, "token_id:7": -1.5}],
        }
        return
    assert choice["message"] == {"role": "assistant", "content": "five", "refusal": None}
    [entry] = choice["logprobs"]["content"]
    assert (entry["token"], entry["logprob"]) == ("token_id:5", -0.5)
    likeliest = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
    assert likeliest == {"token_id:5": -0.5, "token_id:7": -1.5}


async def test_each_line_is_answered_by_a_response_or_an_error(
    echoing: FakeEngines, files: tuple[Path, Path]
):
    lines = [line_of(f"line {n}", prompt=f"text {n}", n=2, seed=n) for n in range(20)]
    lines.append(line_of("unknown", prompt="a", colour="red"))
    lines.append(line_of("other model", prompt="a", model="other"))
    lines.append(line_of("too long", prompt="a" * 200))
    lines.append(line_of("far too long", prompt="a" * (2 << 20)))
    write(files[0], lines)
    progress = await run(echoing, files)

    outputs = read(files[1])
    assert len(outputs) == 24
    assert progress == f"[{'#' * 30}] 24 of 24 lines, 4 with an error, 24.0/s, 0 s left"
    for n in range(20):
        response = outputs[f"line {n}"]["response"]
        assert outputs[f"line {n}"]["error"] is None
        assert response["status_code"] == 200
        assert response["body"]["model"] == "tiny-moe"
        assert [choice["text"] for choice in response["body"]["choices"]] == [f"text {n}"] * 2
        tokens = len(f"text {n}")
        usage = response["body"]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens, 2 * tokens)
    errors = {name: line["error"] for name, line in outputs.items() if line["response"] is None}
    assert {name: error["code"] for name, error in errors.items()} == {
        "unknown": "INVALID_REQUEST",
        "other model": "MODEL_NOT_FOUND",
        "too long": "PROMPT_TOO_LONG",
        "far too long": "RESOURCE_EXHAUSTED",
    }
    assert errors["unknown"]["param"] == "body.colour"
    requests = [echoing.arrivals.get_nowait() for _ in range(echoing.arrivals.qsize())]
    assert {request.priority for request in requests} == {-100}


def test_a_number_of_continuations_takes_no_memory_before_a_router_has_taken_it():
    """One line of a batch with a wrong `n` would end it all."""
    tracemalloc.start()
    try:
        Collector(100_000)
        Attempts(pb.GenerateRequest(n=100_000), None, Resumption(1.0))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


async def test_a_second_run_goes_on_where_the_first_was_cut(
    echoing: FakeEngines, files: tuple[Path, Path]
):
    source, target = files
    write(source, [line_of(str(n), prompt=[n + 10]) for n in range(10)])
    await run(echoing, files)
    whole = read(target)
    *kept, cut = target.read_text().splitlines(keepends=True)[:7]
    target.write_text("".join(kept) + cut[:40])
    echoing.arrivals = asyncio.Queue()
    progress = await run(echoing, files)

    assert target.read_text().startswith("".join(kept))
    assert read(target).keys() == whole.keys()
    assert echoing.arrivals.qsize() == 4
    assert "10 of 10 lines, 0 with an error, 4.0/s" in progress


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half_before_the_next_one(tmp_path: Path):
    target = tmp_path / "out.jsonl"
    output = BatchOutput(target, {hash("a"), hash("b")})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            output.write(error_line("a", "CANCELLED", "it was cancelled", ""))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    output.write(error_line("b", "CANCELLED", "it was cancelled", ""))
    output.close()
    assert read(target).keys() == {"b"}


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ('{"custom_id": "a"}\n\n{"custom_id": "a"}', "", "in.jsonl, line 3: custom_id 'a' is an"),
        ('{"custom_id": "a"}\n{"custom_id"', "", "in.jsonl, line 2: no JSON"),
        ('{"custom_id": 5}', "", "in.jsonl, line 1: no object with a custom_id of text"),
        ('{"custom_id": "a"}', '{"custom_id": "b", "error": null}\n', "out.jsonl, line 1: it ans"),
        ('{"custom_id": "a"}', '{"custom_id": "a"}\n', "out.jsonl, line 1: it answers no line"),
        ('{"custom_id": "a"}', "of another program", "out.jsonl, line 1: it answers no line"),
        ("[" * 100_000, "", "in.jsonl, line 1: no JSON"),
    ],
)
def test_files_that_are_no_batch_are_refused_before_anything_is_sent(
    files: tuple[Path, Path], source: str, target: str, problem: str
):
    files[0].write_text(source)
    files[1].write_text(target)
    with pytest.raises(BatchRefused, match=problem):
        Batch(Client("unix:nobody"), *files, window=1, priority=0, patience_s=0)
    assert files[1].read_text() == target


async def test_two_runs_do_not_write_one_file(echoing: FakeEngines, files: tuple[Path, Path]):
    write(files[0], [line_of("a", prompt="a")])
    async with batch_of(echoing, files) as batch:
        with pytest.raises(BatchRefused, match="another run writes it"):
            Batch(Client("unix:nobody"), *files, window=1, priority=0, patience_s=0)
        await batch.run()


async def test_a_batch_waits_while_the_queue_is_full(
    echoing: FakeEngines, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    write(files[0], [line_of(str(n), prompt="a") for n in range(8)])
    num_refused = 0

    def check_room(**_: bool) -> None:
        nonlocal num_refused
        if num_refused < 20:
            num_refused += 1
            error = QueueFull("full")
            error.retry_delay_s = 0.001
            raise error

    monkeypatch.setattr(echoing, "check_room", check_room)
    await run(echoing, files, patience_s=0)
    assert len(read(files[1])) == 8
    assert num_refused == 20


async def test_a_batch_survives_its_router(echoing: FakeEngines, files: tuple[Path, Path]):
    """The first router breaks the stream amid the batch; another takes its place."""
    source, target = files
    write(source, [line_of(str(n), prompt=[5]) for n in range(8)])
    first, tokenizer = FakeEngines(), byte_tokenizer(source.parent)
    async with serve(first, tokenizer) as address:
        batch = Batch(
            Client(f"ipv4:{address}"), source, target, window=4, priority=0, patience_s=60
        )
        running = asyncio.create_task(batch.run())
        for _ in range(3):
            first_request = await first.arrivals.get()
        first.finish(first_request.sequences[0])
        while not target.stat().st_size:
            await asyncio.sleep(0)
        first.cancel_all()
        first.echoes = True
        await running
    assert len(read(target)) == 8


@pytest.mark.parametrize(
    ("answered", "problem", "code"),
    [
        ("null", "", 0),
        ('{"code": "CANCELLED"}', "", 1),
        ("[", "no JSON", 2),
        (None, "stopped: ", 3),
    ],
)
def test_the_exit_code_says_how_a_batch_ended(
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answered: str | None,
    problem: str,
    code: int,
):
    """What is answered needs no router."""
    source, target = files
    write(source, [line_of("a", prompt="b")])
    if answered is not None:
        target.write_text(f'{{"custom_id": "a", "error": {answered}}}\n')
    arguments = ["batch", str(source), str(target), "--router", "unix:nobody", "--patience-s", "0"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own stays
    assert main() == code
    said = capsys.readouterr().err
    assert problem in said
    assert code == 2 or f"{int(code < 2)} of 1 lines, {int(code == 1)} with an error" in said
