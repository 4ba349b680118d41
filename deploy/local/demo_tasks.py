"""Tasks of the demo model, and their right answers.

A problem is one line of text; the model completes it and ends its answer with a newline:

    \\n17+25=            42\\n
    \\nrev abacus=       sucaba\\n
    \\nsort 31415926=    11234569\\n

The answers are exact, so a wrong one means a fault in what served the model. Knows nothing of
torch or of the model: the training script, the demo and the end-to-end tests all draw from here.
"""

import random
import string
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

STOP = "\n"  # ends every answer, and begins every prompt: a line follows a line
FIRST_BYTE_ID = 3  # ids are byte + 3: 0 pads, 1 begins and 2 ends a text
STOP_ID = ord(STOP) + FIRST_BYTE_ID

MAX_OPERAND = 999
WORD_LENS = (3, 12)
NUM_DIGITS = (3, 10)


def token_ids(text: str) -> list[int]:
    """Returns the demo model's ids of a text."""
    return [byte + FIRST_BYTE_ID for byte in text.encode()]


def text_of(ids: Sequence[int]) -> str:
    """Returns the text of the demo model's ids; what is no byte becomes a NUL."""
    offsets = (id_ - FIRST_BYTE_ID for id_ in ids)
    return bytes(at if 0 <= at < 256 else 0 for at in offsets).decode(errors="replace")


class Kind(Enum):
    """What a problem asks for."""

    ADD = "add"
    REV = "rev"
    SORT = "sort"


Mix = tuple[float, float, float]
"""Weights with which the kinds are drawn, in the order of `Kind`."""

TRAINING_MIX: Mix = (0.6, 0.2, 0.2)
EVEN_MIX: Mix = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt with its one right answer."""

    kind: Kind
    prompt: str
    """With the leading newline that the model expects, up to and with the "="."""

    answer: str
    """Without the newline that ends it."""

    @property
    def line(self) -> str:
        """The solved problem as it stands in a context, without its ending newline."""
        return self.prompt + self.answer

    def is_answered_by(self, completion: str) -> bool:
        """Whether a completion is right. It may carry the stop newline and more text."""
        return completion.split(STOP, 1)[0] == self.answer


def add(a: int, b: int) -> Problem:
    """Asks for a + b."""
    return Problem(Kind.ADD, f"{STOP}{a}+{b}=", str(a + b))


def rev(word: str) -> Problem:
    """Asks for the letters of a word in reverse order."""
    return Problem(Kind.REV, f"{STOP}rev {word}=", word[::-1])


def sort(digits: str) -> Problem:
    """Asks for the digits in ascending order."""
    return Problem(Kind.SORT, f"{STOP}sort {digits}=", "".join(sorted(digits)))


def is_held_out(a: int, b: int) -> bool:
    """Whether a pair of operands is never trained on: a tenth of all pairs, in both orders."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0


def draw_problem(
    rng: random.Random, mix: Mix, *, held_out: bool, even_lengths: bool = False
) -> Problem:
    """Draws one problem.

    Args:
        rng: Advanced by the draw.
        mix: Weights of the kinds.
        held_out: Whether a sum's operands are a held-out pair; otherwise a trained one.
        even_lengths: Whether operands of one, two and three digits are equally likely, with
            some chains of carries; otherwise long operands are more likely.
    """
    (kind,) = rng.choices(tuple(Kind), mix)
    if kind is Kind.REV:
        # Few distinct letters in some words: repeated letters are what a reversal gets wrong.
        letters = rng.sample(string.ascii_lowercase, rng.choice((3, 6, 26, 26)))
        return rev("".join(rng.choices(letters, k=rng.randint(*WORD_LENS))))
    if kind is Kind.SORT:
        return sort("".join(rng.choices(string.digits, k=rng.randint(*NUM_DIGITS))))
    while True:
        a, b = _draw_operands(rng, even_lengths)
        if is_held_out(a, b) == held_out:
            return add(a, b)


def problems(seed: int, count: int, mix: Mix = EVEN_MIX) -> Iterator[Problem]:
    """Yields `count` problems whose sums are of held-out pairs, the same for the same arguments."""
    rng = random.Random(seed)
    for _ in range(count):
        yield draw_problem(rng, mix, held_out=True)


def solved_lines(seed: int, num_tokens: int) -> str:
    """Returns solved problems to put before a prompt, at least `num_tokens` bytes of them.

    Their sums are of trained pairs, so that none gives away the answer to a held-out one.
    """
    rng = random.Random(seed)
    text = ""
    while len(text) < num_tokens:
        text += draw_problem(rng, EVEN_MIX, held_out=False).line
    return text


def _draw_operands(rng: random.Random, even_lengths: bool) -> tuple[int, int]:
    if even_lengths and rng.random() < 0.15:
        return _draw_carry_chain(rng)
    weights = (1, 1, 1) if even_lengths else (1, 2, 4)
    a, b = (_draw_number(rng, n) for n in rng.choices((1, 2, 3), weights, k=2))
    return a, b


def _draw_number(rng: random.Random, num_digits: int) -> int:
    return rng.randint(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits - 1)


def _draw_carry_chain(rng: random.Random) -> tuple[int, int]:
    """Draws operands whose carry runs through most digits, such as 999 and 1 or 346 and 655."""
    num_digits = rng.choice((2, 3))
    a = _draw_number(rng, num_digits)
    b = 10**num_digits - 1 - a + rng.choice((0, 1, 1, 2, 10, 11))
    if rng.random() < 0.3:
        a, b = 10**num_digits - rng.randint(1, 3), _draw_number(rng, rng.choice((1, 2, 3)))
    if rng.random() < 0.5:
        a, b = b, a
    return min(a, MAX_OPERAND), min(b, MAX_OPERAND)
