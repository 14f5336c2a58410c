"""What keys do: (state, key) → state. And which keys the bytes of a terminal are."""

from collections.abc import Callable
from typing import Final

import msgspec

from pipeline.cli.top import INTERVAL_S_MAX, INTERVAL_S_MIN
from pipeline.top.sheets import VIEWS

SEQUENCES: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[C": "next",
    b"\x1bOC": "next",
    b"\x1b[D": "previous",
    b"\x1bOD": "previous",
    b"\x1b[5~": "page_up",
    b"\x1b[6~": "page_down",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1bOH": "home",
    b"\x1b[Z": "previous",
    b"\t": "next",
    b"k": "up",
    b"j": "down",
    b"g": "home",
    b" ": "pause",
    b"\x03": "q",
    b"\x04": "q",
}
"""Terminals differ in what arrows send; `k` and `j` are for those whose arrows nobody knows."""

PAGE: Final = 10

HELP: Final = (
    ("1 … 6", "a view; Tab, ← and → go round"),
    ("s, S", "order by the next, the previous column"),
    ("r", "turn the order round"),
    ("↑ ↓ j k", "scroll; PgUp, PgDn by ten; g to the top"),
    ("+, -", "look less often, more often"),
    ("space", "pause, and go on"),
    ("?", "this help; any key leaves it"),
    ("q, Ctrl-C", "leave"),
)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown. `column` orders the lines; None: as they come."""

    interval_s: float
    view: int = 0
    column: int | None = None
    reverse: bool = False
    offset: int = 0
    paused: bool = False
    help: bool = False
    over: bool = False


Change = Callable[[State], State]


def pressed(state: State, key: str, lines: int) -> State:
    """The state after a key, where a table of so many lines is shown. What means nothing changes nothing, but leaves the help."""
    if key == "q":
        return msgspec.structs.replace(state, over=True)
    if state.help:
        return msgspec.structs.replace(state, help=False)
    change = _CHANGES.get(key)
    return within(state if change is None else change(state), lines)


def within(state: State, lines: int) -> State:
    """Scrolled no further than to the last line."""
    return msgspec.structs.replace(state, offset=max(0, min(state.offset, lines - 1)))


def _viewing(view: int) -> Change:
    def change(state: State) -> State:
        new = view % len(VIEWS)
        return state if new == state.view else State(interval_s=state.interval_s, paused=state.paused, view=new)

    return change


def _round(step: int) -> Change:
    return lambda state: _viewing(state.view + step)(state)


def _ordered(step: int) -> Change:
    """Round all columns, and the order in which lines come, before the first."""

    def change(state: State) -> State:
        choices = (None, *range(len(VIEWS[state.view].columns)))
        column = choices[(choices.index(state.column) + step) % len(choices)]
        return msgspec.structs.replace(state, column=column, offset=0)

    return change


def _scrolled(lines: int) -> Change:
    return lambda state: msgspec.structs.replace(state, offset=max(0, state.offset + lines))


def _paced(factor: float) -> Change:
    def change(state: State) -> State:
        return msgspec.structs.replace(
            state, interval_s=min(max(state.interval_s * factor, INTERVAL_S_MIN), INTERVAL_S_MAX)
        )

    return change


def _helped(state: State) -> State:
    return msgspec.structs.replace(state, help=True)


_CHANGES: Final[dict[str, Change]] = {
    **{str(number + 1): _viewing(number) for number in range(len(VIEWS))},
    "next": _round(1),
    "previous": _round(-1),
    "s": _ordered(1),
    "S": _ordered(-1),
    "r": lambda state: msgspec.structs.replace(state, reverse=not state.reverse, offset=0),
    "up": _scrolled(-1),
    "down": _scrolled(1),
    "page_up": _scrolled(-PAGE),
    "page_down": _scrolled(PAGE),
    "home": lambda state: msgspec.structs.replace(state, offset=0),
    "+": _paced(2.0),
    "-": _paced(0.5),
    "pause": lambda state: msgspec.structs.replace(state, paused=not state.paused),
    "?": _helped,
    "h": _helped,
}


def keys(pending: bytes) -> tuple[list[str], bytes]:
    """The keys in what a terminal has sent, and the beginning of one whose rest has yet to come."""
    found: list[str] = []
    while pending:
        sequence = next((known for known in SEQUENCES if pending.startswith(known)), None)
        if sequence is not None:
            found.append(SEQUENCES[sequence])
            pending = pending[len(sequence) :]
        elif any(known.startswith(pending) for known in SEQUENCES):
            break
        elif pending[:2] in (b"\x1b[", b"\x1bO"):
            pending = _after_unknown(pending)
        else:
            found.append(chr(pending[0]))
            pending = pending[1:]
    return found, pending


def _after_unknown(pending: bytes) -> bytes:
    """What follows a sequence that we do not know: it ends with a letter or `~`."""
    for at in range(2, len(pending)):
        if 0x40 <= pending[at] <= 0x7E:
            return pending[at + 1 :]
    return b""
