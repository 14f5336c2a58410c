"""Which prefill worker should serve which shard: no leader, no table, only arithmetic that everybody repeats.

The order of the workers for a shard is rendezvous hashing, weighted by capacity: each worker has a score for the shard, the
highest is its **owner** (rank 0), the next is who takes over when the owner is full or gone. A worker's rank makes the priority
of its pulls (`slots.py`), so the broker hands a request to the owner where it has a free slot, else to one of the next. When a
worker comes or goes, only its own share moves.

Load is the worker's own truth: of slots, queued prompt tokens and KV blocks, whichever is scarcest.
"""

import functools
import hashlib
import heapq
import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from pipeline.limits import PULL_RANK_MAX, SPILL_BACK_LOAD, SPILL_LOAD, WORKERS_SCORED_MAX
from pipeline.protocol.subjects import Shard

_SCALE: Final = float(1 << 64)


def score(shard: Shard, worker: str, weight: float) -> float:
    """The rendezvous score of a worker for a shard: higher is better. `weight` is its capacity, in slots."""
    return weight * _score(shard.number, worker)


def _score(number: int, worker: str) -> float:
    digest = hashlib.blake2b(f"{number}/{worker}".encode(), digest_size=8).digest()
    # A uniform number in (0, 1); -weight / ln(u) makes each worker's share proportional to its weight.
    uniform = (int.from_bytes(digest, "big") + 0.5) / _SCALE
    return -1.0 / math.log(uniform)


@functools.lru_cache(maxsize=WORKERS_SCORED_MAX)
def _scores(worker: str, shards: int) -> "array[float]":
    """A worker's scores of weight 1 for the shards 0…: hashing is most of the cost of ranks, and never changes."""
    return array("d", (_score(number, worker) for number in range(shards)))


def order(shard: Shard, workers: Mapping[str, float]) -> list[str]:
    """The workers (id → weight) for a shard, the owner first."""
    return sorted(workers, key=lambda worker: (-score(shard, worker, workers[worker]), worker))


def ranks(me: str, shards: Iterable[Shard], workers: Mapping[str, float]) -> dict[Shard, int]:
    """My rank for each shard among `workers`, which need not name me; ranks beyond what NATS knows share the last."""
    wanted = list(shards)
    upto = max((shard.number for shard in wanted), default=-1) + 1
    others = [(other, weight, _scores(other, upto)) for other, weight in workers.items() if other != me]
    mine, own = workers.get(me, 1.0), _scores(me, upto)

    def rank(number: int) -> int:
        mark = mine * own[number]
        ahead = sum((weight * scores[number], me) > (mark, other) for other, weight, scores in others)
        return min(ahead, PULL_RANK_MAX)

    by_number = {number: rank(number) for number in {shard.number for shard in wanted}}
    return {shard: by_number[shard.number] for shard in wanted}


def first_of(shards: int, workers: Mapping[str, float], count: int) -> list[list[str]]:
    """Of each of the shards 0 to `shards` - 1 the first workers of its order, the owner first; of both classes alike."""
    scored = [(worker, weight, _scores(worker, shards)) for worker, weight in workers.items()]

    def first(number: int) -> list[str]:
        return [
            name for _, name in heapq.nsmallest(count, ((-weight * by[number], name) for name, weight, by in scored))
        ]

    return [first(number) for number in range(shards)]


class Owners:
    """Who owns each of the shards 0 to `shards` - 1, kept while workers come and go: both classes of a number have one owner."""

    def __init__(self, shards: int) -> None:
        self._best: list[tuple[float, str]] = [(0.0, "")] * shards
        self._workers: dict[str, float] = {}

    def update(self, workers: Mapping[str, float]) -> None:
        """These workers (id → weight) are there now. Costs as much as has changed."""
        gone = {worker for worker, weight in self._workers.items() if workers.get(worker) != weight}
        come = [worker for worker, weight in workers.items() if self._workers.get(worker) != weight]
        self._workers = dict(workers)
        orphans = [number for number, (_, owner) in enumerate(self._best) if owner in gone]
        for number in orphans:
            self._best[number] = (0.0, "")
        for worker in self._workers if orphans else ():
            self._try(worker, orphans)
        for worker in come:
            self._try(worker, range(len(self._best)))

    def __getitem__(self, number: int) -> str:
        """The owner of a shard; empty where there is no worker."""
        return self._best[number][1]

    def __len__(self) -> int:
        return len(self._best)

    def _try(self, worker: str, numbers: Iterable[int]) -> None:
        """Let a worker compete. Equal scores go to the smaller id, as in `order`."""
        weight, scores = self._workers[worker], _scores(worker, len(self._best))
        for number in numbers:
            score_, owner = weight * scores[number], self._best[number][1]
            if score_ > self._best[number][0] or (score_ == self._best[number][0] and worker < owner):
                self._best[number] = (score_, worker)


def load(*, busy: int, slots: int, queued_tokens: int, queued_tokens_max: int, kv_usage_ratio: float) -> float:
    """0…1: the largest of busy slots, queued prompt tokens and KV use, over their limits."""
    return min(1.0, max(busy / slots, queued_tokens / queued_tokens_max, kv_usage_ratio))


class Thresholds(msgspec.Struct, frozen=True):
    """A worker begins to spill at one load and ends at the other. Between the two it goes on as it is, and does not flap."""

    spill: float = SPILL_LOAD
    back: float = SPILL_BACK_LOAD


THRESHOLDS: Final = Thresholds()


def spills(load_ratio: float, spilling: bool, at: Thresholds = THRESHOLDS) -> bool:
    """Whether a worker of this load leaves its work to others, given whether it did before."""
    return load_ratio >= at.spill or (spilling and load_ratio > at.back)
