"""Holds a dispatcher to one exchange at a time: its buffers hold one."""


class OneAtATime:
    """Alternates between dispatch and combine.

        idle ──begin──▶ dispatched ──end──▶ idle

    A step that fails in between leaves its dispatch open. The session ends with it, so the next
    session starts idle.
    """

    def __init__(self) -> None:
        self._open_in: object | None = None

    def begin(self, session: object) -> None:
        """Starts a dispatch. ``session`` is what the exchange runs over, as long as an epoch."""
        assert self._open_in is not session, "dispatch called twice without combine"
        self._open_in = session

    def end(self, session: object) -> None:
        """Starts the combine of the dispatch that is open."""
        assert self._open_in is session, "combine called without dispatch"
        self._open_in = None
