"""Resumption of requests: one request over all of its calls, until its outputs have ended.

    call         prompt ─▶ a b c │ UNAVAILABLE
    next call    prompt + Resume(a b c) ─▶ d e f ... finish

Its caller sees a pause. protos/README.md says the same for clients in other languages.
"""

import asyncio
import random
import struct
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from protos.serving.v1 import serving_pb2
from protos.transport.error_details import ErrorDetails
from router.client.messages import (
    CallFailed,
    Delta,
    Interrupted,
    Overloaded,
    Unavailable,
    to_delta,
)

T = TypeVar("T")

METADATA = (("lockstep-resume", "1"),)  # a router whose queue is full reads such calls
# Attempts in a row that a router took, and that broke off without a token. After three, a third of the
# requests lost with one that takes routers down would be given up, before they come back apart from it.
MAX_STALLED = 5
PLANNED = "SHUTTING_DOWN"  # reason of an end that no request can be the cause of
MAX_UNANSWERED = 3  # calls that broke off before any router took one; gRPC makes up to five of each
ANSWER_GRACE_S = 1.0  # the router ends a request on time; this is for one that does not answer
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
MIN_TEMPERATURE = 1e-5  # below it is greedy, and no seed is needed
RESUME_FIELD = str(serving_pb2.GenerateRequest.RESUME_FIELD_NUMBER)


@dataclass(slots=True)
class Resumption:
    """How a client resumes.

    Attributes:
        for_s: Seconds without a token after which a request whose calls break off fails; 0: at once.
        has_answered: Whether a router ever answered. One that never did is not waited for.
    """

    for_s: float
    has_answered: bool = False


class Attempts:
    """One request over all of its calls.

    Args:
        request: As its caller made it. It gets an id where it has none, and a seed if it samples without one.
        timeout_s: For all of it; None: no limit.
        resumption: Of the client.
        retry_delays_s: Before it is sent again where nothing ever came of it.

    Attributes:
        num_resumes: How often it was sent again.
    """

    def __init__(
        self,
        request: serving_pb2.GenerateRequest,
        timeout_s: float | None,
        resumption: Resumption,
        retry_delays_s: Sequence[float] = (),
    ) -> None:
        self.num_resumes = 0
        self._has_own_id = not request.request_id
        if self._has_own_id:
            request.request_id = uuid.uuid4().hex
        self._request = request
        self._resumption = resumption
        self._retry_delays_s = retry_delays_s
        self._sent_time = time.monotonic()
        self._deadline = None if timeout_s is None else self._sent_time + timeout_s
        self._n = request.n or 1  # a router has not said yet whether it takes so many
        self._outputs = defaultdict[int, list[int]](list)  # by index
        self._ended: set[int] = set()
        self._begin = serving_pb2.Begin()
        self._was_taken = False  # by some router
        self._is_taken = self._has_new = False  # in this attempt
        self._num_stalled = self._num_unanswered = 0
        self._failure: CallFailed | None = None  # the last one that can be resumed
        self._lost_time = 0.0  # of the first one since the last token
        self._num_pauses = 0  # since then
        sampling = request.sampling
        samples = sampling.temperature >= MIN_TEMPERATURE
        if resumption.for_s and samples and not sampling.HasField("seed"):
            sampling.seed = random.getrandbits(64)

    @property
    def has_ended(self) -> bool:
        """Whether all continuations have."""
        return len(self._ended) == self._n

    @property
    def has_tokens(self) -> bool:
        return any(self._outputs.values())

    @property
    def timeout_s(self) -> float | None:
        """What is left of its time."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 1e-3)

    @property
    def call_timeout_s(self) -> float | None:
        """How long its next call may take."""
        return None if self.timeout_s is None else self.timeout_s + ANSWER_GRACE_S

    @property
    def patience_s(self) -> float | None:
        """Seconds to wait for a router that takes the next attempt; None: gRPC does not wait."""
        if not self.num_resumes or not self._goes_on:
            return None
        return max(self._lost_time + self._resumption.for_s - time.monotonic(), 1e-3)

    @property
    def _goes_on(self) -> bool:
        """Whether it is sent again after this and that."""
        resumption = self._resumption
        return resumption.for_s > 0 and (self._was_taken or resumption.has_answered)

    def next_request(self) -> serving_pb2.GenerateRequest:
        """Returns what to send next."""
        self._is_taken = self._has_new = False
        if not self.num_resumes:
            return self._request
        again = serving_pb2.GenerateRequest()
        again.CopyFrom(self._request)
        if self._deadline is not None:
            again.timeout.FromNanoseconds(round((self.timeout_s or 0) * 1e9))
        if not self._was_taken:
            return again
        resume = again.resume
        for index in sorted(self._outputs.keys() | self._ended):
            output, has_ended = self._outputs[index], index in self._ended
            ids = b"" if has_ended else struct.pack(f"<{len(output)}i", *output)
            resume.continuations.add(index=index, token_ids=ids, has_ended=has_ended)
        resume.prompt_digest = self._begin.prompt_digest
        resume.fingerprint = self._begin.fingerprint
        resume.age.FromNanoseconds(round((time.monotonic() - self._sent_time) * 1e9))
        resume.attempt, resume.num_stalled = self.num_resumes, self._num_stalled
        return again

    def take(self, message: serving_pb2.GenerateResponse) -> Delta | None:
        """Notes what came; None if it is nothing for the caller."""
        if message.HasField("begin"):
            self._begin.CopyFrom(message.begin)
            self._is_taken = self._was_taken = True
            if len(message.ListFields()) <= 2 + bool(message.index):  # its id, and that
                return None
        delta = to_delta(message)
        self._note(delta.index, delta.token_ids)
        if delta.finish is not None:
            self._ended.add(delta.index)
            self._resumption.has_answered = True
        return delta

    def take_tokens(self, token_ids: list[int]) -> Delta:
        """Notes tokens of its only continuation that came in a column."""
        self._note(0, token_ids)
        return Delta(request_id=self._request.request_id, token_ids=token_ids)

    def _note(self, index: int, token_ids: list[int]) -> None:
        if token_ids:
            self._outputs[index].extend(token_ids)
            self._is_taken = self._was_taken = True
            self._has_new = self._resumption.has_answered = True

    def pause_after(self, failure: CallFailed) -> float:
        """Returns seconds to wait before it is sent again.

        Raises:
            CallFailed: It is not: that failure, or one that says more.
        """
        now = time.monotonic()
        if self._has_new:
            self._num_stalled = self._num_pauses = 0
        elif broke_off(failure):
            self._num_stalled += self._is_taken and failure.reason != PLANNED
            self._num_unanswered += not (self._was_taken or failure.reason)  # refusals have reasons
        if self._has_new or self._failure is None:
            self._lost_time = now
        if failure.reason == "RESUME_MISMATCH":
            raise Interrupted(failure, self._so_far()) from failure
        if self.num_resumes and failure.field == RESUME_FIELD:  # a router that knows no resumption
            raise self._failure or failure
        has_stalled = self._num_stalled >= MAX_STALLED
        if has_stalled or (self._goes_on and self._num_unanswered >= MAX_UNANSWERED):
            num_vain = self._num_stalled or self._num_unanswered
            raise Unavailable(
                failure.code,
                f"{failure}; it was sent {self.num_resumes + 1} times, of which the last {num_vain} "
                f"brought no token: it is not sent again",
                ErrorDetails(failure.reason, request_id=failure.request_id),
            ) from failure
        pause_s = self._pause_s(failure)
        if pause_s is None or (self._deadline is not None and now + pause_s >= self._deadline):
            raise failure
        self._failure = failure
        self._num_pauses += 1
        self.num_resumes += 1
        return pause_s

    def _pause_s(self, failure: CallFailed) -> float | None:
        """Returns seconds until another call may go on where one failed; None: none may."""
        if not self._goes_on:
            is_left = not self._was_taken and self._num_pauses < len(self._retry_delays_s)
            if not broke_off(failure) or not is_left:
                return None
            return self._retry_delays_s[self._num_pauses] * random.uniform(0.8, 1.2)
        if time.monotonic() - self._lost_time >= self._resumption.for_s:
            return None
        if isinstance(failure, Overloaded) and self.has_tokens:
            delay_s = failure.retry_delay_s  # gRPC itself gives none: the message is too large
            return None if delay_s is None else delay_s * random.uniform(1.0, 1.5)
        # A router has not noticed that a call broke off, maybe one that a proxy made anew by itself.
        is_again = self.num_resumes > 0 or self._has_own_id
        is_in_use = failure.reason == "REQUEST_EXISTS" and is_again
        if not (is_in_use or broke_off(failure)):
            return None
        if not self._num_pauses:
            return 0.0
        if self._num_stalled > 1:
            return self._time_apart_s()
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_pauses - 1, 9), MAX_PAUSE_S)
        return pause_s * random.uniform(0.8, 1.2)

    def _time_apart_s(self) -> float:
        """Returns a pause that sets it apart from what was lost with it, ever longer ones.

        One of them may be what takes routers down. All that come back some time before it have a token
        by then, and go on; it alone has none after several such pauses.
        """
        most_s = 2.0 ** (self._num_stalled - 1)
        if self.timeout_s is not None:
            most_s = min(most_s, self.timeout_s / 2)
        return random.uniform(0.0, most_s)

    def _so_far(self) -> list[Delta]:
        request_id = self._request.request_id
        return [
            Delta(request_id=request_id, index=index, token_ids=self._outputs[index])
            for index in range(self._n)
        ]


def broke_off(failure: CallFailed) -> bool:
    """Whether a failure says that a call broke off, and not what became of its request."""
    # A proxy has INTERNAL for a stream that was reset, and gRPC for one that it wrote to as the other
    # side ended it. A router gives a reason with it.
    is_reset = failure.code is grpc.StatusCode.INTERNAL and not failure.reason
    return is_reset or isinstance(failure, Unavailable)


def no_end() -> Unavailable:
    """Returns the failure of a call that ended well, but not so its outputs."""
    problem = "the stream ended before its outputs did"
    return Unavailable(grpc.StatusCode.UNAVAILABLE, problem, ErrorDetails())


async def with_patience(
    answering: Awaitable[T], patience_s: float | None, is_there: Callable[[], bool]
) -> T:
    """Returns what a call that was just opened has first.

    Args:
        answering: Waits for it.
        patience_s: How long to look for a router; None: gRPC does not wait for one.
        is_there: Whether one is. Then it may take its time, as in a long queue.

    Raises:
        Unavailable: None was there in time.
    """
    if patience_s is None:
        return await answering
    answer = asyncio.ensure_future(answering)
    try:
        while not answer.done():
            await asyncio.wait((answer,), timeout=patience_s)
            if not (answer.done() or is_there()):
                problem = f"no router took the request within {patience_s:.3g} s"
                raise Unavailable(grpc.StatusCode.UNAVAILABLE, problem, ErrorDetails())
        return answer.result()
    finally:
        answer.cancel()
