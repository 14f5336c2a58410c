"""Blocks that a decode worker has handed over to its engine, against which the engine's own word is held.

The engine speaks once a step, so its word may be old. It is held against the most that was handed over since about then, also
what began and ended between two looks.
"""

from collections import deque
from typing import Final

LOOKS_REMEMBERED: Final = 20
"""The engine's word may be so many looks old: 2 s at ten a second, longer than any step."""


class HandedOver:
    """`now`: blocks that requests hold in the engine, or may."""

    def __init__(self) -> None:
        self.now = 0
        self._most = 0
        self._looks: deque[int] = deque(maxlen=LOOKS_REMEMBERED)

    def more(self, blocks: int) -> None:
        """A request has been handed over."""
        self.now += blocks
        self._most = max(self._most, self.now)

    def less(self, blocks: int) -> None:
        """One holds none any more."""
        self.now -= blocks

    def look(self, beside: int) -> int:
        """A look: the most at any time that the engine may speak of. `beside`: what others hold there."""
        self._looks.append(self._most + beside)
        self._most = self.now
        return max(self._looks)
