"""Text of requests and outputs: tokenizer of the model served, detokenizers, stop strings.

Only the public API uses this; the engine and the executors see token ids. Text comes as its tokens
come, in time linear in their number. It never ends with half a character: bytes that may still
become one are held back. What all calls return, end to end, is what the tokenizer makes of all the
tokens at once, with one exception, noted at WindowDetokenizer.
"""

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from router.api.chat import ChatRenderer
from router.requests.request import Int32Array

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
MAX_WINDOW_TOKENS = 16  # of which all but four make no text

ROOT = 0  # the node of StopStrings for an empty text


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
        text, held = self._decode(self._window), self._window[self._num_shown :]
        if text.endswith(REPLACEMENT) and len(held) < MAX_CHARACTER_BYTES:
            return ""
        # Each of many tokens may end a character and begin another: only the last one is open.
        of_held = self._decode(held)
        num_open = int(text.endswith(REPLACEMENT) and of_held.endswith(REPLACEMENT))
        new = text[len(self._shown) : len(text) - num_open]
        if new:
            self._window, self._shown = held, of_held[: len(of_held) - num_open]
        elif len(self._window) > MAX_WINDOW_TOKENS:
            self._window.pop()
        self._num_shown = len(self._window)
        return new


Detokenizer = ByteDetokenizer | WindowDetokenizer
"""One sequence's way from tokens to text."""


class StopStrings:
    """The stop strings of a request, found at one table look-up per character of a text in pieces.

    The strings are laid out as a trie. A position in the text is at the node that spells the
    longest end of the text which could begin a stop string, so the position says how much
    text must be held back, and which string has just been completed:

        stop strings "ab", "bcd"      text  x a b c e
                                      node  - a b bc -      ("ab" completed at b)

    Source: Aho and Corasick, "Efficient string matching", CACM 18(6), 1975.

    Args:
        strings: At least one character each.
        is_kept: Whether the one that ends a text stays in it.

    Attributes:
        completed: By node, the longest stop string that ends there; None if none does.
        num_held: By node, how many of the last characters may begin a stop string.
    """

    def __init__(self, strings: Sequence[str], *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [ROOT]  # the node of the longest proper end that is a node too
        self.completed: list[str | None] = [None]
        self.num_held = [0]
        for string in strings:
            self._add(string)
        self._link()

    def step(self, node: int, char: str) -> int:
        """Returns the node after one more character. A text starts at ROOT."""
        children = self._children
        while char not in children[node]:
            if node == ROOT:
                return ROOT
            node = self._fallback[node]
        return children[node][char]

    def _add(self, string: str) -> None:
        node = ROOT
        for depth, char in enumerate(string, start=1):
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._fallback.append(ROOT)
                self.completed.append(None)
                self.num_held.append(depth)
            node = self._children[node][char]
        self.completed[node] = string

    def _link(self) -> None:
        """Fills what a node inherits from its fallback, shortest nodes first."""
        todo = deque(self._children[ROOT].values())
        while todo:
            node = todo.popleft()
            fallback = self._fallback[node]
            if self.completed[node] is None:
                self.completed[node] = self.completed[fallback]
            if not self._children[node]:  # nothing longer begins so
                self.num_held[node] = self.num_held[fallback]
            for char, child in self._children[node].items():
                self._fallback[child] = self.step(fallback, char)
                todo.append(child)


class OutputText:
    """A sequence's TextStream, and the text that its listener has not taken yet.

    A stop string counts where its last character comes from tokens that may stop; it may begin
    before them. Of several, the one completed first ends the text, and the longest of those
    that are completed together.

    Args:
        detokenizer: Of this sequence only.
        stops: What ends the text, if anything does; shared by a request's sequences.
        silent_ids: Tokens that make no text where they come last, as the one that ends it does.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings | None = None,
        silent_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._silent_ids = silent_ids
        self._node = ROOT
        self._ready: list[str] = []
        self._held = ""  # may begin a stop string
        self._is_closed = False

    def feed(self, token_ids: Int32Array, *, may_stop: bool) -> str | None:
        """Adds tokens. Returns the stop string that they completed, if they did."""
        assert not self._is_closed, "no token follows the end"
        tokens = token_ids.tolist()
        if self._silent_ids and tokens and tokens[-1] in self._silent_ids:
            tokens.pop()
        return self._add(self._detokenizer.add(tokens), may_stop)

    def close(self) -> None:
        """Makes what was held back ready: no token follows. Harmless to call again."""
        if not self._is_closed:
            self._add(self._detokenizer.finish(), may_stop=False)
            self._ready.append(self._held)
            self._is_closed = True

    def take(self) -> str:
        """Returns the text since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _add(self, new: str, may_stop: bool) -> str | None:
        if self._stops is None:
            self._ready.append(new)
            return None
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            self._node = self._stops.step(self._node, char)
            if may_stop and (stop := self._stops.completed[self._node]) is not None:
                self._ready.append(text[: end if self._stops.is_kept else end - len(stop)])
                self._is_closed = True
                return stop
        num_ready = len(text) - self._stops.num_held[self._node]
        self._ready.append(text[:num_ready])
        self._held = text[num_ready:]
        return None


# What models of several families write between their reasoning and their answer.
REASONING_ENDS = ("</think>", "<|channel|>final<|message|>", "[/THINK]", "</seed:think>")


class Tokenizer:
    """The model's tokenizer.

    Args:
        path: A tokenizer.json as the `tokenizers` library writes it.
        chat: Makes texts of chats; None where there is no chat template.

    Attributes:
        reasoning_end: Tokens with which the model ends its reasoning; empty if none are known.

    Raises:
        ValueError: It is none.
    """

    def __init__(self, path: Path, chat: ChatRenderer | None = None) -> None:
        # Imported here: a router without a tokenizer starts without the library.
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no class of its own
            raise ValueError(
                f"tokenizer={path}: this is no tokenizer.json: {error}; give the model's own"
            ) from error
        self.chat = chat
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self.reasoning_end = self._reasoning_end()
        self._is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self._bytes_by_id = {
            skips_special: _BytesById(
                self._tokenizer.id_to_token, self._special_ids if skips_special else frozenset()
            )
            for skips_special in (True, False)
        }

    def _reasoning_end(self) -> tuple[int, ...]:
        """Returns the tokens of the first known text that begins with a token of its own."""
        added = self._tokenizer.get_added_tokens_decoder()
        for text in REASONING_ENDS:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if ids and ids[0] in added:
                return tuple(ids)
        return ()

    def encode(self, text: str, *, adds_special: bool = True) -> Int32Array:
        """Returns the tokens of a prompt, with the special ones that the tokenizer adds if asked.

        Takes about 0.3 us a character and lets other threads run meanwhile.
        """
        [encoding] = self._tokenizer.encode_batch_fast(  # `encode` keeps the GIL
            [text], add_special_tokens=adds_special
        )
        return np.array(encoding.ids, dtype=np.int32)

    def encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the tokens of texts that stand somewhere in another, without special ones."""
        encodings = self._tokenizer.encode_batch_fast(list(words), add_special_tokens=False)
        return [tuple(encoding.ids) for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skips_special: bool = True) -> str:
        """Returns the text of all tokens of an output."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skips_special)

    def decode_long(self, token_ids: Sequence[int], *, skips_special: bool) -> str:
        """Returns what `decode` does. Lets other threads run meanwhile."""
        [text] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skips_special)
        return text

    def new_text(
        self,
        stops: StopStrings | None = None,
        *,
        skips_special: bool = True,
        silent_ids: Sequence[int] = (),
    ) -> OutputText:
        """Returns an empty text, for one new sequence.

        Args:
            stops: What ends it, if anything does.
            skips_special: Whether special tokens, such as the end of the sequence, make no text.
            silent_ids: Tokens that end the output; those of them that are special make no text.
        """
        silent = frozenset() if skips_special else self._special_ids.intersection(silent_ids)
        if self._is_byte_level:
            bytes_of = self._bytes_by_id[skips_special].__getitem__
            return OutputText(ByteDetokenizer(bytes_of), stops, silent)
        decode = partial(self.decode, skips_special=skips_special)
        skipped = self._special_ids if skips_special else frozenset()
        return OutputText(WindowDetokenizer(decode, skipped.__contains__), stops, silent)


class _BytesById(dict[int, bytes]):
    """The bytes that tokens stand for, looked up when first asked for.

    A byte-level tokenizer spells each byte as a printable character; an added token that has
    any other character stands for itself.

    Source: tokenizers, pre_tokenizers/byte_level.rs, bytes_char and Decoder::decode_chain.
    """

    def __init__(self, token_of: Callable[[int], str | None], skipped_ids: frozenset[int]) -> None:
        super().__init__()
        self._token_of = token_of
        self._skipped_ids = skipped_ids
        self._byte_of = _bytes_by_character()

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None or token_id in self._skipped_ids:
            return b""
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:
            return token.encode()


def _bytes_by_character() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, 256 and up for the others in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }
