"""Columns of a message: little-endian numbers in ``bytes``, checked as they are read."""

from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from executor.errors import InvalidStep

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

INT32 = np.dtype("<i4")
UINT8 = np.dtype("u1")
UINT64 = np.dtype("<u8")
FLOAT32 = np.dtype("<f4")


class ColumnReader:
    """Reads the columns of one message; every error names the column.

    Columns come out as arrays that may be written to, integers as int64.
    """

    def __init__(self, message: Message, path: str) -> None:
        self._message = message
        self._path = path

    def error(self, name: str, problem: str) -> InvalidStep:
        return InvalidStep(f"{name}: {problem}", field=f"{self._path}.{name}")

    def column(
        self, name: str, dtype: np.dtype[Any], length: int, default: float | None = None
    ) -> npt.NDArray[Any]:
        data: bytes = getattr(self._message, name)
        if not data and default is not None:
            return np.full(length, default, dtype)
        if len(data) != length * dtype.itemsize:
            raise self.error(
                name,
                f"has {len(data)} bytes; {length} entries of {dtype.itemsize} bytes are "
                f"{length * dtype.itemsize}",
            )
        return np.frombuffer(data, dtype)

    def counts(
        self,
        name: str,
        length: int,
        *,
        least: int = 0,
        most: int | None = None,
        default: int | None = None,
    ) -> Int64Array:
        if default is not None and not getattr(self._message, name):
            return np.full(length, default, np.int64)
        values = self.column(name, INT32, length).astype(np.int64)
        if values.size and values.min() < least:
            raise self.error(name, f"has {values.min()}; need at least {least}")
        if most is not None and values.size and values.max() > most:
            raise self.error(name, f"has {values.max()}; at most {most} fits")
        return values

    def ids(
        self, name: str, length: int, *, least: int = 0, below: int, default: int | None = None
    ) -> Int64Array:
        values = self.column(name, INT32, length, default).astype(np.int64)
        if values.size:
            smallest, largest = values.min(), values.max()
            if smallest < least or largest >= below:
                outlier = smallest if smallest < least else largest
                raise self.error(name, f"has {outlier}; it must be from {least} to {below - 1}")
        return values

    def flags(self, name: str, length: int, *, default: bool) -> BoolArray:
        values = self.column(name, UINT8, length, int(default))
        if values.size and values.max() > 1:
            raise self.error(name, f"has {values.max()}; need 0 or 1")
        return values.astype(np.bool_)

    def floats(
        self,
        name: str,
        length: int,
        *,
        default: float | None = None,
        least: float = -np.inf,
        above: float = -np.inf,
        most: float = np.inf,
    ) -> Float32Array:
        values = self.column(name, FLOAT32, length, default)
        # Written so that NaN is outside too.
        fits = np.isfinite(values) & (values >= least) & (values > above) & (values <= most)
        if not fits.all():
            bound = f"above {above}" if above > -np.inf else f"at least {least}"
            raise self.error(
                name, f"has {values[~fits][0]}; need a finite number {bound}, at most {most}"
            )
        return values.astype(np.float32)

    def unique(self, name: str, values: Int64Array, below: int) -> None:
        times = np.bincount(values, minlength=below)
        if times.max(initial=0) > 1:
            raise self.error(name, f"has {times.argmax()} more than once")

    def at_most(self, name: str, value: int, most: int, limit: str) -> None:
        if value > most:
            raise self.error(name, f"comes to {value}; {limit} is {most}")
