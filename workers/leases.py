"""Lease keeping for every message that this process holds.

One loop renews them all, with `+WPI` sent as a request whose answers come to one inbox: an answer proves that the broker has
heard us. A lease that the broker has been silent on for too long is in doubt, which its holder is told once per doubt.
"""

import contextlib
from collections.abc import Callable
from typing import Final

import anyio
import msgspec

from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.protocol.claims import Lease, LeaseState

PERIOD_S: Final = 0.05


class _Held(msgspec.Struct):
    ack: str
    lease: Lease
    in_doubt: Callable[[], None]
    doubtful: bool = False
    sent_s: float = 0.0


class LeaseKeeper:
    """Holds leases by name until they are let go."""

    def __init__(self, bus: Bus, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._inbox = bus.inbox()
        self._count = 0

    def hold(self, ack: str, in_doubt: Callable[[], None]) -> str:
        """Keep the lease of the message with this ack subject. Returns a name for `let_go`."""
        self._count += 1
        name = str(self._count)
        self._held[name] = _Held(ack, Lease(self._clock()), in_doubt)
        return name

    def let_go(self, name: str) -> None:
        """Renew it no more. Letting go twice is harmless."""
        self._held.pop(name, None)

    async def run(self) -> None:
        """Renew until cancelled."""
        await self._bus.subscribe(f"{self._inbox}.*", self._answered)
        while True:
            self._renew(self._clock())
            await anyio.sleep(PERIOD_S)

    def _renew(self, now_s: float) -> None:
        for name, held in list(self._held.items()):
            self._judge(held, now_s)
            if not held.doubtful and held.lease.due(now_s):
                held.sent_s = now_s
                self._ask(held, name)

    def _ask(self, held: _Held, name: str) -> None:
        """`+WPI` with a reply subject: the broker answers it. What cannot be sent stays unanswered, which is all that counts."""
        with contextlib.suppress(BusError):
            self._bus.post(held.ack, b"+WPI", f"{self._inbox}.{name}")

    def _judge(self, held: _Held, now_s: float) -> None:
        doubtful = held.lease.state(now_s) is LeaseState.DOUBTFUL
        if doubtful and not held.doubtful:
            held.in_doubt()
        held.doubtful = doubtful

    def _answered(self, message: Message) -> None:
        held = self._held.get(message.subject.rpartition(".")[2])
        if held is not None:
            held.lease.answered(held.sent_s)
