"""How much of its time something is in use: the share of the last seconds in which it had anything to do.

An engine that reads prompts is full when it always reads one, however many more it could be given: it computes them one after the
other, and a second one makes both late. So its slots, which may overlap what surrounds the reading, do not say how full it is.
"""

import math
from typing import Final

MEMORY_S: Final = 3.0
"""A moment counts for 1/e after so long: some ten prompts, and soon enough to follow a load."""


class Occupancy:
    """Of one thing. Times are seconds, monotonic."""

    def __init__(self, now_s: float, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._ratio = 0.0
        self._used = False
        self._at_s = now_s

    def use(self, used: bool, now_s: float) -> None:
        """From now on it is in use, or not."""
        self._ratio, self._at_s = self.ratio(now_s), max(self._at_s, now_s)
        self._used = used

    def ratio(self, now_s: float) -> float:
        """0…1, as of now."""
        fades = math.exp(-max(0.0, now_s - self._at_s) / self._memory_s)
        return self._ratio * fades + self._used * (1.0 - fades)
