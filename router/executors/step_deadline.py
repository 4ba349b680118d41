"""Step deadline: the time after which executors count as hung, learnt from earlier steps.

What a step takes depends on whether it runs prompts or drafts, whether a graph runs it, and on its
tokens. So steps are told apart by these, tokens by powers of two, and each kind keeps an upper
estimate: it follows a slower step by a fifth of the difference and a faster one by a hundredth,
which settles near the slowest twentieth and forgets a single hiccup. A kind that was rarely seen
has no estimate yet; only the longest limit holds for it, so that a first prefill is never cut.
"""

from dataclasses import dataclass

from router.scheduling.step import Agreement

RISE, FALL = 0.2, 0.01
MIN_STEPS = 16  # of a kind, before its estimate counts

Kind = tuple[bool, int, bool, int]


@dataclass(slots=True)
class _Estimate:
    num_steps: int = 0
    seconds: float = 0.0


class StepDeadline:
    """Says when a step is overdue.

    Args:
        factor: Times its expected time.
        min_s: No step is overdue before.
        max_s: Every step is overdue then, also of a kind of which little is known.
    """

    def __init__(self, *, factor: float, min_s: float, max_s: float) -> None:
        self._factor = factor
        self._min_s = min_s
        self._max_s = max_s
        self._estimates: dict[Kind, _Estimate] = {}

    def limit_s(self, agreement: Agreement) -> float:
        """Returns how long a step may take."""
        estimate = self._estimates.get(_kind_of(agreement))
        if estimate is None or estimate.num_steps < MIN_STEPS:
            return self._max_s
        return min(max(self._factor * estimate.seconds, self._min_s), self._max_s)

    def add(self, agreement: Agreement, seconds: float) -> None:
        """Notes how long a step took."""
        estimate = self._estimates.setdefault(_kind_of(agreement), _Estimate(seconds=seconds))
        estimate.num_steps += 1
        difference = seconds - estimate.seconds
        estimate.seconds += (RISE if difference > 0 else FALL) * difference

    def forget(self) -> None:
        """Starts anew: other executors may be slower, and first steps always are."""
        self._estimates.clear()


def _kind_of(agreement: Agreement) -> Kind:
    has_graph = agreement.graph_size is not None
    size = max(agreement.global_num_tokens).bit_length()
    return agreement.has_extend, agreement.num_draft_tokens, has_graph, size
