"""Tokenizer of the model served: text to tokens and back, by its tokenizer.json.

Only the public API uses this; the engine and the executors see token ids.
"""

import io
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from router.api.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.api.text.output_text import OutputText
from router.api.text.stop_strings import StopStrings
from router.requests.request import Int32Array

TOKENIZER_FILE = "tokenizer.json"
# What stands beside tokenizer.json in a checkpoint and says how text is made and read.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "vocab.json",
)
_TIME = (1980, 1, 1, 0, 0, 0)  # the same for all, so that equal files make an equal archive


class Tokenizer:
    """The model's tokenizer.

    Special tokens, such as the end of the sequence, make no text.

    Args:
        path: A tokenizer.json as the `tokenizers` library writes it.
    """

    def __init__(self, path: Path) -> None:
        # Imported here: a router without a tokenizer starts without the library.
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self._bytes_by_id = _BytesById(self._tokenizer.id_to_token, self._special_ids)

    def encode(self, text: str) -> Int32Array:
        """Returns the tokens of a prompt, with the special ones that the tokenizer adds.

        Takes about 0.3 us a character and lets other threads run meanwhile.
        """
        [encoding] = self._tokenizer.encode_batch_fast([text])  # `encode` keeps the GIL
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of all tokens of an output."""
        return self._tokenizer.decode(token_ids)

    def new_text(self, stops: StopStrings | None = None) -> OutputText:
        """Returns an empty text, for one new sequence."""
        return OutputText(self._new_detokenizer(), stops)

    def _new_detokenizer(self) -> Detokenizer:
        if self._is_byte_level:
            return ByteDetokenizer(self._bytes_by_id.__getitem__)
        return WindowDetokenizer(self.decode, self._special_ids.__contains__)


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


def zip_tokenizer(tokenizer_file: Path) -> bytes:
    """Returns a zip file of the tokenizer and of what stands beside it, for a gateway without it.

    Args:
        tokenizer_file: The tokenizer's file; in the archive its name is tokenizer.json.

    Raises:
        OSError: It cannot be read.
    """
    paths = {name: tokenizer_file.parent / name for name in COMPANIONS}
    paths = {name: path for name, path in paths.items() if path.is_file()}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, path in {TOKENIZER_FILE: tokenizer_file, **paths}.items():
            entry = zipfile.ZipInfo(name, date_time=_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, path.read_bytes())
    return archive.getvalue()
