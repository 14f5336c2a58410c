"""Presence: who lives is who spoke lately, in its newest life."""

from pipeline.limits import PRESENCE_SILENT_MAX_S
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import GIVEN_UP_MAX, Presences, Receiver


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


def gateway(epoch: str) -> Presence:
    return Presence(role="gateway", id="g", epoch=epoch, ready=True)


def test_a_receiver_is_gone_when_it_has_been_silent_for_two_seconds_of_our_own_connection() -> None:
    seen, receiver = Presences(), Receiver("g", "2")
    assert not seen.abandoned(receiver, since_s=0.0, now_s=2.0)
    assert seen.abandoned(receiver, since_s=0.0, now_s=2.1), "never heard of it"
    seen.heard(gateway("2"), 5.0)
    assert not seen.abandoned(receiver, since_s=0.0, now_s=7.0)
    assert seen.abandoned(receiver, since_s=0.0, now_s=7.1)
    assert not seen.abandoned(receiver, since_s=6.0, now_s=7.1), "we ourselves were away"


def test_a_receiver_is_gone_when_a_newer_life_of_it_speaks() -> None:
    seen = Presences()
    seen.heard(gateway("3"), 5.0)
    assert seen.abandoned(Receiver("g", "2"), since_s=0.0, now_s=5.0)
    assert not seen.abandoned(Receiver("g", "3"), since_s=0.0, now_s=5.0)


def test_who_was_given_up_once_stays_so_until_it_is_heard() -> None:
    seen, receiver = Presences(), Receiver("g", "2")
    seen.heard(gateway("2"), 1.0)
    assert not seen.given_up(receiver, connected_s=0.0)
    seen.give_up(receiver, 4.0)
    assert seen.given_up(receiver, connected_s=0.0)
    assert not seen.given_up(Receiver("g", "3"), connected_s=0.0), "another life of it"
    assert not seen.given_up(receiver, connected_s=4.5), "we were away, and may have missed its words"
    seen.heard(gateway("2"), 5.0)
    assert not seen.given_up(receiver, connected_s=0.0)
    seen.heard(gateway("3"), 6.0)
    seen.give_up(receiver, 6.0)
    assert seen.given_up(receiver, connected_s=0.0), "the words of its next life are not its own"


def test_only_so_many_dead_receivers_are_remembered() -> None:
    seen = Presences()
    for number in range(GIVEN_UP_MAX + 1):
        seen.give_up(Receiver(f"g{number}", "1"), 1.0)
    remembered = [number for number in range(GIVEN_UP_MAX + 1) if seen.given_up(Receiver(f"g{number}", "1"), 0.0)]
    assert remembered == list(range(1, GIVEN_UP_MAX + 1))


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
