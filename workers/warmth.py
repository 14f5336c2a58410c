"""What this prefill worker's engine has in its cache, and telling gateways of it.

    engine's cache events ─► index ─► who is warm ─► `cache.evicted.<worker>`, `cache.warm.<worker>`, and a digest in presence
                               └────► how much of a prompt the engine will find

What it means is decided in `pipeline.protocol.warmth` and `warm_view`. An engine without events (None) has nobody warm.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import msgspec

from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.errors import EngineFailed
from pipeline.limits import WARM_SNAPSHOT_PERIOD_S, WARM_SNAPSHOT_SPARE_S, WARM_TELL_PERIOD_S
from pipeline.protocol import subjects
from pipeline.protocol.messages import encode
from pipeline.protocol.prefixes import Prefixes
from pipeline.protocol.warm_view import Teller
from pipeline.protocol.warmth import Index
from pipeline.telemetry import logs, metrics
from workers.engines.port import CacheEvents, Engine, Prefilled
from workers.identity import Identity

UNREADABLE_PAUSE_S: Final = 1.0
"""After events that we cannot read: another vLLM than the one we know."""

log = logs.get("warmth")


class WatchedPrefixes(Prefixes):
    """What the prompts of creators share, and the index knows it, too."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self._index = index

    def seen(self, creator: str, salt: str, ids: bytes) -> None:
        """A prompt of this creator (a subject token) has been rendered, or its prefix was warmed up."""
        super().seen(creator, salt, ids)
        shared = self.of(creator)
        self._index.shares(creator, shared.salt, shared.ids)


class Warmth:
    """One worker's. `prefixes` is to be told of every prompt."""

    def __init__(self, bus: Bus, engine: Engine, me: Identity, clock: Callable[[], float]) -> None:
        self.index = Index(engine.info.block_size, engine.info.kv_blocks)
        self.prefixes = WatchedPrefixes(self.index)
        self.teller = Teller(me.id, me.epoch)
        self._bus, self._engine, self._me = bus, engine, me
        self._clock = clock
        self._all_said_s = clock()
        self._asked = False
        self._gaps = self._resyncs = 0

    async def listen(self) -> None:
        """Answer gateways from now on."""
        await self._bus.subscribe(subjects.cache_ask(self._me.id), self._ask)

    async def run(self) -> None:
        """Follow the engine, until cancelled."""
        events = self._engine.cache_events()
        if events is None:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, events)
            tasks.start_soon(self._repair, events)
            tasks.start_soon(self._tell)

    def expects(self, salt: str, token_ids: Sequence[int]) -> int:
        """How many leading tokens of a prompt the engine would find in its own cache now."""
        return self.index.cached_tokens(salt, token_ids)

    async def _read(self, events: CacheEvents) -> None:
        while True:
            try:
                batch = await events.read()
            except msgspec.MsgspecError as error:
                log.warning("cache_events_unreadable", error=str(error))
                await anyio.sleep(UNREADABLE_PAUSE_S)
                continue
            self.index.heard(batch, self._clock())

    async def _repair(self, events: CacheEvents) -> None:
        while True:
            await anyio.sleep(WARM_TELL_PERIOD_S / 2)
            start = self.index.wanted(self._clock())
            if start is None:
                continue
            try:
                batches = await events.replay(start)
            except (EngineFailed, msgspec.MsgspecError) as error:
                log.warning("cache_events_not_repeated", error=str(error))
                continue
            self.index.replayed(batches, self._clock())

    async def _tell(self) -> None:
        while True:
            await anyio.sleep(WARM_TELL_PERIOD_S)
            change = self.teller.change(self.index.warm)
            if change is not None:
                where = subjects.cache_evicted if change.lost else subjects.cache_warm
                self._post(where(self._me.id), encode(change))
            since_s = self._clock() - self._all_said_s
            if since_s > (WARM_SNAPSHOT_SPARE_S if self._asked else WARM_SNAPSHOT_PERIOD_S):
                self._all_said_s, self._asked = self._clock(), False
                self._post(subjects.cache_warm(self._me.id), encode(self.teller.all()))
            self._measure()

    def _ask(self, _: Message) -> None:
        """A gateway wants to know all: it is said to all of them, soon, once."""
        self._asked = True

    def _post(self, subject: str, data: bytes) -> None:
        """Lost without a connection: the digest in our presence shows it."""
        with contextlib.suppress(BusError):
            self._bus.post(subject, data)

    def _measure(self) -> None:
        index = self.index
        metrics.WARM_CREATORS.set(len(index.warm))
        metrics.CACHE_BLOCKS.set(len(index))
        metrics.CACHE_EVENT_GAPS.inc(index.gaps - self._gaps)
        metrics.CACHE_EVENT_RESYNCS.inc(index.resyncs - self._resyncs)
        self._gaps, self._resyncs = index.gaps, index.resyncs


def count_tokens(prefilled: Prefilled, prompt_tokens: int) -> None:
    """A prompt has been read: where its tokens came from."""
    metrics.PREFILL_PROMPT_TOKENS.inc(prompt_tokens)
    metrics.PREFILL_CACHED_TOKENS.inc(prefilled.cached_tokens)
    metrics.PREFILL_GENERATED_TOKENS.inc(prefilled.generated_tokens)
    lmcache = prefilled.cached_tokens - prefilled.hbm_tokens
    metrics.PREFILL_TOKENS.labels(source="hbm").inc(prefilled.hbm_tokens)
    metrics.PREFILL_TOKENS.labels(source="lmcache").inc(lmcache)
    metrics.PREFILL_TOKENS.labels(source="none").inc(max(0, prompt_tokens - prefilled.cached_tokens))
