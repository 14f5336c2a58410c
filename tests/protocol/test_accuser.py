"""Accusing: the dead once, the living never, and nobody while the accuser cannot trust itself."""

from pipeline.limits import ABSENT_RATIO, ACCUSE_SILENT_MAX_S, ACCUSE_SILENT_S, ASK_BROKER_SILENT_S, PRESENCE_PERIOD_S
from pipeline.protocol.accuser import ACCUSED_REMEMBERED, Accuser
from pipeline.protocol.messages import Claim

LATE_S = ACCUSE_SILENT_S + 0.01
ABSENT_S = ABSENT_RATIO * ACCUSE_SILENT_S


def claim(name: str = "c", epoch: str = "1") -> Claim:
    return Claim(request="r", claim=name, epoch=epoch, holder="holder.p", ack="$JS.ACK.x")


def test_a_silent_worker_is_accused_once() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 1.0)
    assert not accuser.accuses(claim(), 1.0 + ACCUSE_SILENT_S)
    assert accuser.accuses(claim(), 1.0 + LATE_S)
    assert not accuser.accuses(claim(), 1.0 + LATE_S), "once a claim"
    assert accuser.accuses(claim("d"), 1.0 + LATE_S), "another claim is another message"


def test_a_worker_that_speaks_is_not_accused() -> None:
    accuser = Accuser(0.0)
    for tick in range(20):
        accuser.heard("holder.p", "1", tick * 0.2)
        assert not accuser.accuses(claim(), tick * 0.2 + 0.1)


def test_patience_doubles_with_a_worker_that_was_only_slow_up_to_a_bound() -> None:
    accuser = Accuser(0.0)
    now_s, patience_s = 1.0, ACCUSE_SILENT_S
    for number in range(5):
        accuser.heard("holder.p", "1", now_s)
        assert not accuser.accuses(claim(f"{number}"), now_s + patience_s - 0.01)
        now_s += patience_s + 0.01
        assert accuser.accuses(claim(f"{number}"), now_s)
        patience_s = min(2 * patience_s, ACCUSE_SILENT_MAX_S)
        now_s += 1.0
    accuser.heard("holder.p", "2", now_s)
    assert accuser.accuses(claim("new", epoch="2"), now_s + LATE_S), "a new life has a clean record"


def test_the_same_word_told_again_is_no_sign_of_life() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 1.0)
    assert accuser.accuses(claim(), 1.0 + LATE_S)
    accuser.heard("holder.p", "1", 1.0)
    assert accuser.accuses(claim("d"), 1.0 + LATE_S)


def test_a_worker_in_a_new_life_has_died_in_its_old_one() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "2", 1.0)
    assert accuser.accuses(claim(epoch="1"), 1.0)
    assert not accuser.accuses(claim("d", epoch="2"), 1.0)
    accuser.heard("holder.p", "1", 1.1)
    assert accuser.accuses(claim("e", epoch="1"), 1.1), "a late word of the old life does not raise the dead"


def test_an_accuser_that_was_away_gives_everybody_time_to_be_heard() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 0.0)
    accuser.woke(PRESENCE_PERIOD_S, 5.0)
    assert not accuser.accuses(claim(), 5.0 + ACCUSE_SILENT_S - 0.01)
    assert accuser.accuses(claim(), 5.0 + LATE_S)


def test_a_little_lag_does_not_shake_its_trust() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 0.0)
    accuser.woke(PRESENCE_PERIOD_S / 2, LATE_S)
    assert accuser.accuses(claim(), LATE_S)


def test_a_worker_never_heard_of_is_given_the_same_time() -> None:
    accuser = Accuser(10.0)
    assert not accuser.accuses(claim(), 10.1)
    assert accuser.accuses(claim(), 10.0 + LATE_S)


def test_who_is_heard_after_its_accusation_lives_in_the_life_that_claimed() -> None:
    accuser = Accuser(0.0)
    assert not accuser.lives(claim()), "it was never heard"
    accuser.heard("holder.p", "1", 1.0)
    assert accuser.accuses(claim(), 1.0 + LATE_S)
    assert not accuser.lives(claim())
    accuser.heard("holder.p", "1", 2.0)
    assert accuser.lives(claim())
    accuser.heard("holder.p", "2", 3.0)
    assert not accuser.lives(claim())


def test_who_was_accused_wrongly_and_goes_on_may_be_accused_again() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 1.0)
    assert accuser.accuses(claim(), 1.0 + LATE_S)
    accuser.heard("holder.p", "1", 2.0)
    accuser.forgive(claim())
    assert not accuser.accuses(claim(), 2.0 + LATE_S), "patience with it has doubled"
    assert accuser.accuses(claim(), 2.0 + 2 * LATE_S)


def test_only_so_many_accusations_are_remembered() -> None:
    accuser = Accuser(0.0)
    for number in range(ACCUSED_REMEMBERED + 1):
        assert accuser.accuses(claim(f"{number}"), LATE_S)
    assert accuser.accuses(claim("0"), LATE_S)
    assert not accuser.accuses(claim(f"{ACCUSED_REMEMBERED}"), LATE_S)


def test_the_broker_is_asked_for_who_is_due_to_speak() -> None:
    accuser = Accuser(0.0)
    assert not accuser.wonders(claim(), 1.0), "never heard of"
    accuser.heard("holder.p", "1", 1.0)
    assert not accuser.wonders(claim(), 1.0 + ASK_BROKER_SILENT_S)
    assert accuser.wonders(claim(), 1.01 + ASK_BROKER_SILENT_S)
    assert accuser.accuses(claim(), 1.0 + LATE_S)
    assert not accuser.wonders(claim(), 1.0 + LATE_S), "it is accused already"


def absent(accuser: Accuser, from_s: float, until_s: float) -> None:
    """Asked for twice in vain."""
    accuser.absent("holder.p", from_s)
    accuser.absent("holder.p", until_s)


def test_who_listens_nowhere_for_a_moment_is_dead() -> None:
    accuser = Accuser(0.0)
    accuser.absent("holder.q", 0.9)
    accuser.heard("holder.p", "1", 1.0)
    absent(accuser, 1.15, 1.14 + ABSENT_S)
    assert not accuser.accuses(claim(), 1.25), "its connection may be coming back"
    accuser.absent("holder.p", 1.16 + ABSENT_S)
    assert accuser.accuses(claim(), 1.26)
    assert not accuser.accuses(claim(), 1.26), "once"


def test_who_speaks_after_the_broker_was_asked_lives_and_its_next_absence_is_a_new_one() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 1.0)
    absent(accuser, 1.1, 1.15)
    accuser.heard("holder.p", "1", 1.2)
    absent(accuser, 1.18, 1.19)
    assert not accuser.accuses(claim(), 1.2)
    absent(accuser, 1.35, 1.36)
    assert not accuser.accuses(claim(), 1.4)


def test_patience_doubles_also_with_a_worker_that_keeps_losing_its_connection() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 1.0)
    absent(accuser, 1.1, 1.11 + ABSENT_S)
    assert accuser.accuses(claim(), 1.3)
    accuser.heard("holder.p", "1", 1.4)
    absent(accuser, 1.5, 1.51 + ABSENT_S)
    assert not accuser.accuses(claim("d"), 1.7)
    accuser.absent("holder.p", 1.51 + 2 * ABSENT_S)
    assert accuser.accuses(claim("d"), 1.8)


def test_after_a_broker_s_restart_a_worker_may_come_back_later_than_its_accuser() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 1.0)
    accuser.distrust_myself(1.5)
    assert not accuser.wonders(claim(), 1.8)
    absent(accuser, 1.6, 1.8)
    assert not accuser.accuses(claim(), 1.8)
    assert accuser.accuses(claim(), 1.5 + LATE_S)


def test_what_an_accusation_would_lose_is_waited_for_as_long_as_the_broker_waits() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 1.0)
    assert not accuser.accuses(claim(), 1.0 + ACCUSE_SILENT_MAX_S, loses=True)
    assert accuser.accuses(claim(), 1.01 + ACCUSE_SILENT_MAX_S, loses=True)
    accuser.heard("holder.p", "2", 3.0)
    assert accuser.accuses(claim("d"), 3.0, loses=True), "a new life has nothing of the old one's"


def test_of_a_worker_that_listens_nowhere_it_is_waited_for_until_its_connection_would_be_back() -> None:
    accuser = Accuser(0.0)
    accuser.heard("holder.p", "1", 1.0)
    absent(accuser, 1.1, 1.09 + ACCUSE_SILENT_S)
    assert not accuser.accuses(claim(), 1.5, loses=True)
    accuser.absent("holder.p", 1.11 + ACCUSE_SILENT_S)
    assert accuser.accuses(claim(), 1.52, loses=True)
