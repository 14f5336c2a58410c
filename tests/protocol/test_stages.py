"""Where a request's time went: what each process says, and how the gateway puts it together."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol import stages
from pipeline.protocol.request import Event
from pipeline.protocol.stages import AtDecode, AtGateway, AtPrefill, Decoding, Prefilling, Stages, at_decode, at_prefill

MS = 1000


def prefilling(*events: tuple[Event, float], **more: float) -> Prefilling:
    """A request that began at 10 s; events come so many ms later."""
    times = Prefilling(began_s=10.0, **more)
    for event, at_ms in events:
        times.happened(event, 10 + at_ms / 1000)
    return times


READY = ((Event.DELIVERED, 0), (Event.GO, 3), (Event.RENDERED, 5), (Event.GRANTED, 20), (Event.STORED, 45))


def spent(at: AtPrefill | AtDecode) -> dict[str, float]:
    """What took time, in ms."""
    return {name: round(1000 * took_s, 3) for name, took_s in stages.seconds(at).items() if took_s}


def test_stages_at_prefill_follow_each_other_without_a_gap() -> None:
    at = at_prefill(prefilling(*READY, wait_s=0.004, store_s=0.01), 10.046)
    assert spent(at) == {"render": 5, "wait": 4, "prefill": 26, "store": 10, "handoff": 1}


@pytest.mark.parametrize(("follows", "who"), [(None, "prefill"), ("c1", "decode")])
def test_who_has_begun_a_reply_shows_in_its_claim(follows: str | None, who: str) -> None:
    at = AtGateway(1.0)
    assert (at.first_s, at.first_of) == (None, "")
    at.begins(follows, 1.5)
    assert (at.first_s, at.first_of) == (1.5, who)


def test_credit_that_came_while_the_prompt_was_computed_cost_nothing() -> None:
    assert "credit" not in spent(at_prefill(prefilling(*READY), 10.045))


def test_a_wait_for_credit_counts_from_when_the_kv_was_stored() -> None:
    late = (*READY[:3], (Event.STORED, 45), (Event.GRANTED, 75))
    assert spent(at_prefill(prefilling(*late), 10.075)) == {"render": 5, "prefill": 40, "credit": 30}


def test_a_wait_for_the_receiver_counts_beyond_all_else() -> None:
    late = ((Event.DELIVERED, 0), *READY[2:], (Event.GO, 60))
    assert spent(at_prefill(prefilling(*late), 10.060)) == {"render": 5, "prefill": 40, "claim": 15}


def test_a_redelivered_request_starts_when_its_start_is_counted() -> None:
    again = ((Event.DELIVERED_AGAIN, 0), (Event.GO, 2), (Event.COUNTED, 7), *READY[2:])
    assert spent(at_prefill(prefilling(*again), 10.045))["start"] == 7


def test_a_grant_that_was_lost_before_the_offer_is_waited_for_again() -> None:
    times = prefilling(*READY, (Event.GRANT_LOST, 46), (Event.GRANTED, 60))
    assert spent(at_prefill(times, 10.060))["credit"] == 15


def test_what_comes_after_the_first_offer_belongs_to_the_hand_off() -> None:
    times = prefilling(*READY)
    times.offered_s = 10.046
    times.happened(Event.GRANTED, 10.9)
    assert spent(at_prefill(times, 11.0)) == {"render": 5, "prefill": 40, "handoff": 955}


def test_what_is_under_way_counts_up_to_now() -> None:
    assert spent(at_prefill(prefilling(), 10.004)) == {"start": 4}
    assert spent(at_prefill(prefilling(READY[0]), 10.004)) == {"render": 4}
    assert spent(at_prefill(prefilling(*READY[:3]), 10.025)) == {"render": 5, "prefill": 20}
    assert spent(at_prefill(prefilling(*READY[:3], (Event.STORED, 45)), 10.05)) == {
        "render": 5,
        "prefill": 40,
        "credit": 5,
    }


def test_an_engine_that_says_more_than_there_was_is_not_believed() -> None:
    at = at_prefill(prefilling(*READY, wait_s=9.0, store_s=0.03), 10.045)
    assert spent(at) == {"render": 5, "wait": 10, "store": 30}


def test_the_claim_is_told_beside_the_stages() -> None:
    at = at_prefill(prefilling(*READY, asked_s=10.001, answered_s=10.003), 10.045)
    assert (at.asked, at.answered) == (1 * MS, 2 * MS)
    assert not {"asked", "answered"} & stages.seconds(at).keys()


def test_stages_at_decode() -> None:
    times = Decoding(began_s=5.0, asked_s=5.0, answered_s=5.002, first_s=5.02, load_s=0.01)
    for event, at_s in ((Event.GO, 5.002), (Event.GO, 5.5), (Event.GENERATED, 5.1)):
        times.happened(event, at_s)
    at = at_decode(times, 5.104)
    assert spent(at) == {"takeover": 2, "load": 10, "first_step": 8, "decode": 80, "finish": 4}
    assert (at.asked, at.answered) == (0, 2 * MS)


def test_decode_counts_up_to_now_as_well() -> None:
    times = Decoding(began_s=5.0)
    assert spent(at_decode(times, 5.001)) == {"takeover": 1}
    times.happened(Event.TAKEN, 5.0)
    times.happened(Event.GO, 5.002)
    assert spent(at_decode(times, 5.01)) == {"takeover": 2, "first_step": 8}
    times.first_s = 5.02
    assert spent(at_decode(times, 5.05)) == {"takeover": 2, "first_step": 18, "decode": 30}


# --------------------------------------------------------------------------------------------------------------
# At the gateway


class World:
    """One request, whose true times are known. Every process has a clock of its own, of which only differences mean anything."""

    def __init__(self, draw: st.DataObject) -> None:
        self.draw = draw
        self.now_s = draw.draw(st.floats(0, 1000))
        self.began_s = self.now_s
        self.gateway = AtGateway(self.now_s)

    def passes(self, most_s: float = 0.5) -> float:
        """Some time passes; how much."""
        took_s = self.draw.draw(st.floats(0, most_s))
        self.now_s += took_s
        return took_s

    def claims(self, claim: str, follows: str | None, asked_s: float) -> tuple[int, int]:
        """A worker that began `asked_s` ago claims it, now; returns `asked` and `answered`."""
        there_s = self.passes(0.05)
        self.gateway.claimed(claim, follows, self.now_s)
        back_s = self.passes(0.05)
        return round(1e6 * asked_s), round(1e6 * (there_s + back_s))


@given(st.data())
def test_stages_add_up_whatever_clocks_workers_have_and_however_long_messages_take(data: st.DataObject) -> None:
    world = World(data)
    accept_s = world.passes()
    world.gateway.sent_s = world.now_s
    stored = data.draw(st.sampled_from(["before", "after", "never heard"]))
    world.passes()
    if stored == "before":
        world.gateway.stored_s = world.now_s
    world.passes()
    prefill_began_s = world.now_s
    asked, answered = world.claims("p", None, world.passes())
    render_s, prefill_s = world.passes(), world.passes()
    if stored == "after":
        world.gateway.stored_s = world.now_s
    said_s = world.now_s - prefill_began_s
    at_p = AtPrefill(asked=asked, answered=answered, start=round(1e6 * (said_s - render_s - prefill_s)))
    at_p = msgspec.structs.replace(at_p, render=round(1e6 * render_s), prefill=round(1e6 * prefill_s))
    world.passes()
    decode_began_s = world.now_s
    asked, answered = world.claims("d", "p", world.passes())
    load_s, decode_s = world.passes(), world.passes()
    takeover_s = world.now_s - decode_began_s - load_s - decode_s
    at_d = AtDecode(asked=asked, answered=answered, takeover=round(1e6 * takeover_s), load=round(1e6 * load_s))
    at_d = msgspec.structs.replace(at_d, decode=round(1e6 * decode_s))
    world.passes()
    if data.draw(st.booleans()):
        world.gateway.ended_s = world.now_s
    world.passes()

    times = world.gateway.stages(world.now_s, "d", Stages(at_p, at_d))
    took_s = world.now_s - world.began_s
    assert list(times) == [stage for stage in stages.STAGES if stage != "work"]
    assert all(one >= 0 for one in times.values())
    assert abs(stages.unexplained_s(times, took_s)) < 1e-5
    assert math.isclose(times["accept"], accept_s, abs_tol=1e-9)
    assert math.isclose(times["decode"], decode_s, abs_tol=2e-6)
    before_prefill_s = times["accept"] + times["publish"] + times["queued"]
    assert abs(before_prefill_s - (prefill_began_s - world.began_s)) <= at_p.answered / 2e6 + 1e-5
    before_decode_s = sum(list(times.values())[: list(times).index("takeover")])
    assert abs(before_decode_s - (decode_began_s - world.began_s)) <= (at_p.answered + at_d.answered) / 2e6 + 1e-5


def told(**prefill: int) -> Stages:
    """Prefill took 10 ms and decode 20 unless it says otherwise; claims took no time."""
    return Stages(AtPrefill(**({"prefill": 10 * MS} | prefill)), AtDecode(decode=20 * MS))


def at_gateway(*claims: tuple[str, str | None, float]) -> AtGateway:
    """A request that came at 0, was published at 1 ms and stored at 2; claims are heard after so many ms."""
    gateway = AtGateway(0.0)
    gateway.sent_s, gateway.stored_s = 0.001, 0.002
    for claim, follows, at_ms in claims:
        gateway.claimed(claim, follows, at_ms / 1000)
    return gateway


def in_ms(times: dict[str, float]) -> dict[str, float]:
    return {name: said for name, took_s in times.items() if (said := round(1000 * took_s, 3))}


def test_what_attempts_cost_that_did_not_end_is_told_apart_from_the_queue() -> None:
    gateway = at_gateway(("p1", None, 5), ("d1", "p1", 20), ("p2", None, 505), ("d2", "p2", 517))
    assert gateway.attempts == 2
    times = in_ms(gateway.stages(0.540, "d2", told()))
    expected = {
        "accept": 1,
        "publish": 1,
        "queued": 3,
        "lost": 500,
        "prefill": 10,
        "handoff": 2,
        "decode": 20,
        "relay": 3,
    }
    assert times == expected


def test_a_hand_off_that_was_claimed_back_is_the_same_attempt() -> None:
    gateway = at_gateway(("p1", None, 5), ("d1", "p1", 20), ("p2", "d1", 700), ("d2", "p2", 710))
    gateway.claimed("p2", "d1", 0.700)
    assert gateway.attempts == 1
    said = Stages(AtPrefill(asked=695 * MS, prefill=10 * MS, handoff=694 * MS), AtDecode(decode=20 * MS))
    times = in_ms(gateway.stages(0.730, "d2", said))
    assert times == {"accept": 1, "publish": 1, "queued": 3, "prefill": 10, "handoff": 695, "decode": 20}


def test_a_claim_that_follows_one_from_before_our_time_begins_where_it_was_heard() -> None:
    times = in_ms(at_gateway(("p2", "unknown", 5), ("d", "p2", 15)).stages(0.040, "d", told()))
    assert "lost" not in times
    assert sum(times.values()) == pytest.approx(40)


def test_what_is_said_twice_shows_as_unexplained() -> None:
    times = at_gateway(("p", None, 5), ("d", "p", 15)).stages(0.036, "d", told(render=10 * MS))
    assert stages.unexplained_s(times, 0.036) == pytest.approx(-0.009)


@pytest.mark.parametrize("claim", [None, "d", "p", "stranger"])
def test_where_workers_have_not_said_their_part_is_one(claim: str | None) -> None:
    gateway = at_gateway(("p", None, 5))
    times = in_ms(gateway.stages(0.036, claim, None if claim is None else told()))
    assert times == {"accept": 1, "publish": 1, "queued": 3, "work": 31}


def test_a_request_that_nobody_has_taken_waits_in_the_queue() -> None:
    assert in_ms(at_gateway().stages(0.036)) == {"accept": 1, "publish": 1, "queued": 34}
    assert in_ms(AtGateway(0.0).stages(0.036)) == {"accept": 36}
    gateway = AtGateway(0.0)
    gateway.sent_s = 0.001
    assert in_ms(gateway.stages(0.036)) == {"accept": 1, "publish": 35}


def test_each_stage_has_one_process_that_counts_it() -> None:
    at_workers = {*AtPrefill.__struct_fields__, *AtDecode.__struct_fields__} - {"asked", "answered", "handoff"}
    assert at_workers == stages.AT_WORKERS
    assert set(stages.STAGES) == stages.AT_WORKERS | stages.AT_GATEWAY


def test_a_producer_reads_them_by_name() -> None:
    named = stages.named(told())
    assert (named["prefill"], named["decode"]) == (0.01, 0.02)
    assert set(named) == stages.AT_WORKERS | {"handoff"}
