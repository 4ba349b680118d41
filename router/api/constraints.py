"""Constraints of requests: schemas, expressions, grammars and choices, checked and made one grammar."""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from hashlib import blake2b
from time import perf_counter, thread_time
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from protos.executor.grammars import (
    LIMITS,
    MAX_BUILD_S,
    MAX_GRAMMAR_BYTES,
    MAX_MULTIPLES,
    new_grammar_thread,
)
from protos.serving.v1 import serving_pb2
from router.api.text import Tokenizer
from router.errors import InvalidRequest
from router.scheduling.step import ServedModel

MAX_CONSTRAINT_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_AFTER = 16  # tokens behind which it begins
NUM_KEPT = 256  # constraints whose grammar is kept, since most services send few
LOOK_S = 0.2  # at parts of a schema, for the one at fault

NUM_TRIED = 4  # tokens of an output for which masks are tried
# What a line of Lark's begins with, and none of GBNF's. llguidance's own expression for it goes on over
# lines, in a time that grows with the square of an empty text's, and lets no other thread run.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)')

# Keywords of a JSON schema under which there are schemas: one or a list of them, or by name.
_NESTED = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not",
           "if", "then", "else", "contains", "propertyNames")  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")
_NAMED = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")


class _Kept:
    """Grammars of the constraints that came last, by their digest, or what is wrong with them."""

    def __init__(self) -> None:
        self._built: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None  # once there is a constraint

    async def grammar_of(self, kind: str, text: str) -> str:
        """Returns the grammar of a constraint, built in a thread if it is not known.

        Raises:
            InvalidRequest: There is none.
        """
        key = blake2b(f"{kind}:{text}".encode(), digest_size=16).digest()
        if key not in self._built:
            self._thread = self._thread or new_grammar_thread()
            loop = asyncio.get_running_loop()
            self._built[key] = await loop.run_in_executor(self._thread, try_build, kind, text)
            if len(self._built) > NUM_KEPT:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        return _checked(kind, *self._built[key])


_kept = _Kept()


async def read_constraint(message: serving_pb2.GenerateRequest, model: ServedModel) -> str:
    """Returns the grammar that a request's outputs keep to, as executors get it; empty: none.

    Raises:
        InvalidRequest: The constraint is none, or nothing here can enforce it.
    """
    if not message.HasField("constraint"):
        return ""
    constraint = message.constraint
    match constraint.WhichOneof("kind"):
        case None:
            raise InvalidRequest("constraint", "there is none; set one of its kinds")
        case "json_object":
            kind, text = "json_schema", '{"type": "object"}'
        case "choices":
            kind, text = "choices", _dumps(_read_choices(constraint.choices.values))
        case kind:
            text = getattr(constraint, kind)
    if (size := len(text.encode())) > MAX_CONSTRAINT_BYTES:
        problem = f"{size} bytes are too many; send at most {MAX_CONSTRAINT_BYTES}"
        raise InvalidRequest(f"constraint.{kind}", problem, value=size, limit=MAX_CONSTRAINT_BYTES)
    if not model.supports_constraints:
        raise InvalidRequest(
            "constraint",
            "the model is served without a tokenizer.json that fits it, or has no end-of-sequence "
            "token: its outputs cannot be constrained; leave it out",
        )
    if message.stop.ignore_eos:
        raise InvalidRequest(
            "stop.ignore_eos",
            "an output with a constraint ends with the end-of-sequence token; leave one of them out",
        )
    return await _kept.grammar_of(kind, text)


def read_after(
    constraint: serving_pb2.Constraint, model: ServedModel, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Returns the tokens behind which a constraint begins; none: it does at once.

    Raises:
        InvalidRequest: They are too many, none of the model's, or not known.
    """
    ids, field = tuple(constraint.after_token_ids), "constraint.after_token_ids"
    if len(ids) > MAX_AFTER:
        problem = f"{len(ids)} are too many; send at most {MAX_AFTER}"
        raise InvalidRequest(field, problem, value=len(ids), limit=MAX_AFTER)
    if (most := max(ids, default=0)) >= model.vocab_size:
        problem = f"{most} is none of the model's tokens, 0 to {model.vocab_size - 1}"
        raise InvalidRequest(field, problem, value=most, limit=model.vocab_size - 1)
    if not constraint.after_reasoning:
        return ids
    if ids:
        raise InvalidRequest("constraint.after_reasoning", f"{field} is set, too; leave one out")
    if tokenizer is None or not tokenizer.reasoning_end:
        problem = "the router knows no tokens that end the model's reasoning; send after_token_ids"
        raise InvalidRequest("constraint.after_reasoning", problem)
    return tokenizer.reasoning_end


def build_grammar(kind: str, text: str) -> str:
    """Returns the grammar of a constraint, in llguidance's JSON.

    Args:
        kind: Field of Constraint.
        text: What it holds; of choices, as JSON.

    Raises:
        InvalidRequest: There is none. It names the field, and within a schema the place.
    """
    return _checked(kind, *try_build(kind, text))


def _checked(kind: str, grammar: str, problem: str) -> str:
    if problem:
        raise InvalidRequest(f"constraint.{kind}", problem)
    return grammar


def try_build(kind: str, text: str) -> tuple[str, str]:
    """Returns a constraint's grammar, and why it cannot be enforced; one of them is empty."""
    try:
        if kind in ("json_schema", "grammar"):
            _check_multiples(text)
        match kind:
            case "json_schema":
                schema = json.loads(text)
                if not isinstance(schema, dict):
                    raise ValueError("a schema is an object")
                grammar = LLMatcher.grammar_from_json_schema(text)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            case "grammar":
                lark = text if _LARK.search(text) else gbnf_to_lark(text)
                grammar = LLMatcher.grammar_from_lark(lark)
            case _:
                choices = " | ".join(_dumps(choice) for choice in json.loads(text))
                grammar = LLMatcher.grammar_from_lark(f"start: {choices}")
        if (problem := _problem_of(grammar)) and kind == "json_schema":
            problem = f"at {_place_of(problem, schema)}: {problem}"
        elif not problem and len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            problem = "its grammar is too long; send a shorter one"
        problem = problem or _cost_problem_of(grammar)
    except Exception as error:  # also of llguidance's own, and recursion that is too deep
        problem = f"it cannot be read: {error or type(error).__name__}"
    return ("", problem) if problem else (grammar, "")


def _read_choices(values: Any) -> list[str]:
    field = "constraint.choices.values"
    if not 1 <= (count := len(values)) <= MAX_CHOICES:
        problem, limit = f"{count} are not from 1 to {MAX_CHOICES}", MAX_CHOICES if count else 1
        raise InvalidRequest(field, problem, value=count, limit=limit)
    if "" in values:
        raise InvalidRequest(f"{field}[{list(values).index('')}]", "it is empty")
    return list(values)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _problem_of(grammar: str) -> str:
    return " ".join(LLMatcher.validate_grammar(grammar, limits=LIMITS).split())


def _check_multiples(text: str) -> None:
    """Checks what a schema, or those within a grammar, would take the longest to build for.

    Raises:
        ValueError: It takes too long.
    """
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    numbers = [Decimal(number).normalize() for number in _MULTIPLE.findall(plain)]
    if sum(abs(n).scaleb(max(-int(n.as_tuple().exponent), 0)) for n in numbers) > MAX_MULTIPLES:
        raise ValueError(
            f"multipleOf is {max(numbers)}; such numbers, without their decimal points, may sum to "
            f"{MAX_MULTIPLES}, since it takes long to look for their multiples; send smaller ones"
        )


def _cost_problem_of(grammar: str) -> str:
    """Builds a grammar as executors do, and some masks of tokens that are bytes."""
    begin = thread_time()
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    for _ in range(NUM_TRIED):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.consume_token((mask & -mask).bit_length() - 1)  # the first that is allowed
    build_s, problem = thread_time() - begin, matcher.get_error()
    if not problem and build_s > MAX_BUILD_S:
        problem = f"it takes {build_s:.2g} s to build; {MAX_BUILD_S:g} s is the most"
    return problem and f"{problem}; send a simpler one: fewer parts, smaller repeats"


def _place_of(problem: str, schema: Mapping[str, Any]) -> str:
    """Returns the JSON pointer of the innermost part of a schema that has the problem by itself."""
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    end, path, parts = perf_counter() + LOOK_S, "#", _parts_of(schema)
    while perf_counter() < end and (found := next(parts, None)) is not None:
        place, part = found
        if (
            _problem_of(LLMatcher.grammar_from_json_schema(json.dumps({**shared, **part})))
            == problem
        ):
            path, parts = f"{path}/{place}", _parts_of(part)
    return path


def _parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the schemas right inside a schema, and where they are."""
    for keyword in sorted(schema, key=lambda keyword: keyword not in _DEFINITIONS):
        inner = schema[keyword]
        parts: Mapping[Any, Any] = {}
        if keyword in _NAMED and isinstance(inner, dict):
            parts = inner
        elif keyword in _NESTED:
            parts = dict(enumerate(inner)) if isinstance(inner, list) else {"": inner}
        for name, part in parts.items():
            if isinstance(part, dict):
                place = str(name).replace("~", "~0").replace("/", "~1")
                yield f"{keyword}/{place}".removesuffix("/"), part
