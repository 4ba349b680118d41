"""Columns of a message: little-endian numbers in ``bytes``, read and checked by a table."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from executor.errors import InvalidStep

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

INT32 = np.dtype("<i4")
UINT8 = np.dtype("u1")


class Column(NamedTuple):
    """A column of integers.

    Attributes:
        name: Of the field.
        length: The column that it has one entry for each entry of, if that is ``rows``, whose own
            length is free; else the column whose sum is its length.
        least: Its smallest value.
        most: Its largest value: a number, or the bound of this name.
        default: Its values where the field is empty: likewise. None: an empty field has no entries.
        most_in_all: The bound of its sum.
        dtype: Of an entry.
    """

    name: str
    length: str = "rows"
    least: int = 0
    most: int | str = (1 << 31) - 1
    default: int | str | None = None
    most_in_all: str | None = None
    dtype: np.dtype[Any] = INT32


class ColumnReader:
    """Columns of one message. Every error names the field, what it has and what fits.

    Args:
        message: The message.
        path: Its place in the request.
        table: Its columns, each behind the one that gives its length.
        bounds: By name.

    Attributes:
        columns: int64, by name.

    Raises:
        InvalidStep: A column does not fit the table.
    """

    def __init__(
        self, message: Message, path: str, table: tuple[Column, ...], bounds: Mapping[str, int]
    ) -> None:
        self._message = message
        self._path = path
        self._bounds = bounds
        self.columns: dict[str, Int64Array] = {}
        for column in table:
            self.columns[column.name] = self.read(column)

    def error(self, name: str, problem: str) -> InvalidStep:
        return InvalidStep(f"{name}: {problem}", field=f"{self._path}.{name}")

    def check_at_most(self, name: str, value: int, bound: str) -> None:
        if value > self._bounds[bound]:
            raise self.error(name, f"comes to {value}; {bound} is {self._bounds[bound]}")

    def entries(self, name: str, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
        """Returns the entries of a field. Only their number is checked."""
        data: bytes = getattr(self._message, name)
        if len(data) != length * dtype.itemsize:
            raise self.error(
                name,
                f"has {len(data)} bytes; {length} entries of {dtype.itemsize} bytes are "
                f"{length * dtype.itemsize}",
            )
        return np.frombuffer(data, dtype)

    def read(self, column: Column) -> Int64Array:
        """Returns a column, whose length one of those read before gives."""
        name, data = column.name, getattr(self._message, column.name)
        length = self._length(column, data)
        if data or column.default is None:
            values: Int64Array = self.entries(name, column.dtype, length).astype(np.int64)
            most = self._resolve(column.most)
            if length and not column.least <= (least := values.min()) <= values.max() <= most:
                outlier = least if least < column.least else values.max()
                raise self.error(name, f"has {outlier}; it must be from {column.least} to {most}")
        else:
            values = np.full(length, self._resolve(column.default), np.int64)
        if column.most_in_all is not None:
            self.check_at_most(name, int(values.sum()), column.most_in_all)
        return values

    def _length(self, column: Column, data: bytes) -> int:
        if column.name == "rows":
            return len(data) // INT32.itemsize
        lengths = self.columns[column.length]
        return len(lengths) if column.length == "rows" else int(lengths.sum())

    def _resolve(self, value: int | str) -> int:
        return self._bounds[value] if isinstance(value, str) else value


def check_unique(read: ColumnReader, name: str) -> None:
    times = np.bincount(read.columns[name])
    if times.max(initial=0) > 1:
        raise read.error(name, f"has {times.argmax()} more than once")
