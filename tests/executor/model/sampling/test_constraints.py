"""If these fail, an output breaks its grammar, or one bad grammar takes others down with it."""

import json
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from executor.batch.columns import Int64Array
from executor.model.sampling.constraints import Constraints, HostDrafts, clear_bits
from executor.model.sampling.sampler import Sampler
from tests.executor.support.sampling import starts
from tests.support.paths import DEMO_MODEL

VOCAB_SIZE, EOS, NEWLINE = 264, 2, 13
DIGITS = LLMatcher.grammar_from_regex("[0-9]{2,4}")
LETTERS = LLMatcher.grammar_from_regex("a[bc]")
JSON = LLMatcher.grammar_from_json_schema({"type": "object"})


def tokenizer(*eos_tokens: int, without: str = "") -> LLTokenizer:
    """The demo's, whose tokens are bytes, with these ends and less one of its characters."""
    text = json.loads((Path(DEMO_MODEL) / "tokenizer.json").read_text())
    if without:
        del text["model"]["vocab"][without]
    return LLTokenizer(json.dumps(text), n_vocab=VOCAB_SIZE, eos_token=[*eos_tokens])


@pytest.fixture(scope="module")
def bytes_tokenizer() -> LLTokenizer:
    return tokenizer(EOS)


def constraints_of(given: LLTokenizer, max_nodes: int = 1) -> Constraints:
    return Constraints(given, 8, torch.device("cpu"), max_nodes=max_nodes)


def ids(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def start(constraints: Constraints, grammars: dict[int, str], **columns: Any) -> None:
    """Starts rows that each have a grammar; empty: they have none."""
    names = sorted(set(grammars.values()) - {""})
    numbers = [1 + names.index(name) if name else 0 for name in grammars.values()]
    given = starts(VOCAB_SIZE, rows=[*grammars], grammar_of=numbers, grammars=names, **columns)
    constraints.start(given)


def begin(constraints: Constraints, rows: list[int], seq_len: int = 9, **drafts: Any) -> None:
    constraints.begin(np.array(rows), np.full(len(rows), seq_len), **drafts)


def allowed(constraints: Constraints) -> list[str]:
    """What each mask of a step lets through, as text; $ is the end, ... everything, free all but $."""
    names = {EOS: "$", **{i: chr(i - 3) for i in range(3, VOCAB_SIZE)}}
    return [
        {0: "...", 1: "free"}.get(
            VOCAB_SIZE - row.sum(), "".join(names.get(i, "?") for i in np.flatnonzero(row).tolist())
        )
        for row in ~constraints.is_out().numpy()
    ]


def gain(constraints: Constraints, rows: list[int], table: list[Any]) -> dict[int, str]:
    """Returns what is wrong with rows."""
    gained: Int64Array = np.array(table)
    failures = constraints.accept(np.array(rows), lambda: gained)
    return {} if failures is None else dict(failures.result())


def test_masks_follow_the_tokens_and_an_output_ends_only_where_its_grammar_does(
    bytes_tokenizer: LLTokenizer,
):
    constraints = constraints_of(bytes_tokenizer)
    start(constraints, {5: DIGITS, 2: "", 3: LETTERS})
    seen, failures = [], []
    for digit, letter in ("7a", "0b", "4$", "2$"):
        begin(constraints, [2, 3, 5])
        seen.append(allowed(constraints))
        ends = [EOS if each == "$" else ids(each)[0] for each in (letter, digit)]
        failures.append(gain(constraints, [2, 3, 5], [99, *ends]))
    begin(constraints, [5])

    assert seen[0] == ["a", "0123456789"]
    assert seen[1] == ["bc", "0123456789"]
    assert seen[2] == ["$", "$0123456789"]
    assert seen[3] == ["...", "$0123456789"]  # as the first has ended, in a step begun before
    assert allowed(constraints) == ["$"]
    assert failures == [{}] * 4


def test_a_row_that_starts_anew_goes_on_behind_its_output(bytes_tokenizer: LLTokenizer):
    constraints = constraints_of(bytes_tokenizer)
    for _ in range(2):  # the second time in place of the first
        output = ids('{"key":12')
        start(constraints, {0: JSON}, num_output_ids=[len(output)], output_ids=output)
        begin(constraints, [0])
        assert set("0123456789.eE,}") <= set(allowed(constraints)[0])
        assert not set('"{[$a') & set(allowed(constraints)[0])
        gain(constraints, [0], ids("}"))


def test_a_grammar_that_fails_is_a_problem_of_its_row_only():
    constraints = constraints_of(tokenizer(EOS, without="b"))
    unspellable = LLMatcher.grammar_from_regex("ab")
    start(constraints, {0: "start: nothing", 1: LETTERS, 2: unspellable, 3: DIGITS})
    begin(constraints, [0, 1, 2, 3])
    first = allowed(constraints)
    failures = gain(constraints, [0, 1, 2, 3], ids("xaax"))
    begin(constraints, [0, 1, 2, 3])

    assert first == ["...", "a", "a", "0123456789"]
    assert [*failures] == [0, 3]  # the last gained what its mask would not have let through
    assert "nothing" in failures[0]
    assert allowed(constraints)[1] == "c"
    assert [*gain(constraints, [0, 1, 2, 3], ids("xcxx"))] == [0, 2, 3]
    assert gain(constraints, [5], ids("x")) == {}  # what is wrong with others is none of its step


def test_below_min_tokens_an_output_ends_only_where_it_cannot_go_on(bytes_tokenizer: LLTokenizer):
    constraints = constraints_of(bytes_tokenizer)
    least = {
        "suppressed_until": [12, 12],
        "num_suppressed_ids": [1, 1],
        "suppressed_ids": [EOS] * 2,
    }
    output = {"num_output_ids": [2, 4], "output_ids": ids("123456")}
    start(constraints, {0: DIGITS, 1: DIGITS}, **least, **output)

    begin(constraints, [0, 1], seq_len=11)
    assert allowed(constraints) == ["0123456789", "$"]
    begin(constraints, [0, 1], seq_len=12)
    assert allowed(constraints) == ["$0123456789", "$"]


def test_an_end_that_is_text_as_well_does_not_end_an_output_early():
    """The demo model's is a newline, which JSON may have between any two of its parts."""
    constraints = constraints_of(tokenizer(EOS, NEWLINE))
    start(constraints, {0: JSON})
    begin(constraints, [0])
    assert allowed(constraints) == ["{"]
    gain(constraints, [0], ids("{"))
    begin(constraints, [0])
    assert set(allowed(constraints)[0]) == set('\t\r "}')
    gain(constraints, [0], ids("}"))
    begin(constraints, [0])
    assert allowed(constraints) == ["$\n"]
    assert gain(constraints, [0], [EOS]) == {}
    start(constraints, {0: LLMatcher.grammar_from_regex("\n")})
    begin(constraints, [0])
    assert allowed(constraints) == ["..."]
    assert len(gain(constraints, [0], [EOS])) == 1


def test_below_min_tokens_an_output_goes_on_by_a_stop_token_where_only_an_end_could_come_instead():
    constraints, stop = constraints_of(tokenizer(EOS, NEWLINE)), ids("b")
    least = {"suppressed_until": [12], "num_suppressed_ids": [1], "suppressed_ids": stop}
    start(constraints, {0: LLMatcher.grammar_from_regex("(b|\n)c")}, **least)
    begin(constraints, [0], seq_len=9)
    assert allowed(constraints) == ["b"]
    assert gain(constraints, [0], stop) == {}


def test_a_device_unpacks_masks_as_the_host_does(bytes_tokenizer: LLTokenizer):
    constraints = constraints_of(bytes_tokenizer)
    start(constraints, {0: JSON, 1: DIGITS})
    begin(constraints, [0, 1])
    assert constraints._filling is not None
    masks = constraints._filling.result()
    assert torch.equal(clear_bits(masks, VOCAB_SIZE), constraints.is_out())


# A tree in order of storage, and what may follow each of its nodes; None where that matters not.
TREE = HostDrafts(np.array([ids("1a2x3")]), np.array([[0, 0, 1, 2, 3]]))
BEHIND = ["0123456789", "0123456789", None, "$0123456789", None, "$0123456789"]


def test_each_draft_has_the_mask_that_its_path_leads_to(bytes_tokenizer: LLTokenizer):
    constraints = constraints_of(bytes_tokenizer, max_nodes=6)
    start(constraints, {0: "", 7: DIGITS})
    both = HostDrafts(*(np.repeat(part, 2, axis=0) for part in TREE))
    for _ in range(2):  # and the row is where it was
        begin(constraints, [0, 7], drafts=lambda: both)
        masks = allowed(constraints)
        assert [m for m, b in zip(masks, BEHIND, strict=True) if b] == [b for b in BEHIND if b]
    gain(constraints, [0, 7], [[1, 9, 9, 9], [2, *ids("12"), 9]])
    begin(constraints, [7])
    assert allowed(constraints) == ["$0123456789"]


def test_below_min_tokens_no_node_of_a_tree_ends_an_output(bytes_tokenizer: LLTokenizer):
    constraints = constraints_of(bytes_tokenizer, max_nodes=5)
    least = {"suppressed_until": [12], "num_suppressed_ids": [1], "suppressed_ids": [EOS]}
    start(constraints, {0: LLMatcher.grammar_from_regex("[01]{1,9}")}, **least)
    tree = HostDrafts(np.array([ids("1010")]), np.array([[0, 1, 1, 3]]))
    begin(constraints, [0], seq_len=10, drafts=lambda: tree)
    assert allowed(constraints) == ["01", "01", "$01", "$01", "$01"]


@pytest.mark.parametrize("behind", [[ids("c")[0]], [EOS]])
def test_no_token_behind_drafts_that_lead_nowhere_is_delivered(behind: list[int]):
    constraints = constraints_of(tokenizer(EOS, without="b"), max_nodes=2)
    start(constraints, {0: LLMatcher.grammar_from_regex("ab|cd")})
    drafts = HostDrafts(np.array([ids("a")]), np.array([[0]]))
    begin(constraints, [0], drafts=lambda: drafts)
    assert allowed(constraints)[0] == "ac"
    assert gain(constraints, [0], [[1, *ids("c"), 0]]) == {}  # where they are not accepted

    start(constraints, {0: LLMatcher.grammar_from_regex("ab|cd")})
    begin(constraints, [0], drafts=lambda: drafts)
    assert [*gain(constraints, [0], [[2, *ids("a"), *behind]])] == [0]


# Tokens of one or two characters; what may follow "a" and "b" differs in the second only.
PAIRS = ["$", "a", "b", "1", "x", "y", "1x", "1y"]
A_OR_B = 'start: A P "x" | B P "y"\nA: "a"\nB: "b"\nP: /[0-9]/'


def pairs_tokenizer() -> LLTokenizer:
    text = json.loads((Path(DEMO_MODEL) / "tokenizer.json").read_text())
    text["added_tokens"] = [text["added_tokens"][0] | {"id": 0, "content": "$", "special": True}]
    text["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    text["pre_tokenizer"] = text["decoder"] | {"use_regex": False}
    text["normalizer"] = text["post_processor"] = None
    vocab = {token: number for number, token in enumerate(PAIRS)}
    text["model"] = {"type": "BPE", "vocab": vocab, "merges": []}
    return LLTokenizer(json.dumps(text), n_vocab=len(PAIRS), eos_token=[0])


def allowed_pairs(constraints: Constraints) -> list[list[str]]:
    masks = ~constraints.is_out().numpy()
    return [[PAIRS[i] for i in np.flatnonzero(mask)] for mask in masks]


def test_a_mask_behind_one_draft_is_none_behind_another():
    """llguidance keeps a matcher's last mask, also where it is rolled back."""
    constraints, a, b = Constraints(pairs_tokenizer(), 1, torch.device("cpu"), max_nodes=4), 1, 2
    start(constraints, {0: A_OR_B})
    siblings = HostDrafts(np.array([[a, b, 3]]), np.array([[0, 0, 1]]))
    begin(constraints, [0], drafts=lambda: siblings)
    behind_a = ["1", "1x"]
    assert allowed_pairs(constraints) == [["a", "b"], behind_a, ["1", "1y"], ["x"]]
    chain = HostDrafts(np.array([[a, 6, 0]]), np.array([[0, 1, 2]]))
    begin(constraints, [0], drafts=lambda: chain)
    assert allowed_pairs(constraints)[:3] == [["a", "b"], behind_a, ["$"]]
    assert gain(constraints, [0], [[1, b, 0, 0, 0]]) == {}
    begin(constraints, [0])
    assert allowed_pairs(constraints) == [["1", "1y"]]


AFTER = {"num_begin_ids": [2], "begin_ids": ids("##")}


@pytest.mark.parametrize(
    ("known", "text", "num_free"), [("", "x##12", 3), ("a#", "#12", 1), ("##1", "2", 0)]
)
def test_a_grammar_begins_behind_the_first_tokens_that_say_so(
    bytes_tokenizer: LLTokenizer, known: str, text: str, num_free: int
):
    """Also of an output that the row has when it starts. Before, it only cannot end."""
    constraints = constraints_of(bytes_tokenizer)
    output = {"num_output_ids": [len(known)], "output_ids": ids(known)}
    start(constraints, {0: DIGITS}, **output, **AFTER)
    for number, each in enumerate(text):
        begin(constraints, [0])
        assert allowed(constraints)[0][-10:] == ("free" if number < num_free else "0123456789")
        assert gain(constraints, [0], ids(each)) == {}


@pytest.mark.parametrize("begin_ids", ["#", "##", "<end>", "<end of thought>"])
def test_a_grammar_begins_behind_any_number_of_tokens_that_come_one_by_one(
    bytes_tokenizer: LLTokenizer, begin_ids: str
):
    constraints = constraints_of(bytes_tokenizer)
    start(constraints, {0: DIGITS}, num_begin_ids=[len(begin_ids)], begin_ids=ids(begin_ids))
    for token_id in ids(f"xyz{begin_ids}"):
        begin(constraints, [0])
        assert allowed(constraints) == ["free"]
        gain(constraints, [0], [token_id])
    begin(constraints, [0])
    assert allowed(constraints) == ["0123456789"]


def test_below_min_tokens_a_stop_token_is_out_also_before_the_grammar_begins(
    bytes_tokenizer: LLTokenizer,
):
    constraints, stop = constraints_of(bytes_tokenizer, max_nodes=4), ids("s")
    least = {"suppressed_until": [12], "num_suppressed_ids": [1], "suppressed_ids": stop}
    start(constraints, {0: DIGITS}, **least, **AFTER)
    tree = HostDrafts(np.array([ids("xyx")]), np.array([[0, 1, 0]]))
    begin(constraints, [0], seq_len=10, drafts=lambda: tree)
    assert constraints.is_out()[:, stop[0]].tolist() == [True, True, False, True]
    begin(constraints, [0], seq_len=12)
    assert allowed(constraints) == ["free"]


def test_a_grammar_may_begin_among_drafts(bytes_tokenizer: LLTokenizer):
    constraints = constraints_of(bytes_tokenizer, max_nodes=6)
    start(constraints, {0: DIGITS}, num_output_ids=[1], output_ids=ids("#"), **AFTER)
    #                                   0 ── # ── 1 ── 2     and  0 ── x ── #
    tree = HostDrafts(np.array([ids("#x1#2")]), np.array([[0, 0, 1, 2, 3]]))
    begin(constraints, [0], drafts=lambda: tree)
    digits = "0123456789"
    assert allowed(constraints) == ["free", digits, "free", digits, "free", f"${digits}"]
    assert gain(constraints, [0], [[3, *ids("#12"), 0, 0, 0]]) == {}
    begin(constraints, [0])
    assert allowed(constraints) == [f"${digits}"]


def test_a_row_that_uses_up_automata_fails_by_itself(
    bytes_tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
):
    """Rows of a grammar share them, those that begin later, too."""
    few = LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr("executor.model.sampling.constraints.LIMITS", few)
    constraints, failures = constraints_of(bytes_tokenizer), dict[int, str]()
    grammar = LLMatcher.grammar_from_regex("[a-z]{1,99}[0-9]")
    start(constraints, {0: grammar, 1: grammar})
    while not failures:
        begin(constraints, [0])
        failures = gain(constraints, [0], ids("a"))
    assert "too many states" in failures[0]
    for row in (1, 2):
        if row == 2:
            start(constraints, {2: grammar})  # on new ones that others will share
        begin(constraints, [row])
        assert allowed(constraints) == ["abcdefghijklmnopqrstuvwxyz"]
        assert gain(constraints, [row], ids("a")) == {}
    assert not constraints._rows[2].is_renewed


def test_an_output_to_go_on_from_that_is_wrong_has_no_other_grammar_built_anew(
    bytes_tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
):
    """A caller chose it, and others use theirs."""
    constraints = constraints_of(bytes_tokenizer)
    built, build = list[str](), constraints._build
    monkeypatch.setattr(constraints, "_build", lambda g: built.append(g) or build(g))
    start(constraints, {0: DIGITS})
    for row in (1, 2):
        start(constraints, {row: LETTERS}, num_output_ids=[1], output_ids=ids("7"))
        begin(constraints, [0, row])
        assert allowed(constraints) == ["0123456789", "..."]
        assert [*gain(constraints, [0, row], ids("1a"))] == [row]
    start(constraints, {3: DIGITS})
    begin(constraints, [3])
    assert allowed(constraints) == ["0123456789"]
    assert built.count(DIGITS) == 1


def test_only_steps_that_need_a_grammar_wait_until_it_is_built(
    bytes_tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
):
    constraints, never = constraints_of(bytes_tokenizer), Future[LLMatcher]()
    build = constraints._build
    monkeypatch.setattr(constraints, "_build", lambda g: never if g == LETTERS else build(g))
    monkeypatch.setattr("executor.model.sampling.constraints.MAX_WAIT_S", 0.0)
    assert constraints._keep(DIGITS).result()
    start(constraints, {0: LETTERS, 1: DIGITS})
    begin(constraints, [1])
    assert allowed(constraints) == ["0123456789"]
    begin(constraints, [0, 1])
    assert allowed(constraints) == ["...", "0123456789"]
    assert gain(constraints, [0, 1], ids("a1")) == {0: "its grammar was not built within 0 s"}


def test_an_output_with_too_many_readings_ends(
    bytes_tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
):
    constraints = constraints_of(bytes_tokenizer)
    monkeypatch.setattr("executor.model.sampling.constraints.MAX_ACCEPT_S", -1.0)
    start(constraints, {0: DIGITS})
    begin(constraints, [0])
    assert "too many ways" in gain(constraints, [0], ids("1"))[0]


def test_an_output_to_go_on_from_with_too_many_readings_fails_by_itself(
    bytes_tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
):
    """A caller chose it: to read all of it would take this executor minutes, and its group with it."""
    monkeypatch.setattr("executor.model.sampling.constraints.MAX_READ_S", 0.05)
    constraints, output = constraints_of(bytes_tokenizer), ids("a" * 4000 + "12")
    grammar = LLMatcher.grammar_from_lark('start: s\ns: s s | "a"')
    grammars = {0: grammar, 1: DIGITS}
    start(constraints, grammars, num_output_ids=[4000, 2], output_ids=output)
    begin(constraints, [0, 1])
    assert allowed(constraints)[1] == "$0123456789"
    problems = gain(constraints, [0, 1], ids("a3"))
    assert [*problems] == [0]
    assert "too many ways" in problems[0]


def chain_of_rules(count: int) -> str:
    names = [
        f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop"))
        for number in range(count)
    ]
    rules = [f"{rule}:{following}" for rule, following in pairwise(names)]
    return "\n".join([f"start:{names[0]}", *rules, f'{names[-1]}:"ab"'])


def test_rules_that_go_on_in_one_another_take_no_executor_down(bytes_tokenizer: LLTokenizer):
    constraints = constraints_of(bytes_tokenizer)
    grammar = LLMatcher.grammar_from_lark(chain_of_rules(6000))
    start(constraints, {0: grammar})
    begin(constraints, [0])
    assert allowed(constraints) == ["a"]
    assert gain(constraints, [0], ids("a")) == {}
    begin(constraints, [0])
    assert allowed(constraints) == ["b"]


def test_constrained_rows_sample_what_is_allowed_and_others_what_they_would(
    bytes_tokenizer: LLTokenizer,
):
    columns: dict[str, Any] = {"rows": range(4), "temperature": [0.0, 0.0, 1.5, 1.5]}
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    rows, seq_lens, picked = np.arange(4), np.full(4, 5), []
    for is_constrained in (False, True):
        sampler = Sampler(8, VOCAB_SIZE, constraints=constraints_of(bytes_tokenizer))
        if is_constrained:
            columns |= {"grammars": [DIGITS], "grammar_of": [1, 0, 1, 0]}
        sampler.start(starts(VOCAB_SIZE, **columns))
        assert sampler.constraints is not None
        sampler.constraints.begin(rows, seq_lens)
        picked.append(sampler.sample(logits, rows, seq_lens).tolist())

    digits = ids("0123456789")
    assert picked[1][0] == digits[int(logits[0, digits].argmax())]
    assert picked[1][2] in digits
    assert picked[0][1::2] == picked[1][1::2]
