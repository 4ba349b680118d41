"""Detokenizers: tokens to text as they come, in time linear in their number.

Neither kind ever returns half a character: bytes that may still become one are held back. What
all calls return, end to end, is what the tokenizer makes of all the tokens at once, with one
exception, noted at WindowDetokenizer.
"""

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
MAX_WINDOW_TOKENS = 16  # of which all but four make no text


class ByteDetokenizer:
    """For tokenizers whose tokens stand for bytes: GPT-2's family, and most of today's.

    Args:
        bytes_of: The bytes of a token.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens completed."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        """Returns what was held back. Nothing is added afterwards."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decodes the last few tokens again with each new one.

    A decoder may look back, for instance to drop the space before the first word. So a token is
    decoded behind the tokens of the last piece of text, and that piece is cut off.

    A tokenizer that spells out unknown characters as byte tokens gives up on a whole run of them
    if one is wrong. Here the characters before the wrong byte have been returned by then.

    Args:
        decode: Text of some tokens, by the tokenizer.
        is_skipped: Whether a token never makes text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_skipped: Callable[[int], bool]
    ) -> None:
        self._decode = decode
        self._is_skipped = is_skipped
        self._window: list[int] = []
        self._num_shown = 0  # tokens of the window whose text has been returned
        self._shown = ""  # that text

    def add(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens completed."""
        return "".join([self._add(token) for token in token_ids if not self._is_skipped(token)])

    def finish(self) -> str:
        """Returns what was held back. Nothing is added afterwards."""
        return self._decode(self._window)[len(self._shown) :]

    def _add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_shown
        if text.endswith(REPLACEMENT) and num_held < MAX_CHARACTER_BYTES:
            return ""
        new = text[len(self._shown) :]
        if new:
            self._window = self._window[self._num_shown :]
            self._shown = self._decode(self._window)
        elif len(self._window) > MAX_WINDOW_TOKENS:
            self._window.pop()
        self._num_shown = len(self._window)
        return new


Detokenizer = ByteDetokenizer | WindowDetokenizer
"""One sequence's way from tokens to text."""
