"""A prefill worker's engine: slots, computing that is shared by what runs, an HBM cache, a link to LMCache.

A request in a slot: find its blocks, load those that LMCache has and HBM has not, compute the rest, store what is new.

    begin ──► load (link) ──► compute (shared) ──► store (link) ──► done, slot free
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from pipeline.planning import source
from pipeline.planning.caches import Cache
from pipeline.planning.events import Events
from pipeline.planning.processor import Processor
from pipeline.planning.traffic import Request


class Link:
    """A wire that carries one load after another, at so many blocks a second."""

    def __init__(self, blocks_per_s: float) -> None:
        self._blocks_per_s = blocks_per_s
        self._free_s = 0.0

    def carry(self, blocks: int, now_s: float) -> float:
        """When so many blocks have passed, behind all before them."""
        self._free_s = max(self._free_s, now_s) + blocks / self._blocks_per_s
        return self._free_s


class Tier:
    """LMCache: a cache, and what all workers together can read and write."""

    def __init__(self, blocks: int, blocks_per_s: float) -> None:
        self.cache = Cache(blocks)
        self.link = Link(blocks_per_s)


class Served(NamedTuple):
    """A request that is through prefill: its full blocks by where they came from."""

    request: Request
    worker: str
    hbm: int
    lmcache: int
    done_s: float

    @property
    def ttft_s(self) -> float:
        """From its arrival at the gateway to the first token of decode."""
        return self.done_s - self.request.at_s + source.FIRST_TOKEN_S


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines of a fleet can do. The default is the source's."""

    prefill_tokens_per_s: float = source.PREFILL_TOKENS_PER_S
    overhead_s: float = source.PREFILL_OVERHEAD_S
    slots: int = source.PREFILL_SLOTS
    hbm_blocks: int = source.HBM_BLOCKS
    link_blocks_per_s: float = source.LINK_BLOCKS_PER_S
    lmcache_blocks: int = source.LMCACHE_BLOCKS
    lmcache_blocks_per_s: float = source.LMCACHE_BLOCKS_PER_S


SOURCE: Final = Machine()


class Engine:
    """One engine. `done` is called as a request leaves its slot; whoever calls `begin` sees to it that there is one."""

    def __init__(
        self, name: str, events: Events, tier: Tier, done: Callable[[Served], None], machine: Machine = SOURCE
    ) -> None:
        self.name, self.slots = name, machine.slots
        self.running = 0
        self.hbm = Cache(machine.hbm_blocks)
        self._machine = machine
        self._events, self._tier, self._done = events, tier, done
        self._link = Link(machine.link_blocks_per_s)
        self._processor = Processor(events)

    @property
    def computed_s(self) -> float:
        """For how long this engine has computed anything."""
        return self._processor.computed_s

    def begin(self, request: Request) -> None:
        """A request takes a slot."""
        self.running += 1
        assert self.running <= self.slots
        here = self.hbm.match(request)
        there = self._tier.cache.match(request) if here < request.blocks else here
        if there > here:
            self._events.at(self._carry(there - here), self._compute, request, here, there)
        else:
            self._compute(request, here, here)

    def warm(self, creator: str, then: Callable[[], None]) -> None:
        """Load a creator's persona ahead of demand, as far as LMCache has it."""
        there = self._tier.cache.persona(creator)

        def loaded() -> None:
            self.hbm.put_persona(creator, there)
            then()

        self._events.at(self._carry(max(0, there - self.hbm.persona(creator))), loaded)

    def _carry(self, blocks: int) -> float:
        now_s = self._events.now_s
        return max(self._link.carry(blocks, now_s), self._tier.link.carry(blocks, now_s))

    def _compute(self, request: Request, hbm: int, found: int) -> None:
        tokens = request.tokens - found * source.BLOCK_TOKENS
        work_s = self._machine.overhead_s + tokens / self._machine.prefill_tokens_per_s
        self._processor.take(work_s, self._computed, request, hbm, found)

    def _computed(self, request: Request, hbm: int, found: int) -> None:
        self.hbm.put(request)
        new = request.blocks - self._tier.cache.match(request)
        self._events.at(self._carry(new), self._stored, request, hbm, found)

    def _stored(self, request: Request, hbm: int, found: int) -> None:
        self._tier.cache.put(request)
        self.running -= 1
        self._done(Served(request, self.name, hbm, found - hbm, self._events.now_s))
