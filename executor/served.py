"""What the servicer asks of the worker and of a store. It can be tested with others."""

from typing import Protocol

from executor.parallel.join_attempt import JoinAttempt
from protos.executor.v1 import executor_pb2 as pb


class Worker(Protocol):
    """What the servicer asks of ``executor.worker.Worker``."""

    @property
    def has_peers(self) -> bool: ...

    @property
    def is_behind(self) -> bool: ...

    def execute(self, request: pb.StepRequest) -> pb.StepResponse: ...

    def catch_up(self) -> None: ...

    def join(self, epoch: int, store_address: str, attempt: JoinAttempt) -> None: ...

    def leave(self) -> None: ...


class Store(Protocol):
    """A rendezvous store; it listens for as long as it is referred to."""

    @property
    def port(self) -> int: ...
