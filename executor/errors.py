"""Errors of the executor.

ValueError
├── CheckpointError    the model's files are not what the model needs
└── CaptureError       a graph cannot be captured

RuntimeError
└── PeerLost           another member of the group left it in the middle of a step

RpcError               what the router sees
├── NotLoaded          UNAVAILABLE          the model is still loading
├── ShuttingDown       UNAVAILABLE          this process is about to end
├── JoinFailed         UNAVAILABLE          another member did not come, or a newer epoch began
│   └── LoadFailed     UNAVAILABLE          experts could not be read from the checkpoint
├── Held               FAILED_PRECONDITION  another router drives this executor
├── StaleEpoch         FAILED_PRECONDITION  a newer epoch has been seen
├── InvalidEpoch       INVALID_ARGUMENT     the epoch is one that no router has got to
├── InvalidRendezvous  INVALID_ARGUMENT     a secret that can be guessed, or a store of no member
├── InvalidPlacement   INVALID_ARGUMENT     this executor cannot stand there
├── NotPlaced          FAILED_PRECONDITION  a Join of an elastic executor does not say where it stands
├── NoRoom             FAILED_PRECONDITION  a slot for an expert is in use
├── NotJoined          FAILED_PRECONDITION  no Join has succeeded
├── StreamHeld         FAILED_PRECONDITION  another Step stream is open
├── StepOutOfOrder     FAILED_PRECONDITION  a step was skipped or sent twice
├── InvalidStep        INVALID_ARGUMENT     the step contradicts itself or what is here
└── StepFailed         INTERNAL             the forward pass failed
"""

from grpc import StatusCode

from protos.transport.errors import RpcError


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message names the file, and the tensor if there is one."""


class CaptureError(ValueError):
    """A graph cannot be captured. The message names its size, and the settings to lower."""


class PeerLost(RuntimeError):
    """Another member of the group left it in the middle of a step."""


class NotLoaded(RpcError):
    code = StatusCode.UNAVAILABLE
    reason = "NOT_LOADED"
    retry_delay_s = 1.0


class ShuttingDown(RpcError):
    code = StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class JoinFailed(RpcError):
    code = StatusCode.UNAVAILABLE
    reason = "JOIN_FAILED"


class Held(RpcError):
    code = StatusCode.FAILED_PRECONDITION
    reason = "HELD"


class LoadFailed(JoinFailed):
    reason = "LOAD_FAILED"


class StaleEpoch(RpcError):
    code = StatusCode.FAILED_PRECONDITION
    reason = "STALE_EPOCH"


class InvalidEpoch(RpcError):
    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_EPOCH"


class InvalidRendezvous(RpcError):
    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_RENDEZVOUS"


class InvalidPlacement(RpcError):
    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_PLACEMENT"


class NotPlaced(RpcError):
    code = StatusCode.FAILED_PRECONDITION
    reason = "NOT_PLACED"


class NoRoom(RpcError):
    code = StatusCode.FAILED_PRECONDITION
    reason = "NO_ROOM"


class NotJoined(RpcError):
    code = StatusCode.FAILED_PRECONDITION
    reason = "NOT_JOINED"


class StreamHeld(RpcError):
    code = StatusCode.FAILED_PRECONDITION
    reason = "STREAM_HELD"


class StepOutOfOrder(RpcError):
    code = StatusCode.FAILED_PRECONDITION
    reason = "STEP_OUT_OF_ORDER"


class InvalidStep(RpcError):
    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_STEP"


class StepFailed(RpcError):
    code = StatusCode.INTERNAL
    reason = "STEP_FAILED"
