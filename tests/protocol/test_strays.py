"""Strays: what is delivered and not claimed is given back, what waits or is worked on is not."""

from pipeline.limits import ACK_WAIT_S, STRAY_ASK_PERIOD_S, STRAY_ASKS_MAX, STRAY_OVERDUE_S, STRAY_PATIENCE_S
from pipeline.protocol.strays import Ask, Queued, Strays
from pipeline.protocol.subjects import ack_of, parse_ack

HERE = "REQUESTS_interactive.s0"
STEP_S = 0.051


class Receiver:
    """One whose consumers have delivered up to `delivered`, and answer at once."""

    def __init__(self, delivered: int = 10) -> None:
        self.strays = Strays()
        self.delivered = delivered
        self.now_s = 100.0
        self.asked: list[str] = []

    def stores(self, request: str = "r", sequence: int = 1, consumer: str = HERE) -> None:
        self.strays.waits(request, Queued(consumer, sequence), self.now_s)

    def looks(self, passed_s: float, *, answered: bool = True) -> list[int]:
        """Look for so long, as often as a gateway does: the sequences that are given back."""
        back: list[int] = []
        for _ in range(round(passed_s / STEP_S)):
            self.now_s += STEP_S
            for ask in self.strays.asks(self.now_s):
                self.asked.append(ask.consumer)
                back += [one.sequence for one in self.strays.told(ask, self.delivered)] if answered else []
        return back


def ack(delivered: int) -> str:
    return f"$JS.ACK.{HERE}.{delivered}.1.1.0.0"


def test_what_is_delivered_and_not_claimed_is_given_back() -> None:
    receiver = Receiver()
    receiver.stores()
    assert receiver.looks(STRAY_OVERDUE_S + STRAY_PATIENCE_S - STEP_S) == []
    assert receiver.looks(3 * STEP_S) == [1]


def test_it_is_given_back_again_where_it_strays_again() -> None:
    receiver = Receiver()
    receiver.stores()
    assert receiver.looks(0.7) == [1, 1]


def test_while_nobody_claims_it_it_is_given_back_more_and_more_seldom() -> None:
    receiver = Receiver()
    receiver.stores()
    assert len(receiver.looks(14.0)) == 7
    assert len(receiver.looks(70.0)) == 10, "and seldom enough then"


def test_what_still_waits_in_the_queue_is_left_there() -> None:
    receiver = Receiver(delivered=0)
    receiver.stores()
    assert receiver.looks(3.0) == []
    assert len(receiver.asked) <= 3.0 / STRAY_ASK_PERIOD_S
    receiver.delivered = 1
    assert receiver.looks(STRAY_PATIENCE_S) == [], "it has been delivered just now"
    assert receiver.looks(STRAY_PATIENCE_S) == [1]


def test_what_is_claimed_in_time_is_never_asked_for() -> None:
    receiver = Receiver()
    receiver.stores()
    assert receiver.looks(STRAY_OVERDUE_S - STEP_S) == []
    receiver.strays.claimed("r", ack(1))
    assert receiver.looks(2.0) == []
    assert receiver.asked == []
    assert len(receiver.strays) == 0


def test_what_is_over_is_forgotten() -> None:
    receiver = Receiver()
    receiver.stores("r", 1)
    receiver.stores("s", 2)
    receiver.strays.forget("r")
    receiver.strays.forget("nobody")
    assert receiver.looks(0.5) == [2]


def test_what_was_given_back_for_a_dead_holder_may_stray_too() -> None:
    receiver = Receiver()
    receiver.stores()
    receiver.strays.claimed("r", ack(1))
    receiver.strays.waits("r", Queued(HERE, 1), receiver.now_s, first=False)
    assert receiver.looks(0.5) == [1]
    receiver.strays.claimed("r", ack(1))
    assert receiver.strays.patience_s == STRAY_PATIENCE_S, "a broker that was killed may count anew"


def test_patience_doubles_with_those_who_were_only_slow_and_ends_with_a_real_stray() -> None:
    receiver = Receiver()
    for patience_s in (0.4, 0.8, ACK_WAIT_S, ACK_WAIT_S):
        receiver.stores()
        assert receiver.looks(2 * ACK_WAIT_S)
        receiver.strays.claimed("r", ack(1))
        assert receiver.strays.patience_s == patience_s
    receiver.stores()
    assert receiver.looks(ACK_WAIT_S) == []
    assert receiver.looks(ACK_WAIT_S) == [1]
    receiver.strays.claimed("r", ack(2))
    assert receiver.strays.patience_s == STRAY_PATIENCE_S


def test_claims_that_were_lost_with_the_connection_get_their_time_anew() -> None:
    receiver = Receiver()
    receiver.stores()
    assert receiver.looks(0.2) == []
    receiver.strays.distrust(receiver.now_s)
    assert receiver.looks(STRAY_PATIENCE_S - STEP_S) == []
    assert receiver.looks(3 * STEP_S) == [1]


def test_an_answer_counts_from_when_it_was_asked_for_and_once() -> None:
    receiver = Receiver()
    receiver.stores()
    assert receiver.looks(0.2, answered=False) == []
    assert receiver.asked == [HERE], "not asked again before it has answered"
    assert receiver.strays.told(Ask(HERE, 0), 10) == []
    assert receiver.strays.told(Ask("REQUESTS_batch.s0", 1), 10) == []
    receiver.now_s += 5.0
    assert receiver.strays.told(Ask(HERE, 1), 10) == [], "it was asked for a moment after it was stored"
    assert receiver.strays.told(Ask(HERE, 1), 10) == []


def test_an_answer_says_nothing_of_what_was_stored_after_the_question() -> None:
    receiver = Receiver()
    receiver.stores("r", 1)
    receiver.looks(0.1, answered=False)
    receiver.stores("s", 2)
    assert receiver.strays.told(Ask(HERE, 1), 10) == []
    assert receiver.looks(STRAY_PATIENCE_S, answered=True) == [1]


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    receiver = Receiver()
    receiver.stores()
    receiver.looks(STRAY_OVERDUE_S + ACK_WAIT_S + STEP_S, answered=False)
    assert receiver.asked == [HERE, HERE]


def test_of_many_consumers_those_that_were_not_asked_for_longest_come_first() -> None:
    receiver = Receiver(delivered=0)
    for number in range(3 * STRAY_ASKS_MAX):
        receiver.stores(f"r{number}", 1, f"REQUESTS_interactive.s{number}")
    receiver.looks(STRAY_OVERDUE_S)
    assert len(receiver.asked) == STRAY_ASKS_MAX
    receiver.looks(2 * STEP_S)
    assert len(set(receiver.asked)) == len(receiver.asked) == 3 * STRAY_ASKS_MAX


def test_a_foreign_deliverys_ack_subject_is_one_that_all_read() -> None:
    read = parse_ack(ack_of(HERE, 7, 9))
    assert (read.stream, read.consumer, read.sequence) == ("REQUESTS_interactive", "s0", 7)
