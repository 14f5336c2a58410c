"""The share of its time that something is in use."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.occupancy import MEMORY_S, Occupancy


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


@given(st.lists(st.tuples(st.booleans(), st.floats(-1.0, 100.0)), max_size=20), st.floats(0.0, 100.0))
def test_it_is_a_share_whatever_happens(moments: list[tuple[bool, float]], now_s: float) -> None:
    occupancy = Occupancy(0.0)
    for used, at_s in moments:
        occupancy.use(used, at_s)
    assert 0.0 <= occupancy.ratio(now_s) <= 1.0
