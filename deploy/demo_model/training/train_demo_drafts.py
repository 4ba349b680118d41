"""Training of the draft models for the demo model, which stays as it is.

    python -m deploy.demo_model.training.train_demo_drafts --out deploy/demo_drafts

A draft learns the demo model's own next-token distribution at the tokens of answers, over chains
of three steps that it takes on its own outputs, as it does when it is served.
"""

import argparse
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from deploy.demo_model.training.draft_checkpoints import (
    DRAFT_NAMES,
    Target,
    build_draft,
    load,
    save,
)
from deploy.demo_model.training.draft_models import MultiLayerMtpDraft
from deploy.demo_model.training.draft_modules import CHAIN_LEN, Context, Draft
from deploy.demo_model.training.draft_scores import CHECK_SEED, Answered, Score, ask, scores_of
from deploy.demo_model.training.train_demo_model import (
    LONG_CONTEXT,
    draw_row,
    learning_rate,
    make_optimizers,
    update,
)
from deploy.local.demo_tasks import STOP_ID

logger = logging.getLogger("train_demo_drafts")

DEMO_MODEL = Path(__file__).resolve().parents[1]
TOKENS_PER_STEP = 1536
ROW_LENS = (96, 96, 512)
LOG_EVERY, CHECK_EVERY = 50, 150


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with what their drafts should say."""

    context: Context
    valid: list[torch.Tensor]
    """For each step of a chain bool [B, R]: whether its token is of the root's own answer."""

    wanted: list[torch.Tensor]
    """For each step [number of True, V]: the target's probabilities of the next token."""


@dataclass(slots=True)
class Pupil:
    """A draft in training."""

    draft: Draft
    optimizers: list[torch.optim.Optimizer]
    loss_sums: list[float] = field(default_factory=lambda: [0.0] * CHAIN_LEN)
    cpu_seconds: float = 0.0


def draw_batch(
    target: Target, rng: random.Random, num_tokens: int, row_lens: Sequence[int]
) -> Batch:
    """Draws rows of solved problems, one of the lengths, and lets the target read them."""
    row_len = rng.choice(row_lens)
    rows = [draw_row(rng, row_len, rng.random() < 0.5) for _ in range(num_tokens // row_len)]
    ids = torch.tensor([row[:-1] for row, _ in rows])
    is_answer = torch.tensor([flags[:-1] for _, flags in rows]) & (ids != STOP_ID)
    # Every token of an answer is a root; a chain stays in its answer, since prompts are longer.
    num_roots = int(is_answer.sum(dim=1).max())
    is_root, roots = is_answer.int().sort(dim=1, descending=True, stable=True)
    roots = torch.where(is_root.bool(), roots, 1)[:, :num_roots]
    context = target.read(ids, roots)
    padded = F.pad(is_answer, (0, CHAIN_LEN))
    rows_index = torch.arange(len(ids))[:, None]
    valid = [
        is_root[:, :num_roots].bool() & padded[rows_index, roots + step]
        for step in range(CHAIN_LEN)
    ]
    wanted = [
        target.probabilities(context.at_roots(context.hidden, step)[valid[step]])
        for step in range(CHAIN_LEN)
    ]
    return Batch(context, valid, wanted)


def losses_of(draft: Draft, batch: Batch) -> list[torch.Tensor]:
    """Returns each step's mean cross entropy to the target's distribution."""
    context = batch.context
    if isinstance(draft, MultiLayerMtpDraft):
        logits = draft.unroll_true(context)
    else:
        logits = draft.unroll(context, lambda step, _: context.at_roots(context.ids, step + 1))
    return [
        F.cross_entropy(of_step[valid], wanted)
        for of_step, valid, wanted in zip(logits, batch.valid, batch.wanted, strict=True)
    ]


def train_step(pupil: Pupil, batch: Batch, lr: float) -> None:
    """Moves a draft towards the target on one batch."""
    start = time.process_time()
    losses = losses_of(pupil.draft, batch)
    torch.autograd.backward(torch.stack(losses).sum())
    update(pupil.draft, pupil.optimizers, lr)
    for step, loss in enumerate(losses):
        pupil.loss_sums[step] += loss.item()
    pupil.cpu_seconds += time.process_time() - start


def train(
    target: Target,
    names: Sequence[str],
    num_steps: int,
    seed: int,
    out: Path,
    *,
    checked: Sequence[Answered] = (),
    resumes: bool = False,
) -> None:
    """Trains drafts side by side on the same batches, and writes them at every check.

    Args:
        target: Stays as it is.
        names: Of the drafts. Their order is part of what makes a training repeatable.
        num_steps: In all.
        seed: Of the batches, and of the weights that are not the target's.
        out: Gets a folder for each draft.
        checked: What to measure the drafts with at every check.
        resumes: Whether to begin with the drafts in `out`.
    """
    torch.manual_seed(seed)
    pupils: dict[str, Pupil] = {}
    for name in names:
        draft = load(name, target, out / name) if resumes else build_draft(name, target)
        pupils[name] = Pupil(draft, make_optimizers(draft, learning_rate(0.0)))
        save(name, draft, target, out / name)
    reading = 0.0
    for step in range(num_steps):
        start = time.process_time()
        rng = random.Random(f"drafts {seed} {step}")
        batch = draw_batch(target, rng, TOKENS_PER_STEP, ROW_LENS)
        reading += time.process_time() - start
        for pupil in pupils.values():
            train_step(pupil, batch, learning_rate(step / num_steps))
        if (step + 1) % LOG_EVERY == 0:
            logger.info("step %d, %.0f CPU s to read", step + 1, reading)
            for name, pupil in pupils.items():
                losses = " ".join(f"{total / LOG_EVERY:.4f}" for total in pupil.loss_sums)
                pupil.loss_sums = [0.0] * CHAIN_LEN
                logger.info("  %s: %.0f CPU s, losses %s", name, pupil.cpu_seconds, losses)
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == num_steps:
            for name, pupil in pupils.items():
                save(name, pupil.draft, target, out / name)
                if checked:
                    logger.info("  %s: %s", name, describe(pupil.draft, target, checked))


def main() -> None:
    """Trains, writes and measures drafts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafts' folders")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="the target's folder")
    parser.add_argument("--drafts", nargs="+", default=DRAFT_NAMES, choices=DRAFT_NAMES)
    parser.add_argument("--steps", type=int, default=700, help="training steps; 0 only measures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="train the drafts in --out further")
    parser.add_argument("--count", type=int, default=300, help="problems to measure with")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    target = Target(args.model)
    if args.steps:
        checked = ask(target, CHECK_SEED + 1, 60, context_tokens=0)
        train(
            target,
            args.drafts,
            args.steps,
            args.seed,
            args.out,
            checked=checked,
            resumes=args.resume,
        )
    log_scores(target, args.drafts, args.out, args.count)


def log_scores(target: Target, names: Sequence[str], out: Path, count: int) -> None:
    """Measures the drafts as they are written, on problems that no step trained with."""
    for context_tokens in (0, LONG_CONTEXT):
        answered = ask(target, CHECK_SEED, count, context_tokens)
        for name in names:
            draft = load(name, target, out / name)
            text = describe(draft, target, answered)
            logger.info("%s after %d tokens: %s", name, context_tokens, text)


def describe(draft: Draft, target: Target, answered: Sequence[Answered]) -> str:
    """Says how many tokens per step a draft gives, in all and for each kind."""
    scores = scores_of(draft, target, answered)
    kinds = ", ".join(f"{kind.value} {score.tokens_per_step:.2f}" for kind, score in scores.items())
    total = sum(scores.values(), start=Score())
    return f"{total.tokens_per_step:.3f} tokens per step ({kinds})"


if __name__ == "__main__":
    main()
