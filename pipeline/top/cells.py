"""How a value is written: durations, counts, shares, and names from outside, which may hold anything."""

from typing import Final

EIGHTHS: Final[tuple[str, ...]] = ("", *"▏▎▍▌▋▊▉")


def text(said: str | None) -> str:
    """A name as it may stand on a terminal: what would move the cursor, or colour the rest, becomes `·`."""
    return "".join(character if character.isprintable() else "·" for character in said or "")


def duration(seconds: float | None) -> str:
    """`0.4 ms`, `47 ms`, `1.25 s`, `75 s`, `12 min`, `5 h`, `3 d`; nothing where it is unknown."""
    if seconds is None:
        return ""
    for under_s, scale, form, unit in _DURATIONS:
        if seconds < under_s:
            return f"{format(max(0.0, seconds) * scale, form)} {unit}"
    return f"{seconds / 86_400:,.0f} d"


_DURATIONS: Final = (
    (0.00995, 1e3, ".1f", "ms"),
    (0.9995, 1e3, ".0f", "ms"),
    (9.995, 1.0, ".2f", "s"),
    (120.0, 1.0, ".0f", "s"),
    (7_200.0, 1 / 60, ".0f", "min"),
    (172_800.0, 1 / 3600, ".0f", "h"),
)
"""Below how many seconds, what they are multiplied by, and the form and unit of that."""


def count(number: float | None) -> str:
    """`12,345`; nothing where it is unknown."""
    return "" if number is None else f"{number:,.0f}"


def share(part: float | None) -> str:
    """0…1 as `47 %`; nothing where it is unknown."""
    return "" if part is None else f"{100 * part:.0f} %"


def bar(part: float, width: int) -> str:
    """0…1 as so many characters, to an eighth of one."""
    eighths = round(8 * width * min(1.0, max(0.0, part)))
    filled = "█" * (eighths // 8) + EIGHTHS[eighths % 8]
    return filled.ljust(width, "░")


def of(part: float, whole: float) -> float | None:
    """A share, or None of nothing."""
    return part / whole if whole else None
