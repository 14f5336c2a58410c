"""Columns for people: as wide as their content, numbers to the right."""

from collections.abc import Sequence

Cell = str | int | float


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Lines under a head. The last column takes what it needs."""
    lines = [list(head), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    numeric = [bool(rows) and all(not isinstance(row[at], str) for row in rows) for at in range(len(head))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def age(seconds: float) -> str:
    """`5 s`, `3 min`, `2 h`, `4 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else f"{cell:,}"
