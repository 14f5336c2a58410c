"""Lease keeping for every message that this process holds.

One loop renews them all, with `+WPI` sent as a request whose answers come to one inbox: an answer proves that the broker has
heard us. Keeping a lease ends in one of three ways:

    let go      its holder is done with the message
    in doubt    the broker has been silent on it for too long
    overdue     its time is up: whoever still holds it is stuck

In the last two the holder is told, once: the message may be with another now. It holds anew when the receiver has confirmed
its claim; until then nothing more is said about the message.
"""

import contextlib
from collections.abc import Callable
from typing import Final, Protocol

import anyio
import msgspec

from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.protocol.claims import Lease, LeaseState

PERIOD_S: Final = 0.05

Told = Callable[[], None]
"""Tells a holder that its lease is in doubt. Must not raise."""


class Leases(Protocol):
    """Whatever keeps leases for the jobs of a worker."""

    def hold(self, ack: str, in_doubt: Told, until_s: float) -> str:
        """Keep the lease of the message with this ack subject, at most until then (monotonic). Returns a name for `let_go`."""

    def let_go(self, name: str) -> None:
        """Renew it no more. Letting go twice is harmless."""

    async def run(self) -> None:
        """Keep until cancelled."""


class _Held(msgspec.Struct):
    ack: str
    lease: Lease
    in_doubt: Told
    until_s: float


class LeaseKeeper:
    """Keeps leases on the event loop that it runs in. How many is bounded by slots, or by blocks."""

    def __init__(self, bus: Bus, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._inbox = bus.inbox()
        self._count = 0

    def hold(self, ack: str, in_doubt: Told, until_s: float) -> str:
        """See `Leases`."""
        self._count += 1
        name = str(self._count)
        self.keep(name, ack, in_doubt, until_s)
        return name

    def keep(self, name: str, ack: str, in_doubt: Told, until_s: float) -> None:
        """As `hold`, under a name of the caller's, which is one subject token."""
        self._held[name] = _Held(ack, Lease(self._clock()), in_doubt, until_s)

    def let_go(self, name: str) -> None:
        """See `Leases`."""
        self._held.pop(name, None)

    def end_all(self) -> None:
        """Keep nothing more of what is held now, and tell every holder."""
        for name in list(self._held):
            self._end(name)

    async def run(self) -> None:
        """Renew until cancelled."""
        await self._bus.subscribe(f"{self._inbox}.*.*", self._answered)
        while True:
            self._renew(self._clock())
            await anyio.sleep(PERIOD_S)

    def _renew(self, now_s: float) -> None:
        for name, held in list(self._held.items()):
            if now_s >= held.until_s or held.lease.state(now_s) is LeaseState.DOUBTFUL:
                self._end(name)
            elif held.lease.due(now_s):
                self._ask(held.ack, name, now_s)

    def _ask(self, ack: str, name: str, now_s: float) -> None:
        """`+WPI` with a reply subject: the broker answers it. What cannot be sent stays unanswered, which is all that counts.

        The subject says when it was asked, in microseconds: an answer proves no more than that.
        """
        with contextlib.suppress(BusError):
            self._bus.post(ack, b"+WPI", f"{self._inbox}.{name}.{int(now_s * 1e6)}")

    def _end(self, name: str) -> None:
        self._held.pop(name).in_doubt()

    def _answered(self, message: Message) -> None:
        """An answer with headers says that nobody listens: the consumer is not up yet, and has heard nothing."""
        _, name, asked_us = message.subject.rsplit(".", 2)
        held = self._held.get(name)
        if held is not None and not message.headers:
            held.lease.answered(int(asked_us) / 1e6)
