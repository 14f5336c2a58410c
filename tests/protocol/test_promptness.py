"""When a request is refused for what it is expected to take, and when it is tried all the same."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.promptness import FRESH, Promptness

STEP = 32
BOUND_S = 1.0


def after(*each_s: float) -> Promptness:
    """Reads of 100 tokens that have taken so long each, one after the other, until now, which is 0."""
    made, now_s = Promptness(STEP), -sum(each_s)
    for one in each_s:
        read = made.begin(100, now_s)
        now_s += one
        read.end(now_s)
    return made


def late(made: Promptness, left_s: float, tokens: int = 100, now_s: float = 0.0) -> bool:
    return made.too_late(tokens, now_s, now_s + left_s, BOUND_S)


def test_nothing_is_refused_of_which_nothing_is_known_but_what_is_late_already() -> None:
    assert not late(Promptness(STEP), 0.001)
    assert late(Promptness(STEP), 0.0)
    assert late(Promptness(STEP), -1.0)


def test_what_would_be_late_is_refused_before_it_is_begun() -> None:
    steady = after(*[0.3] * 50)
    assert 0.299 < steady.expected_s(100, 0.0) < 0.301
    assert late(steady, 0.29)
    assert not late(steady, 0.32)


def test_a_prompt_takes_as_long_as_its_tokens_behind_what_is_left_of_those_before_it() -> None:
    made = after(*[0.1] * 50)
    assert 0.19 < made.expected_s(200, 0.0) < 0.21
    assert made.expected_s(1, 0.0) == made.expected_s(STEP, 0.0), "a step is the least"
    before = made.begin(300, 0.0)
    assert 0.39 < made.expected_s(100, 0.0) < 0.41
    assert 0.19 < made.expected_s(100, 0.2) < 0.21, "by then 200 of its tokens have been computed"
    assert 0.09 < made.expected_s(100, 5.0) < 0.11, "it takes longer than it should, but not less than no time"
    before.give_up(5.0)
    assert 0.09 < made.expected_s(100, 5.0) < 0.11


def test_one_that_waited_behind_others_took_only_what_it_took_itself() -> None:
    made = after(*[0.1] * 50)
    expected_s = made.expected_s(100, 0.0)
    first, second, third = (made.begin(100, 0.0) for _ in range(3))
    first.end(0.1)
    second.give_up(0.15)
    third.end(0.25)
    assert abs(made.expected_s(100, 0.25) - expected_s) < 0.001


def test_what_is_given_up_says_nothing_and_all_ends_but_once() -> None:
    made = after(*[0.1] * 50)
    expected_s = made.expected_s(100, 0.0)
    read = made.begin(100, 0.0)
    read.give_up(9.0)
    read.end(50.0)
    read.give_up(60.0)
    made.nothing.end(70.0)
    assert made.expected_s(100, 70.0) == expected_s


def test_what_takes_now_this_long_and_now_that_is_expected_to_take_the_mean() -> None:
    assert 0.18 < after(*[0.1, 0.3] * 50).expected_s(100, 0.0) < 0.22


def test_where_nothing_is_read_what_has_only_just_come_is_tried_however_slow_others_were() -> None:
    slow = after(*[30.0] * 20)
    assert not late(slow, 0.901)
    assert late(slow, 0.9)
    tried = slow.begin(100, 0.0)
    assert late(slow, 0.999), "one at a time"
    tried.give_up(0.0)
    for number in range(60):
        slow.begin(100, number * 1.0).end(number + 0.1)
    assert slow.expected_s(100, 60.0) < 0.5, "and so it shows that it is fast again"


@given(st.lists(st.floats(0.0, 1e3), max_size=50), st.floats(-10.0, 100.0), st.integers(0, 5000))
def test_more_time_never_hurts(each_s: list[float], left_s: float, tokens: int) -> None:
    made = after(*each_s)
    if not late(made, left_s, tokens):
        assert not late(made, left_s + 1.0, tokens)
    assert not late(made, FRESH * BOUND_S + 0.001, tokens)
