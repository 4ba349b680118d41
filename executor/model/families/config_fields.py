"""The fields of a JSON file, read by name, with errors that name file and field."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor.errors import CheckpointError


class Fields:
    """The fields of one file. A null counts as absent, as Hugging Face means it.

    Args:
        path: The file, for errors.
        values: What it holds.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Returns the fields of a file.

        Raises:
            CheckpointError: There is no such file, or it holds no JSON object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} does not exist: need a model in Hugging Face format"
            ) from error
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object")
        return cls(path, values)

    def changed(self, **values: Any) -> "Fields":
        """Returns the same fields but for these."""
        return Fields(self._path, {**self._values, **values})

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")

    def get(self, *names: str, default: Any = None) -> Any:
        """Returns the first of the names that is there."""
        found = [self._values[name] for name in names if self._values.get(name) is not None]
        return found[0] if found else default

    def integer(self, *names: str, default: int | None = None) -> int:
        """Returns the first of the names that is there, a whole number from 0.

        Raises:
            CheckpointError: It is none; or none is there and there is no default.
        """
        value = self.get(*names, default=default)
        if value is None:
            raise self.error(f"{' or '.join(names)} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"{names[0]}={value!r} is not a whole number from 0")
        return value

    def integers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Returns a list of whole numbers from 0.

        Raises:
            CheckpointError: It is none.
        """
        values = self.get(name, default=default)
        if not isinstance(values, list | tuple) or not all(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0
            for value in values
        ):
            raise self.error(f"{name}={values!r} is no list of whole numbers from 0")
        return tuple(values)

    def architecture(self) -> str:
        names = self.get("architectures", default=[])
        if len(names) != 1:
            raise self.error(f"architectures={names!r}: need exactly one class name")
        return str(names[0])

    def refuse(self, supported: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises for what would change the numbers and is not implemented.

        Args:
            supported: By field, the values that do not. Leaving the field out never does.

        Raises:
            CheckpointError: A field has another value.
        """
        for name, values in supported.items():
            value = self.get(name)
            if value is not None and value not in values:
                fits = f"only {values[0]!r} is" if values else "leaving it out is"
                raise self.error(f"{name}={value!r} is not supported; {fits}")
