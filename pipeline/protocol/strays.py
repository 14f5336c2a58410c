"""Strays: messages that the broker has delivered and that nobody has claimed, and when their receiver may give them back.

What the broker hands to the pulls of a worker that has just died, or stands still, would wait for the whole of its lease: nobody
who lives knows the ack subject of that delivery. But the receiver knows the sequence under which its request was stored, a
consumer says how far it has delivered, and a NAK is heard from anybody who names a message that is not acked:

    stored ── `STRAY_OVERDUE_S` ──► its consumer is asked ── "delivered", and again a patience later ──► given back, as if stored
       └───── claimed, or over ───► nothing of it is kept

What was claimed before the broker's second answer has been heard before it, on the same connection: so nothing is given back that
anybody has claimed. Whose claim comes afterwards was only slow, and its request is begun twice: patience then doubles, up to
where the lease brings a stray back anyway, and is as at first again once a stray was one.

A consumer cannot say that nobody pulls from it, and what was given back looks delivered, as it was once. So for what is given
back and still not claimed patience doubles as well, from the second time on: what waits for a pool that is down is not given back
three times a second.
"""

from typing import Final

import msgspec

from pipeline.limits import ACK_WAIT_S, STRAY_ASK_PERIOD_S, STRAY_ASKS_MAX, STRAY_OVERDUE_S, STRAY_PATIENCE_S
from pipeline.protocol.subjects import parse_ack

STRAY_DOUBLED_MAX: Final = 5
"""How often patience doubles for what is given back again and again: to 6 s from the shortest. A lease has ended long before."""


class Queued(msgspec.Struct, frozen=True):
    """Where a request is stored: `consumer` is `<stream>.<consumer>`, as subjects name it."""

    consumer: str
    sequence: int


class Ask(msgspec.Struct, frozen=True):
    """A question to a consumer, how far it has delivered. `number` tells it from earlier ones."""

    consumer: str
    number: int


class _Waiting(msgspec.Struct):
    sequence: int
    from_s: float
    first: bool
    """Nobody has ever claimed it."""
    seen_s: float | None = None
    """When its consumer was asked who first said that it was delivered."""
    returned: int = 0
    """How often it was given back."""


class _Asked(msgspec.Struct):
    number: int
    at_s: float
    answered: bool = False


class Strays:
    """One receiver's requests that nobody works on. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self.patience_s = STRAY_PATIENCE_S
        self._waiting: dict[str, dict[str, _Waiting]] = {}
        """By consumer and request, in the order of `from_s`."""
        self._consumers: dict[str, str] = {}
        self._asked: dict[str, _Asked] = {}
        self._trusted_from_s = 0.0
        self._number = 0

    @property
    def of_the_dead(self) -> list[str]:
        """Requests that were given back on behalf of who had claimed them."""
        return [name for here in self._waiting.values() for name, waiting in here.items() if not waiting.first]

    def __len__(self) -> int:
        return len(self._consumers)

    def waits(self, request: str, queued: Queued, now_s: float, *, first: bool = True) -> None:
        """It lies in the queue: it has just been stored, or given back on behalf of who has claimed it."""
        self.forget(request)
        self._consumers[request] = queued.consumer
        self._waiting.setdefault(queued.consumer, {})[request] = _Waiting(queued.sequence, now_s, first)

    def claimed(self, request: str, ack: str) -> None:
        """Somebody works on it, under the delivery that this is the ack subject of."""
        waiting = self.forget(request)
        if waiting is None or not waiting.returned:
            return
        was_slow = waiting.first and parse_ack(ack).delivered == 1
        self.patience_s = min(2 * self.patience_s, ACK_WAIT_S) if was_slow else STRAY_PATIENCE_S

    def forget(self, request: str) -> _Waiting | None:
        """It is worked on, or over."""
        consumer = self._consumers.pop(request, None)
        if consumer is None:
            return None
        here = self._waiting[consumer]
        waiting = here.pop(request)
        if not here:
            del self._waiting[consumer]
            self._asked.pop(consumer, None)
        return waiting

    def distrust(self, now_s: float) -> None:
        """The connection was lost, and claims with it: they are repeated, and have time for it."""
        self._trusted_from_s = now_s

    def asks(self, now_s: float) -> list[Ask]:
        """Which consumers to ask now: those with overdue requests, and of too many those that were not asked for longest."""
        due = [consumer for consumer, here in self._waiting.items() if self._is_due(consumer, here, now_s)]
        due.sort(key=lambda consumer: self._asked[consumer].at_s if consumer in self._asked else 0.0)
        return [self._ask(consumer, now_s) for consumer in due[:STRAY_ASKS_MAX]]

    def told(self, ask: Ask, delivered: int) -> list[Queued]:
        """The consumer's answer: the newest sequence that it has delivered. Returns what to give back."""
        asked = self._asked.get(ask.consumer)
        if asked is None or asked.answered or asked.number != ask.number:
            return []
        asked.answered = True
        strays: list[Queued] = []
        here = self._waiting[ask.consumer]
        for request, waiting in list(here.items()):
            if waiting.sequence <= delivered and asked.at_s > waiting.from_s and self._is_stray(waiting, asked.at_s):
                strays.append(Queued(ask.consumer, waiting.sequence))
                del here[request]
                here[request] = _Waiting(waiting.sequence, asked.at_s, waiting.first, returned=waiting.returned + 1)
        return strays

    def _is_due(self, consumer: str, here: dict[str, _Waiting], now_s: float) -> bool:
        if now_s - next(iter(here.values())).from_s < STRAY_OVERDUE_S:
            return False
        asked = self._asked.get(consumer)
        return asked is None or now_s - asked.at_s >= (STRAY_ASK_PERIOD_S if asked.answered else ACK_WAIT_S)

    def _ask(self, consumer: str, now_s: float) -> Ask:
        self._number += 1
        self._asked[consumer] = _Asked(self._number, now_s)
        return Ask(consumer, self._number)

    def _is_stray(self, waiting: _Waiting, asked_s: float) -> bool:
        if waiting.seen_s is None:
            waiting.seen_s = asked_s
        patience_s = self.patience_s * (1 << min(max(0, waiting.returned - 1), STRAY_DOUBLED_MAX))
        return asked_s - max(waiting.seen_s, self._trusted_from_s) >= patience_s
