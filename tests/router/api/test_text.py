"""Text must be the same however its tokens arrive, and never contain half a character."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from router.api.text import (
    MAX_CHARACTER_BYTES,
    OutputText,
    StopStrings,
    Tokenizer,
    _bytes_by_character,
)
from router.requests.request import Int32Array
from tests.router.support import fake_engines

SAMPLE = "Grüße, 世界! 👩‍🚀 naïve\tend\n"
WORD_DECODERS = [
    decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", left=1, right=0),
        ]
    ),
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
]


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> Tokenizer:
    return fake_engines.byte_tokenizer(tmp_path, special=["<eos>"], added=["<tool>", "two words €"])


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Tokenizer:
    return words_decoded_by(WORD_DECODERS[0], tmp_path)


def words_decoded_by(decoder: decoders.Decoder, folder: Path) -> Tokenizer:
    """Words with a leading space sign, and bytes for what has no word, as Mixtral's."""
    words = ["<unk>", "<s>", "▁Hello", "▁world", "▁", "!", "wide", "▁end"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    inner.decoder = decoder
    return saved(inner, folder)


def saved(inner: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    inner.save(str(path))
    return Tokenizer(path)


def ids(*token_ids: int) -> Int32Array:
    return np.array(token_ids, dtype=np.int32)


def text_of(text: OutputText, pieces: list[list[int]]) -> list[str]:
    """Feeds the pieces one after another and returns what each made, and the end."""
    taken = []
    for piece in pieces:
        assert text.feed(ids(*piece), may_stop=False) is None
        taken.append(text.take())
    text.close()
    return [*taken, text.take()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens that stand for these bytes, whether or not they are UTF-8."""
    id_of = {tokenizer._bytes_by_id[True][token_id]: token_id for token_id in range(256)}
    return [id_of[bytes([byte])] for byte in data]


def random_pieces(rng: random.Random, token_ids: list[int]) -> list[list[int]]:
    cuts = sorted(rng.choices(range(len(token_ids) + 1), k=rng.randint(0, 6)))
    bounds = [0, *cuts, len(token_ids)]
    return [token_ids[a:b] for a, b in pairwise(bounds)]


def test_a_prompt_survives_the_way_to_tokens_and_back(byte_tokenizer: Tokenizer):
    token_ids = byte_tokenizer.encode(SAMPLE)
    assert token_ids.dtype == np.int32
    assert byte_tokenizer.decode(token_ids.tolist()) == SAMPLE


def test_an_emoji_appears_with_its_last_byte(byte_tokenizer: Tokenizer):
    token_ids = byte_tokenizer.encode("🚀").tolist()
    assert len(token_ids) == 4
    pieces = [[token_id] for token_id in token_ids]
    assert text_of(byte_tokenizer.new_text(), pieces) == ["", "", "", "🚀", ""]


def test_half_a_character_at_the_end_becomes_a_replacement(byte_tokenizer: Tokenizer):
    token_ids = byte_tokenizer.encode("a🚀").tolist()[:3]
    assert text_of(byte_tokenizer.new_text(), [token_ids]) == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_make_no_text_and_added_ones_do(byte_tokenizer: Tokenizer):
    prompt = "<eos>a<tool>two words €<eos>"
    token_ids = byte_tokenizer.encode(prompt).tolist()
    assert len(token_ids) == 5
    assert "".join(text_of(byte_tokenizer.new_text(), [token_ids])) == "a<tool>two words €"


def test_a_token_that_the_tokenizer_lacks_makes_no_text(byte_tokenizer: Tokenizer):
    assert text_of(byte_tokenizer.new_text(), [[100_000]]) == ["", ""]


@pytest.mark.parametrize("seed", range(200))
def test_pieces_of_any_bytes_join_to_what_the_tokenizer_decodes(
    byte_tokenizer: Tokenizer, seed: int
):
    """Half of the bytes are wrong UTF-8, and pieces end anywhere."""
    rng = random.Random(seed)
    data = bytearray(rng.choice([SAMPLE, "🚀" * 8, "é" * 12]).encode())
    for _ in range(rng.randint(0, 20)):
        data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), 0xF0, 0x9F, 0xE2, 0x80])
    token_ids = byte_ids(byte_tokenizer, bytes(data))
    for _ in range(rng.randint(0, 3)):
        token_ids.insert(rng.randrange(len(token_ids)), rng.choice([256, 257, 258]))

    skips = bool(seed % 2)
    text = byte_tokenizer.new_text(skips_special=skips)
    taken = text_of(text, random_pieces(rng, token_ids))
    assert "".join(taken) == byte_tokenizer.decode(token_ids, skips_special=skips)


def test_characters_across_any_number_of_tokens_are_whole(tmp_path: Path):
    data = ("世界" * 8).encode()
    parts = [data[:1], *(data[i : i + 3] for i in range(1, len(data), 3))]
    char_of = {byte: char for char, byte in _bytes_by_character().items()}
    words = ["".join(map(char_of.__getitem__, part)) for part in parts]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    pieces = [[vocab[word]] for word in words]
    taken = text_of(saved(inner, tmp_path).new_text(), pieces)
    assert "".join(taken) == data.decode()
    assert len(taken[-1]) < MAX_CHARACTER_BYTES  # the others came before


def test_a_decoder_that_looks_back_is_given_the_tokens_before(word_tokenizer: Tokenizer):
    hello, world, special = 2, 3, 1
    pieces = [[special], [hello], [special], [world], [5]]
    assert text_of(word_tokenizer.new_text(), pieces) == ["", "Hello", "", " world", "!", ""]


@pytest.mark.parametrize("seed", range(200))
def test_pieces_of_words_and_spelled_out_characters_join(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    word_tokenizer = words_decoded_by(WORD_DECODERS[seed % 2], tmp_path)
    token_ids: list[int] = []
    for _ in range(rng.randint(1, 30)):
        if rng.random() < 0.3:
            token_ids += [8 + byte for byte in rng.choice("é世🚀").encode()]
        else:
            token_ids.append(rng.randrange(1, 8))

    skips = bool(seed // 2 % 2)
    text = word_tokenizer.new_text(skips_special=skips)
    taken = text_of(text, random_pieces(rng, token_ids))
    assert "".join(taken) == word_tokenizer.decode(token_ids, skips_special=skips)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in taken)


def test_wrong_bytes_without_end_are_not_held_back_without_end(word_tokenizer: Tokenizer):
    text = word_tokenizer.new_text()
    taken = text_of(text, [[8 + 0xFF]] * 100)
    assert "".join(taken) == "\N{REPLACEMENT CHARACTER}" * 100
    assert len(max(taken, key=len)) <= 4


def test_a_stop_string_across_tokens_ends_the_text_before_it(byte_tokenizer: Tokenizer):
    text = byte_tokenizer.new_text(StopStrings(["END"]))
    assert text.feed(byte_tokenizer.encode("one E"), may_stop=True) is None
    assert text.take() == "one "
    assert text.feed(byte_tokenizer.encode("N"), may_stop=True) is None
    assert text.take() == ""
    assert text.feed(byte_tokenizer.encode("D and more"), may_stop=True) == "END"
    text.close()
    assert text.take() == ""


def test_text_that_only_began_like_a_stop_string_is_returned(byte_tokenizer: Tokenizer):
    text = byte_tokenizer.new_text(StopStrings(["END"]))
    assert text_of(text, [byte_tokenizer.encode("ENEN").tolist()]) == ["EN", "EN"]


def test_of_several_stop_strings_the_first_to_be_complete_ends_the_text(byte_tokenizer: Tokenizer):
    text = byte_tokenizer.new_text(StopStrings(["bcdef", "cd", "d"]))
    assert text.feed(byte_tokenizer.encode("abcdef"), may_stop=True) == "cd"
    assert text.take() == "ab"


def test_a_stop_string_that_ends_too_early_does_not_count(byte_tokenizer: Tokenizer):
    text = byte_tokenizer.new_text(StopStrings(["aa"]))
    assert text.feed(byte_tokenizer.encode("xaa"), may_stop=False) is None
    assert text.take() == "xa"
    assert text.feed(byte_tokenizer.encode("a"), may_stop=True) == "aa"
    assert text.take() == ""


EOS = 256


@pytest.mark.parametrize(
    ("options", "silent_ids", "expected"),
    [
        ({"skips_special": True}, [], "ab"),
        ({"skips_special": False}, [], "a<eos>b<eos>"),  # the stop tokens are kept
        ({"skips_special": False}, [EOS], "a<eos>b"),
        ({"skips_special": True}, [EOS], "ab"),
    ],
)
def test_a_special_stop_token_makes_text_where_it_is_kept(
    byte_tokenizer: Tokenizer, options: dict[str, bool], silent_ids: list[int], expected: str
):
    text = byte_tokenizer.new_text(**options, silent_ids=silent_ids)
    token_ids = byte_tokenizer.encode("a<eos>b<eos>").tolist()
    assert "".join(text_of(text, [token_ids[:3], token_ids[3:]])) == expected


def test_a_stop_token_that_is_not_special_makes_text(byte_tokenizer: Tokenizer):
    token_ids = byte_tokenizer.encode("a<tool>").tolist()
    text = byte_tokenizer.new_text(skips_special=False, silent_ids=token_ids)
    assert "".join(text_of(text, [token_ids])) == "a<tool>"


def test_half_a_character_before_a_special_token_is_replaced_and_never_cut(
    byte_tokenizer: Tokenizer,
):
    [first, *rest] = byte_tokenizer.encode("é").tolist()
    pieces = [[first], [EOS], [first], rest]
    shown = text_of(byte_tokenizer.new_text(skips_special=False), pieces)
    assert shown == ["", "\N{REPLACEMENT CHARACTER}<eos>", "", "é", ""]
    hidden = text_of(byte_tokenizer.new_text(), pieces)
    assert hidden == ["", "", "\N{REPLACEMENT CHARACTER}", "é", ""]


def test_a_stop_string_finds_special_tokens_only_where_they_make_text(byte_tokenizer: Tokenizer):
    token_ids = byte_tokenizer.encode("a<eos>b")
    stops = StopStrings(["<eos>", "eos>b"])
    assert byte_tokenizer.new_text(stops).feed(token_ids, may_stop=True) is None
    text = byte_tokenizer.new_text(stops, skips_special=False)
    assert (text.feed(token_ids, may_stop=True), text.take()) == ("<eos>", "a")


def test_a_stop_string_that_is_kept_ends_the_text(byte_tokenizer: Tokenizer):
    text = byte_tokenizer.new_text(StopStrings(["END"], is_kept=True))
    assert text.feed(byte_tokenizer.encode("one E"), may_stop=True) is None
    assert text.take() == "one "
    assert text.feed(byte_tokenizer.encode("ND and more"), may_stop=True) == "END"
    assert text.take() == "END"


@pytest.mark.parametrize("seed", range(300))
def test_stop_strings_cut_alike_wherever_tokens_end(byte_tokenizer: Tokenizer, seed: int):
    """Two letters and short strings overlap in every way; a scan of the whole text is right."""
    rng = random.Random(seed)
    whole = "".join(rng.choices("ab€", k=rng.randint(0, 30)))
    strings = ["".join(rng.choices("ab€", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
    ends = [
        (end, string)
        for end in range(len(whole) + 1)
        for string in sorted(strings, key=len, reverse=True)
        if whole[:end].endswith(string)
    ]
    expected = (whole[: ends[0][0] - len(ends[0][1])], ends[0][1]) if ends else (whole, None)

    text = byte_tokenizer.new_text(StopStrings(strings))
    taken, stop = "", None
    for piece in random_pieces(rng, byte_tokenizer.encode(whole).tolist()):
        stop = text.feed(ids(*piece), may_stop=True)
        taken += text.take()
        assert whole.startswith(taken)
        if stop is not None:
            break
    text.close()
    assert (taken + text.take(), stop) == expected


@pytest.mark.parametrize("content", ["{bad", "{}", ""])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^tokenizer={path}: this is no tokenizer.json: "):
        Tokenizer(path)
