"""A sampler that is off by a little answers fluently and wrongly, so each parameter is held
against a plain version, Transformers' own where it has one."""

from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.read_step import PARAMETERS, RowStarts
from executor.model.sampling.fixed_shape import TorchFilters
from executor.model.sampling.logits import (
    cut_scores,
    draw,
    probabilities,
    score,
    uniform_samples,
    uniform_samples_on_host,
)
from executor.model.sampling.sampler import PICK_WIDTH, Sampler
from tests.executor.support.chi_square import p_value
from tests.executor.support.sampling import starts

VOCAB_SIZE = 20
WARPERS = {
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
}


# What requests ask for, by row.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "wide top_k": {"temperature": 1.0, "top_k": 200},
    "top_p": {"temperature": 0.7, "top_p": 0.6},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "all filters": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "greedy and biased": {"bias_ids": [3, 4], "biases": [50.0, -50.0]},
    "biased": {"temperature": 1.0, "bias_ids": [3, 4], "biases": [2.0, -50.0]},
    "suppressed": {"temperature": 1.0, "suppressed_until": 100, "suppressed_ids": [1, 2]},
    "penalized": {
        "temperature": 1.0,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "prompt_ids": [5, 6],
        "output_ids": [7, 8, 8],
    },
}
COUNTED = {  # columns with several values of a row, and the column that counts them
    "bias_ids": "num_biases",
    "biases": "num_biases",
    "suppressed_ids": "num_suppressed_ids",
    "prompt_ids": "num_prompt_ids",
    "output_ids": "num_output_ids",
    "allowed_ids": "num_allowed_ids",
    "banned_lens": "num_banned",
}
DEFAULTS = {"top_p": 1.0, "repetition_penalty": 1.0}


def starts_of(
    kinds: list[dict[str, Any]], vocab_size: int = VOCAB_SIZE, rows: Any = None
) -> RowStarts:
    """Returns what starts a row for each kind of request, seeded by the row if it says no seed."""
    columns: dict[str, Any] = {
        "rows": range(len(kinds)) if rows is None else rows,
        "seed": [kind.get("seed", 11 + i) for i, kind in enumerate(kinds)],
    }
    for name in sorted({name for kind in kinds for name in kind} - {"seed"}):
        if name in COUNTED or name == "banned_ids":  # which banned_lens counts
            columns[name] = [value for kind in kinds for value in kind.get(name, [])]
        if name in COUNTED:
            columns[COUNTED[name]] = [len(kind.get(name, [])) for kind in kinds]
        elif name not in columns:
            columns[name] = [kind.get(name, DEFAULTS.get(name, 0)) for kind in kinds]
    return starts(vocab_size, **columns)


def sampler_of(kinds: list[dict[str, Any]], vocab_size: int = VOCAB_SIZE) -> Sampler:
    """Returns a sampler with a row of each kind."""
    sampler = Sampler(len(kinds), vocab_size)
    sampler.start(starts_of(kinds, vocab_size))
    return sampler


def sample_one(logits: torch.Tensor, *, seq_len: int = 0, calls: int = 1, **kind: Any) -> list[int]:
    """Returns the tokens of ``calls`` consecutive steps of one row with the same logits."""
    sampler, row = sampler_of([kind], len(logits)), np.array([0])
    return [int(sampler.sample(logits[None], row, row + seq_len + i)[0]) for i in range(calls)]


def random_logits(vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 3 * PICK_WIDTH])
@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_k": 200},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_samples_follow_the_distribution_that_transformers_would_sample_from(
    columns: dict[str, Any], vocab_size: int
):
    import transformers  # seconds

    count = 4096
    logits = random_logits(vocab_size)
    expected = logits[None].clone()
    for name, value in columns.items():
        expected = getattr(transformers, WARPERS[name])(value)(
            torch.zeros(1, 0, dtype=torch.long), expected
        )
    sampler = sampler_of([{"temperature": 1.0, **columns}] * count, vocab_size)

    tokens = sampler.sample(logits.expand(count, -1), np.arange(count), np.full(count, 7))

    assert p_value(tokens, expected.softmax(-1)[0]) > 0.001


@pytest.mark.parametrize("temperature", [0, 1e-38])
def test_no_and_tiny_temperature_take_the_likeliest_token(temperature: float):
    logits = random_logits()
    assert sample_one(logits, temperature=temperature) == [int(logits.argmax())]


@pytest.mark.parametrize("penalty", [1.7, 0.4])
def test_repetition_penalty_equals_transformers(penalty: float):
    from transformers import RepetitionPenaltyLogitsProcessor  # seconds

    logits = random_logits()
    prompt, output = [3, 5, 5, 8], [1, 8]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([prompt + output]), logits[None].clone())[0]

    edited = edited_logits(logits, repetition_penalty=penalty, prompt_ids=prompt, output_ids=output)

    torch.testing.assert_close(edited, expected)


def edited_logits(logits: torch.Tensor, **kind: Any) -> torch.Tensor:
    return edited_row(sampler_of([{}, kind]), logits, 1, 0)


def edited_row(sampler: Sampler, logits: torch.Tensor, row: int, seq_len: int) -> torch.Tensor:
    stages = sampler._stages_at(np.array([row]), np.array([seq_len]))
    return sampler._edit(logits[None].clone(), stages, torch.tensor([row]))[0]


@pytest.mark.parametrize(
    ("kind", "added"),
    [
        (
            {
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "prompt_ids": [2, 4],
                "output_ids": [4, 9, 4, 4],
            },
            {4: -0.5 - 3 * 0.25, 9: -0.5 - 0.25},
        ),
        ({"bias_ids": [2, 7], "biases": [1.5, -4]}, {2: 1.5, 7: -4}),
        (
            {"allowed_ids": [2, 7], "bias_ids": [7, 9], "biases": [1.5, 4]},
            {token: -torch.inf for token in range(VOCAB_SIZE) if token not in (2, 7)} | {7: 1.5},
        ),
    ],
    ids=["presence counts once and frequency each time", "biases", "allowed tokens"],
)
def test_what_is_added_to_logits(kind: dict[str, Any], added: dict[int, float]):
    logits = random_logits()
    expected = logits.clone()
    for token, value in added.items():
        expected[token] += value
    torch.testing.assert_close(edited_logits(logits, **kind), expected)


@pytest.mark.parametrize("output", [[], [5], [4, 5], [3, 4, 5], [9, 3, 4, 5]])
def test_the_last_token_of_a_banned_sequence_is_lowered_behind_the_others(output: list[int]):
    sequences = [[5, 1], [4, 5, 2], [3, 4, 5, 6], [6, 4, 5, 7], [5, 5]]
    kind = {
        "banned_lens": [len(ids) for ids in sequences],
        "banned_ids": [token for ids in sequences for token in ids],
        "output_ids": output,
    }
    logits = random_logits()
    lowered = {ids[-1] for ids in sequences if output[1 - len(ids) :] == ids[:-1]}
    edited = edited_logits(logits, **kind)
    assert {t for t in range(VOCAB_SIZE) if edited[t] < -1e8} == lowered
    others = [token for token in range(VOCAB_SIZE) if token not in lowered]
    assert torch.equal(edited[others], logits[others])


def test_what_a_row_samples_stands_before_its_next_token():
    logits = torch.zeros(VOCAB_SIZE)
    logits[[3, 4, 5]] = torch.tensor([3.0, 2.0, 1.0])
    banned = {"banned_lens": [2, 3], "banned_ids": [3, 3, 3, 4, 3]}
    tokens = sample_one(logits, calls=6, **banned)
    assert tokens == [3, 4, 4, 3, 4, 4]
    resumed = sample_one(logits, seq_len=3, calls=3, output_ids=tokens[:3], **banned)
    assert resumed == tokens[3:]
    only = sample_one(logits, calls=3, allowed_ids=[3], **banned)
    assert only == [3, 3, 3]  # where nothing else may come


def test_sampled_tokens_count_as_output():
    logits = torch.zeros(VOCAB_SIZE)
    tokens = sample_one(logits, calls=VOCAB_SIZE, presence_penalty=1.0)
    assert sorted(tokens) == list(range(VOCAB_SIZE))


def test_a_row_that_starts_again_forgets_what_it_held():
    def kind(offset: int) -> dict[str, Any]:
        return {
            "repetition_penalty": 1.5,
            "presence_penalty": 1.0,
            "bias_ids": [offset],
            "biases": [3.0],
            "allowed_ids": range(offset, offset + 6),
            "banned_lens": [2],
            "banned_ids": [offset + 3, offset + 4],
            "suppressed_ids": [offset + 1],
            "suppressed_until": 100,
            "prompt_ids": [offset + 2],
            "output_ids": [offset + 3],
        }

    logits = random_logits()[None]
    fresh = sampler_of([kind(10)])
    used = sampler_of([{**kind(0), "scores_output": 1, "num_top_logprobs": 4}])
    used.sample(logits, np.array([0]), np.array([3]))

    used.start(starts_of([kind(10)]))

    edited = [edited_row(sampler, logits[0], 0, 3) for sampler in (used, fresh)]
    assert torch.equal(*edited)
    assert not used.scores_output[0]
    assert used.num_top_logprobs[0] == 0


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).expand(3, -1)
    edge_samples = torch.tensor([0.0, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    assert draw(logits, torch.zeros(3), edge_samples).tolist() == [1, 3, 3]


def test_a_preempted_row_goes_on_as_if_nothing_had_happened():
    logits = random_logits()
    kind: dict[str, Any] = {
        "temperature": 1.3,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "prompt_ids": [1, 2],
        "seed": 2**64 - 5,
    }
    whole = sample_one(logits, seq_len=2, calls=12, **kind)
    first, rest = whole[:5], whole[5:]
    resumed = sample_one(logits, seq_len=7, calls=7, output_ids=first, **kind)
    assert resumed == rest


def test_a_sequence_samples_alike_in_any_batch():
    """Kinds of rows go through different code together; none may notice the others."""
    generator = torch.Generator().manual_seed(1)
    kinds, vocab_size = list(KINDS.values()) * 4, 300
    count = len(kinds)
    logits = torch.randn(count, vocab_size, generator=generator)
    together, alone = (sampler_of(kinds, vocab_size) for _ in range(2))
    rows, seq_lens = np.arange(count), np.arange(count) * 2
    expected = together.sample(logits, rows, seq_lens).tolist()

    order = torch.randperm(count, generator=generator).numpy()
    tokens = {
        int(row): alone.sample(logits[[row]], order[[i]], seq_lens[[row]]).item()
        for i, row in enumerate(order)
    }

    assert [tokens[row] for row in range(count)] == expected
    assert alone.last_tokens.tolist() == expected


@pytest.mark.parametrize("columns", [{}, {"top_k": 7}, {"top_p": 0.9}])
def test_rows_of_one_kind_each_draw_their_own_sample(columns: dict[str, Any]):
    count = 30
    logits = random_logits().expand(count, -1)
    rows, seq_lens = np.arange(count), np.arange(count) * 3 + 1
    together, alone = (sampler_of([{"temperature": 1.0, **columns}] * count) for _ in range(2))
    tokens = together.sample(logits, rows, seq_lens).tolist()
    assert tokens == [
        alone.sample(logits[[row]], rows[[row]], seq_lens[[row]]).item() for row in rows
    ]
    assert len(set(tokens)) > 3


def test_what_is_on_the_device_already_samples_like_what_is_not():
    kinds = [{"temperature": 1.0, "seed": seed} for seed in (2**64 - 1, 2**63)]
    kinds += list(KINDS.values())
    count = len(kinds)
    plain, staged = Sampler(count + 2, VOCAB_SIZE), Sampler(count + 2, VOCAB_SIZE)
    rows, seq_lens = np.arange(count)[::-1] + 2, np.arange(count) * 3 + 2
    begun, logits = starts_of(kinds, rows=rows), several(count)
    plain.start(begun)
    at = torch.from_numpy(rows.copy())
    staged.start(begun, at, torch.from_numpy(begun.packed_parameters))
    for step in range(20):
        expected = plain.sample(logits, rows, seq_lens + step)
        positions = torch.from_numpy(seq_lens + step)
        assert torch.equal(staged.pick(logits, rows, seq_lens + step, at, positions), expected)
        assert torch.equal(staged.sample(logits, rows, seq_lens + step, at), expected)
    assert torch.equal(staged.last_tokens, plain.last_tokens)
    assert torch.equal(staged._parameters, plain._parameters)
    held = {name: plain.parameters[name][at] for name in PARAMETERS.names or ()}
    seeds = [kind.get("seed", 11 + i) for i, kind in enumerate(kinds)]
    assert [seed % 2**64 for seed in held.pop("seed").tolist()] == seeds
    for name, column in held.items():
        asked = [kind.get(name, DEFAULTS.get(name, 0)) for kind in kinds]
        assert column.tolist() == torch.tensor(asked, dtype=column.dtype).tolist(), name


def test_a_row_is_plain_again_once_it_is_long_enough_or_starts_anew():
    logits, rows = random_logits()[None], np.array([0])
    likeliest = int(logits.argmax())
    sampler = sampler_of([{"suppressed_until": 5, "suppressed_ids": [likeliest]}])
    assert sampler.sample(logits, rows, np.array([4])).item() != likeliest
    assert sampler.sample(logits, rows, np.array([5])).item() == likeliest
    sampler.start(starts_of([{}]))
    assert sampler.sample(logits, rows, np.array([0])).item() == likeliest


def test_bfloat16_logits_sample_as_their_float32_values():
    logits = random_logits().bfloat16()
    kind = {"temperature": 1.0, "top_p": 0.9, "seed": 4}
    assert sample_one(logits, **kind) == sample_one(logits.float(), **kind)


def test_uniform_samples_equal_splitmix64_in_plain_integers():
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    pairs = [(0, 0), (1, 0), (2**64 - 1, 5), (2**63, 100_000), (12345, 77)]
    expected = [
        (mix((mix((seed + gamma) & mask) + (position + 1) * gamma) & mask) >> 12) / 2**52
        for seed, position in pairs
    ]
    seeds = torch.from_numpy(np.array([seed for seed, _ in pairs], np.uint64).view(np.int64))
    positions = torch.tensor([position for _, position in pairs])
    assert uniform_samples(seeds, positions).tolist() == expected
    assert uniform_samples_on_host(seeds.numpy(), positions.numpy()).tolist() == expected


def test_uniform_samples_are_uniform_over_seeds_and_over_positions():
    count = 20_000
    ramp, fixed = torch.arange(count), torch.full((count,), 3)
    for uniform in (uniform_samples(ramp, fixed), uniform_samples(fixed, ramp)):
        assert p_value((uniform * 50).long(), torch.full((50,), 1 / 50)) > 0.001
        neighbours = (uniform[:-1] * 7).long() * 7 + (uniform[1:] * 7).long()
        assert p_value(neighbours[::2], torch.full((49,), 1 / 49)) > 0.001


def scores_of(
    logits: torch.Tensor, token_ids: list[list[int]], num_top: list[int], num_given: list[int]
) -> Any:
    """Returns what ``cut_scores`` does."""
    tops = np.array(num_top)
    found = score(logits, torch.tensor(token_ids), tops).numpy()
    return cut_scores(found, tops, np.array(num_given))


def test_scores_are_log_probabilities_of_the_untouched_logits():
    logits = torch.stack([random_logits(seed=seed) for seed in range(3)])
    expected = logits.log_softmax(-1)

    ids = [[4, 9, 0], [0, 1, 2], [7, 0, 0]]
    logprobs, top_ids, top_logprobs, given = scores_of(logits, ids, [2, 0, 3], [1, 2, 0])

    likeliest = torch.cat([expected[0].topk(2)[0], expected[2].topk(3)[0]])
    np.testing.assert_allclose(logprobs, expected[[0, 1, 2], [4, 0, 7]], rtol=1e-5)
    assert top_ids.tolist() == [*expected[0].topk(2)[1], *expected[2].topk(3)[1]]
    np.testing.assert_allclose(top_logprobs, likeliest, rtol=1e-5)
    np.testing.assert_allclose(given, expected[[0, 1, 1], [9, 1, 2]], rtol=1e-5)


def test_which_of_equally_likely_tokens_are_named_does_not_depend_on_what_others_want():
    logits = torch.zeros(2, 2000)
    alone = scores_of(logits[:1], [[4]], [2], [0])[1]
    beside = scores_of(logits, [[4], [4]], [2, 20], [0, 0])[1]
    assert beside[:2].tolist() == alone.tolist()


def test_a_row_without_any_finite_logit_still_gives_a_token_of_the_vocabulary():
    logits = torch.full((VOCAB_SIZE,), torch.nan)
    for kind in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}):
        [token] = sample_one(logits, **kind)
        assert 0 <= token < VOCAB_SIZE


def test_filters_for_all_rows_take_the_same_tokens_where_nothing_is_filtered():
    """On a GPU all rows go through the same stages; greedy and plain random rows must not differ."""
    logits = torch.cat([random_logits(seed=seed).view(1, -1) for seed in range(8)])
    rows, seq_lens = np.arange(8), np.arange(3, 11)
    columns = {"rows": rows, "temperature": [0.0, 1.0] * 4, "seed": rows}
    tokens = []
    for filters in (None, TorchFilters()):
        sampler = Sampler(8, VOCAB_SIZE, filters=filters)
        sampler.start(starts(**columns))
        tokens.append(sampler.sample(logits, rows, seq_lens).tolist())
    assert tokens[0] == tokens[1]


def test_filters_for_all_rows_keep_each_row_to_its_own_top_k():
    logits = torch.arange(VOCAB_SIZE).float().repeat(64, 1)
    rows, top_k = np.arange(64), np.array([1, 3] * 32)
    sampler = Sampler(64, VOCAB_SIZE, filters=TorchFilters())
    sampler.start(starts(rows=rows, temperature=[50.0] * 64, top_k=top_k, seed=rows))
    tokens = sampler.sample(logits, rows, rows).numpy()
    assert (tokens >= VOCAB_SIZE - top_k).all()
    assert set(tokens[1::2].tolist()) == {VOCAB_SIZE - 3, VOCAB_SIZE - 2, VOCAB_SIZE - 1}


# ---- several tokens of a row, probabilities, and what is remembered

NUM_DRAWS = 20_000


def several(count: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.stack([random_logits(vocab_size, seed) for seed in range(count)])


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 3 * PICK_WIDTH])
def test_several_tokens_of_a_row_are_what_as_many_steps_would_sample(vocab_size: int):
    """Four in a row of every kind at once, against one sampler that takes one at a time."""
    kinds = [kind for name, kind in KINDS.items() if name != "penalized"]
    count, width = len(kinds), 4
    logits = several(count * width, vocab_size)
    rows = np.repeat(np.arange(count), width)
    seq_lens = np.repeat(np.arange(count) + 20, width) + np.tile(np.arange(width), count)

    picked = sampler_of(kinds, vocab_size).pick(logits, rows, seq_lens, torch.from_numpy(rows))

    one_by_one = sampler_of(kinds, vocab_size)
    sampled = torch.stack(
        [
            one_by_one.sample(logits[place::width], np.arange(count), np.arange(count) + 20 + place)
            for place in range(width)
        ],
        dim=1,
    )
    assert torch.equal(picked, sampled.flatten())
    assert len(set(picked.tolist())) > 4


def test_tokens_are_suppressed_up_to_the_row_s_length_and_not_behind_it():
    suppressed = {"suppressed_until": 12, "suppressed_ids": [4]}
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[:, 4], logits[:, 9] = 5, 2
    rows, seq_lens = np.zeros(4, dtype=np.int64), np.arange(10, 14)
    picked = sampler_of([suppressed]).pick(logits, rows, seq_lens, torch.from_numpy(rows))
    assert picked.tolist() == [9, 9, 4, 4]


def test_the_first_token_of_a_penalized_row_is_exact():
    kinds = [KINDS["penalized"], KINDS["greedy"]]
    logits = several(4)
    rows, seq_lens = np.array([0, 0, 1, 1]), np.array([30, 31, 8, 9])
    picked = sampler_of(kinds).pick(logits, rows, seq_lens, torch.from_numpy(rows))
    sampled = sampler_of(kinds).sample(logits[::2], rows[::2], seq_lens[::2])
    assert picked[::2].tolist() == sampled.tolist()


@pytest.mark.parametrize("names", [list(KINDS), ["biased", "penalized"]], ids=["all", "edited"])
def test_picking_remembers_nothing_and_leaves_the_logits(names: list[str]):
    kinds = [KINDS[name] for name in names]
    sampler, rows = sampler_of(kinds), np.arange(len(kinds))
    sampler.last_tokens.fill_(7)
    before = sampler._output_counts.clone()
    for call in (sampler.pick, sampler.probabilities):
        logits = several(len(kinds))
        call(logits, rows, rows + 9, torch.from_numpy(rows))
        assert torch.equal(logits, several(len(kinds)))
    assert (sampler.last_tokens == 7).all()
    assert torch.equal(sampler._output_counts, before)


def test_what_is_remembered_is_the_last_token_and_a_count_where_penalties_need_it():
    sampler = sampler_of([KINDS["penalized"], KINDS["greedy"], KINDS["penalized"]])
    before = sampler._output_counts.clone()
    rows = np.array([2, 1])
    sampler.remember(torch.tensor([13, 14]), rows, torch.from_numpy(rows))
    assert sampler.last_tokens.tolist() == [0, 14, 13]
    change = sampler._output_counts - before
    assert torch.nonzero(change).tolist() == [[2, 13]]
    assert int(change[2, 13]) == 1


def test_sampling_is_picking_and_remembering():
    kinds = list(KINDS.values())
    rows, logits = np.arange(len(kinds)), several(len(kinds))
    at = torch.from_numpy(rows)
    whole, parts = sampler_of(kinds), sampler_of(kinds)
    tokens = whole.sample(logits, rows, rows + 30)
    picked = parts.pick(logits, rows, rows + 30, at)
    parts.remember(picked, rows, at)
    assert torch.equal(tokens, picked)
    assert torch.equal(whole.last_tokens, parts.last_tokens)
    assert torch.equal(whole._output_counts, parts._output_counts)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 3 * PICK_WIDTH])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_sampled_from_the_probabilities_that_it_says(kind: str, vocab_size: int):
    """Chi-square over 20,000 positions of one row, whose logits are always the same."""
    sampler = sampler_of([KINDS[kind]], vocab_size)
    logits = random_logits(vocab_size, seed=3).expand(NUM_DRAWS, -1)
    rows, seq_lens = np.zeros(NUM_DRAWS, dtype=np.int64), np.arange(NUM_DRAWS)
    if kind == "suppressed":
        seq_lens %= 100
    at, one = torch.from_numpy(rows), slice(0, 1)

    probs = sampler.probabilities(logits[one], rows[one], seq_lens[one], at[one])[0]

    assert probs.dtype == torch.float32
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
    if kind == "suppressed":  # as many samples as there are lengths below 100, so other rows
        sampler = sampler_of([KINDS[kind]] * 200, vocab_size)
        rows = np.arange(NUM_DRAWS) // 100
        at = torch.from_numpy(rows)
    tokens = sampler.pick(logits, rows, seq_lens, at)
    assert p_value(tokens, probs) > 0.001
    wrong = torch.softmax(random_logits(vocab_size, seed=3) / 2, dim=-1)
    assert p_value(tokens, wrong) < 0.001


def test_probabilities_of_a_mixed_batch_are_those_of_each_row_alone():
    kinds = list(KINDS.values())
    count = len(kinds)
    sampler, logits = sampler_of(kinds), several(count)
    rows = np.arange(count)
    whole = sampler.probabilities(logits, rows, rows + 30, torch.from_numpy(rows))
    for row in range(count):
        at = slice(row, row + 1)
        alone = sampler.probabilities(
            logits[at], rows[at], rows[at] + 30, torch.from_numpy(rows[at])
        )
        assert torch.equal(alone[0], whole[row])
    empty = sampler.probabilities(logits[:0], rows[:0], rows[:0], torch.from_numpy(rows[:0]))
    assert empty.shape == (0, VOCAB_SIZE)


def test_a_greedy_row_has_all_probability_on_its_likeliest_token():
    names = ["greedy", "greedy and biased"]
    sampler, rows = sampler_of([KINDS[name] for name in names]), np.arange(2)
    logits = several(2)
    at = torch.from_numpy(rows)
    probs = sampler.probabilities(logits, rows, rows, at)
    assert probs.argmax(dim=1).tolist() == sampler.pick(logits, rows, rows, at).tolist()
    assert probs.max(dim=1).values.tolist() == [1, 1]
    assert probs.sum(dim=1).tolist() == [1, 1]
    assert int(probs[1].argmax()) == 3


def test_ties_at_the_edge_of_top_k_leave_exactly_k_tokens():
    probs = probabilities(torch.zeros(2, 5), torch.tensor([2, 0]), torch.ones(2), torch.zeros(2))
    assert sorted(probs[0].tolist()) == [0, 0, 0, 0.5, 0.5]
    assert torch.allclose(probs[1], torch.full((5,), 0.2))
