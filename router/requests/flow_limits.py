"""Limits of flows, which an operator writes in a file that is read again when it changes.

One flow a line, by one of its caller's names or by what the metadata say; empty lines and lines that begin
with # do not count. What a line leaves out is as for flows without a line:

    batch         weight=0.2  max_priority=-1
    x-user=alice  weight=2  max_waiting_sequences=100  max_waiting_tokens=400000
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

MIN_PRIORITY, MAX_PRIORITY = -100, 100
MAX_WEIGHT = 1e6  # and as much below 1: counters of flows keep apart what is far apart
RELOAD_S = 1.0  # the file is looked at so often at most, since every request asks


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """What one flow gets; None is what the settings say.

    Attributes:
        weight: Its share for each of another flow's whose weight is 1.
        max_priority: Of its requests.
        max_waiting_sequences: In each group.
        max_waiting_tokens: Likewise.
    """

    weight: float = 1.0
    max_priority: int | None = None
    max_waiting_sequences: int | None = None
    max_waiting_tokens: int | None = None


NO_LIMITS = FlowLimits()
_TYPES = {field.name: float if field.name == "weight" else int for field in fields(FlowLimits)}
_RANGES = {
    "weight": (1 / MAX_WEIGHT, MAX_WEIGHT),
    "max_priority": (MIN_PRIORITY, MAX_PRIORITY),
    "max_waiting_sequences": (0, math.inf),
    "max_waiting_tokens": (0, math.inf),
}


def read_flow_limits(path: Path) -> Mapping[str, FlowLimits]:
    """Returns the limits in a file, by the flow's name.

    Raises:
        OSError: It cannot be read.
        ValueError: It makes no sense; names the line.
    """
    limits = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        name, *words = line.split() or ["#"]
        if name.startswith("#"):
            continue
        try:
            pairs = dict(word.split("=") for word in words)
            values = {key: _TYPES[key](value) for key, value in pairs.items()}
        except (KeyError, ValueError):
            raise ValueError(
                f"{path}, line {number}: need NAME and any of {', '.join(_TYPES)}, such as weight=2"
            ) from None
        for key, value in values.items():
            least, most = _RANGES[key]
            if not least <= value <= most:
                raise ValueError(
                    f"{path}, line {number}: {key}={value:g}: need {least:g} to {most:g}"
                )
        if name in limits:
            raise ValueError(
                f"{path}, line {number}: {name} has a line before it: need one for each"
            )
        limits[name] = FlowLimits(**values)  # type: ignore[arg-type]
    return limits
