"""How a request ended at a worker, in the words under which it is counted and logged."""

from collections.abc import Mapping
from typing import Final

from pipeline.errors import ReplyError
from pipeline.protocol.request import Event

ENDINGS: Final[Mapping[Event, str]] = {
    Event.ACCEPTED: "handed_off",
    Event.WHOLE: "whole",
    Event.GONE: "gone",
    Event.CANCELLED: "cancelled",
    Event.FENCED: "fenced",
    Event.BUSY: "waiting",
    Event.UNHEARD: "unheard",
    Event.UNANSWERED: "unanswered",
    Event.DOUBT: "let_go",
    Event.LEFT: "let_go",
}
"""By the event that ended it. `waiting` for its conversation, and `let_go` alive, it comes again."""


def outcome(ended_by: Event | None, error: ReplyError | None) -> str:
    """`error` is what its receiver was told, where it was told one: then how that was heard matters less."""
    if error is not None and ended_by in (Event.WHOLE, Event.UNHEARD, Event.DEADLINE):
        return of_error(error)
    return ENDINGS.get(ended_by, "failed") if ended_by is not None else "failed"


def of_error(error: ReplyError) -> str:
    """`expired`, `late` to begin, `malformed` where its sender is to blame, or `failed`."""
    if error.code == "deadline":
        return "expired"
    if error.code == "first_token_late":
        return "late"
    return "malformed" if error.status < 500 else "failed"
