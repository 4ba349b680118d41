"""Encoding of the values that FlashInfer's processes tell one another while they set up shared memory.

    none   -
    bool   1 byte
    int    8 bytes, signed
    str    UTF-8, behind its size in 4 bytes     host names, paths of sockets
    bytes  likewise                              handles of memory
    tuple  its values, behind their number in 4 bytes

each behind a byte that says which; integers are little-endian. Reading one makes such a value or fails.
"""

import struct
from typing import Any

_INT, _SIZE = struct.Struct("<q"), struct.Struct("<I")
MAX_DEPTH = 4  # of tuples in tuples; the library sends one


def encode(value: Any) -> bytes:
    """Returns a value's bytes.

    Raises:
        TypeError: It is of another type.
        struct.error: It is a number of more than 64 bits.
    """
    match value:
        case None:
            return b"n"
        case bool():
            return b"o" + bytes([value])
        case int():
            return b"i" + _INT.pack(value)
        case str():
            return b"s" + _sized(value.encode())
        case bytes():
            return b"b" + _sized(value)
        case tuple():
            return b"t" + _SIZE.pack(len(value)) + b"".join(map(encode, value))
    raise TypeError(f"{type(value).__name__}: only None, bool, int, str, bytes and tuples are told")


def decode(data: bytes) -> Any:
    """Returns the value of some bytes.

    Raises:
        ValueError: They are not those of one value.
    """
    try:
        value, end = _decode(data, 0, MAX_DEPTH)
    except (struct.error, IndexError) as error:
        raise ValueError(f"a value that ends too early: {error}") from error
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes behind a value")
    return value


def _sized(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def _decode(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    kind, at = data[at : at + 1], at + 1
    if kind == b"n":
        return None, at
    if kind == b"o":
        return bool(data[at]), at + 1
    if kind == b"i":
        return _INT.unpack_from(data, at)[0], at + _INT.size
    if kind not in (b"s", b"b", b"t") or depth == 0:
        raise ValueError(f"a value of kind {kind!r}, or too deep")
    count, at = _SIZE.unpack_from(data, at)[0], at + _SIZE.size
    if kind == b"t":
        values = []
        for _ in range(count):
            value, at = _decode(data, at, depth - 1)
            values.append(value)
        return tuple(values), at
    if at + count > len(data):
        raise ValueError(f"a value of {count} bytes, of which {len(data) - at} came")
    text = data[at : at + count]
    return text if kind == b"b" else text.decode(), at + count
