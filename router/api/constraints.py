"""Constraints of requests: schemas, expressions, grammars and choices, checked and made one grammar."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from time import perf_counter
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from protos.executor.grammars import LIMITS, MAX_GRAMMAR_BYTES, new_grammar_thread
from protos.serving.v1 import serving_pb2
from router.errors import InvalidRequest
from router.scheduling.step import ServedModel

MAX_CONSTRAINT_BYTES = 64 << 10
MAX_CHOICES = 1024
NUM_KEPT = 256  # constraints whose grammar is kept, since most services send few
LOOK_S = 0.2  # at parts of a schema, for the one at fault

# Keywords of a JSON schema under which there are schemas: one or a list of them, or by name.
_NESTED = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not",
           "if", "then", "else", "contains", "propertyNames")  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")
_NAMED = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")


class _Kept:
    """Grammars of the constraints that came last, by their digest."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, str] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None  # once there is a constraint

    async def grammar_of(self, kind: str, text: str) -> str:
        """Returns the grammar of a constraint, built in a thread if it is not known.

        Raises:
            InvalidRequest: There is none.
        """
        key = blake2b(f"{kind}:{text}".encode(), digest_size=16).digest()
        if key not in self._grammars:
            self._thread = self._thread or new_grammar_thread()
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._thread, build_grammar, kind, text)
            self._grammars[key] = grammar
            if len(self._grammars) > NUM_KEPT:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(key)
        return self._grammars[key]


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
        raise InvalidRequest(f"constraint.{kind}", problem)
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


def build_grammar(kind: str, text: str) -> str:
    """Returns the grammar of a constraint, in llguidance's JSON.

    Args:
        kind: Field of Constraint.
        text: What it holds; of choices, as JSON.

    Raises:
        InvalidRequest: There is none. It names the field, and within a schema the place.
    """
    field = f"constraint.{kind}"
    try:
        match kind:
            case "json_schema":
                schema = json.loads(text)
                if not isinstance(schema, dict):
                    raise ValueError("a schema is an object")
                grammar = LLMatcher.grammar_from_json_schema(text)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            case "grammar":
                grammar = LLMatcher.grammar_from_lark(any_to_lark(text))
            case _:
                choices = " | ".join(_dumps(choice) for choice in json.loads(text))
                grammar = LLMatcher.grammar_from_lark(f"start: {choices}")
        problem = _problem_of(grammar)
    except Exception as error:  # also of llguidance's own, and recursion that is too deep
        raise InvalidRequest(field, f"it cannot be read: {error or type(error).__name__}") from None
    if problem and kind == "json_schema":
        path = _place_of(problem, schema)
        raise InvalidRequest(field, f"at {path}: {problem}")
    if problem or len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, problem or "its grammar is too long; send a shorter one")
    return grammar


def _read_choices(values: Any) -> list[str]:
    field = "constraint.choices.values"
    if not 1 <= len(values) <= MAX_CHOICES:
        raise InvalidRequest(field, f"{len(values)} are not from 1 to {MAX_CHOICES}")
    if "" in values:
        raise InvalidRequest(f"{field}[{list(values).index('')}]", "it is empty")
    return list(values)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _problem_of(grammar: str) -> str:
    return " ".join(LLMatcher.validate_grammar(grammar, limits=LIMITS).split())


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
