"""Times by the million in little memory: a log-linear histogram, as HdrHistogram's.

A time is counted in microseconds. Up to 2,047 µs every microsecond has its own bucket; beyond, each doubling is cut into 1,024,
so that a bucket is never wider than a thousandth of what it holds. Only buckets with a count take memory.
"""

from collections import defaultdict
from typing import Final

import msgspec

_BITS: Final = 10
_FINE: Final = 1 << _BITS


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A summary, in milliseconds; null where nothing was counted."""

    count: int
    mean_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None
    max_ms: float | None = None


class Histogram:
    """Counts of times, to a thousandth. `max_s` and `mean_s` are exact to the microsecond."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets: defaultdict[int, int] = defaultdict(int)
        self._total_us = 0
        self._max_us = 0

    def add(self, time_s: float) -> None:
        """Count one. A clock that went backwards counts as no time."""
        time_us = max(0, round(time_s * 1e6))
        shift = max(0, time_us.bit_length() - _BITS - 1)
        self._buckets[(shift << _BITS) + (time_us >> shift)] += 1
        self.count += 1
        self._total_us += time_us
        self._max_us = max(self._max_us, time_us)

    def percentile_ms(self, percent: float) -> float | None:
        """The nearest rank, as the most that its bucket may hold, which is never more than the maximum. None of nothing."""
        rank, seen = max(1.0, self.count * percent / 100), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(_upper_us(bucket), self._max_us) / 1000
        return None

    def times(self) -> Times:
        """The summary."""
        if not self.count:
            return Times(count=0)
        return Times(
            count=self.count,
            mean_ms=round(self._total_us / self.count / 1000, 3),
            p50_ms=self.percentile_ms(50),
            p90_ms=self.percentile_ms(90),
            p99_ms=self.percentile_ms(99),
            p999_ms=self.percentile_ms(99.9),
            max_ms=self._max_us / 1000,
        )


def _upper_us(bucket: int) -> int:
    """The largest time that is counted there. From the second doubling on, buckets of a shift lie from 1,024 to 2,047."""
    shift = max(0, (bucket >> _BITS) - 1)
    return ((bucket - (shift << _BITS) + 1) << shift) - 1
