"""If these fail, what a draft model proposes depends on padding, on a replay or on other ranks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVPool
from executor.budget.speculation import SpeculationPlan
from executor.graph.backend import EagerBackend
from executor.graph.input_buffers import fresh_input_buffer_pool
from executor.parallel.layout import DpLayout, DpPaddingMode, Topology
from executor.runners.eagle_draft import EagleDraftRunner
from executor.speculative.draft_batch import DraftBatch, ExtendBatch
from tests.executor.support.drafts.draft_cases import (
    FILE_OF,
    WAYS,
    DraftCase,
    Way,
    captured,
    eager,
    graphs_of,
    registry_of,
)
from tests.executor.support.drafts.draft_checkpoints import save_draft
from tests.executor.support.ranks.draft_runner_ranks import DraftStep, draft_on_ranks
from tests.executor.support.ranks.ranks import run_ranks
from tests.executor.support.recording.capture_state import check_reset_before_capture
from tests.executor.support.recording.lazy_attention import LazyAttention
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.runner_cases import (
    BLOCK_SIZE,
    MAX_LEN,
    assert_close,
    assert_same,
    keep_padding,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZES = (1, 2, 4, 8)

ONE_OF_EACH = [
    Way("draft", "eagle"),
    Way("extend", "eagle"),
    Way("multi_layer", "multi_layer"),
    Way("frozen_kv", "frozen_kv"),
]

TREES = [Way("draft", "eagle", 2), Way("frozen_kv", "frozen_kv", 2)]

NewCase = Callable[..., DraftCase]


@pytest.fixture(scope="module")
def folders(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the checkpoints: targets by type, and drafts."""
    found = dict(targets)
    for name, kind in FILE_OF.items():
        found[name] = tmp_path_factory.mktemp(name)
        save_draft(found[name], kind)
    return found


@pytest.fixture(scope="module")
def new_case(folders: dict[str, Path]) -> NewCase:
    def new(way: Way, dtype: str = "float32", *, is_capturable: bool = False) -> DraftCase:
        return DraftCase(folders[dtype], folders[way.draft], way, is_capturable=is_capturable)

    return new


Made = tuple[DraftCase, Any]  # and a runner that has captured


@pytest.fixture(
    scope="module",
    params=product(WAYS, (EagerBackend, RecordingBackend)),
    ids=lambda made: f"{made[0]}-{made[1].__name__}",
)
def made(request: pytest.FixtureRequest, new_case: NewCase) -> Made:
    way, new_backend = request.param
    case = new_case(way, is_capturable=new_backend is RecordingBackend)
    with fresh_input_buffer_pool():
        return case, captured(case.build(SIZES, new_backend))


def test_a_replay_equals_eager_with_poisoned_tails_too(made: Made):
    """And poison does not reach the scratch block: where a sequence has no block yet, its attention
    reads there, and no mask hides NaN."""
    case, runner = made
    rng = np.random.default_rng(0)
    batches = [case.batch(rng, n, size) for size in SIZES for n in {1, size // 2 + 1, size}]
    expected = [case.run_eagerly(batch) for batch in batches]
    for _ in range(2):
        for batch, eagerly in zip(batches, expected, strict=True):
            assert_same(case.run(runner, batch), eagerly)
        registry_of(runner, case.way).poison_tails()
    before = [cache.clone() for cache in case.caches]
    with torch.inference_mode():
        (runner.extend if case.way.is_extend else runner.draft)(batches[-2])
    is_finite = all(cache.isfinite().all() for cache in case.caches)
    for cache, old in zip(case.caches, before, strict=True):
        cache.copy_(old)
    assert is_finite


@pytest.mark.parametrize("way", ONE_OF_EACH + TREES, ids=str)
def test_a_replay_in_bfloat16_equals_eager(new_case: NewCase, way: Way):
    case = new_case(way, "bfloat16")
    runner = captured(case.build(SIZES, EagerBackend))
    for size in (2, 8):
        batch = case.batch(np.random.default_rng(size), size - 1, size)
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


INDICES = [
    (Way("draft", "eagle", 2), "positions out_cache_loc req_pool_indices input_ids"),
    (Way("multi_layer", "multi_layer"), "input_ids out_cache_loc starts lasts"),
    (Way("extend", "eagle", is_plain=True), "input_ids positions lasts"),
    (Way("frozen_kv", "frozen_kv", 2), "positions req_pool_indices input_ids"),
]


@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way, names in INDICES for name in names.split()], ids=str
)
def test_an_index_that_kept_its_padding_would_be_noticed(new_case: NewCase, way: Way, name: str):
    """The check of the check above: the same poison, and one slot that no longer resets it."""
    case = new_case(way)
    runner = captured(case.build(SIZES, EagerBackend))
    keep_padding(registry_of(runner, way), name)
    batch = case.batch(np.random.default_rng(0), 5, 8)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


def test_an_idle_rank_replays_and_drafts_nothing(made: Made):
    case, replayer = made
    idle = case.batch(np.random.default_rng(0), 0, 4)
    for runner in (replayer, case.build()):
        given = idle if runner.graphs.sizes else eager(idle)
        results = case.run(runner, given)
        caches = [cache[BLOCK_SIZE:] for cache in case.caches]
        drafts = results[: len(results) - len(caches)]
        assert drafts
        assert all(len(x) == 0 for x in drafts)
        assert_same(results[len(drafts) :], caches)


def test_a_replay_writes_to_none_of_its_inputs(made: Made):
    """So a warm-up, or a replay once more, does the same again."""
    case, runner = made
    batch = case.batch(np.random.default_rng(3), 3, 4)
    expected = case.run(runner, batch)
    registry = registry_of(runner, case.way)
    inputs = {name: registry.get_slot(name).allocated() for name in registry.slot_names()}
    filled = {name: x.clone() for name, x in inputs.items()}
    graphs = graphs_of(runner, case.way)
    replay = graphs.replay
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graphs, "replay", lambda size: [replay(size) for _ in range(3)])
        assert_same(case.run(runner, batch), expected)
    for name, x in inputs.items():
        assert torch.equal(x, filled[name]), name


@pytest.mark.parametrize("way", ONE_OF_EACH, ids=str)
def test_what_another_runner_left_in_shared_buffers_is_gone_before_a_capture(
    new_case: NewCase, way: Way, monkeypatch: pytest.MonkeyPatch
):
    runner = new_case(way).build(SIZES, EagerBackend)
    graphs = runner.graphs.graphs
    registries = [x.registry for x in (graphs.values() if way.is_extend else [graphs])]
    check_reset_before_capture(runner.graphs, registries, monkeypatch)


@pytest.mark.parametrize("way", ONE_OF_EACH, ids=str)
def test_metadata_that_a_warm_up_upgraded_is_put_back_before_a_capture(
    folders: dict[str, Path], way: Way
):
    """Else every replay attends as the batch did that it was captured with."""

    def lazy(num_heads: int, pool: KVPool, graphs: Any) -> LazyAttention:
        return LazyAttention(num_heads, pool.shape.parts[0].num_heads)

    paths = folders["float32"], folders[way.draft]
    case = DraftCase(*paths, way, is_capturable=True, new_attention=lazy)
    runner = captured(case.build(SIZES, RecordingBackend))
    rng = np.random.default_rng(6)
    for size in (8, 2, 4):
        batch = case.batch(rng, size - 1, size)
        assert_close(case.run(runner, batch), case.run_eagerly(batch), 1e-4)


def test_what_a_later_step_needs_outlives_the_next_replay(made: Made):
    case, runner = made
    if not case.way.is_extend:
        return  # drafts are read before the next replay
    rng = np.random.default_rng(4)
    first, other = case.batch(rng, 4, 4), case.batch(rng, 8, 8)
    with torch.inference_mode():
        kept = runner.extend(first)._replace(outputs=())
        expected = [x.clone() for x in kept if isinstance(x, torch.Tensor)]
        runner.extend(other)
    assert_same([x for x in kept if isinstance(x, torch.Tensor)], expected)


@pytest.mark.parametrize("name", ["extend-eagle", "multi_layer-multi_layer"])
def test_graphs_of_two_widths_leave_one_another_alone(new_case: NewCase, name: str):
    """They share the memory of inputs and results, and a server goes from either to the other."""
    ways = [Way(*name.split("-"), is_plain=is_plain) for is_plain in (False, True)]
    case = new_case(ways[0], is_capturable=True)
    runner = captured(case.build(SIZES, RecordingBackend))
    rng = np.random.default_rng(5)
    for way in ways * 2:
        registry_of(runner, way).poison_tails()
        for size in (4, 8, 2):
            case.way = way
            batch = case.batch(rng, int(rng.integers(1, size + 1)), size)
            assert_same(case.run(runner, batch), case.run_eagerly(batch))


def test_a_width_without_graphs_is_refused_in_a_step_with_one(new_case: NewCase):
    case = new_case(Way("extend", "eagle"))
    runner = captured(case.build(SIZES, EagerBackend))
    batch = case.batch(np.random.default_rng(0), 2, 2)
    assert isinstance(batch, ExtendBatch)
    with pytest.raises(AssertionError, match=r"captured with \[4, 1\] rows for a sequence"):
        runner.extend(replace(batch, width=None))


def test_a_single_draft_needs_no_pass(new_case: NewCase):
    case = new_case(Way("draft", "eagle", 4))
    plan = SpeculationPlan(algorithm="eagle", num_draft_steps=1, topk=4, num_draft_tokens=3)
    runner = captured(EagleDraftRunner([], plan))
    batch = case.batch(np.random.default_rng(0), 2, 2)
    assert isinstance(batch, DraftBatch)
    drafts = runner.draft(replace(batch, out_cache_loc=batch.out_cache_loc[:0]))
    assert drafts.tokens.tolist() == batch.input_ids.view(2, 4)[:, :2].tolist()
    assert drafts.parents is not None
    assert drafts.parents.tolist() == [[0, 0]] * 2
    assert runner.graphs.sizes == ()


@pytest.mark.parametrize("way", [Way("draft", "eagle", 2), Way("frozen_kv", "frozen_kv")], ids=str)
def test_drafts_behind_the_last_position_stand_at_it(new_case: NewCase, way: Way):
    """A row of the block table has room for them; the table of rotations has not."""
    case = new_case(way)
    batch = case.batch(np.random.default_rng(0), 2, None)
    assert isinstance(batch, DraftBatch)
    runner = case.build()
    lens = torch.tensor([MAX_LEN - 1, MAX_LEN])
    seen = runner.spread(replace(batch, seq_lens=lens, seq_lens_cpu=lens)).positions
    assert int(seen.max()) == MAX_LEN - 1


# ---- two DP ranks


def test_every_phase_runs_a_graphs_requests_times_its_own_width(
    new_case: NewCase, folders: dict[str, Path]
):
    """Of frozen KV with topk above 1, a graph once had room for requests // topk sequences."""
    topology = Topology(dp_rank=0, dp_size=2)
    for way in (
        Way("frozen_kv", "frozen_kv", 4),
        Way("draft", "eagle", 4),
        Way("extend", "eagle"),
        Way("extend", "eagle", is_plain=True),
    ):
        case = DraftCase(folders["float32"], folders[way.draft], way, topology=topology)
        runner = captured(case.build((4, 8), EagerBackend))
        for counts, size in (([3, 8], 8), ([0, 4], 4), ([2, 1], None)):
            batch = case.batch(np.random.default_rng(0), counts, size)
            case.layouts.clear()
            case.run(runner, batch)
            assert case.layouts
            for layout in case.layouts:
                rows = [count * way.width for count in counts]
                if size is not None:
                    rows = [size * way.width] * 2
                    assert layout.graph_size == size * way.width
                assert list(layout.global_num_tokens_cpu) == rows


def test_a_graph_for_too_few_requests_is_refused():
    step = DpLayout((8, 3), DpPaddingMode.MAX_LEN, 0)
    with pytest.raises(ValueError, match="graph_size=8 is below the 32 tokens given"):
        step.of_requests((8, 3), 4, graph_requests=8 // 4)


RANKS_STEPS = [
    DraftStep((3, 0), 4),
    DraftStep((0, 2), 2),
    DraftStep((1, 4), 4),
    DraftStep((0, 2), None),
    DraftStep((3, 1), None, DpPaddingMode.SUM_LEN),
    DraftStep((2, 0), None, DpPaddingMode.SUM_LEN),
]
RANKS_WAYS = [
    Way("draft", "moe", 2),
    Way("draft", "eagle", is_drawn=True),
    Way("extend", "moe", 2),
    Way("extend", "moe", 2, is_plain=True),
    Way("multi_layer", "multi_layer"),
    Way("multi_layer", "multi_layer", is_plain=True),
    Way("frozen_kv", "frozen_kv", 4),
]


@pytest.mark.parametrize("attn_tp_size", [1, 2])
def test_two_dp_ranks_draft_what_each_would_alone(folders: dict[str, Path], attn_tp_size: int):
    """Eagerly and in graphs, also where one of them is idle: nobody waits, nothing changes."""
    paths = {name: str(path) for name, path in folders.items()}
    ways = [way for way in RANKS_WAYS if attn_tp_size == 1 or not way.is_plain]
    ranks = run_ranks(draft_on_ranks, 2 * attn_tp_size, paths, attn_tp_size, ways, RANKS_STEPS)
    for way in ways:
        alone = DraftCase(folders["float32"], folders[way.draft], way)
        for place, step in enumerate(RANKS_STEPS):
            for rank, of_rank in enumerate(ranks):
                batch = step.batch(alone, rank // attn_tp_size)
                expected = alone.run_eagerly(batch)
                for is_recorded in (False, True):
                    ours = of_rank[str(way), is_recorded][place]
                    assert_drafts(ours, expected, rank % attn_tp_size)


def assert_drafts(ours: list[Any], expected: list[torch.Tensor], attn_tp_rank: int) -> None:
    """Tokens are the same; log probabilities, hidden states and this executor's keys and values but
    for the order of sums."""
    for got, wanted in zip(ours, expected, strict=True):
        if wanted.dtype == torch.int64:
            assert got.tolist() == wanted.tolist()
            continue
        if got.shape != wanted.shape:  # keys and values of some heads
            wanted = wanted.chunk(wanted.shape[1] // got.shape[1], dim=1)[attn_tp_rank]
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-3, atol=1e-3)
