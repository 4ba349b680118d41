"""Fields of a checkpoint's config.json: read by name and within bounds, unknown ones refused.

Transformers 5 writes some fields under other names than the releases before it; both are read.
A field that a family neither reads nor names as harmless is an error: a model that ignored it
might answer fluently and wrongly.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from executor.errors import CheckpointError

MAX_CONFIG_BYTES = 4 << 20
MAX_SIZE = 1 << 24  # of a dimension or a number of positions; the largest published is 10 million

# Of training, of classes' bookkeeping, or read elsewhere: no family's numbers change with them.
_HARMLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "is_encoder_decoder",
        "model_type",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "router_aux_loss_coef",
        "tokenizer_class",
        "transformers_version",
        "use_cache",
    ]
)


class Fields:
    """The fields of one file, or of an object in it. A null counts as absent, as Hugging Face means it.

    Args:
        path: The file, for errors.
        values: What it holds.
        prefix: Of the fields' names, in errors.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix
        self._known: set[str] = set()
        self._nested: dict[tuple[str, ...], Fields] = {}

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Returns the fields of a file.

        Raises:
            CheckpointError: There is no such file, or it holds no JSON object, or too large a one.
        """
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise CheckpointError(f"{path} has more than {MAX_CONFIG_BYTES:,} bytes")
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} does not exist: need a model in Hugging Face format"
            ) from error
        except (ValueError, RecursionError) as error:  # of numbers of 4,300 digits, too
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object")
        return cls(path, values)

    def changed(self, **values: Any) -> "Fields":
        """Returns the same fields but for these."""
        return Fields(self._path, {**self._values, **values}, self._prefix)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")

    def get(self, *names: str, default: Any = None) -> Any:
        """Returns the value of a field that has several names.

        Raises:
            CheckpointError: Two of the names are there and say different things.
        """
        self._known.update(names)
        found = {name: self._values[name] for name in names if self._values.get(name) is not None}
        value = next(iter(found.values()), default)
        if any(other != value for other in found.values()):
            said = " and ".join(f"{self._prefix}{name}={each!r}" for name, each in found.items())
            raise self.error(f"{said} contradict each other; leave out the wrong one")
        return value

    def integer(
        self, *names: str, default: int | None = None, least: int = 0, most: int = MAX_SIZE
    ) -> int:
        """Returns what any of the names says, a whole number within the bounds.

        Raises:
            CheckpointError: It is none; or none is there and there is no default; or two differ.
        """
        value = self.get(*names, default=default)
        if value is None:
            raise self.error(f"{self._prefix}{' or '.join(names)} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(
                f"{self._prefix}{names[0]}={value!r} is not a whole number from {least} to {most}"
            )
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
            raise self.error(f"{self._prefix}{name}={values!r} is no list of whole numbers from 0")
        return tuple(values)

    def kinds(self, name: str, known: tuple[str, ...], default: list[str]) -> list[str]:
        """Returns the kind of each layer.

        Args:
            name: Of the field.
            known: Kinds that there are.
            default: Where the file does not say; one for each layer.

        Raises:
            CheckpointError: It is no list of as many, or has others.
        """
        kinds = self.get(name, default=default)
        if not isinstance(kinds, list) or [kind in known for kind in kinds] != [True] * len(
            default
        ):
            raise self.error(
                f"{self._prefix}{name}={kinds!r}: need {' or '.join(known)} for each of "
                f"num_hidden_layers={len(default)}"
            )
        return kinds

    def number(self, name: str, *, default: float | None = None) -> float:
        """Returns a finite number above 0.

        Raises:
            CheckpointError: It is none; or it is not there and there is no default.
        """
        value = self.get(name, default=default)
        if value is None:
            raise self.error(f"{self._prefix}{name} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.error(f"{self._prefix}{name}={value!r} is no number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns true or false.

        Raises:
            CheckpointError: It is neither.
        """
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self.error(f"{self._prefix}{name}={value!r} is neither true nor false")
        return value

    def nested(self, *names: str, beside: Sequence[str] = ()) -> "Fields":
        """Returns the fields of objects, the later before the earlier; none if all are absent.

        Args:
            names: Of the objects.
            beside: Fields that may also stand beside the objects, rather than in them.

        Raises:
            CheckpointError: One is no object, or what stands in them and beside them differs.
        """
        merged = self._nested.get(names)
        if merged is None:
            values: dict[str, Any] = {}
            for name in names:
                found = self.get(name, default={})
                if not isinstance(found, dict):
                    raise self.error(f"{self._prefix}{name}={found!r} is no object")
                values |= found
            for name in beside:
                outer = self.get(name, default=values.get(name))
                if values.get(name, outer) not in (outer, None):
                    raise self.error(
                        f"{name}={outer!r}, and in {names[-1]} {values[name]!r}, contradict each "
                        f"other; leave out the wrong one"
                    )
                values[name] = outer
            merged = self._nested[names] = Fields(self._path, values, f"{self._prefix}{names[-1]}.")
        return merged

    def architecture(self) -> str:
        names = self.get("architectures", default=[])
        if not isinstance(names, list) or len(names) != 1:
            raise self.error(f"{self._prefix}architectures={names!r}: need exactly one class name")
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
                raise self.error(f"{self._prefix}{name}={value!r} is not supported; {fits}")

    def ignore(self, *names: str) -> None:
        """Takes fields for harmless: numbers are the same for any value of theirs."""
        self._known.update(names)

    def refuse_others(self) -> None:
        """Raises for fields that were neither read nor taken for harmless, of nested objects too.

        Raises:
            CheckpointError: There are such fields. Names them.
        """
        unknown = list(self._unknown())
        if unknown:
            rest = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise self.error(
                f"{', '.join(unknown[:3])}{rest}: not known of {self.get('architectures')}, and may "
                f"change its numbers; leave out what does not"
            )

    def _unknown(self) -> Iterator[str]:
        for name, value in self._values.items():
            if name not in self._known | _HARMLESS and value is not None:
                yield f"{self._prefix}{name}={value!r}"[:100]
        for fields in self._nested.values():
            yield from fields._unknown()
