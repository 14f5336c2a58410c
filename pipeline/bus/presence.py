"""Saying that we live, and hearing who else does.

Core NATS, several times a second: a lost word costs one period. What it means is decided in `pipeline.protocol.presence`.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from pipeline import outside
from pipeline.bus.background import Background, handler_failed
from pipeline.bus.connection import Bus, Message, Subscription
from pipeline.bus.errors import Disconnected
from pipeline.limits import PRESENCE_PERIOD_S
from pipeline.protocol import subjects
from pipeline.protocol.messages import Presence, encode, presence_decoder
from pipeline.protocol.presence import Presences
from pipeline.telemetry import logs

ALL: Final = "presence.>"

UNREAD_SAID_MAX: Final = 64
"""Processes of other versions that are named: more are a fleet of them."""

_log = logs.get("bus")


class Announcer:
    """Publishes what `make` says of this process, every `period_s`, and whenever something has changed.

    Also as soon as a lost connection is back: who was taken for gone has to be heard before what it publishes is.
    """

    def __init__(self, bus: Bus, make: Callable[[], Presence], period_s: float = PRESENCE_PERIOD_S) -> None:
        self._bus = bus
        self._make = make
        self._period_s = period_s
        self._task: Background | None = None
        self._undo: Callable[[], None] | None = None

    async def start(self) -> None:
        """Say it from now on."""
        self._undo = self._bus.on_reconnect(self.now)
        self._task = Background(self._announce(), "presence")

    async def stop(self) -> None:
        """Say it no more. Others notice by the silence, or by a last `now()` that says `draining`."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._task is not None:
            await self._task.stop()
            self._task = None

    def now(self) -> None:
        """Say it at once. Without a connection, nothing is said."""
        try:
            presence = msgspec.structs.replace(self._make(), unix_s=outside.unix_s())
            self._bus.post(subjects.presence(presence.role, presence.id), encode(presence))
        except Disconnected:
            return
        except Exception as error:  # a process that fails to say how it is must not fall silent for good
            handler_failed("presence", error)

    async def _announce(self) -> None:
        while True:
            self.now()
            await asyncio.sleep(self._period_s)


class Watcher:
    """Feeds `presences` with what every process says. `clock` is in seconds, monotonic."""

    def __init__(self, bus: Bus, presences: Presences, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._presences = presences
        self._clock = clock
        self._subscription: Subscription | None = None
        self._unread: set[str] = set()
        """Whose words cannot be read, as was said: once, and not five times a second."""

    async def start(self) -> None:
        """Listen; returns when the broker knows."""
        self._subscription = await self._bus.subscribe(ALL, self._heard)
        await self._bus.barrier()

    async def stop(self) -> None:
        """Listen no more."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def _heard(self, message: Message) -> None:
        try:
            presence = presence_decoder.decode(message.data)
        except msgspec.MsgspecError as error:  # a process of another version; it does not count as live here
            if message.subject not in self._unread and len(self._unread) < UNREAD_SAID_MAX:
                self._unread.add(message.subject)
                _log.warning("presence_unreadable", subject=message.subject, error=str(error))
            return
        self._presences.heard(presence, self._clock())
