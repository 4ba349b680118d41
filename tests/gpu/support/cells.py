"""Executors of the demo model as production has them, with a router's scheduler in one process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from deploy.local.demo_tasks import EVEN_MIX, Problem, problems, text_of, token_ids
from tests.gpu.support.machine import Machine
from tests.gpu.support.production import PRODUCTION
from tests.together.speculation.speculative_cell import NEWLINE, Answer, Ask, Cell, cell_of

SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,  # so that prompts come in chunks, beside decodes
    "max_model_len": 64,
    "num_kv_blocks": 4 * 18 + 1,
    "decode_graph_sizes": (1, 2, 4),
    "prefill_graphs": "breakable",
    "prefill_graph_sizes": (8, 16),
}


@contextmanager
def production_cell(machine: Machine, **settings: Any) -> Iterator[Cell]:
    """Gives the block one executor, and what drives it."""
    with cell_of(device=machine.device.type, **PRODUCTION, **SIZES, **settings) as cell:
        yield cell


def exam(seed: int, count: int) -> list[Problem]:
    """Returns problems that the demo model solves."""
    return list(problems(seed, count, EVEN_MIX))


def asks_of(exam: Sequence[Problem], **fields: Any) -> list[Ask]:
    """Returns a request for each, one a step later than another."""
    ask = Ask(prompt=(), max_tokens=16, stop_ids=(NEWLINE,), **fields)
    return [
        replace(ask, prompt=tuple(token_ids(problem.prompt)), delay=place)
        for place, problem in enumerate(exam)
    ]


def assert_solved(exam: Sequence[Problem], answers: Sequence[Sequence[Answer]]) -> None:
    texts = [text_of(answer.tokens) for [answer] in answers]
    wrong = [
        (problem.prompt, text)
        for problem, text in zip(exam, texts, strict=True)
        if not problem.is_answered_by(text)
    ]
    assert not wrong
