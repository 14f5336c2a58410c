"""Credits: no order of asks, returns, handoffs and silences can make a block appear or vanish."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pipeline.limits import ASK_SILENT_MAX_S, ASKS_WAITING_MAX
from pipeline.protocol.classes import BATCH, INTERACTIVE, WEIGHTS, Weights
from pipeline.protocol.credits import (
    ENDED_REMEMBERED,
    REPLIES_MEASURED_MIN,
    REPLIES_REMEMBERED,
    Consumption,
    GrantState,
    Ledger,
    Verdicts,
)
from pipeline.protocol.handed_over import LOOKS_REMEMBERED
from pipeline.protocol.messages import Ask

FAR_S = 1e12


def ask(name: str, blocks: int = 10, seats: int = 1, klass: str = INTERACTIVE) -> Ask:
    return Ask(
        ask=name,
        request="r",
        claim="c",
        klass=klass,
        blocks=blocks,
        seats=seats,
        deadline_s=FAR_S,
        answer_to=f"inbox.{name}",
    )


def batch(name: str, blocks: int = 10, seats: int = 1) -> Ask:
    return ask(name, blocks, seats, BATCH)


def ledger(blocks: int = 100) -> Ledger:
    return Ledger("decode-1", "e1", blocks)


def states(verdicts: Verdicts) -> dict[str, str]:
    return {verdict.ask: verdict.state for _, verdict in verdicts}


def test_an_ask_that_fits_is_granted_at_once_and_says_by_whom() -> None:
    book = ledger()
    [(subject, verdict)] = book.ask(ask("a"), 0.0, FAR_S)
    assert subject == "inbox.a"
    assert (verdict.state, verdict.decode, verdict.epoch) == ("granted", "decode-1", "e1")
    assert book.free == 90


def test_a_repeated_ask_is_answered_with_its_state_and_takes_nothing_more() -> None:
    book = ledger()
    book.ask(ask("a"), 0.0, FAR_S)
    assert states(book.ask(ask("a"), 0.1, FAR_S)) == {"a": "granted"}
    book.ask(ask("a", 50), 0.1, FAR_S)
    assert book.free == 90
    book.check()


def test_a_tenth_of_the_blocks_is_never_granted() -> None:
    book = ledger()
    assert states(book.ask(ask("a", 90), 0.0, FAR_S)) == {"a": "granted"}
    assert states(book.ask(ask("b", 1), 0.0, FAR_S)) == {"b": "waiting"}
    assert book.free == book.reserve == 10


def test_the_waiting_are_served_in_order_and_all_or_nothing() -> None:
    book = ledger()
    book.ask(ask("a", 60), 0.0, FAR_S)
    book.ask(ask("big", 50), 0.0, FAR_S)
    assert states(book.ask(ask("small", 5), 0.0, FAR_S)) == {"small": "waiting"}, (
        "a small one may not starve the big one"
    )
    assert states(book.give_back("a", 0.0)) == {"big": "granted", "small": "granted"}


def test_what_can_never_fit_is_refused_for_good() -> None:
    [(_, verdict)] = ledger().ask(ask("a", 91), 0.0, FAR_S)
    assert verdict.state == "refused"
    assert verdict.never
    assert "90" in verdict.reason


def test_a_full_waiting_list_and_a_closed_ledger_refuse_for_now() -> None:
    book = ledger()
    book.ask(ask("a", 90), 0.0, FAR_S)
    for number in range(ASKS_WAITING_MAX):
        book.ask(ask(f"w{number}"), 0.0, FAR_S)
    [(_, verdict)] = book.ask(ask("late"), 0.0, FAR_S)
    assert (verdict.state, verdict.never) == ("refused", False)
    book = ledger()
    book.close()
    assert states(book.ask(ask("a"), 0.0, FAR_S)) == {"a": "refused"}


def test_who_waits_where_nothing_is_granted_any_more_is_told_and_what_is_granted_stays() -> None:
    book = ledger()
    book.ask(ask("a", 90), 0.0, FAR_S)
    book.ask(ask("b", 5), 0.0, FAR_S)
    [(subject, verdict)] = book.close()
    assert (subject, verdict.state, verdict.never) == ("inbox.b", "refused", False)
    assert book.totals.refused == 1
    idle = [book.idle]
    assert book.consume("a", "e1", 0.0) is Consumption.FRESH
    assert book.release("a", 1.0, whole=True) == []
    assert [*idle, book.idle] == [False, True]
    book.check()
    book.reopen()
    assert states(book.ask(ask("b", 5), 1.0, FAR_S)) == {"b": "granted"}


def test_blocks_are_withheld_as_they_come_back_and_given_back_at_once() -> None:
    book = ledger()
    book.ask(ask("a", 60), 0.0, FAR_S)
    book.withhold(70)
    assert (book.withheld, book.blocks, book.free, book.reserve) == (40, 60, 0, 6)
    book.check()
    assert states(book.ask(ask("b", 10), 0.0, FAR_S)) == {"b": "waiting"}
    assert states(book.give_back("a", 0.0)) == {"b": "granted"}
    assert (book.withheld, book.blocks, book.free) == (70, 30, 20)
    book.withhold(0)
    assert (book.withheld, book.blocks, book.free, book.reserve) == (0, 100, 90, 10)
    book.check()


@pytest.mark.parametrize("for_good", [True, False])
def test_what_is_too_large_only_for_now_is_not_refused_for_good(for_good: bool) -> None:
    book = ledger()
    book.withhold(50, for_good=for_good)
    [(_, verdict)] = book.ask(ask("a", 60), 0.0, FAR_S)
    assert (verdict.state, verdict.never) == ("refused", for_good)


def test_who_waits_for_more_than_there_will_be_is_told_and_holds_nobody_up() -> None:
    book = ledger()
    book.ask(ask("x", 20), 0.0, FAR_S)
    assert states(book.ask(ask("big", 85), 0.0, FAR_S)) == {"big": "waiting"}
    book.resize(0.5, None)
    assert states(book.ask(ask("small", 1), 0.1, FAR_S)) == {"big": "refused", "small": "granted"}
    book.check()
    book = ledger()
    book.ask(ask("x", 60), 0.0, FAR_S)
    book.ask(ask("big", 50), 0.0, FAR_S)
    book.withhold(60, for_good=False)
    [(subject, verdict)] = book.give_back("x", 0.1)
    assert (subject, verdict.state, verdict.never) == ("inbox.big", "refused", False)
    book.check()


def test_an_ask_that_finds_less_than_it_was_let_in_for_is_answered_once() -> None:
    book = ledger()
    book.ask(ask("x", 60), 0.0, FAR_S)
    book.withhold(90)
    book.consume("x", "e1", 0.0)
    book.release("x", 1.0, whole=True)
    assert book.withheld == 90
    assert states(book.ask(ask("a", 20), 1.0, FAR_S)) == {"a": "refused"}


def test_what_prefills_hold_in_the_same_engine_is_no_disagreement() -> None:
    assert not ledger().reconcile(20)
    assert ledger().reconcile(20, 20)


def test_a_grant_is_spent_once_and_a_repeated_handoff_is_recognised() -> None:
    book = ledger()
    book.ask(ask("a"), 0.0, FAR_S)
    assert book.consume("a", "e1", 0.0) is Consumption.FRESH
    assert book.consume("a", "e1", 0.0) is Consumption.AGAIN
    assert book.give_back("a", 0.0) == [], "what is spent cannot be given back"
    book.release("a", 0.0, whole=True)
    assert book.consume("a", "e1", 0.0) is Consumption.AGAIN
    assert book.free == 100


def test_a_handoff_without_a_live_grant_finds_none() -> None:
    book = ledger()
    assert book.consume("a", "e1", 0.0) is Consumption.NO_GRANT
    assert book.consume("a", "e0", 0.0) is Consumption.OLD_EPOCH
    book.ask(ask("a", 90), 0.0, FAR_S)
    book.ask(ask("w"), 0.0, FAR_S)
    assert book.consume("w", "e1", 0.0) is Consumption.NO_GRANT


def test_only_so_many_ended_grants_are_remembered() -> None:
    book = ledger()
    for number in range(ENDED_REMEMBERED + 1):
        book.ask(ask(f"{number}", 1), 0.0, FAR_S)
        book.consume(f"{number}", "e1", 0.0)
        book.release(f"{number}", 0.0, whole=True)
    assert book.consume("0", "e1", 0.0) is Consumption.NO_GRANT
    assert book.consume("1", "e1", 0.0) is Consumption.AGAIN


def test_an_asker_that_falls_silent_loses_its_grant_and_its_place() -> None:
    book = ledger()
    book.ask(ask("a", 90), 0.0, FAR_S)
    book.ask(ask("w", 10), 0.0, FAR_S)
    book.ask(ask("w", 10), 0.5, FAR_S)
    assert states(book.tick(ASK_SILENT_MAX_S + 0.01)) == {"w": "granted"}
    assert (book.totals.expired, book.free) == (1, 90)
    book.ask(ask("x", 90), 0.7, FAR_S)
    book.tick(2.0)
    assert book.count(GrantState.WAITING) == 0
    assert book.totals.expired == 2, "an ask that only waited does not count as an expired grant"


def test_who_only_waited_can_leave_the_queue() -> None:
    book = ledger()
    book.ask(ask("a", 90), 0.0, FAR_S)
    book.ask(ask("w", 90), 0.0, FAR_S)
    book.ask(ask("x", 5), 0.0, FAR_S)
    assert book.give_back("w", 0.0) == []
    assert book.totals.returned == 0
    assert states(book.give_back("a", 0.0)) == {"x": "granted"}


def test_what_has_been_handed_off_needs_no_more_asking() -> None:
    book = ledger()
    book.ask(ask("a"), 0.0, 100.0)
    book.consume("a", "e1", 0.0)
    book.tick(200.0)
    assert (book.free, book.totals.expired) == (90, 0)


def test_the_books_are_open_and_conserved() -> None:
    book = ledger()
    for name in "abc":
        book.ask(ask(name), 0.0, FAR_S)
    book.ask(ask("w", 90), 0.0, FAR_S)
    book.consume("a", "e1", 0.0)
    book.give_back("b", 0.0)
    said = book.account(engine_blocks=7, preemptions=0)
    assert (said.blocks, said.free, said.waiting) == (100, 80, 1)
    assert (said.granted_now, said.granted_blocks, said.consumed_now, said.consumed_blocks) == (1, 10, 1, 10)
    assert said.granted == said.released + said.returned + said.expired + said.granted_now + said.consumed_now == 3


def test_an_engine_that_uses_more_than_was_handed_over_is_noticed() -> None:
    book = ledger()
    book.ask(ask("a"), 0.0, FAR_S)
    book.consume("a", "e1", 0.0)
    assert book.reconcile(10)
    assert not book.reconcile(11)
    assert book.disagreements == 1


def test_an_engine_whose_word_is_a_step_old_is_not_blamed() -> None:
    book = ledger()
    book.ask(ask("a"), 0.0, FAR_S)
    book.consume("a", "e1", 0.0)
    assert book.reconcile(10)
    book.release("a", 0.0, whole=True)
    assert book.reconcile(10)
    assert not all(book.reconcile(10) for _ in range(LOOKS_REMEMBERED))


def test_what_began_and_ended_between_two_looks_was_handed_over_all_the_same() -> None:
    book = ledger()
    book.ask(ask("a"), 0.0, FAR_S)
    assert book.reconcile(0)
    book.consume("a", "e1", 0.0)
    book.release("a", 0.0, whole=False)
    assert book.reconcile(10), "the engine's last word is of the step before it ended"
    assert not all(book.reconcile(10) for _ in range(LOOKS_REMEMBERED))


def test_an_ask_past_its_deadline_is_dropped() -> None:
    book = ledger()
    book.ask(ask("a"), 0.0, 100.0)
    book.tick(100.1)
    assert book.free == 100


def test_no_more_is_granted_than_the_engine_has_seats_for_and_a_few_on_their_way() -> None:
    book = Ledger("decode-1", "e1", 100, seats=4)
    assert [states(book.ask(ask(name, 1), 0.0, FAR_S))[name] for name in "abcdef"] == ["granted"] * 5 + ["waiting"]
    assert states(book.give_back("a", 0.0)) == {"f": "granted"}
    book.check()


def test_a_request_takes_a_seat_for_each_of_its_sequences() -> None:
    book = Ledger("decode-1", "e1", 100, seats=4)
    assert states(book.ask(ask("four", 1, seats=4), 0.0, FAR_S)) == {"four": "granted"}
    assert states(book.ask(ask("two", 1, seats=2), 0.0, FAR_S)) == {"two": "waiting"}
    assert states(book.ask(ask("one", 1), 0.0, FAR_S)) == {"one": "waiting"}, "a small one may not starve the big one"
    assert (book.seats, book.account(0, 0).seats, book.account(0, 0).seats_max) == (4, 4, 5)
    assert book.consume("four", "e1", 0.0) is Consumption.FRESH
    assert {verdict.ask for _, verdict in book.release("four", 1.0, whole=True)} == {"two", "one"}
    assert book.seats == 3
    book.check()


def test_a_request_of_more_sequences_than_there_are_seats_waits_until_it_is_alone() -> None:
    book = Ledger("decode-1", "e1", 100, seats=4)
    book.ask(ask("small", 1), 0.0, FAR_S)
    assert states(book.ask(ask("huge", 1, seats=30), 0.0, FAR_S)) == {"huge": "waiting"}
    assert states(book.give_back("small", 0.0)) == {"huge": "granted"}
    assert states(book.ask(ask("small again", 1), 0.0, FAR_S)) == {"small again": "waiting"}
    assert states(book.give_back("huge", 0.0)) == {"small again": "granted"}
    assert book.seats == 1
    book.check()


def test_where_an_engine_has_no_bound_of_seats_none_is_counted_against_it() -> None:
    book = ledger()
    assert states(book.ask(ask("many", 1, seats=1000), 0.0, FAR_S)) == {"many": "granted"}
    assert (book.seats, book.account(0, 0).seats_max) == (1000, None)
    book.check()


def experienced(reply_s: float) -> Ledger:
    """One seat's ledger whose last replies have taken this long, and whose seat is taken."""
    book = Ledger("decode-1", "e1", 100, seats=1)
    for number in range(REPLIES_MEASURED_MIN):
        book.ask(ask(f"{number}"), 0.0, FAR_S)
        book.consume(f"{number}", "e1", 0.0)
        book.release(f"{number}", reply_s, whole=True)
    book.ask(ask("on its way"), 0.0, FAR_S)
    book.ask(ask("running"), 0.0, FAR_S)
    return book


def test_one_that_cannot_be_whole_in_time_lets_others_go_first() -> None:
    book = experienced(reply_s=2.0)
    book.ask(ask("doomed"), 10.0, 2.9)
    book.ask(ask("timely"), 10.0, 3.1)
    assert states(book.give_back("running", 11.0)) == {"timely": "granted"}
    assert states(book.give_back("on its way", 11.0)) == {"doomed": "granted"}, "nobody else waits"


def test_where_all_are_late_they_are_served_in_order() -> None:
    book = experienced(reply_s=2.0)
    book.ask(ask("first"), 10.0, 1.5)
    book.ask(ask("second"), 10.0, 1.9)
    assert states(book.give_back("running", 10.0)) == {"first": "granted"}


def test_how_long_a_reply_takes_is_measured_by_whole_ones_and_not_by_few() -> None:
    book = ledger()
    assert book.quick_s(INTERACTIVE) == 0.0
    for number in range(2 * REPLIES_REMEMBERED):
        book.ask(ask(f"{number}"), 0.0, FAR_S)
        book.consume(f"{number}", "e1", 0.0)
        book.release(f"{number}", float(number), whole=number % 2 == 1)
        assert (book.quick_s(INTERACTIVE) > 0) == (number // 2 >= REPLIES_MEASURED_MIN - (number % 2))
    assert book.quick_s(INTERACTIVE) == 7.0, "of 1, 3, … 63 a tenth are quicker"


def test_interactive_asks_are_granted_before_batch_ones_that_came_earlier() -> None:
    book = ledger()
    book.ask(ask("a", 90), 0.0, FAR_S)
    book.ask(batch("later"), 0.0, FAR_S)
    book.ask(ask("sooner"), 0.0, FAR_S)
    assert [verdict.ask for _, verdict in book.give_back("a", 0.0)] == ["sooner", "later"]


def test_of_ten_grants_one_is_batchs_while_both_wait() -> None:
    book = ledger(20)  # of which one has 10, and there is no room for two
    book.ask(ask("first"), 0.0, FAR_S)
    for number in range(20):
        book.ask(ask(f"i{number}"), 0.0, FAR_S)
        book.ask(batch(f"b{number}"), 0.0, FAR_S)
    served, granted = "", "first"
    for _ in range(20):
        [(_, verdict)] = book.give_back(granted, 0.0)
        granted = verdict.ask
        served += granted[0]
    assert served == "i" * 8 + "b" + "i" * 9 + "bi"
    book.check()


def test_batch_leaves_a_quarter_of_the_blocks_and_seats_to_interactive_requests() -> None:
    book = ledger()
    assert states(book.ask(batch("a", 60), 0.0, FAR_S)) == {"a": "granted"}
    assert states(book.ask(batch("b", 8), 0.0, FAR_S)) == {"b": "waiting"}, "of 90 blocks it may have 67"
    assert states(book.ask(ask("c", 30), 0.0, FAR_S)) == {"c": "granted"}, "who is not held up by it"
    seated = Ledger("decode-1", "e1", 100, seats=4)
    asked = [batch("1", 1), batch("2", 1), batch("3", 1), batch("4", 1), ask("5", 1)]
    assert [states(seated.ask(one, 0.0, FAR_S))[one.ask] for one in asked] == [*["granted"] * 3, "waiting", "granted"]
    assert states(seated.give_back("1", 0.0)) == {"4": "granted"}


def test_a_batch_request_that_needs_more_than_its_class_may_have_goes_alone() -> None:
    book = ledger()
    book.ask(batch("small", 1), 0.0, FAR_S)
    assert states(book.ask(batch("huge", 90), 0.0, FAR_S)) == {"huge": "waiting"}
    assert states(book.ask(batch("small too", 1), 0.0, FAR_S)) == {"small too": "waiting"}, (
        "it may not starve the huge one"
    )
    assert states(book.give_back("small", 0.0)) == {"huge": "granted"}
    book.check()


def test_batch_whose_turn_it_is_holds_up_the_others_until_it_fits() -> None:
    book = Ledger("decode-1", "e1", 100, weights=Weights(interactive_weight=1, batch_weight=1))
    book.ask(ask("a", 45), 0.0, FAR_S)
    book.ask(ask("b", 45), 0.0, FAR_S)
    book.ask(batch("c", 60), 0.0, FAR_S)
    book.ask(ask("d", 45), 0.0, FAR_S)
    assert book.give_back("a", 0.0) == [], "half of what it needs is no use"
    assert states(book.give_back("b", 0.0)) == {"c": "granted"}
    assert states(book.give_back("c", 0.0)) == {"d": "granted"}


def test_what_cannot_be_whole_in_time_lets_both_classes_go_first() -> None:
    book = experienced(reply_s=2.0)
    book.ask(ask("doomed"), 10.0, 1.0)
    book.ask(batch("in time"), 10.0, FAR_S)
    book.ask(batch("doomed batch"), 10.0, 0.5)
    assert states(book.give_back("running", 10.0)) == {"in time": "granted"}
    assert states(book.give_back("on its way", 10.0)) == {"doomed": "granted"}


def test_each_class_has_its_own_quick_reply() -> None:
    book = experienced(reply_s=2.0)
    assert (book.quick_s(INTERACTIVE), book.quick_s(BATCH)) == (2.0, 0.0)


def test_batch_asks_leave_places_in_the_queue() -> None:
    book = ledger()
    book.ask(ask("a", 90), 0.0, FAR_S)
    most = WEIGHTS.most(ASKS_WAITING_MAX)
    for number in range(most):
        book.ask(batch(f"{number}"), 0.0, FAR_S)
    assert states(book.ask(batch("too many"), 0.0, FAR_S)) == {"too many": "refused"}
    assert states(book.ask(ask("welcome"), 0.0, FAR_S)) == {"welcome": "waiting"}
    assert (book.waiting(), book.waiting(BATCH)) == (most + 1, most)


def test_a_class_that_nobody_knows_is_not_put_off() -> None:
    book = ledger()
    book.ask(ask("a", 60, klass="new"), 0.0, FAR_S)
    assert states(book.ask(ask("b", 30, klass="new"), 0.0, FAR_S)) == {"b": "granted"}


def test_weights_change_from_the_next_grant_on() -> None:
    book = ledger()
    book.weigh(WEIGHTS)
    book.weigh(Weights(decode_room=0.0))
    assert states(book.ask(batch("a", 1), 0.0, FAR_S)) == {"a": "granted"}
    assert states(book.ask(batch("b", 89), 0.0, FAR_S)) == {"b": "granted"}


class LedgerMachine(RuleBasedStateMachine):
    """Any order of anything: every block is in one place, every grant in one state."""

    names = st.sampled_from([f"a{number}" for number in range(12)])

    @initialize(
        blocks=st.integers(1, 60),
        seats=st.none() | st.integers(1, 6),
        weights=st.builds(Weights, interactive_weight=st.integers(1, 4), batch_weight=st.integers(1, 2)),
    )
    def begin(self, blocks: int, seats: int | None, weights: Weights) -> None:
        self.weights, self.seats = weights, seats
        self.book = Ledger("decode-1", "e1", blocks, seats=seats, weights=weights)
        self.now_s = 0.0
        self.starved = 0
        """Interactive asks that were granted one after the other while batch waited that might have been."""
        self.consumed: set[str] = set()

    def counted(self, verdicts: Verdicts) -> None:
        """Who was granted, in order."""
        for _, verdict in verdicts:
            if verdict.state != "granted":
                continue
            if self.book._entries[verdict.ask].klass == BATCH:
                self.starved = 0
            elif self.batch_could:
                self.starved += 1

    @property
    def batch_could(self) -> bool:
        """Whether the batch request that is next has time, and is not held back by what batch may have in all."""
        soon_s = self.now_s + self.book.quick_s(BATCH)
        timely = [one for one in self.book._classes[BATCH].waiting.values() if one.until_s >= soon_s]
        return bool(timely) and self.book._leaves_room(timely[0].ask)

    @rule(
        name=names,
        blocks=st.integers(1, 40),
        seats=st.integers(1, 9),
        left_s=st.floats(0.0, 5.0),
        klass=st.sampled_from([INTERACTIVE, BATCH]),
    )
    def asks(self, name: str, blocks: int, seats: int, left_s: float, klass: str) -> None:
        known = name in self.book._entries
        if self.book.consume(name, "other", 0.0) is Consumption.OLD_EPOCH and name not in self.consumed:
            verdicts = self.book.ask(ask(name, blocks, seats, klass), self.now_s, left_s)
            self.counted([] if known else verdicts)

    @rule(name=names)
    def gives_back(self, name: str) -> None:
        self.counted(self.book.give_back(name, self.now_s))

    @rule(name=names)
    def hands_off(self, name: str) -> None:
        if self.book.consume(name, "e1", self.now_s) is Consumption.FRESH:
            assert name not in self.consumed, "spent twice"
            self.consumed.add(name)

    @rule(name=names)
    def finishes(self, name: str) -> None:
        if name in self.consumed and self.book._entries.get(name):
            self.counted(self.book.release(name, self.now_s, whole=True))

    @rule(blocks=st.integers(0, 60))
    def a_role_changes(self, blocks: int) -> None:
        self.book.withhold(blocks)
        self.counted(self.book.tick(self.now_s))

    @rule(passed_s=st.floats(0.0, 1.0))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.counted(self.book.tick(self.now_s))

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.book.check()

    @invariant()
    def nobody_waits_for_what_is_free(self) -> None:
        entry = self.book._next(self.now_s)
        if entry is not None:
            first = entry.ask
            lacks_blocks = self.book.free - first.blocks < self.book.reserve
            room = math.inf if self.book.seats_max is None else self.book.seats_max - self.book.seats
            assert lacks_blocks or room < min(first.seats, self.book.seats_max or 0)

    @invariant()
    def nobody_is_held_back_but_batch_that_has_all_it_may(self) -> None:
        if self.book.waiting() and self.book._next(self.now_s) is None:
            assert not self.book.waiting(INTERACTIVE)
            assert self.book._classes[BATCH].held

    @invariant()
    def batch_leaves_room_unless_one_request_is_more(self) -> None:
        batch = self.book._classes[BATCH]
        if self.seats is not None:
            assert batch.seats <= self.weights.most(self.seats) or batch.held == 1

    @invariant()
    def batch_is_not_starved(self) -> None:
        assert self.starved <= self.weights.starved_max

    @invariant()
    def the_engine_gets_no_more_sequences_than_it_has_room_for_unless_one_request_is_more(self) -> None:
        held = [entry.ask.seats for entry in self.book._entries.values() if entry.state is not GrantState.WAITING]
        assert self.book.seats_max is None or sum(held) <= self.book.seats_max or len(held) == 1


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
