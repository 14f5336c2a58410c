"""What a prefill worker has served of each shard: its answer to `WantShards`."""

from typing import Final

import msgspec


class ShardServed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one shard: requests as its owner and in an owner's place, and prompt tokens by where their KV came from."""

    klass: str
    shard: int
    owned: int = 0
    spilled: int = 0
    hbm_tokens: int = 0
    lmcache_tokens: int = 0
    computed_tokens: int = 0


class ShardsServed(msgspec.Struct, frozen=True, kw_only=True, tag="shards-served"):
    """Since the worker began. `warm_creators`: whose shared prefix its engine holds."""

    worker: str
    warm_creators: int
    shards: list[ShardServed]


shards_served_decoder: Final = msgspec.msgpack.Decoder(ShardsServed)
