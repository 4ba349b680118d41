"""Ledger of launches: what a decode step of each model launches, per layer and outside its graph.

Each launch takes a GPU about 2 us, whatever it does: at one sequence these are most of a step. An
operator may be several kernels (topk, sort, split attention). A change that adds one shows here; one that
takes some away writes the new figure into the table.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from executor.model.flashinfer.operators import FlashInferOps
from router.requests.request import SamplingParams
from tests.support.paths import DEMO_MODEL
from tests.together.cuda.support.fake_cell import FakeCell
from tests.together.cuda.support.fake_gpu import FakeGpu
from tests.together.cuda.support.requests import ASKS, PENALISED, SAMPLED, SMALL
from tests.together.speculation.speculative_cell import Router, serve

# Sizes as published, of three layers; all else of a configuration is a demo model's.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
    "DeepSeek-V3": {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 129280,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "eos_token_id": 200002,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "vocab_size": 201088,
    },
}
DEMOS = {"Qwen3-30B-A3B": DEMO_MODEL, "DeepSeek-V3": DEMO_MODEL.with_name("demo_model_mla")}


class Launches(NamedTuple):
    """Launches of a decode step of one executor.

    Attributes:
        layer: Of an expert layer, from one attention to the next.
        rest: In the graph besides the layers that are counted so: of three layers, one is.
        greedy: Outside the graph, the graph itself included.
        sampled: Likewise, of a sequence with a temperature, top_k and top_p.
        penalised: Likewise, with a bias and a frequency penalty besides.
    """

    layer: int
    rest: int
    greedy: int
    sampled: int
    penalised: int


LEDGER = {
    "Qwen3-30B-A3B": Launches(9, 26, 10, 22, 43),
    "DeepSeek-V3": Launches(19, 40, 10, 22, 43),
    "gpt-oss-120b": Launches(10, 30, 12, 24, 45),
}
OF_GROUPED = {"Qwen3-30B-A3B": 22, "DeepSeek-V3": 32, "gpt-oss-120b": 34}
ATTENTION = ("run", "paged_run")


def cell_of(gpu: FakeGpu, folder: Path, name: str, **settings: Any) -> FakeCell:
    base = json.loads((DEMOS[name] / "config.json").read_text()) if name in DEMOS else {}
    config = base | MODELS[name] | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return FakeCell(gpu, model=folder, **SMALL | settings)


def layer_of(graph: list[str]) -> list[str]:
    """Returns what the graph launches from its second attention to its third."""
    _, second, third = [place for place, name in enumerate(graph) if name in ATTENTION]
    return graph[second:third]


@pytest.mark.parametrize("name", LEDGER)
def test_a_decode_step_launches_what_the_ledger_says(
    name: str, gpu: FakeGpu, tmp_path: Path
) -> None:
    cell = cell_of(gpu, tmp_path, name)
    [graph] = gpu.graphs
    router, outside = Router(cell), []
    for sampling in (SamplingParams(), SAMPLED, PENALISED):
        serve(router, [replace(ASKS[0], sampling=sampling)])
        last = cell.steps[0][-1].launched
        assert "graph" in last
        outside.append(len(last))
    layer = layer_of(graph)
    assert Launches(len(layer), len(graph) - len(layer), *outside) == LEDGER[name], (graph, last)


@pytest.mark.parametrize("name", OF_GROUPED)
def test_where_no_fused_experts_are_built_a_layer_launches_what_the_ledger_says(
    name: str, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlashInferOps, "has_built", lambda ops, module: False)
    cell_of(gpu, tmp_path, name)
    [graph] = gpu.graphs
    layer = layer_of(graph)
    assert len(layer) == OF_GROUPED[name], layer
