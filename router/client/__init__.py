"""Client library of the router: ``from router.client import Client``.

It imports nothing else of the router.
"""

from protos.transport.tls import TlsFiles
from router.client.client import Client
from router.client.many import Many
from router.client.messages import (
    CallFailed,
    Cancelled,
    Completion,
    Delta,
    Finish,
    ModelInfo,
    Options,
    Overloaded,
    Prompt,
    Rejected,
    TimedOut,
    TokenLogprob,
    Unavailable,
)
from router.client.status import GroupStatus

__all__ = [
    "CallFailed",
    "Cancelled",
    "Client",
    "Completion",
    "Delta",
    "Finish",
    "GroupStatus",
    "Many",
    "ModelInfo",
    "Options",
    "Overloaded",
    "Prompt",
    "Rejected",
    "TimedOut",
    "TlsFiles",
    "TokenLogprob",
    "Unavailable",
]
