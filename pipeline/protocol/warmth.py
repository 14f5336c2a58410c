"""What one engine's prefix cache holds, as its own events tell it; and so which creators are warm there.

An engine says in numbered batches which blocks it has stored and evicted. Batches may be lost, come twice, or out of order:

    in order ─► applied      repeated ─► dropped      a gap, and now and then ─► `wanted` says from where to replay

Blocks are held under names of our own, a chained hash over salt and tokens: so a prompt can be looked up without the engine's
hash function, whatever seed that has. An engine may hold a block twice, and then says so twice, so copies are counted.

The index is `whole` while it knows of every block. Should a gap be older than what the engine can still replay, or an event
contradict what is known, it forgets everything: from then on it knows some of the blocks, and none that is not there.

**Warm.** The prompts of a creator share a prefix (`prefixes.py` says which). The creator is warm here while the engine holds the
block in the middle of that prefix: of its P full blocks, number ⌈P/2⌉. Engines evict the ends of prompts first, so all before it
are then there too: a request of this creator, of whatever conversation, finds at least half of what it could find.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from pipeline.limits import (
    CACHE_CHECK_PERIOD_S,
    CACHE_GAP_PATIENCE_S,
    CACHE_REPLAY_PERIOD_S,
    WARM_CREATORS_MAX,
)
from pipeline.protocol.in_order import InOrder
from pipeline.protocol.messages import pack_ids

TOKEN_BYTES = 4


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that follow each other, by the engine's hashes, and their packed tokens.

    `parent` is the block before them; None: they begin a prompt. `salt` is whose they are, where they begin one.
    """

    hashes: Sequence[int]
    parent: int | None
    ids: bytes
    salt: str = ""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A copy of each of these blocks is gone."""

    hashes: Sequence[int]


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The cache is empty."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What one engine step has changed. Numbers begin at 0 with the engine, and leave none out."""

    number: int
    events: Sequence[Event]


def names_of(packed: bytes, block_size: int, parent: bytes) -> list[bytes]:
    """The names, 8 bytes each, of the full blocks of `packed` tokens that follow the block `parent`: about 1 µs each."""
    size = TOKEN_BYTES * block_size
    names = []
    for at in range(0, len(packed) - size + 1, size):
        parent = blake2b(packed[at : at + size], key=parent, digest_size=8).digest()
        names.append(parent)
    return names


def root_of(salt: str, parent: bytes = b"") -> bytes:
    """The name before the first block of a prompt. With a parent: before a block that has a salt of its own."""
    return blake2b(salt.encode(), key=parent, digest_size=8).digest()


class _Creator(msgspec.Struct, gc=False):
    """`mark`: the name of the block in the middle of the shared prefix. None: that has no full block."""

    prefix: tuple[str, int, int]
    mark: bytes | None


class Index:
    """One engine's prefix cache. `blocks_max` blocks of `block_size` tokens are all it can hold; times are seconds, monotonic."""

    def __init__(self, block_size: int, blocks_max: int) -> None:
        self.whole = True
        self.gaps = 0
        self.resyncs = 0
        self.warm: set[str] = set()
        self._block_size = block_size
        self._blocks_max = blocks_max
        self._order: InOrder[Batch] = InOrder()
        self._copies: dict[int, int] = {}
        self._total = 0
        self._names: dict[int, bytes] = {}
        self._gone: OrderedDict[int, bytes] = OrderedDict()
        self._here: set[bytes] = set()
        self._creators: OrderedDict[str, _Creator] = OrderedDict()
        self._marked: dict[bytes, set[str]] = {}
        self._asked_s = float("-inf")
        self._gap_s: float | None = None
        self._contradicted = False
        self._contradicted_at = -1

    def __len__(self) -> int:
        return len(self._copies)

    # ------------------------------------------------------------------------------------------------------
    # The stream

    def heard(self, batch: Batch, now_s: float) -> None:
        """A batch has come, in whatever order."""
        self._apply(self._order.take(batch.number, batch), now_s)

    def wanted(self, now_s: float) -> int | None:
        """The number from which the engine must replay now; None: not yet.

        Also without a gap, every `CACHE_CHECK_PERIOD_S`: that the last batches are lost, no later one shows.
        """
        due_s = self._asked_s + CACHE_CHECK_PERIOD_S
        if self._gap_s is not None:
            due_s = max(self._gap_s + CACHE_GAP_PATIENCE_S, self._asked_s + CACHE_REPLAY_PERIOD_S)
        if now_s < due_s:
            return None
        self._asked_s = now_s
        return self._order.next

    def replayed(self, batches: Sequence[Batch], now_s: float) -> None:
        """The engine's answer to `wanted`: what it still has from there on, in order; nothing, where that is all there is."""
        if batches and batches[0].number > self._order.next:
            self._forget(whole=False)
            self._apply(self._order.skip_to(batches[0].number), now_s)
        for batch in batches:
            self._apply(self._order.take(batch.number, batch), now_s)

    def _apply(self, batches: Sequence[Batch], now_s: float) -> None:
        for batch in batches:
            for event in batch.events:
                self._happened(event)
            if self._contradicted:
                self._contradicted = False
                if self._begin_again(batch.number):
                    break
        had_gap, has_gap = self._gap_s is not None, self._order.gap or self._order.next <= self._contradicted_at
        if has_gap and not had_gap:
            self.gaps += 1
        self._gap_s = (self._gap_s if had_gap else now_s) if has_gap else None

    def _begin_again(self, number: int) -> bool:
        """Something cannot be true: replay all there was. False where a replay has led to the same again: go on with less."""
        again = number <= self._contradicted_at
        self._forget(whole=not again)
        if not again:
            self._contradicted_at = number
            self._order = InOrder()
        return not again

    def _happened(self, event: Event) -> None:
        if isinstance(event, Stored):
            self._stored(event)
        elif isinstance(event, Removed):
            for block in event.hashes:
                self._removed(block)
        else:
            self._empty()
            self.whole = True

    # ------------------------------------------------------------------------------------------------------
    # Blocks

    def _stored(self, event: Stored) -> None:
        parent = b"" if event.parent is None else self._names.get(event.parent) or self._gone.get(event.parent)
        if parent is None:
            self._contradicted |= self.whole
            return
        if event.salt or not parent:
            parent = root_of(event.salt, parent)
        for block, name in zip(event.hashes, names_of(event.ids, self._block_size, parent), strict=True):
            copies = self._copies.get(block, 0)
            self._copies[block] = copies + 1
            self._total += 1
            if not copies:
                self._gone.pop(block, None)
                self._names[block] = name
                self._here.add(name)
                self.warm |= self._marked.get(name, set())
        self._contradicted |= self._total > self._blocks_max

    def _removed(self, block: int) -> None:
        copies = self._copies.get(block, 0)
        if not copies:
            self._contradicted |= self.whole
            return
        self._total -= 1
        if copies > 1:
            self._copies[block] = copies - 1
            return
        del self._copies[block]
        # Remembered for a while: a request that still computes on it may store what follows it.
        name = self._gone[block] = self._names.pop(block)
        if len(self._gone) > self._blocks_max:
            self._gone.popitem(last=False)
        self._here.discard(name)
        self.warm -= self._marked.get(name, set())

    def _forget(self, *, whole: bool) -> None:
        self.resyncs += 1
        self.whole = whole
        self._empty()

    def _empty(self) -> None:
        self._copies.clear()
        self._names.clear()
        self._gone.clear()
        self._here.clear()
        self._total = 0
        self.warm.clear()

    # ------------------------------------------------------------------------------------------------------
    # Prompts and creators

    def cached_tokens(self, salt: str, token_ids: Sequence[int]) -> int:
        """How many leading tokens of this prompt the engine would find: whole blocks, and of N tokens at most N - 1."""
        full = (len(token_ids) - 1) // self._block_size * self._block_size
        found = 0
        for name in names_of(pack_ids(token_ids[: max(0, full)]), self._block_size, root_of(salt)):
            if name not in self._here:
                break
            found += self._block_size
        return found

    def shares(self, creator: str, salt: str, ids: bytes) -> None:
        """These packed tokens are what the prompts of `creator` share, under this salt."""
        prefix = (salt, len(ids), hash(ids))
        known = self._creators.get(creator)
        if known is None or known.prefix != prefix:
            blocks = len(ids) // (TOKEN_BYTES * self._block_size)
            half = ids[: (blocks + 1) // 2 * TOKEN_BYTES * self._block_size]
            names = names_of(half, self._block_size, root_of(salt))
            self._watch(creator, _Creator(prefix, names[-1] if names else None))
        self._creators.move_to_end(creator)
        if len(self._creators) > WARM_CREATORS_MAX:
            self._unwatch(next(iter(self._creators)))

    def _watch(self, creator: str, watched: _Creator) -> None:
        self._unwatch(creator)
        self._creators[creator] = watched
        if watched.mark is not None:
            self._marked.setdefault(watched.mark, set()).add(creator)
            if watched.mark in self._here:
                self.warm.add(creator)

    def _unwatch(self, creator: str) -> None:
        watched = self._creators.pop(creator, None)
        self.warm.discard(creator)
        if watched is not None and watched.mark is not None:
            others = self._marked[watched.mark]
            others.discard(creator)
            if not others:
                del self._marked[watched.mark]
