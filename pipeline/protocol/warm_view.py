"""Which workers are warm for a creator: what each prefill worker says of its warm creators, and what a gateway makes of it.

    worker:  changes, numbered ──────────► `cache.evicted`, `cache.warm`      as they happen
             all, after change n ────────► `cache.warm`                       now and then, and when asked
             number and digest ──────────► its presence                       five times a second

    gateway: next number ─► applied        gap, or a digest that differs ─► ask for all
             all, not older than what is known ─► instead of what is known

So a lost message costs one presence period and one round trip. A new epoch begins with nobody warm; a late word of an older one
changes nothing. Creators are 64-bit hashes: of a million warm ones, two share one with a chance of 1 in 37 million, and then a
request goes to a cold worker.
"""

from collections.abc import Collection, Iterable
from functools import reduce
from hashlib import blake2b
from operator import xor

import msgspec

from pipeline.limits import WARM_ASK_PERIOD_S
from pipeline.protocol.in_order import InOrder
from pipeline.protocol.warm_messages import WarmChanges, WarmCreators


def key_of(creator: str) -> int:
    """The hash that a creator (a subject token) is known by."""
    return int.from_bytes(blake2b(creator.encode(), digest_size=8).digest(), "little")


def pack_keys(keys: Iterable[int]) -> bytes:
    """As little-endian u64, in order, so that the same set is always the same bytes."""
    return b"".join(key.to_bytes(8, "little") for key in sorted(keys))


def unpack_keys(packed: bytes) -> list[int]:
    """The inverse of `pack_keys`. Half a key at the end is dropped."""
    return [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed) - 7, 8)]


class Teller:
    """What one worker, in one of its lives, has said of its warm creators."""

    def __init__(self, worker: str, epoch: str) -> None:
        self.number = 0
        self.digest = 0
        self._worker, self._epoch = worker, epoch
        self._keys: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def change(self, warm: Collection[str]) -> WarmChanges | None:
        """What to say now that these creators are warm; None: nothing is new."""
        lost = [self._keys.pop(creator) for creator in self._keys.keys() - set(warm)]
        new = [creator for creator in warm if creator not in self._keys]
        if not lost and not new:
            return None
        gained = [key_of(creator) for creator in new]
        self._keys.update(zip(new, gained, strict=True))
        self.digest = reduce(xor, (*lost, *gained), self.digest)
        self.number += 1
        return WarmChanges(
            worker=self._worker,
            epoch=self._epoch,
            number=self.number,
            lost=pack_keys(lost),
            gained=pack_keys(gained),
        )

    def all(self) -> WarmCreators:
        """All that is warm, as of the last change."""
        packed = pack_keys(self._keys.values())
        return WarmCreators(worker=self._worker, epoch=self._epoch, number=self.number, creators=packed)


class _Worker(msgspec.Struct):
    """One life of a worker. `said`: the number and digest of its last presence."""

    epoch: str
    changes: InOrder[WarmChanges]
    warm: set[int]
    digest: int = 0
    said: tuple[int, int] = (0, 0)
    asked_s: float = float("-inf")

    @property
    def wrong(self) -> bool:
        """Whether this is not what the worker says it is."""
        known = self.changes.next - 1
        return self.changes.gap or known < self.said[0] or (known == self.said[0] and self.digest != self.said[1])


class WarmView:
    """One gateway's view of all workers. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def warm(self, key: int) -> set[str]:
        """The workers that are warm for a creator."""
        return {worker for worker, known in self._workers.items() if key in known.warm}

    def is_warm(self, key: int, worker: str) -> bool:
        """Whether that one is."""
        known = self._workers.get(worker)
        return known is not None and key in known.warm

    def heard(self, said: WarmChanges | WarmCreators) -> None:
        """A worker has said something, perhaps late, or not for the first time."""
        known = self._life(said.worker, said.epoch)
        if known is None:
            return
        if isinstance(said, WarmChanges):
            ready = known.changes.take(said.number, said)
        elif said.number >= known.changes.next - 1:
            known.warm = set(unpack_keys(said.creators))
            known.digest = reduce(xor, known.warm, 0)
            ready = known.changes.skip_to(said.number + 1)
        else:
            return
        for change in ready:
            self._apply(known, change)

    def presence(self, worker: str, epoch: str, number: int, digest: int) -> None:
        """A worker's presence: after its change `number`, its warm creators have this digest."""
        known = self._life(worker, epoch)
        if known is not None and number >= known.said[0]:
            known.said = (number, digest)

    def keep(self, workers: Collection[str]) -> None:
        """Only these live: of the others nothing is warm."""
        self._workers = {worker: known for worker, known in self._workers.items() if worker in workers}

    def asks(self, now_s: float) -> list[str]:
        """The workers to be asked now for all that is warm there."""
        asked = []
        for worker, known in self._workers.items():
            if known.wrong and now_s >= known.asked_s + WARM_ASK_PERIOD_S:
                known.asked_s = now_s
                asked.append(worker)
        return asked

    def _life(self, worker: str, epoch: str) -> _Worker | None:
        """What is known of that life of a worker; None: a later one has begun. Epochs order as text."""
        known = self._workers.get(worker)
        if known is None or epoch > known.epoch:
            known = self._workers[worker] = _Worker(epoch, InOrder(1), set())
        return known if epoch == known.epoch else None

    def _apply(self, known: _Worker, change: WarmChanges) -> None:
        lost, gained = set(unpack_keys(change.lost)), set(unpack_keys(change.gained))
        known.warm -= lost
        known.warm |= gained
        known.digest = reduce(xor, (*lost, *gained), known.digest)
