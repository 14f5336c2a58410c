"""What keys do."""

import pytest

from pipeline.cli.top import INTERVAL_S_MAX, INTERVAL_S_MIN
from pipeline.top.keys import State, keys, pressed, within
from pipeline.top.sheets import VIEWS

FIRST = State(interval_s=2.0)


def after(*typed: str, state: State = FIRST, lines: int = 100) -> State:
    for key in typed:
        state = pressed(state, key, lines)
    return state


def test_digits_tab_and_arrows_choose_a_view() -> None:
    assert after("3").view == 2
    assert after("next").view == 1
    assert after("previous").view == len(VIEWS) - 1
    assert after(*["next"] * len(VIEWS)).view == 0
    assert after("9") == FIRST
    assert after("0") == FIRST


def test_another_view_begins_at_its_top_in_its_own_order() -> None:
    state = after("2", "s", "r", "down", "pause", "+", "3")
    assert (state.column, state.reverse, state.offset) == (None, False, 0)
    assert (state.paused, state.interval_s) == (True, 4.0)
    same = after("2", "s", "down")
    assert after("2", state=same) == same


def test_s_goes_round_the_columns_and_back_to_the_order_in_which_lines_come() -> None:
    columns = len(VIEWS[1].columns)
    walked = [after("2", *["s"] * times).column for times in range(columns + 2)]
    assert walked == [None, *range(columns), None]
    assert after("2", "S").column == columns - 1
    assert after("s").column is None, "the summary has no order"


def test_scrolling_stays_within_the_lines() -> None:
    assert after("2", "down", "page_down", lines=100).offset == 11
    assert after("2", "page_down", "page_up", "up").offset == 0
    assert after("2", *["down"] * 9, lines=3).offset == 2
    assert after("2", "page_down", "home").offset == 0
    assert after("2", "down", lines=0).offset == 0
    assert within(after("2", "page_down"), 4).offset == 3


def test_the_pace_has_bounds() -> None:
    assert after(*["-"] * 9).interval_s == INTERVAL_S_MIN
    assert after(*["+"] * 9).interval_s == INTERVAL_S_MAX


def test_any_key_leaves_the_help_and_does_nothing_else_but_q() -> None:
    assert after("?").help
    assert after("?", "3") == FIRST
    assert after("?", "q").over
    assert after("q").over


@pytest.mark.parametrize(
    ("sent", "meant", "rest"),
    [
        (b"12?q", ["1", "2", "?", "q"], b""),
        (b"\x1b[A\x1bOB\x1b[5~\x1b[6~", ["up", "down", "page_up", "page_down"], b""),
        (b"\x1b[Z\t\x1b[C\x1b[D", ["previous", "next", "next", "previous"], b""),
        (b"jkg \x03", ["down", "up", "home", "pause", "q"], b""),
        (b"s\x1b", ["s"], b"\x1b"),
        (b"\x1b[", [], b"\x1b["),
        (b"\x1b[5", [], b"\x1b[5"),
        (b"\x1bq", ["\x1b", "q"], b""),
        (b"\x1b[24~q", ["q"], b""),
        (b"\x1b[99", [], b""),
        (b"\xc3\xa4q", ["Ã", "¤", "q"], b""),
    ],
)
def test_bytes_of_a_terminal_are_keys(sent: bytes, meant: list[str], rest: bytes) -> None:
    assert keys(sent) == (meant, rest)


def test_a_key_that_comes_in_pieces_is_one_key() -> None:
    found, rest = keys(b"\x1b")
    assert found == []
    assert keys(rest + b"[A") == (["up"], b"")
