"""Order of prompts: the turn of each, by what its flow was given, its arrival, and what it takes to run."""

from bisect import insort

from router.requests.flows import Line
from router.requests.request import Sequence
from router.scheduling.sequence_table import SequenceTable
from router.scheduling.step_budget import BudgetSettings, Prices, Prompt, Turn
from router.scheduling.step_cost import StepCosts


class PromptOrder:
    """The turns of one table's prompts.

    Args:
        table: The rows.
        line: Of the sequences that wait.
        settings: What the operator said.
        costs: What steps take.

    Attributes:
        prices: What a step's parts take, when the last plan began.
        goes_by_time: Whether that is known, and to be gone by.
    """

    def __init__(
        self, table: SequenceTable, line: Line, settings: BudgetSettings, costs: StepCosts
    ) -> None:
        self._table = table
        self._line = line
        self._settings = settings
        self._costs = costs
        self.prices = Prices(*costs.plain.values())
        self.goes_by_time = False

    def begin_plan(self) -> None:
        """Takes over what is known of steps by now."""
        self._line.plan += 1
        cost = self._costs.plain
        self.goes_by_time = cost.is_known and self._settings.go_by_time
        self.prices = Prices(*cost.values(with_margin=True))

    def bound(self, rows: list[int]) -> list[list[Prompt]]:
        """Returns each rank's bound prompts in the order in which they run."""
        prompts: list[list[Prompt]] = [[] for _ in range(self._table.dp_size)]
        for row in rows:
            insort(prompts[self._table.rank_of(row)], self.prompt(row))
        return prompts

    def prompt(self, row: int) -> Prompt:
        """Returns what a row has to run; what it has run brings it forward."""
        table = self._table
        done = int(table.num_computed[row])
        turn = self.turn(table.bound(row), done)
        return Prompt(turn, int(table.num_extend[row]) - done, done, row)

    def turn(self, sequence: Sequence, done: int = 0) -> Turn:
        """Returns the place of a sequence of which so many tokens have run."""
        start, number, index = sequence.turn
        served = sequence.flow.standing(self._line.plan)
        return served, start - self.seconds_behind(done), number, index

    def seconds_behind(self, num_tokens: int) -> float:
        """Returns by how much so many tokens set a prompt back in the line."""
        if not self.goes_by_time:
            return 0.0
        return self._settings.prompt_order_weight * self.prices.token * num_tokens
