"""What a prefill worker says of who is warm there.

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
