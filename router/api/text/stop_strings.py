"""Stop strings in text that comes in pieces, found at one table look-up per character.

The strings are laid out as a trie. A position in the text is at the node that spells the
longest end of the text which could begin a stop string, so the position says how much
text must be held back, and which string has just been completed:

    stop strings "ab", "bcd"      text  x a b c e
                                  node  - a b bc -      ("ab" completed at b)

Source: Aho and Corasick, "Efficient string matching", CACM 18(6), 1975.
"""

from collections import deque
from collections.abc import Sequence

ROOT = 0


class StopStrings:
    """The stop strings of a request. Knows no text; a listener keeps its node. Never changes.

    Args:
        strings: At least one character each.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [ROOT]  # the node of the longest proper end that is a node too
        self._completed: list[str | None] = [None]
        self._num_held = [0]
        for string in strings:
            self._add(string)
        self._link()

    def step(self, node: int, char: str) -> int:
        """Returns the node after one more character. A text starts at ROOT."""
        children = self._children
        while char not in children[node]:
            if node == ROOT:
                return ROOT
            node = self._fallback[node]
        return children[node][char]

    def completed(self, node: int) -> str | None:
        """Returns the longest stop string that ends here, or None if none does."""
        return self._completed[node]

    def num_held(self, node: int) -> int:
        """Returns how many of the last characters may begin a stop string."""
        return self._num_held[node]

    def _add(self, string: str) -> None:
        node = ROOT
        for depth, char in enumerate(string, start=1):
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._fallback.append(ROOT)
                self._completed.append(None)
                self._num_held.append(depth)
            node = self._children[node][char]
        self._completed[node] = string

    def _link(self) -> None:
        """Fills what a node inherits from its fallback, shortest nodes first."""
        todo = deque(self._children[ROOT].values())
        while todo:
            node = todo.popleft()
            fallback = self._fallback[node]
            if self._completed[node] is None:
                self._completed[node] = self._completed[fallback]
            if not self._children[node]:  # nothing longer begins so
                self._num_held[node] = self._num_held[fallback]
            for char, child in self._children[node].items():
                self._fallback[child] = self.step(fallback, char)
                todo.append(child)
