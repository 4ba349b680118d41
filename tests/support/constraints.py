"""Random constraints, and whether a text keeps to one.

Schemas are drawn over all keywords that can be enforced, and out of those of the JSON Schema Test Suite
(``json_schema_suite.json``: under ``schemas`` what its draft 2020-12 has, under ``license`` its licence).
"""

import json
import random
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from llguidance import LLMatcher, LLTokenizer

from tests.support.paths import DEMO_MODEL

SUITE = Path(__file__).with_name("json_schema_suite.json")
PATTERNS = [
    r"[0-9]{2,4}",
    r"(ab|cd)+e",
    r"[a-f]{3}-[0-9]{2}",
    r"[^a\n]{1,6}",
    r"x?y*z{2}",
    r"\.[!-~]\t",
    r"(?i:yes|no)[!?]{0,3}",
    r"([a-z]+,){1,3}[a-z]",
    r"[^\x00-\x7f]{1,2}|[0-9][a-z] ",
]
TEXTS = ["yes", "no", "maybe so", 'with "quotes"', "back\\slash", "two\tparts", "é", "😀"]
GRAMMARS = {  # and what their texts match
    'start: "(" start ")" | /[0-9]/': r"(?P<open>\(*)[0-9]\)*",
    'start: item ("," item)*\nitem: /[a-c]/ "=" /[0-9]{1,3}/': r"[a-c]=\d{1,3}(,[a-c]=\d{1,3})*",
    'root ::= "<" [a-z]+ ">" root?': r"(<[a-z]+>)+",
}
FORMATS = ["date", "time", "email", "ipv4", "ipv6", "uuid"]
_NAMES = ["id", "name", "value", "a b", "ä"]
_LEAVES = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
_NESTED = ["array", "tuple", "object", "map", "anyOf", "oneOf", "allOf", "ref"]
_IS_FORMAT = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


class Constraint(NamedTuple):
    """A constraint as a caller gives it.

    Attributes:
        kind: Field of ``Constraint``.
        text: What it holds; of choices, as JSON.
    """

    kind: str
    text: str

    def fits(self, text: str) -> bool:
        """Returns whether an output that has ended keeps to it."""
        match self.kind:
            case "json_schema":
                try:
                    given, schema = (json.loads(t, parse_float=_number) for t in (text, self.text))
                    with localcontext(prec=2000):  # multiples of long numbers
                        jsonschema.validate(given, schema, format_checker=_IS_FORMAT)
                except (ValueError, jsonschema.ValidationError):
                    return False
                return True
            case "regex":
                return re.fullmatch(self.text, text) is not None
            case "grammar":
                found = re.fullmatch(GRAMMARS[self.text], text)
                is_balanced = text.count("(") == text.count(")")
                return found is not None and is_balanced
            case _:
                return text in json.loads(self.text)


def is_beginning(grammar: str, token_ids: Sequence[int]) -> bool:
    """Returns whether an output of the demo model that was cut off may go on to keep to a grammar."""
    tokenizer = LLTokenizer(str(DEMO_MODEL / "tokenizer.json"), n_vocab=264, eos_token=[2])
    return bool(LLMatcher(tokenizer, grammar, log_level=0).consume_tokens(list(token_ids)))


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond those that it has
        return float(text)


@cache
def suite_schemas() -> list[dict[str, Any]]:
    """Returns schemas of the JSON Schema Test Suite that can be enforced."""
    schemas: list[dict[str, Any]] = json.loads(SUITE.read_text())["schemas"]
    return schemas


def random_constraint(rng: random.Random) -> Constraint:
    match rng.randrange(12):
        case 0 | 1:
            return Constraint("regex", rng.choice(PATTERNS))
        case 2:
            return Constraint(
                "choices", json.dumps(rng.sample(TEXTS, rng.randrange(1, len(TEXTS))))
            )
        case 3:
            return Constraint("json_schema", '{"type": "object"}')
        case 4:
            return Constraint("grammar", rng.choice([*GRAMMARS]))
        case 5 | 6:
            return Constraint("json_schema", json.dumps(rng.choice(suite_schemas())))
        case _:
            schema = random_schema(rng)
            schema["$defs"] = {"leaf": random_schema(rng, 0)}
            return Constraint("json_schema", json.dumps(schema))


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Returns a schema of so many levels; at those above the last it may refer to ``#/$defs/leaf``."""
    kind = rng.choice(_LEAVES + _NESTED * depth)
    if kind in _NESTED:
        return _nested(rng, kind, depth - 1)
    match kind:
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": 3 + depth}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-z]{1,3}[0-9]?$", "^a|b$"])}
        case "format":
            return {"type": "string", "format": rng.choice(FORMATS)}
        case "integer":
            low = rng.randrange(-50, 50)
            limits = {"minimum": low, "maximum": low + rng.randrange(90)}
            return {"type": "integer", **rng.choice([limits, {"multipleOf": rng.randrange(1, 99)}])}
        case "number":
            high = rng.randrange(1, 9)
            return rng.choice(
                [
                    {"type": "number", "minimum": 0, "exclusiveMaximum": high},
                    {"type": "number", "exclusiveMinimum": -high, "multipleOf": 0.25},
                    {"type": ["number", "null"], "maximum": -high},
                ]
            )
        case "enum":
            return {"enum": rng.sample([1, "two", None, True, 2.5, ["x"], {"y": 1}], 3)}
        case "const":
            return {"const": rng.choice([0, "fixed", [1, 2], {"a": None}])}
        case _:
            return {"type": kind}


def _nested(rng: random.Random, kind: str, depth: int) -> dict[str, Any]:
    def part() -> dict[str, Any]:
        return random_schema(rng, depth)

    least = rng.randrange(2)
    match kind:
        case "array":
            most = least + rng.randrange(3)
            return {"type": "array", "items": part(), "minItems": least, "maxItems": most}
        case "tuple":
            return {
                "type": "array",
                "prefixItems": [part(), part()],
                "items": False,
                "minItems": least,
            }
        case "object":
            names = rng.sample(_NAMES, rng.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: part() for name in names},
                "required": rng.sample(names, rng.randrange(len(names) + 1)),
                "additionalProperties": False,
            }
        case "map":
            values = {"patternProperties": {"^[a-z]{1,2}$": part()}, "additionalProperties": False}
            return {"type": "object", "minProperties": least, "maxProperties": 2, **values}
        case "allOf":
            low, high = sorted((rng.randrange(-20, 20), rng.randrange(-20, 20)))
            bounds = [{"minimum": low}, {"maximum": high}]
            return {"type": "integer", "allOf": bounds}
        case "oneOf":
            kinds = rng.sample(["integer", "string", "boolean", "null"], 2)
            return {"oneOf": [{"type": kind} for kind in kinds]}
        case "anyOf":
            return {"anyOf": [part(), part()]}
        case _:
            return {"$ref": "#/$defs/leaf"}
