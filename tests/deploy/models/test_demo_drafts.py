"""The demo model's drafts. Without these a draft that no server can load, or that guesses badly,
would show only as a slow demo: wrong drafts change no answer.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deploy.demo_model.training import train_demo_drafts
from deploy.demo_model.training.draft_checkpoints import (
    DRAFT_NAMES,
    Target,
    build_draft,
    load,
    save,
    to_layout,
)
from deploy.demo_model.training.draft_models import EagleDraft, MtpDraft, MultiLayerMtpDraft
from deploy.demo_model.training.draft_modules import CHAIN_LEN, Cell, Context, Row, shifted
from deploy.demo_model.training.draft_scores import CHECK_SEED, Score, ask, scores_of, walk
from deploy.demo_model.training.train_demo_drafts import DEMO_MODEL, draw_batch, losses_of, train
from deploy.local.demo_tasks import token_ids
from tests.executor.support.drafts.draft_references import DraftReference, TargetTensors

DRAFTS = DEMO_MODEL.parent / "demo_drafts"


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return Target(DEMO_MODEL)


@pytest.mark.parametrize("name", DRAFT_NAMES)
def test_a_loaded_draft_is_saved_as_the_same_file(name: str, target: Target, tmp_path: Path):
    save(name, load(name, target, DRAFTS / name), target, tmp_path)

    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (DRAFTS / name / file).read_bytes()


def test_an_untrained_mtp_layer_has_the_attention_and_experts_of_the_targets_last_one(
    target: Target,
):
    last = load_file(DEMO_MODEL / "model.safetensors")
    draft = to_layout("mtp", build_draft("mtp", target), target)

    shared = [key for key in draft if ".self_attn." in key or ".mlp." in key]
    assert len(shared) == 6 + 1 + 3 * 8
    for key in shared:
        expected = last[key.replace("model.layers.4.", "model.layers.3.")].float()
        torch.testing.assert_close(draft[key], expected, rtol=0, atol=0)


def test_a_checkpoint_of_another_kind_is_refused_with_what_differs(target: Target):
    with pytest.raises(ValueError, match=r"midlayer\.hidden_norm\.weight"):
        load("mtp", target, DRAFTS / "eagle")


@pytest.mark.parametrize(("context_tokens", "count"), [(0, 60), (300, 20)])
def test_drafts_give_two_and_a_half_tokens_per_step_on_problems_they_never_saw(
    target: Target, context_tokens: int, count: int
):
    answered = ask(target, CHECK_SEED + 7, count, context_tokens)
    for name in DRAFT_NAMES:
        scores = scores_of(load(name, target, DRAFTS / name), target, answered)
        total = sum(scores.values(), start=Score())
        assert total.num_tokens == sum(len(one.answer) - 1 for one in answered)
        assert total.tokens_per_step >= 2.5, (name, scores)


@pytest.mark.parametrize(
    ("chains", "steps"),
    [
        # Under each token of the answer, the drafts made when it was the last one known.
        ({"a": "bcd", "e": "f\n?"}, 2),  # all right: four tokens, then what is left
        ({"a": "bc?", "d": "ef?"}, 2),  # two right and the target's own
        ({"a": "?cd", "b": "c?e", "d": "e??", "f": "???"}, 4),  # none counts after a wrong one
        ({}, 6),
    ],
)
def test_a_step_hands_out_the_accepted_drafts_and_one_more(chains: dict[str, str], steps: int):
    answer = "abcdef\n"
    drafts = [token_ids(chains.get(token, "???")) for token in answer]

    assert walk(token_ids(answer), drafts) == Score(num_tokens=6, num_steps=steps)


def greedy(_step: int, logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def read_batch(target: Target) -> Context:
    """Rows of 96 tokens with roots in their answers."""
    return draw_batch(target, random.Random(3), num_tokens=192, row_lens=(96,)).context


@pytest.mark.parametrize("name", DRAFT_NAMES)
def test_what_is_trained_is_what_an_executor_computes(name: str, target: Target):
    """Executors are tested against the same reference."""
    draft = load(name, target, DRAFTS / name)
    saved = load_file(DRAFTS / name / "model.safetensors")
    tensors = {key: tensor.float() for key, tensor in saved.items()}
    config = json.loads((DRAFTS / name / "config.json").read_text())
    reference = DraftReference(config, tensors, TargetTensors(target.embedding, target.head))
    tokens = token_ids("\nrev abacus=sucaba")
    context = target.read(torch.tensor([tokens]), torch.arange(1, len(tokens))[None])

    given = context.hidden[0]
    if name == "eagle":
        sums = torch.cat([context.residuals[i][0] for i in (1, 2, 3)], dim=-1)
        given = reference.project(sums)
    if isinstance(draft, MultiLayerMtpDraft):
        logits = draft.unroll_true(context)
    else:
        logits = draft.unroll(context, greedy)[:1]
    for layer, of_layer in enumerate(logits):
        given = torch.cat((torch.zeros_like(given[:1]), given[:-1]))
        if name == "frozen_kv":
            keys, values = (
                [part[0, :, :-1].transpose(0, 1) for part in parts]
                for parts in (context.keys, context.values)
            )
            kept = [(keys[i], values[i]) for i in config["target_kv_layer_ids"]]
            given = reference.frozen(tokens[-1], given[-1], len(tokens) - 1, kept)[None]
            expected = given[-1] @ target.head.T
        else:
            given = reference.hidden(tokens, given, layer)
            expected = reference.logits(given[-1])
        # The entry of layer k is k positions after its root.
        torch.testing.assert_close(of_layer[0, -1 - layer], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", DRAFT_NAMES)
def test_a_chain_depends_on_nothing_that_a_server_lacks(name: str, target: Target):
    draft = load(name, target, DRAFTS / name)
    context = read_batch(target)
    root = int(context.roots[0, 7])

    # What follows the root is unknown, and the root itself has not run through the target.
    ids = context.ids.clone()
    ids[:, root + 1 :] = 5
    poisoned = Context(
        ids=ids,
        hidden=poison(context.hidden, root, dim=1),
        residuals={i: poison(x, root, dim=1) for i, x in context.residuals.items()},
        keys=[poison(keys, root, dim=2) for keys in context.keys],
        values=[poison(values, root, dim=2) for values in context.values],
        roots=context.roots,
    )

    for before, after in zip(
        draft.unroll(context, greedy), draft.unroll(poisoned, greedy), strict=True
    ):
        torch.testing.assert_close(after[0, 7], before[0, 7], atol=1e-3, rtol=1e-3)


def poison(x: torch.Tensor, start: int, dim: int) -> torch.Tensor:
    poisoned = x.clone()
    poisoned.narrow(dim, start, x.shape[dim] - start).fill_(1e3)
    return poisoned


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_a_chain_is_the_layer_run_again_over_all_tokens_and_its_own_outputs(
    name: str, target: Target
):
    draft = load(name, target, DRAFTS / name)
    context = read_batch(target)
    root = int(context.roots[0, 7])
    expected = [of_step[0, 7] for of_step in draft.unroll(context, greedy)]

    tokens = context.ids[:1, : root + 1]
    if isinstance(draft, EagleDraft):
        known = shifted(draft.fc(torch.cat([context.residuals[i] for i in (1, 2, 3)], dim=-1)))
        layer: Cell = draft.midlayer
    else:
        assert isinstance(draft, MtpDraft)
        known, layer = shifted(context.hidden), draft.mtp_layers[0]
    known = known[:1, : root + 1]
    for wanted in expected:
        positions = torch.arange(tokens.shape[1])[None]
        residual, inputs = layer.enter(draft.embed(tokens), known)
        row = Row(*layer.self_attn.keys_values(inputs, positions))
        hidden = layer.leave(residual + layer.self_attn(inputs, positions, row))[:, -1:]
        logits = draft.compute_logits(hidden)
        torch.testing.assert_close(logits[0, 0], wanted, atol=1e-3, rtol=1e-3)
        tokens = torch.cat((tokens, logits.argmax(dim=-1)), dim=1)
        known = torch.cat((known, hidden), dim=1)


def test_chains_of_right_tokens_are_what_one_pass_of_each_layer_gives(target: Target):
    draft = load("mtp3", target, DRAFTS / "mtp3")
    assert isinstance(draft, MultiLayerMtpDraft)
    context = read_batch(target)

    chains = draft.unroll(context, lambda step, _: context.at_roots(context.ids, step + 1))

    for chain, passed in zip(chains, draft.unroll_true(context), strict=True):
        at = (context.roots + CHAIN_LEN < context.ids.shape[1])[..., None]
        torch.testing.assert_close(chain * at, passed * at, atol=1e-3, rtol=1e-3)


def test_chains_are_trained_on_the_tokens_of_one_answer_each(target: Target):
    batch = draw_batch(target, random.Random(4), num_tokens=192, row_lens=(96,))
    ids, roots = batch.context.ids, batch.context.roots

    num_chains = 0
    for row, position, of_chain in zip(
        *torch.where(batch.valid[0]), torch.stack(batch.valid, -1)[batch.valid[0]], strict=True
    ):
        start = int(roots[row, position])
        tokens = bytes(ids[row, start : start + int(of_chain.sum())].sub(3).tolist())
        assert tokens.isalnum(), tokens
        assert of_chain.tolist() == sorted(of_chain.tolist(), reverse=True)
        num_chains += 1
    assert num_chains > 40
    assert [len(wanted) for wanted in batch.wanted] == [int(v.sum()) for v in batch.valid]


@pytest.mark.parametrize("name", DRAFT_NAMES)
def test_training_is_repeatable_and_brings_a_draft_nearer_to_its_target(
    name: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(train_demo_drafts, "TOKENS_PER_STEP", 384)
    monkeypatch.setattr(train_demo_drafts, "ROW_LENS", (96,))
    for run in ("once", "again"):
        train(target, [name], num_steps=6, seed=1, out=tmp_path / run)

    files = [tmp_path / run / name / "model.safetensors" for run in ("once", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    torch.manual_seed(1)
    batch = draw_batch(target, random.Random(9), num_tokens=384, row_lens=(96,))
    untrained, trained = (
        float(torch.stack(losses_of(draft, batch)).sum().detach())
        for draft in (build_draft(name, target), load(name, target, tmp_path / "once" / name))
    )
    assert trained < 0.9 * untrained
