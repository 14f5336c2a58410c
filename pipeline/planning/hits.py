"""What caches of a given size will have, without running them: Che's approximation of LRU.

An LRU cache keeps whatever was used within its characteristic time T, the same for all that is in it; and T is the time within
which just so much is used as it holds (Che, Tung, Wang, "Hierarchical web caching systems", 2002). So with requests for `i` at
rate λ_i, Poisson, `i` is there with probability 1 - exp(-λ_i T), and T solves

    Σ_i size_i (1 - exp(-λ_i T)) = capacity

What is used here: the prefixes of creators, the histories of conversations under way, and of those that are not any more.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from pipeline.planning import source
from pipeline.planning.workload import Asked, Workload, poisson

RANKS_EXACT: Final = 64
"""Creators of these first ranks count one by one, those behind in groups whose ends are a tenth apart."""

HORIZON_S: Final = 1e7
"""A cache that holds what is used within four months holds everything."""


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """Of what can be found at all, the share that a cache has: histories of conversations that go on, creators' prefixes. The hot
    creator's is always there."""

    prefix: float
    history: float
    time_s: float


def expect(load: Workload, capacity_blocks: float, copies: int = 1) -> Hits:
    """One cache, or all those of a fleet: `capacity_blocks` together, the hot creator's prefix in each of `copies`."""
    shape, groups = load.shape, list(zipf(load.creators))
    per_s = load.requests_per_s * (1 - load.hot_share)
    turn_per_s = load.requests_per_s / load.conversations
    tail = (shape.tokens(shape.turns_kept + shape.turns_step // 2) // source.BLOCK_TOKENS) - shape.persona_blocks
    ended_per_s = load.requests_per_s * load.fresh
    alive = load.conversations if shape.turns_step > 1 else 0

    def used(time_s: float) -> float:
        prefixes = sum(count * -math.expm1(-per_s * each * time_s) for count, each in groups)
        hot = copies if load.hot_share else 0
        recent = alive * -math.expm1(-turn_per_s * time_s)
        histories = recent + ended_per_s * (
            time_s - recent / load.requests_per_s
        )  # those that ended count as recent first
        return shape.persona_blocks * (prefixes + hot) + tail * histories

    time_s = _solve(used, capacity_blocks)
    found = sum(count * each * -math.expm1(-per_s * each * time_s) for count, each in groups)
    return Hits(prefix=found, history=-math.expm1(-turn_per_s * time_s), time_s=time_s)


def zipf(creators: int) -> Iterator[tuple[int, float]]:
    """Creators in groups: how many, and the share of requests that each of them has. As `traffic.zipf` draws them."""
    first = 0
    whole = math.log(creators + 1)
    while first < creators:
        size = 1 if first < RANKS_EXACT else max(1, first // 10)
        size = min(size, creators - first)
        yield size, math.log((first + size + 1) / (first + 1)) / whole / size
        first += size


def _solve(used: Callable[[float], float], capacity: float) -> float:
    low, high = 0.0, 1.0
    while used(high) < capacity:
        if high > HORIZON_S:
            return math.inf
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if used(middle) < capacity:
            low = middle
        else:
            high = middle
    return high


def draw(load: Workload, hbm: Hits, lmcache: Hits, seed: int) -> Iterator[Asked]:
    """Requests without end, each with what the caches have of it, as `expect` says they will."""
    chance, shape = random.Random(seed), load.shape
    block, persona = source.BLOCK_TOKENS, shape.persona_blocks
    begins = 1 / (load.turns_mean + 0.5)
    for at_s in poisson(load.requests_per_s, chance):
        turns = shape.turns_kept + chance.randrange(shape.turns_step)
        prompt = shape.tokens(turns)
        kept = 0
        if turns > shape.turns_kept and chance.random() >= begins:
            kept = shape.tokens(turns - 1) // block - persona
        hot = chance.random() < load.hot_share
        uses = (-1.0 if hot else chance.random(), chance.random())
        here, there = (min(_found(cache, uses, persona, kept) * block, prompt - 1) for cache in (hbm, lmcache))
        there = max(here, there)
        yield Asked(at_s, prompt, here, there - here, load.output_tokens, persona * block if hot else 0)


def _found(cache: Hits, uses: tuple[float, float], persona: int, kept: int) -> int:
    """Blocks that a cache has of a prefix and a history. How long ago they were used decides, for every cache the same."""
    prefix, history = uses
    if prefix >= cache.prefix:
        return 0
    return persona + (kept if history < cache.history else 0)
