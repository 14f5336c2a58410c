"""A real prefill engine with a cache too small for its creators, and what its events say of it. Run by `tests.e2e.engines`."""

import asyncio
import random
import time
from typing import Any, Final

import msgspec

from pipeline import outside
from pipeline.config import Config
from pipeline.protocol.messages import pack_ids
from pipeline.protocol.warmth import Batch
from workers.engines.port import CacheEvents
from workers.engines.vllm import VllmEngine, _Usage
from workers.identity import Identity
from workers.warmth import Warmth

PREFIX_TOKENS: Final = 416
CREATORS: Final = ("ada", "bob", "eve")
"""With what follows their prefixes, they need half as much again as the engine has."""
SETTLED_S: Final = 0.1
REPAIRED_S: Final = 1.0


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: what the index expected the engine to find, and what vLLM says it found, in its own cache and in all."""

    creator: str
    prompt_tokens: int
    expected: int
    found: int
    loaded: int
    cached: int


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it all. `lost`: batches of events that did not come, and `repeated` those of them that a replay brought.

    `warm`: who was, after each of `hits`. `left_when_cleared`: tokens believed in wrongly.
    """

    blocks: int
    block_size: int
    hits: list[Hit]
    hits_with_losses: list[Hit]
    lost: int
    repeated: int
    resyncs: int
    whole: bool
    warm: list[list[str]]
    left_when_cleared: int
    event_us_per_block: float
    seconds: float


class Sources(_Usage):
    """Sums up where vLLM says that prompt tokens came from. One request at a time, so the difference is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found = self.loaded = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        super().record(scheduler_stats, iteration_stats, *args, **kwargs)
        if iteration_stats is not None:
            self.found += iteration_stats.prompt_token_stats.local_cache_hit
            self.loaded += iteration_stats.prompt_token_stats.external_kv_transfer


class Lossy:
    """The engine's events. While it `loses`, the next batch does not come."""

    def __init__(self, events: CacheEvents) -> None:
        self.loses = False
        self.lost: set[int] = set()
        self.repeated: set[int] = set()
        self._events = events

    async def read(self) -> Batch:
        batch = await self._events.read()
        if not self.loses:
            return batch
        self.loses = False
        self.lost.add(batch.number)
        return await self._events.read()

    async def replay(self, start: int) -> list[Batch]:
        batches = await self._events.replay(start)
        self.repeated |= self.lost & {batch.number for batch in batches}
        return batches


class Deaf:
    """A bus to nobody."""

    async def subscribe(self, *_: Any) -> None:
        """Nobody says anything."""

    def post(self, *_: Any) -> None:
        """Nobody hears it."""


class _Run:
    def __init__(self, engine: VllmEngine, sources: Sources, warmth: Warmth) -> None:
        self._engine, self._sources, self._warmth = engine, sources, warmth
        self._chance = random.Random(7)
        self._personas = {creator: self._chance.choices(range(100, 40_000), k=PREFIX_TOKENS) for creator in CREATORS}
        self._count = 0

    async def prompt(self, creator: str, settled_s: float) -> Hit:
        """One request of this creator."""
        self._count += 1
        tail = self._chance.choices(range(100, 40_000), k=self._chance.randint(1, 90))
        ids, salt = [*self._personas[creator], *tail], creator.encode().hex()
        self._warmth.prefixes.seen(creator, salt, pack_ids(ids))
        expected, found, loaded = self._warmth.expects(salt, ids), self._sources.found, self._sources.loaded
        done = await self._engine.prefill(f"w{self._count}", ids, salt)
        await asyncio.sleep(settled_s)
        return Hit(
            creator=creator,
            prompt_tokens=len(ids),
            expected=expected,
            found=self._sources.found - found,
            loaded=self._sources.loaded - loaded,
            cached=done.cached_tokens,
        )

    def cached(self, creator: str) -> int:
        """Tokens of a creator's prefix that the index believes in."""
        return self._warmth.expects(creator.encode().hex(), [*self._personas[creator], 1])


async def warmth(model: str, config: Config) -> Seen:
    """Creators in turn, so that each finds less than it had left; then the same while events are lost."""
    began_s = time.monotonic()
    engine, sources = VllmEngine(config, "prefill", model), Sources()
    engine._usage = sources
    try:
        await engine.start()
        await engine.warm_up()
        told = engine.cache_events()
        assert told is not None
        lossy = Lossy(told)
        engine.cache_events = lambda: lossy  # type: ignore[method-assign]
        bus: Any = Deaf()
        edge = Warmth(bus, engine, Identity("p1", "1"), outside.monotonic_s)
        following = asyncio.ensure_future(edge.run())
        await asyncio.sleep(REPAIRED_S)  # what was said before we listened is repeated
        run, hits, warm = _Run(engine, sources, edge), [], []
        for creator in (*CREATORS, *CREATORS, "ada", "ada", "bob", "bob", "eve", "ada", "bob", "eve", "eve"):
            hits.append(await run.prompt(creator, SETTLED_S))
            warm.append(sorted(edge.index.warm))
        with_losses = []
        for creator in (*CREATORS, "eve", "ada"):
            lossy.loses = True
            with_losses.append(await run.prompt(creator, REPAIRED_S))
        resyncs, whole = edge.index.resyncs, edge.index.whole
        us = _event_us(await told.replay(0), edge)
        await engine._engine.reset_prefix_cache()
        await run.prompt("eve", REPAIRED_S)  # vLLM tells of it with the next step's events
        left = run.cached("ada")
        following.cancel()
        return Seen(
            blocks=engine.info.kv_blocks,
            block_size=engine.info.block_size,
            hits=hits,
            hits_with_losses=with_losses,
            lost=len(lossy.lost),
            repeated=len(lossy.repeated),
            resyncs=resyncs,
            whole=whole,
            warm=warm,
            left_when_cleared=left,
            event_us_per_block=us,
            seconds=time.monotonic() - began_s,
        )
    finally:
        await engine.close()


def _event_us(batches: list[Batch], edge: Warmth) -> float:
    """What one event's block costs the loop."""
    from pipeline.protocol.warmth import Index, Stored

    blocks = sum(len(event.hashes) for batch in batches for event in batch.events if isinstance(event, Stored))
    fresh = Index(edge._engine.info.block_size, edge._engine.info.kv_blocks)
    began_s = time.perf_counter()
    for batch in batches:
        fresh.heard(batch, 0.0)
    return (time.perf_counter() - began_s) * 1e6 / max(1, blocks)
