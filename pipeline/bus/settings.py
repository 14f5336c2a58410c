"""The configuration of one process as it is now: what it was started with, under what operators have set since.

Every process that has live settings follows the bucket `settings`. What cannot be read, or makes no sense here, changes nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import anyio

from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.bus.kv import Bucket
from pipeline.config import Config, flat, with_live
from pipeline.limits import SETTINGS_AGAIN_S, SETTINGS_RELOAD_S
from pipeline.protocol import settings
from pipeline.telemetry import logs

Apply = Callable[[Config], None]

_log: Final = logs.get("settings")


class Settings:
    """`now` is the configuration, `version` the state of the bucket that it goes back to: 0 before it was read."""

    def __init__(self, bus: Bus, started: Config) -> None:
        self.now = started
        self.version = 0
        self._bus = bus
        self._started = started
        self._bucket = Bucket(bus, settings.BUCKET)
        self._apply: list[Apply] = []
        self._wake = asyncio.Event()
        self._again = False
        self._said = ""
        """What was said last of a bucket that could not be read, or understood: once, and not at every look."""

    def apply_to(self, apply: Apply) -> None:
        """Call `apply` with the configuration as it is now, and as each change leaves it."""
        self._apply.append(apply)
        apply(self.now)

    async def start(self) -> None:
        """Follow the bucket, and read it. A broker without one changes nothing, and is asked again."""
        await self._bucket.follow(self._heard)
        self._bus.on_reconnect(self._wake.set)
        await self._refresh()

    async def run(self) -> None:
        """Keep up with the bucket, until cancelled."""
        while True:
            again, self._again = self._again, False
            with anyio.move_on_after(SETTINGS_AGAIN_S if again else SETTINGS_RELOAD_S):
                await self._wake.wait()
            self._wake.clear()
            await self._refresh()

    def _heard(self, _: str) -> None:
        self._again = True
        self._wake.set()

    async def _refresh(self) -> None:
        try:
            version = await self._bucket.version()
            if version == self.version:
                return
            entries = await self._bucket.load()
        except BusError as error:
            self._say("settings_unread", str(error))
            return
        found, wrong = settings.readable((key, entry.value) for key, entry in entries.items())
        live, contradicting = settings.usable(flat(self._started), found)
        self._say("settings_not_understood", "; ".join([*wrong, *contradicting]))
        self._take(with_live(self._started, live), live)
        self.version = version

    def _take(self, config: Config, live: dict[str, settings.Number]) -> None:
        if config == self.now:
            return
        self.now = config
        _log.info("settings_changed", at=outside.unix_s(), **{key.replace(".", "_"): live[key] for key in live})
        for apply in self._apply:
            apply(config)

    def _say(self, event: str, problem: str) -> None:
        if problem and problem != self._said:
            _log.warning(event, problem=problem)
        self._said = problem
