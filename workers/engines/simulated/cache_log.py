"""The simulated engine's cache events: numbered, kept for a while, and as unreliable on their way as a test wants them."""

import asyncio
import random
from collections import deque

import msgspec

from pipeline.limits import CACHE_BATCHES_KEPT, CACHE_BATCHES_UNREAD
from pipeline.protocol.warmth import Batch, Event


class CacheFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the batches that are lost, come twice, or are overtaken by the next. Repeated ones always come."""

    lost: float = 0.0
    twice: float = 0.0
    overtaken: float = 0.0


class CacheLog:
    """Implements `workers.engines.port.CacheEvents`. Nothing here waits for a reader: what is unread for too long is dropped."""

    def __init__(self, faults: CacheFaults, seed: int) -> None:
        self._faults = faults
        self._chance = random.Random(f"{seed}/cache events")
        self._number = 0
        self._kept: deque[Batch] = deque(maxlen=CACHE_BATCHES_KEPT)
        self._unread: deque[Batch] = deque(maxlen=CACHE_BATCHES_UNREAD)
        self._overtaken: Batch | None = None
        self._reader: asyncio.Future[None] | None = None

    def write(self, events: list[Event]) -> None:
        """One step's events."""
        if not events:
            return
        batch = Batch(self._number, events)
        self._number += 1
        self._kept.append(batch)
        self._send(batch)

    async def read(self) -> Batch:
        """See `CacheEvents`."""
        while not self._unread:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._unread.popleft()

    async def replay(self, start: int) -> list[Batch]:
        """See `CacheEvents`. At once."""
        return [batch for batch in self._kept if batch.number >= start]

    def _send(self, batch: Batch) -> None:
        faults, chance = self._faults, self._chance
        if faults.lost and chance.random() < faults.lost:
            return
        late, self._overtaken = self._overtaken, None
        if late is None and faults.overtaken and chance.random() < faults.overtaken:
            self._overtaken = batch
            return
        self._unread.append(batch)
        if faults.twice and chance.random() < faults.twice:
            self._unread.append(batch)
        if late is not None:
            self._unread.append(late)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
