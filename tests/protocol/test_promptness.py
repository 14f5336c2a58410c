"""When a request is refused for what it is expected to take, and when it is tried all the same."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.promptness import HALF, Promptness


def after(*seconds: float) -> Promptness:
    made = Promptness()
    for one in seconds:
        made.took(one)
    return made


def test_nothing_is_refused_of_which_nothing_is_known_but_what_is_late_already() -> None:
    assert not Promptness().too_late(0.001, 1.0)
    assert Promptness().too_late(0.0, 1.0)
    assert Promptness().too_late(-1.0, 1.0)


def test_what_would_be_late_is_refused_before_it_is_begun() -> None:
    steady = after(*[0.3] * 50)
    assert 0.3 <= steady.expected_s < 0.31
    assert steady.too_late(0.29, 1.0)
    assert not steady.too_late(0.32, 1.0)


def test_what_takes_now_this_long_and_now_that_is_expected_to_take_long() -> None:
    assert after(*[0.1, 0.3] * 50).expected_s > 0.35


def test_what_has_waited_for_less_than_half_its_time_is_tried_however_slow_others_were() -> None:
    slow = after(*[30.0] * 20)
    assert not slow.too_late(0.501, 1.0)
    assert slow.too_late(0.5, 1.0)
    for _ in range(60):
        slow.took(0.1)
    assert slow.expected_s < 0.5, "and so it shows that it is fast again"


@given(st.lists(st.floats(0.0, 1e3), max_size=50), st.floats(0.001, 100.0), st.floats(-10.0, 100.0))
def test_more_time_never_hurts(took: list[float], bound_s: float, left_s: float) -> None:
    made = after(*took)
    if not made.too_late(left_s, bound_s):
        assert not made.too_late(left_s + 1.0, bound_s)
    assert not made.too_late(HALF * bound_s + 0.001, bound_s)
