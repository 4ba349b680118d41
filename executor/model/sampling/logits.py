"""Logits processing: pure functions from logits to token ids and scores, on any device.

    S rows of logits    V vocabulary    K most likely tokens that a filter looks at

Rows never influence one another, so a sequence samples alike in any batch.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.columns import Int64Array
from executor.batch.read_step import PARAMETERS

GOLDEN_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

PICKED_TOP = 20  # likeliest tokens with scores; no router asks for more
Floats = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Integers = TypeVar("Integers", npt.NDArray[np.signedinteger[Any]], torch.Tensor)

_TORCH_DTYPES = {"<u8": torch.int64, "<i4": torch.int32, "<f4": torch.float32}


class RowParameters:
    """Sampling parameters of rows, by name.

    Args:
        columns: [R] each.
        rows: int64 [S], those of which they are; None: of all.
    """

    def __init__(
        self, columns: Mapping[str, torch.Tensor], rows: torch.Tensor | None = None
    ) -> None:
        self._columns = columns
        self._rows = rows

    @classmethod
    def of_table(cls, table: torch.Tensor) -> "RowParameters":
        """Returns those of a table, int64 [R, PARAMETER_WIDTH], laid out as PARAMETERS."""
        return cls(
            {
                name: table.view(_TORCH_DTYPES[dtype.str])[:, offset // dtype.itemsize]
                for name, (dtype, offset, *_) in (PARAMETERS.fields or {}).items()
            }
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        column = self._columns[name]
        return column if self._rows is None else column.index_select(0, self._rows)

    def at(self, rows: torch.Tensor) -> "RowParameters":
        """Returns those of some rows, int64 [S]. Each is gathered when it is read."""
        return RowParameters(self._columns, rows)


def uniform_samples(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns a uniform sample for each (seed, position), the same one on every device.

    Nothing else goes in, so a sequence that was preempted and starts over draws as it drew before.

    Args:
        seeds: int64 [S], any bits.
        positions: int64 [S].

    Returns:
        float64 [S] in [0, 1).

    Source: SplitMix64, Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014: output number ``position`` of the generator that output 1 of ``seed`` seeds.
    """
    return _random_bits(seeds, positions).to(torch.float64) * 2.0**-52


def uniform_samples_on_host(seeds: Int64Array, positions: Int64Array) -> Float64Array:
    """Returns what ``uniform_samples`` returns, bit for bit, as an array: nothing is launched."""
    return _random_bits(seeds, positions).astype(np.float64) * 2.0**-52


def _random_bits(seeds: Integers, positions: Integers) -> Integers:
    bits = _mix(_mix(seeds + GOLDEN_GAMMA) + (positions + 1) * GOLDEN_GAMMA)
    # 52 bits, not 53: then uniform * total stays below total after rounding, for any total.
    return _shift_right(bits, 12)


def _mix(z: Integers) -> Integers:
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Integers, bits: int) -> Integers:
    """Shifts as if unsigned; int64 alone would copy the sign down."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def penalize(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    parameters: RowParameters,
) -> torch.Tensor:
    """Returns logits in which tokens seen before are less likely.

    Args:
        logits: float32 [S, V].
        prompt_mask: bool [S, V], tokens of the prompt.
        output_counts: int32 [S, V], how often each token was sampled.
        parameters: The penalties, float32 [S] each.

    Source: Transformers, RepetitionPenaltyLogitsProcessor; the other two as in the OpenAI API
    reference, "frequency and presence penalties".
    """
    repetition, presence, frequency = (
        parameters[name].unsqueeze(1)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    sampled = output_counts > 0
    factor = torch.where(prompt_mask | sampled, repetition, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - presence * sampled - frequency * output_counts


def temper(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Returns logits over temperature, the likeliest at 0 so that no temperature overflows.

    Args:
        logits: float32 [S, V].
        temperature: float32 [S], above 0.
    """
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]


def draw(logits: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Samples each row from all of its tokens that min_p leaves.

    Args:
        logits: float32 [S, V].
        min_p: float32 [S], 0 to 1.
        uniform: float64 [S], from ``uniform_samples``.

    Returns:
        int64 [S] token ids.
    """
    return invert(torch.softmax(_drop_below(logits, min_p), dim=-1), uniform)


def draw_likeliest(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Samples each row from its likeliest tokens.

    Filters follow one another, each on what the last one left: top_k, top_p, min_p.

    Args:
        logits: float32 [S, V].
        top_k: int64 [S], 0 is all.
        top_p: float32 [S], above 0, to 1.
        min_p: float32 [S], 0 to 1.
        uniform: float64 [S], from ``uniform_samples``.
        width: K, at least every row's top_k; V where a row has none.

    Returns:
        int64 [S] token ids.

    Source: Transformers, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, but for ties:
    of tokens equally likely at the edge of top_k, exactly as many stay as fit.
    """
    if width < logits.shape[-1]:
        values, ids = logits.topk(width, dim=-1)
    else:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    values = _filter(values, top_k, top_p, min_p)
    chosen = invert(torch.softmax(values, dim=-1), uniform)
    return ids.gather(-1, chosen[:, None])[:, 0]


def probabilities(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Returns what ``draw_likeliest`` draws from, float32 [S, V], each row of which sums to 1.

    Args:
        logits: float32 [S, V].
        top_k: int64 [S], 0 is all.
        top_p: float32 [S], above 0, to 1.
        min_p: float32 [S], 0 to 1.
    """
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    filtered = torch.softmax(_filter(values, top_k, top_p, min_p), dim=-1)
    return torch.zeros_like(logits).scatter_(-1, ids, filtered)


def _filter(
    values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Returns logits, which come likeliest first, without those that a filter drops."""
    place = torch.arange(values.shape[-1], device=values.device)
    within_k = (place < top_k[:, None]) | (top_k[:, None] == 0)
    values = values.masked_fill(~within_k, -torch.inf)
    probs = torch.softmax(values, dim=-1)
    before = torch.cumsum(probs, dim=-1) - probs
    outside_p = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    outside_p[:, 0] = False
    return _drop_below(values.masked_fill(outside_p, -torch.inf), min_p)


def _drop_below(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Returns logits without tokens less likely than min_p times the likeliest."""
    least = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
    return logits.masked_fill(logits < least, -torch.inf)


def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Returns the first index at which the cumulative probability exceeds the sample, [S].

    An index without probability adds nothing to the sum and so is never the first to exceed it.
    float64, because at float32 the steps of a large vocabulary's tail vanish in the sum.
    """
    cumulative = torch.cumsum(probs, dim=-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return index.clamp_(max=probs.shape[-1] - 1)  # only rows that are not finite get there


def score(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Returns log probabilities of given tokens and of the likeliest ones, for one copy to the host.

    Args:
        logits: [N, V] as the model gave them.
        token_ids: int64 [N, G].
        num_top: [N] likeliest tokens wanted of each row.

    Returns:
        float32 [N, G + 2 * K], for ``cut_scores``.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    given = logits.gather(-1, token_ids)
    # Which of equally likely tokens come first hangs on how many are picked out: not on what others want.
    most = max(int(num_top.max(initial=0)), PICKED_TOP)
    width = min(most, logits.shape[-1]) if num_top.any() else 0
    values, ids = logits.topk(width, dim=-1)
    scores = torch.cat((given, values), dim=1).sub_(total)
    return torch.cat((scores, ids.to(torch.int32).view(torch.float32)), dim=1)


def cut_scores(
    found: Floats, num_top: npt.NDArray[np.int64], num_given: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.int32], Floats, Floats]:
    """Returns the parts of what ``score`` found.

    Args:
        found: [N, G + 2 * K].
        num_top: [N] likeliest tokens wanted of each row.
        num_given: [N] tokens given of each row besides the first.

    Returns:
        Log probabilities [N] of the first token given; ids [sum(num_top)] of the likeliest tokens,
        row after row, likeliest first; their log probabilities [sum(num_top)]; those of the other
        tokens given [sum(num_given)].
    """
    most = int(num_given.max(initial=0))
    width = (found.shape[1] - 1 - most) // 2
    others, top = found[:, 1 : 1 + most], found[:, 1 + most : 1 + most + width]
    ids = found[:, 1 + most + width :].view(np.int32)
    is_top, is_given = (np.arange(n) < c[:, None] for n, c in ((width, num_top), (most, num_given)))
    return found[:, 0], ids[is_top], top[is_top], others[is_given]
