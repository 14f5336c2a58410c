"""The share of its time that something is in use."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.occupancy import MEMORY_S, Occupancy, promised_ratio


def test_what_is_never_used_is_empty_and_what_always_is_becomes_full() -> None:
    occupancy = Occupancy(10.0)
    assert occupancy.ratio(20.0) == 0.0
    occupancy.use(True, 20.0)
    assert occupancy.ratio(20.0) == 0.0
    assert occupancy.ratio(20.0 + MEMORY_S) == pytest.approx(1 - 1 / math.e)
    assert occupancy.ratio(60.0) > 0.99
    occupancy.use(False, 60.0)
    assert occupancy.ratio(60.0 + 10 * MEMORY_S) < 0.01


def test_what_is_used_in_turn_is_as_full_as_its_share_of_the_time() -> None:
    occupancy = Occupancy(0.0)
    for number in range(100):
        occupancy.use(True, 0.4 * number)
        occupancy.use(False, 0.4 * number + 0.3)
    assert occupancy.ratio(40.0) == pytest.approx(0.75, abs=0.05)


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(-1.0, 100.0)), max_size=20), st.floats(0.0, 100.0))
def test_it_is_a_share_whatever_happens(moments: list[tuple[float, float]], now_s: float) -> None:
    occupancy = Occupancy(0.0)
    for level, at_s in moments:
        occupancy.use(level, at_s)
    assert 0.0 <= occupancy.ratio(now_s) <= 1.0


@pytest.mark.parametrize(
    ("blocks", "room", "seats", "seats_max", "waiting", "expected"),
    [
        (100, 100, 0, None, 0, 0.0),
        (100, 25, 0, None, 0, 0.75),
        (100, 90, 6, 8, 0, 0.75),
        (100, 90, 9, 8, 0, 1.0),
        (100, 90, 0, 8, 2, 1.0),
        (0, 0, 0, 0, 0, 0.0),
    ],
)
def test_a_decode_worker_is_as_full_as_the_scarcer_of_blocks_and_seats(
    blocks: int, room: int, seats: int, seats_max: int | None, waiting: int, expected: float
) -> None:
    assert promised_ratio(blocks, room, seats, seats_max, waiting) == expected
