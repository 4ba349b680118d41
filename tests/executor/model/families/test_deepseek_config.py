"""If this fails, a published DeepSeek or Kimi is refused, or read as another model than it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.errors import CheckpointError
from executor.model.decoder.sizes import attention_of, attention_share, kv_shape
from executor.model.families import read_spec
from executor.model.spec import GroupScore, MlaSpec, ModelSpec, MoeSpec, Scores, Yarn
from executor.parallel.layout import Capacity, Topology

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = V3 | {
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
}
V2_LITE = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}


def read(path: Path, fields: dict[str, Any], **changed: Any) -> ModelSpec:
    (path / "config.json").write_text(json.dumps({**fields, **changed}))
    return read_spec(path)


def parts(spec: ModelSpec) -> tuple[MlaSpec, MoeSpec]:
    attention, experts = spec.layers[-1].attention, spec.layers[-1].feed_forward
    assert isinstance(attention, MlaSpec)
    assert isinstance(experts, MoeSpec)
    return attention, experts


def test_the_published_v3_is_read_as_described(tmp_path: Path) -> None:
    spec = read(tmp_path, V3)
    attention, experts = parts(spec)
    assert [isinstance(x.feed_forward, MoeSpec) for x in spec.layers] == [False] * 3 + [True] * 58
    assert len(spec.mtp_layers) == 1
    assert (attention.q_lora_rank, attention.v_head_dim) == (1536, 128)
    assert experts.shared is not None
    assert experts.shared.intermediate_size == 2048
    router = experts.router
    assert (router.scores, router.group_score) == (Scores.SIGMOID, GroupScore.TOP2)
    assert (router.num_groups, router.num_kept_groups, router.factor) == (8, 4, 2.5)
    assert router.in_float32
    assert router.correction_bias
    [rope] = spec.ropes
    assert isinstance(rope.scaling, Yarn)
    assert (rope.rotary_dim, rope.scaling.factor, rope.attention_factor) == (64, 40, 1)


def test_latents_are_kept_whole_however_many_executors_share_the_heads(tmp_path: Path) -> None:
    spec = read(tmp_path, V3)
    topology = Topology(attn_tp_rank=3, attn_tp_size=8)
    assert kv_shape(spec, 1, torch.bfloat16, topology.capacity).bytes_per_block == 70_272
    with pytest.raises(ValueError, match=r"attn_tp_size=3: num_attention_heads=128 does not"):
        attention_share(attention_of(spec), Capacity(attn_tp_size=3))


@pytest.mark.parametrize(
    ("fields", "factor", "scale"),
    [(V3, 40, 0.135234), (V2_LITE, 40, 0.114721), (KIMI_K2, 32, 0.130861), (KIMI_K2, 64, 0.144680)],
)
def test_yarn_sharpens_the_softmax_as_published(
    fields: dict[str, Any], factor: float, scale: float, tmp_path: Path
) -> None:
    rope = fields["rope_scaling"] | {"factor": factor}
    assert attention_of(read(tmp_path, fields, rope_scaling=rope)).scale == pytest.approx(
        scale, abs=1e-6
    )


def test_v2_lite_has_no_groups_and_renormalises_nothing(tmp_path: Path) -> None:
    attention, experts = parts(read(tmp_path, V2_LITE))
    assert attention.q_lora_rank is None
    assert experts.shared is not None
    assert experts.shared.intermediate_size == 2 * 2048
    assert (experts.router.num_groups, experts.router.renormalise) == (1, False)


@pytest.mark.parametrize(
    ("fields", "changed", "problem"),
    [
        (V3, {"n_group": None}, "n_group is missing"),
        (V3, {"topk_group": None}, "topk_group is missing"),
        (V3, {"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
        (V3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        (V3, {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; only 1 is"),
        (V3, {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (V3, {"qk_nope_head_dim": None}, "qk_nope_head_dim is missing"),
        (V3, {"index_topk": 2048}, "index_topk=2048: not known"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        (
            V2_LITE,
            {"topk_method": "group_limited_greedy", "n_group": None},
            "n_group is missing",
        ),
        (
            V3,
            {"rope_scaling": V3["rope_scaling"] | {"mscale": "x"}},
            "mscale='x' is no number above 0",
        ),
        (
            V3,
            {"rope_scaling": V3["rope_scaling"] | {"mscale_all_dim": -1}},
            "mscale_all_dim=-1 is no number above 0",
        ),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(
    fields: dict[str, Any], changed: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read(tmp_path, fields, **changed)
