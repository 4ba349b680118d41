"""If this fails, an operator is told that a model fits and the executor does not start, or other sizes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from executor.__main__ import main
from executor.build.check import check
from executor.build.executor import build_worker
from executor.build.keeping import weight_bytes
from executor.build.plan import Blueprint
from executor.config import ExecutorConfig
from executor.model.cpu_kernels.library import load
from executor.model.decoder.kernels import cpu_kernels
from executor.model.drafts.config import DraftConfig
from executor.model.families import read_spec
from executor.model.weights.formats import Fp8Format
from executor.model.weights.kept import DEQUANTISED, IN_INT8, Keeping
from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.model.weights.kept_models import LATENT, twins
from tests.executor.support.checkpoints import save_latent_model, save_qwen3_moe
from tests.executor.support.serving import Rank
from tests.support.paths import DEMO_DRAFTS, DEMO_MODEL

SETTINGS: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 4, "max_num_seqs": 2}


def check_lines(**settings: Any) -> tuple[bool, dict[str, str]]:
    """Returns whether an executor would load, and what it would hold, by name."""
    lines: list[str] = []
    fits = check(ExecutorConfig(**settings), lines.append)
    return fits, {line[:22].strip(): line[22:] for line in lines}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def bytes_of(line: str) -> int:
    return int(line.split()[0].replace(",", ""))


def test_an_executor_holds_what_the_check_said(model: Path) -> None:
    """Heads repeat a norm's weight; half of the experts, and of the heads' KV, are elsewhere."""
    fits, alone = check_lines(model=model)
    assert fits
    assert alone["family"] == "Qwen3MoeForCausalLM"
    [file] = model.glob("*.safetensors")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    fields = json.loads((model / "config.json").read_text())
    heads = fields["num_attention_heads"] + fields["num_key_value_heads"]
    repeated = fields["num_hidden_layers"] * (heads - 2) * fields["head_dim"] * 2
    assert bytes_of(alone["weights"]) == file.stat().st_size - header - 8 + repeated
    worker, _ = build_worker(ExecutorConfig(model=model, **SETTINGS))
    pool = worker._kv_pool
    assert bytes_of(alone["KV per token"]) == pool.all_bytes_per_block // 16
    fits, shared = check_lines(model=model, attn_tp_size=2)
    assert fits
    assert shared["experts"] == "4 of 8 in 4 slots, each shared by 1 executors"
    assert bytes_of(shared["KV per token"]) == bytes_of(alone["KV per token"]) // 2
    assert bytes_of(shared["weights"]) < bytes_of(alone["weights"])
    fits, elastic = check_lines(model=model, max_dp_size=3, min_dp_size=1)
    assert fits
    assert elastic["experts"] == "8 of 8 in 8 slots, each shared by 1 executors"
    assert bytes_of(elastic["weights"]) == bytes_of(alone["weights"])


def test_int8_takes_a_byte_for_a_weight_and_leaves_the_rest_to_kv() -> None:
    fits, lines = check_lines(model=DEMO_MODEL, weights="int8", dtype="bfloat16")
    assert fits
    _, plain = check_lines(model=DEMO_MODEL, dtype="bfloat16")
    tensors = load_file(DEMO_MODEL / "model.safetensors").items()
    quantised = [x for name, x in tensors if name.endswith(("_proj.weight", "lm_head.weight"))]
    spared = sum(x.numel() - 4 * len(x) for x in quantised)
    assert bytes_of(plain["weights"]) - bytes_of(lines["weights"]) == spared
    num_tokens = spared // bytes_of(plain["KV per token"])
    assert lines["int8 spares"] == f"{spared:,} bytes, KV of {num_tokens:,} tokens"


@pytest.mark.skipif(load() is None, reason="no kernels for this CPU")
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_tied_head_is_counted_as_kernels_have_it(weights: str, tmp_path: Path) -> None:
    save_qwen3_moe(tmp_path, "tied", dtype=torch.bfloat16, vocab_size=50, hidden_size=64)
    told = {name: check_lines(model=tmp_path, weights=name)[1] for name in ("auto", weights)}
    kernels = cpu_kernels(
        read_spec(tmp_path),
        dtype=torch.bfloat16,
        keeping=IN_INT8 if weights == "int8" else DEQUANTISED,
    )
    head = Rank(tmp_path, dtype=torch.bfloat16, kernels=kernels).model.lm_head._linear
    packed = [head.weight] if head._scales is None else [head.weight, head._scales]
    num_bytes = sum(x.untyped_storage().nbytes() for x in packed)
    assert bytes_of(told[weights]["packed head"]) == num_bytes
    if weights == "int8":
        plain, in_int8 = (
            bytes_of(lines["weights"]) + bytes_of(lines["packed head"]) for lines in told.values()
        )
        assert bytes_of(told["int8"]["int8 spares"]) == plain - in_int8


@pytest.mark.parametrize(
    ("save", "shape", "kv_bytes"),
    [
        (
            save_model,
            "gpt_oss",
            2 * 2 * 2 * 16 * 4,
        ),  # layers that see all, keys and values, heads, width, float32
        (save_latent_model, "deepseek_v3", 3 * (32 + 8) * 4),  # layers, latent and rope
    ],
)
def test_other_families_are_checked_by_what_they_keep(
    save: Callable[..., Any], shape: str, kv_bytes: int, tmp_path: Path
) -> None:
    save(tmp_path, shape)
    fits, lines = check_lines(model=tmp_path)
    assert fits
    assert bytes_of(lines["KV per token"]) == kv_bytes
    tensors = load_file(tmp_path / "model.safetensors").values()
    assert bytes_of(lines["weights"]) == sum(tensor.nbytes for tensor in tensors)


def test_windows_are_told_of_apart_where_some_layers_see_all(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt_oss")
    _, lines = check_lines(model=tmp_path, block_size=4)
    told = lines["KV of windows"]
    assert told == "6,144 bytes of a sequence that decodes, 3 blocks for window=8"
    worker, description = build_worker(ExecutorConfig(model=tmp_path, block_size=4, **SETTINGS))
    assert 3 * worker._kv_pool.all_bytes_per_block == bytes_of(told)
    sizes = {line.what: (line.tokens, line.bytes) for line in description.budget.lines}
    assert sizes["KV of a token"] == (1, bytes_of(lines["KV per token"]))
    assert sizes["KV of a sequence's windows"] == (12, bytes_of(told))
    assert description.kv_window == 8
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["layer_types"] = ["sliding_attention"] * 4
    (tmp_path / "config.json").write_text(json.dumps(fields))
    _, lines = check_lines(model=tmp_path)
    assert "every block is kept" in lines["KV of windows"]
    assert bytes_of(lines["KV per token"]) == 4 * 2 * 2 * 16 * 4


def test_quantised_weights_are_checked_as_they_load_and_as_a_gpu_keeps_them(tmp_path: Path) -> None:
    path, _ = twins(tmp_path, save_latent_model, "deepseek_v3", **LATENT)
    fits, lines = check_lines(model=path)
    assert fits
    blueprint = Blueprint.of(ExecutorConfig(model=path))
    assert bytes_of(lines["weights"]) == weight_bytes(blueprint, DEQUANTISED)
    kept = lines["weights if kept"]
    assert bytes_of(kept) == weight_bytes(blueprint, Keeping(*[Fp8Format.kept_as] * 2))
    assert "with experts and linears in FP8" in kept
    _, lines = check_lines(model=path, moe_runner="cutedsl")
    assert bytes_of(lines["weights if kept"]) > bytes_of(kept)
    assert lines["never kept"].startswith("experts: moe_runner=cutedsl")


@pytest.mark.parametrize("draft", ["eagle", "mtp3", "frozen_kv"])
def test_kv_is_told_of_with_all_that_a_draft_keeps_for_each_block(draft: str) -> None:
    settings = {"model": DEMO_MODEL, "draft_model": DEMO_DRAFTS / draft}
    _, lines = check_lines(**settings)
    worker, _ = build_worker(ExecutorConfig(**settings, **SETTINGS))
    assert bytes_of(lines["KV per token"]) == worker._kv_pool.all_bytes_per_block // 16


def test_a_pool_that_is_too_small_for_rows_spill_blocks_is_refused() -> None:
    settings: dict[str, Any] = {"model": DEMO_MODEL, "draft_model": DEMO_DRAFTS / "eagle"}
    settings |= {"max_num_seqs": 2, "device": "cpu"}  # a spill block each
    for num_bytes in (4 * 4624 * 16, 4 * 4624 * 16 - 1):
        config = ExecutorConfig(**settings, kv_cache_bytes=num_bytes)
        fits, lines = check_lines(**settings, kv_cache_bytes=num_bytes)
        if fits:
            build_worker(config)
            continue
        with pytest.raises(ValueError, match="a block takes 73984 bytes") as refused:
            build_worker(config)
        assert lines["refused"] == str(refused.value)
    assert not fits


@pytest.mark.parametrize("draft", ["eagle", "mtp", "frozen_kv"])
def test_a_draft_is_checked_with_its_target(draft: str) -> None:
    settings = {"model": DEMO_MODEL, "draft_model": DEMO_DRAFTS / draft, "dtype": "bfloat16"}
    fits, lines = check_lines(**settings)
    assert fits
    num_bytes = bytes_of(lines["weights of the draft"])
    fits, lines = check_lines(**settings, weights="int8")
    assert fits
    assert num_bytes > bytes_of(lines["weights of the draft"]) > num_bytes // 2


def test_int8_must_fit_the_draft_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    read_draft = DraftConfig.from_dir

    def with_odd_width(*arguments: Any) -> DraftConfig:
        draft = read_draft(*arguments)
        return replace(draft, layers=replace(draft.layers, hidden_size=48))

    monkeypatch.setattr(DraftConfig, "from_dir", with_odd_width)
    config = ExecutorConfig(
        model=DEMO_MODEL, draft_model=DEMO_DRAFTS / "mtp", dtype="bfloat16", weights="int8"
    )
    with pytest.raises(ValueError, match="multiples of 32, not 48: set weights=auto"):
        Blueprint.of(config)


def test_what_is_refused_is_said_after_what_is_known(model: Path) -> None:
    fits, lines = check_lines(model=model, dp_size=3, dp_rank=2)
    assert fits
    assert lines["experts"] == "2 of 8 in 3 slots, each shared by 1 executors"
    _, first = check_lines(model=model, dp_size=3)
    assert lines["weights"] == first["weights"], "a ghost takes the memory of an expert"
    fits, lines = check_lines(model=model, dp_size=7, ep_size=1)
    assert not fits
    assert "ep_size=1: moe_intermediate_size=" in lines["refused"]
    (model / "model.safetensors").unlink()
    fits, lines = check_lines(model=model)
    assert not fits
    assert bytes_of(lines["weights"]) > 0
    assert "has neither model.safetensors nor" in lines["refused"]


def test_the_program_ends_with_0_or_2(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.settings.configure_logging", lambda level="info": None)
    arguments = ["--model", str(model), "--check", "on"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    fields = json.loads((model / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "awq"}
    (model / "config.json").write_text(json.dumps(fields))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "quant_method='awq' is not supported" in result.output
