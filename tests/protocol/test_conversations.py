"""Who works on a conversation: one at a time, in order, for no longer than what can come of it, however often it is delivered."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.limits import (
    CONVERSATION_LINE_MAX,
    CONVERSATION_RESERVED_S,
    CONVERSATION_WAIT_MAX_S,
    DELIVERIES_MAX,
    EXPIRED_AFTER_S,
)
from pipeline.protocol import conversations
from pipeline.protocol.conversations import Pins, Slot, Ticket, enter, holds, leave, over, wait_s


def ticket(number: int, until_s: float = 60.0) -> Ticket:
    return Ticket(float(number), f"R-{number}", until_s)


ONE, TWO, THREE = ticket(1), ticket(2), ticket(3)


def test_a_free_conversation_is_entered() -> None:
    slot = enter(None, ONE, "a", 1.0)
    assert slot == Slot(holder="R-1", by="a", until_s=60.0)
    assert holds(slot, "R-1", "a")


def test_the_same_request_enters_again_with_what_it_had_pinned_and_the_earlier_delivery_is_out() -> None:
    pinned = msgspec.structs.replace(enter(None, ONE, "a", 1.0), pins=Pins(7, 8, 9), reply="Fine.")
    again = enter(pinned, ONE, "b", 2.0)
    assert (again.pins, again.reply) == (Pins(7, 8, 9), "Fine.")
    assert holds(again, "R-1", "b")
    assert not holds(again, "R-1", "a")
    assert leave(again, "R-1", "a", 3.0) == again, "who has been superseded deletes nothing"


def test_others_wait_in_the_order_of_publication_and_the_first_of_them_is_next() -> None:
    slot = enter(enter(enter(None, ONE, "a", 1.0), THREE, "c", 1.0), TWO, "b", 1.0)
    assert (slot.holder, slot.line) == ("R-1", (TWO, THREE))
    assert enter(slot, TWO, "b", 1.0) == slot, "once"
    left = leave(slot, "R-1", "a", 5.0)
    assert left == Slot(holder="", by="", until_s=5.0 + CONVERSATION_RESERVED_S, line=(TWO, THREE))
    assert not holds(enter(left, THREE, "c", 5.1), "R-3", "c")
    entered = enter(left, TWO, "b", 5.1)
    assert holds(entered, "R-2", "b")
    assert entered.line == (THREE,)
    assert holds(enter(left, ONE, "z", 5.1), "R-1", "z"), "an earlier one still is before them"


def test_a_reservation_ends_where_the_first_does_not_come() -> None:
    slot = leave(enter(enter(None, ONE, "a", 1.0), TWO, "b", 1.0), "R-1", "a", 5.0)
    assert holds(enter(slot, THREE, "c", 5.0 + CONVERSATION_RESERVED_S), "R-3", "c")


def test_nobody_holds_a_conversation_once_all_that_follows_its_deadline_is_over() -> None:
    slot = enter(enter(None, ticket(1, until_s=10.0), "a", 1.0), THREE, "c", 1.0)
    assert slot.ends_s == 60.0
    assert not holds(enter(slot, TWO, "b", 10.0 + EXPIRED_AFTER_S - 0.1), "R-2", "b")
    entered = enter(slot, TWO, "b", 10.0 + EXPIRED_AFTER_S)
    assert holds(entered, "R-2", "b")
    assert entered.line == (THREE,)


def test_a_reply_that_has_become_whole_at_the_deadline_is_written_down_before_the_next_one_enters() -> None:
    """Found by seed 1892: the next one's worker, whose clock was ahead, entered without it."""
    slot = enter(None, ticket(1, until_s=10.0), "a", 1.0)
    slot = enter(slot, TWO, "b", 10.1)
    assert holds(slot, "R-1", "a"), "it is 9.9 to its own worker"
    assert holds(enter(leave(slot, "R-1", "a", 9.95), TWO, "b", 10.2), "R-2", "b"), (
        "and now it has read the turn of R-1"
    )


def test_who_leaves_alone_leaves_nothing() -> None:
    assert leave(enter(None, ONE, "a", 1.0), "R-1", "a", 2.0) is None
    assert leave(None, "R-1", "a", 2.0) is None
    past = enter(enter(None, ONE, "a", 1.0), ticket(2, until_s=1.5), "b", 1.0)
    assert leave(past, "R-1", "a", 2.0) is None, "whose time is over does not wait"


def test_a_request_that_is_over_holds_nothing_whichever_of_its_deliveries_had_entered() -> None:
    slot = enter(enter(None, ONE, "a", 1.0), TWO, "b", 1.0)
    assert over(slot, "R-1", 2.0) == leave(slot, "R-1", "a", 2.0)
    assert over(slot, "R-2", 2.0) == leave(slot, "R-2", "", 2.0), "another's stays"
    assert over(None, "R-1", 2.0) is None
    reserved = leave(slot, "R-1", "a", 2.0)
    assert over(reserved, "R-1", 2.0) == reserved


def test_who_gives_up_waiting_leaves_the_line() -> None:
    slot = enter(enter(None, ONE, "a", 1.0), TWO, "b", 1.0)
    left = leave(slot, "R-2", "", 2.0)
    assert left is not None
    assert left.line == ()
    reserved = leave(slot, "R-1", "a", 2.0)
    assert leave(reserved, "R-2", "", 2.0) is None, "it was reserved for nobody else"


def test_a_line_that_is_full_takes_no_more_and_ends_no_earlier() -> None:
    slot = enter(None, ONE, "a", 1.0)
    for number in range(2, CONVERSATION_LINE_MAX + 3):
        slot = enter(slot, ticket(number, until_s=60.0 + number), "x", 1.0)
    assert len(slot.line) == CONVERSATION_LINE_MAX
    assert slot.ends_s == 60.0 + CONVERSATION_LINE_MAX + 1


@pytest.mark.parametrize(("delivered", "expected_s"), [(0, 0.05), (1, 0.05), (2, 0.1), (3, 0.2), (6, 1.0), (999, 1.0)])
def test_a_message_stays_away_twice_as_long_each_time(delivered: int, expected_s: float) -> None:
    assert wait_s(delivered) == expected_s


def test_the_longest_request_does_not_run_out_of_deliveries() -> None:
    assert 600 / CONVERSATION_WAIT_MAX_S + 10 < DELIVERIES_MAX


def test_a_slot_is_read_as_it_was_written_and_what_is_none_holds_nobody_up() -> None:
    slot = enter(enter(None, ONE, "a", 1.0), TWO, "b", 1.0)
    assert conversations.read(conversations.write(slot)) == slot
    for data in (b"", b"x", b"{}", b'"\xff"'):
        assert conversations.read(data) is None


class OneAtATime(RuleBasedStateMachine):
    """Any number of requests that come, come again, die, end and give up, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.slot: Slot | None = None
        self.now_s = 0.0
        self.inside: dict[str, str] = {}
        self.deliveries = 0

    @rule(number=st.integers(1, 6))
    def comes(self, number: int) -> None:
        me = ticket(number, until_s=number * 10.0)
        if me.until_s <= self.now_s:
            return
        self.deliveries += 1
        by = str(self.deliveries)
        self.slot = enter(self.slot, me, by, self.now_s)
        if holds(self.slot, me.origin, by):
            gone = [origin for origin in self.inside if int(origin[2:]) * 10.0 + EXPIRED_AFTER_S <= self.now_s]
            self.inside = {origin: who for origin, who in self.inside.items() if origin not in gone}
            assert set(self.inside) <= {me.origin}, "nobody else is inside who may still be telling its end"
            self.inside[me.origin] = by
        else:
            assert me.origin not in self.inside

    @rule(number=st.integers(1, 6))
    def ends(self, number: int) -> None:
        origin = f"R-{number}"
        self.slot = leave(self.slot, origin, self.inside.pop(origin, ""), self.now_s)

    @rule(number=st.integers(1, 6), by=st.integers(0, 3))
    def is_late(self, number: int, by: int) -> None:
        """What an earlier delivery says changes nothing of who is inside."""
        origin = f"R-{number}"
        if self.inside.get(origin) == str(by):
            return
        held = [who for who, name in self.inside.items() if holds(self.slot, who, name)]
        if origin not in held:
            self.slot = leave(self.slot, origin, str(by), self.now_s)
        assert held == [who for who, name in self.inside.items() if holds(self.slot, who, name)]

    @precondition(lambda self: self.now_s < 60)
    @rule(seconds=st.floats(0.1, 5.0))
    def passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def nobody_waits_who_is_inside(self) -> None:
        if self.slot is not None:
            assert self.slot.holder not in [waiting.origin for waiting in self.slot.line]
            assert list(self.slot.line) == sorted(self.slot.line)
            assert self.slot.holder or self.slot.line, "nothing is reserved for nobody"


TestOneAtATime = OneAtATime.TestCase
TestOneAtATime.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
