"""Tells executors that were told different things about a step, before they act on them.

Collectives must be the same everywhere: over gloo, tensors of unequal sizes end the process, and
unequal kinds of collectives wait for each other until a timeout. So each executor shows the others
32 bytes that stand for what it was told: half of them for what all must be told alike, half for what
the executors of its DP rank must. All of them see all, hence all refuse the same steps.

    told the same        begin ── stage the columns ── finish ── forward pass
    told otherwise       begin ── stage the columns ── finish: StepDisagreement, on every executor
    refused by a peer    begin ── stage the columns ── finish: PeerLost, as the peer leaves its group

The exchange runs while the step is staged. It takes the host's group; on the CPU that is also the
group of all other collectives, of which none runs between begin and finish.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor.errors import PeerLost, StepDisagreement
from executor.parallel import GlooGroup

DIGEST_BYTES = 16
TEXT_BYTES = 1024  # of what each executor was told, in the error


class StepCheck:
    """The check of one epoch's steps. Every executor makes the same calls.

    Args:
        group: All executors.
        attn_tp_size: Executors of each DP rank, neighbours in the group, which get one part.
    """

    def __init__(self, group: GlooGroup, attn_tp_size: int = 1) -> None:
        self._group = group
        self._has_peers = attn_tp_size > 1
        size = (group.world_size // attn_tp_size, attn_tp_size, 2, DIGEST_BYTES)
        self._digests = np.zeros(size, dtype=np.uint8)  # of what all were told, and of the part
        self._own = np.zeros(size[2:], dtype=np.uint8)
        self._sent = torch.from_numpy(self._own).flatten()
        self._received = torch.from_numpy(self._digests).flatten()
        self._exchange: Any = None

    def begin(self, told: bytes, part: Callable[[], bytes]) -> None:
        """Starts to show the others what this executor was told.

        Args:
            told: Bytes that must be the same everywhere.
            part: Returns those that must be the same on the executors of a DP rank. Not called
                where that is this one alone.

        Raises:
            PeerLost: An executor has left the group.
        """
        self._own[0] = _digest(told)
        if self._has_peers:
            self._own[1] = _digest(part())
        try:
            self._exchange = self._group.start_all_gather(self._received, self._sent)
        except RuntimeError as error:
            raise _lost(error) from error

    def finish(self, describe: Callable[[], str]) -> None:
        """Waits until every executor has begun the step.

        Args:
            describe: Says what this executor was told, for the error.

        Raises:
            StepDisagreement: They were not told the same. Says who was told what.
            PeerLost: An executor has left the group, or did not begin in time.
        """
        try:
            self._exchange.wait()
        except RuntimeError as error:
            raise _lost(error) from error
        finally:
            self._exchange = None  # it would keep the connections of a closed group
        told, parts = self._digests[:, :, 0], self._digests[:, :, 1]
        if (told != self._own[0]).any():
            raise StepDisagreement(self._disagreement(describe()))
        differs = (parts != parts[:, :1]).any(axis=(1, 2))
        if differs.any():
            dp_rank, size = int(differs.argmax()), parts.shape[1]
            ranks = range(dp_rank * size, (dp_rank + 1) * size)
            raise StepDisagreement(
                f"{_name(ranks)} share DP rank {dp_rank}, but were given different parts of it: "
                f"what they get must be the same bytes"
            )

    def _disagreement(self, told: str) -> str:
        """Exchanges the texts: every executor has found out, so every one gets here."""
        sent = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        text = told.encode()[:TEXT_BYTES]
        sent.numpy()[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        received = torch.zeros(self._group.world_size * TEXT_BYTES, dtype=torch.uint8)
        try:
            self._group.all_gather(received, sent)
        except RuntimeError:  # an executor failed since; who differs is known all the same
            received.zero_()
        ranks_by_digest: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(self._digests[:, :, 0].reshape(-1, DIGEST_BYTES)):
            ranks_by_digest.setdefault(digest.tobytes(), []).append(rank)
        texts = received.view(-1, TEXT_BYTES).numpy()
        parts = []
        for ranks in ranks_by_digest.values():
            said = texts[ranks[0]].tobytes().rstrip(b"\0").decode(errors="replace")
            parts.append(f"{_name(ranks)}: {said or 'unknown'}")
        return f"the executors were told different things: {'; '.join(parts)}"


def _digest(told: bytes) -> npt.NDArray[np.uint8]:
    digest = hashlib.blake2b(told, digest_size=DIGEST_BYTES).digest()
    return np.frombuffer(digest, dtype=np.uint8)


def _lost(error: RuntimeError) -> PeerLost:
    return PeerLost(f"an executor of the group left it or did not begin the step: {error}")


def _name(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"world rank {numbers[0]}"
    return f"world ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
