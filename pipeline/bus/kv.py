"""A small table that every process may read and follow: a KV bucket, as NATS's own tools see it.

Keys are subject tokens, and a bucket has a thousand of them at most. A write is a publish, so whoever subscribes to the bucket's
subjects hears of it at once; what it hears is only that a key has changed, and reads it again, since a write may have been
refused. What was not heard is found by a look at the whole, at start, after a reconnect and every now and then.

Writes are compare-and-set: two writers that meet are told, and neither undoes the other's work unseen.
"""

from collections.abc import Callable

import msgspec

from pipeline.bus import reading
from pipeline.bus.connection import Bus, Message, Subscription
from pipeline.bus.errors import ApiError

WRONG_REVISION = 10071
"""`ApiError.err_code` of a write whose key is not at the revision that its writer has seen."""

_TIMEOUT_S = 2.0

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_OPERATION = "KV-Operation"


class Entry(msgspec.Struct, frozen=True):
    """A value, and the revision that a writer must name to replace it."""

    value: bytes
    revision: int


class _Problem(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Stored(msgspec.Struct):
    seq: int = 0
    error: _Problem | None = None


class Bucket:
    """The bucket `name`: the stream `KV_<name>`, declared in `configs/jetstream`."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."

    async def follow(self, changed: Callable[[str], None]) -> Subscription:
        """Have `changed` called with each key that somebody writes, which is to be read again."""

        def heard(message: Message) -> None:
            changed(message.subject.removeprefix(self._prefix))

        return await self._bus.subscribe(f"{self._prefix}>", heard)

    async def read(self, key: str) -> Entry | None:
        """The entry of a key. Raises `BusError`."""
        kept = await reading.last_of(self._bus, self._stream, self._prefix + key)
        if kept is None or kept.headers.get(_OPERATION):
            return None
        return Entry(kept.data, kept.sequence)

    async def version(self) -> int:
        """A number that grows with every write. Raises `BusError`."""
        return (await reading.state(self._bus, self._stream)).last

    async def load(self) -> dict[str, Entry]:
        """All entries, a request each. Raises `BusError`."""
        found: dict[str, Entry] = {}
        for subject in await reading.subjects_of(self._bus, self._stream, f"{self._prefix}>"):
            key = subject.removeprefix(self._prefix)
            if (entry := await self.read(key)) is not None:
                found[key] = entry
        return found

    async def write(self, key: str, value: bytes, revision: int = 0) -> int:
        """The new revision. Raises `ApiError` where the key is not at `revision` (0: not there), and `BusError`."""
        return await self._store(key, value, {_EXPECTED: str(revision)})

    async def delete(self, key: str, revision: int) -> None:
        """Followers hear of it, and then nothing is left of it. Raises as `write`."""
        await self._store(key, b"", {_EXPECTED: str(revision), _OPERATION: "DEL"})
        await reading.purge(self._bus, self._stream, self._prefix + key)

    async def _store(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        answer = await self._bus.request(self._prefix + key, value, _TIMEOUT_S, headers)
        stored = msgspec.json.decode(answer, type=_Stored)
        if stored.error is not None:
            raise ApiError(stored.error.code, stored.error.err_code, stored.error.description)
        return stored.seq
