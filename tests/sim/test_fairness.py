"""If these fail, somebody waits for ever behind those who matter more, or runs when it is too late."""

import asyncio
import itertools
import random

import pytest

from router.engine.engines import Engines
from router.errors import DeadlineExceeded
from router.requests.request import Listeners, Request
from router.requests.waiting_queue import WaitingQueue
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.requests import make_request
from tests.router.support.running_engines import drive_group
from tests.router.support.stepper import make_shape
from tests.support.virtual_clock import on_virtual_clock

ENDLESS_S = 1e6  # a level of priority that no wait makes up for
LOAD_S = 8.0  # how long the others come
NUM_WAITING = 20
MAX_TOKENS = 10


class Overloaded:
    """One rank with few rows, and more requests than it can run."""

    def __init__(self, rng: random.Random, *, priority_step_s: float, num_blocks: int = 40) -> None:
        self.rng = rng
        shape = make_shape(num_blocks=num_blocks, rows_per_rank=4)
        self.engines = Engines(Listeners(max_listeners=20_000))
        self.admission = WaitingQueue(
            max_sequences=100, max_tokens=10_000, priority_step_s=priority_step_s
        )
        self.engine = drive_group(
            self.engines, FakeExecutors(shape, rng), self.admission, min_chunk_tokens=8
        )

    def submit(self, name: str, priority: int, timeout_s: float | None = None) -> Request:
        now = asyncio.get_running_loop().time()
        request = make_request(
            [self.rng.randint(1, 49) for _ in range(8)],
            self.engines.listeners.open(),
            MAX_TOKENS,
            request_id=name,
            priority=priority,
            deadline=None if timeout_s is None else now + timeout_s,
        )
        self.engines.submit(request)
        return request

    async def load(self, priority: int) -> None:
        """Keeps some requests waiting, for LOAD_S."""
        for number in itertools.count():
            if asyncio.get_running_loop().time() > LOAD_S:
                return
            if len(self.admission) < NUM_WAITING:
                self.submit(f"load{number}", priority)
            await asyncio.sleep(0.01)

    async def run(self) -> "Overloaded":
        """Returns when the engine runs, which it does until its clock ends."""
        self._running = asyncio.create_task(self.engine.run())
        while self.engines.model is None:
            await asyncio.sleep(0.01)
        return self


@on_virtual_clock
async def queue_time_of_a_low_request(
    seed: int, *, priority_step_s: float, num_blocks: int
) -> float | None:
    """Returns how long one of priority 0 waits among those of priority 2; None if it ran never."""
    rng = random.Random(seed)
    world = await Overloaded(rng, priority_step_s=priority_step_s, num_blocks=num_blocks).run()
    loading = asyncio.create_task(world.load(priority=2))
    await asyncio.sleep(1)
    low = world.submit("low", 0)
    await loading
    [sequence] = low.sequences
    if not sequence.is_ended:
        return None
    assert sequence.error is None
    end_time = sequence.progress.end_time
    assert end_time is not None
    return end_time - low.arrival_time


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [40, 13])  # 13 are too few for all rows: some are preempted
def test_nobody_waits_much_longer_than_their_priority_is_behind(seed: int, num_blocks: int) -> None:
    waited_s = queue_time_of_a_low_request(seed, priority_step_s=1.5, num_blocks=num_blocks)
    assert waited_s is not None
    # Two levels are 3 s. Those who came before them have to end, and then it has to run.
    assert 3 < waited_s < 5


@pytest.mark.parametrize("num_blocks", [40, 13])
def test_the_load_of_these_tests_would_starve_a_request_without_head_starts_that_end(
    num_blocks: int,
) -> None:
    waited_s = queue_time_of_a_low_request(0, priority_step_s=ENDLESS_S, num_blocks=num_blocks)
    assert waited_s is None


@pytest.mark.parametrize("seed", range(3))
@on_virtual_clock
async def test_a_request_whose_time_is_over_in_the_queue_never_runs(seed: int) -> None:
    rng = random.Random(seed)
    world = await Overloaded(rng, priority_step_s=ENDLESS_S).run()
    loading = asyncio.create_task(world.load(priority=2))
    await asyncio.sleep(1)
    waiting = [world.submit(f"late{n}", 0, timeout_s=rng.uniform(0.1, 5)) for n in range(5)]
    await loading
    for request in waiting:
        [sequence] = request.sequences
        assert isinstance(sequence.error, DeadlineExceeded)
        assert sequence.progress.start_time is None
        assert sequence.progress.end_time == request.deadline
        assert not request.has_begun
    assert asyncio.get_running_loop().time() > LOAD_S
    await asyncio.sleep(5)
    assert world.engines.num_live == len(world.admission) == world.admission.num_tokens == 0


@on_virtual_clock
async def test_a_request_whose_time_was_over_when_it_was_read_is_not_taken() -> None:
    world = await Overloaded(random.Random(0), priority_step_s=1.0).run()
    with pytest.raises(DeadlineExceeded, match="had not been taken 0 s after"):
        world.submit("late", 0, timeout_s=0.0)
    assert world.engines.num_live == len(world.admission) == 0
