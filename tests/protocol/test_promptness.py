"""When a request is refused for what it is expected to take, and when it is tried all the same."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.promptness import FRESH, Promptness

STEP = 32


def after(*each_s: float) -> Promptness:
    """Reads of 100 tokens, one after the other, each taking so long."""
    made = Promptness(STEP)
    for one in each_s:
        made.begin(100, 0.0).end(one)
    return made


def test_nothing_is_refused_of_which_nothing_is_known_but_what_is_late_already() -> None:
    assert not Promptness(STEP).too_late(100, 0.001, 1.0)
    assert Promptness(STEP).too_late(100, 0.0, 1.0)
    assert Promptness(STEP).too_late(100, -1.0, 1.0)


def test_what_would_be_late_is_refused_before_it_is_begun() -> None:
    steady = after(*[0.3] * 50)
    assert 0.3 <= steady.expected_s(100) < 0.31
    assert steady.too_late(100, 0.29, 1.0)
    assert not steady.too_late(100, 0.32, 1.0)


def test_a_prompt_takes_as_long_as_it_and_all_before_it_have_tokens() -> None:
    made = after(*[0.1] * 50)
    assert made.expected_s(200) > 1.9 * made.expected_s(100)
    before = made.begin(300, 0.0)
    assert made.too_late(100, 0.35, 1.0)
    before.give_up()
    assert not made.too_late(100, 0.35, 1.0)
    assert made.expected_s(1) == made.expected_s(STEP), "a step is the least"


def test_one_that_waited_behind_others_says_no_more_than_they_do() -> None:
    made = after(*[0.1] * 50)
    expected_s = made.expected_s(100)
    first, second = made.begin(100, 0.0), made.begin(100, 0.0)
    first.end(0.1)
    second.end(0.2)
    assert abs(made.expected_s(100) - expected_s) < 0.001


def test_what_is_given_up_says_nothing_and_leaves_nothing_and_all_ends_but_once() -> None:
    made = after(*[0.1] * 50)
    expected_s = made.expected_s(100)
    read = made.begin(100, 0.0)
    read.give_up()
    read.end(50.0)
    read.give_up()
    assert made.expected_s(100) == expected_s


def test_what_takes_now_this_long_and_now_that_is_expected_to_take_long() -> None:
    assert after(*[0.1, 0.3] * 50).expected_s(100) > 0.28


def test_what_has_only_just_come_is_tried_however_slow_others_were() -> None:
    slow = after(*[30.0] * 20)
    assert not slow.too_late(100, 0.901, 1.0)
    assert slow.too_late(100, 0.9, 1.0)
    for _ in range(60):
        slow.begin(100, 0.0).end(0.1)
    assert slow.expected_s(100) < 0.5, "and so it shows that it is fast again"


@given(
    st.lists(st.floats(0.0, 1e3), max_size=50), st.floats(0.001, 100.0), st.floats(-10.0, 100.0), st.integers(0, 5000)
)
def test_more_time_never_hurts(each_s: list[float], bound_s: float, left_s: float, tokens: int) -> None:
    made = after(*each_s)
    if not made.too_late(tokens, left_s, bound_s):
        assert not made.too_late(tokens, left_s + 1.0, bound_s)
    assert not made.too_late(tokens, FRESH * bound_s + 0.001, bound_s)
