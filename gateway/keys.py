"""Who asks: the bearer keys of the configuration, followed while we run, and what their requests hold.

The file is looked at, once a second, rather than waited for with a signal: a changed file is what every way of deploying one has
in common (a mounted secret has nobody who would send SIGHUP), and all gateways follow it alike. A file that cannot be read as a
whole changes nothing, and neither does one without any key: a file that is just being written must not open the door.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pipeline.config import load
from pipeline.errors import OperatorError
from pipeline.limits import KEYS_RELOAD_S
from pipeline.protocol.keys import Key, Keyring
from pipeline.protocol.presence import Presences
from pipeline.protocol.shares import Others, Place, Shares
from pipeline.telemetry import logs

_FRESH_S: Final = 0.05
"""What others use is added up once for all requests of this long: half of the time between their words."""

Stamp = tuple[int, int, int]
"""Of a file: when it was written, its size, and which it is. One of them differs where it was changed."""

log = logs.get("gateway")


class Guests:
    """The keys that are good now, and the places that requests hold. `source` is the file that the keys came from."""

    def __init__(
        self,
        ring: Keyring,
        shares: Shares,
        presences: Presences,
        process: str,
        clock: Callable[[], float],
        source: Path | None = None,
    ) -> None:
        self.ring = ring
        self.shares = shares
        self._presences, self._process, self._clock = presences, process, clock
        self._source = source
        self._stamp = stamp_of(source) if source else None
        self._others, self._others_s = Others(), -math.inf

    def who(self, headers: Mapping[bytes, bytes]) -> Key | None:
        """Whose key a request has; None where none is needed. Raises `KeyUnknown`."""
        return self.ring.find(headers.get(b"authorization", b"").decode("latin-1"))

    def place(self, key: Key | None) -> Place:
        """A place for a request. Raises `KeyBusy`."""
        return self.shares.arrive(key, self._elsewhere(), self._clock())

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while self._source is not None:
            await asyncio.sleep(KEYS_RELOAD_S)
            await self.look(self._source)

    async def look(self, source: Path) -> None:
        """Take over what has changed in the file."""
        stamp = await asyncio.to_thread(stamp_of, source)
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            config = await asyncio.to_thread(load, source)
            self._take(Keyring(config.gateway.keys))
        except OperatorError as error:
            log.warning("keys_unread", error=str(error))

    def _take(self, ring: Keyring) -> None:
        if ring.keys == self.ring.keys:
            return
        if not ring:
            log.warning("keys_kept", reason="The file has no key any more; to serve without keys, start again.")
            return
        self.ring = ring
        self.shares.keep(ring.keys)
        log.info("keys_reloaded", keys=len(ring.keys))

    def _elsewhere(self) -> Others:
        now_s = self._clock()
        if now_s - self._others_s > _FRESH_S:
            self._others = Others.among(self._presences.live("gateway", now_s), self._process)
            self._others_s = now_s
        return self._others


def stamp_of(source: Path) -> Stamp | None:
    """The state of a file; None while there is none, as in the middle of its replacement."""
    try:
        found = source.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
