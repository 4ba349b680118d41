"""If this fails, GPU executors misunderstand one another, or read bytes that do more than say a value."""

import random
from contextlib import suppress
from typing import Any

import pytest

from executor.model.flashinfer.values import decode, encode

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    "",
    "executor-0.test",
    "/tmp/größer",
    b"",
    bytes(range(64)),
    (),
    (2 << 20, "mark", ("mark 0", "mark 1"), False),
    ("x", None, (b"\0" * 100,)),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_read_as_it_was_written(value: Any):
    read = decode(encode(value))
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}, {1}, object(), ("a", [1])])
def test_a_value_of_another_type_is_refused_by_who_would_send_it(value: Any):
    with pytest.raises(TypeError, match="only None, bool, int, str, bytes and tuples"):
        encode(value)


def test_bytes_that_are_no_value_or_more_than_one_are_refused():
    for value in VALUES:
        data = encode(value)
        for wrong in (data + b"n", data[:-1], b"\x80" + data, b""):
            with pytest.raises(ValueError, match="value"):
                decode(wrong)
    for wrong in (
        b"s\xff\xff\xff\xff",
        b"t\xff\xff\xff\xff",
        b"t\1\0\0\0" * 10_000,
        b"s\1\0\0\0\xff",
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            decode(wrong)


def test_any_bytes_are_a_value_or_refused():
    rng = random.Random(0)
    for _ in range(2000):
        data = bytearray(encode(rng.choice(VALUES)))
        for _ in range(rng.randint(1, 3)):
            data.insert(rng.randrange(len(data) + 1), rng.choice(b"noisbt\0\1\xff"))
        with suppress(ValueError):
            assert decode(encode(decode(bytes(data)))) == decode(bytes(data))
