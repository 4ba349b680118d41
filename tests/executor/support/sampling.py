"""Sampling parameters as a step brings them, and as samplers of a fixed shape take them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from executor.batch.read_step import PARAMETERS, RowStarts, read_starts
from executor.budget.token_budget import TokenBudget
from executor.model.sampling.fixed_shape import Draws
from executor.parallel.layout import Place
from tests.executor.support.steps import limits_of, row_starts

Way = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
NAMES = ("temperature", "top_k", "top_p", "min_p")


def starts(vocab_size: int = 20, num_rows: int = 4096, **columns: Any) -> RowStarts:
    """Returns the rows that begin in a step with these columns, of so many rows in all."""
    budget = TokenBudget(
        max_num_batched_tokens=num_rows, max_num_seqs=num_rows, max_num_logits=num_rows
    )
    limits = limits_of(budget, place=Place(), vocab_size=vocab_size, takes_grammars=True)
    message = row_starts(**{name: c for name, c in columns.items() if name != "grammars"})
    message.grammars.extend(columns.get("grammars", ()))
    return read_starts(message, limits)


def parameters(rows: Sequence[Way], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Returns a column of each parameter, with one value for each row."""
    columns = zip(*rows, strict=True)
    return {n: torch.tensor(c, device=device) for n, c in zip(NAMES, columns, strict=True)}


def draws(
    rows: Sequence[Way], uniform: torch.Tensor, vocab_size: int, device: torch.device | str = "cpu"
) -> Draws:
    """Returns how each row's token is drawn."""
    given = np.zeros(len(rows), PARAMETERS)
    for name, column in zip(NAMES, zip(*rows, strict=True), strict=True):
        given[name] = column
    return Draws.of(given, uniform.numpy(), vocab_size, torch.device(device))
