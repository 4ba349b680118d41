"""If these fail, drafts are not what the draft model says, and speculation is slow for no reason.

Every draft is worked out once more, from the text's first token on, one path at a time.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from executor.model.sampling.logits import invert
from executor.parallel.layout import DpLayout
from executor.speculative.accept import DRAFT_STREAM, stream_samples
from executor.speculative.draft_batch import DraftBatch, Draws, ExtendBatch, Extended
from executor.speculative.tree import Drafts
from tests.executor.support.drafts.draft_cases import (
    FILE_OF,
    NUM_STEPS,
    DraftCase,
    Way,
    draft_batch,
)
from tests.executor.support.drafts.draft_checkpoints import save_draft
from tests.executor.support.drafts.draft_references import reference
from tests.executor.support.kv import batch_of, out_cache_loc

ROWS, LENGTHS = [3, 7], [9, 14]
TOLERANCE = 1e-4
TEMPERATURES = [0.0, 0.8]

Path_ = tuple[int, ...]  # tokens from the root on
# Takes a path to the log probabilities of the token after it, [V], of the draft's ids.
Expand = Callable[[Path_], torch.Tensor]


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], torch.Tensor]]:
    """Returns tokens of each sequence, and a hidden state with each."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(0, 96, (length,), generator=generator).tolist(),
            torch.randn(length, 48, generator=generator),
        )
        for length in LENGTHS
    ]


def new_case(target: Path, folder: Path, way: Way) -> tuple[DraftCase, Any]:
    save_draft(folder, FILE_OF[way.draft])
    return DraftCase(target, folder, way), reference(target, folder)


def fields_of(draws: Draws | None) -> dict[str, Any]:
    """Returns how a batch carries them."""
    names = ("temperature", "seeds", "draw_positions")
    return {} if draws is None else dict(zip(names, draws, strict=True))


def extend_batch(
    case: DraftCase,
    texts: Sequence[tuple[list[int], torch.Tensor]],
    spans: Sequence[tuple[int, int]],
    samples: Sequence[bool],
    *,
    carries: torch.Tensor | None = None,
    num_more: int = 0,
    draws: Draws | None = None,
) -> ExtendBatch:
    """Returns the entries ``spans`` of each text, and ``num_more`` rows behind one that samples."""
    counts = [b - a + num_more * s for (a, b), s in zip(spans, samples, strict=True)]
    ids, hidden = [], []
    for (tokens, states), (a, b), count in zip(texts, spans, counts, strict=True):
        more = count - (b - a)
        ids += tokens[a:b] + [0] * more
        hidden += [states[a:b], torch.full((more, states.shape[1]), 9.0)]
    begins = [a for a, _ in spans]
    batch = batch_of(case.pool, ROWS, begins, counts, torch.tensor(ids))
    batch.hidden_states = torch.cat(hidden)
    starts = np.cumsum(counts) - counts
    lasts = [
        start + b - a - 1 for start, (a, b), s in zip(starts, spans, samples, strict=True) if s
    ]
    at = torch.tensor(lasts, dtype=torch.int64)
    return ExtendBatch.of(
        batch,
        width=None,
        starts=torch.from_numpy(starts),
        lasts=at,
        carries=carries,
        **fields_of(draws),
    )


def extend_all(case: DraftCase, topk: int, texts: Any, draws: Draws | None = None) -> Extended:
    """Runs draft-extend over whole texts."""
    runner = case.build(way=Way("extend", case.way.draft, topk, case.way.is_drawn))
    spans = [(0, length) for length in LENGTHS]
    with torch.inference_mode():
        extended: Extended = runner.extend(
            extend_batch(case, texts, spans, [True, True], draws=draws)
        )
    return extended


def after_texts(case: DraftCase, draws: Draws | None = None, **fields: Any) -> DraftBatch:
    """Returns the texts' sequences, to draft after them."""
    num_slots = 0 if case.way.runner == "frozen_kv" else (NUM_STEPS - 1) * case.way.topk
    return draft_batch(
        ROWS,
        LENGTHS,
        DpLayout.single(len(ROWS) * case.way.topk),
        **fields_of(draws),
        out_cache_loc=out_cache_loc(case.pool, ROWS, LENGTHS, [num_slots] * len(ROWS)),
        **fields,
    )


def after(extended: Extended) -> dict[str, Any]:
    """Returns what a draft runner goes on from behind a draft-extend."""
    names = ("input_ids", "scores", "hidden_states", "probs")
    values = (extended.tokens.flatten(), extended.scores, extended.hidden, extended.probs)
    return dict(zip(names, values, strict=True))


def last_of(texts: Sequence[tuple[list[int], torch.Tensor]]) -> dict[str, Any]:
    """Returns what a draft without keys of its own goes on from."""
    tokens, hidden = zip(*((ids[-1], given[-1]) for ids, given in texts), strict=True)
    scores = torch.zeros(len(ROWS), 1)
    return {
        "input_ids": torch.tensor(tokens),
        "scores": scores,
        "hidden_states": torch.stack(hidden),
    }


class Drafted(NamedTuple):
    """What a case drafts behind the texts.

    Attributes:
        extended: What the draft-extend gave, for a draft with keys of its own.
        drafts: What followed it.
        expands: What comes after each text's path of drafts.
    """

    case: DraftCase
    extended: Extended | None
    drafts: Drafts
    expands: list[Expand]


def draft_after(
    target: Path, folder: Path, texts: Any, way: Way, draws: Draws | None = None
) -> Drafted:
    case, expected = new_case(target, folder, way)
    extended = None
    if way.runner == "frozen_kv":
        fields = last_of(texts)
        expands = [
            frozen_expand(expected, case, row, length, ids[-1], given[-1])
            for row, length, (ids, given) in zip(ROWS, LENGTHS, texts, strict=True)
        ]
    else:
        extended = extend_all(case, way.topk, texts, draws)
        fields = after(extended)
        expands = [eagle_expand(expected, ids, given) for ids, given in texts]
    batch = after_texts(case, draws=draws, **fields)
    with torch.inference_mode():
        return Drafted(case, extended, case.build().draft(batch), expands)


def paths_of(drafts: Drafts, sequence: int) -> list[Path_]:
    """Returns the path to each draft."""
    paths: list[Path_] = [()]
    tokens = drafts.tokens[sequence].tolist()
    parents = list(range(len(tokens)))
    if drafts.parents is not None:
        parents = drafts.parents[sequence].tolist()
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def best_paths(expand: Expand, ids: Sequence[int], topk: int, count: int) -> set[Path_]:
    """Returns the paths that are verified: of all that beams come by, those likeliest."""
    beams: list[tuple[float, Path_]] = [(0.0, ())]
    every: list[tuple[float, Path_]] = []
    for _ in range(NUM_STEPS):
        level = []
        for score, path in beams:
            values, places = expand(path).topk(topk)
            level += [
                (score + value, (*path, ids[place]))
                for value, place in zip(values.tolist(), places.tolist(), strict=True)
            ]
        beams = sorted(level, reverse=True)[:topk]
        every += level
    return {path for _, path in sorted(every, reverse=True)[:count]}


def eagle_expand(expected: Any, ids: Sequence[int], given: torch.Tensor) -> Expand:
    def hidden_after(path: Path_) -> torch.Tensor:
        states = [hidden_after(path[:i])[None] for i in range(len(path))]
        hidden: torch.Tensor = expected.hidden([*ids, *path], torch.cat([given, *states]))[-1]
        return hidden

    return lambda path: expected.logits(hidden_after(path)[None])[0].log_softmax(0)


def frozen_expand(
    expected: Any, case: DraftCase, row: int, length: int, token: int, given: torch.Tensor
) -> Expand:
    slots = out_cache_loc(case.pool, [row], [0], [length - 1])
    kept = [[cache[slots] for cache in case.pool.caches[i]] for i in (2, 0)]

    def hidden_after(path: Path_) -> torch.Tensor:
        before = hidden_after(path[:-1]) if path else given
        of = path[-1] if path else token
        hidden: torch.Tensor = expected.frozen(of, before, length - 1 + len(path), kept)
        return hidden

    return lambda path: (hidden_after(path) @ expected.target.head.T).log_softmax(0)


def ids_of(case: DraftCase) -> list[int]:
    """Returns the target's id of each of the draft's."""
    if case.model.target_ids is None:
        return list(range(case.model.vocab_size))
    ids: list[int] = case.model.target_ids.tolist()
    return ids


# Random drafts are unsure, so the best nodes are seldom deep ones: also with all candidates.
TREES = [(1, 0), (2, 0), (2, 11), (4, 0), (4, 37)]


@pytest.mark.parametrize("draft", ["eagle", "moe", "frozen_kv"])
@pytest.mark.parametrize(("topk", "num_draft_tokens"), TREES)
def test_drafts_are_the_likeliest_of_whole_texts(
    target: Path, tmp_path: Path, texts: Any, draft: str, topk: int, num_draft_tokens: int
):
    """Or those that the target's keys allow."""
    kind = "frozen_kv" if draft == "frozen_kv" else "draft"
    way = Way(kind, draft, topk, num_draft_tokens=num_draft_tokens)
    case, extended, drafts, expands = draft_after(target, tmp_path, texts, way)
    for sequence, expand in enumerate(expands):
        if extended is not None:
            values, places = expand(()).topk(topk)
            assert extended.tokens[sequence].tolist() == [ids_of(case)[i] for i in places.tolist()]
            torch.testing.assert_close(
                extended.scores[sequence], values, rtol=TOLERANCE, atol=TOLERANCE
            )
        found = paths_of(drafts, sequence)
        count = way.plan.num_draft_tokens - 1
        assert set(found) == best_paths(expand, ids_of(case), topk, count)
        assert len(set(found)) == len(found) == count


@pytest.mark.parametrize("kind", ["draft", "frozen_kv"])
def test_drawn_drafts_are_drawn_from_the_distribution_that_comes_with_them(
    target: Path, tmp_path: Path, texts: Any, kind: str
):
    """With the uniform samples of their own position and stream; the likeliest at temperature 0."""
    way = Way(kind, "eagle" if kind == "draft" else kind, is_drawn=True)
    draws = Draws(torch.tensor(TEMPERATURES), torch.tensor([11, 12]), torch.tensor(LENGTHS))
    case, _, drafts, expands = draft_after(target, tmp_path, texts, way, draws)
    assert_drawn(drafts, expands, ids_of(case), draws)


def assert_drawn(
    drafts: Drafts, expands: Sequence[Expand], ids: Sequence[int], draws: Draws
) -> None:
    assert drafts.probs is not None
    for sequence, expand in enumerate(expands):
        path = tuple(drafts.tokens[sequence].tolist())
        for step, token in enumerate(path):
            given = drafts.probs[sequence, step]
            assert token == ids[drawn(given, expand(path[:step]), draws, sequence, step)]


def drawn(given: torch.Tensor, logits: torch.Tensor, draws: Draws, sequence: int, step: int) -> int:
    """Checks the distribution of a draft, and returns what is drawn from it."""
    temperature = draws.temperature[sequence].item()
    if temperature == 0:
        assert given.tolist() == [float(i == logits.argmax()) for i in range(len(given))]
    else:
        q = torch.softmax(logits / temperature, 0)
        torch.testing.assert_close(given, q, rtol=TOLERANCE, atol=TOLERANCE)
    at = slice(sequence, sequence + 1)
    uniform = stream_samples(draws.seeds[at], draws.positions[at] + step, DRAFT_STREAM)
    return int(invert(given[None], uniform))


@pytest.mark.parametrize("is_drawn", [False, True])
def test_layers_that_follow_one_another_are_taught_by_what_came_before(
    target: Path, tmp_path: Path, texts: Any, is_drawn: bool
):
    """In two chunks of different lengths: the second goes on from the outputs of the first."""
    case, expected = new_case(target, tmp_path, Way("multi_layer", "multi_layer", 1, is_drawn))
    runner, cuts = case.build(), [4, 8]
    nothing = torch.zeros(len(ROWS), NUM_STEPS - 1, 48)
    draws = Draws(torch.tensor(TEMPERATURES), torch.tensor([5, 6]), torch.tensor(LENGTHS))
    none = Draws(*(x[:0] for x in (draws.temperature, draws.seeds, draws.positions)))
    with torch.inference_mode():
        first: Extended = runner.extend(
            extend_batch(
                case,
                texts,
                [(0, cut) for cut in cuts],
                [False, False],
                carries=nothing,
                draws=none if is_drawn else None,
            )
        )
        assert first.tokens.shape == (0, NUM_STEPS)
        ends = torch.tensor(cuts).cumsum(0) - 1
        second: Extended = runner.extend(
            extend_batch(
                case,
                texts,
                [(cut, length) for cut, length in zip(cuts, LENGTHS, strict=True)],
                [True, True],
                carries=torch.stack([states[ends] for states in first.outputs], dim=1),
                num_more=NUM_STEPS - 1,
                draws=draws if is_drawn else None,
            )
        )
    for sequence, (ids, given) in enumerate(texts):
        chain = second.tokens[sequence].tolist()
        states = given
        for layer in range(NUM_STEPS):
            out = expected.hidden([*ids, *chain[:layer]], states, layer)
            logits = expected.logits(out[-1:])[0]
            assert_pick(second, sequence, layer, logits, draws if is_drawn else None)
            states = torch.cat((torch.zeros(1, 48), out))  # the next token takes the last one's
    assert_outputs(second, texts, cuts, expected)


def assert_pick(
    extended: Extended, sequence: int, layer: int, logits: torch.Tensor, draws: Draws | None
) -> None:
    token = extended.tokens[sequence, layer].item()
    if draws is None:
        logprobs = logits.log_softmax(0)
        assert token == logprobs.argmax().item()
        score = extended.scores[sequence, layer].item()
        assert abs(score - logprobs.max().item()) < TOLERANCE
        return
    assert extended.probs is not None
    assert token == drawn(extended.probs[sequence, layer], logits, draws, sequence, layer)


def assert_outputs(extended: Extended, texts: Any, cuts: Sequence[int], expected: Any) -> None:
    """The outputs of the first layers are those of the text's tokens."""
    [of_first, _], start = extended.outputs, 0
    for (ids, given), cut in zip(texts, cuts, strict=True):
        count = len(ids) - cut
        out = expected.hidden(ids, given, 0)[cut:]
        ours = of_first[start : start + count]
        torch.testing.assert_close(ours, out, rtol=TOLERANCE, atol=TOLERANCE)
        start += count + NUM_STEPS - 1
