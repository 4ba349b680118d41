"""Conversion of a tiktoken.model, as Kimi-K2 has it, to the tokenizer.json that routers read.

    python -m deploy.convert_tiktoken MODEL

reads MODEL/tiktoken.model and MODEL/tokenizer_config.json and writes MODEL/tokenizer.json, once and
before anything is served. Both encode alike: a text is cut by the same regular expression, a piece
that is a token is that token, and of two tokens side by side the pair whose union has the lowest
rank is merged first.
"""

import argparse
import base64
import binascii
import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

TOKENS, CONFIG, RESULT = "tiktoken.model", "tokenizer_config.json", "tokenizer.json"
NUM_SPECIAL = 256  # ids behind the vocabulary's; those without a name are reserved

# Kimi's, of its tokenization_kimi.py: runs of Chinese characters, words, numbers, signs, spaces.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_BEHIND}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_BEHIND}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class ConversionError(ValueError):
    """A file is not what it should be; the message says which and what to do."""


def read_ranks(path: Path) -> list[bytes]:
    """Returns the tokens of a tiktoken file by their ranks, which are their ids.

    Raises:
        ConversionError: It is no such file, a rank is missing or a byte has no token.
    """
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error) as error:
            raise ConversionError(
                f"{path}:{number}: {line[:80]!r} is not a token in base64 and its rank"
            ) from error
    if gaps := set(range(len(ranks))).difference(ranks):
        raise ConversionError(
            f"{path}: {len(ranks)} ranks, but none is {min(gaps)}: ids would move; is it whole?"
        )
    tokens = [token for _, token in sorted(ranks.items())]
    if lacking := {bytes([byte]) for byte in range(256)}.difference(tokens):
        raise ConversionError(f"{path}: {len(lacking)} bytes have no token, first {min(lacking)!r}")
    if len(set(tokens)) < len(tokens):
        raise ConversionError(f"{path}: {len(tokens) - len(set(tokens))} tokens are there twice")
    return tokens


def read_added(path: Path, num_tokens: int) -> list[AddedToken]:
    """Returns the tokens behind the vocabulary's `num_tokens`, named or reserved, in order of ids.

    Raises:
        ConversionError: It is no tokenizer_config.json, or gives a name to an id that is elsewhere.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        named = {int(number): entry for number, entry in config["added_tokens_decoder"].items()}
        specials = {number: bool(entry["special"]) for number, entry in named.items()}
        names = {number: str(entry["content"]) for number, entry in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{path}: no added_tokens_decoder with a content and a special for each id ({error!r})"
        ) from error
    ids = range(num_tokens, num_tokens + NUM_SPECIAL)
    if outside := sorted(set(names).difference(ids)):
        raise ConversionError(
            f"{path}: added_tokens_decoder names id {outside[0]}; the {num_tokens} tokens of "
            f"{TOKENS} leave {ids[0]} to {ids[-1]}: are both files of one model?"
        )
    added = [names.get(number, f"<|reserved_token_{number}|>") for number in ids]
    if len(set(added)) < len(added):
        raise ConversionError(f"{path}: two ids of added_tokens_decoder have one name")
    return [
        AddedToken(name, special=specials.get(number, True), normalized=False)
        for number, name in zip(ids, added, strict=True)
    ]


def convert(tokens: list[bytes], added: list[AddedToken]) -> Tokenizer:
    """Returns the tokenizer of these tokens, whose ids are their places.

    Raises:
        ConversionError: Of two tokens, one would hide the other.
    """
    spelling = _characters()
    names = ["".join(spelling[byte] for byte in token) for token in tokens]
    ids = {name: number for number, name in enumerate(names)}
    # Every way to make a token of two: which of them is taken, the ranks of earlier merges decide.
    merges = [
        pair
        for name in names
        for pair in sorted(
            (
                (name[:end], name[end:])
                for end in range(1, len(name))
                if name[:end] in ids and name[end:] in ids
            ),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
    ]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(tokens) + len(added):
        hidden = next(token.content for token in added if token.content in ids)
        raise ConversionError(
            f"{CONFIG}: {hidden!r} is a token of {TOKENS} already: the ids behind it would move"
        )
    return tokenizer


def _characters() -> list[str]:
    """The character that spells each byte in a byte-level tokenizer's vocabulary."""
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return [chr(256 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(256)]


def convert_folder(model: Path, output: Path) -> str:
    """Writes the tokenizer.json of a model's folder. Returns one line that says what it holds.

    Raises:
        ConversionError: A file is not what it should be, or the output is there already.
        OSError: A file cannot be read or written.
    """
    if output.exists():
        raise ConversionError(f"{output} is there already; remove it to have it made again")
    tokens = read_ranks(model / TOKENS)
    tokenizer = convert(tokens, read_added(model / CONFIG, len(tokens)))
    tokenizer.save(str(output))
    return f"{output}: {len(tokens)} tokens and {NUM_SPECIAL} added ones"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.convert_tiktoken", description=__doc__)
    parser.add_argument("model", type=Path, help=f"folder with {TOKENS} and {CONFIG}")
    parser.add_argument("--output", type=Path, help=f"instead of {RESULT} in the same folder")
    arguments = parser.parse_args()
    try:
        print(convert_folder(arguments.model, arguments.output or arguments.model / RESULT))
    except (ConversionError, OSError) as error:
        print(f"convert_tiktoken: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
