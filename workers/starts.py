"""Starts of redelivered requests, kept where they outlive the worker: a request that kills whoever works on it must be noticed.

A worker records its start, under its epoch, before a redelivered request reaches its engine, and takes it back however the
request ends, as long as it lives to do so. What is left are the records of the dead. Where one process both reads prompts and
writes replies, nobody is to be blamed for what is read beside it: while a redelivered prompt is, the records of all whose replies
are written there are taken back. One key a start, in the KV bucket `starts`:

    $KV.starts.<stream>.<sequence>.<epoch>
"""

import contextlib
from typing import Final

import anyio
import msgspec

from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.limits import STARTS_TIMEOUT_S
from pipeline.protocol.subjects import AckSubject

STREAM: Final = "KV_starts"


class Starts:
    """The records of one worker's life."""

    def __init__(self, bus: Bus, epoch: str) -> None:
        self._bus = bus
        self._epoch = epoch
        self._reading: set[str] = set()
        self._writing: dict[str, AckSubject] = {}

    async def read(self, message: AckSubject) -> list[str]:
        """As `record`, before its prompt is read. Whose reply is written beside it is not blamed if that kills us.

        Until it is taken back, or written here. What cannot be taken back of others counts.
        """
        key = self._key(message)
        self._reading.add(key)
        others = [self._writing.pop(other) for other in list(self._writing) if other != key]
        for other in others:
            with contextlib.suppress(BusError):
                await self.take_back(other)
        return await self.record(message)

    async def write(self, message: AckSubject) -> None:
        """As `record`, before its reply is written. Beside others whose prompts are read it is not recorded, but taken back."""
        key = self._key(message)
        self._reading.discard(key)
        if self._reading:
            await self.take_back(message)
            return
        self._writing[key] = message
        await self.record(message)

    async def record(self, message: AckSubject) -> list[str]:
        """Remember that we start on it. Returns the epochs that have, ours among them.

        Raises `BusError` or `CapacityError` where it cannot be recorded: then it must not be started.
        """
        await self._bus.store(self._key(message), b"", msg_id=outside.token(16), timeout_s=STARTS_TIMEOUT_S)
        asked = msgspec.json.encode({"subjects_filter": _keys(message)})
        said = await self._bus.request(f"$JS.API.STREAM.INFO.{STREAM}", asked, STARTS_TIMEOUT_S)
        subjects = (msgspec.json.decode(said).get("state") or {}).get("subjects") or {}
        return [subject.rpartition(".")[2] for subject in subjects]

    async def take_back(self, message: AckSubject) -> None:
        """We live, so it has not killed us. Raises `BusError`: then the record counts until the bucket forgets it."""
        self._reading.discard(self._key(message))
        self._writing.pop(self._key(message), None)
        asked = msgspec.json.encode({"filter": self._key(message)})
        await self._bus.request(f"$JS.API.STREAM.PURGE.{STREAM}", asked, STARTS_TIMEOUT_S)

    async def take_back_shielded(self, message: AckSubject) -> None:
        """As `take_back`, at the end of a job, which may be that of its worker. What fails is left for the bucket to forget."""
        with anyio.move_on_after(STARTS_TIMEOUT_S, shield=True), contextlib.suppress(BusError):
            await self.take_back(message)

    def _key(self, message: AckSubject) -> str:
        return f"$KV.starts.{message.stream}.{message.sequence}.{self._epoch}"


def _keys(message: AckSubject) -> str:
    return f"$KV.starts.{message.stream}.{message.sequence}.*"
