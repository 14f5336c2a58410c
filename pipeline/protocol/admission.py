"""Whether a gateway takes one more request, and how long a refused one should wait.

Two bounds: the requests in flight at this gateway, and the presence of workers of both kinds. Everything beyond them is decided
where the room is: by the queue (a creator's share), and by the decode workers (credits).

The wait is honest. Places become free at a rate that is measured: an average over the last `DRAIN_MEMORY_S` that forgets
exponentially. Each refused request is promised the next place that nobody was promised before:

    promised = max(now, promised) + 1 / rate        Retry-After = promised - now, within its bounds

so a crowd that is turned away comes back spread over the time that its places need, and not all at once.
"""

import math
from typing import Final

from pipeline.errors import CapacityError, NoWorkers

DRAIN_MEMORY_S: Final = 10.0
"""Time constant of the drain rate: some hundred interactive replies, and soon enough to notice a dead pool."""

RETRY_AFTER_MIN_S: Final = 1.0
"""HTTP counts seconds, and a client that comes back sooner only adds load."""

RETRY_AFTER_MAX_S: Final = 30.0
"""A longer promise is not believed: the OpenAI SDK stops retrying at 120 s, and people before."""

NO_WORKERS_RETRY_S: Final = 2.0
"""A worker whose presence was missed is back within a second; one that restarts takes longer than anybody waits."""


class DrainRate:
    """Places that become free per second, measured where they do."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._first_s = math.nan
        self._last_s = math.nan

    def freed(self, now_s: float) -> None:
        """One place has become free."""
        if math.isnan(self._first_s):
            self._first_s = self._last_s = now_s
        self._rate = self._rate * math.exp(-self._since_last(now_s)) + 1 / DRAIN_MEMORY_S
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """The rate now: 0 before the first measurement, and towards 0 again while nothing becomes free."""
        if math.isnan(self._first_s):
            return 0.0
        seen_s = max(now_s - self._first_s, RETRY_AFTER_MIN_S)
        of_memory = 1 - math.exp(-seen_s / DRAIN_MEMORY_S)
        return self._rate * math.exp(-self._since_last(now_s)) / of_memory

    def _since_last(self, now_s: float) -> float:
        return max(0.0, now_s - self._last_s) / DRAIN_MEMORY_S


class Admission:
    """The door of one gateway. `in_flight` counts those inside, never more than `in_flight_max`."""

    def __init__(self, in_flight_max: int) -> None:
        self.in_flight_max = in_flight_max
        self.in_flight = 0
        self._drain = DrainRate()
        self._promised_s = -math.inf

    def enter(self, prefill: int, decode: int, now_s: float) -> None:
        """Let one request in, or raise `NoWorkers` or `CapacityError`. `prefill` and `decode` count the ready workers."""
        missing = [kind for kind, ready in (("prefill", prefill), ("decode", decode)) if not ready]
        if missing:
            raise NoWorkers(f"No {' and no '.join(missing)} worker is ready.", retry_after_s=NO_WORKERS_RETRY_S)
        if self.in_flight >= self.in_flight_max:
            raise CapacityError(
                f"This gateway works on {self.in_flight} requests, as many as it takes.",
                retry_after_s=self.wait_s(now_s),
            )
        self.in_flight += 1

    def leave(self, now_s: float, *, drained: bool) -> None:
        """One that was let in has ended. `drained`: it had reached the queue, so its end says how fast the fleet is."""
        assert self.in_flight > 0
        self.in_flight -= 1
        if drained:
            self._drain.freed(now_s)

    def wait_s(self, now_s: float) -> float:
        """When to come back, for one that is refused now: the next place that nobody was promised."""
        rate = self._drain.per_s(now_s)
        place_s = 1 / rate if rate * RETRY_AFTER_MAX_S > 1 else RETRY_AFTER_MAX_S
        self._promised_s = min(max(now_s, self._promised_s) + place_s, now_s + RETRY_AFTER_MAX_S)
        return max(RETRY_AFTER_MIN_S, self._promised_s - now_s)
