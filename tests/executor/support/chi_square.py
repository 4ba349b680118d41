"""Whether draws look like a distribution, or like other draws. For tests.

V values    N draws
"""

import torch


def p_value(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Returns how often draws from ``probs`` [V] are as far from it as these are: int64 [N]."""
    observed = torch.bincount(tokens, minlength=len(probs)).double()
    if observed[probs == 0].any():
        return 0.0
    expected = probs.double() / probs.double().sum() * len(tokens)
    observed, expected = _merge_rare(observed, expected, expected)
    statistic = ((observed - expected) ** 2 / expected).sum()
    return _tail(statistic, len(expected) - 1)


def two_sample_p_value(first: torch.Tensor, second: torch.Tensor) -> float:
    """Returns how often two lists of draws from one distribution differ as these do: int64 [N]."""
    size = int(max(first.max(), second.max())) + 1
    one = torch.bincount(first, minlength=size).double()
    two = torch.bincount(second, minlength=size).double()
    one, two = _merge_rare(one, two, one + two)
    ratio = (len(second) / len(first)) ** 0.5
    statistic = ((ratio * one - two / ratio) ** 2 / (one + two)).sum()
    return _tail(statistic, len(one) - 1)


def _merge_rare(
    one: torch.Tensor, two: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds up what is counted fewer than 10 times, and drops what is never counted."""
    is_rare = counts < 10
    one = torch.cat((one[~is_rare], one[is_rare].sum()[None]))
    two = torch.cat((two[~is_rare], two[is_rare].sum()[None]))
    is_counted = (one + two) > 0
    return one[is_counted], two[is_counted]


def _tail(statistic: torch.Tensor, freedom: int) -> float:
    """Returns the chance that chi-square with so many degrees of freedom is above."""
    if freedom == 0:
        return 1.0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic.double() / 2))
