"""Output text of one sequence: whole characters, up to the first stop string."""

from router.api.text.detokenizer import Detokenizer
from router.api.text.stop_strings import ROOT, StopStrings
from router.requests.request import Int32Array


class OutputText:
    """A sequence's TextStream, and the text that its listener has not taken yet.

    A stop string counts where its last character comes from tokens that may stop; it may begin
    before them. Of several, the one completed first ends the text, and the longest of those
    that are completed together.

    Args:
        detokenizer: Of this sequence only.
        stops: What ends the text, if anything does; shared by a request's sequences.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings | None = None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._node = ROOT
        self._ready: list[str] = []
        self._held = ""  # may begin a stop string
        self._is_closed = False

    def feed(self, token_ids: Int32Array, *, may_stop: bool) -> str | None:
        """Adds tokens. Returns the stop string that they completed, if they did."""
        assert not self._is_closed, "no token follows the end"
        return self._add(self._detokenizer.add(token_ids.tolist()), may_stop)

    def close(self) -> None:
        """Makes what was held back ready: no token follows. Harmless to call again."""
        if not self._is_closed:
            self._add(self._detokenizer.finish(), may_stop=False)
            self._ready.append(self._held)
            self._is_closed = True

    def take(self) -> str:
        """Returns the text since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _add(self, new: str, may_stop: bool) -> str | None:
        if self._stops is None:
            self._ready.append(new)
            return None
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            self._node = self._stops.step(self._node, char)
            if may_stop and (stop := self._stops.completed(self._node)) is not None:
                self._ready.append(text[: end - len(stop)])
                self._is_closed = True
                return stop
        num_ready = len(text) - self._stops.num_held(self._node)
        self._ready.append(text[:num_ready])
        self._held = text[num_ready:]
        return None
