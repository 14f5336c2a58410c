"""What a prefill worker says of who is warm there, and what it is asked: prefixes ahead of demand, and what it has served.

Creators are 64-bit hashes (`warm_view.key_of`), packed as little-endian u64.
"""

from typing import Final, Literal

import msgspec

Version = Literal[1]


class WarmChanges(msgspec.Struct, frozen=True, kw_only=True, tag="warm-changes"):
    """Creators that this worker's engine has `lost`, or `gained`. `number` counts changes from 1 on, in each epoch."""

    v: Version = 1
    worker: str
    epoch: str
    number: int
    lost: bytes = b""
    gained: bytes = b""


class WarmCreators(msgspec.Struct, frozen=True, kw_only=True, tag="warm-creators"):
    """All creators that are warm there after the change `number`."""

    v: Version = 1
    worker: str
    epoch: str
    number: int
    creators: bytes


warm_decoder: Final[msgspec.msgpack.Decoder[WarmChanges | WarmCreators]] = msgspec.msgpack.Decoder(
    WarmChanges | WarmCreators
)


# --------------------------------------------------------------------------------------------------------------
# To a prefill worker


class WantPrefix(msgspec.Struct, frozen=True, tag="want-prefix"):
    """Which prefix do the prompts of this creator (a subject token) share? Answered with a `Prefix`."""

    creator: str


class Prefix(msgspec.Struct, frozen=True, tag="prefix"):
    """Packed token ids and the salt under which they are cached; no ids where the worker knows of none."""

    salt: str = ""
    ids: bytes = b""


class WarmUp(msgspec.Struct, frozen=True, kw_only=True, tag="warm-up"):
    """Load a prefix into the engine's own cache, before requests of its creator come. Answered with a `WarmedUp`."""

    creator: str
    prefix: Prefix


class WarmedUp(msgspec.Struct, frozen=True, tag="warmed-up"):
    """`cached_tokens` of the prefix were there or loaded, not computed. `busy`: not done, requests come first."""

    state: Literal["warm", "busy", "failed"]
    cached_tokens: int = 0


class WantShards(msgspec.Struct, frozen=True, tag="want-shards"):
    """What has this worker served of each shard? Answered with `ShardsServed`."""


prefill_decoder: Final[msgspec.msgpack.Decoder[WantPrefix | WarmUp | WantShards]] = msgspec.msgpack.Decoder(
    WantPrefix | WarmUp | WantShards
)
prefix_decoder: Final = msgspec.msgpack.Decoder(Prefix)
warmed_up_decoder: Final = msgspec.msgpack.Decoder(WarmedUp)
