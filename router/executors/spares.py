"""Spares of an elastic group while it serves: who they are, what they load, and when it grows by them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

import grpc
import structlog

from protos.executor.v1 import executor_pb2 as pb
from protos.serving.v1 import serving_pb2 as serving
from protos.serving.v1.serving_pb2 import SpareStatus
from protos.transport.error_details import error_details
from protos.transport.errors import duration
from router.executors.elastic import (
    Candidate,
    Change,
    ElasticPolicy,
    ElasticSettings,
    Formation,
    SpareState,
)
from router.executors.formation import Member
from router.executors.places import candidate_of, is_elastic, placement_of

log = structlog.stdlib.get_logger(__name__)

REVIEW_S = 1.0  # between looks at who is there
REVIEWS = 4  # at least, in the time for which an executor has to be there
STAGE_RETRY_S = 10.0  # until an executor that could not load is asked again
LEFT = "SHUTTING_DOWN", "UNAVAILABLE", "CANCELLED"  # why Stage fails as its executor ends

Stage = Callable[
    [str, pb.StageRequest], grpc.aio.UnaryStreamCall[pb.StageRequest, pb.StageResponse]
]


class Spares:
    """Executors of a group's that are not in it.

    Args:
        policy: Chooses.
        settings: What the operator said.
        stall_s: Seconds for which a spare may load no byte, beside what the bound on its rate takes.
        describe: Returns those that answer.
        stage: Calls Stage of one, by address.
        release: Has one leave the group that it is in.
        on_grow: Called when the group should form anew, with them.
    """

    def __init__(
        self,
        policy: ElasticPolicy,
        settings: ElasticSettings,
        *,
        stall_s: float,
        describe: Callable[[], Awaitable[Sequence[Member]]],
        stage: Stage,
        release: Callable[[str], Awaitable[None]],
        on_grow: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._period_s = min(REVIEW_S, settings.grow_after_s / REVIEWS)
        self._max_bytes_per_s = settings.stage_bytes_per_s
        self._stall_s = stall_s
        self._describe = describe
        self._stage = stage
        self._release = release
        self._on_grow = on_grow
        self._clock = asyncio.get_running_loop().time
        self._watching: asyncio.Task[None] | None = None
        self._staging: dict[str, asyncio.Task[None]] = {}  # by address; done once Stage has ended
        self._retry_times: dict[str, float] = {}  # by address of those that could not load
        self._is_news = asyncio.Event()
        self._states: dict[str, SpareState] = {}  # by address, of those that answered last

    @property
    def num_staged(self) -> int:
        """Of those that answered last, may be in the group now and would keep nobody waiting."""
        return list(self._states.values()).count(SpareState.STAGED)

    def status(self) -> list[SpareStatus]:
        """Returns what is known of each, as GetStatus sends it; nothing while the group forms."""
        now = self._clock()
        return [
            SpareStatus(
                address=address,
                state=serving.SpareState.Value(f"SPARE_STATE_{state.name}"),
                held_off_duration=duration(self._policy.held_off_until(address, now) - now)
                if state is SpareState.HELD_OFF
                else None,
            )
            for address, state in self._states.items()
            if self._watching is not None
        ]

    def watch(self, members: Collection[str]) -> None:
        """Looks after them until `stop`, in a group of these addresses."""
        self._states = {each: state for each, state in self._states.items() if each not in members}
        self._watching = asyncio.create_task(self._watch(), name="watch spares")

    def note_news(self) -> None:
        """Has them looked at soon: one is there that was not."""
        self._is_news.set()

    def stop(self) -> None:
        """Looks after them no more. What they load is cut off, and what they have loaded stays."""
        for task in (self._watching, *self._staging.values()):
            if task is not None:
                task.cancel()
        self._watching = None
        self._staging.clear()
        self._retry_times.clear()

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("spares_not_watched")
            self._is_news.clear()
            try:
                await asyncio.wait_for(self._is_news.wait(), self._period_s)
            except TimeoutError:
                continue
            await asyncio.sleep(self._period_s / REVIEWS)  # others may come with it

    async def _look(self) -> None:
        members = await self._describe()
        spares = [candidate_of(member) for member in members if is_elastic(member)]
        review = self._policy.review(self._clock(), spares)
        unfit = {each.address: SpareState.UNFIT for each in members if not is_elastic(each)}
        self._note_states({**unfit, **review.states})
        for spare, formation in review.stages:
            address = spare.address
            is_due = self._clock() >= self._retry_times.get(address, 0.0)
            if is_due and not self._is_loading(address):
                self._staging[address] = asyncio.create_task(
                    self._load(spare, formation), name=f"stage {address}"
                )
        joining = {each.address for each, plan in review.stages if plan.change is Change.GROW}
        if review.grows and not any(map(self._is_loading, joining)):  # or callers would wait for it
            self._policy.note_growing(self._clock())
            self._on_grow()

    def _is_loading(self, address: str) -> bool:
        task = self._staging.get(address)
        return task is not None and not task.done()

    def _note_states(self, states: dict[str, SpareState]) -> None:
        for address, state in states.items():
            if self._states.get(address) is not state:
                log.info("spare", executor=address, state=state.value)
        self._states = states

    async def _load(self, spare: Candidate, formation: Formation) -> None:
        """Has a spare load its experts of a formation; if it cannot, it is not asked for a while.

        Unless it has left, or is in a group still, it is held off: the group would wait for it for ever,
        although another one could take the place. What fails while it is held off does not count.
        """
        try:
            total = await self._stage_all(spare, formation)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            reason, problem = "STALLED", "it has loaded nothing for too long"
            if isinstance(error, grpc.aio.AioRpcError):
                reason = error_details(error).reason or error.code().name
                problem = error.details() or ""
            now = self._clock()
            if reason == "NO_ROOM":  # it joined a group that then did not form
                await self._release(spare.address)
            elif reason not in LEFT and self._policy.held_off_until(spare.address, now) <= now:
                self._policy.note_failed(now, spare.address)
            log.warning("spare_not_staged", executor=spare.address, reason=reason, problem=problem)
            self._retry_times[spare.address] = now + STAGE_RETRY_S
        else:
            log.info("spare_staged", executor=spare.address, bytes=total)
            self.note_news()

    async def _stage_all(self, spare: Candidate, formation: Formation) -> int:
        """Has a spare load its experts of a formation. Returns their bytes.

        Raises:
            grpc.aio.AioRpcError: It cannot.
            TimeoutError: It makes no progress.
        """
        request = pb.StageRequest(
            placement=placement_of(formation, spare), max_bytes_per_s=self._max_bytes_per_s
        )
        stall_s = self._stall_s
        if self._max_bytes_per_s:
            stall_s += spare.expert_bytes / self._max_bytes_per_s
        num_bytes = total = 0
        async with asyncio.timeout(stall_s) as stall:
            async for progress in self._stage(spare.address, request):
                total = progress.bytes_total
                if progress.bytes_done > num_bytes:
                    num_bytes = progress.bytes_done
                    stall.reschedule(self._clock() + stall_s)
        return total
