"""The tree of drafts: it grows by the likeliest, is closed under parents, and says who sees whom."""

import math

import pytest
import torch

from executor.speculative.tree import (
    Level,
    ancestors,
    beam_ancestors,
    best_nodes,
    first_level,
    next_level,
    num_candidates,
)
from tests.executor.support.drafts.draft_trees import grow, log_probs, path_to, random_parents

SHAPES = [(1, 1), (1, 4), (2, 2), (3, 1), (3, 2), (3, 4), (5, 3), (8, 2)]


def as_chain_of(levels: list[Level], sequence: int) -> list[tuple[int, float, int]]:
    """Returns (token, score, parent) of all candidates of a sequence, from number 1 on."""
    return [
        (int(token), float(score), int(parent))
        for level in levels
        for token, score, parent in zip(
            level.tokens[sequence], level.scores[sequence], level.parents[sequence], strict=True
        )
    ]


def likeliest(candidates: list[tuple[int, float, int]], count: int) -> list[int]:
    """Returns the numbers of the best, taken one by one among those whose parent is taken."""
    taken = {0}
    for _ in range(count):
        fits = [n for n, c in enumerate(candidates, 1) if n not in taken and c[2] in taken]
        taken.add(max(fits, key=lambda n: (candidates[n - 1][1], -n)))
    return sorted(taken - {0})


@pytest.mark.parametrize("tie_every", [0, 2], ids=["distinct", "ties"])
@pytest.mark.parametrize(("num_steps", "topk"), SHAPES)
def test_a_step_goes_on_from_the_likeliest_of_the_level_before(
    num_steps: int, topk: int, tie_every: int
):
    levels, beams = grow(5, num_steps, topk, seed=num_steps, tie_every=tie_every)
    before = 0
    for number, (level, beam) in enumerate(zip(levels, beams, strict=True)):
        for row in range(5):
            scores = level.scores[row].tolist()
            assert beam.scores[row].tolist() == sorted(scores, reverse=True)[:topk]
            places = [node - before - 1 for node in beam.nodes[row].tolist()]
            assert len(set(places)) == topk
            assert beam.scores[row].tolist() == [scores[place] for place in places]
            assert beam.tokens[row].tolist() == [int(level.tokens[row][p]) for p in places]
            if number:
                came_from = beams[number - 1].nodes[row].tolist()
                parents = [int(level.parents[row][place]) for place in places]
                assert [came_from[origin] for origin in beam.origins[row].tolist()] == parents
            else:
                assert not beam.origins[row].any()
        before += level.tokens.shape[1]
    assert before == num_candidates(num_steps, topk)


@pytest.mark.parametrize("seed", range(3))
def test_a_path_s_score_is_the_sum_of_its_drafts(seed: int):
    first = log_probs((4, 3), seed)
    level, beams = first_level(torch.arange(12).view(4, 3), first)
    own = log_probs((4, 3, 3), seed + 1)
    deeper, _ = next_level(beams, torch.arange(36).view(4, 3, 3), own, 3)
    assert torch.equal(level.scores, first)
    for row in range(4):
        for place, (score, parent) in enumerate(
            zip(deeper.scores[row].tolist(), deeper.parents[row].tolist(), strict=True)
        ):
            beam = place // 3
            assert parent == beam + 1
            assert math.isclose(
                score, float(first[row, beam] + own[row, beam, place % 3]), rel_tol=1e-6
            )


@pytest.mark.parametrize(
    "tie_every", [0, 2, 1, 0.1], ids=["distinct", "ties", "many ties", "all are certain"]
)
@pytest.mark.parametrize(("num_steps", "topk"), SHAPES)
def test_the_nodes_verified_are_the_likeliest_and_their_parents_are_among_them(
    num_steps: int, topk: int, tie_every: float
):
    most = num_candidates(num_steps, topk)
    for count in sorted({1, min(2, most), (most + 1) // 2, min(num_steps * topk, most), most}):
        levels, _ = grow(6, num_steps, topk, seed=count, tie_every=tie_every)
        drafts = best_nodes(levels, count)
        assert drafts.tokens.shape == (6, count)
        assert drafts.parents is not None
        for row in range(6):
            candidates = as_chain_of(levels, row)
            chosen = likeliest(candidates, count)
            storage = {0: 0} | {number: place for place, number in enumerate(chosen, 1)}
            assert drafts.tokens[row].tolist() == [candidates[n - 1][0] for n in chosen]
            assert drafts.parents[row].tolist() == [storage[candidates[n - 1][2]] for n in chosen]
            places = range(1, count + 1)
            parents = drafts.parents[row].tolist()
            assert all(parent < place for place, parent in zip(places, parents, strict=True))


def test_impossible_drafts_come_last_and_keep_their_parents():
    """A score of minus infinity: fewer tokens are possible than are asked for."""
    level, beams = first_level(torch.tensor([[10, 11]]), torch.tensor([[0.0, -torch.inf]]))
    own = torch.tensor([[[-1.0, -torch.inf], [-0.5, -1.0]]])
    deeper, _ = next_level(beams, torch.tensor([[[20, 21], [22, 23]]]), own, 2)
    drafts = best_nodes([level, deeper], 6)
    assert drafts.parents is not None
    assert drafts.tokens.tolist() == [[10, 11, 20, 21, 22, 23]]
    assert drafts.parents.tolist() == [[0, 0, 1, 1, 2, 2]]
    assert best_nodes([level, deeper], 2).tokens.tolist() == [[10, 20]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "max_depth"), [(2, 1), (5, 4), (9, 3), (16, 5), (40, 8)])
def test_a_node_sees_itself_and_what_leads_to_it(size: int, max_depth: int, seed: int):
    parents = random_parents(7, size, max_depth, seed)
    sees = ancestors(parents, max_depth)
    assert sees.shape == (7, size, size)
    for row in range(7):
        above = parents[row].tolist()
        for node in range(size):
            assert torch.nonzero(sees[row, node]).flatten().tolist() == path_to(node, above)


def test_a_chain_as_a_tree_sees_what_causal_attention_sees():
    parents = torch.arange(5).expand(2, 5)
    assert torch.equal(ancestors(parents, 5), torch.ones(2, 6, 6).tril().bool())


def test_a_tree_of_no_sequences_is_empty():
    levels, beams = grow(0, 3, 2, seed=0)
    drafts = best_nodes(levels, 6)
    assert drafts.parents is not None
    assert drafts.tokens.shape == drafts.parents.shape == (0, 6)
    assert ancestors(drafts.parents, 3).shape == (0, 7, 7)
    assert beam_ancestors(None, beams[0]).shape == (0, 2, 2)


@pytest.mark.parametrize("tie_every", [0, 2], ids=["distinct", "ties"])
@pytest.mark.parametrize(("num_steps", "topk"), [(2, 2), (3, 2), (4, 4), (6, 3), (4, 1)])
def test_a_beam_sees_the_slots_of_the_drafts_before_it(num_steps: int, topk: int, tie_every: int):
    """Slot s * K + k holds beam k of step s: a beam sees its own line of them, and itself."""
    levels, beams = grow(5, num_steps, topk, seed=topk, tie_every=tie_every)
    candidates = [as_chain_of(levels, row) for row in range(5)]
    seen: torch.Tensor | None = None
    for step, beam in enumerate(beams):
        seen = beam_ancestors(seen, beam)
        assert seen.shape == (5, topk, (step + 1) * topk)
        for row in range(5):
            for place in range(topk):
                number, line = int(beam.nodes[row, place]), []
                for at in range(step, -1, -1):
                    line.append(at * topk + beams[at].nodes[row].tolist().index(number))
                    number = candidates[row][number - 1][2]
                assert number == 0
                slots = torch.nonzero(seen[row, place]).flatten().tolist()
                assert slots == sorted(line)
