"""Messages that no client means to send: random, damaged, huge, or right but for one thing.

All of it comes from one seeded `random.Random`, so that a failure can be had again.
"""

import math
import random
import struct
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

AnyMessage = TypeVar("AnyMessage", bound=Message)

TEXTS = (
    *("", "a", "\x00", "\n\r\t", " " * 300, "x" * 5000, "\N{ROCKET}" * 40, "\u202e\ufeff"),
    *("%s%n%%", "../../etc/passwd", "'; --", "\N{COMBINING ACUTE ACCENT}" * 50),
    *("1+1=", "-1", "nan"),
)
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 3.4e38, -3.4e38, 100.0, 100.1, 1.0000001),
    *(math.nan, math.inf, -math.inf),
)
COLUMN_INTS = (0, 1, -1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 255, 2**15, 2**31 - 1, -(2**31))

_KIND = FieldDescriptor
_BITS = {
    _KIND.TYPE_INT32: (32, True),
    _KIND.TYPE_INT64: (64, True),
    _KIND.TYPE_UINT32: (32, False),
    _KIND.TYPE_UINT64: (64, False),
}


def random_bytes(rng: random.Random, max_len: int = 200) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 2, 3, 8, rng.randint(0, max_len))))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Returns bytes that were a message: cut, flipped, doubled, or with others in between."""
    at, other = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    match rng.choice(("cut", "flip", "drop", "double", "insert")):
        case "cut":
            return data[:at]
        case "flip" if data:
            damage = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                damage[rng.randrange(len(damage))] ^= 1 << rng.randrange(8)
            return bytes(damage)
        case "drop":
            return data[:at] + data[other:]
        case "double":
            return data[:other] + data[at:]
        case _:
            return data[:at] + random_bytes(rng, 16) + data[at:]


def filled(
    rng: random.Random,
    cls: type[AnyMessage],
    density: float = 0.5,
    skipped: Collection[str] = (),
) -> AnyMessage:
    """Returns a message with random, mostly extreme, values in some of its fields."""
    message = cls()
    for field in cls.DESCRIPTOR.fields:
        if field.name not in skipped and rng.random() < density:
            put_random(rng, message, field)
    return message


def changed(rng: random.Random, message: AnyMessage) -> AnyMessage:
    """Returns a copy that differs in one field, at any depth."""
    copy = type(message)()
    copy.CopyFrom(message)
    inner: Any = copy
    while True:
        field = rng.choice(inner.DESCRIPTOR.fields)
        if field.type != _KIND.TYPE_MESSAGE or _is_map(field) or rng.random() < 0.1:
            break
        if not field.message_type.fields:  # there is nothing in it to change
            break
        if not field.is_repeated:
            inner = getattr(inner, field.name)
        elif len(items := getattr(inner, field.name)):
            inner = rng.choice(items)
        else:
            break
    if rng.random() < 0.1:
        inner.ClearField(field.name)
    else:
        put_random(rng, inner, field)
    return copy


def put_random(rng: random.Random, message: Any, field: FieldDescriptor) -> None:
    """Sets a field, or adds to it."""
    target = getattr(message, field.name)
    if _is_map(field):
        key, value = field.message_type.fields
        for _ in range(_count(rng)):
            if value.type == _KIND.TYPE_MESSAGE:
                entry = target[_scalar(rng, key)]  # which adds it
                entry.CopyFrom(filled(rng, type(entry)))
            else:
                target[_scalar(rng, key)] = _scalar(rng, value)
    elif field.type == _KIND.TYPE_MESSAGE:
        for _ in range(_count(rng) % 4 if field.is_repeated else 1):
            inner = filled(rng, type(target.add() if field.is_repeated else target))
            (target.add() if field.is_repeated else target).CopyFrom(inner)
    elif field.is_repeated:
        target.extend(_scalar(rng, field) for _ in range(_count(rng)))
    else:
        setattr(message, field.name, _scalar(rng, field))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _count(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 2, 3, 5, 17, 65, 1025, 2000))


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.type:
        case _KIND.TYPE_STRING:
            return rng.choice(TEXTS)
        case _KIND.TYPE_BYTES:
            return column(rng)
        case _KIND.TYPE_BOOL:
            return rng.random() < 0.5
        case _KIND.TYPE_FLOAT | _KIND.TYPE_DOUBLE:
            return rng.choice((*FLOATS, rng.uniform(-2, 2)))
        case _KIND.TYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 99, -1, 2**31 - 1))
        case kind:
            return _integer(rng, *_BITS[kind])


def _integer(rng: random.Random, bits: int, is_signed: bool) -> int:
    top = 1 << (bits - is_signed)
    low = -top if is_signed else 0
    small = rng.choice((0, 1, 1, 2, 3, 5, 20, 21, 64, 65, 128, 1024, 4096, -1, -100))
    return max(low, rng.choice((small, small, small, low, top - 1, rng.randrange(low, top))))


def column(rng: random.Random) -> bytes:
    """Returns bytes that may pass for a column of numbers."""
    length = rng.choice((0, 1, 1, 2, 2, 3, 4, 9, 64, 300))
    match rng.choice(("int32", "small", "float", "uint8", "uint64", "bytes")):
        case "int32":
            return _packed("i", [rng.choice(COLUMN_INTS) for _ in range(length)])
        case "small":
            return _packed("i", [rng.randint(0, 9) for _ in range(length)])
        case "float":
            return _packed("f", [rng.choice(FLOATS) for _ in range(length)])
        case "uint8":
            return bytes(rng.choice((0, 1, 1, 2, 255)) for _ in range(length))
        case "uint64":
            return _packed("Q", [rng.choice((0, 1, 2**63, 2**64 - 1)) for _ in range(length)])
        case _:
            return random_bytes(rng)


def _packed(kind: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)
