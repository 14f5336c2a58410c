"""Conversations at the edge: the slot of each in KV `conversations`, and its exchanges in TURNS.

What may be done is `pipeline.protocol.conversations`; here it is read, decided, and written by compare-and-set, again where
another has written meanwhile. All functions raise `BusError`, and then the message is let go: whoever gets it next finds things
as they are.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from pipeline import outside
from pipeline.bus import batch, reading
from pipeline.bus.connection import Bus
from pipeline.bus.errors import ApiError, Duplicate, Unanswered
from pipeline.errors import CapacityError, InvalidField, RequestError
from pipeline.limits import CONVERSATION_TRIES_MAX, SLOT_BYTES_MAX, TURNS_KEPT_MAX, TURNS_TIMEOUT_S
from pipeline.protocol import conversations, subjects, turns
from pipeline.protocol.conversations import BUCKET, Pins, Slot, Talk, Ticket
from pipeline.protocol.turns import SENT, TURNS, Sent, Turn
from pipeline.telemetry import logs

log: Final = logs.get("conversations")

T = TypeVar("T")

_WRONG_LAST: Final = 10071
"""The server's number for a compare-and-set that another has forestalled."""

_STREAM: Final = f"KV_{BUCKET}"


class History(msgspec.Struct, frozen=True):
    """What is kept of a conversation, each with its sequence, in order."""

    turns: list[tuple[int, Turn]]
    sent: list[tuple[int, Sent]]


class Conversations:
    """All conversations, to one worker. Their keys are `<creator>.<conversation>`, tokens both."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def enter(self, key: str, me: Ticket, by: str) -> Slot:
        """The slot after we have come; `conversations.holds` says whether it is ours."""
        now_s = outside.unix_s()
        slot = await self._change(key, lambda slot: conversations.enter(slot, me, by, now_s), hoped_free=True)
        assert slot is not None
        return slot

    async def pin(self, key: str, origin: str, by: str, pins: Pins) -> bool:
        """Remember what the prompt is made of. False where the slot is not ours any more."""

        def pinned(slot: Slot | None) -> Slot | None:
            return msgspec.structs.replace(slot, pins=pins) if slot and conversations.holds(slot, origin, by) else slot

        return conversations.holds(await self._change(key, pinned), origin, by)

    async def keep(self, talk: Talk, reply: str) -> None:
        """The reply is whole, and about to be told."""

        def kept(slot: Slot | None) -> Slot | None:
            if slot is None or not conversations.holds(slot, talk.origin, talk.by):
                return slot
            full = msgspec.structs.replace(slot, reply=reply)
            return full if len(conversations.write(full)) <= SLOT_BYTES_MAX else slot

        await self._change(talk.conversation, kept)

    async def close(self, talk: Talk, reply: str | None) -> None:
        """Write the exchange down, once, where there is a reply; then let the next one in. Before the ack."""
        if reply is not None:
            await self._append(talk, reply)
        now_s = outside.unix_s()
        await self._change(talk.conversation, lambda slot: conversations.leave(slot, talk.origin, talk.by, now_s))

    async def give_up(self, talk: Talk) -> None:
        """Let the next one in, whichever delivery of this request has the slot: nobody wants it. Before the ack."""
        now_s = outside.unix_s()
        await self._change(talk.conversation, lambda slot: conversations.over(slot, talk.origin, now_s))

    async def history(self, key: str) -> History:
        """The exchanges that are kept, the last one surely among them, and an editor's words."""
        said = await batch.messages_of(self._bus, SENT, subjects.chat_sent(key), TURNS_KEPT_MAX)
        return History(_readable(await self._turns(key), turns.read_turn), _readable(said, turns.read_sent))

    async def _turns(self, key: str) -> list[batch.Item]:
        """A replica may answer that has not got the last one yet: which one that is, the stream's leader says."""
        last = await reading.last_of(self._bus, TURNS, subjects.turns(key))
        if last is None:
            return []
        for _ in range(CONVERSATION_TRIES_MAX):
            found = await batch.messages_of(self._bus, TURNS, subjects.turns(key), TURNS_KEPT_MAX)
            if found and found[-1].sequence >= last.sequence:
                return found
        raise Unanswered(f"The stream {TURNS} does not show the last turn of {key}.")

    async def _append(self, talk: Talk, reply: str) -> None:
        turn = Turn(number=talk.number, request=talk.request, origin=talk.origin, message=talk.message, reply=reply)
        subject, data = subjects.turns(talk.conversation), msgspec.json.encode(turn)
        try:
            with contextlib.suppress(Duplicate):
                await self._bus.store(subject, data, f"turn-{talk.origin}", TURNS_TIMEOUT_S)
        except CapacityError as error:
            raise Unanswered(f"The exchange was not written down: {error}.") from None
        except RequestError as error:
            log.warning("turn too large", conversation=talk.conversation, error=str(error))

    # ---- the slot

    async def _change(
        self, key: str, change: Callable[[Slot | None], Slot | None], *, hoped_free: bool = False
    ) -> Slot | None:
        """What the slot has become. With `hoped_free` it is read only where it is not."""
        slot, revision = (None, 0) if hoped_free else await self._read(key)
        for _ in range(CONVERSATION_TRIES_MAX):
            wanted = change(slot)
            if wanted == slot or await self._write(key, wanted, revision):
                return wanted
            slot, revision = await self._read(key)
        raise Unanswered(f"The conversation {key} is changed by others all the time.")

    async def _read(self, key: str) -> tuple[Slot | None, int]:
        kept = await reading.last_of(self._bus, _STREAM, _subject(key))
        if kept is None:
            return None, 0
        return (conversations.read(kept.data) if kept.data else None), kept.sequence

    async def _write(self, key: str, slot: Slot | None, revision: int) -> bool:
        """False where another has written since that revision. What is deleted leaves a mark for a second."""
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision), "Nats-TTL": _ttl(slot)}
        if slot is None:
            headers["KV-Operation"] = "DEL"
        data = conversations.write(slot) if slot is not None else b""
        answer = await self._bus.request(_subject(key), data, TURNS_TIMEOUT_S, headers)
        problem = msgspec.json.decode(answer, type=_PubAck).error
        if problem is not None and problem.err_code != _WRONG_LAST:
            raise ApiError(problem.code, problem.err_code, problem.description)
        return problem is None


class _Problem(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _PubAck(msgspec.Struct):
    error: _Problem | None = None


def _subject(key: str) -> str:
    return f"$KV.{BUCKET}.{key}"


def _ttl(slot: Slot | None) -> str:
    """For how long the broker keeps it: whole seconds, one at least. What has ended before is seen by its own times."""
    left_s = slot.ends_s - outside.unix_s() if slot is not None else 0.0
    return f"{max(1, math.ceil(left_s))}s"


def _readable(found: list[batch.Item], read: Callable[[bytes], T]) -> list[tuple[int, T]]:
    """What can be read. What cannot is nobody's to answer for here: anybody may write to a stream."""
    out = list[tuple[int, T]]()
    for item in found:
        try:
            out.append((item.sequence, read(item.data)))
        except InvalidField as error:
            log.warning("history unreadable", sequence=item.sequence, error=str(error))
    return out
