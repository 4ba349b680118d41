"""Grammar worker: a process that builds the grammars of constraints, some of which take for ever.

    python -m router.api.grammar_worker

It reads lines on stdin, a kind and a text as JSON, and answers each on stdout with a grammar and a problem
(constraints.py). When one has had its processor time, the kernel ends the process: llguidance has limits, but
none for schemas whose patterns must hold together, and in a thread nothing could stop it.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
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

MAX_WORK_S = 0.5  # of processor time, for one grammar, also where it is refused
MAX_MEMORY_BYTES = 1 << 30  # of address space, of which a quarter is the thread's stack
SIMPLER = "send a simpler one: fewer parts, smaller repeats"

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
                choices = " | ".join(dumps(choice) for choice in json.loads(text))
                grammar = LLMatcher.grammar_from_lark(f"start: {choices}")
        if (problem := _problem_of(grammar)) and kind == "json_schema":
            problem = f"at {_place_of(problem, schema)}: {problem}"
        elif not problem and len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            problem = "its grammar is too long; send a shorter one"
        problem = problem or _cost_problem_of(grammar)
    except Exception as error:  # also of llguidance's own, and recursion that is too deep
        problem = f"it cannot be read: {error or type(error).__name__}"
    return ("", problem) if problem else (grammar, "")


def dumps(value: Any) -> str:
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
    return problem and f"{problem}; {SIMPLER}"


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


# ---- the process


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router says when it is over
    with suppress(ValueError, OSError):  # where there is no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    thread = new_grammar_thread()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_WORK_S)
        answer = thread.submit(try_build, *json.loads(line)).result()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
