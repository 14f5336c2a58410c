"""Which workers say that they are ready: the presences on the bus, as the supervisor hears them.

A process that is started again keeps its id and gets a new epoch. What its predecessor said last must not count for it, so the
question is always asked with the epoch that was known before the start.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec

from pipeline.bus.client import Message
from pipeline.bus.connection import Bus
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import Presences


class Roster:
    """The presences heard so far."""

    def __init__(self) -> None:
        self._presences = Presences()
        self._decoder = msgspec.msgpack.Decoder(Presence)

    def hear(self, message: Message) -> None:
        """A message on `presence.>`. What is no presence is ignored: its sender's tests are not ours."""
        try:
            self._presences.heard(self._decoder.decode(message.data), time.monotonic())
        except msgspec.DecodeError:
            return

    def epoch(self, role: str, process: str) -> str | None:
        """The epoch of a live process."""
        presence = self._presences.get(role, process, time.monotonic())
        return presence.epoch if presence else None

    def ready(self, role: str, process: str, unless_epoch: str | None) -> bool:
        """Whether the process takes work now, and is not the one of `unless_epoch`."""
        presence = self._presences.get(role, process, time.monotonic())
        return presence is not None and presence.epoch != unless_epoch and presence.takes


@asynccontextmanager
async def listening(url: str, connect_timeout_s: float) -> AsyncIterator[Roster]:
    """A roster that hears the bus for as long as the block runs. The broker answers already."""
    roster = Roster()
    bus = await Bus.connect(url, name="headrace-up", connect_timeout_s=connect_timeout_s)
    try:
        await bus.subscribe("presence.>", roster.hear)
        yield roster
    finally:
        with anyio.CancelScope(shield=True):  # the broker ends soon after us: what is not closed would try to reconnect
            await bus.close()
