"""Greedy output with drafts is that of plain decoding, token for token, whatever happens meanwhile.

The router's scheduler drives real executors of the demo model and its drafts, two steps in flight.
"""

import pytest
import torch

from deploy.demo_model.training.draft_checkpoints import Target, load
from deploy.demo_model.training.draft_scores import ask, draft_chains, walk
from executor.batch.read_step import StepColumns
from executor.speculative.tree import Drafts
from tests.executor.support.drafts.draft_trees import random_parents
from tests.executor.support.drafts.random_drafts import random_draft
from tests.support.paths import DEMO_DRAFTS as DRAFTS
from tests.together.speculation.speculative_cell import (
    CHAINS,
    EXACT_DTYPE,
    FAR_WAYS,
    MAX_LEN,
    MODEL,
    NEWLINE,
    WAYS,
    Ask,
    Cell,
    Router,
    cell_of,
    demo_prompts,
    expect_plain,
    mixed_asks,
    plain_answers,
    plain_cell,
    serve,
    settings_of,
    speculator_of,
    state_of,
)


@pytest.mark.parametrize(("name", "topk"), WAYS)
def test_output_is_that_of_plain_decoding_with_chunks_prefix_hits_and_preemptions(
    name: str, topk: int
):
    seed = WAYS.index((name, topk))
    few = {"max_num_seqs": 6, "max_num_batched_tokens": 42, "num_kv_blocks": 1 + MAX_LEN // 4}
    room = {"max_model_len": MAX_LEN, "dtype": EXACT_DTYPE}
    with cell_of(**room, **few, **settings_of(name, topk)) as cell:
        router = Router(cell)
        # Two that outgrow the pool together.
        greedy = [Ask(prompt=p, max_tokens=40, delay=4) for p in demo_prompts(seed + 50, 2)]
        expect_plain(router, mixed_asks(seed, 9) + greedy)
    assert router.num_preemptions > 0
    assert router.num_hit_tokens > 0
    assert router.tokens_per_step > 1.2
    assert 0 in router.widths
    assert (42,) in router.counts  # as much as fits: a prompt came in parts


@pytest.mark.parametrize("name", CHAINS)
def test_without_graphs_output_is_the_same(name: str):
    with cell_of(decode_graphs="off", draft_model=DRAFTS / name) as cell:
        expect_plain(Router(cell), mixed_asks(100, 5))


@pytest.mark.parametrize("num_draft_steps", [1, 2, 5])
def test_output_does_not_depend_on_how_far_ahead_is_drafted(num_draft_steps: int):
    for name in ("eagle", "frozen_kv"):
        with cell_of(draft_model=DRAFTS / name, num_draft_steps=num_draft_steps) as cell:
            expect_plain(Router(cell), mixed_asks(200, 5))


# ---- stops


def test_a_stop_id_cuts_a_run_exactly_wherever_it_stands():
    prompts = demo_prompts(3, 3, 30)
    whole = serve(Router(plain_cell()), [Ask(prompt=p, max_tokens=12) for p in prompts])
    asks = [
        Ask(prompt=prompt, max_tokens=12, stop_ids=(stop,), min_tokens=min_tokens)
        for prompt, [answer] in zip(prompts, whole, strict=True)
        for stop in sorted(set(answer.tokens))
        for min_tokens in (0, 5)
    ]
    for name, topk in (("mtp", 1), ("frozen_kv", 2)):
        with cell_of(**settings_of(name, topk)) as cell:
            answers = expect_plain(Router(cell), asks)
    assert len({len(answer.tokens) for [answer] in answers}) > 8


def test_max_tokens_and_the_length_of_the_model_cut_a_run_exactly():
    prompts = demo_prompts(4, 10, 30)
    asks = [Ask(prompt=prompt, max_tokens=1 + i) for i, prompt in enumerate(prompts)]
    asks += [Ask(prompt=prompt[-30:] * 3, max_tokens=6) for prompt in prompts[:3]]
    for name, topk in (("mtp", 1), ("mtp3", 1), ("eagle", 4)):
        with cell_of(**settings_of(name, topk)) as cell:
            answers = expect_plain(Router(cell), asks)
    assert [len(answer.tokens) for [answer] in answers[:10]] == list(range(1, 11))
    assert [len(answer.tokens) for [answer] in answers[10:]] == [6, 6, 6]


# ---- drafts that are bad, and drafts that are right


@pytest.mark.parametrize(
    ("name", "topk"), [("eagle", 2), ("mtp", 1), ("mtp3", 1), ("frozen_kv", 1)]
)
def test_a_draft_model_that_knows_nothing_changes_no_output(name: str, topk: int, tmp_path):
    draft = random_draft(DRAFTS / name, tmp_path / name, seed=7)
    with cell_of(**settings_of(name, topk) | {"draft_model": draft}) as cell:
        router = Router(cell)
        expect_plain(router, mixed_asks(100, 5))
    assert 1 <= router.tokens_per_step < 1.4


class OracleRouter(Router):
    """Its cell drafts what plain decoding gives, on a random path of a tree among tokens that it does not.

    Args:
        truths: All tokens of each prompt's sequence.
    """

    def __init__(self, cell: Cell, truths: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(cell)
        self._truths, self._seed = truths, 0
        speculator_of(cell.workers[0]).draft = self._draft  # type: ignore[method-assign]

    def _draft(self, columns: StepColumns, at: torch.Tensor) -> Drafts:
        shape = self._cell.shape.speculation
        assert shape is not None
        size, is_tree = shape.num_draft_tokens, shape.topk > 1
        tokens = torch.full((len(columns.rows), size - 1), 5)
        self._seed += 1
        parents = random_parents(len(columns.rows), size, shape.num_draft_steps, self._seed)
        if not is_tree:
            parents = torch.arange(size - 1).expand_as(parents).contiguous()
        for place, (row, computed) in enumerate(
            zip(columns.rows.tolist(), columns.num_computed_tokens.tolist(), strict=True)
        ):
            sequence = self.table.sequences[row]
            assert sequence is not None
            truth = self._truths[tuple(sequence.request.prompt.tolist())]
            depths = [0]
            for node, parent in enumerate(parents[place].tolist(), start=1):
                depths.append(depths[parent] + 1)
                tokens[place, node - 1] = 6 + node  # of no answer: control characters
            node = depths.index(max(depths))
            while node:
                position = computed + depths[node]
                if position < len(truth):
                    tokens[place, node - 1] = truth[position]
                node = int(parents[place, node - 1])
        return Drafts(tokens, parents if is_tree else None)


@pytest.mark.parametrize(("name", "topk"), [("mtp", 1), ("eagle", 4), ("frozen_kv", 2)])
def test_drafts_that_are_right_are_all_accepted_and_change_no_output(name: str, topk: int):
    prompts = demo_prompts(5, 8, 20)
    asks = [Ask(prompt=p, max_tokens=21, delay=i) for i, p in enumerate(prompts)]
    whole = serve(Router(plain_cell()), asks)
    truths = {p: [*p, *answer.tokens] for p, [answer] in zip(prompts, whole, strict=True)}
    with cell_of(max_num_seqs=3, **settings_of(name, topk)) as cell:
        router = OracleRouter(cell, truths)
        expect_plain(router, asks)
    # 21 tokens: one behind the prompt, then five times four
    assert router.tokens_per_step > (3.9 if topk == 1 else 2.5)


# ---- how well is drafted


@pytest.mark.parametrize(("name", "topk"), FAR_WAYS)
def test_drafts_are_as_good_behind_chunks_and_cached_blocks_as_behind_whole_prompts(
    name: str, topk: int
):
    """The draft model's own keys and hidden states come out the same, so the same is accepted: to the
    last bit, where there are kernels for bfloat16, also behind what was verified in a tree.

    The second prompt of two holds the first and its answer, whose blocks drafts have filled.
    """
    off = 0.0 if EXACT_DTYPE == "bfloat16" else 1e-4
    firsts = [Ask(prompt=demo_prompts(seed, 1, 30)[0], max_tokens=17) for seed in range(60, 63)]
    said = [answer.tokens for [answer] in plain_answers(tuple(firsts))]
    more = demo_prompts(9, 3)
    turns = [
        Ask(prompt=(*first.prompt, *tokens, *end), max_tokens=16)
        for first, tokens, end in zip(firsts, said, more, strict=True)
    ]
    accepted, left = [], []
    for most, asks in ((128, turns), (28, turns), (128, [*firsts, *turns])):
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": most, "max_model_len": 128}
        with cell_of(dtype=EXACT_DTYPE, **settings, **settings_of(name, topk)) as cell:
            router = Router(cell)
            own = []
            for one in asks:  # one at a time: every step but a prompt's has drafts
                serve(router, [one], depth=1)
                own.append(state_of(cell, router.ended[-1].row))
            left.append(own[-len(turns) :])
            last = [sequence.progress for sequence in router.ended[-len(turns) :]]
            accepted.append([progress.num_accepted_drafts for progress in last])
            assert (router.num_hit_tokens > 3 * 44) == (len(asks) > len(turns))
    assert accepted[0] == accepted[1] == accepted[2]
    for own in left[1:]:
        torch.testing.assert_close(own, left[0], rtol=10 * off, atol=off)
    assert sum(accepted[0]) > 8


@pytest.mark.parametrize("name", CHAINS)
def test_steps_are_as_many_as_training_counted_without_a_server(name: str):
    target = Target(MODEL)
    answered = ask(target, seed=31, count=6, context_tokens=24)
    chains = draft_chains(load(name, target, DRAFTS / name), target, answered)
    expected = [walk(one.answer, drafts) for one, drafts in zip(answered, chains, strict=True)]
    steps = []
    with cell_of(max_model_len=128, draft_model=DRAFTS / name) as cell:
        router = Router(cell)
        for one in answered:
            before = len(router.widths)
            stop = Ask(prompt=tuple(one.prompt), max_tokens=30, stop_ids=(NEWLINE,))
            [[answer]] = serve(router, [stop], depth=1)
            assert list(answer.tokens) == one.answer
            steps.append(sum(width > 0 for width in router.widths[before:]))
    assert steps == [score.num_steps for score in expected]
