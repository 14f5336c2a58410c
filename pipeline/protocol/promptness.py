"""Whether a request that is taken now can still have its first token in time.

What it takes here is followed as TCP follows round trips (RFC 6298): the mean, and how far from it things are. What has less time
left than that is refused before anything is computed for it: late it would be worth nothing, and make others late.

**What is expected never refuses what has waited for less than half of its time**: else a few slow ones, of which the first is
always one, could have everything refused, and nothing would ever show that it is fast again.
"""

from typing import Final

MEAN_RATIO: Final = 1 / 8
DEVIATION_RATIO: Final = 1 / 4
"""Of what is new, in the two figures."""

SLOW: Final = 2.0
"""Deviations above the mean: about one of ten takes longer."""

HALF: Final = 0.5


class Promptness:
    """One worker's. All in seconds."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    @property
    def expected_s(self) -> float:
        """From taking a request to its first token, where that takes long. 0 while nothing is known."""
        return (self._mean_s or 0.0) + SLOW * self._deviation_s

    def took(self, seconds: float) -> None:
        """A request has had its first token so long after it was taken."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += DEVIATION_RATIO * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += MEAN_RATIO * (seconds - self._mean_s)

    def too_late(self, left_s: float, bound_s: float) -> bool:
        """Whether one that has `left_s` of its `bound_s` left will not make it."""
        return left_s <= min(self.expected_s, HALF * bound_s)
