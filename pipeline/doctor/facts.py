"""What a look at a pipeline has seen. Facts alone: `findings.py` says what they mean.

Where something could not be looked at, its fact is None, and what stood in the way is another finding.
"""

from collections.abc import Mapping

import msgspec

from pipeline.protocol.messages import Account, Presence


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What a nats-server says of itself. `jetstream_error`: why its JetStream does not answer, or empty."""

    version: str
    max_payload: int
    jetstream_error: str = ""


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """A process, and by how much its clock is ahead of the broker's, in seconds."""

    presence: Presence
    ahead_s: float = 0.0


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker says of a shard's consumer."""

    stream: str
    name: str
    pending: int
    """Messages that were not delivered yet."""
    ack_pending: int
    ack_pending_max: int
    pulls: int
    """Pulls that wait for a message."""


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """LMCache's server, by its health page. `error`: why it does not answer, or empty."""

    url: str
    error: str = ""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A package that this project needs, with the version that is here (empty: none), and whether it will do."""

    name: str
    wanted: str
    found: str
    fits: bool


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """This host. Bytes; `shm_free` is what /dev/shm has left."""

    memory: int
    memory_free: int
    shm_free: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `heard` are all processes that say that they live; `differences` are sentences of `headrace streams diff`."""

    nats_error: str = ""
    server: Server | None = None
    differences: tuple[str, ...] | None = None
    shards: Mapping[str, int] | None = None
    """By class, as the broker's streams have them."""
    heard: tuple[Heard, ...] = ()
    consumers: tuple[Consumer, ...] = ()
    keeper_pulls: int | None = None
    """Pulls that wait at the keeper's consumer."""
    dead_letters: int = 0
    accounts: Mapping[str, Account | None] = {}
    gateway_error: str = ""
    store: Store | None = None
    packages: tuple[Package, ...] = ()
    machine: Machine | None = None
