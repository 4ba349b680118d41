"""If these fail, a schema that cannot be enforced is found out by executors, or never."""

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from protos.serving.v1 import serving_pb2 as pb
from router.api import constraints, grammar_worker
from router.api.constraints import MAX_CONSTRAINT_BYTES, NUM_KEPT, _Kept, build_grammar
from router.api.messages import read_request
from router.api.text import Tokenizer
from router.errors import InvalidRequest
from router.requests.request import Listeners, Request
from tests.router.support.calls import prompt
from tests.router.support.fake_engines import MODEL, byte_tokenizer

KINDS = {
    "json_schema": {"json_schema": '{"type": "object"}'},
    "json_object": {"json_object": pb.JsonObject()},
    "regex": {"regex": "[ab]+"},
    "grammar": {"grammar": 'start: "a" | "b"'},
    "gbnf": {"grammar": 'root ::= "a" | "b" root'},
    "choices": {"choices": pb.Choices(values=["a", 'b"\n\\'])},
}


async def read(
    given: dict[str, Any], model: Any = MODEL, tokenizer: Tokenizer | None = None, **fields: Any
) -> Request:
    return await read_request(
        prompt(constraint=pb.Constraint(**given), **fields),
        model=model,
        tokenizer=tokenizer,
        listener=Listeners(max_listeners=1).open(),
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_becomes_a_grammar_that_executors_can_read(kind: str):
    grammar = (await read(KINDS[kind])).grammar

    assert grammar
    assert build_grammar("grammar", grammar) if not grammar.startswith("{") else True
    assert (await read(KINDS[kind])).grammar is grammar  # it was kept


async def test_rules_that_go_on_in_one_another_take_no_router_down():
    """Reading them recurs as deep as there are rules."""
    names = [f"r{number}" for number in range(5000)]
    rules = [f"{rule}:{following}" for rule, following in pairwise(names)]
    text = "\n".join(["start:r0", *rules, f'{names[-1]}:"a"'])
    assert (await read({"grammar": text})).grammar


async def test_a_request_without_a_constraint_has_no_grammar():
    listener = Listeners(max_listeners=1).open()
    assert not (
        await read_request(prompt(), model=MODEL, tokenizer=None, listener=listener)
    ).grammar


def nested(part: Any) -> str:
    """A schema whose part at #/properties/a~1b/items/anyOf/1 is given."""
    items = {"anyOf": [{"type": "string"}, part]}
    return json.dumps({"properties": {"c": {}, "a/b": {"type": "array", "items": items}}})


def many_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {} for number in range(count)}}


PLACE = "#/properties/a~1b/items/anyOf/1"
BAD: list[tuple[dict[str, Any], str, str]] = [
    # what is sent, the field at fault, a part of the message
    ({}, "constraint", "one of its kinds"),
    ({"json_schema": "{"}, "constraint.json_schema", "cannot be read"),
    ({"json_schema": "[1]"}, "constraint.json_schema", "a schema is an object"),
    ({"json_schema": '{"a":' * 5000 + "1" + "}" * 5000}, "constraint.json_schema", "recursion"),
    ({"json_schema": nested({"type": "strin"})}, "constraint.json_schema", f"at {PLACE}: Invalid"),
    ({"json_schema": nested({"minimum": "x"})}, "constraint.json_schema", f"at {PLACE}: Expected"),
    ({"json_schema": nested({"uniqueItems": True})}, "constraint.json_schema", f"at {PLACE}: Unim"),
    ({"json_schema": '{"$ref": "http://x/y"}'}, "constraint.json_schema", "at #: "),
    (
        {"json_schema": '{"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}'},
        "constraint.json_schema",
        "at #/$defs/a: Unimplemented",
    ),
    ({"regex": "(a"}, "constraint.regex", "unclosed group"),
    ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "constraint.regex", "65537 bytes are too many"),
    ({"regex": "é" * (MAX_CONSTRAINT_BYTES // 2 + 1)}, "constraint.regex", "65538 bytes are too"),
    ({"json_schema": '{"multipleOf": 999983}'}, "constraint.json_schema", "multipleOf is 999983"),
    (
        {"json_schema": nested({"anyOf": [{"multipleOf": 0.6001}, {"multipleOf": 5e3}]})},
        "constraint.json_schema",
        "may sum to 10000",
    ),
    (
        {"grammar": r'start: %json {"\u006dultipleOf": 4000000007}'},
        "constraint.grammar",
        "multipleOf is 4000000007",
    ),
    (
        {"json_schema": json.dumps(many_properties(600))},
        "constraint.json_schema",
        "Current row has",
    ),
    ({"regex": "abc((d{100}){100}){100}"}, "constraint.regex", "too many expressions"),
    ({"grammar": "start: nothing"}, "constraint.grammar", "unknown name"),
    ({"grammar": "(" * 9999}, "constraint.grammar", "cannot be read"),
    ({"grammar": "\n" * 65_000}, "constraint.grammar", "No 'root' rule"),  # in a moment
    ({"choices": pb.Choices()}, "constraint.choices.values", "0 are not from 1"),
    ({"choices": pb.Choices(values=["a", ""])}, "constraint.choices.values[1]", "empty"),
]


@pytest.mark.parametrize(("given", "field", "problem"), BAD, ids=lambda x: str(x)[:40])
async def test_what_cannot_be_enforced_is_refused_with_its_place(
    given: dict[str, Any], field: str, problem: str
):
    with pytest.raises(InvalidRequest) as caught:
        await read(given)

    assert caught.value.field == field
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("given", "value", "limit"),
    [
        ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "65537", "65536"),
        ({"choices": pb.Choices()}, "0", "1"),
        ({"choices": pb.Choices(values=["a"] * 1025)}, "1025", "1024"),
        ({"regex": "a", "after_token_ids": [5] * 17}, "17", "16"),
    ],
    ids=lambda x: str(x)[:40],
)
async def test_a_program_reads_value_and_limit(given: dict[str, Any], value: str, limit: str):
    with pytest.raises(InvalidRequest) as caught:
        await read(given)

    assert caught.value.metadata == {"value": value, "limit": limit}


async def test_a_constraint_may_begin_behind_tokens_of_the_request_or_the_models(tmp_path: Path):
    harmony = byte_tokenizer(tmp_path, special=["<|channel|>", "<|message|>"]).reasoning_end
    assert (len(harmony), harmony[0], harmony[-1]) == (7, 256, 257)
    tokenizer = byte_tokenizer(tmp_path, added=["</think>"])
    for given, expected in (
        ({}, ()),
        ({"after_token_ids": [7, 8]}, (7, 8)),
        ({"after_reasoning": True}, (256,)),
    ):
        request = await read(KINDS["regex"] | given, tokenizer=tokenizer)
        assert request.grammar_after == expected


AFTER: list[tuple[dict[str, Any], str, str]] = [
    ({"after_token_ids": [1] * 17}, "constraint.after_token_ids", "17 are too many"),
    ({"after_token_ids": [MODEL.vocab_size]}, "constraint.after_token_ids", "none of the model's"),
    ({"after_reasoning": True}, "constraint.after_reasoning", "send after_token_ids"),
    ({"after_reasoning": True, "after_token_ids": [1]}, "constraint.after_reasoning", "leave one"),
]


@pytest.mark.parametrize(("given", "field", "problem"), AFTER, ids=lambda x: str(x)[:40])
async def test_a_beginning_that_cannot_be_is_refused(
    given: dict[str, Any], field: str, problem: str
):
    with pytest.raises(InvalidRequest, match=problem) as caught:
        await read(KINDS["regex"] | given)
    assert caught.value.field == field


async def test_a_constraint_needs_executors_that_know_it_and_an_end():
    with pytest.raises(InvalidRequest, match="cannot be constrained"):
        await read(KINDS["regex"], replace(MODEL, supports_constraints=False))
    with pytest.raises(InvalidRequest) as caught:
        await read(KINDS["regex"], stop=pb.StopConditions(ignore_eos=True))
    assert caught.value.field == "stop.ignore_eos"


def test_a_grammar_that_takes_long_to_build_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_worker, "MAX_BUILD_S", 0.0)
    with pytest.raises(InvalidRequest, match=r"s to build; 0 s is the most; send a simpler"):
        build_grammar("regex", "slow")


async def test_what_takes_for_ever_or_ends_the_process_that_builds_harms_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
):
    """No limit of llguidance's is for patterns that must hold together: these take minutes, of 1 KB."""
    patterns = [{"pattern": f"(a|b)*a(a|b){{{count}}}"} for count in range(8, 28)]
    endless = json.dumps({"type": "string", "allOf": patterns})
    for _ in range(2):  # at once, the second time
        with pytest.raises(InvalidRequest, match=r"takes more than 0.5 s to build; send a simpler"):
            await read({"json_schema": endless})
    monkeypatch.setattr(constraints, "STUCK_S", 3.0)
    for text in ("built before", "built after", "built once more"):
        assert (await read({"regex": text})).grammar == build_grammar("regex", text)
        process = constraints._kept.worker._process
        assert process is not None
        process.send_signal(signal.SIGSTOP if text == "built after" else signal.SIGKILL)


def test_a_process_that_was_started_before_the_first_grammar_builds_it():
    kept = _Kept()
    try:
        kept.warm_up()
        kept.warm_up()
        kept._thread.submit(lambda: None).result()  # behind them
        process = kept.worker._process
        assert process is not None
        assert kept.worker.build("regex", "a") == (build_grammar("regex", "a"), "")
        assert kept.worker._process is process
    finally:
        kept.worker.end()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_Kept, list[str], Event]]:
    """What keeps grammars, those that it began to build, and what lets the builds go on."""
    begun: list[str] = []
    kept, may_go_on = _Kept(), Event()

    def build(kind: str, text: str) -> tuple[str, str]:
        begun.append(text)
        may_go_on.wait()
        if text == "fails" and begun.count(text) == 1:
            raise OSError("no process")
        return text, ""

    monkeypatch.setattr(kept.worker, "build", build)
    yield kept, begun, may_go_on
    may_go_on.set()
    kept._thread.shutdown()


async def ask(kept: _Kept, *texts: str) -> list[asyncio.Task[str]]:
    asking = [asyncio.create_task(kept.grammar_of("regex", text)) for text in texts]
    await asyncio.sleep(0)
    return asking


async def test_requests_with_the_same_new_constraint_wait_for_one_build(
    slow: tuple[_Kept, list[str], Event],
):
    kept, begun, may_go_on = slow
    left, *staying = await ask(kept, *["a"] * 16)
    left.cancel()
    await asyncio.wait([left])
    may_go_on.set()
    assert await asyncio.gather(*staying) == ["a"] * 15
    assert await kept.grammar_of("regex", "a") == "a"
    assert (begun, kept._builds) == (["a"], {})


async def test_a_build_that_fails_does_so_for_all_who_wait_and_for_nobody_after_them(
    slow: tuple[_Kept, list[str], Event],
):
    kept, begun, may_go_on = slow
    asking = await ask(kept, "fails", "fails")
    may_go_on.set()
    for failed in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(failed, OSError)
    assert await kept.grammar_of("regex", "fails") == "fails"
    assert (begun, kept._builds) == (["fails", "fails"], {})


async def test_a_grammar_that_nobody_waits_for_any_more_is_not_built(
    slow: tuple[_Kept, list[str], Event],
):
    kept, begun, may_go_on = slow
    [before] = await ask(kept, "a")
    leaving = await ask(kept, "b", "b")
    for each in leaving:
        each.cancel()
    await asyncio.wait(leaving)
    may_go_on.set()
    assert await before == "a"
    assert await kept.grammar_of("regex", "c") == "c"
    assert begun == ["a", "c"]


async def test_a_callers_flood_of_constraints_delays_anothers_by_one_of_them(
    slow: tuple[_Kept, list[str], Event],
):
    kept, begun, may_go_on = slow
    flood = await ask(kept, *"abcdefgh")
    other = asyncio.create_task(kept.grammar_of("regex", "other", ("another",)))
    await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(other, *flood)
    assert begun.index("other") <= 2


async def test_one_constraint_of_many_callers_is_built_once(
    slow: tuple[_Kept, list[str], Event],
):
    kept, begun, may_go_on = slow
    asked = [asyncio.create_task(kept.grammar_of("regex", "a", (str(i),))) for i in range(8)]
    await asyncio.sleep(0)
    may_go_on.set()
    assert len(set(await asyncio.gather(*asked))) == 1
    assert begun == ["a"]


async def test_only_so_many_grammars_are_kept(monkeypatch: pytest.MonkeyPatch):
    built: list[str] = []
    kept = _Kept()
    monkeypatch.setattr(kept.worker, "build", lambda kind, text: (built.append(text) or text, ""))
    for text in ["often", *map(str, range(NUM_KEPT - 1)), "often", "one more", "often", "0"]:
        await kept.grammar_of("regex", text)

    assert built == ["often", *map(str, range(NUM_KEPT - 1)), "one more", "0"]
