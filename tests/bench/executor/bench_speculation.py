"""Compares a speculative step with a plain one in CPU time, for each draft of the demo model.

    python -m tests.bench.executor.bench_speculation [--drafts eagle,mtp] [--batches 1,4,16,32] [--rounds 12]
                                            [--dtype bfloat16] [--require 1.1] [--behind]

Executors on one thread, without a router: one plain, and one for each draft. In a round all of them
take the same B problems with long answers, then STEPS steps each, taking turns: so neighbours on the
same cores slow all alike. A step's time is the CPU time of the thread that ran it, with what it runs
behind its answer. Columns:

    plain ms     a plain step, median
    step ms      a speculative step, median
    ratio        of neighbouring steps, median
    tokens       that a speculative step gains per sequence, up to its answer's end
    gain         tokens / ratio: how much more a CPU second yields than without the draft

With ``--require R``, exits with 1 if the best draft's gain is below R at some B. One process of a
busy machine tells ratios to about a tenth.

``--behind`` compares what drafts with KV run behind plain steps, as while drafts are paused: eagerly,
and as a graph of just so many sequences. On a CPU, where a graph is its pass and the padding, that
tells what filling a graph's inputs costs; a GPU saves launches.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice

import numpy as np

from deploy.local.demo_tasks import STOP_ID, Problem, problems
from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from protos.executor.v1 import executor_pb2 as pb
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.bench.support.timing import median_ratio
from tests.executor.support.steps import decodes_part, prompts_part, step
from tests.support.paths import DEMO_DRAFTS, DEMO_MODEL

DRAFTS = ("eagle", "mtp", "mtp3", "frozen_kv")
LONG_ANSWER = 8  # characters
MAX_MODEL_LEN = 128
BLOCK_SIZE = 16
STEPS = 4  # about as many as an answer takes with drafts


class Cell:
    """An executor that decodes B sequences, and what they have so far.

    Args:
        draft: Folder of its draft model; None for plain decoding.
        count: B.
        dtype: As in ``ExecutorConfig``.
        is_plain: Whether its steps are plain all the same.
        has_graph: Whether they replay a graph.

    Attributes:
        spent_ns: CPU time of the last step.
        behind_ns: Of it, what ran behind its answer.
        gained: Tokens up to the answers' ends.
        offered: How often a sequence took a step before its answer's end.
    """

    def __init__(
        self,
        draft: str | None,
        count: int,
        dtype: str,
        *,
        is_plain: bool = False,
        has_graph: bool = True,
    ) -> None:
        blocks_per_row = MAX_MODEL_LEN // BLOCK_SIZE
        config = ExecutorConfig(
            model=DEMO_MODEL,
            draft_model=None if draft is None else DEMO_DRAFTS / draft,
            dtype=dtype,
            device="cpu",
            num_threads=1,
            block_size=BLOCK_SIZE,
            max_num_seqs=count,
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=1 + count * blocks_per_row,
            decode_graph_sizes=(count,),
        )
        self._worker, description = build_worker(config)
        self._worker.join(1, "")
        plan = description.speculation if draft is not None else None
        self._width = plan.num_draft_tokens if plan is not None and not is_plain else 0
        self._has_graph = has_graph
        self._extends = plan is not None and plan.extends
        self._count, self._blocks_per_row = count, blocks_per_row
        self._step_id = 0
        self._num_tokens = np.zeros(count, dtype=np.int64)
        self._has_ended = np.zeros(count, dtype=np.bool_)
        self.gained = self.offered = self.spent_ns = self.behind_ns = 0

    def start(self, asked: list[Problem]) -> None:
        """Gives every row a problem, and runs the prompts."""
        rows = range(self._count)
        prompts = [[byte + 3 for byte in problem.prompt.encode()] for problem in asked]
        lens = [len(prompt) for prompt in prompts]
        # A plain row has to hold just what its tokens need.
        held = [self._blocks_per_row if self._width else -(-n // BLOCK_SIZE) for n in lens]
        ids = [1 + row * self._blocks_per_row + i for row in rows for i in range(held[row])]
        part = prompts_part(
            rows, lens, [token for prompt in prompts for token in prompt], held, ids
        )
        request = step(0, part, num_tokens=[sum(lens)], num_logits=[self._count])
        self._execute(request, num_draft_rows=sum(lens) + self._count)
        self._num_tokens = np.array(lens) + 1
        self._has_ended[:] = False

    def step(self) -> None:
        """Runs a step of all rows."""
        rows, computed = range(self._count), self._num_tokens - 1
        width = self._width or 1
        blocks = {}
        if not self._width:
            is_new = computed % BLOCK_SIZE == 0
            firsts = 1 + np.arange(self._count) * self._blocks_per_row
            ids = (firsts + computed // BLOCK_SIZE)[is_new]
            blocks = {"num_new_blocks": is_new, "new_block_ids": ids}
        request = step(
            0,
            decodes_part(rows, computed, **blocks),
            num_tokens=[self._count * width],
            graph_size=self._count if self._has_graph else None,
        )
        request.agreement.num_draft_tokens = self._width
        result = self._execute(request, num_draft_rows=self._count)
        tokens = np.frombuffer(result.next_token_ids, "<i4")
        counts = np.ones(self._count, dtype=np.int64)
        if self._width:
            counts = np.frombuffer(result.num_next_tokens, "<i4").astype(np.int64)
        for row, run in enumerate(np.split(tokens, np.cumsum(counts)[:-1])):
            if not self._has_ended[row]:
                stops = np.flatnonzero(run == STOP_ID)
                self._has_ended[row] = len(stops) > 0
                self.gained += int(stops[0]) + 1 if len(stops) else len(run)
                self.offered += 1
        self._num_tokens += counts

    def _execute(self, request: pb.StepRequest, num_draft_rows: int) -> pb.RankResult:
        self._step_id += 1
        request.step_id = self._step_id
        if self._extends and not request.agreement.num_draft_tokens:
            request.agreement.global_num_tokens_for_draft.append(num_draft_rows)
            request.agreement.global_num_sampled.append(self._count)
        start = time.thread_time_ns()
        response = self._worker.execute(request)
        answered = time.thread_time_ns()
        self._worker.run_deferred()
        end = time.thread_time_ns()
        self.spent_ns, self.behind_ns = end - start, end - answered
        return response.ranks[0]


def run_in_turns(
    cells: list[Cell], asked: list[list[Problem]], spent: Callable[[Cell], int]
) -> list[list[int]]:
    """Returns what each cell spent in each step. The first problems warm up."""
    times: list[list[int]] = [[] for _ in cells]
    for turn, given in enumerate(asked):
        for cell in cells:
            cell.start(given)
        for _ in range(STEPS):
            for cell, column in zip(cells, times, strict=True):
                cell.step()
                if turn:
                    column.append(spent(cell))
    return times


def compare(drafts: list[str], count: int, rounds: int, dtype: str) -> float:
    """Prints a line for each draft and returns the best gain."""
    cells = [Cell(draft, count, dtype) for draft in (None, *drafts)]
    long = (p for p in problems(0, 10**6, (0, 1, 1)) if len(p.answer) >= LONG_ANSWER)
    asked = [list(islice(long, count)) for _ in range(rounds + 1)]
    times = run_in_turns(cells, asked, lambda cell: cell.spent_ns)
    plain, best = times[0], 0.0
    for draft, cell, column in zip(drafts, cells[1:], times[1:], strict=True):
        ratio = median_ratio(column, plain)
        tokens = cell.gained / cell.offered
        best = max(best, tokens / ratio)
        print(
            f"{count:>4} {draft:<10} {statistics.median(plain) / 1e6:9.2f} "
            f"{statistics.median(column) / 1e6:8.2f} {ratio:6.2f} {tokens:7.2f} "
            f"{tokens / ratio:6.2f}",
            flush=True,
        )
    return best


def compare_behind(drafts: list[str], count: int, rounds: int, dtype: str) -> None:
    """Prints a line for each draft: what it runs behind plain steps, eagerly and in a graph."""
    for draft in drafts:
        cells = [
            Cell(draft, count, dtype, is_plain=True, has_graph=has_graph)
            for has_graph in (False, True)
        ]
        asked = list(islice(problems(0, 10**6, (0, 1, 1)), count))
        eager, graph = run_in_turns(cells, [asked] * (rounds + 1), lambda cell: cell.behind_ns)
        print(
            f"{count:>4} {draft:<10} {statistics.median(eager) / 1e6:9.2f} "
            f"{statistics.median(graph) / 1e6:9.2f} {median_ratio(graph, eager):6.2f}",
            flush=True,
        )


def main() -> int:
    numbers = {"batches": (1, 4, 16, 32), "rounds": 12, "require": 0.0}
    options = parse_options(__doc__, drafts=DRAFTS, dtype="bfloat16", behind=False, **numbers)
    quiet()
    gc.disable()
    if options.behind:
        print(f"demo model, {options.dtype}, 1 thread; CPU ms behind a plain step")
        print(f"{'B':>4} {'draft':<10} {'eager ms':>9} {'graph ms':>9} {'ratio':>6}")
        for count in options.batches:
            with_kv = [draft for draft in options.drafts if draft != "frozen_kv"]
            compare_behind(with_kv, count, options.rounds, options.dtype)
        return 0
    print(f"demo model, {options.dtype}, 1 thread; CPU ms per step; tokens per sequence and step")
    print(f"{'B':>4} {'draft':<10} {'plain ms':>9} {'step ms':>8} {'ratio':>6} {'tokens':>7} gain")
    gains = [
        compare(options.drafts, count, options.rounds, options.dtype) for count in options.batches
    ]
    return int(min(gains) < options.require)


if __name__ == "__main__":
    sys.exit(main())
