"""The history of a conversation: its last exchanges, which of them go into a prompt, and the prompt that comes of it.

    turns.<creator>.<conversation>       a finished exchange each, numbered from 1
    chat.sent.<creator>.<conversation>   which reply was really sent, where an editor has changed the suggestion

**The window moves in steps.** Were the prompt to hold always the last `window` exchanges, every turn would drop the oldest, and
nothing after the persona would ever be found in a cache again. So its start stays where it is for `step` turns, and then moves by
`step` at once: between `window` and `window + step` exchanges are in a prompt, and of `step` turns all but one begin with the
prompt of the turn before.

All is a function of what is stored: the same version of the persona, the same last turn and the same last correction give the
same prompt, to the byte.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import msgspec

from pipeline.errors import InvalidField, PromptTooLong
from pipeline.limits import HISTORY_BYTES_MAX
from pipeline.protocol.messages import Version
from pipeline.protocol.personas import Persona

TURNS: Final = "TURNS"
SENT: Final = "SENT"
"""The streams."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """One finished exchange. `request` is the id that its publisher gave or got, `origin` names its message."""

    v: Version = 1
    number: int
    request: str
    origin: str
    message: Mapping[str, Any]
    reply: str


class Sent(msgspec.Struct, frozen=True, kw_only=True, tag="sent"):
    """To the message of this request, `text` was sent in the end. Of several words on one request the newest counts."""

    v: Version = 1
    request: str
    text: str


def start_of(finished: int, window: int, step: int) -> int:
    """How many of `finished` exchanges a prompt leaves out: a multiple of `step`."""
    return max(0, (finished - window) // step * step)


def before(turns: Iterable[Turn], origin: str) -> list[Turn]:
    """The exchanges, in order, that a message may see. One that is delivered again may have been answered, where there is no
    arbiter to say so: it sees neither its own reply nor what was said after it, and so renders the prompt that it had."""
    return list(takewhile(lambda turn: turn.origin != origin, turns))


def in_window(turns: Sequence[Turn], window: int, step: int) -> list[Turn]:
    """Of the last exchanges, in order, those of the next prompt: `window` to `window + step - 1`, once there are so many."""
    start = start_of(turns[-1].number, window, step) if turns else 0
    return [turn for turn in turns if turn.number > start]


def corrected(turns: Iterable[Turn], sent: Iterable[Sent]) -> list[Turn]:
    """The exchanges with the replies that were really sent. `sent` in the order in which it was said."""
    texts = {said.request: said.text for said in sent}
    return [msgspec.structs.replace(turn, reply=texts.get(turn.request, turn.reply)) for turn in turns]


def assembled(
    tree: Mapping[str, Any], persona: Persona, turns: Sequence[Turn], message: Mapping[str, Any], place: str
) -> dict[str, Any]:
    """The request with all its messages. Raises `PromptTooLong`, naming `place`, where the history passes every bound."""
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": persona.system}]
    for turn in turns:
        messages += (turn.message, {"role": "assistant", "content": turn.reply})
    size = sum(len(msgspec.json.encode(turn)) for turn in turns)
    if size > HISTORY_BYTES_MAX:
        raise too_long(len(turns), f"has {size} bytes, more than {HISTORY_BYTES_MAX}", place)
    made = {**tree, "messages": [*messages, message]}
    if persona.template:
        made["chat_template_kwargs"] = {**persona.template, **(tree.get("chat_template_kwargs") or {})}
    return made


def too_long(turns: int, why: str, place: str) -> PromptTooLong:
    """The error for a history that does not fit."""
    return PromptTooLong(
        f"The history of this conversation, {turns} exchanges, {why}: begin a new conversation, "
        "or let the operator lower conversations.window_turns.",
        param=place,
    )


def read_turn(data: bytes) -> Turn:
    """A stored exchange. Raises `InvalidField`."""
    try:
        return _turn(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidField(f"Not a turn: {error}.") from None


def read_sent(data: bytes) -> Sent:
    """An editor's word: `{"request": "…", "text": "…"}`. Raises `InvalidField`."""
    try:
        return _sent(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidField(f'Not {{"request": "…", "text": "…"}}: {error}.') from None


_turn: Final = msgspec.json.Decoder(Turn).decode
_sent: Final = msgspec.json.Decoder(Sent).decode
