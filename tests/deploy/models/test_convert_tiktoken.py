"""Conversion of tiktoken files: the same ids as tiktoken's own rule gives, and the text again."""

import base64
import json
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer

from deploy.convert_tiktoken import (
    NUM_SPECIAL,
    PATTERN,
    ConversionError,
    convert,
    convert_folder,
    read_added,
    read_ranks,
)

CORPUS = (
    "The cat's hat isn't the CAT'S hat; they'll say HelloWorld 1234567 times.\n\n"
    "世界你好,世界! Grüße aus Köln: naïve café\t👩‍🚀🚀🚀  ab世ab Ελλάδα привет\r\n"
    "    def f(x):\n        return x**2  # 数学 ok e\u0301\n \u00a0\u3000\u0085 ²½ⅷ   "
)
BYTES = [bytes([byte]) for byte in range(256)]


def trained(num_merges: int) -> list[bytes]:
    """The 256 bytes, and the commonest pairs of the corpus."""
    tokens, words = list(BYTES), [split(piece.encode()) for piece in pieces_of(CORPUS)]
    for _ in range(num_merges):
        counts = Counter(pair for word in words for pair in pairwise(word))
        [(best, _)] = counts.most_common(1)
        tokens.append(b"".join(best))
        words = [merged(word, best) for word in words]
    return list(dict.fromkeys(tokens))


def arbitrary(seed: int) -> list[bytes]:
    """Tokens of two letters in any order: some that no merge makes, many that overlap themselves."""
    rng = random.Random(seed)
    more = {bytes(rng.choices(b"ab", k=rng.randint(2, 5))) for _ in range(12)}
    tokens = [*BYTES, *sorted(more)]
    rng.shuffle(tokens)
    return tokens


def split(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


def merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    result: list[bytes] = []
    for part in word:
        if result and (result[-1], part) == pair:
            result[-1] = b"".join(pair)
        else:
            result.append(part)
    return result


def pieces_of(text: str) -> list[str]:
    return regex.findall(PATTERN, text, flags=regex.VERSION1)


def encoded(text: str, ranks: dict[bytes, int]) -> list[int]:
    """The ids by tiktoken's rule: the lowest rank first, the leftmost of equal ones."""
    ids = []
    for piece in pieces_of(text):
        parts = [data] if (data := piece.encode()) in ranks else split(data)
        while True:
            unions = [a + b for a, b in pairwise(parts)]
            found = [(ranks[union], at) for at, union in enumerate(unions) if union in ranks]
            if not found:
                break
            _, at = min(found)
            parts[at : at + 2] = [unions[at]]
        ids += [ranks[part] for part in parts]
    return ids


def added_config(tokens: list[bytes], **others: object) -> str:
    first = len(tokens)
    named = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|im_end|>", "special": True},
        str(first + 9): {"content": "<think>", "special": False},
    }
    return json.dumps({"added_tokens_decoder": named | others})


def folder_of(tokens: list[bytes], path: Path, **others: object) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (path / "tiktoken.model").write_text("".join(lines))
    (path / "tokenizer_config.json").write_text(added_config(tokens, **others))
    return path


@pytest.fixture(scope="module")
def trained_tokens() -> list[bytes]:
    return trained(120)


@pytest.fixture(scope="module")
def tokenizer(trained_tokens: list[bytes]) -> Tokenizer:
    return convert(trained_tokens, [])


@pytest.mark.parametrize("seed", range(50))
def test_texts_have_the_ids_of_tiktoken_and_come_back(
    trained_tokens: list[bytes], tokenizer: Tokenizer, seed: int
):
    rng = random.Random(seed)
    text = "".join(
        CORPUS[start : start + rng.randint(1, 12)]
        for start in rng.choices(range(len(CORPUS)), k=rng.randint(1, 20))
    )
    ids = tokenizer.encode(text).ids
    assert ids == encoded(text, {token: rank for rank, token in enumerate(trained_tokens)})
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("seed", range(100))
def test_any_ranks_merge_as_tiktoken_merges(seed: int):
    tokens = arbitrary(seed)
    tokenizer, rng = convert(tokens, []), random.Random(seed)
    for _ in range(20):
        text = "".join(rng.choices("ab", k=rng.randint(1, 24)))
        expected = encoded(text, {token: rank for rank, token in enumerate(tokens)})
        assert tokenizer.encode(text).ids == expected


def test_words_and_chinese_characters_are_cut_apart():
    assert pieces_of("I'll say 你好ab  1234\n") == (
        ["I'll", " say", " ", "你好", "ab", " ", " ", "123", "4", "\n"]
    )


def test_the_command_writes_named_and_reserved_tokens_at_their_ids(tmp_path: Path):
    tokens = trained(3)
    folder, first = folder_of(tokens, tmp_path), len(tokens)
    command = [sys.executable, "-m", "deploy.convert_tiktoken", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{first} tokens and {NUM_SPECIAL} added ones" in done.stdout

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "[BOS]the<think><|im_end|>"
    ids = tokenizer.encode(text).ids
    assert (ids[0], ids[-2:]) == (first, [first + 9, first + 2])
    assert tokenizer.decode(ids) == "the<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id(f"<|reserved_token_{first + 1}|>") == first + 1
    assert tokenizer.get_vocab_size() == first + NUM_SPECIAL

    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (1, "")
    assert "is there already" in again.stderr


@pytest.mark.parametrize(
    ("tokens", "others", "problem"),
    [
        (BYTES[:255], {}, r"1 bytes have no token, first b'\\xff'"),
        ([*BYTES, b"a"], {}, "1 tokens are there twice"),
        (BYTES, {"7": {"content": "x", "special": True}}, "names id 7; .* leave 256 to 511"),
        (BYTES, {"300": {"content": "[BOS]", "special": True}}, "two ids .* have one name"),
        (BYTES, {"300": {"content": "!", "special": True}}, "'!' is a token of tiktoken.model"),
        (BYTES, {"300": {"content": "x"}}, "no added_tokens_decoder with"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tokens: list[bytes], others: dict[str, object], problem: str, tmp_path: Path
):
    folder_of(tokens, tmp_path, **others)
    with pytest.raises(ConversionError, match=problem):
        convert_folder(tmp_path, tmp_path / "tokenizer.json")
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("QQ== 0\nQg== 2\n", "2 ranks, but none is 1"),
        ("QQ== 0\nQQ\n", ":2: b'QQ' is not a token"),
        ("Q 0\n", ":1: b'Q 0' is not a token"),
    ],
)
def test_lines_that_are_no_ranks_are_refused(text: str, problem: str, tmp_path: Path):
    path = tmp_path / "tiktoken.model"
    path.write_text(text)
    with pytest.raises(ConversionError, match=problem):
        read_ranks(path)


def test_a_config_that_is_no_json_is_refused(tmp_path: Path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{")
    with pytest.raises(ConversionError, match="added_tokens_decoder"):
        read_added(path, 256)
