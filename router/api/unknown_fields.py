"""Fields of a request that this release does not know, which are refused rather than ignored."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from router.errors import InvalidRequest

MAX_REPEATED = (
    4096  # messages in lists: each takes 3 us of the loop, and two bytes where it is empty
)


def refuse_unknown_fields(message: Message) -> Sequence[Message]:
    """Refuses a message of a newer caller, or of one that was built from other files.

    Returns:
        The messages in it. Keep them while they are read: to look one up anew makes an object.

    Raises:
        InvalidRequest: It has a field that this release does not know; names its number. Or the
            lists of messages in it have too many.
    """
    parts_of, nested = _layout(message.DESCRIPTOR)
    parts = parts_of(message)
    # In C where all is well: this is done for each request.
    has_unknown = any(map(len, map(UnknownFieldSet, (message, *parts))))
    if has_unknown or (nested and any(_is_set(message, field) for field in nested)):
        for path, number, name in _unknown_fields(message, "", count(1)):
            raise InvalidRequest(
                f"{path}{number}",
                f"this release knows no field {number} of {name}, so the caller was built from other "
                f".proto files: leave the field out, or call a router that knows it",
                value=number,
            )
    return parts


@lru_cache(maxsize=64)
def _layout(descriptor: Any) -> tuple[Callable[[Message], Sequence[Message]], list[Any]]:
    """Returns what gets the messages in a message, and the fields that hold messages of messages."""
    fields = _message_fields(descriptor)
    names = [field.name for field in fields if not field.is_repeated]
    get: Any = attrgetter(*names) if len(names) > 1 else lambda m: [getattr(m, n) for n in names]
    return get, [f for f in fields if f.is_repeated or _message_fields(f.message_type)]


def _is_set(message: Message, field: Any) -> bool:
    return bool(getattr(message, field.name)) if field.is_repeated else message.HasField(field.name)


def _unknown_fields(
    message: Message, path: str, numbers: Iterator[int]
) -> Iterator[tuple[str, int, str]]:
    """Yields where each lies, its number and the name of the message that has it.

    Args:
        message: Where to look.
        path: Of the message.
        numbers: Of messages in lists, from 1.

    Raises:
        InvalidRequest: These are too many.
    """
    unknown: Any = UnknownFieldSet(message)  # its stub knows no iteration
    for field in unknown:
        yield path, field.field_number, message.DESCRIPTOR.full_name
    for known in _message_fields(message.DESCRIPTOR):
        value = getattr(message, known.name)
        if known.is_repeated:
            for index, each in enumerate(value):
                if next(numbers) > MAX_REPEATED:
                    problem = f"its messages are too many; send at most {MAX_REPEATED}, inner ones counted"
                    raise InvalidRequest(f"{path}{known.name}", problem, limit=MAX_REPEATED)
                yield from _unknown_fields(each, f"{path}{known.name}[{index}].", numbers)
        elif message.HasField(known.name):
            yield from _unknown_fields(value, f"{path}{known.name}.", numbers)


def _message_fields(descriptor: Any) -> list[Any]:
    return [
        field
        for field in descriptor.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    ]
