"""A prefill worker's engine: slots, computing that is shared by what runs, an HBM cache, a link to LMCache.

A request in a slot: find its blocks, load those that LMCache has and HBM has not, compute the rest, store what is new.

    begin ──► load (link) ──► compute (shared) ──► store (link) ──► done, slot free
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from pipeline.planning import source
from pipeline.planning.caches import Cache
from pipeline.planning.events import Events
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
        """From its arrival at the gateway to the first token."""
        return self.done_s - self.request.at_s + source.FIRST_TOKEN_S


class Engine:
    """One engine. `done` is called as a request leaves its slot; whoever calls `begin` sees to it that there is one."""

    def __init__(self, name: str, events: Events, tier: Tier, done: Callable[[Served], None], slots: int) -> None:
        self.name, self.slots = name, slots
        self.running = 0
        self.hbm = Cache(source.HBM_BLOCKS)
        self._events, self._tier, self._done = events, tier, done
        self._link = Link(source.LINK_BLOCKS_PER_S)
        self._jobs: list[tuple[float, int, Request, int, int]] = []
        """What computes, by when it is through on `_progress`: the engine's seconds that each of them has had."""
        self._progress = 0.0
        self._updated_s = 0.0
        self._count = 0
        self._computed_s = 0.0

    @property
    def computed_s(self) -> float:
        """For how long this engine has computed anything."""
        since_s = self._events.now_s - self._updated_s if self._jobs else 0.0
        return self._computed_s + since_s

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
        self._pass()
        work_s = source.PREFILL_OVERHEAD_S
        work_s += (request.tokens - found * source.BLOCK_TOKENS) / source.PREFILL_TOKENS_PER_S
        self._count += 1
        heapq.heappush(self._jobs, (self._progress + work_s, self._count, request, hbm, found))
        self._arrange()

    def _pass(self) -> None:
        """Bring `_progress` up to now."""
        now_s = self._events.now_s
        if self._jobs:
            self._progress += (now_s - self._updated_s) / len(self._jobs)
            self._computed_s += now_s - self._updated_s
        self._updated_s = now_s

    def _arrange(self) -> None:
        if self._jobs:
            self._count += 1
            left_s = (self._jobs[0][0] - self._progress) * len(self._jobs)
            self._events.after(left_s, self._step, self._count)

    def _step(self, arranged: int) -> None:
        """The first is through, unless another has come since this was arranged."""
        if arranged != self._count:
            return
        self._pass()
        _, _, request, hbm, found = heapq.heappop(self._jobs)
        self._arrange()
        self.hbm.put(request)
        new = request.blocks - self._tier.cache.match(request)
        self._events.at(self._carry(new), self._stored, request, hbm, found)

    def _stored(self, request: Request, hbm: int, found: int) -> None:
        self._tier.cache.put(request)
        self.running -= 1
        self._done(Served(request, self.name, hbm, found - hbm, self._events.now_s))
