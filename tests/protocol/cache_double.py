"""An engine's prefix cache as vLLM keeps it: copies, eviction of the ends of prompts first, numbered events, a bounded replay."""

import itertools
from collections import Counter, OrderedDict, deque

from pipeline.protocol.messages import pack_ids
from pipeline.protocol.warmth import Batch, Cleared, Event, Removed, Stored

SIZE = 4
"""Tokens of a block."""

Chain = tuple[str, tuple[int, ...]]
"""What a block stands for: the salt, and all tokens to its end."""


class CacheDouble:
    """`blocks` physical blocks. Prompts that overlap in time compute what they share twice, as in vLLM."""

    def __init__(self, blocks: int, kept: int = 10_000) -> None:
        self.blocks = blocks
        self.number = 0
        self._kept: deque[Batch] = deque(maxlen=kept)
        self._hashes: dict[Chain, int] = {}
        self._serial = itertools.count(100)
        self._free: OrderedDict[int, Chain | None] = OrderedDict((block, None) for block in range(blocks))
        self._held: dict[int, list[tuple[int, Chain]]] = {}
        self._events: list[Event] = []

    @property
    def here(self) -> set[Chain]:
        """The blocks that can be found."""
        return set(self.copies)

    @property
    def copies(self) -> Counter[Chain]:
        """Each of them, with how often it is there."""
        free = [chain for chain in self._free.values() if chain is not None]
        return Counter([*free, *(chain for holds in self._held.values() for _, chain in dict(holds).items())])

    def cached_tokens(self, salt: str, ids: list[int]) -> int:
        """What the engine would find of this prompt."""
        here, found = self.here, 0
        for chain in chains(salt, ids[: max(0, len(ids) - 1)]):
            if chain not in here:
                break
            found += SIZE
        return found

    def prefill(self, salt: str, ids: list[int], *, alone: bool = True) -> Batch | None:
        """A prompt comes and goes. Not `alone`: another of the same computes at the same time, and both are kept."""
        keys = [self._begin(salt, ids)]
        if not alone:
            keys.append(self._begin(salt, ids, blind=True))
        for key in keys:
            self._end(key)
        return self.cut()

    def clear(self) -> Batch | None:
        """All is forgotten, as after `reset_prefix_cache`."""
        self._free = OrderedDict((block, None) for block in range(self.blocks))
        self._events.append(Cleared())
        return self.cut()

    def cut(self) -> Batch | None:
        """What has happened since the last one."""
        if not self._events:
            return None
        batch = Batch(self.number, self._events)
        self.number += 1
        self._events = []
        self._kept.append(batch)
        return batch

    def replay(self, start: int) -> list[Batch]:
        """What is still kept from there on."""
        return [batch for batch in self._kept if batch.number >= start]

    def _begin(self, salt: str, ids: list[int], *, blind: bool = False) -> int:
        wanted = chains(salt, ids)
        found = 0 if blind else self.cached_tokens(salt, ids) // SIZE
        holds: list[tuple[int, Chain]] = []
        for chain in wanted[:found]:
            block = next((block for block, cached in self._free.items() if cached == chain), None)
            if block is not None:
                del self._free[block]
                holds.append((block, chain))
        new = wanted[found:]
        for chain in new[: len(self._free)]:
            block, evicted = self._free.popitem(last=False)
            if evicted is not None:
                self._events.append(Removed([self._hash(evicted)]))
            holds.append((block, chain))
        stored = new[: len(holds) - found]
        if stored:
            parent = self._hash(wanted[found - 1]) if found else None
            packed = pack_ids([token for chain in stored for token in chain[1][-SIZE:]])
            self._events.append(Stored([self._hash(chain) for chain in stored], parent, packed, "" if found else salt))
        key = next(self._serial)
        self._held[key] = holds
        return key

    def _end(self, key: int) -> None:
        for block, chain in reversed(self._held.pop(key)):
            self._free[block] = chain

    def _hash(self, chain: Chain) -> int:
        return self._hashes.setdefault(chain, next(self._serial))


def chains(salt: str, ids: list[int]) -> list[Chain]:
    """What the full blocks of a prompt stand for."""
    return [(salt, tuple(ids[:end])) for end in range(SIZE, len(ids) + 1, SIZE)]
