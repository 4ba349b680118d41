"""If this fails, a model is run with another architecture than it was trained with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.errors import CheckpointError
from executor.model.decoder.fields import MAX_CONFIG_BYTES
from executor.model.decoder.sizes import attention_of, attention_share, kv_shape
from executor.model.families import read_spec
from executor.model.spec import Llama3Scaling, MlpSpec, ModelSpec, MoeSpec, QkNorm
from executor.parallel.layout import Capacity

BEFORE_5: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}


def read(path: Path, **changed: Any) -> ModelSpec:
    values = {name: value for name, value in (BEFORE_5 | changed).items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(values))
    return read_spec(path)


@pytest.mark.parametrize(
    ("quantised", "dtype"), [("absent", torch.float32), ({"quant_method": "mxfp4"}, torch.bfloat16)]
)
def test_a_file_that_names_no_type_means_that_of_its_plain_weights(
    tmp_path: Path, quantised: Any, dtype: torch.dtype
):
    """gpt-oss is published so, and float32 would take twice the memory of what it was trained in."""
    assert read(tmp_path, torch_dtype="absent", quantization_config=quantised).dtype == dtype


def test_both_spellings_say_the_same(tmp_path: Path):
    before = read(tmp_path)
    since = read(
        tmp_path,
        num_experts="absent",
        num_local_experts=8,
        torch_dtype="absent",
        dtype="bfloat16",
        rope_theta="absent",
        rope_scaling="absent",
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
    )
    assert before == since
    assert (before.num_experts, before.dtype, before.ropes[0].theta) == (8, torch.bfloat16, 5000.0)


def test_head_dim_follows_from_the_heads_if_absent(tmp_path: Path):
    assert attention_of(read(tmp_path)).head_dim == 8
    assert attention_of(read(tmp_path, head_dim=16)).head_dim == 16


def test_the_generation_config_decides_what_ends_a_text(tmp_path: Path):
    assert read(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [13, 2]}))
    assert read(tmp_path).eos_token_ids == (13, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1.0}))
    assert read(tmp_path, eos_token_id=[2, 7, 2]).eos_token_ids == (2, 7)
    for wrong in (10**6, -1, "2", [2, None], True):
        with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id=.* need ids below"):
            read(tmp_path, eos_token_id=wrong)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()


def test_sparse_steps_and_mlp_only_layers_pick_the_layers_with_experts(tmp_path: Path):
    kinds = [type(layer.feed_forward) for layer in read(tmp_path).layers]
    assert kinds == [MlpSpec, MoeSpec, MlpSpec, MlpSpec]


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5000.0}},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "awq"}},
        {"partial_rotary_factor": 0.05},
        {"torch_dtype": "float8_e4m3fn"},
        {"num_key_value_heads": 3},
        {"num_experts_per_tok": 9},
        {"vocab_size": "absent"},
        {"hidden_size": "wide"},
        {"architectures": []},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changed: dict[str, Any]):
    name = {"rope_scaling": "rope_type", "rope_parameters": "rope_type", "torch_dtype": "dtype"}
    field = next(iter(changed))
    with pytest.raises(CheckpointError, match=name.get(field, field)):
        read(tmp_path, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_hidden_layers": 10**9},
        {"num_experts": 10**5},
        {"vocab_size": 2**40},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"decoder_sparse_step": 0},
        {"max_position_embeddings": 2**24 + 1},
        {"num_nextn_predict_layers": 1025},
    ],
    ids=lambda changed: "{}={}".format(*next(iter(changed.items()))),
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(
    tmp_path: Path, changed: dict[str, int]
):
    [(name, value)] = changed.items()
    with pytest.raises(CheckpointError, match=rf"{name}={value} .*\d"):
        read(tmp_path, **changed)


def test_the_largest_models_are_within_the_bounds(tmp_path: Path):
    read(tmp_path, num_hidden_layers=61, num_experts=384)
    read(tmp_path, vocab_size=2**20, max_position_embeddings=10_485_760)


@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, '{"a": "\xff"}', f'{{"a": {"9" * 5000}}}'],
    ids=["nested", "no UTF-8", "a number of 5,000 digits"],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_spec(tmp_path)


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(CheckpointError, match=r"config\.json has more than 4,194,304 bytes"):
        read_spec(tmp_path)


def test_an_unknown_architecture_names_those_that_are_known(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"'NoSuchModel' .* Qwen3MoeForCausalLM.* are"):
        read(tmp_path, architectures=["NoSuchModel"])
    # Before what such a model's file may have under other names, or lack.
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with pytest.raises(CheckpointError, match=r"'NoSuchModel' is not supported"):
        read_spec(tmp_path)


def test_a_directory_without_a_model_says_so(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_spec(tmp_path)


def shares(
    tmp_path: Path, heads: int, kv_heads: int, size: int
) -> list[tuple[list[int], list[int]]]:
    attention = attention_of(
        read(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8)
    )
    found = []
    for rank in range(size):
        share = attention_share(attention, Capacity(attn_tp_rank=rank, attn_tp_size=size))
        found.append((list(share.q_heads), list(share.kv_heads)))
    return found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(4, 2, 1), (4, 2, 2), (4, 2, 4), (4, 1, 2), (8, 2, 4), (12, 3, 6), (6, 3, 3), (32, 4, 16)],
)
def test_every_query_head_is_on_one_executor_with_the_kv_head_that_it_reads(
    tmp_path: Path, heads: int, kv_heads: int, size: int
):
    found = shares(tmp_path, heads, kv_heads, size)
    assert [head for q_heads, _ in found for head in q_heads] == list(range(heads))
    for q_heads, held in found:
        assert sorted({head // (heads // kv_heads) for head in q_heads}) == held
        assert len(q_heads) % len(held) == 0


def test_kv_heads_that_are_fewer_than_the_executors_are_on_several(tmp_path: Path):
    assert shares(tmp_path, 8, 2, 4) == [([0, 1], [0]), ([2, 3], [0]), ([4, 5], [1]), ([6, 7], [1])]


def test_what_each_executor_keeps_is_its_share_of_the_kv_heads(tmp_path: Path):
    config = read(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    shapes = [kv_shape(config, 4, torch.float32, Capacity(attn_tp_size=size)) for size in (1, 2, 4)]
    assert [[p.num_heads for p in shape.parts] for shape in shapes] == [
        [2, 2],
        [1, 1],
        [1, 1],
    ]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "problem"),
    [
        (6, 3, 2, r"attn_tp_size=2: .*num_key_value_heads=3 .*; use one of 1, 3, 6"),
        (6, 3, 4, r"attn_tp_size=4: num_attention_heads=6 does not .*; use one of 1, 3, 6"),
        (12, 4, 3, r"attn_tp_size=3: .*num_key_value_heads=4 .*; use one of 1, 2, 4, 12"),
    ],
)
def test_heads_that_cannot_be_shared_name_the_sizes_that_can(
    tmp_path: Path, heads: int, kv_heads: int, size: int, problem: str
):
    with pytest.raises(ValueError, match=problem):
        shares(tmp_path, heads, kv_heads, size)


# What published files of other families have beside sizes, and leave out.
_DENSE = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), "absent")
_DENSE |= dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), "absent")
_NO_WINDOWS = dict.fromkeys(("sliding_window", "use_sliding_window"), "absent")
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama": _DENSE
    | _NO_WINDOWS
    | {"mlp_bias": False, "attention_bias": False, "pretraining_tp": 1, "rope_scaling": _LLAMA3},
    "Qwen2": _DENSE | {"max_window_layers": 28, "use_mrope": False},
    "Qwen3": _DENSE | {"max_window_layers": 36, "head_dim": 16, "attention_bias": False},
    "Mixtral": _DENSE
    | _NO_WINDOWS
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "Olmoe": _DENSE
    | _NO_WINDOWS
    | {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": None, "norm_topk_prob": False},
}


def read_published(path: Path, stem: str, **changed: Any) -> ModelSpec:
    return read(path, architectures=[f"{stem}ForCausalLM"], **(PUBLISHED[stem] | changed))


@pytest.mark.parametrize(
    ("stem", "has_bias", "norm", "experts"),
    [
        ("Llama", False, QkNorm.NONE, None),
        ("Qwen2", True, QkNorm.NONE, None),
        ("Qwen3", False, QkNorm.HEAD, None),
        ("Mixtral", False, QkNorm.NONE, True),
        ("Olmoe", False, QkNorm.PROJECTION, False),
    ],
)
def test_a_published_file_says_which_switches_a_family_has(
    tmp_path: Path, stem: str, has_bias: bool, norm: QkNorm, experts: bool | None
):
    spec = read_published(tmp_path, stem)
    attention = attention_of(spec)
    assert (attention.qkv_bias, attention.o_bias, attention.qk_norm) == (has_bias, False, norm)
    assert experts is (None if spec.moe is None else spec.moe.router.renormalise)
    assert spec.norm_eps == (1e-5 if experts is not None else 1e-6)
    assert isinstance(spec.ropes[0].scaling, Llama3Scaling) == (stem == "Llama")


def test_qwen3_coder_is_the_qwen3_moe_that_its_file_describes(tmp_path: Path):
    coder = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert read(tmp_path, **coder) == read(tmp_path)
    for name, other in {"qkv_bias": True, "shared_expert_intermediate_size": 24}.items():
        with pytest.raises(CheckpointError, match=f"{name}={other} is not supported"):
            read(tmp_path, **(coder | {name: other}))


@pytest.mark.parametrize(
    ("stem", "changed", "problem"),
    [
        ("Llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("Llama", {"sliding_window": 64}, "sliding_window=64: not known of"),
        ("Llama", {"rope_scaling": {"rope_type": "llama3"}}, r"rope_parameters\.factor is missing"),
        ("Qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("Qwen3", {"layer_types": [["full_attention"]]}, "layer_types="),
        ("Mixtral", {"sliding_window": 4096}, "sliding_window=4096 .* leaving it out is"),
        ("Olmoe", {"clip_qkv": 8.0}, r"clip_qkv=8\.0"),
    ],
    ids=str,
)
def test_what_a_family_has_not_implemented_is_refused_by_name(
    tmp_path: Path, stem: str, changed: dict[str, Any], problem: str
):
    with pytest.raises(CheckpointError, match=problem):
        read_published(tmp_path, stem, **changed)


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"clip_qkv": 8.0}, r"clip_qkv=8\.0: not known of \['Qwen3MoeForCausalLM'\]"),
    ({"n_shared_experts": 1}, "n_shared_experts=1"),
    ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, r"rope_parameters\.factor=2\.0"),
    ({"text_config": {"hidden_size": 8}}, "text_config="),
    ({"rope_interleave": False}, "rope_interleave=False"),
]


@pytest.mark.parametrize(("changed", "problem"), UNKNOWN, ids=lambda x: str(x)[:40])
def test_a_field_that_nothing_reads_stops_the_load_by_name(
    tmp_path: Path, changed: dict[str, Any], problem: str
):
    with pytest.raises(CheckpointError, match=problem):
        read(tmp_path, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"n_routed_experts": 16},
        {"dtype": "float16"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
        {"rope_scaling": {"rope_type": "default", "type": "yarn"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_two_spellings_that_differ_are_refused(tmp_path: Path, changed: dict[str, Any]):
    with pytest.raises(CheckpointError, match="contradict each other; leave out the wrong one"):
        read(tmp_path, **changed)


def test_fields_of_training_and_nulls_stop_nothing(tmp_path: Path):
    read(tmp_path, initializer_range=0.5, use_cache=False, clip_qkv=None)
