"""Presence: who lives is who spoke lately, in its newest life."""

from pipeline.limits import PRESENCE_SILENT_MAX_S
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import Presences


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
