"""What keys and creators may have of a gateway, and of several."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BodyTooLarge, CapacityError, CreatorBusy, KeyBusy, RateExceeded
from pipeline.limits import ACCUSER_PERIOD_S, KEY_BURST_S, KEY_RATE_MEMORY_S, KEYS_SAID_MAX
from pipeline.protocol.admission import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, RETRY_UNMEASURED_S
from pipeline.protocol.keys import Key, KeyUse, hash_of
from pipeline.protocol.messages import Presence
from pipeline.protocol.shares import Bounds, Others, Place, Shares

ALONE = Others()


def key(name: str = "a", **fields: Any) -> Key:
    return msgspec.convert({"name": name, "sha256": hash_of(name), **fields}, Key)


def shares(bytes_max: int = 1000, creator_requests_max: int = 2, creator_bytes_max: int = 500) -> Shares:
    return Shares(
        Bounds(bytes_max=bytes_max, creator_requests_max=creator_requests_max, creator_bytes_max=creator_bytes_max)
    )


def entered(at: Shares, creator: str = "ada", size: int = 10, of: Key | None = None, now_s: float = 0.0) -> Place:
    place = at.arrive(of, ALONE, now_s)
    try:
        place.grow(size, now_s)
        place.enter(creator, now_s)
    except Exception:
        place.leave(now_s)
        raise
    return place


def test_a_creator_has_so_many_requests_and_another_one_still_enters() -> None:
    at = shares()
    first = entered(at)
    entered(at)
    with pytest.raises(CreatorBusy) as refused:
        entered(at)
    assert (refused.value.status, refused.value.retryable) == (429, True)
    assert refused.value.retry_after_s == RETRY_UNMEASURED_S
    entered(at, "grace")
    first.leave(1.0, drained=True)
    entered(at, now_s=1.0)


def test_a_creator_has_so_many_bytes() -> None:
    at = shares(bytes_max=2000)
    entered(at, size=400)
    with pytest.raises(CreatorBusy):
        entered(at, size=101)
    with pytest.raises(BodyTooLarge):  # it never fits, so nobody is told to come back with it
        entered(at, "grace", size=501)


def test_all_have_so_many_bytes_while_they_are_still_read() -> None:
    at = shares(bytes_max=100)
    slow = at.arrive(None, ALONE, 0.0)
    slow.grow(60, 0.0)
    other = at.arrive(None, ALONE, 0.0)
    with pytest.raises(CapacityError) as refused:
        other.grow(50, 0.0)
    assert (refused.value.status, refused.value.retry_after_s) == (503, RETRY_UNMEASURED_S)
    slow.leave(1.0)
    other.grow(50, 1.0)
    with pytest.raises(BodyTooLarge):
        other.grow(51, 1.0)


def test_what_has_left_is_counted_nowhere() -> None:
    at = shares()
    a = key()
    places = [entered(at, of=a), entered(at, "grace", of=a), entered(at, "alan")]
    unfinished = at.arrive(a, ALONE, 0.0)
    unfinished.grow(7, 0.0)
    assert (at.bytes, at.keys["a"].requests, at.keys["a"].bytes) == (37, 3, 27)
    for place in (*places, unfinished):
        place.leave(1.0)
    assert (at.bytes, at.keys["a"].requests, at.keys["a"].bytes, at.creators) == (0, 0, 0, {})


def test_a_key_has_so_many_requests_and_bytes() -> None:
    at = shares()
    a = key(in_flight_max=1, in_flight_bytes_max=20)
    first = at.arrive(a, ALONE, 0.0)
    with pytest.raises(KeyBusy) as refused:
        at.arrive(a, ALONE, 0.0)
    assert (refused.value.status, refused.value.code) == (429, "key_limit_exceeded")
    assert at.arrive(key("b"), ALONE, 0.0)
    first.leave(0.0)
    few = key("c", in_flight_bytes_max=20)
    at.arrive(few, ALONE, 0.0).grow(15, 0.0)
    place = at.arrive(few, ALONE, 0.0)
    with pytest.raises(KeyBusy, match="as many bytes"):
        place.grow(6, 0.0)
    with pytest.raises(BodyTooLarge):
        place.grow(21, 0.0)
    place.grow(5, 0.0)


def test_the_wait_of_a_busy_creator_follows_how_fast_its_own_places_become_free() -> None:
    at = shares(creator_requests_max=2)
    places = [entered(at), entered(at)]
    for second in range(30):
        places.pop(0).leave(float(second), drained=True)
        places.append(entered(at, now_s=float(second)))
    with pytest.raises(CreatorBusy) as refused:
        entered(at, now_s=29.0)
    assert refused.value.retry_after_s == pytest.approx(1.0, rel=0.3)


def turns(at: Shares, of: Key, others: Others, now_s: float) -> int:
    """How many of a flood get a turn now."""
    taken = 0
    while True:
        try:
            at.arrive(of, others, now_s).leave(now_s)
        except RateExceeded:
            return taken
        taken += 1


def test_a_key_has_its_burst_and_then_its_rate() -> None:
    at, a = shares(), key(requests_per_s=10)
    assert turns(at, a, ALONE, 0.0) == 10 * KEY_BURST_S
    assert [turns(at, a, ALONE, second + 1.0) for second in range(5)] == [10] * 5
    assert turns(at, key("slow", requests_per_s=0.1), ALONE, 0.0) == 1


def test_a_crowd_beyond_the_rate_is_told_to_come_back_one_by_one() -> None:
    at, a = shares(), key(requests_per_s=10)
    turns(at, a, ALONE, 0.0)
    waits = []
    for _ in range(400):
        with pytest.raises(RateExceeded) as refused:
            at.arrive(a, ALONE, 0.0)
        assert refused.value.retry_after_s is not None
        assert refused.value.body().retryable
        waits.append(refused.value.retry_after_s)
    assert waits == sorted(waits)
    assert waits[0] == RETRY_AFTER_MIN_S
    assert waits[100] == pytest.approx(10.0, rel=0.1)
    assert waits[-1] == RETRY_AFTER_MAX_S


def test_where_the_next_turn_is_further_away_than_clients_wait_a_retry_is_said_not_to_help() -> None:
    at, a = shares(), key(requests_per_s=0.01)
    turns(at, a, ALONE, 0.0)
    for _ in range(2):
        with pytest.raises(RateExceeded) as refused:
            at.arrive(a, ALONE, 10.0)
        body = refused.value.body()
        assert (body.retryable, body.code) == (False, "rate_limit_exceeded")
        assert body.retry_after_s is not None
        assert body.retry_after_s >= 90.0 - 1e-9
    assert turns(at, a, ALONE, 101.0) == 1


def test_a_gateway_says_what_its_busiest_keys_use() -> None:
    at = shares(bytes_max=10**6)
    many = [key(f"k{number}") for number in range(KEYS_SAID_MAX + 5)]
    for number, one in enumerate(many):
        for _ in range(number + 1):
            at.arrive(one, ALONE, 0.0)
    rated = key("r", requests_per_s=5)
    at.arrive(rated, ALONE, 0.0).grow(9, 0.0)
    at.arrive(key("idle"), ALONE, 0.0).leave(0.0)
    said = at.used(0.0)
    assert len(said) == KEYS_SAID_MAX
    assert (said["r"].requests, said["r"].bytes) == (1, 9)
    assert said["r"].rate == pytest.approx(1.27)  # one request in the first second, as far as that can be said
    assert said[f"k{KEYS_SAID_MAX + 4}"].requests == KEYS_SAID_MAX + 5
    assert not {"idle", "k0"} & said.keys()


def test_what_other_live_gateways_say_is_added_up() -> None:
    def gateway(name: str, **keys: KeyUse) -> Presence:
        return Presence(role="gateway", id=name, epoch="1", ready=True, keys=keys)

    peers = [
        gateway("me", a=KeyUse(100, 100, 100)),
        gateway("x", a=KeyUse(1, 2, 3)),
        gateway("y", a=KeyUse(10, 20, 30), b=KeyUse(5, 5, 5)),
    ]
    others = Others.among(peers, "me")
    assert others.gateways == 3
    assert others.used == {"a": KeyUse(11, 22, 33), "b": KeyUse(5, 5, 5)}


def test_a_bound_in_flight_is_what_the_others_leave_or_an_equal_part() -> None:
    a = key(in_flight_max=10, in_flight_bytes_max=100)

    def takes(others: Others) -> int:
        at, taken = shares(), 0
        while True:
            try:
                at.arrive(a, others, 0.0)
            except KeyBusy:
                return taken
            taken += 1

    assert takes(ALONE) == 10
    assert takes(Others({"a": KeyUse(0, 3, 0)}, 2)) == 7
    assert takes(Others({"a": KeyUse(0, 9, 0)}, 2)) == 5
    assert takes(Others({"a": KeyUse(0, 40, 0)}, 40)) == 1
    with pytest.raises(KeyBusy):
        shares().arrive(a, Others({"a": KeyUse(0, 0, 90)}, 2), 0.0).grow(51, 0.0)


def test_a_key_that_is_taken_out_is_forgotten_when_its_requests_have_ended() -> None:
    at, a = shares(), key(requests_per_s=5)
    place = at.arrive(a, ALONE, 0.0)
    at.keep([])
    assert at.used(0.0) == {"a": KeyUse(0.0, 1, 0)}
    place.leave(1.0)
    at.keep([])
    assert at.used(1.0) == {}


@given(
    rate=st.sampled_from([4.0, 20.0, 100.0]),
    gateways=st.integers(1, 4),
    jump=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_gateways_share_a_rate_and_what_they_give_too_much_is_bounded(
    rate: float, gateways: int, jump: bool, seed: int
) -> None:
    """Each hears of the others a presence period later. Demand at each changes at random, or jumps everywhere at once."""
    draw = random.Random(seed)
    fleet = [shares() for _ in range(gateways)]
    a, tick_s, ticks = key(requests_per_s=rate), ACCUSER_PERIOD_S, 400
    said: list[dict[str, KeyUse]] = [{} for _ in fleet]
    wanted = [float(jump)] * gateways
    given_s: list[int] = []
    for tick in range(ticks):
        now_s = tick * tick_s
        if not jump and tick % 100 == 0:
            wanted = [draw.random() * 2 for _ in fleet]
        taken = 0
        for number, at in enumerate(fleet):
            live = [
                Presence(role="gateway", id=str(who), epoch="1", ready=True, keys=said[who]) for who in range(gateways)
            ]
            others = Others.among(live, str(number))
            for _ in range(round(wanted[number] * rate * tick_s + draw.random())):
                try:
                    at.arrive(a, others, now_s).leave(now_s)
                    taken += 1
                except RateExceeded:
                    break
        said = [at.used(now_s) for at in fleet]
        given_s.append(taken)
    jumps = 1 if jump else ticks // 100
    slack = rate * (KEY_RATE_MEMORY_S + tick_s) * jumps + max(gateways, rate * KEY_BURST_S)
    assert sum(given_s) <= 1.02 * rate * ticks * tick_s + slack
    if jump:
        late = sum(given_s[-200:]) / (200 * tick_s)
        assert 0.85 * rate <= late <= 1.1 * rate


# --------------------------------------------------------------------------------------------------------------
# Queued tokens: four bytes are one, while nothing is measured


def queueing(tokens_max: float = 1000, creator_tokens_max: float = 1000) -> Shares:
    return Shares(
        Bounds(
            bytes_max=1_000_000,
            creator_requests_max=100,
            creator_bytes_max=1_000_000,
            tokens_max=tokens_max,
            creator_tokens_max=creator_tokens_max,
        )
    )


def test_all_have_so_many_prompt_tokens_queued_until_their_replies_begin() -> None:
    at = queueing(tokens_max=250)
    first = entered(at, "ada", 400)
    entered(at, "grace", 400)
    with pytest.raises(
        CapacityError, match=r"About 200 prompt tokens .* this request has about 100: .* 250 "
    ) as refused:
        entered(at, "alan", 400)
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    assert "gateway.queued_tokens_max" in str(refused.value)
    assert refused.value.retry_after_s == RETRY_UNMEASURED_S
    assert "alan" not in at.creators, "of what was refused nothing is left"
    first.begun(1.0)
    first.begun(1.0)
    assert at.queue.tokens == 100
    entered(at, "alan", 400, now_s=1.0)
    first.leave(2.0)
    assert at.queue.tokens == 200, "what had begun is not given back again"


def test_a_creator_has_so_many_prompt_tokens_queued_and_another_one_still_enters() -> None:
    at = queueing(creator_tokens_max=150)
    entered(at, "ada", 400)
    with pytest.raises(CreatorBusy, match=r"gateway\.creator_queued_tokens_max") as refused:
        entered(at, "ada", 400)
    assert (refused.value.status, at.queue.tokens) == (429, 100)
    entered(at, "ada", 200)
    entered(at, "grace", 400)
    assert at.queue.tokens == 250


def test_a_key_has_so_many_prompt_tokens_queued_at_all_gateways_together() -> None:
    at, a = queueing(), key(queued_tokens_max=150)
    first = entered(at, "ada", 400, of=a)
    with pytest.raises(
        KeyBusy, match=r"'a' has about 100 .* 100: it may have 150 \(its queued_tokens_max\)"
    ) as refused:
        entered(at, "grace", 400, of=a)
    assert refused.value.status == 429
    entered(at, "grace", 400, of=key("b"))
    assert at.used(0.0)["a"] == KeyUse(requests=1, bytes=400, tokens=100)
    first.begun(1.0)
    assert at.used(1.0)["a"] == KeyUse(requests=1, bytes=400)
    elsewhere = Presence(
        role="gateway", id="g2", epoch="e", ready=True, keys={"a": KeyUse(requests=1, bytes=1, tokens=100)}
    )
    place = at.arrive(a, Others.among([elsewhere], "g1"), 2.0)
    place.grow(200, 2.0)
    place.enter("ada", 2.0)
    more = at.arrive(a, Others.among([elsewhere], "g1"), 2.0)
    more.grow(200, 2.0)
    with pytest.raises(KeyBusy, match="about 150 "):
        more.enter("ada", 2.0)


def test_a_prompt_that_is_more_than_may_be_queued_enters_where_nothing_else_is() -> None:
    at = queueing(tokens_max=10, creator_tokens_max=10)
    place = entered(at, size=4000)
    with pytest.raises(CreatorBusy):
        entered(at, size=4)
    place.leave(1.0)
    assert at.queue.tokens == 0
    entered(at, size=4000)


def test_how_long_prompts_are_is_learnt_from_their_replies() -> None:
    at = queueing()
    entered(at, size=400).leave(1.0, drained=True, prompt_tokens=200)
    place = entered(at, size=400)
    assert at.queue.tokens == 200
    place.leave(1.0)
    by_reference = at.arrive(None, ALONE, 2.0)
    by_reference.grow(80, 2.0)
    by_reference.enter("ada", 2.0, referred=True)
    assert at.queue.tokens == 20
    by_reference.leave(3.0, drained=True, prompt_tokens=900)
    again = at.arrive(None, ALONE, 4.0)
    again.grow(60, 4.0)
    again.enter("ada", 4.0, referred=True)
    assert at.queue.tokens == 900


def test_the_wait_for_a_place_in_the_queue_follows_how_fast_replies_begin() -> None:
    at = queueing(tokens_max=250)
    places = [entered(at, f"c{number}", 400) for number in range(2)]
    for second in range(30):
        places[-2].begun(float(second))
        places.append(entered(at, f"c{second}", 400, now_s=float(second)))
    with pytest.raises(CapacityError) as refused:
        entered(at, "late", 400, now_s=29.0)
    assert refused.value.retry_after_s == pytest.approx(1.0, rel=0.3)
