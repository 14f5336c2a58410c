"""The gateway's door: its two bounds, and how long it tells those outside to wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import CapacityError, NoWorkers
from pipeline.protocol.admission import (
    DRAIN_MEMORY_S,
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_MIN_S,
    RETRY_UNMEASURED_S,
    Admission,
    DrainRate,
)
from pipeline.protocol.classes import BATCH, INTERACTIVE


def drained_at(rate: float, seconds: float) -> Admission:
    """A full door of one place, after `rate` requests a second for `seconds`."""
    door = Admission(1)
    for number in range(round(rate * seconds)):
        door.enter(1, 1, number / rate)
        door.leave(number / rate, drained=True)
    door.enter(1, 1, seconds)
    return door


def refused_wait_s(door: Admission, now_s: float) -> float:
    with pytest.raises(CapacityError) as refused:
        door.enter(1, 1, now_s)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [(0, 1, "No prefill worker"), (1, 0, "No decode worker"), (0, 0, "No prefill and no decode worker")],
)
def test_a_request_that_lacks_a_kind_of_worker_is_told_which(prefill: int, decode: int, words: str) -> None:
    door = Admission(1)
    with pytest.raises(NoWorkers, match=words) as refused:
        door.enter(prefill, decode, 0.0)
    assert refused.value.retry_after_s == RETRY_UNMEASURED_S
    assert door.in_flight == 0


def test_no_more_than_the_bound_are_inside_and_one_that_leaves_makes_room() -> None:
    door = Admission(2)
    door.enter(1, 1, 0.0)
    door.enter(1, 1, 0.0)
    with pytest.raises(CapacityError) as refused:
        door.enter(1, 1, 0.0)
    assert (refused.value.status, refused.value.retryable) == (503, True)
    assert door.in_flight == 2
    door.leave(0.1, drained=True)
    door.enter(1, 1, 0.1)
    assert door.in_flight == 2


def test_a_door_that_nobody_is_inside_of_cannot_be_left() -> None:
    with pytest.raises(AssertionError):
        Admission(1).leave(0.0, drained=True)


def test_a_fast_drain_asks_for_the_shortest_wait() -> None:
    assert refused_wait_s(drained_at(rate=100, seconds=10), 10.0) == RETRY_AFTER_MIN_S


def test_a_slow_drain_asks_to_wait_as_long_as_a_place_takes() -> None:
    assert refused_wait_s(drained_at(rate=0.25, seconds=60), 60.0) == pytest.approx(4.0, rel=0.25)


def test_a_crowd_that_is_refused_comes_back_spread_over_the_places_it_needs() -> None:
    door = drained_at(rate=10, seconds=30)
    waits = [refused_wait_s(door, 30.0) for _ in range(100)]
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(10.0, rel=0.1)
    assert refused_wait_s(door, 50.0) == RETRY_AFTER_MIN_S


def test_a_drain_that_stalls_asks_for_the_longest_wait() -> None:
    assert refused_wait_s(drained_at(rate=10, seconds=10), 10.0 + 20 * DRAIN_MEMORY_S) == RETRY_AFTER_MAX_S


def test_a_request_that_never_reached_the_queue_says_nothing_about_the_drain() -> None:
    door = Admission(1)
    for _ in range(1000):
        door.enter(1, 1, 0.0)
        door.leave(0.0, drained=False)
    door.enter(1, 1, 0.0)
    assert refused_wait_s(door, 0.0) == RETRY_UNMEASURED_S


@pytest.mark.parametrize("rate", [0.5, 5.0, 500.0])
def test_the_measured_rate_is_the_true_one(rate: float) -> None:
    drain = DrainRate()
    for number in range(round(rate * 40)):
        drain.freed(number / rate)
    assert drain.per_s(40.0) == pytest.approx(rate, rel=0.12)


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=200))
def test_the_wait_stays_within_its_bounds_whatever_happens(steps: list[tuple[float, bool]]) -> None:
    door = Admission(3)
    now_s = 0.0
    for pause_s, arrives in steps:
        now_s += pause_s
        if not arrives:
            if door.in_flight:
                door.leave(now_s, drained=True)
        elif door.in_flight < door.in_flight_max:
            door.enter(1, 1, now_s)
        else:
            assert RETRY_AFTER_MIN_S <= refused_wait_s(door, now_s) <= RETRY_AFTER_MAX_S
        assert 0 <= door.in_flight <= door.in_flight_max


def saturated(door: Admission, seconds: float, rate: float, inside: int, klass: str = INTERACTIVE) -> float:
    """A full house for so long, served at a steady rate. The time then."""
    for _ in range(inside):
        door.enter(1, 1, 0.0, saturated=True, klass=klass)
    for number in range(1, int(seconds * rate)):
        door.leave(number / rate, drained=True, served=True, klass=klass)
        door.enter(1, 1, number / rate, saturated=True, klass=klass)
    return seconds


def test_who_would_wait_longer_than_it_may_take_is_refused_at_once() -> None:
    door = Admission(1000)
    now_s = saturated(door, seconds=20.0, rate=10.0, inside=50)
    with pytest.raises(CapacityError) as caught:
        door.enter(1, 1, now_s, saturated=True, timeout_s=4.0)
    assert caught.value.retry_after_s
    assert "4 s" in caught.value.message
    door.enter(1, 1, now_s, saturated=True, timeout_s=8.0)
    door.enter(1, 1, now_s, saturated=False, timeout_s=0.1)


def test_replies_that_end_only_when_a_slot_is_free_for_a_moment_count_as_what_the_fleet_can_do() -> None:
    """An engine's long step holds its slots, and finishes no reply; between two of them six end, and six come."""
    door = Admission(1000)
    for _ in range(50):
        door.enter(1, 1, 0.0, saturated=True)
    for step in range(40):
        now_s = step * 0.6
        door.enter(1, 1, now_s, saturated=True)
        for _ in range(5):
            door.enter(1, 1, now_s + 0.5, saturated=False)
        for _ in range(6):
            door.leave(now_s + 0.55, drained=True, served=True)
    door.enter(1, 1, 24.0, saturated=True, timeout_s=8.0)
    with pytest.raises(CapacityError, match="about 5 s"):
        door.enter(1, 1, 24.0, saturated=True, timeout_s=4.0)


def test_what_is_served_long_after_there_was_room_again_says_nothing_of_what_the_fleet_can_do() -> None:
    door = Admission(1000)
    now_s = saturated(door, seconds=20.0, rate=10.0, inside=50)
    door.enter(1, 1, now_s, saturated=False)
    for second in range(60):
        door.enter(1, 1, now_s + 10.0 + second, saturated=False)
        door.leave(now_s + 10.5 + second, drained=True, served=True)
    door.enter(1, 1, now_s + 100.0, saturated=True, timeout_s=8.0)


def test_batch_leaves_places_to_interactive_requests() -> None:
    door = Admission(8)
    for _ in range(6):
        door.enter(1, 1, 0.0, klass=BATCH)
    with pytest.raises(CapacityError, match="6 batch requests, and takes 6") as caught:
        door.enter(1, 1, 0.0, klass=BATCH)
    assert caught.value.retry_after_s
    door.enter(1, 1, 0.0, requests=2)
    door.leave(0.1, drained=True, klass=BATCH)
    door.enter(1, 1, 0.1, klass=BATCH)
    assert door.in_flight == 8


def test_who_waits_in_the_other_line_is_in_nobodys_way() -> None:
    door = Admission(1000)
    now_s = saturated(door, seconds=20.0, rate=10.0, inside=50, klass=BATCH)
    with pytest.raises(CapacityError):
        door.enter(1, 1, now_s, saturated=True, timeout_s=4.0, klass=BATCH)
    door.enter(1, 1, now_s, saturated=True, timeout_s=1.0)


def test_a_quiet_time_says_nothing_of_what_the_fleet_can_do() -> None:
    door = Admission(1000)
    for number in range(5):
        door.enter(1, 1, number * 60.0)
        door.leave(number * 60.0 + 1, drained=True, served=True)
    for _ in range(100):
        door.enter(1, 1, 300.0, saturated=True, timeout_s=1.0)


def test_what_expired_was_not_served() -> None:
    door = Admission(1000)
    now_s = saturated(door, seconds=20.0, rate=10.0, inside=20)
    for number in range(15):
        door.leave(now_s + number / 100, drained=True)
    with pytest.raises(CapacityError):
        door.enter(1, 1, now_s + 0.2, saturated=True, timeout_s=0.4)
