"""Time of a step, learnt from what executors report: non-negative least squares over six features.

    seconds = base + prompts e + max_r (row n_r + kv K_r + pair A_r) + mean mean_r n_r

e is 1 if any rank runs prompt tokens; n_r are the tokens of rank r, with a graph or in an even gather
padded ones too; K_r the tokens of KV that its decodes read; A_r the query-key pairs of its chunks.
Attention is each rank's own work, so its fullest rank counts; experts are spread over all ranks, so
there the mean does. Errors are weighed by what was predicted: a tenth of a short step is worth as
much as a tenth of a long one. No part takes less than nothing: where steps are alike, and noise would
have one part negative and another too great, the rest is fitted with that part at zero.

Steps that draft run a second model, too: they have coefficients of their own (`StepCosts`).

Six numbers are lists here: with the caches of a step that does much else, numpy takes twice as long for
them. For the same reason steps are learnt from a few at a time, when somebody asks for what they teach.
"""

import math
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from itertools import combinations_with_replacement
from operator import itemgetter, mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.scheduling.columns import Rows
from router.scheduling.step import Agreement, PaddingMode, StepPlan, StepResult

PARTS = ("base", "prompts", "row", "mean", "kv", "pair")
SCALES = (1.0, 1.0, 1e-3, 1e-3, 1e-5, 1e-7)  # each feature is then near 1

START = (0.01, 0.001, 0.01, 0.01, 0.002, 0.01)  # scaled; some GPU's
LEAST = 1e-6  # scaled: a coefficient below counts as this
FORGET = 0.999
START_WEIGHT = 1.0  # of what is assumed at first; a step of 50 ms has 400
DOUBTED_WEIGHT = 0.1  # of all that was seen, once it is doubted
REST = 1e-4, 1e-9  # by which a coefficient is drawn to what it was: of its own weight, and besides
FAR = 0.5  # error from which on a step counts by its distance, not by the square of it

KNOWN_STEPS = 8  # with prompts, of twice as many in all, before anybody goes by it
LEARN_EVERY = 4  # of steps without prompts, which are many and alike
FIT_EVERY = 4  # of steps that are learnt from, once enough are: solving takes longest
MAX_NOTED = 16  # steps to learn from: until then nobody has asked for what they teach
OUTLIER, MAX_OUTLIERS = 4.0, 8  # times the prediction; so many in a row are no outliers
DRIFT, DRIFT_MEMORY = 0.2, 1 / 16  # mean error at which what is known is doubted
MOST = 0.5  # that one step's error adds to it
RISE, FALL, MAX_MARGIN = 0.019, 0.001, 1.3  # settles where 19 of 20 steps are not longer
ERROR_MEMORY = 1 / 128

Vector = list[float]

# The normal equations' matrix is symmetric: of each row what is from its diagonal on, end to end.
_PAIRS = tuple(combinations_with_replacement(range(len(PARTS)), 2))
_PLACES = {pair: place for place, pair in enumerate(_PAIRS)}
_rows_of, _columns_of = (itemgetter(*indices) for indices in zip(*_PAIRS, strict=True))


class _Work(NamedTuple):
    """What of a step takes time; see StepPlan."""

    agreement: Agreement
    kv_tokens: Rows
    num_pairs: npt.NDArray[np.float64] | None

    @classmethod
    def of(cls, plan: StepPlan) -> "_Work":
        return cls(plan.agreement, plan.kv_tokens, plan.num_pairs)


class StepCost:
    """Coefficients of one kind of step, and how far they can be trusted.

    Attributes:
        num_steps: Steps without prompts and with them.
    """

    def __init__(self, start: SequenceOf[float] = START) -> None:
        self.num_steps = [0, 0]
        self._noted: list[tuple[_Work, float]] = []
        self._margin = 1.0
        self._error = 0.0
        self._used = list(start)
        self._drift = 0.0
        self._num_outliers = 0
        self._num_learnt = 0
        self._num_before = 0  # steps of epochs before this one
        self._is_fresh = True  # so each step is learnt from at once
        self._weight = 0.0
        self._squares = [START_WEIGHT * (i == j) for i, j in _PAIRS]
        self._products = [START_WEIGHT * each for each in start]

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen to go by it; under load all of them run prompts."""
        return self.num_steps[1] >= KNOWN_STEPS and sum(self.num_steps) >= 2 * KNOWN_STEPS

    @property
    def margin(self) -> float:
        """1 to MAX_MARGIN, by which predictions are raised so that 19 of 20 hold."""
        self._catch_up()
        return self._margin

    @property
    def error(self) -> float:
        """Mean of |observed / predicted - 1|, lately."""
        self._catch_up()
        return self._error

    def values(self, *, with_margin: bool = False) -> list[float]:
        """Returns the seconds of each of PARTS: per step, per step with prompts, per token, per pair."""
        self._catch_up()
        margin = self._margin if with_margin else 1.0
        return [each * scale * margin for each, scale in zip(self._used, SCALES, strict=True)]

    def coefficients(self) -> dict[str, float]:
        """Returns the same by part, without the margin."""
        return dict(zip(PARTS, self.values(), strict=True))

    def begin_epoch(self) -> None:
        """Doubts what is known, since executors may be others, and learns from each of the next steps."""
        self.doubt()
        self._num_before = sum(self.num_steps)
        self._is_fresh = True

    def doubt(self) -> None:
        """Lets the next steps count for more than all before them; coefficients stay until then."""
        self._catch_up()
        factor = DOUBTED_WEIGHT / max(self._weight, DOUBTED_WEIGHT)
        self._add(self._used, factor=factor, weight=0.0, target=0.0)

    def predict(self, plan: StepPlan) -> float:
        """Returns the seconds that a step should take, without the margin."""
        self._catch_up()
        return _product(self._features(_Work.of(plan)), self._used)

    def predict_decodes(self, plan: StepPlan) -> float:
        """Returns the seconds that a speculative step's rows would take without drafts."""
        self._catch_up()
        agreement, rows = plan.agreement, plan.num_sampled
        most, mean = max(rows), sum(rows) / len(rows)
        if agreement.padding_mode is PaddingMode.MAX_LEN:
            mean = most = max(most, agreement.graph_size or 0)
        return _product(_scaled((1.0, 0.0, most, mean, int(plan.kv_tokens.max()), 0.0)), self._used)

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Notes a step that took so long. It is learnt from when somebody asks, or more are noted."""
        has_prompts = plan.agreement.has_extend
        self.num_steps[has_prompts] += 1
        if self._is_fresh:  # as little is known, or the group was another before
            num_steps = sum(self.num_steps) - self._num_before
            self._is_fresh = not self.is_known or num_steps <= 2 * KNOWN_STEPS
        if not self._is_fresh and not has_prompts and self.num_steps[0] % LEARN_EVERY:
            return
        self._noted.append((_Work.of(plan), seconds))
        if self._is_fresh or len(self._noted) == MAX_NOTED:
            self._catch_up()

    def _catch_up(self) -> None:
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        for work, seconds in noted:
            self._compare(work, seconds)

    def _compare(self, work: _Work, seconds: float) -> None:
        """Learns from a step, unless it is an outlier, how long steps take and how far that holds."""
        features = self._features(work)
        predicted = _product(features, self._used)
        ratio = seconds / predicted
        self._num_outliers = self._num_outliers + 1 if ratio > OUTLIER else 0
        if 0 < self._num_outliers < MAX_OUTLIERS:
            return
        if self.is_known:
            self._error += ERROR_MEMORY * (abs(ratio - 1) - self._error)
            margin = self._margin + (RISE if ratio > self._margin else -FALL)
            self._margin = min(max(1.0, margin), MAX_MARGIN)
        self._drift += DRIFT_MEMORY * (min(max(ratio - 1, -MOST), MOST) - self._drift)
        if abs(self._drift) > DRIFT:
            self._drift = 0.0
            self.doubt()
        self._learn([each / predicted for each in features], ratio)

    def _learn(self, features: Vector, target: float) -> None:
        weight = FAR / max(FAR, abs(target - 1))
        self._add(features, factor=FORGET, weight=weight, target=target)
        self._num_learnt += 1
        if self._is_fresh or self._num_learnt % FIT_EVERY == 0:
            self._fit()

    def _add(self, features: Vector, *, factor: float, weight: float, target: float) -> None:
        """Fades what was seen by a factor, and adds a step."""
        weighed = [weight * each for each in features]
        self._weight = factor * self._weight + weight
        squares = zip(self._squares, _rows_of(weighed), _columns_of(features), strict=True)
        self._squares = [factor * a + each * b for a, each, b in squares]
        products = zip(self._products, weighed, strict=True)
        self._products = [factor * a + target * each for a, each in products]

    def _fit(self) -> None:
        """Solves the normal equations, again without the least part as long as one is below LEAST."""
        squares, products = self._squares.copy(), self._products.copy()
        diagonal = [_PLACES[i, i] for i in range(len(PARTS))]
        for i, used in enumerate(self._used):
            rest = REST[0] * squares[diagonal[i]] + REST[1]
            squares[diagonal[i]] += rest
            products[i] += rest * used
        parts = list(range(len(PARTS)))
        found = _solve(squares, products, parts)
        while parts and min(found) < LEAST:
            weighed = [
                x * math.sqrt(squares[diagonal[i]]) for x, i in zip(found, parts, strict=True)
            ]
            del parts[weighed.index(min(weighed))]
            found = _solve(squares, products, parts)
        self._used = [LEAST] * len(PARTS)
        for part, value in zip(parts, found, strict=True):
            self._used[part] = value

    def _features(self, work: _Work) -> Vector:
        """Returns [6], scaled, with n, K and A of the rank that seems to take longest."""
        agreement, kv, pairs = work
        rows = agreement.global_num_tokens
        most, mean = max(rows), sum(rows) / len(rows)
        if agreement.padding_mode is PaddingMode.MAX_LEN:
            width = agreement.num_draft_tokens or 1
            mean = most = max(most, width * (agreement.graph_size or 0))
            rows = (most,) * len(rows)
        if pairs is None:
            return _scaled((1.0, 0.0, most, mean, int(kv.max()), 0.0))
        _, _, per_row, _, per_kv, per_pair = self.values()
        rank = int((per_row * np.array(rows) + per_kv * kv + per_pair * pairs).argmax())
        return _scaled((1.0, 1.0, rows[rank], mean, int(kv[rank]), float(pairs[rank])))


def _scaled(features: SequenceOf[float]) -> Vector:
    return [each * scale for each, scale in zip(features, SCALES, strict=True)]


def _product(a: Vector, b: Vector) -> float:
    product: float = sum(map(mul, a, b))
    return product


def _solve(squares: Vector, products: Vector, parts: list[int]) -> Vector:
    """Returns what solves the rows and columns of some parts: positive, so not pivoted."""
    rows = [
        [*(squares[_PLACES[i, j]] for j in parts[place:]), products[i]]
        for place, i in enumerate(parts)
    ]
    for place, row in enumerate(rows):
        for behind in range(1, len(row) - 1):
            factor = row[behind] / row[0]
            other = rows[place + behind]
            rows[place + behind] = [
                a - factor * b for a, b in zip(other, row[behind:], strict=True)
            ]
    found: Vector = []
    for row in reversed(rows):
        found.insert(0, (row[-1] - sum(map(mul, row[1:], found))) / row[0])
    return found


class StepCosts:
    """What is known of a group's steps over all of its epochs.

    Attributes:
        plain: Of steps without drafts.
        drafting: Of speculative ones.
    """

    def __init__(self) -> None:
        self._kind: Hashable = None
        self.plain, self.drafting = StepCost(), StepCost()

    def begin_epoch(self, kind: Hashable) -> None:
        """Keeps what is known if an executor's steps are what they were, as far as ``kind`` says.

        Executors may be others or more than before, or on other machines, so it is doubted all the same.
        """
        if kind != self._kind:
            self._kind = kind
            self.plain, self.drafting = StepCost(), StepCost()
        self.plain.begin_epoch()
        self.drafting.begin_epoch()

    def of(self, plan: StepPlan) -> StepCost:
        return self.drafting if plan.agreement.num_draft_tokens else self.plain

    def add(self, plan: StepPlan, result: StepResult) -> float | None:
        """Learns from an answered step; its slowest executor's time counts.

        Returns, of a speculative one, what it took over what plain decodes would; None: not known.
        """
        seconds = max(result.forward_ns) * 1e-9
        if seconds <= 0:
            return None
        self.of(plan).add(plan, seconds)
        if not plan.agreement.num_draft_tokens or not self.plain.is_known:
            return None
        return seconds / self.plain.predict_decodes(plan)
