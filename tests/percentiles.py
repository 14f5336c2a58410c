"""Percentiles of a few times, exactly."""

import math
from collections.abc import Sequence


def percentile_ms(times_s: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile, in milliseconds. None of nothing."""
    if not times_s:
        return None
    rank = max(1, math.ceil(len(times_s) * percent / 100))
    return round(sorted(times_s)[rank - 1] * 1000, 2)
