"""If this fails, a draft is run beside a target, or with layers, that it was not made for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor.batch.kv_pool import KVShape
from executor.errors import CheckpointError
from executor.model.drafts.config import DraftConfig
from executor.model.families import read_spec
from executor.model.spec import ModelSpec, MoeSpec, Yarn
from executor.parallel.layout import Topology
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.drafts.draft_checkpoints import HIDDEN, KINDS, VOCAB, save_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("target")
    save_qwen3_moe(path, "wide", rope_theta=10000.0)
    return read_spec(path)


Read = Callable[..., DraftConfig]


@pytest.fixture
def read(tmp_path: Path, target: ModelSpec) -> Read:
    """Returns what reads a draft of a kind, with changed settings, beside a target."""

    def new(kind: str, *, beside: ModelSpec = target, **changed: Any) -> DraftConfig:
        save_draft(tmp_path, kind)
        values = {**KINDS[kind].config, **changed}
        kept = {name: value for name, value in values.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return DraftConfig.from_dir(tmp_path, beside)

    return new


@pytest.mark.parametrize(
    ("kind", "algorithm", "num_layers", "num_features"),
    [
        ("eagle3", "eagle", 1, 3),
        ("nextn", "eagle", 1, 1),
        ("nextn_three_layers", "multi_layer_eagle", 3, 1),
        ("qwen3_next_names", "eagle", 1, 1),
        ("qwen3_next_names_two_layers", "multi_layer_eagle", 2, 1),
        ("frozen_kv", "frozen_kv_mtp", 1, 1),
    ],
)
def test_a_layout_says_how_it_is_drafted_with_and_what_it_takes(
    read: Read, kind: str, algorithm: str, num_layers: int, num_features: int
):
    config = read(kind)
    assert (config.algorithm, config.num_layers) == (algorithm, num_layers)
    assert config.feature_size == num_features * HIDDEN
    assert config.gathered_size == (4 * HIDDEN if kind == "eagle3" else HIDDEN)


def test_aux_layers_keep_their_order(read: Read):
    assert read("eagle3").aux_layers == (0, 2, 1)


def test_aux_layers_that_are_not_said_are_those_of_the_published_heads(
    read: Read, tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("deep")
    save_qwen3_moe(path, "wide", num_hidden_layers=12)
    deep = read_spec(path)
    assert read("eagle3", beside=deep, eagle_config="absent").aux_layers == (1, 5, 8)


@pytest.mark.parametrize(("kind", "num_layers"), [("eagle3", 1), ("nextn_three_layers", 3)])
def test_what_is_kept_of_a_draft_is_its_own_heads_share(read: Read, kind: str, num_layers: int):
    config = read(kind)
    for size, num_kv_heads in ((1, 2), (2, 1)):
        topology = Topology(attn_tp_size=size, attn_tp_rank=size - 1)
        assert config.kv_shape(4, torch.bfloat16, topology.capacity) == KVShape.of_heads(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=8,
            block_size=4,
            dtype=torch.bfloat16,
        )


def test_a_frozen_kv_draft_keeps_nothing(read: Read):
    config = read("frozen_kv")
    assert config.kv_shape(4, torch.bfloat16) is None
    assert config.target_kv_layer_ids == (2, 0)


def test_a_frozen_kv_draft_that_reads_a_layer_with_a_window_is_refused(
    read: Read, target: ModelSpec
):
    windowed, *others = target.layers
    windowed = replace(windowed, attention=replace(windowed.attention, window=8))
    beside = replace(target, layers=(windowed, *others))
    with pytest.raises(CheckpointError, match=r"=\[2, 0\]: .* windows .*; use layers of \[1, 2\]"):
        read("frozen_kv", beside=beside)
    assert read("frozen_kv", beside=beside, target_kv_layer_ids=[2, 1]).target_kv_layer_ids


@pytest.mark.parametrize(
    "changed",
    [
        {"rotary_dim": 16},
        {"scaling": Yarn(factor=4.0, original_max_position_embeddings=128)},
        {"attention_factor": 1.2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_frozen_kv_draft_whose_queries_turn_otherwise_than_the_keys_is_refused(
    read: Read, target: ModelSpec, changed: dict[str, Any]
):
    turned = replace(target, ropes=(replace(target.ropes[0], **changed),))
    with pytest.raises(
        CheckpointError, match=r"rope=RopeSpec\(.*: the draft reads the target's keys"
    ):
        read("frozen_kv", beside=turned)


def test_a_draft_for_short_texts_reaches_as_far_as_its_target(read: Read, target: ModelSpec):
    config = read("eagle3", max_position_embeddings=64)
    assert config.layers.max_position_embeddings == target.max_position_embeddings == 512


def test_a_published_head_may_leave_out_llamas_rope_theta(read: Read):
    assert read("eagle3").layers.ropes[0].theta == 10000.0
    assert read("eagle3", rope_theta=5e5).layers.ropes[0].theta == 5e5


def test_layers_have_experts_where_their_numbers_say_so(read: Read):
    def sparse(**changed: Any) -> list[bool]:
        layers = read("nextn_three_layers", **changed).layers.layers
        return [isinstance(layer.feed_forward, MoeSpec) for layer in layers]

    assert sparse() == [False, True, False]
    assert sparse(mlp_only_layers=[], decoder_sparse_step=2) == [True, False, True]
    assert not any(sparse(mlp_only_layers=[3, 4, 5]))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"hidden_size": 64}, "hidden_size=64, and the target has 48"),
    ("eagle3", {"vocab_size": 128}, "vocab_size=128, and the target has 96"),
    ("eagle3", {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size=97 of vocab_size=96"),
    ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported; only 1"),
    ("eagle3", {"target_hidden_size": 64}, "target_hidden_size=64 .* only 48"),
    ("eagle3", {"norm_before_residual": True}, "norm_before_residual"),
    ("eagle3", {"mlp_bias": True}, "mlp_bias"),
    ("eagle3", {"hidden_act": "gelu"}, "hidden_act"),
    ("eagle3", {"num_experts": 8, "num_experts_per_tok": 3}, "num_experts=8"),
    ("eagle3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_type='linear'"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
    (
        "eagle3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
        r"layer_ids=\[0, 1, 3\]: need three layers of the target, from 0 to 2",
    ),
    (
        "eagle3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
        r"layer_ids=\[0, 1\]: need three",
    ),
    (
        "eagle3",
        {"eagle_config": {"use_mtp_layernorm": True}},
        "eagle_config.use_mtp_layernorm=True",
    ),
    (
        "eagle3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "depth": 2}},
        "eagle_config.depth=2: not known",
    ),
    ("eagle3", {"eagle_config": [1]}, r"eagle_config=\[1\] is no object"),
    ("eagle3", {"fc_norm": True}, r"fc_norm=True: not known of \['LlamaForCausalLMEagle3'\]"),
    ("eagle3", {"layer_types": ["sliding_attention"]}, "layer_types=.* is not supported"),
    ("eagle3", {"eagle_config": "absent"}, r"layer_ids=\[1, 0, -1\], by default: need three"),
    ("eagle3", {"architectures": ["LlamaForCausalLMEagle"]}, "LlamaForCausalLMEagle is no draft"),
    ("nextn", {"num_nextn_predict_layers": 0}, "at least 1 layer"),
    ("nextn", {"num_nextn_predict_layers": "absent"}, "num_nextn_predict_layers or .* is missing"),
    ("nextn", {"intermediate_size": "absent", "mlp_only_layers": [3]}, "intermediate_size is miss"),
    ("nextn", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': not known of"),
    ("nextn", {"hidden_size": 64}, "hidden_size=64, and the target has 48"),
    ("nextn", {"num_experts_per_tok": 2}, "num_experts=8, num_experts_per_tok=2: .* 8 and 3"),
    ("nextn", {"num_experts": 16}, "num_experts=16, num_experts_per_tok=3: .* 8 and 3"),
    ("qwen3_next_names", {"architectures": ["Qwen3NextForCausalLM"]}, "'Qwen3NextForCausalLM' is"),
    ("qwen3_next_names", {"shared_expert_intermediate_size": 24}, "shared_expert_intermediate"),
    ("frozen_kv", {"head_dim": 16}, "head_dim=16: .* it must be 32"),
    ("frozen_kv", {"num_attention_heads": 8}, "num_attention_heads=8: .* it must be 4"),
    ("frozen_kv", {"rope_theta": 5e5}, r"rope_theta=500000\.0: .* must be 10000\.0"),
    ("frozen_kv", {"target_kv_layer_ids": [2]}, r"target_kv_layer_ids=\[2\]: need one .* 0 to 2"),
    ("frozen_kv", {"target_kv_layer_ids": [2, 3]}, r"target_kv_layer_ids=\[2, 3\]: need one"),
    ("frozen_kv", {"target_kv_layer_ids": "all"}, "target_kv_layer_ids='all' is no list"),
    ("frozen_kv", {"sinks": True}, "sinks=True: not known of .'FrozenKvMTPForCausalLM'"),
    ("frozen_kv", {"num_experts": 8, "num_experts_per_tok": 3}, "num_experts=8"),
]


@pytest.mark.parametrize(("kind", "changed", "problem"), REFUSED, ids=lambda x: str(x)[:60])
def test_what_does_not_fit_or_is_not_supported_is_refused_by_name(
    read: Read, kind: str, changed: dict[str, Any], problem: str
):
    with pytest.raises(CheckpointError, match=problem):
        read(kind, **changed)


def test_a_model_without_a_draft_says_what_it_would_need(tmp_path: Path, target: ModelSpec):
    save_draft(tmp_path, "qwen3_next_names")
    save_file({"model.norm.weight": torch.ones(HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"Qwen3MoeForCausalLM is no draft .* mtp\.fc"):
        DraftConfig.from_dir(tmp_path, target)
