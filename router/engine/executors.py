"""Executors of one group, as its engine drives them."""

from collections import Counter
from typing import Protocol

from protos.serving.v1 import serving_pb2 as pb
from router.scheduling.step import GroupInfo, InFlight, ServedModel, StepResult


class Executors(Protocol):
    """One group of executors, as the engine sees it."""

    @property
    def suspicions(self) -> Counter[str]:
        """Executors that fell silent: "cleared" by a beat, "lost", and of these "false" alarms."""
        ...

    @property
    def wants_border(self) -> bool:
        """Whether no further step should be planned: once none is under way, `lost` raises."""
        ...

    def may_try_suspects(self) -> bool:
        """Whether it can do without one more executor, which a poison request may cost."""
        ...

    def elastic(self) -> pb.ElasticStatus | None:
        """Returns what an elastic group could become; None: it needs all of its executors."""
        ...

    def members(self) -> list[pb.MemberStatus]:
        """Returns what beats tell of each executor; nothing before the first forming."""
        ...

    @property
    def num_standbys(self) -> int:
        """Routers that would take the group if this one left it."""
        ...

    @property
    def is_driver(self) -> bool:
        """Whether this router drives them, or is about to take them."""
        ...

    @property
    def held_model(self) -> ServedModel | None:
        """What another router, which drives them, was last seen to serve."""
        ...

    async def form(self) -> GroupInfo:
        """Brings all executors into a new epoch.

        Raises:
            ExecutorLost: One of them is not there.
            GroupHeld: Another router drives them.
            GroupMismatch: They do not fit together.
        """
        ...

    def send(self, step: InFlight) -> None:
        """Sends a step, and notes when. Earlier ones need not have come back."""
        ...

    async def receive(self, step: InFlight) -> StepResult:
        """Returns the result of the earliest step that has not come back.

        Raises:
            ExecutorLost: An executor died, hangs or answered wrongly.
            GroupHeld: Another router has taken the group.
        """
        ...

    async def lost(self) -> None:
        """Returns never; raises ExecutorLost as soon as an executor is, or at a border that it wants."""
        ...

    async def news(self) -> None:
        """Returns when, since `form` was called, an executor came, or one was left by its driver."""
        ...

    async def close(self) -> None:
        """Ends every stream and connection."""
        ...
