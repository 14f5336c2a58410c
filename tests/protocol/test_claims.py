"""Claims: the receiver's six rules, one by one and under any order of claims; and the holder's lease."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.limits import LEASE_PERIOD_S, LEASE_SILENT_MAX_S
from pipeline.protocol.claims import Arbiter, Lease, LeaseState
from pipeline.protocol.messages import Claim, Fenced, Go, Gone, Whole, pack_ids


def claim(name: str, follows: str | None = None) -> Claim:
    return Claim(request="r", claim=name, epoch="e", holder=f"holder.{name}", ack="$JS.ACK.x", follows=follows)


def test_the_first_claim_gets_go_with_what_has_been_delivered() -> None:
    assert Arbiter().claim(claim("a"), [5, 6]) == Go(pack_ids([5, 6]))


def test_the_last_claim_gets_go_again_with_what_has_come_since() -> None:
    arbiter = Arbiter()
    arbiter.claim(claim("a"), [])
    assert arbiter.claim(claim("a"), [5]) == Go(pack_ids([5]))


def test_a_new_delivery_supersedes_and_the_old_claim_is_fenced_for_ever() -> None:
    arbiter = Arbiter()
    arbiter.claim(claim("a"), [])
    assert isinstance(arbiter.claim(claim("b"), []), Go)
    assert arbiter.claim(claim("a"), []) == Fenced()
    assert arbiter.claim(claim("a", follows="b"), []) == Fenced()
    assert arbiter.hears("b")
    assert not arbiter.hears("a")
    superseded = arbiter.superseded("a")
    assert superseded is not None
    assert superseded.holder == "holder.a"
    assert arbiter.superseded("b") is None


def test_a_delivery_that_counts_less_than_the_last_one_supersedes_it_all_the_same() -> None:
    """A broker that was killed may have forgotten deliveries, so their number orders nothing."""
    arbiter = Arbiter()
    first, second = (
        msgspec.structs.replace(claim(name), ack=f"$JS.ACK.REQUESTS_batch.s0.{delivered}.1.{delivered}.1.0")
        for name, delivered in (("a", 4), ("b", 2))
    )
    arbiter.claim(first, [])
    assert isinstance(arbiter.claim(second, []), Go)
    assert arbiter.claim(first, []) == Fenced()


def test_a_takeover_needs_the_claim_that_it_follows_to_be_the_last() -> None:
    arbiter = Arbiter()
    arbiter.claim(claim("a"), [])
    arbiter.claim(claim("b"), [])
    assert arbiter.claim(claim("d", follows="a"), []) == Fenced()
    assert isinstance(arbiter.claim(claim("d", follows="b"), []), Go)
    assert isinstance(arbiter.claim(claim("d", follows="b"), []), Go), "a confirmation is the same id again"


def accused(holder: str = "a") -> Arbiter:
    """Whose last claim's message has been given back."""
    arbiter = Arbiter()
    held = claim(holder)
    arbiter.claim(held, [])
    arbiter.accused(held)
    return arbiter


def test_the_delivery_that_a_wrong_accusation_has_brought_about_is_fenced_once() -> None:
    arbiter = accused()
    assert arbiter.claim(claim("b"), [5], lives=True) == Fenced()
    assert arbiter.hears("a")
    assert arbiter.claim(claim("b"), [5], lives=False) == Fenced(), "its question again"
    assert arbiter.claim(claim("a"), [5], lives=True) == Go(pack_ids([5]))
    assert arbiter.claim(claim("c"), [5], lives=True) == Go(pack_ids([5])), "the lease has ended: nobody works on it"


def test_a_right_accusation_gives_its_message_to_the_next() -> None:
    assert accused().claim(claim("b"), [5], lives=False) == Go(pack_ids([5]))


def test_who_was_accused_wrongly_hands_its_request_on() -> None:
    arbiter = accused()
    assert isinstance(arbiter.claim(claim("d", follows="a"), [], lives=True), Go)
    assert isinstance(arbiter.claim(claim("b"), [], lives=True), Go), "another holds it by now"


def test_what_nobody_was_accused_of_goes_to_its_next_delivery() -> None:
    arbiter = Arbiter()
    arbiter.claim(claim("a"), [])
    assert isinstance(arbiter.claim(claim("b"), [], lives=True), Go)


def test_a_takeover_before_any_claim_is_fenced() -> None:
    assert Arbiter().claim(claim("d", follows="a"), []) == Fenced()


@pytest.mark.parametrize(
    ("whole", "gone", "expected"), [(True, False, Whole()), (False, True, Gone()), (True, True, Whole())]
)
def test_a_reply_that_has_ended_says_so_to_whoever_claims(whole: bool, gone: bool, expected: object) -> None:
    arbiter = Arbiter()
    arbiter.claim(claim("a"), [])
    arbiter.whole, arbiter.gone = whole, gone
    assert arbiter.claim(claim("a"), []) == arbiter.claim(claim("b"), []) == expected


names = st.sampled_from("abcdef")


@given(st.lists(st.tuples(names, st.none() | names, st.booleans(), st.booleans())))
def test_at_most_one_claim_is_heard_and_none_comes_back(attempts: list[tuple[str, str | None, bool, bool]]) -> None:
    arbiter, fenced = Arbiter(), set[str]()
    for name, follows, accuses, lives in attempts:
        before = arbiter.last
        if accuses and before is not None:
            arbiter.accused(before)
        answer = arbiter.claim(claim(name, follows), [], lives=lives)
        if name in fenced:
            assert answer == Fenced()
        if isinstance(answer, Go):
            assert arbiter.hears(name)
            if before is not None and before.claim != name:
                fenced.add(before.claim)
        assert sum(arbiter.hears(one) for one in "abcdef") <= 1


def test_a_lease_is_renewed_every_period() -> None:
    lease = Lease(0.0)
    assert not lease.due(LEASE_PERIOD_S / 2)
    assert lease.due(LEASE_PERIOD_S)
    assert not lease.due(LEASE_PERIOD_S * 1.5)


def test_a_lease_is_in_doubt_when_the_broker_is_silent_and_held_again_when_it_answers() -> None:
    lease = Lease(0.0)
    assert lease.state(LEASE_SILENT_MAX_S - 0.01) is LeaseState.HELD
    assert lease.state(LEASE_SILENT_MAX_S) is LeaseState.DOUBTFUL
    lease.answered(asked_at_s=0.5)
    assert lease.state(LEASE_SILENT_MAX_S) is LeaseState.HELD
    lease.answered(asked_at_s=0.1)
    assert lease.state(0.5 + LEASE_SILENT_MAX_S) is LeaseState.DOUBTFUL, (
        "a lease runs from the asking, not from the answer"
    )


def test_the_first_claim_that_names_a_persona_pins_its_version() -> None:
    arbiter = Arbiter()
    assert arbiter.claim(claim("a"), []) == Go()
    assert arbiter.claim(msgspec.structs.replace(claim("b"), persona=7), []) == Go(persona=7)
    assert arbiter.claim(msgspec.structs.replace(claim("c"), persona=9), []) == Go(persona=7)
    assert arbiter.claim(claim("d", follows="c"), []) == Go(persona=7)
