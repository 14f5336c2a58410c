"""Who is warm where: what workers say, what gateways make of it, and that a lost word costs a moment and no more."""

import random
from functools import reduce
from operator import xor

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pipeline.limits import PRESENCE_PERIOD_S, WARM_ASK_PERIOD_S
from pipeline.protocol.messages import encode
from pipeline.protocol.warm_messages import WarmChanges, WarmCreators, warm_decoder
from pipeline.protocol.warm_view import Teller, WarmView, key_of, pack_keys, unpack_keys

ADA, BOB, EVE = (key_of(creator) for creator in ("ada", "bob", "eve"))


def said(teller: Teller, *warm: str) -> WarmChanges:
    change = teller.change(warm)
    assert change is not None
    return change


def test_keys_travel_as_bytes_that_are_the_same_for_the_same_set() -> None:
    assert pack_keys({ADA, BOB}) == pack_keys([BOB, ADA])
    assert set(unpack_keys(pack_keys([ADA, BOB]))) == {ADA, BOB}
    assert unpack_keys(pack_keys([ADA]) + b"half") == [ADA]
    assert 0 <= ADA < 2**64


def test_only_what_is_new_is_said_and_the_digest_follows() -> None:
    teller = Teller("p1", "1")
    first = said(teller, "ada", "bob")
    assert (first.number, set(unpack_keys(first.gained)), first.lost) == (1, {ADA, BOB}, b"")
    assert teller.change(["bob", "ada"]) is None
    second = said(teller, "bob")
    assert (second.number, unpack_keys(second.lost), second.gained) == (2, [ADA], b"")
    assert (teller.digest, len(teller)) == (BOB, 1)
    assert teller.all() == WarmCreators(worker="p1", epoch="1", number=2, creators=pack_keys([BOB]))


def test_both_kinds_of_word_are_told_apart_on_the_wire() -> None:
    teller = Teller("p1", "1")
    for word in (said(teller, "ada"), teller.all()):
        assert warm_decoder.decode(encode(word)) == word


def test_a_gateway_knows_who_is_warm_where() -> None:
    view, one, two = WarmView(), Teller("p1", "1"), Teller("p2", "1")
    view.heard(said(one, "ada", "bob"))
    view.heard(said(two, "ada"))
    assert (view.warm(ADA), view.warm(BOB), view.warm(EVE)) == ({"p1", "p2"}, {"p1"}, set())
    view.heard(said(one, "bob"))
    assert view.warm(ADA) == {"p2"}
    assert (view.is_warm(BOB, "p1"), view.is_warm(BOB, "p2"), view.is_warm(BOB, "p3")) == (True, False, False)
    view.keep({"p1"})
    assert view.warm(ADA) == set()


def test_a_gap_is_repaired_by_all_that_is_warm() -> None:
    view, teller = WarmView(), Teller("p1", "1")
    view.heard(said(teller, "ada"))
    teller.change(["ada", "bob"])
    view.heard(said(teller, "bob"))
    assert view.asks(0.0) == ["p1"]
    assert view.asks(0.0) == [], "not again at once"
    assert view.asks(WARM_ASK_PERIOD_S) == ["p1"]
    view.heard(teller.all())
    assert (view.warm(ADA), view.warm(BOB), view.asks(9.0)) == (set(), {"p1"}, [])


def test_the_last_word_lost_shows_in_presence() -> None:
    view, teller = WarmView(), Teller("p1", "1")
    view.heard(said(teller, "ada"))
    teller.change([])
    assert view.asks(0.0) == []
    view.presence("p1", "1", teller.number, teller.digest)
    assert view.asks(0.0) == ["p1"]
    view.heard(teller.all())
    assert view.warm(ADA) == set()


def test_a_view_that_differs_although_no_word_is_missing_shows_in_the_digest() -> None:
    view, teller = WarmView(), Teller("p1", "1")
    view.heard(WarmChanges(worker="p1", epoch="1", number=1, gained=pack_keys([EVE])))
    teller.change(["ada"])
    view.presence("p1", "1", teller.number, teller.digest)
    assert view.asks(0.0) == ["p1"]
    view.heard(teller.all())
    assert (view.warm(ADA), view.warm(EVE), view.asks(1.0)) == ({"p1"}, set(), [])


def test_a_presence_that_comes_late_and_an_old_list_of_all_change_nothing() -> None:
    view, teller = WarmView(), Teller("p1", "1")
    view.heard(said(teller, "ada"))
    old, digest = teller.all(), teller.digest
    view.heard(said(teller, "bob"))
    view.presence("p1", "1", 2, teller.digest)
    view.presence("p1", "1", 1, digest)
    view.heard(old)
    assert (view.warm(BOB), view.asks(0.0)) == ({"p1"}, [])


def test_a_restarted_worker_begins_with_nobody_and_its_old_words_count_no_more() -> None:
    view, old, new = WarmView(), Teller("p1", "1"), Teller("p1", "2")
    view.heard(said(old, "ada"))
    late = said(old, "ada", "bob")
    view.presence("p1", "2", new.number, new.digest)
    assert (view.warm(ADA), view.asks(0.0)) == (set(), [])
    view.heard(late)
    view.heard(old.all())
    view.presence("p1", "1", 2, old.digest)
    assert (view.warm(ADA), view.warm(BOB), view.asks(0.0)) == (set(), set(), [])
    view.heard(said(new, "eve"))
    assert view.warm(EVE) == {"p1"}


def test_who_comes_late_asks_for_all() -> None:
    view, teller = WarmView(), Teller("p1", "1")
    for count in range(5):
        teller.change([f"c{number}" for number in range(count + 1)])
    view.presence("p1", "1", teller.number, teller.digest)
    assert view.asks(0.0) == ["p1"]
    view.heard(teller.all())
    assert view.warm(key_of("c4")) == {"p1"}


# --------------------------------------------------------------------------------------------------------------
# Test 25, the second half

NAMES = ("ada", "bob", "eve", "kim")
WORKERS = ("p1", "p2")


class Views(RuleBasedStateMachine):
    """Two workers and a gateway, on a way that loses, repeats and reorders every kind of word."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s, self.epoch = 0.0, 0
        self.view = WarmView()
        self.way: list[WarmChanges | WarmCreators | tuple[str, str, int, int]] = []
        self.tellers: dict[str, Teller] = {}
        self.epochs: dict[str, str] = {}
        self.warm: dict[str, set[str]] = {}
        for worker in WORKERS:
            self.restart(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def restart(self, worker: str) -> None:
        self.epoch += 1
        self.epochs[worker] = f"{self.epoch:06d}"
        self.tellers[worker], self.warm[worker] = Teller(worker, self.epochs[worker]), set()

    @rule()
    def restart_of_the_gateway(self) -> None:
        self.view = WarmView()

    @rule(worker=st.sampled_from(WORKERS), creators=st.sets(st.sampled_from(NAMES)))
    def change(self, worker: str, creators: set[str]) -> None:
        self.warm[worker] = creators
        change = self.tellers[worker].change(creators)
        if change is not None:
            self.send(change)

    def send(self, word: WarmChanges | WarmCreators | tuple[str, str, int, int]) -> None:
        for _ in range(self.chance.choice((0, 1, 1, 2))):
            self.way.insert(self.chance.randint(0, len(self.way)), word)

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.way))):
            self.hear(self.way.pop(0))

    def hear(self, word: WarmChanges | WarmCreators | tuple[str, str, int, int]) -> None:
        if isinstance(word, tuple):
            self.view.presence(*word)
        else:
            self.view.heard(word)

    @rule()
    def presences(self) -> None:
        for worker, teller in self.tellers.items():
            self.send((worker, self.epochs[worker], teller.number, teller.digest))
        self.now_s += PRESENCE_PERIOD_S
        for worker in self.view.asks(self.now_s):
            self.send(self.tellers[worker].all())

    @rule()
    def second(self) -> None:
        """A second on a way that loses nothing more, though it still brings what is old."""
        for _ in range(round(1.0 / PRESENCE_PERIOD_S)):
            self.now_s += PRESENCE_PERIOD_S
            for worker, teller in self.tellers.items():
                self.view.presence(worker, self.epochs[worker], teller.number, teller.digest)
            self.deliver(2)
            for worker in self.view.asks(self.now_s):
                self.view.heard(self.tellers[worker].all())
        self.way.clear()
        for worker in WORKERS:
            known = {name for name in NAMES if self.view.is_warm(key_of(name), worker)}
            assert known == self.warm[worker]
            assert self.tellers[worker].digest == reduce(xor, map(key_of, known), 0)


def test_25_a_gateways_view_equals_the_truth_within_a_second_under_lost_repeated_and_reordered_words() -> None:
    """By name, the second half: what workers say to gateways."""
    for seed in range(50):
        machine, chance = Views(), random.Random(seed)
        machine.begin(seed)
        for _ in range(150):
            worker = chance.choice(WORKERS)
            machine.change(worker, set(chance.sample(NAMES, chance.randint(0, 4))))
            machine.deliver(chance.randint(0, 4))
            if chance.random() < 0.2:
                machine.presences()
            if chance.random() < 0.03:
                machine.restart(worker)
        machine.second()


TestViews = Views.TestCase
TestViews.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
