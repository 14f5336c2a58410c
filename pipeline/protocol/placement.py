"""Which prefill worker should serve which shard: no leader, no table, only arithmetic that everybody repeats.

The order of the workers for a shard is rendezvous hashing, weighted by capacity: each worker has a score for the shard, the
highest is its **owner** (rank 0), the next is who takes over when the owner is full or gone. A worker's rank is the priority of
its pulls, so the broker hands a request to the best-ranked worker that has a free slot. When a worker comes or goes, only its
own share moves.

Load is the worker's own truth: of slots, queued prompt tokens and KV blocks, whichever is scarcest.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Final

from pipeline.limits import PULL_RANK_MAX, SPILL_LOAD
from pipeline.protocol.subjects import Shard

_SCALE: Final = float(1 << 64)


def score(shard: Shard, worker: str, weight: float) -> float:
    """The rendezvous score of a worker for a shard: higher is better. `weight` is its capacity, in slots."""
    digest = hashlib.blake2b(f"{shard.number}/{worker}".encode(), digest_size=8).digest()
    # A uniform number in (0, 1); -weight / ln(u) makes each worker's share proportional to its weight.
    uniform = (int.from_bytes(digest, "big") + 0.5) / _SCALE
    return -weight / math.log(uniform)


def order(shard: Shard, workers: Mapping[str, float]) -> list[str]:
    """The workers (id → weight) for a shard, the owner first."""
    return sorted(workers, key=lambda worker: (-score(shard, worker, workers[worker]), worker))


def ranks(me: str, shards: Iterable[Shard], workers: Mapping[str, float]) -> dict[Shard, int]:
    """My rank for each shard among `workers`, which need not name me; ranks beyond what NATS knows share the last."""
    mine = workers.get(me, 1.0)
    others = {worker: weight for worker, weight in workers.items() if worker != me}
    return {shard: min(_rank(shard, me, mine, others), PULL_RANK_MAX) for shard in shards}


def _rank(shard: Shard, me: str, mine: float, others: Mapping[str, float]) -> int:
    own = score(shard, me, mine)
    return sum((score(shard, other, weight), me) > (own, other) for other, weight in others.items())


def load(*, busy: int, slots: int, queued_tokens: int, queued_tokens_max: int, kv_usage_ratio: float) -> float:
    """0…1: the largest of busy slots, queued prompt tokens and KV use, over their limits."""
    return min(1.0, max(busy / slots, queued_tokens / queued_tokens_max, kv_usage_ratio))


def takes_foreign(load_ratio: float) -> bool:
    """Whether a worker of this load offers slots to shards that it does not own."""
    return load_ratio < SPILL_LOAD
