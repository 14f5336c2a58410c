"""What a prefill worker has served, by shard: for operators, who want to see placement work."""

from collections import defaultdict

import msgspec

from pipeline.protocol.served import ShardServed
from pipeline.protocol.subjects import Shard
from pipeline.telemetry import metrics
from workers.engines.port import Prefilled


class _Count(msgspec.Struct):
    owned: int = 0
    spilled: int = 0
    hbm_tokens: int = 0
    lmcache_tokens: int = 0
    computed_tokens: int = 0


class Served:
    """Counts since the worker began. Bounded by the shards that there are."""

    def __init__(self) -> None:
        self._counts: defaultdict[Shard, _Count] = defaultdict(_Count)

    def count(self, shard: Shard, prefilled: Prefilled, prompt_tokens: int, *, owned: bool) -> None:
        """A request has been handed over."""
        count = self._counts[shard]
        count.owned += owned
        count.spilled += not owned
        count.hbm_tokens += prefilled.hbm_tokens
        count.lmcache_tokens += prefilled.cached_tokens - prefilled.hbm_tokens
        count.computed_tokens += max(0, prompt_tokens - prefilled.cached_tokens)
        metrics.SERVED.labels(by="owner" if owned else "spill").inc()

    def rows(self) -> list[ShardServed]:
        """The shards of which anything was served."""
        return [
            ShardServed(klass=shard.klass, shard=shard.number, **msgspec.structs.asdict(count))
            for shard, count in sorted(self._counts.items())
        ]
