"""Tells executors that were told different things about a step, before they act on them.

Collectives must be the same everywhere: over gloo, tensors of unequal sizes end the process, and
unequal kinds of collectives wait for each other until a timeout. So each executor shows the others
32 bytes that stand for what it was told: half of them for what all must be told alike, half for what
the executors of its DP rank must. All of them see all, hence all refuse the same steps.

                                                    on the CPU, the first collective finishes
    told the same      begin ── stage ── forward pass ── finish ── its collectives
    told otherwise     begin ── stage ── forward pass ── finish: StepDisagreement, everywhere
    refused by a peer  begin ── stage ── forward pass ── finish: PeerLost, as the peer leaves

An executor has begun long before its first collective, for which the others wait anyway, so that
finish finds their messages there. They take no collective of their own, which would cost as much as
any other (tests/bench/executor/bench_collectives.py).
"""

import hashlib
import time
from collections.abc import Callable, Iterable

from executor.errors import PeerLost, StepDisagreement
from executor.metrics import Measures
from executor.parallel.process_groups import EpochGroups

DIGEST_BYTES = 16
TEXT_BYTES = 1024  # of what each executor was told, in the error


class StepCheck:
    """The check of one epoch's steps. Every executor makes the same calls.

    Args:
        groups: The epoch's.
        attn_tp_size: Executors of each DP rank, neighbours by world rank, which get one part.
        measures: Gets the time for which peers were waited for; None: nobody asks.

    Attributes:
        holds_collectives: Whether the first collective after ``begin`` finishes the check by itself,
            and begins only if all were told the same. Else the caller finishes it in time.
    """

    def __init__(
        self, groups: EpochGroups, attn_tp_size: int = 1, measures: Measures | None = None
    ) -> None:
        self.holds_collectives = groups.are_gated
        self._links = groups.links
        self._gate = groups.gate
        self._attn_tp_size = attn_tp_size
        self._measures = measures or Measures()
        self._own = b""
        self._describe: Callable[[], str] | None = None  # None once the step's check is over

    def begin(self, told: bytes, part: Callable[[], bytes], describe: Callable[[], str]) -> None:
        """Shows the others what this executor was told.

        Args:
            told: Bytes that must be the same everywhere.
            part: Returns those that must be the same on the executors of a DP rank. Not called
                where that is this one alone.
            describe: Says what this executor was told, for the error.

        Raises:
            PeerLost: An executor has left the group.
        """
        self._own = _digest(told) + _digest(part() if self._attn_tp_size > 1 else b"")
        self._describe = describe
        try:
            self._links.send(self._own)
        except OSError as error:
            raise _lost(error) from error
        self._gate.hold(self.finish)

    def finish(self) -> None:
        """Waits until every executor has begun the step. Does nothing if that was awaited.

        Raises:
            StepDisagreement: They were not told the same. Says who was told what.
            PeerLost: An executor has left the group, or did not begin in time.
        """
        describe, self._describe = self._describe, None
        if describe is None:
            return
        digests = self._receive()
        if digests.count(self._own) == len(digests):
            return
        told = [digest[:DIGEST_BYTES] for digest in digests]
        if told.count(told[0]) < len(told):
            raise StepDisagreement(self._disagreement(told, describe()))
        size = self._attn_tp_size
        for first in range(0, len(digests), size):
            if len(set(digests[first : first + size])) > 1:
                raise StepDisagreement(
                    f"{_name(range(first, first + size))} share DP rank {first // size}, but were "
                    f"given different parts of it: what they get must be the same bytes"
                )

    def _receive(self) -> list[bytes]:
        started_ns = time.perf_counter_ns()
        try:
            return self._links.receive()
        except OSError as error:
            raise _lost(error) from error
        finally:
            self._measures.waited_for_peers(time.perf_counter_ns() - started_ns)

    def _disagreement(self, digests: list[bytes], told: str) -> str:
        """Exchanges the texts: every executor has found out, so every one gets here."""
        try:
            self._links.send(told.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
            texts = self._links.receive()
        except OSError:  # an executor failed since; who differs is known all the same
            texts = [b""] * len(digests)
        ranks_by_digest: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(digests):
            ranks_by_digest.setdefault(digest, []).append(rank)
        parts = []
        for ranks in ranks_by_digest.values():
            said = texts[ranks[0]].rstrip(b"\0").decode(errors="replace")
            parts.append(f"{_name(ranks)}: {said or 'unknown'}")
        return f"the executors were told different things: {'; '.join(parts)}"


def _digest(told: bytes) -> bytes:
    return hashlib.blake2b(told, digest_size=DIGEST_BYTES).digest()


def _lost(error: OSError) -> PeerLost:
    return PeerLost(f"an executor of the group left it or did not begin the step: {error}")


def _name(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"world rank {numbers[0]}"
    return f"world ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
