"""How long requests wait for prefill and are in it: a queue, evaluated number by number.

A pool of engines with places. What is in an engine's places is computed in order, or shares it evenly. A request goes to its
owner, drawn at random, and is held there while that is full, up to `SURPLUS_HOLD_S`; then it goes to the engine with the fewest;
where all are full, it waits, for its owner first. In its place it loads, computes and stores; loads and stores of an engine pass
one after the other, and those of all through LMCache. Elsewhere than at its owner it has to load what it would have found there.

Of Headrace's own rules that is the essence: pull by rank, hold what is surplus (of a hot creator's shard, one), spill. Left out
are the broker's hops, shards that are not owned evenly, and cache contents, which `hits.py` stands for. What that costs,
`python -m tests.benchmarks.capacity` shows.

No closed form is known for processor sharing with so few places. What is known in closed form is beside it: `Queue.busy` must
be below one, and no first token comes sooner than `floor_s`.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from pipeline.limits import SURPLUS_HOLD_S
from pipeline.planning.events import Events
from pipeline.planning.processor import InOrder, Processor
from pipeline.planning.rates import Rates
from pipeline.planning.workload import Asked
from pipeline.protocol.slots import OWN_TURNS

HANDS_FULL: Final = 1
"""Pulls that a full worker has left on one shard: what a hot creator's requests are held for. The next goes elsewhere at once."""

CAPACITY_ROUNDS: Final = 4
"""Of an iteration between a rate and what caches have at it."""

OVERLOAD: Final = 1.2
"""Over what could be computed."""

SEED: Final = 1

WARM_UP: Final = 0.2
"""Of the requests, while the queue fills, are not counted."""


class Prefilled(NamedTuple):
    """One request through prefill: how long it took, and the tokens that were not in the engine's own cache."""

    asked: Asked
    took_s: float
    foreign: bool


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """What came out. `busy` is the share of time for which engines compute, by arithmetic; over 1 the queue only grows."""

    busy: float
    prefilled: list[Prefilled]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """`engines` with `slots` places each, and what LMCache moves for all of them."""

    engines: int
    slots: int
    lmcache_tokens_per_s: float = math.inf


class _Place:
    """An engine's places, its processor and its link."""

    def __init__(self, events: Events, rates: Rates) -> None:
        self.processor = InOrder(events) if rates.in_order else Processor(events)
        self.taken = 0
        self.turns = 0
        self.waiting: deque[Asked] = deque()
        self.link_free_s = 0.0
        self.held: dict[int, Asked] = {}


class _Prefill:
    def __init__(self, rates: Rates, pool: Pool, seed: int) -> None:
        self.events = Events()
        self.done: list[Prefilled] = []
        self._rates, self._slots = rates, pool.slots
        self._shared_tokens_per_s, self._shared_free_s = pool.lmcache_tokens_per_s, 0.0
        self._places = [_Place(self.events, rates) for _ in range(pool.engines)]
        self._chance = random.Random(seed)

    def arrive(self, asked: Asked) -> None:
        """To the owner, or into its hand: for a while it keeps what it has no place for, unless more waits for it already."""
        owner = self._places[int(self._chance.random() * len(self._places))]
        if owner.waiting:
            owner.waiting.append(asked)
        elif owner.taken < self._slots:
            self._begin(owner, asked, foreign=False)
        elif asked.everywhere and sum(1 for held in owner.held.values() if held.everywhere) >= HANDS_FULL:
            self._spill(owner, asked)
        else:
            owner.held[id(asked)] = asked
            self.events.after(SURPLUS_HOLD_S, self._give_back, owner, asked)

    def _give_back(self, owner: _Place, asked: Asked) -> None:
        if owner.held.pop(id(asked), None) is not None:
            self._spill(owner, asked)

    def _spill(self, owner: _Place, asked: Asked) -> None:
        place = min(self._places, key=lambda one: one.taken)
        if place.taken < self._slots:
            self._begin(place, asked, place is not owner)
        else:
            owner.waiting.append(asked)

    def _begin(self, place: _Place, asked: Asked, foreign: bool) -> None:
        place.taken += 1
        loaded = asked.lmcache + (max(0, asked.hbm - asked.everywhere) if foreign else 0)
        self.events.at(self._carry(place, loaded, self._rates.load_tokens_per_s), self._compute, place, asked, foreign)

    def _compute(self, place: _Place, asked: Asked, foreign: bool) -> None:
        place.processor.take(work_s(asked, self._rates), self._store, place, asked, foreign)

    def _store(self, place: _Place, asked: Asked, foreign: bool) -> None:
        through_s = self._carry(place, computed(asked), self._rates.store_tokens_per_s)
        self.events.at(through_s, self._leave, place, asked, foreign)

    def _leave(self, place: _Place, asked: Asked, foreign: bool) -> None:
        place.taken -= 1
        self.done.append(Prefilled(asked, self.events.now_s - asked.at_s, foreign))
        if place.held:
            self._begin(place, place.held.pop(next(iter(place.held))), foreign=False)
        elif (owner := self._next(place)) is not None:
            self._begin(place, owner.waiting.popleft(), owner is not place)

    def _next(self, place: _Place) -> _Place | None:
        """Whose backlog comes next: its own, but each fourth time the longest of others."""
        others = max(self._places, key=lambda one: len(one.waiting) if one is not place else -1)
        place.turns += 1
        mine_first = place.turns % OWN_TURNS > 0
        turn = (place, others) if mine_first else (others, place)
        return next((owner for owner in turn if owner.waiting), None)

    def _carry(self, place: _Place, tokens: int, per_s: float) -> float:
        """When so many tokens have passed the engine's link, and LMCache's own."""
        now_s = self.events.now_s
        if tokens:
            place.link_free_s = max(place.link_free_s, now_s) + tokens / per_s
            self._shared_free_s = max(self._shared_free_s, now_s) + tokens / self._shared_tokens_per_s
        return max(now_s, place.link_free_s, self._shared_free_s) if tokens else now_s


def computed(asked: Asked) -> int:
    """Tokens that prefill computes."""
    return asked.prompt - asked.hbm - asked.lmcache


def work_s(asked: Asked, rates: Rates) -> float:
    """An engine's own time for one request."""
    return rates.prefill_overhead_s + computed(asked) / rates.prefill_tokens_per_s


def mean_work_s(requests: Sequence[Asked], rates: Rates) -> float:
    """An engine's own time for a request, on average."""
    return sum(work_s(asked, rates) for asked in requests) / len(requests)


def capacity_per_s(drawn: Callable[[float], Sequence[Asked]], rates: Rates, pool: Pool, around: float) -> float:
    """Requests/s that `pool` completes at most: what they do while more is offered than they could compute.

    `drawn` are requests at a rate: what caches have of them depends on it.
    """
    per_s = around
    for _ in range(CAPACITY_ROUNDS):
        per_s = pool.engines / mean_work_s(drawn(per_s), rates)
    asked = drawn(OVERLOAD * per_s)
    begin_s, end_s = asked[len(asked) // 2].at_s, asked[-1].at_s  # by then there is a backlog everywhere
    ends_s = (one.asked.at_s + one.took_s for one in _run(asked, rates, pool, SEED))
    return sum(begin_s <= at_s < end_s for at_s in ends_s) / (end_s - begin_s)


def floor_s(requests: Iterable[Asked], rates: Rates) -> float:
    """The least that any of these takes in prefill, with nobody beside it."""
    return min(
        asked.lmcache / rates.load_tokens_per_s + work_s(asked, rates) + computed(asked) / rates.store_tokens_per_s
        for asked in requests
    )


def evaluate(requests: Sequence[Asked], rates: Rates, pool: Pool, seed: int = SEED) -> Queue:
    """Put `requests` through the queue."""
    per_s = (len(requests) - 1) / max(1e-9, requests[-1].at_s - requests[0].at_s)
    counted_s = requests[int(len(requests) * WARM_UP)].at_s
    prefilled = [one for one in _run(requests, rates, pool, seed) if one.asked.at_s >= counted_s]
    return Queue(busy=per_s * mean_work_s(requests, rates) / pool.engines, prefilled=prefilled)


def _run(requests: Sequence[Asked], rates: Rates, pool: Pool, seed: int) -> list[Prefilled]:
    prefill = _Prefill(rates, pool, seed)
    pending = iter(requests)

    def arrive(asked: Asked) -> None:
        if (following := next(pending, None)) is not None:
            prefill.events.at(following.at_s, arrive, following)
        prefill.arrive(asked)

    first = next(pending)
    prefill.events.at(first.at_s, arrive, first)
    prefill.events.run(lambda: len(prefill.done) < len(requests))
    return prefill.done
