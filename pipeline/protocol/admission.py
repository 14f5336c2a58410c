"""Whether a gateway takes one more request, and how long a refused one should wait.

Three bounds: the requests in flight at this gateway, the presence of workers of both kinds, and, while no prefill worker has a
free slot, the time that a request has: one that would wait for longer than it may take is refused at once, since by the time
it is served nobody wants it any more, and the work on it would be missing elsewhere. Everything beyond them is decided where
the room is: by the queue (a creator's share), and by the decode workers (credits).

Each class is a line of its own: an interactive request does not wait for the batch before it, and batch not as long as all that
is served would let it hope. Of the places some are never batch's (`classes.py`).

The wait is honest. Places become free at a rate that is measured: an average over the last `DRAIN_MEMORY_S` that forgets
exponentially. Each refused request is promised the next place that nobody was promised before:

    wait = max(0, promised - now) + 1 / rate        promised = now + wait        Retry-After = wait, within its bounds

so a crowd that is turned away comes back spread over the time that its places need, and not all at once.
"""

import math
from typing import Final

from pipeline.errors import CapacityError, NoWorkers
from pipeline.protocol.classes import BATCH, INTERACTIVE, WEIGHTS

DRAIN_MEMORY_S: Final = 10.0
"""Time constant of the drain rate: some hundred interactive replies, and soon enough to notice a dead pool."""

RETRY_AFTER_MIN_S: Final = 1.0
"""HTTP counts seconds, and a client that comes back sooner only adds load."""

RETRY_AFTER_MAX_S: Final = 30.0
"""A longer promise is not believed: the OpenAI SDK stops retrying at 120 s, and people before."""

SATURATED_HELD_S: Final = 2.0
"""A slot that is free for a moment ends no saturated time. An engine that reads a prompt finishes no reply meanwhile: the slots
are taken during its long steps, and replies end between them. Longer than such a step."""

RETRY_UNMEASURED_S: Final = 2.0
"""Where nothing is measured: no worker is ready (one whose presence was missed is back sooner), or no place was freed yet."""


class DrainRate:
    """Places that become free per second, measured where they do. What is older than `memory_s` hardly counts."""

    def __init__(self, memory_s: float = DRAIN_MEMORY_S) -> None:
        self._memory_s = memory_s
        self._rate = 0.0
        self._first_s = -math.inf
        self._last_s = -math.inf

    @property
    def measured(self) -> bool:
        """Whether any place has become free so far."""
        return self._last_s > -math.inf

    def freed(self, now_s: float) -> None:
        """One place has become free."""
        if not self.measured:
            self._first_s = self._last_s = now_s
        self._rate = self._faded(now_s) + 1 / self._memory_s
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """The rate now, once it is measured; it goes towards 0 while nothing becomes free."""
        seen_s = max(now_s - self._first_s, RETRY_AFTER_MIN_S)
        return self._faded(now_s) / (1 - math.exp(-seen_s / self._memory_s))

    def _faded(self, now_s: float) -> float:
        return self._rate * math.exp(-max(0.0, now_s - self._last_s) / self._memory_s)


class Waits:
    """How long those are told to wait who find no place: each is promised the next one that nobody was promised before."""

    def __init__(self) -> None:
        self._drain = DrainRate()
        self._promised_s = -math.inf

    def freed(self, now_s: float) -> None:
        """A place has become free."""
        self._drain.freed(now_s)

    def wait_s(self, now_s: float) -> float:
        """When to come back, for one that is refused now."""
        if not self._drain.measured:
            return RETRY_UNMEASURED_S
        place_s = 1 / max(self._drain.per_s(now_s), 1 / RETRY_AFTER_MAX_S)
        wait_s = min(max(0.0, self._promised_s - now_s) + place_s, RETRY_AFTER_MAX_S)
        self._promised_s = now_s + wait_s
        return max(wait_s, RETRY_AFTER_MIN_S)


class Line:
    """One class's requests inside, and how fast they are served while there are more than the fleet can work on."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._served = DrainRate()
        """Replies per second of saturated time alone: at other times the rate says what was asked for, not what can be done."""
        self._saturated = False
        self._counts_until_s = -math.inf
        self._saturated_s = 0.0
        self._looked_s = math.inf

    def look(self, now_s: float, saturated: bool | None = None) -> None:
        """Let the clock run that counts saturated time alone. None: it is as it was."""
        self._saturated_s += max(0.0, min(now_s, self._counts_until_s) - self._looked_s)
        self._looked_s = now_s
        if saturated:
            self._counts_until_s = math.inf
        elif self._saturated and saturated is not None:
            self._counts_until_s = now_s + SATURATED_HELD_S
        self._saturated = self._saturated if saturated is None else saturated

    def served(self) -> None:
        """A reply is whole."""
        if self._looked_s <= self._counts_until_s:
            self._served.freed(self._saturated_s)

    def expected_s(self, requests: int) -> float:
        """How long so many more would take: all that are inside, at the rate of a fleet that does what it can."""
        if not self._saturated or not self._served.measured:
            return 0.0
        return (self.in_flight + requests) / self._served.per_s(self._saturated_s)


class Admission:
    """The door of one gateway. `in_flight` counts those inside, never more than `in_flight_max`."""

    def __init__(self, in_flight_max: int) -> None:
        self.in_flight_max = in_flight_max
        self.weights = WEIGHTS
        self._waits = Waits()
        self._lines = {INTERACTIVE: Line(), BATCH: Line()}

    @property
    def in_flight(self) -> int:
        """Requests inside, of both classes."""
        return sum(line.in_flight for line in self._lines.values())

    def look_in(self, now_s: float, requests: int = 1) -> None:
        """Raise `CapacityError` where so many places are not free: what `enter` would say, before a body is read for it."""
        if self.in_flight + requests > self.in_flight_max:
            raise CapacityError(
                f"This gateway works on {self.in_flight} requests, as many as it takes (gateway.in_flight_max).",
                retry_after_s=self.wait_s(now_s),
            )

    def enter(
        self,
        prefill: int,
        decode: int,
        now_s: float,
        *,
        saturated: bool = False,
        timeout_s: float = math.inf,
        requests: int = 1,
        klass: str = INTERACTIVE,
    ) -> None:
        """Let `requests` in, or raise `NoWorkers` or `CapacityError`. `prefill` and `decode` count the ready workers.

        `saturated`: no prefill worker has a free slot for their class. `timeout_s` is the time that the request has.
        """
        line = self._lines[klass]
        line.look(now_s, saturated)
        missing = [kind for kind, ready in (("prefill", prefill), ("decode", decode)) if not ready]
        if missing:
            raise NoWorkers(f"No {' and no '.join(missing)} worker is ready.", retry_after_s=RETRY_UNMEASURED_S)
        self.look_in(now_s, requests)
        if klass == BATCH and line.in_flight + requests > (most := self.weights.most(self.in_flight_max)):
            raise CapacityError(
                f"This gateway works on {line.in_flight} batch requests, and takes {most}: the other places are for "
                "interactive ones (gateway.in_flight_max, classes.decode_room).",
                retry_after_s=self.wait_s(now_s),
            )
        if (wait_s := line.expected_s(requests)) > timeout_s:
            raise CapacityError(
                f"A request would take about {wait_s:.0f} s now, and this one has {timeout_s:g} s.",
                retry_after_s=self.wait_s(now_s),
            )
        line.in_flight += requests

    def leave(self, now_s: float, *, drained: bool, served: bool = False, klass: str = INTERACTIVE) -> None:
        """One that was let in has ended. `drained`: it had reached the queue. `served`: its reply is whole."""
        line = self._lines[klass]
        assert line.in_flight > 0
        line.in_flight -= 1
        line.look(now_s)
        if drained:
            self._waits.freed(now_s)
        if served:
            line.served()

    def wait_s(self, now_s: float) -> float:
        """When to come back, for one that is refused now."""
        return self._waits.wait_s(now_s)
