"""Budget of a step in seconds, and what of the waiting prompts to run for it.

Pure functions of what a step's parts take (`Prices`), but for `Hold`, which remembers how long prompts
have waited. Words: D decodes, K the tokens of KV that they read, a the price of a row, m that of a row
on every rank, q that of a query and key; ranks are R.

    budget   the gap that is aimed at, and more the longer the backlog would take to drain
    fill     one level of time for all ranks such that the step takes the budget
    hold     whether to run prompts at all, or to wait until more ranks have some
    trim     the level's top, where it would cost the decodes more than it gives the prompts
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protos.settings import at_least, setting

USUAL_TARGET_S = 0.05  # where the fixed part of a step with prompts is USUAL_FIXED_S at most
USUAL_FIXED_S = 0.015
FIXED_SLOPE = 7.0  # seconds for each second of it beyond, up to the target of the first token
LEAST_PER_FIXED = (
    4.0  # seconds for each second of it, so that prompts have three quarters of a step
)
SLOW_TARGET_S = 0.25  # from which on the fixed part of more steps would cost first tokens much
SLOW_SLOPE = 1.5  # seconds of the bound for each second beyond
LEAST_AT_BOUND = 400  # prompt tokens of every rank that the bound has room for
IDLE_S = 0.08  # a step of prompts that no decode waits for
USUAL_CONTEXT = 1024  # tokens before a prompt's, where a prompt is not looked at
REST = 0.08  # of a chunk: less than that of a prompt is not left for another step
MAX_TURNS = 8  # of the search for a level
FULL = 0.9  # of the budget: waiting would not fill the step better
NEAR_TOP = 0.95  # of the largest chunk: trimmed with it
MIN_TRIM = 64  # tokens
MEAN_MEMORY = 0.05


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """Settings of the time that steps may take."""

    target_token_gap_ms: float | None = setting(
        None,
        at_least(0),
        unset="50, and 7 more for each by which the fixed part of such a step exceeds 15, but no more "
        "than --target-first-token-ms or four times that part",
    )
    """Milliseconds that a step with prompts takes, and so the gap between two tokens of an answer,
    while prompts drain in time. 0: as many tokens as fit, however long they take."""
    max_token_gap_ms: float = setting(0.0, at_least(0))
    """Milliseconds that it may take while they do not; 0 is four times the target, or of one that is not
    set 150 more than it, and 1.5 for each by which it exceeds 250, but no less than 400 prompt tokens
    of every rank take."""
    target_first_token_ms: float = setting(500.0, at_least(1))
    """Milliseconds in which waiting prompts should drain: the longer it would take them, the longer
    steps become. No prompt that has a place on a rank is held back for longer."""
    first_token_weight: float = setting(30.0, at_least(1))
    """What a second of waiting for a first token is worth in seconds between tokens. A great number
    never holds prompts back and never trims their chunks."""
    prompt_order_weight: float = setting(2.0, at_least(0))
    """Seconds of waiting by which a prompt stands behind shorter ones for each second that it takes
    to run. 0 is the order of arrival."""
    min_chunk_tokens: int = setting(128, at_least(1))
    """Prompt tokens that run on each rank that has some, in a step that runs any."""

    @property
    def go_by_time(self) -> bool:
        """Whether steps have a budget in seconds, once it is known what they take."""
        return self.target_token_gap_ms != 0


class Prices(NamedTuple):
    """Seconds of a step's parts, see `step_cost`, with the margin."""

    base: float
    prompts: float
    row: float
    mean: float
    kv: float
    pair: float

    @property
    def token(self) -> float:
        """Of a token on every rank."""
        return self.row + self.mean

    @property
    def unit(self) -> float:
        """The same of a prompt, with what its attention usually costs."""
        return self.token + USUAL_CONTEXT * self.pair

    def most(self, num_tokens: int) -> float:
        """Of prompts of so many tokens, at most: of one prompt, beside which no other rank has one."""
        return num_tokens * (self.token + max(USUAL_CONTEXT, num_tokens / 2) * self.pair)


Turn = tuple[float, float, int, int]


class Prompt(NamedTuple):
    """A bound prompt, in the order in which they run.

    Attributes:
        turn: Its place in the line: what its flow was given, and then seconds.
        left: Tokens to run, at least one.
        done: Tokens before these.
        row: Of the sequence table.
    """

    turn: Turn
    left: int
    done: int
    row: int


class Budget(NamedTuple):
    """Time of a step with prompts.

    Attributes:
        own: [dp_size] seconds of each rank's own decodes.
        longest: The greatest of these.
        num_free: [dp_size] tokens that fit beside the decodes.
        base: Seconds of the step if it ran prompts of no tokens.
        seconds: That it may take.
        chunk: Prompt tokens that each rank may run if all have some.
    """

    prices: Prices
    own: list[float]
    longest: float
    num_free: list[int]
    num_decodes: int
    base: float
    seconds: float
    chunk: int


Prompts = SequenceOf[SequenceOf[Prompt]]


def gap_range(settings: BudgetSettings, prices: Prices) -> tuple[float, float]:
    """Returns the seconds that a step with prompts takes while these drain in time, and at most.

    Where a step takes long whatever it runs, a short one would run hardly any prompts beside that. Nor
    would many steps for one prompt pay where tokens take long, as on a CPU. Chunks that are all alike do
    not show what of their time is their tokens' and what is every such step's: of that no more than the
    base is believed.
    """
    bound_s = settings.max_token_gap_ms / 1e3
    if settings.target_token_gap_ms is not None:
        target_s = settings.target_token_gap_ms / 1e3
        return target_s, max(target_s, bound_s or 4 * target_s)
    fixed_s = prices.base + min(prices.prompts, prices.base)
    target_s = USUAL_TARGET_S + FIXED_SLOPE * max(0.0, fixed_s - USUAL_FIXED_S)
    target_s = min(target_s, max(settings.target_first_token_ms / 1e3, LEAST_PER_FIXED * fixed_s))
    slow_s = max(0.0, target_s - SLOW_TARGET_S)
    usual_s = target_s + 3 * USUAL_TARGET_S + SLOW_SLOPE * slow_s
    bound_s = bound_s or max(usual_s, fixed_s + LEAST_AT_BOUND * prices.unit)
    return min(target_s, bound_s), bound_s


def drained_tokens(settings: BudgetSettings, prices: Prices) -> float:
    """Returns the prompt tokens that each rank could run in the target of the first token."""
    return settings.target_first_token_ms / 1e3 / prices.unit


def open_budget(
    settings: BudgetSettings,
    prices: Prices,
    num_decodes: SequenceOf[int],
    kv_tokens: npt.ArrayLike,
    num_backlog: float,
    max_tokens: int,
) -> Budget:
    """Returns what a step may take.

    With chunks of C on every rank a backlog of W tokens a rank takes W / C steps of base + unit C;
    that being the target of the first token gives C. So the gap stays at its target while the
    backlog drains in time and grows smoothly, up to its bound, when it does not.

    Args:
        num_decodes: [dp_size].
        kv_tokens: [dp_size] that these read.
        num_backlog: Prompt tokens bound and waiting that may widen the gap; infinity: the gap is there,
            as answers that had begun wait for them.
        max_tokens: Of a rank in a step.
    """
    num_ranks, total = len(num_decodes), sum(num_decodes)
    decodes = np.array(num_decodes)
    own: list[float] = (prices.row * decodes + prices.kv * np.asarray(kv_tokens)).tolist()
    longest = max(own)
    base = prices.base + prices.prompts + longest + prices.mean * total / num_ranks
    target_s, max_s = gap_range(settings, prices)
    seconds = max(IDLE_S, target_s, 2 * base)  # half of it, at least, is the prompts'
    if total:
        backlog = num_backlog / num_ranks
        spare_s = settings.target_first_token_ms / 1e3 - backlog * prices.unit
        need = backlog * base / spare_s if spare_s > 0 else math.inf
        seconds = min(max(target_s, base + prices.unit * need), max_s)
    elif math.isinf(num_backlog):
        seconds = max(seconds, max_s)
    chunk = int(max((seconds - base) / prices.unit, settings.min_chunk_tokens))
    num_free: list[int] = (max_tokens - decodes).tolist()
    return Budget(prices, own, longest, num_free, total, base, seconds, min(chunk, max_tokens))


# ---- level


def _tokens_in(prices: Prices, prompts: SequenceOf[Prompt], seconds: float) -> float:
    """Returns how many tokens of prompts, in order, a rank itself runs in so many seconds."""
    num = 0.0
    for _, left, done, _ in prompts:
        whole_s = left * (prices.row + prices.pair * (done + left / 2))
        if whole_s <= seconds:
            num, seconds = num + left, seconds - whole_s
        elif seconds > 0:
            first = prices.row + prices.pair * done  # of the next token; each more takes longer
            root = math.sqrt(first * first + 2 * prices.pair * seconds)
            return num + 2 * seconds / (first + root)
        else:
            break
    return num


def fill(budget: Budget, prompts: Prompts, min_chunk: int) -> list[int]:
    """Returns each rank's prompt tokens: as many as one level of time for all ranks allows.

    A rank's level counts its own decodes, so one with much KV runs less, and where ranks have no
    prompts the others run more, as experts are everybody's.

    Args:
        prompts: [dp_size] each rank's, in order.
        min_chunk: Tokens that each rank with prompts runs at least.
    """
    prices, num_ranks = budget.prices, len(prompts)
    ranks = [rank for rank, waiting in enumerate(prompts) if waiting]  # the others run none
    all_counts = [0] * num_ranks
    high = least = budget.longest
    for number in ranks:
        num, seconds = 0, budget.own[number]
        for _, left, done, _ in prompts[number]:
            num += left
            seconds += left * (prices.row + prices.pair * (done + left / 2))
        all_counts[number] = min(num, budget.num_free[number])
        high = max(high, seconds)
    room = budget.seconds - budget.base + least  # for the level, and all that it runs
    over = high + prices.mean * sum(all_counts) / num_ranks - room
    if over <= 0:
        return all_counts
    waiting, own = [prompts[rank] for rank in ranks], [budget.own[rank] for rank in ranks]
    sums = [all_counts[rank] for rank in ranks]

    def at(level: float) -> tuple[list[float], float]:
        counts = [
            min(_tokens_in(prices, rank, level - decodes), most)
            for rank, decodes, most in zip(waiting, own, sums, strict=True)
        ]
        return counts, max(least, level) + prices.mean * sum(counts) / num_ranks - room

    low = min(budget.own)
    counts, under = at(low)
    for _ in range(MAX_TURNS):
        if under >= 0 or -under < 0.005 * room:
            break
        level = low + (high - low) * under / (under - over)
        found, rest = at(level)
        if rest <= 0:
            low, under, counts, over = level, rest, found, over / 2
        else:
            high, over, under = level, rest, under / 2
    for number, rank, count, most in zip(ranks, waiting, counts, sums, strict=True):
        all_counts[number] = _with_rest(rank, max(int(count), min(min_chunk, most)), most)
    return all_counts


def _with_rest(prompts: SequenceOf[Prompt], count: int, most: int) -> int:
    """Returns a rank's tokens, with the end of the prompt that they leave if little of it is left."""
    end = 0
    for prompt in prompts:
        end += prompt.left
        if end >= count:
            return min(end, most) if end - count < REST * count else count
    return count


def seconds_of(budget: Budget, prompts: Prompts, counts: SequenceOf[int]) -> float:
    """Returns what a step takes that runs so many tokens of each rank's prompts."""
    prices = budget.prices
    longest = least = budget.longest
    for rank, waiting in enumerate(prompts):
        if not waiting:
            continue
        seconds, count = budget.own[rank], counts[rank]
        for _, left, done, _ in waiting:
            num = min(left, count)
            seconds += num * (prices.row + prices.pair * (done + num / 2))
            count -= num
        longest = max(longest, seconds)
    return budget.base + longest - least + prices.mean * sum(counts) / len(counts)


# ---- hold and trim


class Why(StrEnum):
    """What a step does about prompts that are bound."""

    HELD = auto()  # they wait for more
    NO_DECODES = auto()  # they run: nobody waits for the step
    FULL = auto()  # they run: they fill it
    DEBT = auto()  # they run: waiting has cost as much as running costs the decodes
    DUE = auto()  # they run: they have waited for as long as a first token may


class Offer(NamedTuple):
    """What running prompts gives and costs: the same for as long as it is offered.

    Attributes:
        num_prompts: That are bound.
        num_decodes: That the step is longer for.
        waste_s: Seconds of it that prompts cost whatever they run, and that ranks wait for the fullest.
        room_s: Seconds of the budget that more prompts would have to take to fill it; none is left where
            these do.
    """

    num_prompts: int
    num_decodes: int
    waste_s: float
    room_s: float

    @classmethod
    def of(cls, budget: Budget, prompts: Prompts, counts: SequenceOf[int]) -> "Offer":
        """Returns the offer of a step that would run so many tokens of each rank's prompts."""
        excess = max(counts) - sum(counts) / len(counts)
        filled_s = seconds_of(budget, prompts, counts) - budget.base
        return cls(
            sum(map(len, prompts)),
            budget.num_decodes,
            budget.prices.prompts + budget.prices.row * excess,
            FULL * (budget.seconds - budget.base) - filled_s,
        )

    def beside(self, num_more: int, seconds: float) -> "Offer":
        """Returns it with so many more prompts, which take so long at most."""
        return self._replace(num_prompts=self.num_prompts + num_more, room_s=self.room_s - seconds)


class Hold:
    """Decides when prompts run: once their waiting has cost as much as running them will.

    A step with prompts costs every decode what prompts add, and the fullest rank's excess over the
    mean; a step later more ranks may have prompts. As for who rents before buying, the cost is never
    more than twice what hindsight would have paid.

    Args:
        settings: What the operator said.
        now: Time of its making, on the clock of the calls.

    Attributes:
        debt: Request-seconds since the last step with prompts: what those bound have waited, and what
            those that wait for rows lost to rows that gave no output.
    """

    def __init__(self, settings: BudgetSettings, now: float) -> None:
        self._settings = settings
        self._limit_s = settings.target_first_token_ms / 1e3
        self._last_plan = now
        self._last_prompts = -math.inf
        self._mean_interval = 0.0  # between steps with prompts
        self._mean_tokens = 0.0  # of a rank in these
        self.debt = 0.0

    def decide(self, offer: Offer, now: float, *, oldest: float, num_stuck: int) -> Why:
        """Decides whether prompts run in the step that is planned now.

        Args:
            oldest: When the first of the prompts was bound.
            num_stuck: Sequences that wait for rows or KV, which decodes give back.
        """
        num_held, num_decodes, waste_s, room_s = offer
        idle = num_held / (num_held + num_decodes)  # share of the rows
        self.debt += (num_held + idle * num_stuck) * (now - self._last_plan)
        self._last_plan = now
        if not num_decodes:
            return Why.NO_DECODES
        if now - min(oldest, self._last_prompts) >= self._limit_s:
            return Why.DUE
        weight = num_decodes / self._settings.first_token_weight + num_stuck
        if self.debt >= weight * waste_s:
            return Why.DEBT
        return Why.FULL if room_s <= 0 else Why.HELD

    def note(self, counts: SequenceOf[int], now: float) -> None:
        """Notes that a step runs so many prompt tokens of each rank."""
        self.debt = 0.0
        interval = min(now - self._last_prompts, self._limit_s)
        self._mean_interval += MEAN_MEMORY * (interval - self._mean_interval)
        self._last_prompts = now
        self._mean_tokens += MEAN_MEMORY * (sum(counts) / len(counts) - self._mean_tokens)

    def skip(self, now: float) -> None:
        """Notes that a step had no prompts to decide about."""
        self._last_plan = now

    def trim(
        self, budget: Budget, prompts: Prompts, counts: SequenceOf[int], *, num_stuck: int
    ) -> list[int]:
        """Returns the ranks' tokens without what costs the decodes more than it gives the prompts.

        What others can be expected to bring next time is what is trimmed at most: where prompts are
        long and few, that is little.
        """
        trimmed, num_ranks = list(counts), len(counts)
        weight = budget.num_decodes / self._settings.first_token_weight + num_stuck
        for _ in range(2 * num_ranks):
            top = max(trimmed)
            at_top = [rank for rank, count in enumerate(trimmed) if count >= NEAR_TOP * top]
            others = (count for count in trimmed if count < NEAR_TOP * top)
            following = max(self._settings.min_chunk_tokens, *others, 0)
            delta = int(min(top - following, self._mean_tokens))
            if delta < MIN_TRIM:
                break
            cost = weight * budget.prices.row * (1 - len(at_top) / num_ranks) * delta
            num_ends = sum(_num_ends(prompts[r], trimmed[r], delta) for r in at_top)
            gain = num_ends * self._mean_interval + len(at_top) * delta / top * budget.seconds
            if cost <= gain:
                break
            for rank in at_top:
                trimmed[rank] = min(trimmed[rank], top - delta)
        return trimmed


def _num_ends(prompts: SequenceOf[Prompt], count: int, delta: int) -> int:
    """Returns how many prompts end in the last of so many tokens."""
    end = num = 0
    for prompt in prompts:
        end += prompt.left
        num += count - delta < end <= count
    return num
