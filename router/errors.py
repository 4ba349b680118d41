"""Errors that a client of the router can see, and the one that only the engine sees.

RpcError
├── InvalidRequest      INVALID_ARGUMENT     can never succeed as sent
│   ├── PromptTooLong
│   │   └── TextTooLong                      so much that its tokens were not counted
│   └── ChatTemplateFailed                   the template makes no prompt of a chat
├── ModelNotFound       NOT_FOUND            this router serves another model
├── RequestNotFound     NOT_FOUND            nothing to cancel
├── RequestExists       ALREADY_EXISTS       a live request has this id
├── ResumeMismatch      FAILED_PRECONDITION  an output so far is of another model or prompt
├── OperatorsOnly       PERMISSION_DENIED    concerns what is other callers' too
├── HistoryGone         OUT_OF_RANGE         events of blocks from before the subscription
├── Unimplemented       UNIMPLEMENTED        a method of gateways' that is not there
├── QueueFull           RESOURCE_EXHAUSTED   retry after a while
├── DeadlineExceeded    DEADLINE_EXCEEDED    the request's time is over
├── Cancelled           CANCELLED            somebody called Cancel
├── NotReady            UNAVAILABLE          no group has formed yet
├── ShuttingDown        UNAVAILABLE          this router stops; retry elsewhere
│   └── MovedAsPlanned                       where it has left the executors to another one
├── Moved               UNAVAILABLE          another router drives the executors; go on there
├── ConstraintFailed    INVALID_ARGUMENT     the output cannot keep to the request's constraint
└── ExecutorFailed      INTERNAL             the request's step fails every time

ExecutorLost            a group's step cannot be finished; the group forms again
├── ExecutorGone        because an executor's process or host is there no more
├── ExecutorLeft        because an executor was told to stop: nobody's fault
│   ├── GroupGrows      because there are more executors for it
│   └── SuspectsFirst   because requests that may kill executors run alone
├── ResolverFailed      because nobody could say now where the executors are
├── ExecutorUnfit       because an executor cannot take the place that it was given
├── MemberNotJoined     because an executor could not join, for itself or for want of another
├── ExecutorLied        because what an executor said cannot be; it is left out until it restarts
├── GroupHeld           because another router drives the group: this one stands by
│   └── HandedOver      which this router has left the group to
├── KeptKVDiffers       because KV that was kept over a loss is not what its tokens give
└── ReasonUnknown       because a stream ended, perhaps for want of another executor
GroupMismatch           the members of a group do not fit together; the operator must act
"""

from grpc import StatusCode

from protos.transport.errors import Resource, RpcError, quoted


class InvalidRequest(RpcError):
    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str, **metadata: object) -> None:
        super().__init__(f"{field}: {problem}", field=field, metadata=metadata)


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"

    def __init__(self, field: str, num_prompt_tokens: int, max_prompt_tokens: int) -> None:
        super().__init__(
            field,
            f"the prompt has {num_prompt_tokens} tokens; at most {max_prompt_tokens} fit, "
            f"to leave room for an output token: send a shorter prompt",
            value=num_prompt_tokens,
            limit=max_prompt_tokens,
        )


class TextTooLong(PromptTooLong):
    def __init__(self, field: str, num_chars: int, max_chars: int, max_prompt_tokens: int) -> None:
        InvalidRequest.__init__(
            self,
            field,
            f"the prompt has {num_chars} characters; at most {max_prompt_tokens} tokens fit, to "
            f"leave room for an output token, and {max_chars} characters: send a shorter prompt",
            value=num_chars,
            limit=max_chars,
        )


class ChatTemplateFailed(InvalidRequest):
    reason = "CHAT_TEMPLATE_FAILED"

    def __init__(self, problem: str, **metadata: object) -> None:
        super().__init__(
            "chat", f"the model's chat template makes no prompt of it: {problem}", **metadata
        )


class ModelNotFound(RpcError):
    code = StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"

    def __init__(self, given: str, served: str) -> None:
        super().__init__(
            f"model: {quoted(given)} is not served here; {served!r} is. Leave the field empty to take it",
            field="model",
            metadata={"served": served},
            resource=Resource("Model", given),
        )


class RequestNotFound(RpcError):
    code = StatusCode.NOT_FOUND
    reason = "REQUEST_NOT_FOUND"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"no live request has the id {quoted(request_id)}",
            field="request_id",
            resource=Resource("Request", request_id),
        )


class RequestExists(RpcError):
    code = StatusCode.ALREADY_EXISTS
    reason = "REQUEST_EXISTS"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request_id: a live request has the id {quoted(request_id)}; choose another, or leave the "
            f"field empty to be given one",
            field="request_id",
            metadata={"value": request_id},
        )


class ResumeMismatch(RpcError):
    code = StatusCode.FAILED_PRECONDITION
    reason = "RESUME_MISMATCH"

    def __init__(self, field: str, given: str, here: str) -> None:
        super().__init__(
            f"resume.{field}: {quoted(given)} is not what it is here, {here!r}: the output was begun with "
            f"another model or tokenizer and cannot go on; send the request anew",
            field=f"resume.{field}",
            metadata={"value": quoted(given), "here": here},
        )


class OperatorsOnly(RpcError):
    code = StatusCode.PERMISSION_DENIED
    reason = "OPERATORS_ONLY"

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: callers named by --operators may do this; the caller is not one")


class HistoryGone(RpcError):
    code = StatusCode.OUT_OF_RANGE
    reason = "HISTORY_GONE"

    def __init__(self, given: int) -> None:
        super().__init__(
            f"start_sequence_number: no events from {given} on are kept: subscribe from 0, and get "
            f"what is cached first",
            field="start_sequence_number",
            metadata={"value": given, "limit": 0},
        )


class Unimplemented(RpcError):
    code = StatusCode.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"


class QueueFull(RpcError):
    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"
    retry_delay_s = 1.0


class DeadlineExceeded(RpcError):
    code = StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"

    def __init__(self, missed: str, after_s: float) -> None:
        super().__init__(f"the request had not {missed} {after_s:.3g} s after its arrival")


class Cancelled(RpcError):
    code = StatusCode.CANCELLED
    reason = "CANCELLED"


class NotReady(RpcError):
    code = StatusCode.UNAVAILABLE
    reason = "NOT_READY"
    retry_delay_s = 1.0


class ShuttingDown(RpcError):
    code = StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class MovedAsPlanned(ShuttingDown):
    def __init__(self) -> None:
        super().__init__(
            "this router shuts down: send the request to another one, from where it is"
        )


class Moved(RpcError):
    code = StatusCode.UNAVAILABLE
    reason = "MOVED"

    def __init__(self) -> None:
        super().__init__(
            "another router drives the executors: send the request there, from where it is"
        )


class ConstraintFailed(RpcError):
    code = StatusCode.INVALID_ARGUMENT
    reason = "CONSTRAINT_FAILED"

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"constraint: the output cannot keep to it: {problem}; send a simpler one",
            field="constraint",
        )


class ExecutorFailed(RpcError):
    code = StatusCode.INTERNAL
    reason = "EXECUTOR_FAILED"


class ExecutorLost(Exception):
    """An executor died, answered wrongly or was not there. No step of its epoch commits."""


class ExecutorGone(ExecutorLost):
    """An executor answers nobody any more: there is nothing of it that could be waited for."""


class ExecutorLeft(ExecutorLost):
    """An executor was told to stop, and said so before it left. No request is the cause."""


class GroupGrows(ExecutorLeft):
    """Its epoch ended between two steps, so that executors join it which it lacked."""


class SuspectsFirst(ExecutorLeft):
    """Its epoch ended between two steps, so that suspects, which had to wait, run before all others."""


class ResolverFailed(ExecutorLost):
    """A name could not be looked up, which says nothing of the executors behind it."""


class ExecutorUnfit(ExecutorLost):
    """An executor of an elastic group could not join where it was placed, and no other is the cause."""


class MemberNotJoined(ExecutorLost):
    """A member's Join failed: the cause is it, another one, or the way between them.

    Args:
        problem: For people.
        address: Where the executor listens that said so.
    """

    def __init__(self, problem: str, address: str) -> None:
        super().__init__(problem)
        self.address = address


class ExecutorLied(ExecutorLost):
    """An executor said what cannot be; the message names it and the field."""


class GroupHeld(ExecutorLost):
    """Another router drives the group."""


class HandedOver(GroupHeld):
    """This router has left the group to another one."""

    def __init__(self) -> None:
        super().__init__("this router was told to stop, and has left the group to another one")


class KeptKVDiffers(ExecutorLost):
    """KV that was kept over a loss is not what its tokens give; no request is the cause."""


class ReasonUnknown(ExecutorLost):
    """An executor's stream ended, and why it did another executor may know, or it can be asked.

    Either a step failed on it, as it does when another executor leaves; or gRPC has nothing of its
    own that says why: when a step was being sent as the executor ended the stream, the failed
    sending takes the place of what the executor said.
    """


class GroupMismatch(Exception):
    """Executors that were given as one group cannot be one."""
