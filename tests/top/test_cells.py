"""How values are written."""

import pytest

from pipeline.top import cells


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, ""),
        (-1.0, "0.0 ms"),
        (0.0004, "0.4 ms"),
        (0.00994, "9.9 ms"),
        (0.00996, "10 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.99, "9.99 s"),
        (9.996, "10 s"),
        (119.0, "119 s"),
        (121.0, "2 min"),
        (7_300.0, "2 h"),
        (1e6, "12 d"),
    ],
)
def test_durations(seconds: float | None, said: str) -> None:
    assert cells.duration(seconds) == said


@pytest.mark.parametrize(
    ("part", "said"),
    [(0.0, "░░░░"), (-1.0, "░░░░"), (0.5, "██░░"), (0.53, "██▏░"), (1.0, "████"), (7.0, "████"), (0.001, "░░░░")],
)
def test_bars(part: float, said: str) -> None:
    assert cells.bar(part, 4) == said


def test_counts_shares_and_what_is_unknown() -> None:
    assert [cells.count(12_345), cells.count(None)] == ["12,345", ""]
    assert [cells.share(0.471), cells.share(None)] == ["47 %", ""]
    assert [cells.of(1, 4), cells.of(1, 0)] == [0.25, None]
    assert [cells.text("a\x1b[1mb"), cells.text(None)] == ["a·[1mb", ""]
