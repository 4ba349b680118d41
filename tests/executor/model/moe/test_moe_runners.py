"""If this fails, tokens go through the wrong experts, or with the wrong weights.

Every way to run experts, through the same cases: FlashInfer's kernels as far as a stand-in computes
what they are asked for.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor.graph.backend import ShapeKey
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe import runner_grouped
from executor.model.moe.runner_grouped import GroupedMMRunner
from executor.model.weights import load_weights
from executor.parallel.expert_places import ExpertPlaces, look_up
from executor.parallel.layout import Topology
from tests.executor.model.moe.moe_cases import (
    CASES,
    CLAMPED,
    DTYPES,
    FF,
    KINDS,
    MAX_ROWS,
    OPTIONS,
    PREFIX,
    TOLERANCES,
    TOP_K,
    D,
    Kind,
    L,
    Tensors,
    assert_right,
    authority,
    biases,
    checkpoint,
    config,
    new_runner,
    routed,
)
from tests.executor.support.experts import poison_ghosts
from tests.executor.support.recording.recording_backend import RecordingBackend

EVERY_WAY = pytest.mark.parametrize(("name", "dtype"), OPTIONS.values(), ids=OPTIONS)
IN_A_GRAPH = ("grouped", "cutlass", "cutedsl")


@pytest.fixture
def ops_of(request: pytest.FixtureRequest) -> Callable[[str], FlashInferOps | None]:
    """Returns FlashInfer for those that need it, so that the others are tested without it too."""

    def get(name: str) -> FlashInferOps | None:
        if name not in ("cutlass", "cutedsl"):
            return None
        ops: FlashInferOps = request.getfixturevalue("ops")
        return ops

    return get


@pytest.mark.parametrize("case", CASES)
@EVERY_WAY
def test_a_runner_equals_a_loop_over_pairs(
    name: str, dtype: torch.dtype, case: str, ops_of: Any
) -> None:
    tensors, dispatched = checkpoint(dtype), CASES[case](dtype)
    assert_right(
        new_runner(KINDS[name], tensors, ops_of(name)).run(dispatched), tensors, dispatched
    )


@EVERY_WAY
def test_a_rows_result_is_the_same_every_time(name: str, dtype: torch.dtype, ops_of: Any) -> None:
    runner = new_runner(KINDS[name], checkpoint(dtype), ops_of(name))
    dispatched = routed(MAX_ROWS, 0, L + 1, dtype)
    first = runner.run(dispatched).clone()
    assert all(torch.equal(runner.run(dispatched), first) for _ in range(3))


@EVERY_WAY
def test_an_expert_that_overflows_hurts_only_rows_that_chose_it(
    name: str, dtype: torch.dtype, ops_of: Any
) -> None:
    tensors = checkpoint(dtype)
    for part in ("gate", "up"):
        tensors[f"{PREFIX}0.{part}_proj.weight"].fill_(1e25)
    runner = new_runner(KINDS[name], tensors, ops_of(name))
    dispatched = routed(12, 0, L, dtype)
    dispatched.x_RD.abs_()
    chose = (dispatched.topk_ids_RK == 0).any(dim=1)
    assert 0 < int(chose.sum()) < 12
    y = runner.run(dispatched)
    assert not y[chose].isfinite().any()
    others = replace(
        dispatched,
        x_RD=dispatched.x_RD[~chose],
        topk_ids_RK=dispatched.topk_ids_RK[~chose],
        topk_weights_RK=dispatched.topk_weights_RK[~chose],
    )
    assert_right(y[~chose], tensors, others)


@pytest.mark.parametrize("num_rows", [0, 1, 9, MAX_ROWS])
@EVERY_WAY
def test_results_go_where_the_dispatcher_has_a_place_for_them(
    name: str, dtype: torch.dtype, num_rows: int, ops_of: Any
) -> None:
    tensors, dispatched = checkpoint(dtype), routed(num_rows, 0, L + 1, dtype)
    place = torch.full((MAX_ROWS, D), torch.nan, dtype=dtype)
    dispatched.out_RD = place[:num_rows]
    y = new_runner(KINDS[name], tensors, ops_of(name)).run(dispatched)
    assert_right(y, tensors, dispatched)
    assert (y is dispatched.out_RD) is KINDS[name].takes_place
    assert place[num_rows:].isnan().all(), "written past its rows"


TOO_MANY, TOO_FEW = r"41 rows; the \w+ is for 40", rf"2 experts; the \w+ is for {TOP_K}"


@pytest.mark.parametrize("problem", ["is for other rows", "is not dense", TOO_MANY, TOO_FEW])
@pytest.mark.parametrize("name", ["cutlass", "cutedsl"])
def test_rows_and_places_that_do_not_fit_are_refused(name: str, problem: str, ops_of: Any) -> None:
    runner = new_runner(KINDS[name], checkpoint(torch.bfloat16), ops_of(name))
    num_rows = MAX_ROWS + 1 if problem == TOO_MANY else 4
    dispatched = routed(num_rows, 0, L, torch.bfloat16)
    place = torch.zeros(5, D + 8, dtype=torch.bfloat16)
    if problem == TOO_FEW:
        dispatched.topk_ids_RK = dispatched.topk_ids_RK[:, :2]
    elif problem != TOO_MANY:
        dispatched.out_RD = place[:5, :D].clone() if "other" in problem else place[:4, :D]
    with pytest.raises(AssertionError, match=problem):
        runner.run(dispatched)


# Biases and a clamped activation.

BIASED = {"activation": CLAMPED, "bias": True}
BIASED_WAYS = pytest.mark.parametrize(
    ("name", "dtype"), [way for way in OPTIONS.values() if way[0] != "cutedsl"], ids=str
)


@pytest.mark.parametrize(
    "case", ["no rows", "one row, some elsewhere", "some elsewhere", "padding between"]
)
@BIASED_WAYS
def test_biased_clamped_experts_equal_a_loop_over_pairs(
    name: str, dtype: torch.dtype, case: str, ops_of: Any
) -> None:
    tensors, dispatched = checkpoint(dtype) | biases(dtype), CASES[case](dtype)
    runner = new_runner(KINDS[name], tensors, ops_of(name), **BIASED)
    assert_right(runner.run(dispatched), tensors, dispatched)


def test_kernels_without_biases_refuse_them_and_name_others(ops_of: Any) -> None:
    for spec in ({"bias": True}, {"activation": CLAMPED}):
        with pytest.raises(ValueError, match=r"moe_runner=cutedsl: .* to cutlass or grouped"):
            KINDS["cutedsl"].new(config(torch.bfloat16), ops_of("cutedsl"), Topology(), **spec)


# Shares of experts.


# Executors and EP ranks that share 8 experts, and the experts of each executor.
EVEN = {(4, 1): [2] * 4, (4, 2): [2] * 4, (4, 4): [2] * 4}
UNEVEN = {(3, 3): [3, 3, 2], (6, 3): [1.5, 1.5, 1.5, 1.5, 1, 1], (9, 9): [1] * 8 + [0]}
SHARED = pytest.mark.parametrize("sizes", EVEN | UNEVEN, ids=str)


@SHARED
@EVERY_WAY
def test_executors_that_share_experts_add_up_to_all_of_them(
    name: str, dtype: torch.dtype, sizes: tuple[int, int], ops_of: Any, tmp_path: Path
) -> None:
    """Each loads its part of a checkpoint, and sees experts elsewhere as one number."""
    counts = add_up(KINDS[name], checkpoint(dtype, 8), sizes, ops_of(name), tmp_path)
    assert counts == [3 * D * FF * share for share in (EVEN | UNEVEN)[sizes]]


@SHARED
@BIASED_WAYS
def test_executors_that_share_biased_experts_add_each_bias_once(
    name: str, dtype: torch.dtype, sizes: tuple[int, int], ops_of: Any, tmp_path: Path
) -> None:
    tensors = checkpoint(dtype, 8) | biases(dtype, 8)
    add_up(KINDS[name], tensors, sizes, ops_of(name), tmp_path, **BIASED)


def add_up(
    kind: Kind, tensors: Tensors, sizes: tuple[int, int], ops: Any, path: Path, **spec: Any
) -> list[int]:
    """Compares the sum over executors; returns how many numbers each loaded. Ghosts are NaN."""
    num_experts, dtype = 8, next(iter(tensors.values())).dtype
    save_file(tensors, path / "model.safetensors")
    rows = routed(11, 0, num_experts + 1, dtype)
    total = torch.zeros(11, D, dtype=torch.float64)
    counts = []
    dp_size, ep_size = sizes
    for rank in range(dp_size):
        topology = Topology(dp_rank=rank, dp_size=dp_size, ep_size=ep_size)
        layer = kind.new(config(dtype, num_experts), ops, topology, **spec)
        groups = layer.weight_groups(PREFIX)
        counts.append(sum(_numel(target) for group in groups for target in group.targets.values()))
        load_weights(path, groups, skipped=lambda _: True)
        poison_ghosts(layer)
        places = ExpertPlaces.of(topology, num_experts)
        ids = look_up(places.slot_of_expert, rows.topk_ids_RK)
        total += layer.runner.run(replace(rows, topk_ids_RK=ids)).double()
    tolerance = TOLERANCES[dtype] * (1 if dtype == torch.float32 else 2)
    torch.testing.assert_close(total, authority(tensors, rows), atol=tolerance, rtol=tolerance)
    return counts


def _numel(target: Any) -> int:
    return int(getattr(target, "target", target).numel())


@pytest.mark.parametrize("name", KINDS)
def test_experts_that_cannot_be_shared_name_sizes_that_could(name: str, ops_of: Any) -> None:
    model = config(torch.bfloat16, 8, intermediate_size=96)
    with pytest.raises(ValueError, match=r"intermediate_size=96 .* 5 executors: use 4 or 6"):
        KINDS[name].new(model, ops_of(name), Topology(dp_size=5, ep_size=1))


# In graphs.


@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_a_graph_of_it_follows_the_routing_of_each_replay(name: str, ops_of: Any) -> None:
    dtype, backend, ops = torch.bfloat16, RecordingBackend(), ops_of(name)
    if ops is not None:
        ops.library.launch = backend.kernel
    tensors = checkpoint(dtype)
    runner = new_runner(KINDS[name], tensors, ops)
    inputs = routed(8, 0, L, dtype)
    y = torch.zeros(8, D, dtype=dtype)

    def run() -> None:
        y.copy_(runner.run(inputs))

    with backend.session(label="experts", num_captures=1):
        backend.warm_up(run)
        backend.capture(ShapeKey(8), run)
    for seed_rows in (8, 16, 24):
        other = routed(seed_rows, 0, L + 1, dtype)
        inputs.x_RD.copy_(other.x_RD[:8])
        inputs.topk_ids_RK.copy_(other.topk_ids_RK[:8])
        inputs.topk_weights_RK.copy_(other.topk_weights_RK[:8])
        backend.replay(ShapeKey(8))
        assert_right(y, tensors, inputs)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grouped products leave NaN in rows that they do not write. Returns how many rows each was given."""
    product, given = runner_grouped._grouped_mm, []

    def run(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        y = product(x, w, offs=offs)
        y[int(offs[-1]) :] = torch.nan
        given.append(len(x))
        return y

    monkeypatch.setattr(runner_grouped, "_grouped_mm", run)
    return given


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_a_grouped_product_leaves_in_unused_rows_reaches_nobody(
    dtype: torch.dtype, poisoned: list[int]
) -> None:
    """Rows whose experts are elsewhere are not written by a grouped product, and hold anything."""
    tensors = checkpoint(dtype)
    runner = new_runner(KINDS["grouped"], tensors, None)
    for case in ("some elsewhere", "all elsewhere", "one row, some elsewhere", "padding between"):
        dispatched = CASES[case](dtype)
        assert_right(runner.run(dispatched), tensors, dispatched)


@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("low", [0, 1, 3])
def test_pairs_that_must_be_elsewhere_are_neither_gathered_nor_multiplied(
    num_local: int, low: int, poisoned: list[int]
) -> None:
    """Of 64 executors each has two experts of a row's eight at most, and moved all eight."""
    tensors = checkpoint(torch.float32, num_local)
    dispatched = routed(33, low, low + TOP_K, torch.float32)  # 0: all experts here are chosen
    dispatched.topk_ids_RK.clamp_(max=num_local)
    runner = new_runner(KINDS["grouped"], tensors, None)
    assert_right(runner.run(dispatched), tensors, dispatched)
    assert set(poisoned) == {33 * num_local + 1}


# What is refused.


def test_widths_that_a_grouped_product_cannot_take_are_refused() -> None:
    w13, w2 = torch.zeros(2, 8, 20).bfloat16(), torch.zeros(2, 20, 4).bfloat16()
    with pytest.raises(ValueError, match=r"D=20 in torch.bfloat16: .* multiple of 16 bytes"):
        GroupedMMRunner(w13, w2, lambda x: x)
