"""What the tests of the bus share: waiting with a bound, and a look at the broker."""

import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import anyio
import msgspec

from pipeline.bus.connection import Bus, Message
from pipeline.protocol.subjects import Shard, partition, request_in

CLASS: Final = "interactive"
STREAM: Final = "REQUESTS_interactive"
SHARDS: Final = 16


async def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> float:
    """Return when `holds` does; the seconds it took. Fails after `within_s`."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < within_s, "it did not become so in time"
        await anyio.sleep(0.002)
    return time.monotonic() - began_s


async def api(bus: Bus, subject: str, **body: Any) -> dict[str, Any]:
    """Ask the JetStream API; its answer, which is no error."""
    answer = await bus.request(f"$JS.API.{subject}", msgspec.json.encode(body) if body else b"", 5.0)
    tree = msgspec.json.decode(answer, type=dict[str, Any])
    assert "error" not in tree, tree["error"]
    return tree


async def stored(bus: Bus, stream: str = STREAM) -> int:
    """Messages that a stream holds."""
    state = (await api(bus, f"STREAM.INFO.{stream}"))["state"]
    return int(state["messages"])


async def waiting_pulls(bus: Bus, shard: Shard) -> int:
    """Pulls that wait at a shard's consumer."""
    return int((await api(bus, f"CONSUMER.INFO.{shard.stream}.{shard.consumer}"))["num_waiting"])


def fresh(name: str = "id") -> str:
    """A message id that no stream has seen: a purge does not forget ids."""
    return f"{name}-{secrets.token_hex(6)}"


def shard_of(creator: str) -> Shard:
    """Where the requests of a creator lie."""
    return Shard(CLASS, partition(creator, SHARDS))


def subject_of(creator: str) -> str:
    """Where the requests of a creator are published."""
    return request_in(CLASS, creator, creator)


class Heard:
    """A handler that remembers what it got."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def data(self) -> list[bytes]:
        """What the messages carried."""
        return [message.data for message in self.messages]
