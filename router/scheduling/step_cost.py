"""Time of a step, learnt from what executors report: non-negative least squares over six features.

    seconds = base + prompts e + max_r (row n_r + kv K_r + pair A_r) + mean mean_r n_r

e is 1 if any rank runs prompt tokens; n_r are the tokens of rank r, with a graph or in an even gather
padded ones too; K_r the tokens of KV that its decodes read; A_r the query-key pairs of its chunks.
Attention is each rank's own work, so its fullest rank counts; experts are spread over all ranks, so
there the mean does. Errors are weighed by what was predicted: a tenth of a short step is worth as
much as a tenth of a long one. No part takes less than nothing: where steps are alike, and noise would
have one part negative and another too great, the rest is fitted with that part at zero.

Steps that draft run a second model, too: they have coefficients of their own (`StepCosts`).
"""

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from router.scheduling.step import PaddingMode, StepPlan, StepResult

PARTS = ("base", "prompts", "row", "mean", "kv", "pair")
SCALES = np.array([1.0, 1.0, 1e-3, 1e-3, 1e-5, 1e-7])  # each feature is then near 1

START = np.array([0.01, 0.001, 0.01, 0.01, 0.002, 0.01])  # scaled; some GPU's
LEAST = 1e-6  # scaled: a coefficient below counts as this
FORGET = 0.999
START_WEIGHT = 1.0  # of what is assumed at first; a step of 50 ms has 400
DOUBTED_WEIGHT = 0.1  # of all that was seen, once it is doubted
REST = 1e-4, 1e-9  # by which a coefficient is drawn to what it was: of its own weight, and besides
FAR = 0.5  # error from which on a step counts by its distance, not by the square of it

KNOWN_STEPS = 8  # with prompts, of twice as many in all, before anybody goes by it
LEARN_EVERY = 4  # of steps without prompts, which are many and alike
FIT_EVERY = 4  # of steps that are learnt from, once enough are: solving takes longest
OUTLIER, MAX_OUTLIERS = 4.0, 8  # times the prediction; so many in a row are no outliers
DRIFT, DRIFT_MEMORY = 0.2, 1 / 16  # mean error at which what is known is doubted
MOST = 0.5  # that one step's error adds to it
RISE, FALL, MAX_MARGIN = 0.019, 0.001, 1.3  # settles where 19 of 20 steps are not longer
ERROR_MEMORY = 1 / 128

Vector = npt.NDArray[np.float64]


class StepCost:
    """Coefficients of one kind of step, and how far they can be trusted.

    Attributes:
        num_steps: Steps without prompts and with them.
        margin: 1 to MAX_MARGIN, by which predictions are raised so that 19 of 20 hold.
        error: Mean of |observed / predicted - 1|, lately.
    """

    def __init__(self, start: Vector = START) -> None:
        self.num_steps = [0, 0]
        self.margin = 1.0
        self.error = 0.0
        self._used = start.copy()
        self._drift = 0.0
        self._num_outliers = 0
        self._num_learnt = 0
        self._weight = 0.0
        self._squares = START_WEIGHT * np.eye(len(PARTS))
        self._products = START_WEIGHT * start

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen to go by it; under load all of them run prompts."""
        return self.num_steps[1] >= KNOWN_STEPS and sum(self.num_steps) >= 2 * KNOWN_STEPS

    def values(self, *, with_margin: bool = False) -> list[float]:
        """Returns the seconds of each of PARTS: per step, per step with prompts, per token, per pair."""
        values: list[float] = (self._used * SCALES * (self.margin if with_margin else 1.0)).tolist()
        return values

    def coefficients(self) -> dict[str, float]:
        """Returns the same by part, without the margin."""
        return dict(zip(PARTS, self.values(), strict=True))

    def doubt(self) -> None:
        """Lets the next steps count for more than all before them; coefficients stay until then."""
        self._fade(DOUBTED_WEIGHT / max(self._weight, DOUBTED_WEIGHT))

    def _fade(self, factor: float) -> None:
        self._weight *= factor
        self._squares *= factor
        self._products *= factor

    def predict(self, plan: StepPlan) -> float:
        """Returns the seconds that a step should take, without the margin."""
        return float(self._features(plan) @ self._used)

    def predict_decodes(self, plan: StepPlan) -> float:
        """Returns the seconds that a speculative step's rows would take without drafts."""
        agreement, rows = plan.agreement, plan.num_sampled
        most, mean = max(rows), sum(rows) / len(rows)
        if agreement.padding_mode is PaddingMode.MAX_LEN:
            mean = most = max(most, agreement.graph_size or 0)
        features = np.array((1.0, 0.0, most, mean, int(plan.kv_tokens.max()), 0.0))
        return float(features * SCALES @ self._used)

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Learns from a step that took so long."""
        has_prompts = plan.agreement.has_extend
        self.num_steps[has_prompts] += 1
        if self.is_known and not has_prompts and self.num_steps[0] % LEARN_EVERY:
            return
        features = self._features(plan)
        predicted = float(features @ self._used)
        ratio = seconds / predicted
        self._num_outliers = self._num_outliers + 1 if ratio > OUTLIER else 0
        if 0 < self._num_outliers < MAX_OUTLIERS:
            return
        if self.is_known:
            self.error += ERROR_MEMORY * (abs(ratio - 1) - self.error)
            margin = self.margin + (RISE if ratio > self.margin else -FALL)
            self.margin = min(max(1.0, margin), MAX_MARGIN)
        self._drift += DRIFT_MEMORY * (min(max(ratio - 1, -MOST), MOST) - self._drift)
        if abs(self._drift) > DRIFT:
            self._drift = 0.0
            self.doubt()
        self._learn(features / predicted, ratio)

    def _learn(self, features: Vector, target: float) -> None:
        weight = FAR / max(FAR, abs(target - 1))
        self._fade(FORGET)
        self._weight += weight
        self._squares += np.outer(weight * features, features)
        self._products += weight * target * features
        self._num_learnt += 1
        if not self.is_known or self._num_learnt % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        """Solves the normal equations, again without the least part as long as one is below LEAST."""
        rest = REST[0] * self._squares.diagonal() + REST[1]
        squares = self._squares + np.diag(rest)
        products = self._products + rest * self._used
        parts = np.arange(len(PARTS))
        found = np.linalg.solve(squares, products)
        while len(parts) and found.min() < LEAST:
            parts = np.delete(parts, (found * np.sqrt(squares.diagonal()[parts])).argmin())
            found = np.linalg.solve(squares[np.ix_(parts, parts)], products[parts])
        self._used[:] = LEAST
        self._used[parts] = found

    def _features(self, plan: StepPlan) -> Vector:
        """Returns float64 [6], scaled, with n, K and A of the rank that seems to take longest."""
        agreement, kv, pairs = plan.agreement, plan.kv_tokens, plan.num_pairs
        rows = agreement.global_num_tokens
        most, mean = max(rows), sum(rows) / len(rows)
        if agreement.padding_mode is PaddingMode.MAX_LEN:
            width = agreement.num_draft_tokens or 1
            mean = most = max(most, width * (agreement.graph_size or 0))
            rows = (most,) * len(rows)
        if pairs is None:
            features = 1.0, 0.0, most, mean, int(kv.max()), 0.0
        else:
            _, _, per_row, _, per_kv, per_pair = (self._used * SCALES).tolist()
            rank = int((per_row * np.array(rows) + per_kv * kv + per_pair * pairs).argmax())
            features = 1.0, 1.0, rows[rank], mean, int(kv[rank]), float(pairs[rank])
        scaled: Vector = np.array(features) * SCALES
        return scaled


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
        """Keeps what is known if the group is what it was, as far as ``kind`` says.

        Its executors may be others, or on other machines, so it is doubted all the same.
        """
        if kind != self._kind:
            self._kind = kind
            self.plain, self.drafting = StepCost(), StepCost()
        self.plain.doubt()
        self.drafting.doubt()

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
