"""The epochs that an executor has been told of: they only rise, by small steps."""

from executor.errors import InvalidEpoch, StaleEpoch

# Of the next epoch above the newest. A router counts them one by one, on from the newest of any
# executor; a number out of the blue near the end of uint64 would be the last.
MAX_EPOCH_LEAP = 1 << 32


class Epochs:
    """Refuses calls of epochs that are over.

    Attributes:
        newest: Of any Prepare or Join; 0 before the first.
    """

    def __init__(self) -> None:
        self.newest = 0
        self._last_joined = 0  # of any Join, also one that failed

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
        least = max(self._last_joined + 1, self.newest)
        if epoch < least:
            raise StaleEpoch(
                f"epoch {epoch} is over: the next Join is of {least} or later", field="epoch"
            )
        self._advance(epoch)
        self._last_joined = epoch

    def check_newest(self, epoch: int) -> None:
        """Does nothing unless a newer epoch has been seen.

        Raises:
            StaleEpoch: One has.
        """
        if epoch < self.newest:
            raise StaleEpoch(
                f"epoch {epoch} is over: epoch {self.newest} has begun since", field="epoch"
            )

    def _advance(self, epoch: int) -> None:
        if epoch > self.newest + MAX_EPOCH_LEAP:
            raise InvalidEpoch(
                f"epoch {epoch} is more than {MAX_EPOCH_LEAP} above {self.newest}, seen before: if "
                f"it were taken, there could be no later ones",
                field="epoch",
            )
        self.newest = epoch
