"""Settings that do not fit a model must stop the start, not the first step that meets them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.build.plan import check_model_fits, plan_budget, plan_graph_sizes, splits_dense
from executor.config import ExecutorConfig
from executor.model.families import read_spec
from executor.model.spec import LayerSpec, MlpSpec, ModelSpec
from executor.model.weights.formats import Fp8Format
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.experts import with_experts

NO_GRAPHS = GraphSizes()


def config(model: Path, **settings: Any) -> ExecutorConfig:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 100}
    return ExecutorConfig(model=model, **(sizes | settings))


@pytest.fixture(scope="session")
def part_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a model whose layers 0 and 2 have dense MLPs."""
    path = tmp_path_factory.mktemp("mlp-only-qwen3-moe")
    save_qwen3_moe(path, "mlp_only")
    return path


@pytest.fixture
def model(tiny_checkpoint: Path) -> ModelSpec:
    return read_spec(tiny_checkpoint)


# Graph sizes

UP_TO_32 = (*range(4, 33, 4),)


@pytest.mark.parametrize(
    ("settings", "max_model_len", "expected"),
    [
        ({}, 512, GraphSizes((1, 2, 4), (*UP_TO_32, *range(48, 97, 16), 100))),
        ({"max_num_seqs": 8, "dp_size": 8, "prefill_graphs": "off"}, 512, GraphSizes((1, 2, 4, 8))),
        ({"decode_graphs": "off", "prefill_graphs": "off"}, 512, GraphSizes()),
        (
            {"decode_graph_sizes": (3, 2), "prefill_graph_sizes": (64, 10)},
            512,
            GraphSizes((2, 3), (10, 64)),
        ),
        # Whole dense MLPs under attention TP 8 crashed at a size that does not divide by 8.
        (
            {"attn_tp_size": 8, "moe_dense_tp_size": 1},
            512,
            GraphSizes((8,), (*range(8, 33, 8), *range(48, 97, 16), 104)),
        ),
        # The largest step, rounded up, may be listed.
        (
            {"attn_tp_size": 2, "max_num_seqs": 1, "max_num_batched_tokens": 33}
            | {"decode_graph_sizes": (2,), "prefill_graph_sizes": (34,)},
            512,
            GraphSizes((2,), (34,)),
        ),
        # No prefill size is above what all rows hold, or that rounded up.
        ({"max_num_seqs": 2}, 9, GraphSizes((1, 2), (4, 8, 12, 16, 18))),
        ({"attn_tp_size": 8, "max_num_seqs": 2}, 9, GraphSizes((8,), (8, 16))),
    ],
)
def test_graph_sizes_are_the_default_ones_or_those_listed_as_far_as_steps_reach(
    tiny_checkpoint: Path, settings: dict[str, Any], max_model_len: int, expected: GraphSizes
):
    found = plan_graph_sizes(config(tiny_checkpoint, **settings), max_model_len=max_model_len)
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"attn_tp_size": 8, "decode_graph_sizes": (2, 4)}, "no capture size is a multiple of 8"),
        (
            {"max_num_seqs": 2, "prefill_graph_sizes": (16, 64)},
            "has 64: 2 sequences of 9 tokens make 18 at most",
        ),
    ],
)
def test_listed_sizes_that_nothing_can_use_are_refused(
    tiny_checkpoint: Path, settings: dict[str, Any], problem: str
):
    with pytest.raises(ValueError, match=problem):
        plan_graph_sizes(config(tiny_checkpoint, **settings), max_model_len=9)


# What a model's sizes allow


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"attn_tp_size": 3}, "attn_tp_size=3: num_attention_heads=4 does not .* 1, 2, 4"),
        (
            {"dp_size": 16, "ep_size": 1},
            "ep_size=1: moe_intermediate_size=24 does not divide among the 16 .* use ep_size 2 or",
        ),
        ({"dp_size": 5, "ep_size": 1}, "ep_size=1: .* among the 5 .* use ep_size 5$"),
    ],
)
def test_a_group_that_a_model_does_not_divide_among_is_named_with_what_fits(
    tiny_checkpoint: Path, model: ModelSpec, settings: dict[str, Any], problem: str
):
    with pytest.raises(ValueError, match=problem):
        check_model_fits(config(tiny_checkpoint, **settings), model)


def test_executors_that_would_cut_blocks_of_numbers_with_one_scale_are_refused(
    tiny_checkpoint: Path, model: ModelSpec
):
    fp8 = replace(with_experts(model, intermediate_size=1536), quantization=Fp8Format())
    problem = "ep_size=1: .*=1536 does not divide in blocks of 128, .* the 8 .* use ep_size 2 or 4"
    with pytest.raises(ValueError, match=problem):
        check_model_fits(config(tiny_checkpoint, dp_size=8, ep_size=1), fp8)
    check_model_fits(config(tiny_checkpoint, dp_size=8, ep_size=2), fp8)
    narrow = with_experts(fp8, intermediate_size=24)
    check_model_fits(config(tiny_checkpoint, dp_size=8), narrow)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dp_size": 2},
        {"dp_size": 2, "attn_tp_size": 4},
        {"dp_size": 8, "ep_size": 1},
        {"attn_tp_size": 4, "ep_size": 2},
        {"dp_size": 2, "moe_a2a": "torch"},
        {"dp_size": 3},
        {"dp_size": 6, "ep_size": 3},
        {"dp_size": 16},
        {"dp_size": 5, "moe_a2a": "torch"},
    ],
)
def test_a_group_that_a_model_divides_among_is_taken(
    tiny_checkpoint: Path, model: ModelSpec, settings: dict[str, Any]
):
    check_model_fits(config(tiny_checkpoint, **settings), model)


def test_dense_mlps_are_split_where_there_are_some_unless_told_otherwise(
    part_dense: Path, tiny_checkpoint: Path, model: ModelSpec
):
    has_dense = read_spec(part_dense)
    assert splits_dense(config(part_dense), has_dense)
    assert not splits_dense(config(part_dense, moe_dense_tp_size=1), has_dense)
    assert not splits_dense(config(tiny_checkpoint), model)


def test_dense_mlps_that_do_not_divide_can_be_held_whole(part_dense: Path):
    model = read_spec(part_dense)
    settings = {"dp_size": 12, "ep_size": 4}
    problem = "moe_dense_tp_size is not set, but intermediate_size=40 .* 12 executors: set moe_d"
    with pytest.raises(ValueError, match=problem):
        check_model_fits(config(part_dense, **settings), model)
    check_model_fits(config(part_dense, **settings, moe_dense_tp_size=1), model)


def test_an_elastic_executor_holds_dense_mlps_whole(part_dense: Path):
    model = read_spec(part_dense)
    with pytest.raises(ValueError, match=r"an elastic executor \(max_dp_size=2\) holds no share"):
        check_model_fits(config(part_dense, max_dp_size=2), model)
    check_model_fits(config(part_dense, max_dp_size=2, moe_dense_tp_size=1), model)


def test_an_all_to_all_without_experts_is_refused(tiny_checkpoint: Path, model: ModelSpec):
    mlp = LayerSpec(attention=model.layers[0].attention, feed_forward=MlpSpec(intermediate_size=64))
    dense = replace(model, layers=(mlp,))
    check_model_fits(config(tiny_checkpoint, dp_size=2), dense)
    with pytest.raises(ValueError, match="moe_a2a=torch: the model has no experts; set moe_a2a=n"):
        check_model_fits(config(tiny_checkpoint, dp_size=2, moe_a2a="torch"), dense)


# The budget


def test_the_budget_follows_from_settings_model_and_graphs(tiny_checkpoint: Path, model: ModelSpec):
    settings = config(
        tiny_checkpoint, dp_size=2, attn_tp_size=4, moe_a2a="torch", max_dispatch_tokens_per_rank=50
    )
    graph_sizes = plan_graph_sizes(settings, max_model_len=512)
    budget = plan_budget(settings, model, torch.bfloat16, graph_sizes)
    assert (budget.decode_graph_size, budget.extend_graph_size) == (4, 100)
    assert (budget.max_tokens_per_rank, budget.max_shard_tokens_per_rank) == (100, 25)
    assert (budget.world_size, budget.ep_size, budget.max_gathered_tokens) == (8, 8, 200)
    assert budget.a2a_max_num_tokens == 50
    assert budget.a2a_dispatch_bytes_per_token == 2 * 48 + 8 * 3
    assert budget.max_num_logits == 4 + 256

    budget = plan_budget(settings, model, torch.float32, NO_GRAPHS)
    assert (budget.decode_graph_tokens, budget.extend_graph_size) == (0, 0)
    assert (budget.max_tokens_per_rank, budget.itemsize) == (100, 4)


OF_TWO = {"dp_size": 2, "moe_a2a": "flashinfer"}


@pytest.mark.parametrize(
    ("settings", "top_k", "problem"),
    [
        (
            OF_TWO | {"moe_a2a_extend": "all-gather", "max_dispatch_tokens_per_rank": 3},
            2,
            r"=3, .* 4 .* raise .* to 4",
        ),
        (
            OF_TWO | {"moe_a2a_extend": "all-to-all", "max_dispatch_tokens_per_rank": 99},
            2,
            r"=99, .* 100 .* raise .* to 100",
        ),
        (OF_TWO, 3, r"num_experts_per_tok=3: .* for 2 and 4"),
        (OF_TWO | {"quantized_dispatch": "mxfp8"}, 2, "do not divide hidden_size=48"),
    ],
)
def test_an_all_to_all_that_a_step_or_a_model_does_not_fit_stops_the_start(
    tiny_checkpoint: Path, model: ModelSpec, settings: dict[str, Any], top_k: int, problem: str
):
    model = with_experts(model, top_k=top_k)
    with pytest.raises(ValueError, match=problem):
        plan_budget(config(tiny_checkpoint, **settings), model, torch.float32, NO_GRAPHS)


@pytest.mark.parametrize("moe_a2a", ["none", "torch"])
def test_a_dispatch_cap_that_sizes_nothing_stops_nothing(
    tiny_checkpoint: Path, model: ModelSpec, moe_a2a: str
):
    settings = config(tiny_checkpoint, dp_size=2, moe_a2a=moe_a2a, max_dispatch_tokens_per_rank=1)
    plan_budget(settings, model, torch.float32, NO_GRAPHS)


@pytest.mark.parametrize("max_num_seqs", [4, 30])
def test_the_budget_has_a_sequences_drafts_wherever_it_may_decode(
    tiny_checkpoint: Path, model: ModelSpec, max_num_seqs: int
):
    """With 8 sequences and 8 batched tokens, a speculative step of 16 did not fit its buffers."""
    settings = config(tiny_checkpoint, max_num_seqs=max_num_seqs, max_num_batched_tokens=30)
    for algorithm, width in (("eagle", 4), ("multi_layer_eagle", 6), ("frozen_kv_mtp", 4)):
        plan = SpeculationPlan(algorithm=algorithm, num_draft_steps=3)
        budget = plan_budget(settings, model, torch.float32, NO_GRAPHS, plan)
        assert budget.num_tokens_per_bs == width
        assert budget.max_step_tokens == max(30, max_num_seqs * width)
        assert budget.max_decode_tokens_per_rank == max_num_seqs * width
        assert budget.max_logits_rows >= max_num_seqs * width
