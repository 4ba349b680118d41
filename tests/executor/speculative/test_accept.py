"""Acceptance: plain walks over the tree, plain Python for rejection sampling, and its distribution.

Each rule is also broken on purpose, to see that the tests of its distribution notice.
"""

from collections.abc import Callable

import pytest
import torch

from executor.model.sampling.logits import invert, uniform_samples
from executor.speculative import accept
from executor.speculative.accept import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    RESIDUAL_STREAM,
    Accepted,
    match_chain,
    match_tree,
    reject_chain,
    stream_samples,
)
from executor.speculative.tree import ancestors
from tests.executor.support.chi_square import p_value
from tests.executor.support.drafts.broken_rules import always_accept, draw_from_all_of_p
from tests.executor.support.drafts.draft_trees import random_drafts, random_parents, walk

NUM_DRAWS = 40_000
SIGNIFICANCE = 0.01


# ---- match


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_a_chain_is_accepted_up_to_the_first_draft_that_is_not_the_target_s(
    num_drafts: int, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(2, (64, num_drafts + 1), generator=generator)
    drafts = torch.randint(2, (64, num_drafts), generator=generator)
    limits = torch.randint(1, num_drafts + 2, (64,), generator=generator)

    accepted = match_chain(targets, drafts, limits)

    for row in range(64):
        parents = list(range(num_drafts))
        path = walk(targets[row].tolist(), drafts[row].tolist(), parents)
        expect_path(accepted, row, path[: int(limits[row])], targets[row], num_drafts + 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("size", "max_depth", "vocab_size"), [(2, 1, 2), (7, 3, 6), (16, 5, 15), (40, 4, 39)]
)
def test_a_tree_is_accepted_along_the_target_s_own_path(
    size: int, max_depth: int, vocab_size: int, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(64, size, max_depth, seed)
    drafts = random_drafts(parents, seed, vocab_size)
    # Mostly a child's token, else nearly no path would be longer than the root.
    targets = torch.randint(vocab_size, (64, size), generator=generator)
    is_child = torch.rand(64, size, generator=generator) < 0.8
    for row in range(64):
        for node in range(size - 1, 0, -1):
            parent = int(parents[row, node - 1])
            if is_child[row, parent]:
                targets[row, parent] = drafts.tokens[row, node - 1]
    limits = torch.randint(1, max_depth + 2, (64,), generator=generator)
    limits[::2] = max_depth + 1

    accepted = match_tree(targets, drafts, ancestors(parents, max_depth), limits, max_depth)

    width, lengths = min(max_depth + 1, size), set()
    for row in range(64):
        tokens, above = drafts.tokens[row].tolist(), parents[row].tolist()
        path = walk(targets[row].tolist(), tokens, above)[: int(limits[row])]
        lengths.add(len(path))
        expect_path(accepted, row, path, targets[row], width)
    assert {1, 2} <= lengths


def expect_path(
    accepted: Accepted, row: int, path: list[int], targets: torch.Tensor, width: int
) -> None:
    count = int(accepted.num_tokens[row])
    assert count == len(path)
    assert accepted.path[row].tolist() == path + [path[-1]] * (width - count)
    assert accepted.tokens.shape[1] == width
    assert accepted.tokens[row, :count].tolist() == [int(targets[node]) for node in path]


def test_no_sequences_gain_nothing():
    none = torch.zeros(0, dtype=torch.int64)
    parents = random_parents(0, 5, 3, seed=0)
    drafts = random_drafts(parents, seed=0, vocab_size=9)
    targets = torch.zeros(0, 5, dtype=torch.int64)
    for accepted, width in (
        (match_chain(targets, targets[:, 1:], none), 5),
        (match_tree(targets, drafts, ancestors(parents, 3), none, 3), 4),
        (
            reject_chain(
                torch.zeros(0, 5, 9), torch.zeros(0, 4, 9), targets[:, 1:], none, none, none
            ),
            5,
        ),
    ):
        assert accepted.num_tokens.shape == (0,)
        assert accepted.tokens.shape == accepted.path.shape == (0, width)


# ---- rejection


def distributions(*shape: int, seed: int, spread: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(*shape, generator=generator) * spread, dim=-1)


def plain_rejection(
    p: torch.Tensor, q: torch.Tensor, drafts: list[int], limit: int, seed: int, position: int
) -> tuple[list[int], int]:
    """Returns the tokens that one sequence gains, and how many of its drafts are among them."""

    def uniform(place: int, stream: int) -> torch.Tensor:
        return uniform_samples(torch.tensor([seed ^ stream]), torch.tensor([place]))

    gained: list[int] = []
    for draft in drafts[: limit - 1]:
        at = len(gained)
        ratio = p[at, draft].double() / q[at, draft].double()
        if not uniform(position + at, ACCEPT_STREAM) < ratio:
            left = (p[at] - q[at]).clamp(min=0)
            return [*gained, int(invert(left[None], uniform(position + at, RESIDUAL_STREAM)))], at
        gained.append(draft)
    at = len(gained)
    return [*gained, int(invert(p[at][None], uniform(position + at, RESIDUAL_STREAM)))], at


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_rejection_accepts_what_the_plain_rule_accepts(num_drafts: int):
    count, vocab_size = 200, 12
    generator = torch.Generator().manual_seed(num_drafts)
    p = distributions(count, num_drafts + 1, vocab_size, seed=1)
    q = 0.8 * p[:, :-1] + 0.2 * distributions(count, num_drafts, vocab_size, seed=2)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(1000, (count,), generator=generator)
    limits = torch.randint(1, num_drafts + 2, (count,), generator=generator)
    drafts = draw_drafts(q, seeds, positions)

    accepted = reject_chain(p, q, drafts, limits, seeds, positions)

    lengths = set()
    for row in range(count):
        tokens, num_accepted = plain_rejection(
            p[row],
            q[row],
            drafts[row].tolist(),
            int(limits[row]),
            int(seeds[row]),
            int(positions[row]),
        )
        lengths.add(len(tokens))
        assert int(accepted.num_tokens[row]) == len(tokens) == num_accepted + 1
        assert accepted.tokens[row, : len(tokens)].tolist() == tokens
        path = list(range(num_accepted + 1)) + [num_accepted] * (num_drafts - num_accepted)
        assert accepted.path[row].tolist() == path
    assert lengths == set(range(1, num_drafts + 2))


def draw_drafts(q: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws drafts int64 [B, D] as a draft runner does."""
    return torch.stack(
        [
            invert(q[:, step], stream_samples(seeds, positions + step, DRAFT_STREAM))
            for step in range(q.shape[1])
        ],
        dim=1,
    )


def test_greedy_rows_accept_the_likeliest_token_and_nothing_else():
    p = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4], [3, 1, 4], [3, 1, 4]]), 6).float()
    drafts = torch.tensor([[3, 1], [3, 2], [0, 1]])
    q = torch.nn.functional.one_hot(drafts, 6).float()
    accepted = reject_chain(p, q, drafts, torch.full((3,), 3), torch.arange(3), torch.arange(3))
    assert accepted.num_tokens.tolist() == [3, 2, 1]
    assert accepted.tokens[0].tolist() == [3, 1, 4]
    assert accepted.tokens[1, :2].tolist() == [3, 1]
    assert accepted.tokens[2, :1].tolist() == [3]


def test_a_draft_model_that_is_the_target_is_always_accepted():
    p = distributions(500, 4, 9, seed=5)
    seeds, positions = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    drafts = draw_drafts(p[:, :3], seeds, positions)
    accepted = reject_chain(p, p[:, :3], drafts, torch.full((500,), 4), seeds, positions)
    assert (accepted.num_tokens == 4).all()
    assert torch.equal(accepted.tokens[:, :3], drafts)


# What the target and the draft say of 6 tokens, each behind any of them.
PAIRS = {
    "alike": (distributions(6, 6, seed=1), distributions(6, 6, seed=1, spread=1.2)),
    "apart": (distributions(6, 6, seed=2), distributions(6, 6, seed=3)),
    "opposed": (
        distributions(6, 6, seed=4, spread=3),
        distributions(6, 6, seed=4, spread=3).flip(1),
    ),
    "filtered": (
        torch.where(distributions(6, 6, seed=6) > 0.05, distributions(6, 6, seed=6), 0.0),
        distributions(6, 6, seed=7),
    ),
}
Rule = Callable[..., Accepted]


def draw_two(
    p: torch.Tensor, q: torch.Tensor, limits: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first two tokens [N] of sequences that gain tokens step after step.

    Token t follows token s with probability p[s, t], and the first one follows token 0; drafts are
    drawn by q in the same way, two for each step.
    """
    count = len(limits)
    p, q = p / p.sum(dim=1, keepdim=True), q / q.sum(dim=1, keepdim=True)
    seeds = torch.arange(count) * 7919
    positions = torch.full((count,), 10)
    start = torch.zeros(count, dtype=torch.int64)
    found = _gain(p, q, start, limits, seeds, positions, rule)
    # Whoever gained one token goes on in a second step, at the next position.
    more = _gain(p, q, found.tokens[:, 0], limits, seeds, positions + 1, rule)
    second = torch.where(found.num_tokens > 1, found.tokens[:, 1], more.tokens[:, 0])
    return found.tokens[:, 0], second


def _gain(
    p: torch.Tensor,
    q: torch.Tensor,
    last: torch.Tensor,
    limits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rule: Rule,
) -> Accepted:
    first = invert(q[last], stream_samples(seeds, positions, DRAFT_STREAM))
    second = invert(q[first], stream_samples(seeds, positions + 1, DRAFT_STREAM))
    drafts = torch.stack((first, second), dim=1)
    drawn_from = torch.stack((q[last], q[first]), dim=1)
    targets = torch.stack((p[last], p[first], p[second]), dim=1)
    return rule(targets, drawn_from, drafts, limits, seeds, positions)


def p_values(p: torch.Tensor, q: torch.Tensor, limits: torch.Tensor, rule: Rule) -> list[float]:
    """Returns how likely the first token is, and the first two together, if all is well."""
    first, second = draw_two(p, q, limits, rule)
    p = p / p.sum(dim=1, keepdim=True)
    joint = (p[0][:, None] * p).flatten()
    return [p_value(first, p[0]), p_value(first * p.shape[1] + second, joint)]


LIMITS = {
    "three": torch.full((NUM_DRAWS,), 3),
    "two": torch.full((NUM_DRAWS,), 2),
    "one": torch.full((NUM_DRAWS,), 1),
    "mixed": torch.arange(NUM_DRAWS) % 3 + 1,
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_gained_is_distributed_as_the_target_says(pair: str, limits: str):
    assert min(p_values(*PAIRS[pair], LIMITS[limits], reject_chain)) > SIGNIFICANCE


def cut_without_regard_to_the_limit(p, q, drafts, limits, seeds, positions):
    """A limit that keeps what the draft took, and takes no token of p's behind it."""
    accepted = reject_chain(p, q, drafts, torch.full_like(limits, 3), seeds, positions)
    keeps = accepted.num_tokens <= limits
    last = (limits - 1).unsqueeze(1)
    mistaken = p[:, 0].argmax(dim=1, keepdim=True)
    tokens = accepted.tokens.scatter(
        1, last, torch.where(keeps.unsqueeze(1), accepted.tokens.gather(1, last), mistaken)
    )
    return accepted._replace(num_tokens=torch.minimum(accepted.num_tokens, limits), tokens=tokens)


BROKEN = [always_accept, draw_from_all_of_p, cut_without_regard_to_the_limit]


@pytest.mark.parametrize("rule", BROKEN)
@pytest.mark.parametrize("pair", ["apart", "opposed", "filtered"])
def test_a_broken_rule_is_noticed(pair: str, rule: Rule):
    assert min(p_values(*PAIRS[pair], LIMITS["mixed"], rule)) < SIGNIFICANCE


@pytest.mark.parametrize("stream", ["ACCEPT_STREAM", "RESIDUAL_STREAM"])
@pytest.mark.parametrize("pair", ["apart", "opposed"])
def test_uniform_samples_that_decide_two_things_are_noticed(
    pair: str, stream: str, monkeypatch: pytest.MonkeyPatch
):
    """The sample that drew a draft must not also accept it, nor the one that refused it replace it."""
    other = DRAFT_STREAM if stream == "ACCEPT_STREAM" else ACCEPT_STREAM
    monkeypatch.setattr(accept, stream, other)
    assert min(p_values(*PAIRS[pair], LIMITS["three"], reject_chain)) < SIGNIFICANCE


# ---- uniform samples


def test_streams_are_uniform_and_independent_of_one_another_and_of_plain_samples():
    count = 60_000
    seeds, positions = torch.arange(count) // 200, torch.arange(count) % 200
    streams = [
        uniform_samples(seeds, positions),
        *(
            stream_samples(seeds, positions, s)
            for s in (DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM)
        ),
    ]
    tenths = [(uniform * 10).long() for uniform in streams]
    flat = torch.full((100,), 0.01)
    for i, one in enumerate(tenths):
        assert p_value(one, torch.full((10,), 0.1)) > 1e-3
        assert p_value(one[:-1] * 10 + one[1:], flat) > 1e-3, "of one position and the next"
        for other in tenths[:i]:
            assert p_value(one * 10 + other, flat) > 1e-3
            assert p_value(one[1:] * 10 + other[:-1], flat) > 1e-3


def test_uniform_samples_depend_on_seed_position_and_stream_and_on_nothing_else():
    seeds, positions = torch.tensor([5, -9]), torch.tensor([[0, 1, 2], [7, 8, 9]])
    table = stream_samples(seeds, positions, DRAFT_STREAM)
    assert table.dtype == torch.float64
    for row in range(2):
        for place in range(3):
            alone = stream_samples(
                seeds[row : row + 1], positions[row, place : place + 1], DRAFT_STREAM
            )
            assert float(alone) == float(table[row, place])
    assert len({float(uniform) for uniform in table.flatten()}) == 6
    assert not torch.equal(table, stream_samples(seeds, positions, ACCEPT_STREAM))


def test_a_draft_out_of_no_distribution_counts_for_nothing():
    """A draft model that came to no numbers changes no output: not its own row's, nor another's."""
    count = 20_000
    p, q = distributions(1, 3, 9, seed=4), distributions(count, 2, 9, seed=5)
    seeds, positions = torch.arange(count) * 13, torch.full((count,), 5)
    drafts = draw_drafts(q, seeds, positions)
    q[:, 0] = torch.nan
    limits = torch.full((count,), 3)
    accepted = reject_chain(p.expand(count, 3, 9), q, drafts, limits, seeds, positions)
    assert (accepted.num_tokens == 1).all()
    assert p_value(accepted.tokens[:, 0], p[0, 0]) > SIGNIFICANCE
