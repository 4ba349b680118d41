"""If these fail, one group's trouble ends the router, and with it every other group."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from protos.executor.v1 import executor_pb2 as pb
from protos.serving.v1 import serving_pb2
from router.engine import engine as engine_module
from router.engine.engine import Engine
from router.engine.engines import Engines
from router.errors import ExecutorFailed, ExecutorGone, ExecutorLost, GroupMismatch
from router.requests.request import Listeners
from router.requests.waiting_queue import PROOF_TOKENS, WaitingQueue
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.prompts.rank_choice import RankLoads
from router.scheduling.scheduler import Scheduler
from router.scheduling.step import GroupInfo, InFlight, StepResult
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.peers import Peers, run_group
from tests.router.support.running_engines import complete, drive_group, stepping, two_groups
from tests.router.support.stepper import make_shape
from tests.support.virtual_clock import on_virtual_clock

NO_FAULTS = {"lied": 0, "unexpected": 0, "stale_kv": 0}


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """What was logged, and not printed: the tracebacks would take most of the time."""
    with capture_logs() as logs:
        yield logs


async def until(condition: Callable[[], bool], period_s: float = 0.001) -> None:
    while not condition():
        await asyncio.sleep(period_s)


def says(path: str, value: Any) -> Callable[[pb.DescribeResponse], None]:
    """Returns what changes one field of a description."""
    *parents, field = path.split(".")

    def change(description: pb.DescribeResponse) -> None:
        target = getattr(description, parents[0]) if parents else description
        if isinstance(value, dict):
            getattr(target, field).update(value)
        else:
            setattr(target, field, value)

    return change


def answers(
    change: Callable[[pb.StepResponse], object],
) -> Callable[[pb.StepResponse], list[pb.StepResponse]]:
    def answer(response: pb.StepResponse) -> list[pb.StepResponse]:
        change(response)
        return [response]

    return answer


def token(token_id: int) -> Callable[[pb.StepResponse], list[pb.StepResponse]]:
    def change(response: pb.StepResponse) -> None:
        column = response.ranks[0].next_token_ids
        response.ranks[0].next_token_ids = token_id.to_bytes(4, "little", signed=True) * (
            len(column) // 4
        )

    return answers(change)


def spare(data: bytes) -> Callable[[pb.StepResponse], list[pb.StepResponse]]:
    def change(response: pb.StepResponse) -> None:
        response.ranks[0].next_token_ids += data

    return answers(change)


DESCRIPTIONS = [
    ("coordinates.dp_size", 1 << 22),
    ("coordinates.attn_tp_size", 0),
    ("num_kv_blocks", 2**31 - 1),
    ("budget.max_num_seqs", 1 << 22),
    ("num_rows", 1 << 22),
    ("model.block_size", 0),
    ("model.vocab_size", 0),
    ("epoch", 2**64 - 1),
    ("agreement", {str(number): "x" * 200 for number in range(1000)}),
]
ANSWERS = [
    ("next_token_ids has -1, where ids are 0 to 49", token(-1)),
    ("next_token_ids has 50000", token(50_000)),
    ("next_token_ids has 2147483647", token(2**31 - 1)),
    ("bytes of next_token_ids", spare(b"abc")),
    ("bytes of next_token_ids", spare(b"four")),
    ("answered a step with 16", spare(bytes(16_000))),
    ("answered step 8 of epoch 1 where", answers(lambda answer: setattr(answer, "step_id", 8))),
    ("forward_ns=1844", answers(lambda answer: setattr(answer, "forward_ns", 2**64 - 1))),
    (" answered ", lambda answer: [answer] * 3),
    ("is no StepResponse", None),
]


@asynccontextmanager
async def beside_liars() -> AsyncIterator[tuple[Engines, list[Engine], Peers]]:
    """Engines of a group of two, which a test makes a liar of, and of an honest group."""
    async with AsyncExitStack() as stack:
        liars, peers = await stack.enter_async_context(run_group(2))
        honest, _ = await stack.enter_async_context(run_group(1))
        engines, by_group = await stack.enter_async_context(two_groups(liars, honest))
        yield engines, by_group, peers


def is_named(engine: Engine, problem: str) -> bool:
    told: str = engine.status().problem
    return "(dp_rank 1, attn_tp_rank 0)" in told and problem in told


@pytest.mark.parametrize(("path", "value"), DESCRIPTIONS)
async def test_a_description_that_cannot_be_costs_its_group_until_the_executor_restarts(
    path: str, value: Any, logs: list[Any]
) -> None:
    async with run_group(2) as (group, peers), two_groups(group) as (_, [engine]):
        await until(lambda: engine.is_ready)
        liar = peers[1, 0]
        liar.describes = says(path, value)
        liar.die()
        await until(lambda: is_named(engine, path))
        liar.describes = says("num_rows", 8)  # honest now, but the same process
        num_described = len(liar.prepared)
        await asyncio.sleep(0.05)
        assert is_named(engine, path)
        assert len(liar.prepared) == num_described
        [lie] = [record for record in logs if record["event"] == "executor_lied"]
        assert path in lie["problem"]
        assert engine.measures.totals().faults == NO_FAULTS | {"lied": 1}
        liar.dies.clear()
        liar.instance_id = "second"
        await until(lambda: engine.is_ready)


@pytest.mark.parametrize(("problem", "answer"), ANSWERS)
async def test_an_answer_that_cannot_be_costs_its_group_and_no_request(
    problem: str, answer: Callable[[pb.StepResponse], list[pb.StepResponse]] | None
) -> None:
    async with beside_liars() as (engines, (lied_to, honest), peers):
        await until(lambda: lied_to.is_ready and honest.is_ready)
        if answer is None:
            peers[1, 0].garbled = {"Step"}
        else:
            peers[1, 0].answers = answer
        requests = [complete(engines, str(n), [1, 2, 3, 4, 5], 6) for n in range(4)]
        for request in await asyncio.gather(*requests):
            assert request.sequences[0].error is None
            assert request.sequences[0].num_output_tokens == 6
        await until(lambda: is_named(lied_to, problem))
        assert lied_to.measures.totals().faults == NO_FAULTS | {"lied": 1}
        assert honest.measures.totals().losses == {"lost": 0, "left": 0}

        peers[1, 0].answers, peers[1, 0].garbled = lambda response: [response], ()
        peers[1, 0].instance_id = "second"
        await until(lambda: lied_to.is_ready)


# ---- when executors are looked for


class Absent(FakeExecutors):
    """Executors that take a while to come back; says when they were asked."""

    def __init__(self) -> None:
        super().__init__(make_shape(), random.Random(1))
        self.asked: list[float] = []

    async def form(self) -> GroupInfo:
        self.asked.append(asyncio.get_running_loop().time())
        return await super().form()


@on_virtual_clock
async def test_a_lost_group_is_looked_for_the_more_often_the_shorter_it_has_been_down():
    executors = Absent()
    loop = asyncio.get_running_loop()
    async with two_groups(executors, retry_delay_s=0.5) as (engines, [engine]):
        await until(lambda: engine.is_ready)
        await complete(engines, "r0", [1, 2, 3], 4)
        executors.asked.clear()
        lost = loop.time()
        executors.kill(down_s=20.0)
        await until(lambda: executors.num_epochs == 2)
        waits = [after - before for before, after in itertools.pairwise(executors.asked)]

    assert executors.asked[0] - lost == pytest.approx(0.5, abs=0.001)
    assert waits[0] == pytest.approx(0.05, abs=0.001)
    assert waits == pytest.approx(sorted(waits))
    assert waits[-1] == pytest.approx(0.5, abs=0.001)
    found = next(asked for asked in executors.asked if asked >= lost + 1.1)
    assert found - lost < 1.1 * 1.12, "what looking for it later adds is a tenth"


class Asked(Absent):
    """The same, lost in a way that the test says; and which may or may not try suspects."""

    may_try = True

    def may_try_suspects(self) -> bool:
        return self.may_try


@on_virtual_clock
async def test_a_group_whose_executor_is_gone_forms_anew_at_once_if_it_had_stepped():
    executors = Asked()
    async with two_groups(executors, retry_delay_s=0.5) as (engines, [engine]):
        await until(lambda: engine.is_ready)
        for has_stepped in (False, True):
            if has_stepped:
                await complete(engines, "r0", [1, 2, 3], 4)
            executors.asked.clear()
            lost = asyncio.get_running_loop().time()
            executors.kill(down_s=0.0, error=ExecutorGone("its process is"))
            await until(lambda: bool(executors.asked))
            waited_s = executors.asked[0] - lost
            assert waited_s == pytest.approx(0.0 if has_stepped else 0.5, abs=0.001)
            await until(lambda: engine.is_ready)


@on_virtual_clock
async def test_a_group_that_grows_does_so_between_two_steps_and_nobody_is_suspected():
    executors = Asked()
    async with two_groups(executors) as (engines, [engine]):
        await until(lambda: engine.is_ready)
        epoch = executors.num_epochs
        completion = asyncio.ensure_future(complete(engines, "r0", [1, 2, 3], 12))
        await until(lambda: engine.status().step > 3)
        executors.end_at_border()
        await until(lambda: executors.num_epochs > epoch)
        await completion
        losses = engine.measures.totals().losses
        assert losses == {"lost": 0, "left": 1}
        epoch = executors.num_epochs
        executors.end_at_border()
        await until(lambda: executors.num_epochs > epoch)


@on_virtual_clock
async def test_what_a_group_ran_takes_no_room_from_new_requests_while_it_grows():
    executors, engines = Asked(), Engines(Listeners(max_listeners=50))
    engine = drive_group(engines, executors, WaitingQueue(max_sequences=2, max_tokens=1000))
    async with stepping(engine):
        answers = []
        for number in range(4):
            answers.append(asyncio.create_task(complete(engines, str(number), [1, 2, 3], 40)))
            await until(lambda: engine.num_running == len(answers))
        executors.end_at_border()
        await until(lambda: not engine.is_ready)
        answers += [asyncio.create_task(complete(engines, name, [1, 2, 3], 4)) for name in "ab"]
        for request in await asyncio.gather(*answers):
            assert request.sequences[0].error is None


@on_virtual_clock
async def test_suspects_that_had_to_wait_while_others_ran_are_tried_alone_in_an_epoch_of_their_own():
    executors = Asked()
    async with two_groups(executors, retry_delay_s=0.01) as (engines, [engine]):

        def begin(name: str) -> asyncio.Future[Any]:
            return asyncio.ensure_future(complete(engines, name, [1, 2, 3], 40))

        await until(lambda: engine.is_ready)
        answers = [begin("suspect"), begin("bystander")]
        for _ in range(2):
            await until(lambda: engine.num_running == 2)
            executors.may_try = False
            executors.kill(down_s=0.0)
            await until(lambda: not engine.is_ready)
        answers.append(begin("other"))
        num_plans = len(executors.plans)
        await until(lambda: len(executors.plans) > num_plans + 5)
        assert engine.waiting.holds_suspects
        num_plans, executors.may_try = len(executors.plans), True
        async with asyncio.timeout(60):
            await until(lambda: engine.measures.totals().losses["left"] == 1)
        assert len(executors.plans) == num_plans, "none is planned any more"
        await asyncio.gather(*answers)
        num_rows = [int(plan.runs.sum()) for plan in executors.plans[num_plans:]]
        assert num_rows[:PROOF_TOKENS] == [1] * PROOF_TOKENS
        assert max(num_rows) == 3
        assert engine.measures.totals().losses == {"lost": 2, "left": 1}


@on_virtual_clock
async def test_a_group_that_only_holds_suspects_back_serves():
    """It would run any other request at once, so load balancers must not leave it out."""
    executors, engines = Asked(), Engines(Listeners(max_listeners=50))
    waiting = WaitingQueue(max_sequences=50, max_tokens=1000)
    engine = drive_group(engines, executors, waiting, step_timeout_s=5.0)
    async with stepping(engine):
        suspect = asyncio.ensure_future(complete(engines, "suspect", [1, 2, 3], 40))
        other = asyncio.ensure_future(complete(engines, "other", [1, 2, 3], 40))
        for _ in range(2):
            await until(lambda: engine.num_running == 2)
            executors.may_try = False
            executors.kill(down_s=0.0)
            await until(lambda: not engine.is_ready)
        await until(lambda: engine.is_ready)
        changes: list[bool] = []
        engines.watch_readiness(changes.append)
        await asyncio.sleep(20.0)
        assert engine.waiting.holds_suspects
        assert changes == [True]
        executors.may_try = True
        await asyncio.gather(suspect, other)


# ---- what nobody expected


class Failing(FakeExecutors):
    """Executors of which a call fails so many times, in a way that nothing is planned for.

    Attributes:
        call: Which one; "commit": the engine cannot take what `receive` returned.
        num_times: How often, altogether.
        times: When it failed.
        form_times: When `form` was called.
    """

    def __init__(self, call: str, num_times: int = 1, error: Exception | None = None) -> None:
        super().__init__(make_shape(), random.Random(0), step_s=0.001)
        self.call, self.num_times = call, num_times
        self.times: list[float] = []
        self.form_times: list[float] = []
        self._error = error or ValueError("nobody thought of this")

    def is_due(self, call: str) -> bool:
        if call != self.call or len(self.times) == self.num_times:
            return False
        self.times.append(asyncio.get_running_loop().time())
        return True

    def fail_at(self, call: str) -> None:
        if self.is_due(call):
            raise self._error

    async def form(self) -> GroupInfo:
        self.form_times.append(asyncio.get_running_loop().time())
        self.fail_at("form")
        return await super().form()

    def send(self, step: InFlight) -> None:
        self.fail_at("send")
        super().send(step)

    async def receive(self, step: InFlight) -> StepResult:
        self.fail_at("receive")
        result = await super().receive(step)
        return result * 2 if self.is_due("commit") else result  # of ranks that are not there


@on_virtual_clock
async def test_a_group_that_cannot_form_before_somebody_acts_is_an_error_and_its_state(
    logs: list[Any],
) -> None:
    mismatch = GroupMismatch("10.0.0.1:1 has block_size=16, 10.0.0.2:1 has block_size=32")
    group = Failing("form", num_times=3, error=mismatch)
    async with two_groups(group) as (_, [engine]):
        await until(lambda: len(group.times) == 2)
        assert engine.status().state == serving_pb2.GROUP_STATE_MISMATCHED
        assert engine.status().problem == str(mismatch)
        await until(lambda: engine.is_ready)
        assert engine.status().state == serving_pb2.GROUP_STATE_READY
    [record] = [record for record in logs if record["event"] == "group_not_formed"]
    assert (record["log_level"], record["problem"]) == ("error", str(mismatch))


@pytest.mark.parametrize("error", [MemoryError(), ZeroDivisionError("division by zero")])
@pytest.mark.parametrize("call", ["form", "send", "receive", "commit"])
@on_virtual_clock
async def test_an_error_that_nobody_expected_costs_its_group_and_no_request(
    call: str, error: Exception, logs: list[Any]
) -> None:
    failing = Failing(call, error=error)
    honest = FakeExecutors(make_shape(), random.Random(0), step_s=0.001)
    async with two_groups(failing, honest) as (engines, by_group):
        await until(lambda: by_group[1].is_ready)
        requests = [complete(engines, str(n), [1, 2, 3, 4, 5], 6) for n in range(6)]
        for request in await asyncio.gather(*requests):
            assert request.sequences[0].error is None
        await until(lambda: bool(failing.times) and by_group[0].is_ready)
    assert by_group[0].measures.totals().faults == NO_FAULTS | {"unexpected": 1}
    assert by_group[1].measures.totals().losses == {"lost": 0, "left": 0}
    [record] = [record for record in logs if record["event"] == "group_failed"]
    assert (record["group"], record["log_level"]) == (0, "error")
    assert record["exc_info"]


@pytest.mark.parametrize(("owner", "call"), [(PrefixCache, "use"), (RankLoads, "pick")])
@on_virtual_clock
async def test_an_error_while_sequences_are_bound_loses_none_of_them(
    owner: type, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the one that is taken out, nor those that are aside as they wait for their first."""
    results = itertools.chain([None, MemoryError()], itertools.repeat(None))
    calls, bind = Mock(side_effect=results), getattr(owner, call)
    monkeypatch.setattr(owner, call, lambda *args, **fields: calls() or bind(*args, **fields))
    async with two_groups(FakeExecutors(make_shape(), random.Random(0))) as (engines, [engine]):
        await until(lambda: engine.is_ready)
        requests = [complete(engines, str(number), [1, 2, 3, 4, 5], 6, n=3) for number in range(3)]
        async with asyncio.timeout(60):
            for request in await asyncio.gather(*requests):
                assert not any(sequence.error for sequence in request.sequences)
    assert engine.measures.totals().faults == NO_FAULTS | {"unexpected": 1}


@on_virtual_clock
async def test_a_group_that_fails_to_form_again_and_again_is_tried_ever_less_often() -> None:
    failing = Failing("form", num_times=15)
    async with two_groups(failing) as (engines, [engine]):
        await until(lambda: len(failing.times) == 1)
        assert "ValueError: nobody thought of this" in engine.status().problem
        assert engine.status().state == serving_pb2.GROUP_STATE_FORMING
        await until(lambda: engine.is_ready, 1.0)
        assert (await complete(engines, "a", [1, 2, 3], 4)).sequences[0].error is None
    waits = [after - before for before, after in itertools.pairwise(failing.times)]
    assert waits == pytest.approx([0.01 * 2**n for n in range(11)] + [15.0] * 3)
    assert engine.measures.totals().faults["unexpected"] == 15


@on_virtual_clock
async def test_a_group_that_stepped_before_it_failed_is_tried_again_soon() -> None:
    failing = Failing("receive", num_times=0)
    async with two_groups(failing) as (engines, [engine]):
        for name in range(4):
            await until(lambda: engine.is_ready)
            asking = asyncio.create_task(complete(engines, str(name), [1, 2, 3], 20))
            await until(lambda: engine.status().step > 2)
            failing.num_times += 1
            assert (await asking).sequences[0].error is None
    assert len(failing.times) == 4
    for failed in failing.times:
        again = min(formed for formed in failing.form_times if formed > failed)
        assert again - failed == pytest.approx(0.01)


@pytest.mark.parametrize("error", [None, ExecutorLost("the connection broke")])
@pytest.mark.parametrize(("owner", "call"), [(Scheduler, "abandon"), (engine_module, "note_loss")])
@on_virtual_clock
async def test_requests_that_a_failed_router_cannot_keep_fail_and_do_not_hang(
    owner: Any, call: str, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("its rows are in no known state")

    failing = Failing("receive", num_times=0, error=error)
    async with two_groups(failing) as (engines, [engine]):
        await until(lambda: engine.is_ready)
        with monkeypatch.context() as broken:
            broken.setattr(owner, call, fail)
            asking = asyncio.create_task(complete(engines, "a", [1, 2, 3], 20))
            await until(lambda: engine.status().step > 2)
            failing.num_times = 1
            assert isinstance((await asking).sequences[0].error, ExecutorFailed)
        await until(lambda: engine.is_ready)
        assert (await complete(engines, "b", [1, 2, 3], 4)).sequences[0].error is None
        assert all(flow.is_idle for _, flow in engine.waiting.line)
        assert [cache.pool.num_used for cache in engine._caches.by_rank] == [0]
    assert engine.measures.totals().faults["unexpected"] == 1 + (error is None)


class Down:
    """An engine whose group is down, of which nothing waits.

    Attributes:
        looks: When somebody asked for what waits.
    """

    is_ready = is_standby = is_serving = False
    until_overdue_s = 1e9
    model = None

    def __init__(self) -> None:
        self.looks: list[float] = []
        self.lost_time = asyncio.get_running_loop().time()
        self.on_change = lambda: None

    def waiting_requests(self) -> list[Any]:
        self.looks.append(asyncio.get_running_loop().time())
        return []


@on_virtual_clock
async def test_however_often_groups_change_one_timer_waits_for_the_failover() -> None:
    """Each change of a group that fails again and again would else leave one more."""
    engines, down, other = Engines(Listeners(1), failover_after_s=10), Down(), Down()
    engines.drive([down, other])  # type: ignore[list-item]
    for _ in range(5):
        await asyncio.sleep(1)
        down.on_change()
    assert down.looks == [1, 2, 3, 4, 5]
    await asyncio.sleep(60)
    assert down.looks[5:] == [10]
    other.lost_time = down.lost_time = 65  # both served in between
    for engine in (down, other):
        engine.on_change()
    down.is_ready = other.is_ready = True
    down.on_change()
    down.looks.clear()
    await asyncio.sleep(60)
    assert down.looks == [], "nothing is down"
