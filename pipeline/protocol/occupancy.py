"""How much something is in use: the share of the last seconds in which it had anything to do, or how full it was over them.

An engine that reads prompts is full when it always reads one, however many more it could be given: it computes them one after the
other, and a second one makes both late. So its slots, which may overlap what surrounds the reading, do not say how full it is.
"""

import math
from typing import Final

MEMORY_S: Final = 3.0
"""A moment counts for 1/e after so long: some ten prompts, and soon enough to follow a load."""

FULL_MEMORY_S: Final = 0.5
"""The same of what is promised: asks come and go, and who judges by it is patient on top."""


class Occupancy:
    """Of one thing. Levels are 0…1, times seconds, monotonic."""

    def __init__(self, now_s: float, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._ratio = 0.0
        self._level = 0.0
        self._at_s = now_s

    def use(self, level: float, now_s: float) -> None:
        """From now on it is so full: 1 where it is in use, 0 where it is not."""
        self._ratio, self._at_s = self.ratio(now_s), max(self._at_s, now_s)
        self._level = level

    def ratio(self, now_s: float) -> float:
        """0…1, as of now."""
        fades = math.exp(-max(0.0, now_s - self._at_s) / self._memory_s)
        return self._ratio * fades + self._level * (1.0 - fades)


def promised_ratio(blocks: int, room: int, seats: int, seats_max: int | None, waiting: int) -> float:
    """How full a decode worker is by what it has promised: of blocks and seats the scarcer, and 1 while asks wait, whatever for.

    `room`: blocks that may still be promised. A reply that has no room does not come, and one that has a seat slows all others
    down: so an engine may be full of sequences long before its memory is.
    """
    if waiting:
        return 1.0
    return max(1.0 - room / blocks if blocks else 0.0, min(1.0, seats / seats_max) if seats_max else 0.0)
