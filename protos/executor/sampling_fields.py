"""Sampling parameters: one table for requests, the columns of a step and the sampler.

A parameter has a line here, a field in serving.proto's ``SamplingParams`` and a column in
executor.proto's ``RowStarts``, all of one name. The router checks it, sends it and the executor
reads it and keeps it on the device, each by this table.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

INT32 = np.dtype("<i4")
UINT64 = np.dtype("<u8")
FLOAT32 = np.dtype("<f4")

MAX_BANNED = 192  # sequences of tokens that a row shall not have
MAX_BANNED_LEN = 8  # tokens of one
MAX_LOGPROB_IDS = 64  # tokens whose log probabilities a row may ask for by name
BAN = -1e9  # is added to a banned token's logit: it comes only where no other can


@dataclass(frozen=True, slots=True)
class SamplingField:
    """A sampling parameter of one number.

    Attributes:
        name: In serving.proto and executor.proto.
        dtype: Of its column: int32 or float32, or uint64.
        default: What it is where it is left out: it then changes nothing.
        low, high: Its range.
        is_above: Whether ``low`` itself is out of range.
        is_penalty: Whether it edits the logits of tokens that the output has.
        sees_prompt: Whether it edits the logits of the prompt's tokens as well.
    """

    name: str
    dtype: np.dtype[Any]
    default: float
    low: float
    high: float
    is_above: bool = False
    is_penalty: bool = False
    sees_prompt: bool = False

    @property
    def range(self) -> str:
        low = f"above {self.low:g} and at most" if self.is_above else f"from {self.low:g} to"
        return f"{low} {self.high:g}"

    def contains(self, values: Any) -> Any:
        """Returns whether a number, or which of an array, is in range. NaN is not."""
        is_enough = values > self.low if self.is_above else values >= self.low
        return is_enough & (values <= self.high)


SAMPLING_FIELDS = (
    SamplingField("temperature", FLOAT32, 0.0, 0.0, 100.0),
    SamplingField("top_k", INT32, 0, 0, 2**32 - 1),
    SamplingField("top_p", FLOAT32, 1.0, 0.0, 1.0, is_above=True),
    SamplingField("min_p", FLOAT32, 0.0, 0.0, 1.0),
    SamplingField(
        "repetition_penalty",
        FLOAT32,
        1.0,
        0.0,
        100.0,
        is_above=True,
        is_penalty=True,
        sees_prompt=True,
    ),
    SamplingField("presence_penalty", FLOAT32, 0.0, -100.0, 100.0, is_penalty=True),
    SamplingField("frequency_penalty", FLOAT32, 0.0, -100.0, 100.0, is_penalty=True),
)
SEED = SamplingField("seed", UINT64, 0, 0, 2**64 - 1)  # the router draws it if a request has none
