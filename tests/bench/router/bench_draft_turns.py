"""What turns of drafts and prompts gain and cost, in virtual time: the real scheduler, no executors.

    python -m tests.bench.router.bench_draft_turns [--trace FILE] [--draft-cost 1.5] [--acceptance 0.6]
                                            [--ranks 8] [--rates 5,20,40,80,160]

Requests come as a trace says, faster or slower, or at random: Poisson, prompts of 1,150 tokens and
answers of 210 on average, log-normal. A trace is a CSV with a line of names and then a time as in
2023-11-16 18:15:46.6805900, prompt tokens and output tokens. A plain step takes `--step-ms` and a
three-hundredth more for each of the fullest rank's sequences, a speculative one `--draft-cost` times
that, and prompts as long as `--prompt-tokens` of them take as a plain step does. They come on top of
the decodes in their step, or with `--overlap` beside them, so that the longer of the two counts.
Measured ratios of a speculative step to a plain one: 2.1 to 2.7 on a CPU (bench_speculation), and on
GPUs, which wait for memory while they decode, some 1.3 to 1.6. Each draft is accepted with
`--acceptance`, if those before it are. Two steps are in flight. Each rank has so many ``--rows``, KV
``--blocks`` of 16 tokens, and a ``--budget`` of tokens in a step.

A line for each rate and way: without drafts, prompts always first, and turns with so many steps of
prompts between. Of all requests: output tokens a second; milliseconds to the first token, mean and
95th percentile, and between tokens, mean; seconds to the end; speculative steps out of all.
"""

import argparse
import csv
import datetime
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from router.requests.request import Listeners, Request, Sequence
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.scheduler import Scheduler, SchedulerSettings
from router.scheduling.step import StepPlan, StepResult
from tests.bench.support.options import parse_options
from tests.router.support.requests import make_request
from tests.router.support.stepper import make_shape, speculation

DEPTH = 2
BLOCK_SIZE = 16
MAX_MODEL_LEN = 16384
NEVER = 10**9
WAYS = {
    "no drafts": SchedulerSettings(speculation="off"),
    "prompts 1st": SchedulerSettings(prompt_steps_between_drafts=NEVER),
    **{f"turns, {n}": SchedulerSettings(prompt_steps_between_drafts=n) for n in (4, 2, 1)},
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds, and its tokens."""

    time: float
    num_prompt: int
    num_output: int


def read_trace(path: Path, count: int) -> list[Arrival]:
    """Returns the first requests of a trace."""
    with path.open(newline="") as file:
        rows = [row for row, _ in zip(list(csv.reader(file))[1:], range(count), strict=False)]
    times = [datetime.datetime.fromisoformat(row[0][:26]).timestamp() for row in rows]
    return [
        Arrival(time - times[0], max(1, int(row[1])), max(1, int(row[2])))
        for time, row in zip(times, rows, strict=True)
    ]


def draw_arrivals(count: int) -> list[Arrival]:
    """Returns requests at random, one a second on average; the same ones each time."""
    rng = np.random.default_rng(0)
    times = rng.exponential(1.0, count).cumsum()
    prompts = np.clip(rng.lognormal(6.7, 0.85, count), 1, MAX_MODEL_LEN // 2)
    outputs = np.clip(rng.lognormal(5.0, 0.85, count), 1, 1000)
    return [
        Arrival(float(time), int(prompt), int(output))
        for time, prompt, output in zip(times, prompts, outputs, strict=True)
    ]


@dataclass
class World:
    """A group on a virtual clock.

    Attributes:
        now: Seconds.
        ended: Sequences, in order.
        num_steps: In all, and those with drafts.
    """

    options: argparse.Namespace
    settings: SchedulerSettings
    now: float = 0.0
    ended: list[tuple[Sequence, float]] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=lambda: [0, 0])

    def __post_init__(self) -> None:
        options = self.options
        self._rng = np.random.default_rng(0)
        self._admission = WaitingQueue(max_sequences=NEVER, max_tokens=NEVER)
        listeners = Listeners(max_listeners=1)
        self._listener = listeners.open()
        shape = make_shape(
            dp_size=options.ranks,
            num_blocks=options.blocks,
            block_size=BLOCK_SIZE,
            rows_per_rank=options.rows,
            max_num_batched_tokens=options.budget,
            max_num_logits=options.rows,
            max_model_len=MAX_MODEL_LEN,
            speculation=speculation(),  # a chain of three drafts
        )
        self._scheduler = Scheduler(
            shape,
            self._admission,
            listeners,
            self.settings,
            clock=lambda: self.now,
            on_end=lambda sequence: self.ended.append((sequence, self.now)),
        )

    def run(self, arrivals: SequenceOf[Arrival]) -> None:
        """Serves all requests to their ends, as the engine's loop does."""
        coming, in_flight = deque(enumerate(arrivals, start=1)), deque[tuple[float, StepPlan]]()
        device_time = 0.0
        while True:
            while coming and coming[0][1].time <= self.now:
                self._admission.submit(self._request(*coming.popleft()))
            while len(in_flight) < DEPTH and (plan := self._scheduler.schedule()) is not None:
                device_time = max(device_time, self.now) + self._duration(plan)
                in_flight.append((device_time, plan))
            if in_flight:
                self.now, plan = in_flight.popleft()
                self._scheduler.commit(plan, self._answer(plan))
            elif coming:
                self.now = coming[0][1].time
            else:
                return

    def _request(self, number: int, arrival: Arrival) -> Request:
        prompt = np.full(arrival.num_prompt, number)  # nobody shares a prefix
        fields = {"request_id": str(number), "arrival_time": arrival.time, "tag": number}
        return make_request(prompt, self._listener, arrival.num_output, **fields)

    def _duration(self, plan: StepPlan) -> float:
        """Returns the seconds that a step takes; the fullest rank's count for all."""
        options, agreement = self.options, plan.agreement
        steps = 1 + max(plan.num_sampled) / 300
        self.num_steps[0] += 1
        if agreement.num_draft_tokens:
            self.num_steps[1] += 1
            steps *= options.draft_cost
        elif agreement.has_extend:
            prompts = max(agreement.global_num_tokens) / options.prompt_tokens
            steps = max(steps, prompts) if options.overlap else steps + prompts
        return float(steps * options.step_ms / 1e3)

    def _answer(self, plan: StepPlan) -> StepResult:
        num_rows = sum(plan.num_sampled)
        gains = np.ones(num_rows, dtype=np.int32)
        if plan.limits is not None:
            drawn = self._rng.geometric(1 - self.options.acceptance, num_rows)
            gains = np.minimum(plan.limits, drawn).astype(np.int32)
        num_tokens, no_times = int(gains.sum()), [0] * len(plan.num_sampled)
        return StepResult(np.ones(num_tokens, dtype=np.int32), gains, no_times, no_times)


def report(name: str, world: World) -> None:
    """Prints a line of what came of a run."""
    first_s, gaps_s, total_s, num_tokens = [], [], [], 0
    for sequence, end in world.ended:
        first, arrival = sequence.progress.first_token_time, sequence.request.arrival_time
        assert first is not None
        count = sequence.num_output_tokens
        num_tokens += count
        first_s.append(first - arrival)
        total_s.append(end - arrival)
        if count > 1:
            gaps_s.append((end - first) / (count - 1))
    num_steps, num_drafting = world.num_steps
    print(
        f"  {name:<12}{num_tokens / world.now:9.0f}{np.mean(first_s) * 1e3:9.0f}"
        f"{np.percentile(first_s, 95) * 1e3:9.0f}{np.mean(gaps_s) * 1e3:10.1f}"
        f"{np.mean(total_s):8.2f}{num_drafting:8} of {num_steps}",
        flush=True,
    )


def main() -> None:
    load = {"trace": Path, "requests": 1000, "rates": (5.0, 20.0, 40.0, 80.0, 160.0)}
    sizes = {"ranks": 8, "rows": 64, "blocks": 8000, "budget": 4096}
    costs = {"step_ms": 20.0, "draft_cost": 1.5, "prompt_tokens": 600.0, "acceptance": 0.6}
    options = parse_options(__doc__, overlap=False, **load, **sizes, **costs)
    if options.trace is None:
        arrivals = draw_arrivals(options.requests)
    else:
        arrivals = read_trace(options.trace, options.requests)
    own_rate = len(arrivals) / arrivals[-1].time
    for rate in options.rates:
        print(f"{rate:g} requests/s")
        print(
            f"  {'':<12}{'tokens/s':>9}{'first ms':>9}{'p95':>9}{'between ms':>11}"
            f"{'end s':>7}  speculative"
        )
        scaled = [
            Arrival(one.time * own_rate / rate, one.num_prompt, one.num_output) for one in arrivals
        ]
        for name, drafts in WAYS.items():
            world = World(options, drafts)
            world.run(scaled)
            report(name, world)


if __name__ == "__main__":
    main()
