"""If this fails, a draft guesses worse than it was trained to, and nobody sees but in the speed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.errors import CheckpointError
from executor.model.decoder.kernels import stacked_kernels
from executor.model.flashinfer.operators import FlashInferOps
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.drafts.draft_checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    KINDS,
    NUM_EXPERTS,
    VOCAB,
    save_draft,
)
from tests.executor.support.drafts.draft_references import DraftReference, reference
from tests.executor.support.drafts.drafting import Drafted, DraftRank, Entries, entries_of
from tests.executor.support.kv import out_cache_loc
from tests.executor.support.runner_cases import watch_experts
from tests.executor.support.serving import Rank

DEMO = Path(__file__).parents[4] / "deploy"
DEMO_DRAFTS = ("eagle", "mtp", "mtp3", "frozen_kv")
TOLERANCE = 1e-5  # of the largest value

# Chunks of two rows in the order in which they run: prompts, then single tokens, then several.
CHUNKS = [{0: 7}, {0: 4, 2: 5}, {2: 1, 0: 1}, {0: 1, 2: 1}, {2: 4, 0: 4}]


Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_qwen3_moe(path, "wide", rope_theta=10000.0)
    return path


def texts(vocab_size: int, hidden_size: int) -> Entries:
    lengths = {row: sum(chunk.get(row, 0) for chunk in CHUNKS) for row in (0, 2)}
    return entries_of(3, lengths, vocab_size, hidden_size)


def draft_in_chunks(rank: DraftRank, entries: Entries, layer: int = 0) -> Drafted:
    done = dict.fromkeys(entries, 0)
    parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {row: [] for row in entries}
    for chunk in CHUNKS:
        part = {}
        for row, count in chunk.items():
            at = slice(done[row], done[row] + count)
            part[row] = (entries[row][0][at], entries[row][1][at])
            done[row] += count
        for row, outcome in rank.step(part, layer).items():
            parts[row].append(outcome)
    return {
        row: (torch.cat([h for h, _ in of_row]), torch.cat([x for _, x in of_row]))
        for row, of_row in parts.items()
    }


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    scale = max(theirs.abs().max().item(), 1.0)
    assert (ours - theirs).abs().max().item() < TOLERANCE * scale


def assert_drafts_like(rank: DraftRank, expected: DraftReference, offset: int = 1) -> None:
    """Every layer, in chunks and single tokens, over a cache of its own; one token if it has none."""
    config = rank.config
    entries = texts(config.layers.vocab_size, config.layers.hidden_size)
    if config.algorithm == "frozen_kv_mtp":
        assert_frozen_drafts_like(rank, expected, entries, offset)
        return
    for layer in range(rank.model.num_layers):
        drafted = draft_in_chunks(rank, entries, layer)
        for row, (ids, given) in entries.items():
            hidden, logits = drafted[row]
            assert_close(hidden, expected.hidden(ids, given, layer))
            assert_close(logits, expected.logits(expected.hidden(ids, given, layer)))


@pytest.mark.parametrize(
    ("kind", "offset"), [*((kind, 1) for kind in KINDS), ("frozen_kv", 0), ("frozen_kv", 2)]
)
def test_a_draft_of_a_published_layout_equals_its_reference(
    target: Path, tmp_path: Path, kind: str, offset: int
):
    save_draft(tmp_path, kind)
    assert_drafts_like(DraftRank(target, tmp_path), reference(target, tmp_path), offset)


@pytest.mark.parametrize("kind", ["eagle3", "nextn_three_layers", "frozen_kv"])
def test_a_draft_on_the_operators_of_cuda_equals_its_reference(
    target: Path, tmp_path: Path, kind: str, ops: FlashInferOps
):
    """Which overwrite what they are given."""
    save_draft(tmp_path, kind)
    cpu = torch.device("cpu")
    kernels = partial(stacked_kernels, dtype=torch.float32, device=cpu, ops=ops)
    rank = DraftRank(target, tmp_path, new_kernels=kernels)
    assert_drafts_like(rank, reference(target, tmp_path))


@pytest.mark.parametrize("kind", ["nextn_three_layers", "qwen3_next_names"])
def test_a_draft_in_the_targets_own_folder_equals_its_reference(
    target: Path, tmp_path: Path, kind: str
):
    """And the target loads from it as well, and answers as without the draft."""
    save_draft(tmp_path, kind, beside=target)
    rank, alone = DraftRank(tmp_path, tmp_path), Rank(target)
    assert_drafts_like(rank, reference(target, tmp_path))
    tokens = {1: [5, 17, 33, 2]}
    assert torch.equal(rank.target.step(tokens)[1], alone.step(tokens)[1])


def assert_frozen_drafts_like(
    rank: DraftRank, expected: DraftReference, entries: Entries, offset: int
) -> None:
    """The draft attends to all keys of the target, and keeps none."""
    for chunk in ({0: 9}, {2: 5, 0: 1}):
        rank.target.step({row: entries[row][0][:count] for row, count in chunk.items()})
    before = [cache.clone() for cache in rank.pool.tensors]
    last = {row: (ids[-1:], hidden[-1:]) for row, (ids, hidden) in entries.items()}
    for row, (hidden, logits) in rank.step_frozen(last, offset).items():
        [token], given = last[row]
        length = rank.target.num_computed[row]
        kept = [_kept(rank, row, layer) for layer in rank.config.target_kv_layer_ids]
        theirs = expected.frozen(token, given[0], length + offset, kept)
        assert_close(hidden[0], theirs)
        assert_close(logits[0], theirs @ expected.target.head.T)
    after = rank.pool.tensors
    assert all(map(torch.equal, before, after)), "it stored something"


def _kept(rank: DraftRank, row: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = rank.target.num_computed[row]
    slots = out_cache_loc(rank.pool, [row], [0], [length])
    keys, values = rank.pool.caches[layer]
    return keys[slots], values[slots]


@pytest.mark.parametrize("name", DEMO_DRAFTS)
def test_the_demo_drafts_equal_their_references(tmp_path: Path, name: str):
    """In float32, with the very files that ``make demo`` serves."""
    target = _in_float32(tmp_path / "target", DEMO / "demo_model")
    draft = _in_float32(tmp_path / "draft", DEMO / "demo_drafts" / name)
    rank, expected = DraftRank(target, draft), reference(target, draft)
    assert_drafts_like(rank, expected)
    assert rank.model.num_layers == (3 if name == "mtp3" else 1)


def _in_float32(path: Path, source: Path) -> Path:
    path.mkdir()
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    tensors = load_file(source / "model.safetensors")
    save_file({name: x.float() for name, x in tensors.items()}, path / "model.safetensors")
    return path


def test_padded_rows_of_a_draft_reach_no_expert(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_draft(tmp_path, "nextn")
    rank = DraftRank(target, tmp_path)
    seen = watch_experts(rank.model, monkeypatch)
    rank.step({0: ([5, 9, 4, 7, 8], torch.randn(5, HIDDEN))}, num_real=2)
    [ids] = seen
    assert (ids == NUM_EXPERTS).all(dim=1).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("kind", ["eagle3", "nextn", "frozen_kv"])
def test_features_are_projected_by_eagle_alone(target: Path, tmp_path: Path, kind: str):
    save_draft(tmp_path, kind)
    rank, expected = DraftRank(target, tmp_path), reference(target, tmp_path)
    features = torch.randn(5, rank.config.feature_size)
    if kind == "eagle3":
        assert rank.config.feature_size == 3 * HIDDEN
        assert_close(rank.model.project(features), expected.project(features))
    else:
        assert rank.config.feature_size == HIDDEN
        assert torch.equal(rank.model.project(features), features)


@pytest.mark.parametrize("kind", ["eagle3", "eagle3_whole_vocab", "nextn", "frozen_kv"])
def test_the_ids_of_a_small_vocabulary_are_those_that_t2d_names(
    target: Path, tmp_path: Path, kind: str
):
    """A whole vocabulary needs no other ids."""
    tensors = save_draft(tmp_path, kind)
    draft = DraftRank(target, tmp_path).model
    assert draft.vocab_size == (DRAFT_VOCAB if "t2d" in tensors else VOCAB)
    assert (draft.target_ids is None) is ("t2d" not in tensors)
    if draft.target_ids is not None:
        assert draft.target_ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()


def test_d2t_of_a_whole_vocabulary_is_read_where_it_is(target: Path, tmp_path: Path):
    tensors = save_draft(tmp_path, "eagle3_whole_vocab")
    save_file(tensors | {"d2t": torch.zeros(VOCAB).long()}, tmp_path / "model.safetensors")
    draft = DraftRank(target, tmp_path).model
    assert draft.target_ids is not None
    assert draft.target_ids.tolist() == list(range(VOCAB))


def _drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def _put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def _lead_two_to_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _lead_outside(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] += VOCAB - DRAFT_VOCAB + 1


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("eagle3", _lead_two_to_one, "several of the draft's tokens to one"),
        ("eagle3", _lead_outside, "d2t leads to token ids .* the target has 0 to 95"),
        ("eagle3", _drop("fc.weight"), r"lacks fc\.weight"),
        ("eagle3", _drop("d2t"), "lacks d2t"),
        ("eagle3", _drop("lm_head.weight"), r"lacks lm_head\.weight"),
        ("eagle3", _put("d2t", DRAFT_VOCAB), "d2t in .* has type F32; I64, I32 can be loaded"),
        ("eagle3", _put("fc.weight", 48, 96), r"fc\.weight .* \[48, 96\]; .* needs \[48, 144\]"),
        ("eagle3", _put("midlayer.self_attn.q_norm.weight", 8), r"has midlayer.*q_norm.* no place"),
        (
            "eagle3",
            _put("midlayer.self_attn.k_proj.weight", 16, 48),
            r"k_proj.* \[16, 48\]; .*needs \[16, 96\]",
        ),
        ("nextn", _drop("model.layers.3.enorm.weight"), r"lacks model\.layers\.3\.enorm"),
        ("nextn", _put("model.layers.4.enorm.weight", 48), r"has model\.layers\.4\.enorm"),
        (
            "nextn",
            _put("model.layers.3.mlp.gate.e_score_correction_bias", 8),
            r"e_score_correction_bias, for which",
        ),
        (
            "nextn",
            _drop("model.layers.3.mlp.experts.7.up_proj.weight"),
            r"lacks model\.layers\.3\.mlp\.experts\.7\.up_proj",
        ),
        (
            "nextn_three_layers",
            _drop("model.layers.5.eh_proj.weight"),
            r"lacks model\.layers\.5\.eh_proj",
        ),
        ("qwen3_next_names", _drop("mtp.fc.weight"), r"lacks mtp\.fc"),
        (
            "qwen3_next_names",
            _put("mtp.layers.0.mlp.shared_expert_gate.weight", 1, 48),
            "has mtp.*shared_expert_gate.* no place",
        ),
        ("frozen_kv", _put("layers.0.self_attn.k_proj.weight", 64, 48), "has .*k_proj.* no place"),
        ("frozen_kv", _drop("layers.1.self_attn.q_norm.weight"), r"lacks layers\.1.*q_norm"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    target: Path, tmp_path: Path, kind: str, change: Change, problem: str
):
    tensors = save_draft(tmp_path, kind)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=problem):
        DraftRank(target, tmp_path)
