"""If these fail, padding or a replay changes somebody's answer."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.graph.backend import EagerBackend, RunnerBackend, Work
from executor.graph.cpu_graph import CpuGraph, GraphMemory
from executor.model.cpu_kernels.library import load
from executor.model.decoder.sizes import attention_of
from executor.model.layers.attention import Attention
from executor.model.layers.attention_cpu import cpu_attention
from executor.model.moe.layer import MoELayer
from executor.model.spec import ModelSpec
from executor.runners import Runner
from tests.executor.support.ranks.ranks import run_ranks
from tests.executor.support.ranks.runner_ranks import (
    GRAPH_SIZES,
    RANKS_AUX_LAYERS,
    RanksStep,
    replay_on_ranks,
)
from tests.executor.support.recording.lazy_attention import LazyAttention
from tests.executor.support.recording.recording_backend import CannotBeCaptured, RecordingBackend
from tests.executor.support.runner_cases import (
    DECODE_SIZES,
    DTYPES,
    PREFILL_GRAPHS,
    PREFILL_SIZES,
    RunnerCase,
    assert_close,
    assert_same,
    keep_padding,
    registry_of,
    torch_attention,
    watch_experts,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


AUX_LAYERS: dict[str, Sequence[int] | None] = {
    "no features": None,
    "three sums": (0, 2, 1),
    "final hidden": (),
}


class Way(NamedTuple):
    """A runner of a model.

    Attributes:
        kind: "decode", "trees" of drafts, or a kind of prefill graphs.
        width: Tokens of each sequence of a decode.
        dtype: Of the model.
        graphs: "called", "recorded" between calls of attention, recorded "whole", or calls of the
            CPU's "kernels" are.
        features: What the model leaves for a draft.
    """

    kind: str
    width: int = 1
    dtype: str = "float32"
    graphs: str = "called"
    features: str = "no features"

    def runner(self, case: RunnerCase) -> Runner:
        """Returns a runner that has captured."""
        backend: RunnerBackend = RecordingBackend()
        if self.graphs in ("called", "kernels"):
            backend = EagerBackend(cpu_graphs() if self.graphs == "kernels" else None)
        if self.kind in PREFILL_GRAPHS:
            return case.prefill(self.kind, backend)
        return case.decode(backend, self.width, has_tree=self.kind == "trees")

    def batches(self, case: RunnerCase) -> list[ForwardBatch]:
        """Returns random batches of each size; for a decode also few sequences, and none."""
        rng = np.random.default_rng(0)
        if self.kind in PREFILL_GRAPHS:
            return [case.prefill_batch(rng, size) for size in PREFILL_SIZES for _ in range(2)]
        new_batch = case.tree_batch if self.kind == "trees" else case.decode_batch
        none = {0} if self.graphs == "whole" else set()  # of which LazyAttention makes nothing
        return [
            new_batch(rng, size, num_seqs=num_seqs, width=self.width)
            for size in DECODE_SIZES
            for num_seqs in {None, 0, 1, size // 2, size} - none
        ]


KINDS = [("decode", 1), ("decode", 3), *((kind, 1) for kind in PREFILL_GRAPHS)]
WAYS = [
    Way(kind, width, dtype)
    for dtype in DTYPES
    for kind, width in [*KINDS, ("decode", 2), ("decode", 4), ("trees", 4)]
]
WAYS += [Way(kind, width, graphs="recorded") for kind, width in [*KINDS, ("trees", 4)]]
WAYS += [Way("decode", width, graphs="whole") for width in (1, 3)]
WAYS += [Way(kind, width, "bfloat16", "kernels") for kind, width in (*KINDS[:2], ("trees", 4))]
WAYS += [
    Way(kind, width, graphs=graphs, features=features)
    for features in ("three sums", "final hidden")
    for graphs in ("called", "recorded", "whole")
    for kind, width in (KINDS if graphs != "whole" else KINDS[:1])
]

NewCase = Callable[[Way], RunnerCase]


def cpu_graphs() -> Callable[[Work], Work]:
    kernels = load()
    if kernels is None:
        pytest.skip("there are no kernels here")
    return partial(CpuGraph, kernels, GraphMemory())


def kernels_attention(config: ModelSpec, pool: KVPool) -> Attention:
    return cpu_attention(attention_of(config).num_heads, pool.shape)


@pytest.fixture(scope="module")
def new_case(targets: dict[str, Path]) -> NewCase:
    """Returns what makes a model, and makes it once."""

    @cache
    def make(dtype: str, graphs: str, features: str) -> RunnerCase:
        attention: Any = {"whole": LazyAttention.of, "kernels": kernels_attention}.get(graphs)
        is_capturable, aux_layers = graphs in ("recorded", "whole"), AUX_LAYERS[features]
        return RunnerCase(
            targets[dtype],
            attention or torch_attention,
            is_capturable=is_capturable,
            aux_layers=aux_layers,
        )

    return lambda way: make(way.dtype, way.graphs, way.features)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_replay_equals_eager_with_poisoned_tails_too(new_case: NewCase, way: Way):
    """Of batches that a graph was not captured with, and of an idle rank."""
    case = new_case(way)
    runner, batches = way.runner(case), way.batches(case)
    expected = [case.run_eagerly(batch) for batch in batches]
    for _ in range(2):
        for batch, eagerly in zip(batches, expected, strict=True):
            if way.graphs == "whole":  # attention in a graph adds up more keys, masked
                assert_close(case.run(runner, batch), eagerly, 1e-5)
            else:
                assert_same(case.run(runner, batch), eagerly)
        registry_of(runner).poison_tails()


def test_metadata_that_stays_upgraded_after_warm_up_would_be_noticed(target: Path):
    """The crash that the contract is there for, put back on purpose."""
    broken = RunnerCase(target, partial(LazyAttention.of, restores=False), is_capturable=True)
    runner = broken.decode(RecordingBackend())
    batch = broken.decode_batch(np.random.default_rng(0), 8)
    got, expected = broken.run(runner, batch)[0], broken.run_eagerly(batch)[0]
    assert not torch.allclose(got, expected, rtol=1e-2, atol=1e-2)


def test_layers_that_read_results_on_the_host_are_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
):
    def on_the_host(self: MoELayer, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return x * float(x.sum())

    monkeypatch.setattr(MoELayer, "__call__", on_the_host)
    case = RunnerCase(target, LazyAttention.of)
    with pytest.raises(CannotBeCaptured):
        case.decode(RecordingBackend())


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name)
        for way in (Way("decode"), *map(Way, PREFILL_GRAPHS))
        for name in ("positions", "out_cache_loc", "req_pool_indices")
        if way.kind == "decode" or name != "req_pool_indices"
    ],
    ids=str,
)
def test_an_index_that_kept_its_padding_would_be_noticed(new_case: NewCase, way: Way, name: str):
    """The check of the check above: the same poison, and one slot that no longer resets it."""
    case = new_case(way)
    runner = way.runner(case)
    keep_padding(registry_of(runner), name)
    lens = [1] * 5 if way.kind == "decode" else [3, 4]
    batch = case.batch(np.random.default_rng(0), lens, 8, has_extend=way.kind != "decode")
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_same(case.run(runner, batch), case.run_eagerly(batch))


@pytest.mark.parametrize(
    ("way", "lens"),
    [
        *((Way("decode", width), [width] * n) for width in (1, 3) for n in (0, 1, 5, 8)),
        *((Way("decode", graphs="recorded"), [1] * n) for n in (0, 1, 5, 8)),
        *(
            (Way(kind, graphs=graphs), lens)
            for kind in PREFILL_GRAPHS
            for graphs in ("called", "recorded")
            for lens in ([1], [3, 2], [4, 1, 3])
        ),
    ],
    ids=str,
)
def test_no_padded_row_reaches_an_expert(
    new_case: NewCase, way: Way, lens: list[int], monkeypatch: pytest.MonkeyPatch
):
    """A count that a capture had baked in would send padding to experts, unseen in results."""
    case, size = new_case(way), 8 * way.width
    seen = watch_experts(case.model, monkeypatch)
    runner = way.runner(case)
    is_prefill = way.kind != "decode"
    case.run(runner, case.batch(np.random.default_rng(0), lens, size, has_extend=is_prefill))
    ran = [ids for ids in seen if len(ids) == size][-case.num_layers :]
    assert len(ran) == case.num_layers
    for ids in ran:
        assert (ids[: sum(lens)] < case.num_experts).all()
        assert (ids[sum(lens) :] == case.num_experts).all()


def test_real_rows_that_no_expert_sees_would_be_noticed(new_case: NewCase):
    """Experts skip the rows from num_token_non_padded on: too small a count drops real ones."""
    case = new_case(Way("decode"))
    runner = case.decode(EagerBackend())
    batch = case.decode_batch(np.random.default_rng(0), 8, num_seqs=5)
    expected = case.run_eagerly(batch)
    assert_same(case.run(runner, batch), expected)
    registry = registry_of(runner)
    registry.get_slot("num_token_non_padded").enabled = False
    registry._plan.cache_clear()
    registry.get_slot("num_token_non_padded").allocated().fill_(3)
    with pytest.raises(AssertionError):
        assert_same(case.run(runner, batch), expected)


RANKS_STEPS = [
    RanksStep(([1, 1, 1], []), 4, has_extend=False),
    RanksStep(([], [1]), 2, has_extend=False),
    RanksStep(([1], [1, 1, 1, 1]), 4, has_extend=False),
    RanksStep(([3, 4], [2]), 8, has_extend=True),
    RanksStep(([1, 1], [4]), 4, has_extend=True),
    RanksStep(([3, 2], [1]), None, has_extend=True),
    RanksStep(([1, 1, 1], []), None, has_extend=False),
]


# Executors of each DP rank, and groups formed one after the other.
@pytest.fixture(scope="module", params=[(1, 2), (2, 1)], ids=["attn_tp_1", "attn_tp_2"])
def replayed(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> list[Any]:
    """Returns what each executor of two DP ranks saw."""
    attn_tp_size, num_epochs = request.param
    sizes = (attn_tp_size, num_epochs)
    return run_ranks(replay_on_ranks, 2 * attn_tp_size, tiny_checkpoint, *sizes, RANKS_STEPS)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> list[list[list[torch.Tensor]]]:
    """Returns, by DP rank, what an executor without peers makes of its part of each step."""
    alone = RunnerCase(tiny_checkpoint, aux_layers=RANKS_AUX_LAYERS)
    return [
        [alone.run_eagerly(step.batch(alone, dp_rank)) for step in RANKS_STEPS]
        for dp_rank in range(2)
    ]


def test_replays_of_two_dp_ranks_equal_eager_runs_of_one(
    replayed: list[Any], expected: list[list[list[torch.Tensor]]]
):
    """Also of a rank that is idle or has fewer tokens than the other, and in a second group."""
    attn_tp_size = len(replayed) // 2
    for rank, of_rank in enumerate(replayed):
        for (is_recorded, _), epochs in of_rank.items():
            theirs = expected[rank // attn_tp_size] * len(epochs)
            ours = chain.from_iterable(epoch.outcomes for epoch in epochs)
            for got, wanted in zip(ours, theirs, strict=True):
                wanted = wanted if is_recorded else wanted[:-1]  # features come last
                assert_shares(got, wanted, rank % attn_tp_size, attn_tp_size)


def assert_shares(
    ours: list[Any], theirs: list[torch.Tensor], attn_tp_rank: int, attn_tp_size: int
) -> None:
    """Logits and features are the same, and keys and values those of this executor's heads."""
    for got, wanted in zip(ours, theirs, strict=True):
        if wanted.dim() == 3:
            wanted = wanted.chunk(attn_tp_size, dim=1)[attn_tp_rank]
        # Executors add up their experts' and heads' outputs in another order.
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-4, atol=1e-4)


def test_executors_that_share_attention_compute_the_same_bits_of_logits(replayed: list[Any]):
    attn_tp_size = len(replayed) // 2
    for rank, of_rank in enumerate(replayed):
        first = replayed[rank - rank % attn_tp_size]
        for way, epochs in of_rank.items():
            for ours, theirs in zip(epochs, first[way], strict=True):
                for (mine, *_), (its, *_) in zip(ours.outcomes, theirs.outcomes, strict=True):
                    assert mine.tobytes() == its.tobytes()


def test_every_graph_sees_its_size_of_all_dp_ranks_and_the_real_rows_of_its_own_shard(
    replayed: list[Any],
):
    """At the capture, which runs padding alone, and at every replay, of an idle rank too."""
    attn_tp_size = len(replayed) // 2
    for rank, of_rank in enumerate(replayed):
        dp_rank, attn_tp_rank = divmod(rank, attn_tp_size)

        def counts(size: int, num_tokens: int, attn_tp_rank: int = attn_tp_rank) -> dict[str, Any]:
            shard = size // attn_tp_size
            num_real = min(max(num_tokens - shard * attn_tp_rank, 0), shard)
            return {
                "num_token_non_padded": [num_real],
                "global_num_tokens_gpu": [size] * 2,
                "global_num_tokens_for_logprob_gpu": [size] * 2,
            }

        wanted = [
            {}
            if step.graph_size is None
            else counts(step.graph_size, sum(step.num_tokens[dp_rank]))
            for step in RANKS_STEPS
        ]
        at_capture = [
            counts(min(sizes), min(sizes)) for sizes in (GRAPH_SIZES.extend, GRAPH_SIZES.decode)
        ]
        for (is_recorded, _), (first, *later) in of_rank.items():
            if is_recorded:  # what is called is captured when it is first run
                assert first.counts_at_capture == at_capture
            assert first.counts == wanted
            for epoch in later:
                # What is called and not recorded outlives its group.
                assert epoch.counts_at_capture == (at_capture if is_recorded else [])
                assert epoch.counts == wanted
