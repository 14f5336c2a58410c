"""Who works on a conversation: one request at a time, so that each sees all earlier replies.

The slot of a conversation is a key of the KV bucket `conversations`, changed only by compare-and-set. What a worker may do with
it is decided here:

    enter    it is free, or its holder is dead, or held by this very request (which has been delivered again): it is ours.
             Else wait: the request takes its place in the line, and its message is given back for a while
    pin      what the prompt is made of: the persona's version, the last turn, the last correction. Whoever enters again for the
             same request renders the same prompt
    keep     the reply is whole, and is about to be told: should its worker die now, the next one can still write it down
    leave    the exchange is written down, or there is none. Where others wait, the slot is reserved for the first of them
    over     the request is acked by a delivery that has never entered: one before it may have died with the slot

**Nothing is held for ever**: a slot ends `EXPIRED_AFTER_S` after its request's deadline, a reservation after the longest wait. At
the deadline itself the reply may have become whole by the clock of its worker, which is not everybody's, and be on its way.
`by` names one delivery's worker: what an earlier one still says is refused.

The line is in order of publication, so a message does not overtake one that has been seen waiting before it.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pipeline.limits import (
    CONVERSATION_LINE_MAX,
    CONVERSATION_RESERVED_S,
    CONVERSATION_WAIT_MAX_S,
    CONVERSATION_WAIT_S,
    EXPIRED_AFTER_S,
)

BUCKET: Final = "conversations"


class Ticket(msgspec.Struct, frozen=True, order=True):
    """A request that wants to work on a conversation: when its stream stored it, its place there, and its deadline. Unix time."""

    stored_at_s: float
    origin: str
    until_s: float


class Pins(msgspec.Struct, frozen=True):
    """Of what a prompt is made: the persona's version (0: there is none), and the last turn and correction by their sequences."""

    persona: int
    last: int
    sent: int


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """A request's part in a conversation, and what is written down of it once its reply is whole.

    `conversation` is `<creator>.<conversation>`, tokens both. `by` is the delivery that has entered it; `origin` names the
    request by the place and time at which its stream holds it; `number` is the exchange's.
    """

    conversation: str
    by: str
    origin: str
    number: int
    request: str
    message: Mapping[str, Any]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that somebody works on, or waits for.

    `holder` is the origin of the request that has it; empty where it is only reserved for the first in the line. `by` is the
    delivery that entered last. `reply` is set once the reply is whole.
    """

    holder: str
    by: str
    until_s: float
    pins: Pins | None = None
    reply: str | None = None
    line: tuple[Ticket, ...] = ()

    @property
    def open_s(self) -> float:
        """From when on anybody may have it."""
        return self.until_s + (EXPIRED_AFTER_S if self.holder else 0.0)

    @property
    def ends_s(self) -> float:
        """When nobody has anything to do with it any more."""
        return max([self.open_s, *(ticket.until_s for ticket in self.line)])


def enter(slot: Slot | None, me: Ticket, by: str, now_s: float) -> Slot:
    """The slot after `me` has come. Whether it has got in, `holds` says."""
    if slot is None:
        return Slot(holder=me.origin, by=by, until_s=me.until_s)
    if slot.holder == me.origin:
        return msgspec.structs.replace(slot, by=by)
    line = tuple(ticket for ticket in slot.line if ticket.until_s > now_s and ticket.origin != me.origin)
    first = min((*line, me))
    if slot.open_s <= now_s or (not slot.holder and first is me):
        return Slot(holder=me.origin, by=by, until_s=me.until_s, line=line)
    # Who comes to a line that is full waits outside it, and may be overtaken.
    waiting = tuple(sorted((*line, me))) if len(line) < CONVERSATION_LINE_MAX else line
    return msgspec.structs.replace(slot, line=waiting)


def holds(slot: Slot | None, origin: str, by: str) -> bool:
    """Whether this delivery of this request has the slot."""
    return slot is not None and (slot.holder, slot.by) == (origin, by)


def leave(slot: Slot | None, origin: str, by: str, now_s: float) -> Slot | None:
    """The slot without this request, or None where nothing is left of it."""
    if slot is None:
        return None
    line = tuple(ticket for ticket in slot.line if ticket.until_s > now_s and ticket.origin != origin)
    if not holds(slot, origin, by):
        return msgspec.structs.replace(slot, line=line) if slot.holder or line else None
    return Slot(holder="", by="", until_s=now_s + CONVERSATION_RESERVED_S, line=line) if line else None


def over(slot: Slot | None, origin: str, now_s: float) -> Slot | None:
    """The slot once nobody wants this request any more: said by a delivery that has not entered, for all before it."""
    return leave(slot, origin, slot.by if slot is not None else "", now_s)


def wait_s(delivered: int) -> float:
    """How long a message that has been delivered so often, and did not get in, stays away."""
    doublings = min(max(0, delivered - 1), 16)
    return float(min(CONVERSATION_WAIT_S * 2**doublings, CONVERSATION_WAIT_MAX_S))


def write(slot: Slot) -> bytes:
    """As it lies in the bucket."""
    return msgspec.json.encode(slot)


def read(data: bytes) -> Slot | None:
    """What lies in the bucket. What cannot be read holds nobody up."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


_decode: Final = msgspec.json.Decoder(Slot).decode
