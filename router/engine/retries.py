"""Pauses between the loss of a group and the attempts to form it again."""

MIN_DELAY_S = 0.05  # an attempt takes a few milliseconds
DOWN_SHARE = 0.1  # of the time that a group has been down: what looking for it later may add
MAX_DELAY_S = 15.0  # after attempts that ended, one after another, in what nobody expected


class RetryDelays:
    """Seconds until the next attempt.

    Args:
        longest_s: After what a group of executors may well do; it is the shortest one after the rest.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = self._growing_s = longest_s

    def after_loss(self, down_s: float | None) -> float:
        """Returns the pause after executors were lost, or did not come.

        A group that formed again before its sequences could go to another would lose them twice to
        an executor whose steps fail while its process lives.

        Args:
            down_s: For how long it has not served; None: it has until now.
        """
        self._growing_s = self._longest_s
        if down_s is None:
            return self._longest_s
        return min(max(DOWN_SHARE * down_s, MIN_DELAY_S), self._longest_s)

    def after_fault(self, *, has_served: bool) -> float:
        """Returns the pause after an error of this router: twice the last one if nothing was served since."""
        delay_s = self._longest_s if has_served else self._growing_s
        self._growing_s = max(self._longest_s, min(2 * delay_s, MAX_DELAY_S))
        return delay_s
