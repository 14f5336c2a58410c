"""Which prefill workers are warm for a creator, as this gateway hears it.

Workers say it on `cache.evicted.<worker>` and `cache.warm.<worker>`; what a gateway makes of it is `pipeline.protocol.warm_view`.
Nobody has to have said anything since we began: the digest in a worker's presence shows that we lack it, and we ask.
"""

import asyncio
from collections.abc import Callable

import msgspec

from pipeline.bus.connection import Bus, Message, Subscription
from pipeline.bus.errors import Disconnected
from pipeline.limits import PRESENCE_PERIOD_S
from pipeline.protocol import subjects
from pipeline.protocol.presence import Presences
from pipeline.protocol.warm_messages import warm_decoder
from pipeline.protocol.warm_view import WarmView, key_of
from pipeline.telemetry import logs

log = logs.get("warm")


class Warm:
    """One gateway's view. `presences` are fed by somebody else; `clock` is theirs, in seconds."""

    def __init__(self, bus: Bus, presences: Presences, clock: Callable[[], float]) -> None:
        self._bus, self._presences, self._clock = bus, presences, clock
        self._view = WarmView()
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Listen from now on."""
        for subject in (subjects.cache_evicted("*"), subjects.cache_warm("*")):
            self._subscriptions.append(await self._bus.subscribe(subject, self._heard))

    async def run(self) -> None:
        """Compare with what workers say of themselves, and ask where it differs; until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(PRESENCE_PERIOD_S / 2)

    async def stop(self) -> None:
        """Listen no more."""
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()

    def warm(self, creator: str) -> set[str]:
        """The live workers whose engine holds the shared prefix of a creator (a subject token)."""
        return self._view.warm(key_of(creator))

    def is_warm(self, creator: str, worker: str) -> bool:
        """Whether that worker's does: of constant cost, however many there are."""
        return self._view.is_warm(key_of(creator), worker)

    def look(self) -> None:
        """One comparison."""
        now_s = self._clock()
        live = self._presences.live("prefill", now_s)
        self._view.keep({peer.id for peer in live})
        for peer in live:
            self._view.presence(peer.id, peer.epoch, peer.warm_number, peer.warm_digest)
        for worker in self._view.asks(now_s):
            try:
                self._bus.post(subjects.cache_ask(worker), b"")
            except Disconnected:
                return

    def _heard(self, message: Message) -> None:
        try:
            self._view.heard(warm_decoder.decode(message.data))
        except msgspec.MsgspecError as error:  # a process of another version: what it says does not count here
            log.warning("warmth_unreadable", subject=message.subject, error=str(error))
