"""Slots: which pulls stand, told as short stories, and as a machine that no order of events can lead astray."""

import time
from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pipeline.limits import BACKLOG_UNSERVED_S, SPILL_BACK_LOAD, SPILL_LOAD, SURPLUS_HOLD_S
from pipeline.protocol import classes, placement
from pipeline.protocol.classes import INTERACTIVE, WEIGHTS, Weights
from pipeline.protocol.slots import SPILLING_OTHERS, SPILLING_OWN, Offer, Slots
from pipeline.protocol.subjects import CLASSES, Shard

OWN, ALSO, FOREIGN = Shard("interactive", 0), Shard("interactive", 1), Shard("interactive", 2)
BATCH = Shard("batch", 0)


def slots(capacity: int = 4) -> Slots:
    made = Slots(capacity)
    made.rank({OWN: 0, ALSO: 0, FOREIGN: 1}, 0.0)
    return made


def test_an_idle_worker_holds_half_its_slots_open_on_own_shards_and_one_on_others() -> None:
    made = Slots(4)
    assert made.rank({OWN: 0, FOREIGN: 4}, 0.0) == [Offer(OWN, 2, 0), Offer(FOREIGN, 1, 2)]
    assert made.outstanding == 3
    assert made.offers(0.0) == []


def test_urgent_classes_come_first() -> None:
    assert [offer.shard for offer in Slots(4).rank({BATCH: 0, FOREIGN: 1, OWN: 0}, 0.0)] == [OWN, FOREIGN, BATCH]


def test_a_pull_is_replaced_in_the_moment_that_its_message_comes() -> None:
    made = slots()
    assert made.delivered("a", OWN, 0, 0.0)
    assert made.offers(0.0) == [Offer(OWN, 1, 0)]


@pytest.mark.parametrize(
    ("rank", "load", "priority"),
    [
        (0, 0.0, 0),
        (0, 0.8, 0),
        (1, 0.0, 1),
        (3, 0.0, 1),
        (4, 0.0, 2),
        (9, 0.0, 3),
        (1, 0.5, 2),
        (1, 0.7, 3),
        (9, 0.7, 5),
    ],
)
def test_near_ranks_come_first_and_of_them_the_least_loaded(rank: int, load: float, priority: int) -> None:
    made = Slots(4)
    made.load = load
    assert [offer.priority for offer in made.rank({OWN: rank}, 0.0)] == [priority]


def test_over_the_spill_load_what_is_left_is_offered_where_nobody_else_has_a_slot() -> None:
    made = Slots(4)
    made.load = SPILL_LOAD
    assert made.rank({OWN: 0, FOREIGN: 1}, 0.0) == [Offer(OWN, 1, SPILLING_OWN), Offer(FOREIGN, 1, SPILLING_OTHERS)]
    assert made.offers(0.0) == [], "a hand is a hand, as long as it spills"


def test_a_worker_that_spills_no_more_puts_good_hands_beside_the_last_ones() -> None:
    made = Slots(4)
    made.load = SPILL_LOAD
    made.rank({OWN: 0, FOREIGN: 1}, 0.0)
    made.load = SPILL_BACK_LOAD + 0.01
    assert made.offers(0.0) == [], "between the two loads nothing changes, so that it does not flap"
    made.load = 0.0
    assert made.offers(0.0) == [Offer(OWN, 2, 0), Offer(FOREIGN, 1, 1)]
    made.load = SPILL_BACK_LOAD + 0.01
    assert made.offers(0.0) == []
    assert not made.spilling
    made.load = 0.0
    made.ended(OWN, 1)
    assert made.offers(0.0) == [], "the one that ended is taken for the last one, which was not worth much"
    made.ended(OWN, 1)
    assert made.offers(0.0) == [Offer(OWN, 1, 0)]


def test_a_spilling_worker_takes_up_its_own_backlog_first() -> None:
    made = Slots(8)
    made.rank({OWN: 0, FOREIGN: 1}, 0.0)
    made.delivered("a", FOREIGN, 3, 0.0)
    made.delivered("b", OWN, 3, 0.0)
    made.ended(FOREIGN, 9)
    made.delivered("c", FOREIGN, 3, 0.0)
    made.load = 0.9
    assert made.offers(0.0)[:2] == [Offer(OWN, 1, SPILLING_OWN), Offer(FOREIGN, 1, SPILLING_OTHERS)]


def test_now_and_then_the_backlog_of_others_goes_first() -> None:
    made = Slots(8)
    made.rank({OWN: 0, FOREIGN: 1}, 0.0)
    for key in "abcdefgh":
        made.delivered(key, OWN if key < "e" else FOREIGN, 9, 0.0)
    chosen = []
    for number in range(8):
        made.finished(INTERACTIVE)
        [offer] = made.offers(0.0)
        chosen.append(offer.shard)
        made.delivered(number, offer.shard, 9, 0.0)
    assert chosen == [OWN, OWN, OWN, FOREIGN] * 2


def test_the_slots_know_their_own_part_of_the_load() -> None:
    made = Slots(4)
    made.rank({OWN: 0}, 0.0)
    for key in "abcd":
        made.delivered(key, OWN, 0, 0.0)
    made.load = 1.0
    assert made.offers(0.0) == []
    assert (made.load, made.spilling) == (1.0, True)
    made.finished(INTERACTIVE)
    made.offers(0.0)
    assert (made.load, made.spilling) == (0.75, False), "the worker has not weighed itself since, and need not"
    made.load = 0.9
    made.finished(INTERACTIVE)
    assert made.load == 0.9, "something else is scarcer"


def test_a_full_worker_offers_nothing() -> None:
    made = slots(1)
    made.delivered("a", OWN, 0, 0.0)
    assert made.offers(0.0) == []


def test_shards_with_backlog_share_exactly_the_free_slots_in_turn() -> None:
    made = Slots(2)
    made.rank({OWN: 0, ALSO: 0}, 0.0)
    made.delivered("a", OWN, 5, 0.0)
    made.delivered("b", ALSO, 5, 0.0)
    made.finished(INTERACTIVE)
    [first] = made.offers(0.0)
    made.delivered("c", first.shard, 4, 0.0)
    made.finished(INTERACTIVE)
    [second] = made.offers(0.0)
    assert {first.shard, second.shard} == {OWN, ALSO}
    made.finished(INTERACTIVE)
    assert sum(offer.batch for offer in made.offers(0.0)) == 1


def test_a_pull_that_is_not_served_at_once_shows_that_the_backlog_is_gone_and_leaves_its_slot_to_others() -> None:
    made = Slots(2)
    made.rank({OWN: 0, ALSO: 0}, 0.0)
    made.delivered("a", OWN, 5, 0.0)
    made.delivered("b", ALSO, 5, 0.0)
    made.finished(INTERACTIVE)
    [first] = made.offers(1.0)
    (other,) = {OWN, ALSO} - {first.shard}
    assert made.offers(1.0 + BACKLOG_UNSERVED_S / 2) == []
    assert made.offers(1.0 + 2 * BACKLOG_UNSERVED_S) == [Offer(other, 1, 0)]
    made.delivered("c", first.shard, 3, 1.2)
    made.finished(INTERACTIVE)
    assert [offer.shard for offer in made.offers(1.2)] == [first.shard], "what came says more than what did not"


def test_a_surplus_message_takes_a_slot_that_frees_in_time() -> None:
    made = slots(1)
    made.delivered("a", OWN, 0, 0.0)
    assert not made.delivered("b", ALSO, 0, 0.0)
    assert made.finished(INTERACTIVE) == "b"
    assert made.surplus(SURPLUS_HOLD_S * 2) == []
    assert made.finished(INTERACTIVE) is None


def test_a_surplus_message_that_comes_again_is_given_back_at_once() -> None:
    made = slots(1)
    made.delivered("a", OWN, 0, 0.0)
    made.delivered("b", ALSO, 0, 0.0)
    made.delivered("c", OWN, 0, 0.0, again=True)
    assert made.surplus(0.0) == ["c"]
    assert made.surplus(SURPLUS_HOLD_S) == ["b"]


def test_a_surplus_message_is_given_back_and_asked_for_as_soon_as_a_slot_frees() -> None:
    made = slots(1)
    made.delivered("a", OWN, 0, 0.0)
    made.delivered("b", ALSO, 0, 0.0)
    assert made.surplus(SURPLUS_HOLD_S / 2) == []
    assert made.surplus(SURPLUS_HOLD_S) == ["b"]
    assert made.offers(SURPLUS_HOLD_S) == []
    made.finished(INTERACTIVE)
    assert ALSO in [offer.shard for offer in made.offers(SURPLUS_HOLD_S)]


def test_a_hot_shard_whose_surplus_has_found_a_slot_is_not_left_alone() -> None:
    """It was, for 100 ms, and its requests waited in the queue beside free slots."""
    made = slots(2)
    for key in "abc":
        made.delivered(key, OWN, 0, 0.0)
    assert made.finished(INTERACTIVE) == "c"
    made.finished(INTERACTIVE)
    assert OWN in [offer.shard for offer in made.offers(0.001)]


def test_a_shard_that_changes_hands_is_offered_at_its_new_rank() -> None:
    made = slots()
    assert made.rank({OWN: 0, ALSO: 0, FOREIGN: 1}, 0.0) == []
    made.ended(OWN, 2)
    assert made.rank({OWN: 1, ALSO: 0, FOREIGN: 0}, 0.0) == [Offer(FOREIGN, 1, 0), Offer(OWN, 1, 1)]


def test_a_delivery_costs_the_same_with_hundreds_of_shards() -> None:
    few, many = Deliveries(8), Deliveries(256)
    timed = [(few.lap_s(lap), many.lap_s(lap)) for lap in range(20)]
    few_s, many_s = (min(times_s) for times_s in zip(*timed, strict=True))
    assert many_s < 4 * few_s, "about the same; looking at each shard would make it thirty times as much"


class Deliveries:
    """Slots of one of four workers, with so many shards a class, to which messages come in turn."""

    def __init__(self, shards: int) -> None:
        every = [Shard(klass, number) for klass in CLASSES for number in range(shards)]
        self._slots = Slots(16)
        self._slots.rank(placement.ranks("p0", every, {f"p{number}": 16.0 for number in range(4)}), 0.0)
        self._own = [shard for shard in every if self._slots._lanes[shard].rank == 0]

    def lap_s(self, lap: int) -> float:
        """How long a hundred of them take."""
        began_s = time.perf_counter()
        for number in range(100):
            now_s = lap + number / 1000
            shard = self._own[(lap + number) % len(self._own)]
            self._slots.delivered(number, shard, 0, now_s)
            self._slots.offers(now_s)
            self._slots.finished(shard.klass)
        return time.perf_counter() - began_s


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
    assert made.finished(INTERACTIVE) is None
    assert made.offers(10.0) == []
    assert made.free == 1


def test_a_worker_that_lingers_takes_what_its_last_pulls_bring_and_offers_nothing() -> None:
    made = slots(1)
    made.close(lingers=True)
    assert made.delivered("a", OWN, 0, 0.0)
    assert not made.delivered("b", ALSO, 0, 0.0)
    assert made.surplus(0.0) == [], "a slot may become free for it"
    assert made.finished(INTERACTIVE) == "b"
    assert made.finished(INTERACTIVE) is None
    assert made.offers(0.0) == []
    made.close()
    assert not made.delivered("c", FOREIGN, 0, 0.0)


def test_a_worker_that_is_opened_again_offers_what_it_has_free() -> None:
    made = slots(1)
    made.close()
    for shard in (OWN, ALSO, FOREIGN):
        made.ended(shard, 1)
    assert made.offers(0.0) == []
    made.reopen()
    assert {offer.shard for offer in made.offers(0.0)} == {OWN, ALSO, FOREIGN}


def test_fewer_slots_than_requests_take_nothing_new_until_they_are_fewer() -> None:
    made = slots(4)
    for number in range(4):
        made.delivered(number, OWN, 0, 0.0)
    made.resize(2)
    assert (made.free, made.load) == (0, 1.0)
    assert not made.delivered("more", ALSO, 0, 0.0)
    assert [made.finished(INTERACTIVE), made.finished(INTERACTIVE)] == [None, None]
    assert made.finished(INTERACTIVE) == "more"
    assert made.offers(0.0) == []
    made.finished(INTERACTIVE)
    assert made.offers(0.0) != []
    assert made.free == 1


def test_more_slots_hold_more_hands_open_on_own_shards() -> None:
    made = slots(2)
    made.resize(2)
    assert made.offers(0.0) == [], "nothing has changed"
    made.resize(8)
    assert Offer(OWN, 3, 0) in made.offers(0.0), "four hands, of which one stood there"


def mixed(capacity: int, weights: Weights = WEIGHTS) -> Slots:
    """A worker with one shard of each class, both its own."""
    made = Slots(capacity, weights)
    made.rank({OWN: 0, BATCH: 0}, 0.0)
    return made


def served(made: Slots, count: int, backlog: Mapping[Shard, int]) -> str:
    """Of a full worker, whose requests take the slots as one after the other frees, with so much waiting behind each."""
    order = ""
    for number in range(count):
        made.finished(INTERACTIVE)
        [offer] = made.offers(0.0)
        order += offer.shard.klass[0]
        assert made.delivered(number, offer.shard, backlog[offer.shard], 0.0)
        made._classes[offer.shard.klass].busy -= 1  # all slots are interactive here: batch never meets its bound
        made._urgent.busy += 1
    return order


def test_while_both_wait_batch_gets_one_of_ten_slots() -> None:
    made = mixed(4)
    for key in "abcd":
        made.delivered(key, OWN, 9, 0.0)
    for key in "ef":
        made.delivered(key, BATCH, 9, 0.0)
    made.surplus(SURPLUS_HOLD_S)
    assert served(made, 26, {OWN: 9, BATCH: 9}) == "iiiiib" + "i" * 9 + "b" + "i" * 9 + "b"


def test_batch_takes_all_but_the_room_of_interactive_requests() -> None:
    made = mixed(4, Weights(prefill_room=0.25))
    taken = [made.delivered(key, BATCH, 9, 0.0) for key in "abcd"]
    assert taken == [True, True, True, False]
    assert made.surplus(SURPLUS_HOLD_S) == ["d"]
    assert {offer.shard for offer in made.offers(0.0)} <= {OWN}, "there is no slot for batch"
    assert made.delivered("e", OWN, 0, 0.0), "and one for an interactive request"
    assert made.finished(INTERACTIVE) is None
    made.finished(classes.BATCH)
    assert made.offers(0.0)[-1].shard == BATCH


def test_the_only_slot_is_anybodys() -> None:
    made = mixed(1)
    assert made.delivered("a", BATCH, 0, 0.0)
    assert not made.delivered("b", OWN, 0, 0.0)
    assert made.finished(classes.BATCH) == "b"


def test_of_what_is_held_an_interactive_request_goes_first_unless_it_is_batchs_turn() -> None:
    made = mixed(2, Weights(interactive_weight=1, batch_weight=1))
    made.delivered("a", OWN, 0, 0.0)
    made.delivered("b", BATCH, 0, 0.0)
    assert not made.delivered("c", BATCH, 0, 0.0)
    assert not made.delivered("d", OWN, 0, 0.0)
    assert made.finished(INTERACTIVE) == "d", "batch has had its turn"
    assert made.finished(INTERACTIVE) is None, "batch has all that it may have"
    assert made.finished(classes.BATCH) == "c"


def test_a_slot_is_kept_for_batch_on_its_turn_until_it_has_come_or_has_not() -> None:
    made = mixed(2, Weights(interactive_weight=1, batch_weight=1))
    made.delivered("a", OWN, 5, 0.0)
    made.delivered("b", BATCH, 5, 0.0)
    made.delivered("c", OWN, 5, 0.0)
    made.surplus(SURPLUS_HOLD_S)
    made.finished(classes.BATCH)
    assert BATCH not in [offer.shard for offer in made.offers(1.0)], "it was its turn before"
    made.delivered("d", OWN, 5, 1.0)
    made.finished(INTERACTIVE)
    assert BATCH in [offer.shard for offer in made.offers(1.0)]
    assert not made.delivered("e", OWN, 5, 1.0), "a slot is free, and not for this one"
    made.surplus(1.0 + SURPLUS_HOLD_S)
    assert OWN in [offer.shard for offer in made.offers(1.0 + 2 * BACKLOG_UNSERVED_S)], "nothing of batch waits"
    assert made.delivered("f", OWN, 5, 1.1)


def test_batch_is_not_asked_for_while_interactive_requests_wait_unless_it_is_its_turn() -> None:
    made = Slots(4)
    made.rank({OWN: 0, ALSO: 0, BATCH: 0}, 0.0)
    for key in "abcd":
        made.delivered(key, OWN, 9, 0.0)
    made.ended(BATCH, 2)
    for turn in range(8):
        made.finished(INTERACTIVE)
        assert (BATCH in [offer.shard for offer in made.offers(0.0)]) == (turn == 5), "what waits there must be found"
        made.delivered(turn, OWN, 9, 0.0)


def test_slots_that_batch_holds_make_nobody_spill() -> None:
    made = mixed(8, Weights(prefill_room=0.25))
    for number in range(6):
        made.delivered(number, BATCH, 9, 0.0)
    made.delivered("a", OWN, 0, 0.0)
    made.offers(0.0)
    assert (made.load, made.urgent_load, made.spilling) == (7 / 8, 1 / 8, False)


def test_weights_change_from_the_next_turn_on() -> None:
    made = mixed(4)
    made.weigh(Weights())
    for key in "abcd":
        made.delivered(key, OWN, 9, 0.0)
    for key in "ef":
        made.delivered(key, BATCH, 9, 0.0)
    made.surplus(SURPLUS_HOLD_S)
    made.weigh(Weights(interactive_weight=1, batch_weight=1, prefill_room=0.5))
    assert served(made, 6, {OWN: 9, BATCH: 9}) == "ibibib"
    assert made._batch_max == 2


class SlotsMachine(RuleBasedStateMachine):
    """A broker with a few shards, against the slots: no overcommitment, nothing lost, no free slot beside a backlog."""

    shards = st.sampled_from([OWN, ALSO, FOREIGN, BATCH])

    @initialize(capacity=st.integers(1, 5), interactive=st.integers(1, 5), batch=st.integers(1, 3))
    def begin(self, capacity: int, interactive: int, batch: int) -> None:
        self.weights = Weights(interactive_weight=interactive, batch_weight=batch)
        self.slots = Slots(capacity, self.weights)
        self.now_s = 0.0
        self.standing = dict.fromkeys([OWN, ALSO, FOREIGN, BATCH], 0)
        self.running: dict[int, str] = {}
        self.held: dict[int, str] = {}
        self.count = 0
        self.starved = 0
        """Interactive requests that, one after the other, have taken the last slot while we knew of batch that waits."""
        self.take(self.slots.rank({OWN: 0, ALSO: 0, FOREIGN: 1, BATCH: 0}, 0.0))

    def take(self, offers: list[Offer]) -> None:
        for offer in offers:
            assert offer.batch > 0
            self.standing[offer.shard] += offer.batch

    def begins(self, key: int, klass: str, batch_could: bool) -> None:
        self.running[key] = klass
        if klass == classes.BATCH or not batch_could:
            self.starved = 0
        elif not self.slots.free_for_batch:
            self.starved += 1

    @property
    def batch_could(self) -> bool:
        """Whether batch waits, as far as the worker knows, and has room."""
        return self.slots._batch.waits and self.slots.free_for_batch > 0

    @rule(shard=shards, backlog=st.integers(0, 3))
    def delivers(self, shard: Shard, backlog: int) -> None:
        if not self.standing[shard]:
            return
        self.standing[shard] -= 1
        self.count += 1
        could = self.batch_could
        if self.slots.delivered(self.count, shard, backlog, self.now_s):
            self.begins(self.count, shard.klass, could)
        else:
            self.held[self.count] = shard.klass
        self.take(self.slots.offers(self.now_s))

    @rule(shard=shards)
    def expires(self, shard: Shard) -> None:
        self.slots.ended(shard, self.standing[shard])
        self.standing[shard] = 0
        self.take(self.slots.offers(self.now_s))

    @rule(pick=st.integers(0, 9))
    def finishes(self, pick: int) -> None:
        if not self.running:
            return
        klass = self.running.pop(list(self.running)[pick % len(self.running)])
        waited = self.slots._batch.waits and len([one for one in self.running.values() if one == classes.BATCH])
        could = self.slots._batch.waits and waited < self.weights.slots_most(self.slots.capacity)
        taken = self.slots.finished(klass)
        if taken is not None:
            assert isinstance(taken, int)
            self.begins(taken, self.held.pop(taken), could)
        self.take(self.slots.offers(self.now_s))

    @rule(passed_s=st.floats(0.0, 0.2), load=st.floats(0.0, 1.0))
    def time_passes(self, passed_s: float, load: float) -> None:
        self.now_s += passed_s
        self.slots.load = load
        for key in self.slots.surplus(self.now_s):
            assert isinstance(key, int)
            del self.held[key]
        owed = self.slots._turns.batch
        self.take(self.slots.offers(self.now_s))
        if owed and not self.slots._turns.batch:
            self.starved = 0  # it was asked for, and did not come

    @invariant()
    def slots_and_pulls_agree_with_the_broker(self) -> None:
        assert self.slots.busy == len(self.running) <= self.slots.capacity
        assert self.slots.busy_of(classes.BATCH) == list(self.running.values()).count(classes.BATCH)
        assert self.slots.outstanding == sum(self.standing.values())

    @invariant()
    def batch_leaves_the_room_of_interactive_requests(self) -> None:
        assert self.slots.busy_of(classes.BATCH) <= self.weights.slots_most(self.slots.capacity)

    @invariant()
    def batch_is_not_starved(self) -> None:
        assert self.starved <= self.weights.starved_max

    @invariant()
    def a_free_slot_has_an_open_hand_somewhere(self) -> None:
        assert not self.slots.free or self.slots.outstanding


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


WAITS_MAX_TICKS = 4
"""Of half a `SURPLUS_HOLD_S`: a message is held for that long, then a pull elsewhere stands unserved; each ends a tick late."""

TURNS_MAX_TICKS = 8
"""The same where both classes wait: a slot that was kept for batch, in vain, goes to interactive requests after that."""


class Sent:
    """A message, since when it waits, and whether it has been held somewhere."""

    def __init__(self, shard: Shard, at_s: float) -> None:
        self.shard, self.at_s, self.deliveries = shard, at_s, 0


class FleetMachine(RuleBasedStateMachine):
    """Slots of a whole fleet by ranks, on a broker without latency: nothing waits beside a free slot for long."""

    names = ("p0", "p1", "p2", "p3")
    shards = tuple(Shard(klass, number) for klass in CLASSES for number in range(5))

    @initialize(capacity=st.integers(1, 8))
    def begin(self, capacity: int) -> None:
        self.now_s = 0.0
        self.count = self.bounced = 0
        self.slots: dict[str, Slots] = {}
        self.capacity = capacity
        self.waiting: dict[Shard, list[Sent]] = {shard: [] for shard in self.shards}
        self.pulls: list[tuple[int, int, str, Shard, float]] = []
        self.held: dict[tuple[str, int], Sent] = {}
        self.running: dict[str, list[str]] = {}
        self.joins(name="p0")
        self.joins(name="p1")

    def weights(self) -> Mapping[str, float]:
        return dict.fromkeys(self.slots, float(self.capacity))

    def rank(self) -> None:
        for name, slots in self.slots.items():
            self.pull(name, slots.rank(placement.ranks(name, self.shards, self.weights()), self.now_s))

    def pull(self, name: str, offers: list[Offer]) -> None:
        for offer in offers:
            for _ in range(offer.batch):
                self.count += 1
                self.pulls.append((offer.priority, self.count, name, offer.shard, self.now_s + 1.0))
        self.serve()

    def serve(self) -> None:
        """Give each message to the best pull of its shard, until there is none."""
        for shard in self.shards:
            while self.waiting[shard] and (fit := [pull for pull in self.pulls if pull[3] == shard]):
                best = min(fit)
                self.pulls.remove(best)
                sent = self.waiting[shard].pop(0)
                self.count += 1
                slots = self.slots[best[2]]
                sent.deliveries += 1
                again = sent.deliveries > 1
                if slots.delivered(self.count, shard, len(self.waiting[shard]), self.now_s, again=again):
                    self.running[best[2]].append(shard.klass)
                else:
                    self.held[best[2], self.count] = sent
                    self.give_back(best[2])
                self.pull(best[2], slots.offers(self.now_s))

    def give_back(self, name: str) -> None:
        for key in self.slots[name].surplus(self.now_s):
            assert isinstance(key, int)
            sent = self.held.pop((name, key))
            self.waiting[sent.shard].insert(0, sent)
            self.bounced += 1

    @rule(name=st.sampled_from(names))
    def joins(self, name: str) -> None:
        if name not in self.slots:
            self.slots[name] = Slots(self.capacity)
            self.running[name] = []
            self.rank()

    @rule(name=st.sampled_from(names))
    def dies(self, name: str) -> None:
        """What it held comes back; what it ran ends with it, here."""
        if name in self.slots and len(self.slots) > 1:
            del self.slots[name], self.running[name]
            self.pulls = [pull for pull in self.pulls if pull[2] != name]
            for key in [key for key in self.held if key[0] == name]:
                sent = self.held.pop(key)
                self.waiting[sent.shard].insert(0, sent)
            self.rank()

    @rule(shard=st.sampled_from(shards), count=st.integers(1, 6))
    def arrive(self, shard: Shard, count: int) -> None:
        for _ in range(count):
            self.waiting[shard].append(Sent(shard, self.now_s))
            self.serve()

    @rule(name=st.sampled_from(names), pick=st.integers(0, 9))
    def finishes(self, name: str, pick: int) -> None:
        if not self.running.get(name):
            return
        slots, running = self.slots[name], self.running[name]
        taken = slots.finished(running.pop(pick % len(running)))
        if taken is not None:
            assert isinstance(taken, int)
            running.append(self.held.pop((name, taken)).shard.klass)
        self.pull(name, slots.offers(self.now_s))

    @rule(name=st.sampled_from(names), load=st.floats(0.0, 1.0))
    def weighs(self, name: str, load: float) -> None:
        if name in self.slots:
            self.slots[name].load = load
            self.pull(name, self.slots[name].offers(self.now_s))

    @rule(ticks=st.integers(1, 30))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += SURPLUS_HOLD_S / 2
            self.expire()
            for name, slots in self.slots.items():
                self.give_back(name)
                self.serve()
                self.pull(name, slots.offers(self.now_s))

    def expire(self) -> None:
        over = [pull for pull in self.pulls if pull[4] <= self.now_s]
        self.pulls = [pull for pull in self.pulls if pull[4] > self.now_s]
        for _, _, name, shard, _ in over:
            self.slots[name].ended(shard, 1)

    @rule()
    def nothing_waits_beside_a_free_slot(self) -> None:
        before = self.bounced
        self.time_passes(ticks=TURNS_MAX_TICKS if self.waits(classes.BATCH) else WAITS_MAX_TICKS)
        assert not self.waits(INTERACTIVE) or not any(slots.free for slots in self.slots.values())
        assert not self.waits(classes.BATCH) or not any(slots.free_for_batch for slots in self.slots.values())
        waits = self.waits(INTERACTIVE) or self.waits(classes.BATCH)
        self.time_passes(ticks=20)
        assert not waits or self.bounced - before <= 2 * len(self.shards) * len(self.slots), (
            "backlog costs no deliveries"
        )

    def waits(self, klass: str) -> bool:
        """Whether anything of this class is held, or in the queue."""
        held = any(sent.shard.klass == klass for sent in self.held.values())
        return held or any(shard.klass == klass and waiting for shard, waiting in self.waiting.items())

    @invariant()
    def slots_and_pulls_agree_with_the_broker(self) -> None:
        for name, slots in self.slots.items():
            assert 0 <= slots.busy == len(self.running[name]) <= slots.capacity
            assert (
                slots.busy_of(classes.BATCH)
                == self.running[name].count(classes.BATCH)
                <= Weights().slots_most(slots.capacity)
            )
            assert slots.outstanding == sum(pull[2] == name for pull in self.pulls)
            held = {sent.shard.klass for (holder, _), sent in self.held.items() if holder == name}
            assert not slots.free_for_batch or classes.BATCH not in held
            assert slots.free <= 1 or INTERACTIVE not in held, "one is kept for batch, where it is its turn"

    @invariant()
    def a_lane_lies_where_its_state_puts_it(self) -> None:
        for slots in self.slots.values():
            for lane in slots._lanes.values():
                assert 0 <= lane.low <= lane.outstanding
                assert lane.place is None or lane.place[lane.shard] is lane
            for lanes in (lanes for one in slots._classes.values() for lanes in (one.own, one.others)):
                assert lanes.pulls == sum(lane.outstanding for lane in lanes.backlog.values())
                assert all(lane.backlog for lane in lanes.backlog.values())

    @invariant()
    def hysteresis_holds_between_the_two_loads(self) -> None:
        for slots in self.slots.values():
            if slots.open:
                was = slots.spilling
                assert placement.spills(SPILL_LOAD, was)
                assert not placement.spills(SPILL_BACK_LOAD, was)
                assert placement.spills((SPILL_LOAD + SPILL_BACK_LOAD) / 2, was) == was


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
