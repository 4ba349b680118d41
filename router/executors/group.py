"""Executor group: how its executors come into an epoch, and how a step goes to all of them."""

import asyncio
import secrets
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import grpc
import structlog
from google.protobuf.message import DecodeError

from protos.executor.epochs import MAX_EPOCH_LEAP
from protos.executor.grammars import MAX_PROBLEM_BYTES
from protos.executor.lease import is_held
from protos.executor.v1 import executor_pb2 as pb
from protos.serving.v1 import serving_pb2 as serving
from protos.serving.v1.serving_pb2 import ElasticStatus, MemberStatus
from protos.settings import Rule, above, setting
from protos.transport.channel import ChannelOpener
from protos.transport.error_details import error_details
from protos.transport.errors import duration
from router.errors import (
    ExecutorGone,
    ExecutorLeft,
    ExecutorLied,
    ExecutorLost,
    ExecutorUnfit,
    GroupGrows,
    GroupHeld,
    GroupMismatch,
    MemberNotJoined,
    ReasonUnknown,
    ResolverFailed,
)
from router.executors.attendance import Attendance, new_router_id
from router.executors.connections import (
    MAX_ANSWER_BYTES,
    SILENT_CODES,
    Connections,
    all_of,
    answer_of,
    held_by,
)
from router.executors.description_bounds import MAX_INSTANCE_ID_LEN, problem_of
from router.executors.discovery import FindAddresses, Lookup
from router.executors.elastic import (
    Change,
    ElasticPolicy,
    ElasticSettings,
    Formation,
    Strength,
)
from router.executors.formation import Member, check_group, describe_group
from router.executors.places import (
    as_formed,
    candidate_of,
    is_elastic,
    placed,
    places_crc32_of,
    require_elastic,
)
from router.executors.spares import Spares
from router.executors.step_codec import (
    WrongAnswer,
    decode_step,
    difference,
    encode_step,
    ran_as_sent,
)
from router.executors.step_stream import DeadlineSettings, StepDeadline, StepStream
from router.executors.suspicion import MIN_SILENT_AFTER_MS, MemberState, Silence, Suspicion
from router.scheduling.step import GroupInfo, InFlight, ServedModel, StepResult

log = structlog.stdlib.get_logger(__name__)

LOOKUP_TIMEOUT_S = 0.2  # of names, where executors are known already
DESCRIBE_TIMEOUT_S = 5.0
SILENT_TIMEOUT_S = 0.15  # of one that has fallen silent: its beats say when it is back
SECRET_BYTES = 32  # with which an epoch's members know one another
PROBE_TIMEOUT_S = 1.0  # for Describe, of executors that owe an answer to a step, or a reason

# An executor that is further ahead of all others, and of the epochs that this router has counted,
# than anything but its own word can explain.
MAX_EPOCH_LEAD = 256 * MAX_EPOCH_LEAP

SPARE_BYTES = 256  # of an answer, for what is beside its columns


@dataclass(frozen=True, kw_only=True)
class GroupSettings(DeadlineSettings, ElasticSettings):
    """Settings of a group's executors."""

    model_name: str = "default"
    """Name that clients may give the model in a request."""
    form_timeout_s: float = setting(120.0, above(0))
    """Seconds for each call that forms a group; a spare that loads no byte for so long is held off."""
    silent_after_ms: int = setting(
        450,
        Rule(
            f"0, or at least {MIN_SILENT_AFTER_MS}, since executors beat every 100 ms",
            lambda ms: ms == 0 or ms >= MIN_SILENT_AFTER_MS,
        ),
    )
    """Milliseconds without a beat or an answer after which an executor is suspect, unless its gaps of the last
    minute say more; it is lost when another one waits for it, or 200 ms later. 0 goes without beats: by
    pings and the deadlines of steps."""


class ExecutorGroup:
    """Drives the executors of one group. Implements engine.Executors.

    Args:
        find_addresses: Returns "host:port" of every executor of the group, in any order; asked at
            each forming.
        settings: What the operator said.
        opener: Opens channels; None is plain text, and no token.
        strength: How many executors are in it; None: it is not elastic, and all of them are.
        router_id: Of this router, which keeps others out once it has taken the executors; None: one of its
            own.

    Attributes:
        deadline: Says how long a step may take, from its sending or the answer before it.
        is_driver: Whether it drives them: from before it takes them until they are another router's.
        held_model: What another router that drove them served.
    """

    def __init__(
        self,
        find_addresses: FindAddresses,
        settings: GroupSettings,
        opener: ChannelOpener | None = None,
        strength: Strength | None = None,
        router_id: bytes | None = None,
    ) -> None:
        self._settings = settings
        self.deadline = StepDeadline(settings)
        self._lookup = Lookup(find_addresses)
        self._epoch = 0
        self._last_step_id = 0
        self._last_answer_time = 0.0
        self._members: list[Member] = []  # by DP rank and attention-TP rank
        self._num_peers = 1  # executors of a DP rank
        self._vocab_size = 0
        self._has_scored = False  # in this epoch, which makes answers long
        self._instances: dict[Hashable, str] = {}  # by coordinates; by address where these change
        self._kv_ids: dict[str, str] = {}  # by address, of the last epoch that was formed
        # Its members, by address: who need not describe themselves.
        self._known: dict[str, Member] = {}
        self._left_out: dict[str, tuple[str, str]] = {}  # by address: instance, and what it said
        self._streams: list[StepStream] = []
        self._driven: Collection[str] = ()  # addresses of those that they are to
        self._asking: asyncio.Task[None] | None = None  # why this epoch is over
        self._loss: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._suspicion = Suspicion(settings.silent_after_ms / 1000)
        self._router_id = router_id or new_router_id()
        self.is_driver = False
        self.held_model: ServedModel | None = None
        self._attendance = Attendance(
            self._suspicion,
            router_id=self._router_id,
            is_driver=lambda: self.is_driver,
            answers=self._answer_times,
            epoch=lambda address: self._epoch if address in self._driven else 0,
            on_tick=self._judge,
            on_news=self._note_news,
        )
        self._has_beats = settings.silent_after_ms > 0
        self._connections = Connections(
            opener or ChannelOpener(), self._attendance, has_beats=self._has_beats
        )
        self._is_news = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._taking_part: set[str] = set()  # addresses of the epoch, or of its forming
        self._border: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes = Counter[str]()
        self._policy, self._spares = None, None
        if strength is not None:
            self._policy = ElasticPolicy(strength, settings, self._clock())
            self._spares = Spares(
                self._policy,
                settings,
                stall_s=settings.form_timeout_s,
                describe=self._describe_spares,
                stage=lambda address, request: self._connections.stubs[address].Stage(request),
                release=self._release,
                on_grow=self._end_at_border,
            )

    async def form(self) -> GroupInfo:
        """Brings all executors into a new epoch. See engine.Executors."""
        self._leave_epoch()
        self._is_news.clear()
        forming = asyncio.ensure_future(self._form())
        try:
            await asyncio.wait((forming, self._loss), return_when=asyncio.FIRST_COMPLETED)
            if not forming.done():  # an executor has fallen silent
                self._loss.result()
            return forming.result()
        except BaseException as error:
            self._known.clear()
            if isinstance(error, GroupHeld):
                self.is_driver = False
            raise
        finally:
            forming.cancel()
            await asyncio.wait((forming,))

    async def _form(self) -> GroupInfo:
        addresses = await self._candidates()
        self._taking_part = set(addresses)
        for address in self._left_out.keys() - set(addresses):
            del self._left_out[address]
        await self._connections.renew(addresses)
        try:
            members = await self._describe_all()
        except ExecutorLost as error:
            if self._attendance.held:  # what it lacks is its driver's to wait for
                raise GroupHeld(f"another router drives its executors; {error}") from error
            raise
        await self._connections.renew(addresses)  # to those that have turned out to have no beats
        self._check_held(members)
        if self._policy is None:
            return await self._bring_together(members)
        candidates = [candidate_of(member) for member in members if is_elastic(member)]
        try:
            formation = self._policy.choose(self._clock(), candidates)
        except ExecutorLost:
            require_elastic(members)
            raise
        try:
            info = await self._bring_together(placed(formation, members))
        except (
            GroupHeld,
            ExecutorLeft,
            ExecutorUnfit,
        ):  # nobody's fault, or one's that is held off
            raise
        except ExecutorLost as error:
            failed = error.address if isinstance(error, MemberNotJoined) else ""
            for address in self._policy.note_not_formed(self._clock(), formation, failed):
                self._tell_held_off(address, error)
            raise
        self._note_formed(formation)
        return info

    async def _bring_together(self, members: list[Member]) -> GroupInfo:
        """Has these executors, in the order of ranks, join an epoch, and opens the streams to them."""
        self._taking_part = {member.address for member in members}
        check_group(members)
        self._recognise(members)
        self._check_lead(members)
        self.is_driver = True
        self._epoch = 1 + max(self._epoch, *(member.description.epoch for member in members))
        max_len = 0 if self._policy is None else self._policy.max_len
        info = describe_group(members, self._epoch, self._settings.model_name, max_len)
        await all_of([self._bring_up(member) for member in members])
        self._kv_ids = await self._join(members, info.model.max_model_len)
        self._members = members
        self._known = {
            member.address: as_formed(member, self._epoch, self._router_id) for member in members
        }
        self._num_peers = len(members) // info.shape.dp_size
        self._vocab_size = info.model.vocab_size
        speculation = info.shape.speculation
        max_gain = 1 if speculation is None else speculation.max_gain
        row_bytes = 4 * (1 + max_gain) + 2 * MAX_PROBLEM_BYTES * info.model.supports_constraints
        max_answer_bytes = SPARE_BYTES + info.shape.rows_per_rank * row_bytes
        self._streams = [
            StepStream(
                str(member),
                self._connections.channels[member.address],
                self._loss,
                partial(self._attendance.note_late_answer, member.address),
                partial(self._on_stream_end, self._loss, member),
                max_answer_bytes,
            )
            for member in members
        ]
        self._driven = {member.address for member in members}
        self._lookup.forget()  # by the next loss, what it finds now may be no longer so
        return replace(info, kv_ids=_kv_ids_of_ranks(members, self._kv_ids))

    def _tell_held_off(self, address: str, problem: ExecutorLost) -> None:
        """Logs that an executor takes no place for a while, if the group can do without it."""
        assert self._policy is not None
        now = self._clock()
        seconds = round(self._policy.held_off_until(address, now) - now, 3)
        log.warning("executor_held_off", executor=address, seconds=seconds, problem=str(problem))

    def _note_formed(self, formation: Formation) -> None:
        """Notes what has become of an elastic group, and looks after its spares from here on."""
        assert self._policy is not None
        assert self._spares is not None
        self._policy.note_formed(self._clock(), formation)
        self._changes[formation.change] += 1
        log.info(
            "group_placed",
            change=formation.change.value,
            executors=[member.address for member in formation.members],
            loads=[formation.missing(member) for member in formation.members],
        )
        if formation.change is not Change.REJOIN:
            self.deadline.forget()
        self._spares.watch({member.address for member in formation.members})

    def send(self, step: InFlight) -> None:
        """Sends each DP rank its part; attention-TP peers get the same."""
        step.step_id = self._last_step_id = self._last_step_id + 1
        step.requests, step.agreement_crc32 = encode_step(step.plan, self._epoch, step.step_id)
        if not self._has_scored and step.plan.scorings:
            self._has_scored = True
            for stream in self._streams:
                stream.max_answer_bytes = MAX_ANSWER_BYTES
        for index, stream in enumerate(self._streams):
            stream.send(step.requests[index // self._num_peers])
        step.sent = perf_counter()
        self._attendance.note_step()

    async def receive(self, step: InFlight) -> StepResult:
        """Returns the result of the earliest step that has not come back."""
        try:
            return await self._receive(step)
        except ExecutorLost as error:
            _lose(self._loss, error)
            self._end_streams()
            raise

    async def _receive(self, step: InFlight) -> StepResult:
        agreement = step.plan.agreement
        begun = max(step.sent, self._last_answer_time)
        responses = await self._responses(step.step_id, begun, self.deadline.limit_s(agreement))
        self._last_answer_time = perf_counter()
        self.deadline.add(agreement, self._last_answer_time - begun)
        self._check_answers(responses, step)
        try:
            return decode_step(responses[:: self._num_peers], step.plan, self._vocab_size)
        except WrongAnswer as error:
            member = self._members[error.rank * self._num_peers]
            raise self._leave_out(
                member, f"answered step {step.step_id} wrongly: {error}"
            ) from error

    def _check_answers(self, responses: Sequence[pb.StepResponse], step: InFlight) -> None:
        """Checks that all ran the agreement that was sent, and attention-TP peers the same part.

        Raises:
            ExecutorLost: Some have not; says who ran what.
        """
        answers = list(zip(self._members, responses, strict=True))
        for member, response in answers:
            if response.step_id != step.step_id or response.epoch != self._epoch:
                raise self._leave_out(
                    member,
                    f"answered step {response.step_id} of epoch {response.epoch} where step "
                    f"{step.step_id} of epoch {self._epoch} was due",
                )
        if not ran_as_sent(responses, self._num_peers, step.agreement_crc32):
            problem = "; ".join(
                f"{member} ran {what}"
                for member, response in answers
                if (what := difference(response, step.requests[member.dp_rank]))
            )
            raise ExecutorLost(f"step {step.step_id} was not run as it was sent: {problem}")

    async def _responses(self, step_id: int, begun: float, limit_s: float) -> list[pb.StepResponse]:
        """Returns every member's next answer.

        Raises:
            ExecutorLost: A stream ended, or an answer is overdue; says whose.
        """
        responses: list[pb.StepResponse] = []
        try:
            async with asyncio.timeout(begun + limit_s - perf_counter()):
                for stream in self._streams:
                    responses.append(await stream.receive())
        except TimeoutError:
            if self._asking is not None:  # the streams have ended, and the loss will say why
                await self.lost()
            late = self._members[len(responses) :]
            silent = await self._silent(late)
            # Whose answer came meanwhile was not the one: it was this process that stood still.
            rest = list(zip(late, self._streams[len(responses) :], strict=True))
            late = [member for member, stream in rest if not stream.has_answer]
            if late:
                raise ExecutorLost(_describe_late(late, silent, step_id, limit_s)) from None
            responses += [await stream.receive() for _, stream in rest]
        return responses

    async def _silent(self, members: Sequence[Member]) -> list[Member]:
        """Returns the members that answer no call. The others may only wait for them."""
        answers = zip(members, await self._probe(members), strict=True)
        return [member for member, error in answers if error and error.code() in SILENT_CODES]

    async def _probe(self, members: Sequence[Member]) -> list[grpc.aio.AioRpcError | None]:
        """Returns how a call to each fails that is answered at once; None: it is answered."""

        async def error_of(member: Member) -> grpc.aio.AioRpcError | None:
            try:
                await self._connections.describe(member.address, PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error
            return None

        return await asyncio.gather(*map(error_of, members))

    async def lost(self) -> None:
        """Returns never; raises ExecutorLost as soon as a stream ends, or the epoch shall and may."""
        ends = [self._loss]
        if all(stream.is_idle for stream in self._streams):
            ends.append(self._border)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        next(end for end in ends if end.done()).result()

    @property
    def wants_border(self) -> bool:
        """Whether the epoch shall end. See engine.Executors."""
        return self._border.done()

    def _end_at_border(self) -> None:
        """Ends the epoch once no step runs."""
        if not self._border.done():
            self._border.set_exception(GroupGrows("executors that it lacked are there: it grows"))
            self._border.exception()  # seen: the engine may learn of it at the next step only

    def may_try_suspects(self) -> bool:
        """Whether the group can do without one more executor. See engine.Executors."""
        if self._policy is None or self._spares is None:
            return True
        return self._policy.may_try_suspects(self._clock(), self._spares.num_staged)

    async def news(self) -> None:
        """Returns when there is news since `form` was called. See engine.Executors."""
        await self._is_news.wait()

    def _note_news(self) -> None:
        self._is_news.set()
        if self._spares is not None:
            self._spares.note_news()

    @property
    def suspicions(self) -> Counter[str]:
        """Executors that fell silent, by what came of it. See engine.Executors."""
        return self._suspicion.outcomes

    def elastic(self) -> ElasticStatus | None:
        """Returns what an elastic group could become. See engine.Executors."""
        if self._policy is None or self._spares is None:
            return None
        target, least = self._policy.sizes
        return ElasticStatus(
            target_dp_size=target,
            min_dp_size=least,
            spares=self._spares.status(),
            changes=self._changes,
        )

    @property
    def num_standbys(self) -> int:
        """Routers that every executor sees standing by. See engine.Executors."""
        told = self._attendance.num_standbys
        return min((told.get(member.address, 0) for member in self._members), default=0)

    def members(self) -> list[MemberStatus]:
        """Returns what beats tell of each executor. See engine.Executors."""
        self._attendance.note_answers()
        now = asyncio.get_running_loop().time()
        return [self._status_of(member, now) for member in self._members]

    def _status_of(self, member: Member, now: float) -> MemberStatus:
        name = self._suspicion.state(member.address).name
        status = MemberStatus(
            dp_rank=member.dp_rank,
            attn_tp_rank=member.attn_tp_rank,
            address=member.address,
            state=serving.MemberState.Value(f"MEMBER_STATE_{name}"),
            instance_id=_instance_of(member),
        )
        last = self._suspicion.last_beat(member.address)
        if last is not None:
            time, beat = last
            status.last_beat_age.CopyFrom(duration(now - time))
            status.beat_late_duration.CopyFrom(duration(beat.late_s))
        return status

    async def close(self) -> None:
        """Ends every stream and connection."""
        self.is_driver = False
        self._leave_epoch()
        self._lookup.forget()
        self._attendance.close()
        await self._connections.close()

    def _judge(self, now: float) -> None:
        """Ends the epoch, or the forming, if an executor has fallen silent."""
        is_idle = bool(self._streams) and all(stream.is_idle for stream in self._streams)
        for silence in self._suspicion.judge(now, self._epoch, is_idle=is_idle):
            problem = _describe_silence(silence, self._name)
            log.warning("executor_silent", problem=problem)
            if silence.name in self._taking_part:
                self._end_streams()
                _lose(self._loss, ExecutorGone(problem))

    def _answer_times(self) -> list[tuple[str, float]]:
        """Returns when each member last answered in this epoch, by address."""
        streams = zip(self._members, self._streams, strict=False)
        return [(member.address, stream.answer_time) for member, stream in streams]

    def _name(self, address: str) -> str:
        known = [str(member) for member in self._members if member.address == address]
        return known[0] if known else f"executor {address}"

    def _on_stream_end(
        self, loss: asyncio.Future[None], member: Member, error: ExecutorLost
    ) -> None:
        """Ends the epoch: every other executor's part in it at once, and then the epoch itself.

        Args:
            loss: Of the epoch that the stream was of.
            member: Whose stream it was.
            error: Why it ended, as far as that is known.
        """
        self._end_streams()  # or the others would wait in a collective for the one that left
        self._known.pop(member.address, None)
        if isinstance(error, GroupHeld):
            self.is_driver = False
        if isinstance(error, ExecutorLied):
            error = self._leave_out(member, str(error))
        if isinstance(error, ExecutorLeft):
            self._note_left(member)
        if isinstance(error, ReasonUnknown):
            self._asking = asyncio.create_task(self._ask_why(loss, error))
        else:
            _lose(loss, error)

    async def _ask_why(self, loss: asyncio.Future[None], error: ExecutorLost) -> None:
        """Ends the epoch with what the executors say of themselves, or else with ``error``.

        One that was told to stop says so; one that died or hangs does not answer.
        """
        gone = []
        try:
            for member, answer in zip(self._members, await self._probe(self._members), strict=True):
                reason = "" if answer is None else error_details(answer).reason
                if answer is not None and reason == "SHUTTING_DOWN":
                    self._note_left(member)
                    _lose(loss, ExecutorLeft(f"{member}: {reason}: {answer.details()}"))
                elif answer is not None and answer.code() in SILENT_CODES:
                    gone.append(f"{member}: {reason or answer.code().name}")
                    self._known.pop(member.address, None)
            if gone:
                error = ExecutorGone("; ".join([*gone, str(error)]))
        finally:
            _lose(loss, error)

    def _note_left(self, member: Member) -> None:
        if self._policy is not None:
            self._policy.note_left(self._clock(), member.address)

    def _end_streams(self) -> None:
        """Ends every executor's part in the epoch; each then leaves its process groups."""
        for stream in self._streams:
            stream.close()

    def _leave_epoch(self) -> None:
        self._end_streams()
        if self._asking is not None:
            self._asking.cancel()
        self._attendance.note_answers()
        self._streams, self._asking, self._last_step_id = [], None, 0
        self._driven = ()
        self._has_scored = False
        if self._spares is not None:
            self._spares.stop()
        self._loss = asyncio.get_running_loop().create_future()
        self._border = asyncio.get_running_loop().create_future()

    async def _candidates(self) -> Sequence[str]:
        """Returns the addresses of all executors; those that are known, if nobody can tell or it takes long.

        An elastic group goes on with those also if the others cannot be found.
        """
        known = list(self._connections.channels)
        try:
            found = await self._lookup.addresses(LOOKUP_TIMEOUT_S if known else None)
        except ExecutorLost as error:
            if not known or (self._policy is None and not isinstance(error, ResolverFailed)):
                raise
            return known
        return known if found is None else found

    async def _describe_all(self) -> list[Member]:
        """Returns all executors, by DP rank and attention-TP rank; of an elastic group, who answers."""
        if self._policy is not None:
            return await self._describe_who_answers(self._connections.channels)
        members = await all_of([self._describe(each) for each in self._connections.channels])
        return sorted(members, key=lambda member: member.coordinates)

    async def _describe_who_answers(self, addresses: Iterable[str]) -> list[Member]:
        """Returns the executors that answer. Where there are beats, none is waited for without."""

        async def describe(address: str) -> Member | None:
            state = self._suspicion.state(address)
            if state is MemberState.SILENT:
                return None
            is_there = state is MemberState.ATTENTIVE or not self._has_beats
            timeout_s = DESCRIBE_TIMEOUT_S if is_there else SILENT_TIMEOUT_S
            try:
                return await self._describe(address, timeout_s)
            except ExecutorLost:
                return None

        answers = await asyncio.gather(*map(describe, addresses))
        return [member for member in answers if member is not None]

    async def _describe_spares(self) -> list[Member]:
        """Returns the executors that answer, and are neither in the epoch nor another router's."""
        addresses = set(await self._candidates()) | self._taking_part
        await self._connections.keep(addresses)
        spares = await self._describe_who_answers(sorted(addresses - self._taking_part))
        return [spare for spare in spares if not self._is_held(spare)]

    async def _release(self, address: str) -> None:
        """Has an executor leave its group, as it does when its Step stream ends."""
        call = self._connections.stubs[address].Step(timeout=PROBE_TIMEOUT_S)
        with suppress(
            Exception
        ):  # gRPC has several, of which some are not public, for one that has ended
            await call.done_writing()
        await call.code()

    async def _describe(self, address: str, timeout_s: float = DESCRIBE_TIMEOUT_S) -> Member:
        known = self._known.pop(address, None)  # if no group forms so, it is asked
        if known is not None and self._is_as_known(known):
            return known
        timeout_s = min(timeout_s, self._settings.form_timeout_s)
        if self._suspicion.state(address) is MemberState.SILENT:
            timeout_s = min(SILENT_TIMEOUT_S, timeout_s)
        name = f"Describe of {self._name(address)}"
        data = await answer_of(self._connections.describe(address, timeout_s), name)
        try:
            member = Member(address, pb.DescribeResponse.FromString(data))
        except DecodeError as error:
            raise ExecutorLost(f"{name} failed: the answer is no such message") from error
        instance_id, problem = self._left_out.get(address, ("", ""))
        if problem and instance_id == _instance_of(member):
            raise ExecutorLost(problem)
        if problem := problem_of(member.description):
            raise self._leave_out(member, f"described itself with {problem}")
        return member

    def _is_as_known(self, member: Member) -> bool:
        """Whether beats say that a member of the last epoch is there, and this router's still."""
        address, last = member.address, self._suspicion.last_beat(member.address)
        return (
            self._suspicion.state(address) is MemberState.ATTENTIVE
            and last is not None
            and last[1].instance_id == _instance_of(member)
            and address not in self._attendance.held
            and address not in self._left_out
        )

    def _leave_out(self, member: Member, problem: str) -> ExecutorLied:
        """Returns the error of a member that said what cannot be: no group forms until it restarts."""
        problem = f"{member} {problem}: it is left out until it restarts"
        log.error("executor_lied", executor=str(member), problem=problem)
        self._left_out[member.address] = _instance_of(member), problem
        return ExecutorLied(problem)

    def _recognise(self, members: Sequence[Member]) -> None:
        """Notes the members' instances, and logs each that is not the one of the last epoch."""
        before, self._instances = self._instances, {}
        for member in members:
            instance_id = member.description.instance_id
            place = member.address if member.placement else member.coordinates
            known = before.get(place)
            if known is not None and known != instance_id:
                log.warning(
                    "executor_restarted",
                    executor=str(member),
                    old_instance=known,
                    new_instance=instance_id,
                )
                self.deadline.forget()
            self._instances[place] = instance_id

    def _check_lead(self, members: Sequence[Member]) -> None:
        """Checks that no member's epoch is one that only this member can have come to.

        Raises:
            ExecutorLied: Says which one.
        """
        *others, first = sorted(members, key=lambda member: member.description.epoch)
        known = max(self._epoch, *(member.description.epoch for member in others), 0)
        if others and first.description.epoch - known > MAX_EPOCH_LEAD:
            raise self._leave_out(
                first,
                f"described itself with epoch={first.description.epoch}, more than "
                f"{MAX_EPOCH_LEAD} above {known}, the newest that any other executor and this "
                f"router know",
            )

    def _check_held(self, members: Sequence[Member]) -> None:
        """Does nothing if this router may take all members.

        Raises:
            GroupHeld: Another router drives one of them.
        """
        held = [member for member in members if self._is_held(member)]
        if held:
            if self._policy is not None:
                self._policy.note_held(self._clock(), [member.address for member in held])
            self._note_model(held)
            raise held_by(held[0].description.driver.router_id.hex())

    def _note_model(self, held: Sequence[Member]) -> None:
        """Notes what these executors serve, so that requests can be taken as soon as they are."""
        place = held[0].description.coordinates
        told = [member.description for member in held if member.description.joined_max_model_len]
        bounds = ((each.epoch, each.joined_max_model_len) for each in told)
        _, max_len = max(bounds, default=(0, 0))  # of the newest epoch: others may not have formed
        if len(held) == place.dp_size * place.attn_tp_size:  # of fewer, less may be true
            with suppress(GroupMismatch):  # as between two epochs of theirs
                info = describe_group(held, self._epoch, self._settings.model_name, max_len)
                self.held_model = info.model
                max_len = info.model.max_model_len
        if self._policy is not None and max_len:  # who does not fit takes no place here either
            self._policy.max_len = max_len

    def _is_held(self, member: Member) -> bool:
        """Whether another router drives a member."""
        driver = member.description.driver
        is_other = driver.router_id != self._router_id
        return is_other and is_held(driver.silent_ms, has_stream=driver.has_stream)

    async def _bring_up(self, member: Member) -> None:
        """Takes a member to within a leap of the epoch, by as many Prepares as it takes."""
        seen = member.description.epoch
        while self._epoch - seen > MAX_EPOCH_LEAP:
            seen += MAX_EPOCH_LEAP
            prepare = pb.PrepareRequest(epoch=seen, router_id=self._router_id)
            timeout_s = self._settings.form_timeout_s
            stub = self._connections.stubs[member.address]
            await answer_of(stub.Prepare(prepare, timeout=timeout_s), f"Prepare of {member}")

    async def _prepare(self, first: Member, secret: bytes) -> str:
        """Has the first member open the epoch's store. Returns the address."""
        call = self._connections.stubs[first.address].Prepare(
            pb.PrepareRequest(epoch=self._epoch, secret=secret, router_id=self._router_id),
            timeout=self._settings.form_timeout_s,
        )
        return (await answer_of(call, f"Prepare of {first}")).store_address

    async def _join(self, members: Sequence[Member], max_model_len: int) -> dict[str, str]:
        """Joins all members. Returns by address which KV each has, as their descriptions say from then on."""
        secret = secrets.token_bytes(SECRET_BYTES)  # kept by nobody once the group has formed
        first = members[0].description
        address = first.store_address
        if not address or first.driver.router_id != self._router_id:
            # Of two routers that would take the group, one gets its first member.
            address = await self._prepare(members[0], secret) or address
        peer_hosts = [member.description.peer_host for member in members]

        async def join(member: Member) -> pb.JoinResponse:
            told = member.description
            is_known = self._kv_ids.get(member.address) == _kv_of(told)
            request = pb.JoinRequest(
                epoch=self._epoch,
                store_address=address,
                secret=secret,
                peer_hosts=peer_hosts,
                router_id=self._router_id,
                kv_id=told.kv_id if is_known else "",
                placement=member.placement,
                max_model_len=max_model_len,
            )
            stub, timeout_s = self._connections.stubs[member.address], self._settings.form_timeout_s
            try:
                return await answer_of(stub.Join(request, timeout=timeout_s), f"Join of {member}")
            except ExecutorUnfit as error:
                if self._policy is not None:
                    self._policy.note_failed(self._clock(), member.address)
                    self._tell_held_off(member.address, error)
                raise
            except ExecutorLeft:
                self._note_left(member)
                raise
            except GroupHeld:
                raise
            except ExecutorLost as error:
                raise MemberNotJoined(str(error), member.address) from error

        joined = await all_of([join(member) for member in members])
        for member, answer in zip(members, joined, strict=True):
            if member.description.instance_id != answer.instance_id:
                raise ExecutorLost(f"{member} was restarted while the group formed")
            if answer.places_crc32 != places_crc32_of(member):
                told = (
                    "experts in other places than its group"
                    if answer.places_crc32
                    else "no places_crc32"
                )
                raise self._leave_out(member, f"joined with {told}")
            member.description.kv_id = answer.kv_id
        return {
            member.address: _kv_of(answer) for member, answer in zip(members, joined, strict=True)
        }


def _kv_ids_of_ranks(members: Sequence[Member], kv_ids: Mapping[str, str]) -> tuple[str, ...]:
    """Returns which KV each DP rank has: that of all its members, "" if one does not say."""
    ranks: dict[int, list[str]] = {}
    for member in members:
        ranks.setdefault(member.dp_rank, []).append(kv_ids[member.address])
    return tuple(",".join(ids) if all(ids) else "" for ids in ranks.values())


def _instance_of(member: Member) -> str:
    return member.description.instance_id[:MAX_INSTANCE_ID_LEN]


def _kv_of(told: pb.DescribeResponse | pb.JoinResponse) -> str:
    """Returns which KV an executor has; "" if it does not say. A new process never has an old one's."""
    return f"{told.instance_id} {told.kv_id}"[: 2 * MAX_INSTANCE_ID_LEN] if told.kv_id else ""


def _lose(loss: asyncio.Future[None], error: ExecutorLost) -> None:
    """Notes why an epoch is over; the first reason counts."""
    if not loss.done():
        loss.set_exception(error)
        loss.exception()  # seen: a loss that nobody waits for is found at the next receive


def _describe_late(
    late: Sequence[Member], silent: Sequence[Member], step_id: int, limit_s: float
) -> str:
    """Says whose answer to a step is missing, and who of them seems to be why."""
    missing = f"did not answer step {step_id} within {limit_s:.3g} s"
    if not silent:
        return f"{_names(late)} {missing}, and they answer other calls"
    others = [member for member in late if member not in silent]
    waiting = f"; {_names(others)} waited for it" if others else ""
    return f"{_names(silent)} {missing}, nor any other call{waiting}"


def _describe_silence(silence: Silence, name: Callable[[str], str]) -> str:
    """Says which executor counts as lost for want of beats."""
    waiting = ", ".join(map(name, silence.waiting))
    why = f", and {waiting} waits for it" if waiting else ""
    return f"{name(silence.name)} is silent: no beat and no answer for {silence.seconds:.2f} s{why}"


def _names(members: Sequence[Member]) -> str:
    return ", ".join(map(str, members))
