"""Client library of the router: ``from router.client import Client``.

It imports nothing else of the router.
"""

from protos.serving.v1.serving_pb2 import (
    GROUP_STATE_FORMING,
    GROUP_STATE_MISMATCHED,
    GROUP_STATE_READY,
    GROUP_STATE_STANDBY,
    GetModelResponse,
    GroupStatus,
)
from protos.transport.credentials import TlsFiles
from router.client.client import Client
from router.client.many import Many
from router.client.messages import (
    CallFailed,
    Cancelled,
    Chat,
    Completion,
    Delta,
    Finish,
    Interrupted,
    Options,
    Overloaded,
    Prompt,
    Rejected,
    TimedOut,
    TokenLogprob,
    Unavailable,
)

__all__ = [
    "GROUP_STATE_FORMING",
    "GROUP_STATE_MISMATCHED",
    "GROUP_STATE_READY",
    "GROUP_STATE_STANDBY",
    "CallFailed",
    "Cancelled",
    "Chat",
    "Client",
    "Completion",
    "Delta",
    "Finish",
    "GetModelResponse",
    "GroupStatus",
    "Interrupted",
    "Many",
    "Options",
    "Overloaded",
    "Prompt",
    "Rejected",
    "TimedOut",
    "TlsFiles",
    "TokenLogprob",
    "Unavailable",
]
