"""Epochs of a group: which ones an executor may enter, and an attempt to join one.

Any thread may call an attempt off:

    compute thread    form ──── waits ────▶ groups ─▶ captures ─▶ over
                        │                     ▲
    its own thread      └─ store, peers ──────┘
    event loop                 call_off: the compute thread waits no longer

PyTorch's stores and groups wait for peers, and nothing ends all of these waits: a peer that has not
called yet has no connection that could be ended. So another thread waits, and an attempt that is
called off leaves it behind. It ends when its time to form is over; until it has all members' addresses
also with the store of its epoch, which goes when the next one is opened. It closes what has formed by
then. NCCL has no such time: a peer that is lost while NCCL connects costs that thread.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from executor.errors import InvalidEpoch, InvalidRendezvous, JoinFailed, StaleEpoch
from executor.parallel.threads import ReusedThreads
from protos.executor.epochs import MAX_EPOCH_LEAP

MAX_PORT = (1 << 16) - 1
MIN_SECRET_BYTES = 16

_FORMING = ReusedThreads("form")  # also those that were left behind, waiting


class Epochs:
    """Refuses calls of epochs that are over.

    Attributes:
        newest: Of any Prepare or Join; 0 before the first.
        last_joined: Of any Join, also one that failed.
    """

    def __init__(self) -> None:
        self.newest = 0
        self.last_joined = 0

    def prepare(self, epoch: int) -> None:
        """Takes note of a Prepare.

        Raises:
            StaleEpoch, InvalidEpoch: It is not to be done.
        """
        if epoch <= self.newest:
            raise StaleEpoch(
                f"epoch {epoch} is not above {self.newest}, seen before", field="epoch"
            )
        self._advance(epoch)

    def join(self, epoch: int) -> None:
        """Takes note of a Join. Its errors are those of ``prepare``."""
        least = max(self.last_joined + 1, self.newest)
        if epoch < least:
            raise StaleEpoch(
                f"epoch {epoch} is over: the next Join is of {least} or later", field="epoch"
            )
        self._advance(epoch)
        self.last_joined = epoch

    def _advance(self, epoch: int) -> None:
        if epoch > self.newest + MAX_EPOCH_LEAP:
            raise InvalidEpoch(
                f"epoch {epoch} is more than {MAX_EPOCH_LEAP} above {self.newest}, seen before: if "
                f"it were taken, there could be no later ones",
                field="epoch",
            )
        self.newest = epoch


class Closable(Protocol):
    def close(self) -> None: ...


GroupsT = TypeVar("GroupsT", bound=Closable)
FormGroup = Callable[[int, str, int, bytes], GroupsT]  # epoch; the store's host, port and secret


def check_secret(secret: bytes) -> None:
    """Does nothing if an epoch's secret cannot be guessed.

    Raises:
        InvalidRendezvous: It can.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidRendezvous(
            f"a secret of {len(secret)} bytes can be guessed: need {MIN_SECRET_BYTES}, drawn for "
            f"this epoch",
            field="secret",
        )


class JoinAttempt:
    """One call of Join. It has an end of its own; this says only whether it is wanted still.

    Args:
        epoch: The epoch to join.
        secret: The epoch's.
    """

    def __init__(self, epoch: int, secret: bytes = b"") -> None:
        self._epoch = epoch
        self._secret = secret
        self._called_off: Future[str] = Future()  # why it was

    def call_off(self, problem: str) -> None:
        """Ends it: what has not formed yet never will. Its owner then leaves what has.

        Args:
            problem: Why; the first one counts.
        """
        with suppress(InvalidStateError):
            self._called_off.set_result(problem)

    def check(self) -> None:
        """Does nothing unless it was called off.

        Raises:
            JoinFailed: It was; says why.
        """
        if self._called_off.done():
            raise JoinFailed(f"epoch {self._epoch}: {self._called_off.result()}")

    def form(self, form_group: FormGroup[GroupsT], store_address: str) -> GroupsT:
        """Forms the epoch's groups.

        Args:
            form_group: Called in another thread. What it returns is closed if nobody wants it any
                more.
            store_address: host:port.

        Raises:
            JoinFailed: A member did not come in time, the address is none, or the attempt was
                called off.
        """
        host, port = split_address(store_address)
        is_port = port.isdecimal() and len(port) <= 5 and 0 < int(port) <= MAX_PORT
        if not host or not is_port:
            raise JoinFailed(f"store_address={store_address!r}: need host:port, as Prepare gave it")
        self.check()
        forming = _FORMING.submit(form_group, self._epoch, host, int(port), self._secret)
        ends: list[Future[Any]] = [forming, self._called_off]
        wait(ends, return_when=FIRST_COMPLETED)
        try:
            self.check()
            return forming.result()
        except JoinFailed:
            forming.add_done_callback(_close)
            raise
        except RuntimeError as error:
            raise JoinFailed(
                f"epoch {self._epoch}: no group formed over the store at {store_address}: {error}"
            ) from error


def split_address(address: str) -> tuple[str, str]:
    """Returns host and port of ``host:port``, or of ``[host]:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def join_address(host: str, port: int) -> str:
    """Returns ``host:port``, or ``[host]:port`` of a numeric IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _close(formed: Future[GroupsT]) -> None:
    if formed.exception() is None:
        formed.result().close()
