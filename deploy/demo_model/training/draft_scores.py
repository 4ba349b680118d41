"""Scores of drafts: tokens per step without a server, in plain PyTorch.

Greedy: a draft is accepted if it is the token that the target would have given. So the target's
own answers are made first, every chain of an answer is drafted at once, and then the answer is
walked through as a server would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deploy.demo_model.training.draft_checkpoints import Target
from deploy.demo_model.training.draft_modules import Draft
from deploy.demo_model.training.train_demo_model import PAD_ID, answer
from deploy.local.demo_tasks import STOP, Kind, problems, solved_lines, token_ids

CHECK_SEED = 2_000_003  # no step trains with it
BATCH_SIZE = 25


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and what the target answers to it."""

    kind: Kind
    prompt: list[int]
    answer: list[int]
    """To its newline, or to where the target was cut off."""


@dataclass(slots=True)
class Score:
    """What speculative steps of live sequences gave: the prompt's own step is not one."""

    num_tokens: int = 0
    num_steps: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Mean of the tokens handed out: those accepted and one more, cut at the newline."""
        return self.num_tokens / self.num_steps

    def __add__(self, other: "Score") -> "Score":
        return Score(self.num_tokens + other.num_tokens, self.num_steps + other.num_steps)


def ask(target: Target, seed: int, count: int, context_tokens: int) -> list[Answered]:
    """Lets the target answer problems whose sums it was not trained on.

    Args:
        target: Answers greedily.
        seed: Of the problems.
        count: How many, of the even mix.
        context_tokens: How many tokens of solved problems stand before each.
    """
    asked = list(problems(seed, count))
    prompts = [
        solved_lines(seed + i, context_tokens) + problem.prompt for i, problem in enumerate(asked)
    ]
    completions = answer(target.model, prompts)
    answered: list[Answered] = []
    for problem, prompt, completion in zip(asked, prompts, completions, strict=True):
        text, newline, _ = completion.partition(STOP)
        answered.append(Answered(problem.kind, token_ids(prompt), token_ids(text + newline)))
    return answered


@torch.inference_mode()
def scores_of(draft: Draft, target: Target, answered: Sequence[Answered]) -> dict[Kind, Score]:
    """Counts the steps of a draft's answers, kind by kind."""
    totals = {kind: Score() for kind in Kind}
    for start in range(0, len(answered), BATCH_SIZE):
        batch = answered[start : start + BATCH_SIZE]
        for one, drafts in zip(batch, draft_chains(draft, target, batch), strict=True):
            totals[one.kind] += walk(one.answer, drafts)
    return totals


def draft_chains(draft: Draft, target: Target, batch: Sequence[Answered]) -> list[list[list[int]]]:
    """Returns for each answer, for each of its tokens as a root, CHAIN_LEN drafts."""
    row_len = max(len(one.prompt) + len(one.answer) for one in batch)
    num_roots = max(len(one.answer) for one in batch)
    rows = [one.prompt + one.answer for one in batch]
    ids = torch.tensor([row + [PAD_ID] * (row_len - len(row)) for row in rows])
    first = torch.tensor([len(one.prompt) for one in batch])
    roots = (first[:, None] + torch.arange(num_roots)).clamp(max=row_len - 1)
    context = target.read(ids, roots)
    logits = draft.unroll(context, lambda _, logits: logits.argmax(dim=-1))
    drafts = torch.stack(logits).argmax(dim=-1)  # [CHAIN_LEN, B, R]
    chains: list[list[list[int]]] = drafts.permute(1, 2, 0).tolist()
    return chains


def walk(answer: Sequence[int], drafts: Sequence[Sequence[int]]) -> Score:
    """Counts the speculative steps of an answer whose first token is the prompt's.

    Args:
        answer: Its tokens.
        drafts: For each of them as a root, the drafts that follow it.
    """
    score, root = Score(), 0
    while root + 1 < len(answer):
        left = answer[root + 1 :]
        num_accepted = 0
        for drafted, token in zip(drafts[root], left, strict=False):
            if drafted != token:
                break
            num_accepted += 1
        num_handed_out = min(num_accepted + 1, len(left))
        score += Score(num_handed_out, 1)
        root += num_handed_out
    return score
