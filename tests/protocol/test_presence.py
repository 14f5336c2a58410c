"""Presence: who lives is who spoke lately, in its newest life."""

import math

from pipeline.limits import PRESENCE_SILENT_MAX_S, RECEIVER_SILENT_MAX_S
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import RECEIVERS_MAX, Presences, Receiver


def word(
    name: str = "p1", epoch: str = "1", *, ready: bool = True, draining: bool = False, load: float = 0.0
) -> Presence:
    return Presence(role="prefill", id=name, epoch=epoch, ready=ready, draining=draining, load=load)


def test_who_spoke_lately_lives_and_who_fell_silent_does_not() -> None:
    seen = Presences()
    seen.heard(word("b"), 0.0)
    seen.heard(word("a"), 0.5)
    assert [peer.id for peer in seen.live("prefill", 0.5)] == ["a", "b"]
    assert [peer.id for peer in seen.live("prefill", PRESENCE_SILENT_MAX_S + 0.1)] == ["a"]
    assert seen.live("decode", 0.5) == []
    assert seen.get("prefill", "b", 0.5) == word("b")
    assert seen.get("prefill", "b", 5.0) is None
    assert seen.get("prefill", "c", 0.5) is None
    assert seen.silent(0.5) == []
    assert seen.silent(1.0) == [(word("b"), 1.0)]


def test_a_late_word_of_an_older_life_changes_nothing() -> None:
    seen = Presences()
    seen.heard(word(epoch="2", load=0.2), 0.0)
    seen.heard(word(epoch="1", load=0.9), 0.1)
    assert seen.live("prefill", 0.1)[0].load == 0.2
    seen.heard(word(epoch="3", load=0.3), 0.1)
    assert seen.live("prefill", 0.1)[0].epoch == "3"


def test_only_who_is_warm_and_stays_takes_work() -> None:
    seen = Presences()
    seen.heard(word("cold", ready=False), 0.0)
    seen.heard(word("leaving", draining=True), 0.0)
    seen.heard(word("warm"), 0.0)
    assert [peer.id for peer in seen.ready("prefill", 0.0)] == ["warm"]


def test_the_long_silent_are_forgotten() -> None:
    seen = Presences()
    seen.heard(word("a"), 0.0)
    seen.heard(word("b"), 100.0)
    seen.forget_silent(100.0)
    assert len(seen._seen) == 1


def test_names_that_come_and_go_are_not_all_remembered() -> None:
    """As in a cluster that gives each new process a new name, and to who never looks for the silent."""
    seen = Presences()
    for number in range(1000):
        seen.heard(word(f"p{number}"), float(number))
    assert len(seen._seen) < 100


def gateway(epoch: str) -> Presence:
    return Presence(role="gateway", id="g", epoch=epoch, ready=True)


def test_a_receiver_is_gone_when_it_has_been_silent_for_two_seconds_of_our_own_connection() -> None:
    seen, receiver = Presences(), Receiver("g", "2")
    seen.heard(gateway("2"), 5.0)
    assert seen.silence_s(receiver, since_s=0.0, now_s=7.0) <= RECEIVER_SILENT_MAX_S
    assert seen.silence_s(receiver, since_s=0.0, now_s=7.1) > RECEIVER_SILENT_MAX_S
    assert seen.silence_s(receiver, since_s=6.0, now_s=7.1) <= RECEIVER_SILENT_MAX_S, "we ourselves were away"


def test_a_receiver_that_was_never_heard_is_waited_for_from_when_a_request_first_names_it() -> None:
    seen, receiver = Presences(), Receiver("g", "2")
    seen.heard(gateway("1"), 0.0)
    assert seen.silence_s(receiver, since_s=0.0, now_s=10.0) <= RECEIVER_SILENT_MAX_S, "only its former life was heard"
    assert seen.silence_s(receiver, since_s=0.0, now_s=12.0) <= RECEIVER_SILENT_MAX_S
    assert seen.silence_s(receiver, since_s=0.0, now_s=12.1) > RECEIVER_SILENT_MAX_S, (
        "whichever of its requests it is by then"
    )
    assert seen.silence_s(receiver, since_s=11.0, now_s=12.1) <= RECEIVER_SILENT_MAX_S, "we ourselves were away"


def test_a_receiver_is_gone_when_a_newer_life_of_it_speaks() -> None:
    seen = Presences()
    seen.heard(gateway("3"), 5.0)
    assert seen.silence_s(Receiver("g", "2"), since_s=0.0, now_s=5.0) > RECEIVER_SILENT_MAX_S
    assert seen.silence_s(Receiver("g", "3"), since_s=0.0, now_s=5.0) <= RECEIVER_SILENT_MAX_S


def test_only_so_many_receivers_that_were_never_heard_are_remembered() -> None:
    seen = Presences()
    for number in range(RECEIVERS_MAX + 1):
        assert seen.silence_s(Receiver(f"g{number}", "1"), 0.0, 1.0) == 0.0
    assert seen.silence_s(Receiver("g1", "1"), 0.0, 2.0) == 1.0
    assert seen.silence_s(Receiver("g0", "1"), 0.0, 2.0) == 0.0, "forgotten, and named anew"


def test_a_receiver_names_itself_and_its_life() -> None:
    assert Receiver.parse("g-1/0001-ab") == Receiver("g-1", "0001-ab")
    assert Receiver.parse(None) is None
    assert Receiver.parse("nobody") is None


def test_the_lives_that_go_on_are_known_across_roles() -> None:
    seen = Presences()
    seen.heard(word("a", "1"), 0.0)
    seen.heard(gateway("7"), 0.5)
    assert seen.epochs(0.5) == {"1", "7"}
    assert seen.epochs(PRESENCE_SILENT_MAX_S + 0.1) == {"7"}
    assert list(seen.heard_of(("prefill",))) == [("a", "1", 0.0)]
    assert seen.heard_s("prefill", "a") == 0.0
    assert seen.heard_s("prefill", "b") == -math.inf
