"""Slots: which pulls stand, told as short stories, and as a machine that no order of events can lead astray."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pipeline.limits import BACKLOG_UNSERVED_S, SPILL_LOAD, SURPLUS_HOLD_S, SURPLUS_PAUSE_S
from pipeline.protocol.slots import Offer, Slots
from pipeline.protocol.subjects import Shard

OWN, ALSO, FOREIGN = Shard("interactive", 0), Shard("interactive", 1), Shard("interactive", 2)
BATCH = Shard("batch", 0)


def slots(capacity: int = 4) -> Slots:
    made = Slots(capacity)
    made.rank({OWN: 0, ALSO: 0, FOREIGN: 1}, 0.0)
    return made


def test_an_idle_worker_holds_half_its_slots_open_on_own_shards_and_one_on_others() -> None:
    made = Slots(4)
    assert made.rank({OWN: 0, FOREIGN: 2}, 0.0) == [Offer(OWN, 2, 0), Offer(FOREIGN, 1, 2)]
    assert made.outstanding == 3
    assert made.offers(0.0) == []


def test_urgent_classes_come_first() -> None:
    assert [offer.shard for offer in Slots(4).rank({BATCH: 0, FOREIGN: 1, OWN: 0}, 0.0)] == [OWN, FOREIGN, BATCH]


def test_a_pull_is_replaced_in_the_moment_that_its_message_comes() -> None:
    made = slots()
    assert made.delivered("a", OWN, 0, 0.0)
    assert made.offers(0.0) == [Offer(OWN, 1, 0)]


def test_over_the_spill_load_no_foreign_shard_is_served() -> None:
    made = Slots(4)
    made.load = SPILL_LOAD
    assert made.rank({OWN: 0, FOREIGN: 1}, 0.0) == [Offer(OWN, 2, 0)]


def test_a_full_worker_offers_nothing() -> None:
    made = slots(1)
    made.delivered("a", OWN, 0, 0.0)
    assert made.offers(0.0) == []


def test_shards_with_backlog_share_exactly_the_free_slots_in_turn() -> None:
    made = Slots(2)
    made.rank({OWN: 0, ALSO: 0}, 0.0)
    made.delivered("a", OWN, 5, 0.0)
    made.delivered("b", ALSO, 5, 0.0)
    made.finished()
    [first] = made.offers(0.0)
    made.delivered("c", first.shard, 4, 0.0)
    made.finished()
    [second] = made.offers(0.0)
    assert {first.shard, second.shard} == {OWN, ALSO}
    made.finished()
    assert sum(offer.batch for offer in made.offers(0.0)) == 1


def test_a_pull_that_is_not_served_at_once_shows_that_the_backlog_is_gone_and_leaves_its_slot_to_others() -> None:
    made = Slots(2)
    made.rank({OWN: 0, ALSO: 0}, 0.0)
    made.delivered("a", OWN, 5, 0.0)
    made.delivered("b", ALSO, 5, 0.0)
    made.finished()
    [first] = made.offers(1.0)
    (other,) = {OWN, ALSO} - {first.shard}
    assert made.offers(1.0 + BACKLOG_UNSERVED_S / 2) == []
    assert made.offers(1.0 + 2 * BACKLOG_UNSERVED_S) == [Offer(other, 1, 0)]
    made.delivered("c", first.shard, 3, 1.2)
    made.finished()
    assert [offer.shard for offer in made.offers(1.2)] == [first.shard], "what came says more than what did not"


def test_a_surplus_message_takes_a_slot_that_frees_in_time() -> None:
    made = slots(1)
    made.delivered("a", OWN, 0, 0.0)
    assert not made.delivered("b", ALSO, 0, 0.0)
    assert made.finished() == "b"
    assert made.surplus(SURPLUS_HOLD_S * 2) == []
    assert made.finished() is None


def test_a_surplus_message_is_given_back_and_its_shard_left_alone_for_a_moment() -> None:
    made = slots(1)
    made.delivered("a", OWN, 0, 0.0)
    made.delivered("b", ALSO, 0, 0.0)
    assert made.surplus(SURPLUS_HOLD_S / 2) == []
    assert made.surplus(SURPLUS_HOLD_S) == ["b"]
    made.finished()
    assert ALSO not in [offer.shard for offer in made.offers(SURPLUS_PAUSE_S / 2)]
    assert ALSO in [offer.shard for offer in made.offers(SURPLUS_PAUSE_S)]


def test_a_pull_that_ended_without_a_message_is_offered_again() -> None:
    made = slots()
    made.ended(FOREIGN, 1)
    assert made.offers(0.0) == [Offer(FOREIGN, 1, 1)]


def test_a_closed_worker_takes_nothing_and_gives_back_what_it_holds() -> None:
    made = slots(1)
    made.delivered("a", OWN, 0, 0.0)
    made.delivered("b", ALSO, 0, 0.0)
    made.close()
    assert made.surplus(0.0) == ["b"]
    assert not made.delivered("c", FOREIGN, 0, 0.0)
    assert made.finished() is None
    assert made.offers(10.0) == []
    assert made.free == 1


class SlotsMachine(RuleBasedStateMachine):
    """A broker with a few shards, against the slots: no overcommitment, nothing lost, no free slot beside a backlog."""

    shards = st.sampled_from([OWN, ALSO, FOREIGN, BATCH])

    @initialize(capacity=st.integers(1, 5))
    def begin(self, capacity: int) -> None:
        self.slots = Slots(capacity)
        self.now_s = 0.0
        self.standing = dict.fromkeys([OWN, ALSO, FOREIGN, BATCH], 0)
        self.running: set[int] = set()
        self.held: set[int] = set()
        self.count = 0
        self.take(self.slots.rank({OWN: 0, ALSO: 0, FOREIGN: 1, BATCH: 0}, 0.0))

    def take(self, offers: list[Offer]) -> None:
        for offer in offers:
            assert offer.batch > 0
            self.standing[offer.shard] += offer.batch

    @rule(shard=shards, backlog=st.integers(0, 3))
    def delivers(self, shard: Shard, backlog: int) -> None:
        if not self.standing[shard]:
            return
        self.standing[shard] -= 1
        self.count += 1
        (self.running if self.slots.delivered(self.count, shard, backlog, self.now_s) else self.held).add(self.count)
        self.take(self.slots.offers(self.now_s))

    @rule(shard=shards)
    def expires(self, shard: Shard) -> None:
        self.slots.ended(shard, self.standing[shard])
        self.standing[shard] = 0
        self.take(self.slots.offers(self.now_s))

    @rule()
    def finishes(self) -> None:
        if not self.running:
            return
        self.running.pop()
        taken = self.slots.finished()
        if taken is not None:
            assert isinstance(taken, int)
            self.held.remove(taken)
            self.running.add(taken)
        self.take(self.slots.offers(self.now_s))

    @rule(passed_s=st.floats(0.0, 0.2), load=st.floats(0.0, 1.0))
    def time_passes(self, passed_s: float, load: float) -> None:
        self.now_s += passed_s
        self.slots.load = load
        for key in self.slots.surplus(self.now_s):
            assert isinstance(key, int)
            self.held.remove(key)
        self.take(self.slots.offers(self.now_s))

    @invariant()
    def slots_and_pulls_agree_with_the_broker(self) -> None:
        assert self.slots.busy == len(self.running) <= self.slots.capacity
        assert self.slots.outstanding == sum(self.standing.values())

    @invariant()
    def a_free_slot_has_an_open_hand_somewhere(self) -> None:
        lanes = self.slots._lanes.values()
        paused = any(lane.paused_until_s > self.now_s for lane in lanes)
        assert not self.slots.free or self.slots.outstanding or paused


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
