"""When a unit that has died is started again, and when not. Pure.

A life that was ready is followed by another: at once after a long one, later and later after short ones. What dies
before it is ready will most likely do so again, so after a few such deaths in a row the stack gives up, and at once where the
process itself says (exit status 2) that its set-up cannot work. A worker that ends well was told to (`headrace drain`), and
stays away.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pipeline.cli import OPERATOR_EXIT

SHORT_LIFE_S: Final = 10.0
"""A shorter life makes the next start wait longer."""

FIRST_DELAY_S: Final = 0.25
"""Doubles with each short life in a row."""

DELAY_S_MAX: Final = 5.0
"""A restarted worker is back within seconds, however often it has died before."""

UNREADY_DEATHS_MAX: Final = 5
"""Deaths in a row before having been ready: after this many the stack gives up."""

DEATHS_KEPT: Final = 16
"""More in a row change nothing."""


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """One death: how long the process lived, whether it had been ready, its exit status (negative: a signal)."""

    lived_s: float
    was_ready: bool
    status: int


class Again(msgspec.Struct, frozen=True):
    """Start it again after this long."""

    after_s: float


class StayAway(msgspec.Struct, frozen=True):
    """It has left, as it was told."""


class GiveUp(msgspec.Struct, frozen=True):
    """Do not start it again, because of this."""

    reason: str


def verdict(deaths: Sequence[Death], *, may_leave: bool = False) -> Again | StayAway | GiveUp:
    """What to do after the last of `deaths`, in their order. `may_leave`: it can be told to end by others than us."""
    last = deaths[-1]
    if may_leave and last.was_ready and last.status == 0:
        return StayAway()
    unready = _run(deaths, lambda death: not death.was_ready)
    if unready and last.status == OPERATOR_EXIT:
        return GiveUp(f"it {describe(last.status)} before it was ready")
    if unready >= UNREADY_DEATHS_MAX:
        return GiveUp(f"it died {unready} times before it was ready; the last time it {describe(last.status)}")
    short = _run(deaths, lambda death: death.lived_s < SHORT_LIFE_S)
    return Again(min(DELAY_S_MAX, FIRST_DELAY_S * 2 ** (short - 1)) if short else 0.0)


def _run(deaths: Sequence[Death], is_such: Callable[[Death], bool]) -> int:
    """How many of the last deaths, without a gap, are such."""
    count = 0
    for death in reversed(deaths):
        if not is_such(death):
            break
        count += 1
    return count


def describe(status: int) -> str:
    """An exit status in words."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
