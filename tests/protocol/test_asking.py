"""Asking for credits: one grant in the end, and everything else given back."""

import pytest

from pipeline.limits import REPEAT_PERIOD_S, SECOND_ASK_AFTER_S
from pipeline.protocol.asking import HOME_BEHIND_MAX, Asking, Grant, Send
from pipeline.protocol.messages import Ask, Presence, Return, Verdict

FAR_S = 1e12


def peer(name: str, free: int = 100, *, ready: bool = True, waiting: int = 0, batch: int = 0) -> Presence:
    return Presence(
        role="decode",
        id=name,
        epoch="e1",
        ready=ready,
        blocks=200,
        blocks_free=free,
        asks_waiting=waiting,
        batch_asks_waiting=batch,
    )


def asking(seats: int = 1) -> Asking:
    return Asking("r", "c", 10, FAR_S, "inbox", seats)


def verdict(sent: Send, state: str, *, epoch: str = "e1", never: bool = False) -> Verdict:
    assert isinstance(sent.message, Ask)
    return Verdict(
        ask=sent.message.ask,
        request="r",
        state=state,  # type: ignore[arg-type]
        decode=sent.decode,
        epoch=epoch,
        reason="why",
        never=never,
    )


def test_of_two_drawn_workers_the_one_with_more_room_is_asked() -> None:
    live = [peer("a", 5), peer("b", 50), peer("c", 500)]
    assert [sent.decode for sent in asking().tick(0.0, live, (0.0, 0.4))] == ["b"]
    assert [sent.decode for sent in asking().tick(0.0, live, (0.9, 0.4))] == ["c"]
    crowded = [peer("a", 50, waiting=9), peer("b", 40)]
    assert [sent.decode for sent in asking().tick(0.0, crowded, (0.0, 0.9))] == ["b"]


def test_an_ask_says_how_many_sequences_it_will_be_and_of_which_class() -> None:
    [sent] = asking(seats=4).tick(0.0, [peer("a")], (0.0, 0.0))
    assert isinstance(sent.message, Ask)
    assert (sent.message.blocks, sent.message.seats, sent.message.klass) == (10, 4, "interactive")


@pytest.mark.parametrize(("klass", "chosen"), [("interactive", "a"), ("batch", "b")])
def test_batch_that_waits_somewhere_is_in_nobodys_way_but_batchs(klass: str, chosen: str) -> None:
    crowded = peer("a", 50, waiting=9, batch=9)
    search = Asking("r", "c", 10, FAR_S, "inbox", klass=klass)
    assert [sent.decode for sent in search.tick(0.0, [crowded, peer("b", 40)], (0.0, 0.9))] == [chosen]


def asked_from_home(*live: Presence) -> str:
    [send] = Asking("r", "c", 10, FAR_S, "inbox", home="home").tick(0.0, live, (0.9, 0.9))
    return send.decode


def test_what_was_prefilled_here_is_decoded_here_where_there_is_room() -> None:
    assert asked_from_home(peer("home", 20), peer("b", 30)) == "home"
    assert asked_from_home(peer("home", 19, waiting=1), peer("b", 20)) == "b"


def stays(search: Asking) -> bool | None:
    """Read anew, for mypy takes a property for a constant."""
    return search.at_home


def test_whether_it_stays_at_home_is_open_until_its_own_worker_has_answered() -> None:
    search = Asking("r", "c", 10, FAR_S, "inbox", home="b")
    assert stays(search) is False, "nobody is asked yet"
    [sent] = search.tick(0.0, [peer("a", 101), peer("b", 100)], (0.0, 0.0))
    assert sent.decode == "b"
    assert stays(search) is None
    search.verdict(verdict(sent, "waiting"))
    assert stays(search) is False, "it may take long"
    search.verdict(verdict(sent, "granted"))
    assert stays(search) is True


def test_what_is_granted_elsewhere_does_not_stay() -> None:
    search = Asking("r", "c", 10, FAR_S, "inbox", home="b")
    [sent] = search.tick(0.0, [peer("a", 100), peer("b", 10)], (0.0, 0.0))
    assert sent.decode == "a"
    assert stays(search) is False
    search.verdict(verdict(sent, "granted"))
    assert stays(search) is False


def test_it_is_decoded_elsewhere_where_its_own_worker_is_much_fuller_than_another() -> None:
    behind = int(HOME_BEHIND_MAX * 200) - 1
    assert asked_from_home(peer("home", 100), peer("b", 100 + behind)) == "home"
    assert asked_from_home(peer("home", 100), peer("b", 100 + behind + 2)) == "b"
    assert asked_from_home(peer("home", 110, waiting=1), peer("b", 100 + behind + 1)) == "b", (
        "who waits there is served first"
    )


def test_an_ask_is_repeated_under_its_id_every_period() -> None:
    search = asking()
    [first] = search.tick(0.0, [peer("a")], (0, 0))
    assert search.tick(REPEAT_PERIOD_S / 2, [peer("a")], (0, 0)) == []
    assert search.tick(REPEAT_PERIOD_S, [peer("a")], (0, 0)) == [first]


def test_a_slow_answer_leads_to_a_second_ask_where_there_is_room_and_the_loser_is_returned() -> None:
    search = asking()
    [first] = search.tick(0.0, [peer("a"), peer("b", 50), peer("c", 3)], (0, 0))
    assert search.verdict(verdict(first, "waiting")) == []
    live = [peer("a"), peer("b", 50), peer("c", 3)]
    [second] = search.tick(SECOND_ASK_AFTER_S, live, (0.9, 0.9))
    assert second.decode == "b"
    assert search.tick(SECOND_ASK_AFTER_S * 1.5, live, (0, 0)) == [], "two at once are enough"
    assert isinstance(first.message, Ask)
    assert search.verdict(verdict(second, "granted")) == [Send("a", Return(ask=first.message.ask))]
    assert search.grant is not None
    assert search.grant.decode == "b"
    assert search.verdict(verdict(first, "granted")) == [Send("a", Return(ask=first.message.ask))], (
        "a late one goes back"
    )


def test_no_second_ask_where_nobody_has_room() -> None:
    search = asking()
    search.tick(0.0, [peer("a"), peer("c", 3)], (0, 0))
    assert search.tick(SECOND_ASK_AFTER_S, [peer("a"), peer("c", 3)], (0, 0)) == []


def test_who_refuses_for_now_is_asked_again_and_who_never_can_is_not() -> None:
    search, live = asking(), [peer("a")]
    [first] = search.tick(0.0, live, (0, 0))
    search.verdict(verdict(first, "refused"))
    assert search.tick(0.0, live, (0, 0)) == [], "it would refuse as long as nobody has heard that it takes nothing"
    [again] = search.tick(SECOND_ASK_AFTER_S, live, (0, 0))
    search.verdict(verdict(again, "refused", never=True))
    assert search.tick(2 * SECOND_ASK_AFTER_S, live, (0, 0)) == []
    assert search.impossible == "why"
    assert search.verdict(verdict(again, "refused")) == [], "a late refusal needs no return"


def test_with_nobody_alive_the_search_waits() -> None:
    search = asking()
    assert search.tick(0.0, [], (0, 0)) == []
    assert search.tick(0.0, [peer("a", ready=False)], (0, 0)) == []
    assert search.impossible is None
    assert len(search.tick(0.0, [peer("a")], (0, 0))) == 1


def test_who_has_refused_is_asked_after_all_others() -> None:
    search, live = asking(), [peer("a"), peer("b", 3)]
    [first] = search.tick(0.0, live, (0, 0))
    search.verdict(verdict(first, "refused"))
    [second] = search.tick(0.0, live, (0, 0))
    assert (first.decode, second.decode) == ("a", "b")


def test_a_search_with_nobody_asked_and_nobody_to_ask_is_nowhere() -> None:
    search, leaving = asking(), [peer("a", ready=False)]
    for nobody in ([], leaving):
        search.tick(0.0, nobody, (0, 0))
        assert search.nowhere
    [first] = search.tick(0.0, [peer("a")], (0, 0))
    assert not search.nowhere
    search.tick(0.0, leaving, (0, 0))
    assert not search.nowhere, "it may still answer"
    search.verdict(verdict(first, "refused"))
    search.tick(0.0, leaving, (0, 0))
    assert search.nowhere


def test_a_worker_that_dies_takes_its_grant_with_it() -> None:
    search = asking()
    [first] = search.tick(0.0, [peer("a")], (0, 0))
    search.verdict(verdict(first, "granted"))
    [other] = search.tick(0.05, [peer("b")], (0, 0))
    assert (search.grant, other.decode) == (None, "b")


def test_a_restarted_worker_owes_nothing_until_it_grants_anew() -> None:
    search = asking()
    [first] = search.tick(0.0, [peer("a")], (0, 0))
    search.verdict(verdict(first, "granted"))
    search.verdict(verdict(first, "waiting", epoch="e2"))
    assert search.grant is None
    search.verdict(verdict(first, "granted", epoch="e2"))
    assert isinstance(first.message, Ask)
    assert search.grant == Grant(first.message.ask, "a", "e2")


def test_a_waiting_answer_elsewhere_does_not_touch_the_grant() -> None:
    search, live = asking(), [peer("a"), peer("b")]
    [first] = search.tick(0.0, live, (0, 0))
    [second] = search.tick(SECOND_ASK_AFTER_S, live, (0, 0))
    search.verdict(verdict(first, "granted"))
    assert search.verdict(verdict(second, "waiting")) == [Send(second.decode, Return(ask=second.message.ask))]
    assert search.grant is not None


def test_a_refused_handoff_whose_grant_is_lost_already_changes_nothing() -> None:
    search, live = asking(), [peer("a")]
    [first] = search.tick(0.0, live, (0, 0))
    search.verdict(verdict(first, "granted"))
    grant = search.grant
    assert grant is not None
    search.verdict(verdict(first, "waiting"))
    search.lost(grant)
    assert search.grant is None
    [again] = search.tick(REPEAT_PERIOD_S, live, (0, 0))
    assert again.message == first.message, "the ask still waits, and is repeated"


def test_a_refused_handoff_loses_the_grant_and_the_search_goes_on_under_a_new_id() -> None:
    search, live = asking(), [peer("a")]
    [first] = search.tick(0.0, live, (0, 0))
    search.verdict(verdict(first, "granted"))
    assert search.grant is not None
    search.lost(search.grant)
    [second] = search.tick(0.0, live, (0, 0))
    assert first.message.ask != second.message.ask


def test_after_a_handoff_into_silence_another_worker_is_asked_first() -> None:
    search, live = asking(), [peer("a"), peer("b")]
    [first] = search.tick(0.0, live, (0, 0))
    search.verdict(verdict(first, "granted"))
    assert search.grant is not None
    search.lost(search.grant, silent=True)
    [second] = search.tick(0.0, live, (0, 0))
    assert (first.decode, second.decode) == ("a", "b")
    search.verdict(verdict(second, "granted"))
    assert search.grant is not None
    search.lost(search.grant, silent=True)
    assert search.tick(0.0, live, (0, 0)) == [], "not at once"
    [third] = search.tick(SECOND_ASK_AFTER_S, live[:1], (0, 0))
    assert third.decode == "a", "there is nobody else"


def test_where_nobody_listens_another_worker_is_asked_without_waiting() -> None:
    search, live = asking(), [peer("a"), peer("b")]
    [first] = search.tick(0.0, live, (0, 0))
    assert isinstance(first.message, Ask)
    search.unheard(first.message.ask)
    [second] = search.tick(0.0, live, (0, 0))
    assert (first.decode, second.decode) == ("a", "b")
    search.verdict(verdict(second, "granted"))
    assert isinstance(second.message, Ask)
    search.unheard(second.message.ask)
    assert search.grant is None, "its keeper is dead"
    search.unheard(second.message.ask)
    assert search.tick(0.0, live, (0, 0)) == []


def test_when_the_request_ends_everything_is_given_back_but_what_was_handed_off() -> None:
    search, live = asking(), [peer("a")]
    [first] = search.tick(0.0, live, (0, 0))
    search.verdict(verdict(first, "granted"))
    assert search.stop() == [Send("a", Return(ask=first.message.ask))]
    search = asking()
    [first] = search.tick(0.0, live, (0, 0))
    search.verdict(verdict(first, "granted"))
    assert search.grant is not None
    assert search.handed_off(search.grant) == []
    assert search.stop() == []


def test_what_was_asked_for_while_a_handoff_was_unanswered_is_given_back_when_it_is_taken_after_all() -> None:
    search, live = asking(), [peer("a"), peer("b")]
    [first] = search.tick(0.0, live, (0, 0))
    search.verdict(verdict(first, "granted"))
    offered = search.grant
    assert offered is not None
    assert isinstance(first.message, Ask)
    search.unheard(first.message.ask)
    [second] = search.tick(0.0, live, (0, 0))
    assert isinstance(second.message, Ask)
    assert search.handed_off(offered) == [Send("b", Return(ask=second.message.ask))]


def test_a_request_that_has_ended_asks_for_nothing_any_more_and_gives_back_what_it_is_granted_late() -> None:
    search, live = asking(), [peer("a"), peer("b")]
    [first] = search.tick(0.0, live, (0, 0))
    search.stop()
    assert search.tick(SECOND_ASK_AFTER_S, live, (0, 0)) == []
    assert search.verdict(verdict(first, "granted")) == [Send("a", Return(ask=first.message.ask))]


def test_the_waiting_answer_of_two_keeps_both() -> None:
    search, live = asking(), [peer("a"), peer("b")]
    [first] = search.tick(0.0, live, (0, 0))
    [second] = search.tick(SECOND_ASK_AFTER_S, live, (0, 0))
    assert search.verdict(verdict(first, "waiting")) == search.verdict(verdict(second, "waiting")) == []
    assert pytest.approx(len(search.stop())) == 2
