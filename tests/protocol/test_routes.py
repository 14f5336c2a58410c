"""Routes: who gets an exception to the hash, when it grows, shrinks and goes, and that nothing flaps."""

import math
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from pipeline.limits import RATES_MEMORY_S, RATES_TOP_MAX, RATES_TRACKED_MAX, ROUTE_CHANGES_MAX, ROUTE_VARIANTS_MAX
from pipeline.protocol import routes
from pipeline.protocol.placement import order
from pipeline.protocol.routes import Balancer, Change, Rates, Route, Worker, affinity
from pipeline.protocol.subjects import Shard, partition

SHARDS = 256
FOUR = {f"p{number}": Worker(4.0, 0.7) for number in range(4)}
IDLE = {worker: Worker(4.0, 0.0) for worker in FOUR}
TAIL = {f"c{number}": 1.0 / (number + 1) for number in range(200)}
"""The weights of the other creators: Zipf."""


TOTAL = 1000.0
"""Requests/s of everybody."""


def rates_of(hot: float, creators: Mapping[str, float] = TAIL) -> dict[str, float]:
    """Requests/s where one creator has a share of the traffic and others have what is left, by weight."""
    rest = TOTAL * (1.0 - hot) / sum(creators.values())
    return ({"hot": hot * TOTAL} if hot else {}) | {creator: weight * rest for creator, weight in creators.items()}


def owner(name: str, workers: Mapping[str, Worker] = FOUR, shards: int = SHARDS) -> str:
    """The owner of an affinity."""
    return owner_of(partition(name, shards), workers)


def owner_of(number: int, workers: Mapping[str, Worker] = FOUR) -> str:
    """The owner of a shard."""
    return order(Shard("interactive", number), {worker: said.weight for worker, said in workers.items()})[0]


class Gateway:
    """A balancer, and the routes that it has published."""

    def __init__(self, shards: int = SHARDS) -> None:
        self.balancer, self.routes, self.shards = Balancer(), dict[str, Route](), shards
        self.now_s = 100.0
        self.changes: list[Change] = []

    def steps(
        self, count: int, rates: Mapping[str, float], workers: Mapping[str, Worker] = FOUR, total: float = TOTAL
    ) -> list[Change]:
        """Let so many seconds pass; what has changed in them."""
        seen: list[Change] = []
        for _ in range(count):
            self.now_s += 1.0
            made = self.balancer.step(self.now_s, rates, total, self.routes, workers, self.shards)
            assert len(made) <= ROUTE_CHANGES_MAX
            for change in made:
                if change.route is None:
                    del self.routes[change.creator]
                else:
                    self.routes[change.creator] = change.route
            seen += made
        return seen

    def owners(self, creator: str, workers: Mapping[str, Worker] = FOUR) -> list[str]:
        """Who serves a creator."""
        route = self.routes.get(creator)
        names = [f"{creator}~{variant}" for variant in route.variants] if route else [creator]
        return [owner(name, workers, self.shards) for name in names]

    def variants(self, creator: str) -> int:
        """How many affinities a creator has by a route."""
        route = self.routes.get(creator)
        return len(route.variants) if route else 0

    def demand(self, rates: Mapping[str, float], workers: Mapping[str, Worker] = FOUR) -> dict[str, float]:
        """Requests/s of each worker, by the owners alone. What is not in `rates` lies evenly on the shards."""
        each = (TOTAL - sum(rates.values())) / self.shards
        owned = Counter(owner_of(number, workers) for number in range(self.shards))
        demand = {worker: each * owned[worker] for worker in workers}
        for creator, rate in rates.items():
            owners = self.owners(creator, workers)
            for worker in owners:
                demand[worker] += rate / len(owners)
        return demand

    def unevenness(self, rates: Mapping[str, float], workers: Mapping[str, Worker] = FOUR) -> float:
        """The most that a worker has, against the mean."""
        demand = self.demand(rates, workers)
        return max(demand.values()) * len(demand) / sum(demand.values())


# ---- affinities


def test_without_a_route_a_creator_is_its_own_affinity() -> None:
    assert affinity("ada", "any", None) == "ada"
    assert affinity("ada", "any", Route((7,), "moved")) == "ada~7"


def test_a_conversation_stays_with_its_variant_and_conversations_spread_evenly() -> None:
    route = Route((3, 8, 11, 20), "hot")
    chosen = {f"v{number}": affinity("ada", f"v{number}", route) for number in range(4000)}
    assert all(affinity("ada", conversation, route) == variant for conversation, variant in chosen.items())
    assert all(900 < count < 1100 for count in Counter(chosen.values()).values())


def test_one_variant_more_moves_only_its_own_share_of_the_conversations() -> None:
    before, after = Route((3, 8, 11), "hot"), Route((3, 8, 11, 20), "hot")
    moved = [v for v in map(str, range(4000)) if affinity("ada", v, before) != affinity("ada", v, after)]
    assert all(affinity("ada", conversation, after) == "ada~20" for conversation in moved)
    assert 800 < len(moved) < 1200


# ---- rates


def test_few_creators_are_counted_exactly() -> None:
    rates = Rates()
    for number in range(6000):
        rates.count("often" if number % 3 else "seldom", number / 100)
    assert rates.total(60.0) == pytest.approx(100, rel=0.02)
    assert rates.top(60.0) == pytest.approx({"often": 66.7, "seldom": 33.3}, rel=0.02)
    assert list(rates.top(60.0)) == ["often", "seldom"]


def test_a_young_count_is_not_diluted_by_a_past_that_it_has_not_seen() -> None:
    rates = Rates()
    for number in range(200):
        rates.count("a", 50.0 + number / 100)
    assert rates.total(52.0) == pytest.approx(100, rel=0.1)


def test_what_has_stopped_is_forgotten() -> None:
    rates = Rates()
    for number in range(1000):
        rates.count("a", number / 100)
    assert rates.top(10.0 + 10 * RATES_MEMORY_S)["a"] < 0.01


def test_nothing_counted_is_no_rate() -> None:
    assert (Rates().total(5.0), Rates().top(5.0)) == (0.0, {})


def test_a_count_that_lasts_for_days_does_not_overflow() -> None:
    rates = Rates()
    for day in range(3):
        for number in range(1000):
            rates.count("a", day * 86_400 + number / 10)
    assert rates.total(2 * 86_400 + 100) == pytest.approx(10, rel=0.05)


def test_memory_is_bounded_and_heavy_creators_are_found_among_a_million() -> None:
    rates, chance = Rates(), random.Random(1)
    for number in range(60_000):
        draw = chance.random()
        heavy = f"heavy-{int(draw * 50)}" if draw < 0.2 else f"one-{chance.randrange(1_000_000)}"
        rates.count(heavy, number / 1000)
    assert len(rates) == RATES_TRACKED_MAX
    top = rates.top(60.0)
    assert len(top) == RATES_TOP_MAX
    assert {f"heavy-{number}" for number in range(10)} == set(list(top)[:10])
    assert top["heavy-1"] == pytest.approx(20, rel=0.25)
    assert sum(top.values()) <= rates.total(60.0)


# ---- hot creators


@pytest.mark.parametrize(("hot", "unevenness"), [(0.3, 1.1), (0.9, 1.1)])
def test_a_hot_creator_lies_evenly_on_its_owners(hot: float, unevenness: float) -> None:
    gateway, rates = Gateway(), rates_of(hot)
    assert gateway.unevenness(rates) > 1.25
    gateway.steps(30, rates)
    assert len(set(gateway.owners("hot"))) == len(gateway.owners("hot")) >= 3
    assert gateway.unevenness(rates) < unevenness


@pytest.mark.parametrize(("share", "variants"), [(0.05, 0), (0.12, 2), (0.22, 3), (0.31, 4), (0.9, 4)])
def test_variants_follow_the_share_and_grow_before_an_owner_is_full(share: float, variants: int) -> None:
    flat = {f"c{number}": 1.0 for number in range(200)}
    gateway = Gateway()
    gateway.steps(20, rates_of(share, flat))
    route = gateway.routes.get("hot")
    assert (len(route.variants) if route and route.reason == "hot" else 0) == variants


def test_a_creator_grows_step_by_step_and_its_first_owners_stay() -> None:
    gateway = Gateway()
    gateway.steps(5, rates_of(0.15))
    two = gateway.routes["hot"].variants
    [change] = [change for change in gateway.steps(5, rates_of(0.25)) if change.creator == "hot"]
    assert change.route is not None
    assert (len(two), len(change.route.variants), change.route.variants[:2]) == (2, 3, two)
    assert change.warm == (owner(f"hot~{change.route.variants[2]}"),), "the others are warm"


def test_the_home_of_a_creator_that_grows_is_not_warmed_up_again() -> None:
    gateway = Gateway()
    [change] = [change for change in gateway.steps(1, rates_of(0.9)) if change.creator == "hot"]
    assert set(change.warm) == set(FOUR) - {owner("hot")}
    assert gateway.owners("hot")[0] == owner("hot")


def test_a_share_that_has_stayed_small_for_long_shrinks_and_at_last_drops_the_route() -> None:
    gateway = Gateway()
    gateway.steps(5, rates_of(0.35))
    assert gateway.variants("hot") == 4
    gateway.steps(int(routes.KEEP_S), rates_of(0.12))
    assert gateway.variants("hot") == 4, "not at once"
    gateway.steps(2, rates_of(0.12))
    assert gateway.variants("hot") == 3
    gateway.steps(int(routes.KEEP_S) + 2, rates_of(0.01))
    assert gateway.owners("hot") == [owner("hot")]


def test_a_short_dip_changes_nothing() -> None:
    gateway = Gateway()
    gateway.steps(10, rates_of(0.35))
    for _ in range(5):
        dips = gateway.steps(10, rates_of(0.1)) + gateway.steps(10, rates_of(0.35))
        assert not [change for change in dips if change.creator == "hot"]


def test_idle_workers_need_no_exceptions_and_lose_those_they_had() -> None:
    gateway = Gateway()
    assert gateway.steps(20, rates_of(0.9), IDLE) == []
    gateway.steps(10, rates_of(0.9))
    assert len(gateway.routes) > 0
    gateway.steps(80, rates_of(0.9), IDLE)
    assert len(gateway.routes) == 0


def test_a_creator_of_whom_little_was_seen_is_not_judged() -> None:
    assert Gateway().steps(10, {"hot": 0.5, "other": 0.1}) == []


def test_variants_are_bounded_where_there_are_many_workers() -> None:
    many = {f"p{number}": Worker(4.0, 0.7) for number in range(200)}
    gateway = Gateway(shards=1024)
    gateway.steps(1, rates_of(0.9), many)
    assert gateway.variants("hot") == ROUTE_VARIANTS_MAX
    assert len(set(gateway.owners("hot", many))) == ROUTE_VARIANTS_MAX


def test_many_hot_creators_are_spread_a_few_at_a_time() -> None:
    gateway, rates = Gateway(), {f"hot-{number}": 120.0 for number in range(8)}
    first = gateway.steps(1, rates)
    assert len(first) == ROUTE_CHANGES_MAX
    gateway.steps(5, rates)
    assert all(gateway.variants(creator) == 2 for creator in rates)


def test_where_no_variant_number_leads_to_an_owner_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "NUMBERS_TRIED_PER_SHARD", 0)
    gateway = Gateway()
    numbers = [number for number in range(50) if owner(f"hot~{number}") == "p2"]
    gateway.routes["hot"] = Route((numbers[0], numbers[1]), "hot")
    assert gateway.steps(3, rates_of(0.12)) == []
    apart = [next(number for number in range(50) if owner(f"hot~{number}") == worker) for worker in ("p1", "p2")]
    gateway.routes["hot"] = Route(tuple(apart), "hot")
    assert gateway.steps(3, rates_of(0.9)) == []
    assert Gateway().steps(3, crowded()) == []


def test_where_all_shards_have_one_owner_a_hot_creator_cannot_be_spread() -> None:
    gateway = Gateway(shards=1)
    assert gateway.steps(10, rates_of(0.9)) == []


# ---- moved creators


HOME = min(FOUR, key=Counter(map(owner_of, range(SHARDS))).__getitem__)
"""The worker with the fewest shards, whose creators are moved here."""


def crowd(worker: str, count: int) -> list[str]:
    """Creators whose home is this worker."""
    return [name for number in range(5000) if owner(name := f"crowd-{number}") == worker][:count]


def crowded(each: float = 35.0) -> dict[str, float]:
    """Ten middling creators of one home. The rest of the traffic is a tail that nobody knows by name."""
    return dict.fromkeys(crowd(HOME, 10), each)


def test_middling_creators_are_moved_off_an_overloaded_owner() -> None:
    gateway, rates = Gateway(), crowded()
    assert gateway.unevenness(rates) > 1.8
    changes = gateway.steps(20, rates)
    assert gateway.unevenness(rates) < 1.12
    assert {change.route.reason for change in changes if change.route} == {"moved"}
    assert all(change.warm == (gateway.owners(change.creator)[0],) for change in changes), "they were new there"
    assert all(gateway.owners(change.creator)[0] != HOME for change in changes)


def test_a_moved_creator_comes_back_when_its_home_has_room_again() -> None:
    gateway = Gateway()
    gateway.steps(20, crowded())
    moved = set(gateway.routes)
    assert moved
    quiet = crowded(each=2.0)
    assert gateway.steps(int(routes.KEEP_S) // 2, quiet) == [], "not at once"
    back = gateway.steps(int(routes.KEEP_S), quiet)
    assert not gateway.routes
    assert {change.warm for change in back} == {(HOME,)}


def test_a_creator_that_asks_no_more_is_no_exception_any_more() -> None:
    gateway = Gateway()
    gateway.steps(20, crowded())
    gateway.steps(30, {})
    assert not gateway.routes


def test_who_was_moved_to_where_its_home_is_by_now_needs_no_route() -> None:
    gateway = Gateway()
    gateway.steps(20, crowded())
    moved = next(iter(gateway.routes))
    alone = {worker: said for worker, said in FOUR.items() if worker == "p1"}
    gateway.steps(int(routes.KEEP_S) + 5, rates_of(0.0, {moved: 1.0, "c1": 1.0}), alone)
    assert moved not in gateway.routes


def test_a_moved_creator_that_is_moved_home_loses_its_route() -> None:
    """p1 is full of a moved creator's company, and its home p0 the emptiest."""
    gateway = Gateway()
    name = crowd("p0", 1)[0]
    number = next(number for number in range(100) if owner(f"{name}~{number}") == "p1")
    gateway.routes[name] = Route((number,), "moved")
    others = dict.fromkeys([*crowd("p1", 12), *crowd("p2", 8), *crowd("p3", 8)], 6.0)
    changes = gateway.steps(1, rates_of(0.0, others | {name: 6.5}))
    assert Change(name, None, ("p0",)) in changes


def test_what_no_worker_has_room_for_stays_where_it_is() -> None:
    pair = {worker: FOUR[worker] for worker in ("p0", "p1")}
    two = dict.fromkeys([f"x{number}" for number in range(3)], 1.0)
    gateway = Gateway()
    gateway.steps(40, rates_of(0.0, two), pair)
    assert all(route.reason == "hot" for route in gateway.routes.values())


def test_an_owner_that_has_room_all_the_same_keeps_its_creators() -> None:
    easy = {worker: Worker(4.0, 0.3) for worker in FOUR}
    assert Gateway().steps(20, crowded(), easy) == []


# ---- steadiness


@pytest.mark.parametrize("hot", [0.0, 0.1, 0.3, 0.9])
def test_nothing_flaps_at_a_steady_load(hot: float) -> None:
    """Rates as `Rates` would measure them, and loads that jump as those of four slots do."""
    gateway, chance, counted = Gateway(), random.Random(2), Rates()
    names = list(TAIL)
    changes: list[Change] = []
    for second in range(240):
        for number in range(400):
            rank = int(math.exp(chance.random() * math.log(len(names) + 1))) - 1
            counted.count("hot" if chance.random() < hot else names[min(rank, 199)], second + number / 400)
        said = {worker: Worker(4.0, chance.choice((0.25, 0.5, 0.75, 1.0))) for worker in FOUR}
        now_s = second + 1.0
        made = gateway.steps(1, counted.top(now_s), said, total=counted.total(now_s))
        changes += made if second >= 90 else []
    assert len(changes) <= 4, "what is decided stays decided"
    assert not [change for change in changes if change.creator == "hot"]


def test_a_worker_that_joins_moves_nothing_but_its_own_share() -> None:
    gateway, rates = Gateway(), rates_of(0.3)
    gateway.steps(60, rates)
    before = dict(gateway.routes)
    five = FOUR | {"p4": Worker(4.0, 0.0)}
    gateway.steps(1, rates, five)
    kept = [creator for creator in before if gateway.routes.get(creator) == before[creator]]
    assert len(kept) >= len(before) - ROUTE_CHANGES_MAX
    gateway.steps(60, rates, {worker: Worker(4.0, 0.7) for worker in five})
    assert gateway.unevenness(rates, five) < 1.25


def test_a_worker_that_leaves_costs_a_hot_creator_only_that_variant() -> None:
    gateway, rates = Gateway(), rates_of(0.19)
    gateway.steps(30, rates)
    variants = gateway.routes["hot"].variants
    assert len(variants) == 2
    three = {worker: said for worker, said in FOUR.items() if worker != gateway.owners("hot")[1]}
    gateway.steps(10, rates, three)
    assert gateway.routes["hot"].variants[0] == variants[0]
    assert len(set(gateway.owners("hot", three))) == len(gateway.owners("hot", three)) >= 2


def test_two_variants_that_have_come_to_share_an_owner_are_parted_in_place() -> None:
    gateway, rates = Gateway(), rates_of(0.12, {f"c{number}": 1.0 for number in range(200)})
    numbers = [number for number in range(50) if owner(f"hot~{number}") == "p2"]
    gateway.routes["hot"] = Route((numbers[0], numbers[1]), "hot")
    [change] = gateway.steps(1, rates)
    assert change.route is not None
    assert (change.creator, change.route.variants[0]) == ("hot", numbers[0])
    assert len(set(gateway.owners("hot"))) == 2


def test_equal_inputs_give_equal_changes_on_every_gateway() -> None:
    one, other = Gateway(), Gateway()
    for hot in (0.11, 0.3, 0.9, 0.2):
        rates = rates_of(hot)
        shuffled = dict(sorted(rates.items()))
        backwards = dict(reversed(FOUR.items()))
        assert one.steps(10, rates) == other.steps(10, shuffled, backwards)


def test_a_change_that_is_being_published_is_not_decided_again_unless_it_fails() -> None:
    balancer, rates = Balancer(), rates_of(0.9)
    first = balancer.step(10.0, rates, 1000.0, {}, FOUR, SHARDS)
    assert "hot" in {change.creator for change in first}
    assert "hot" not in {change.creator for change in balancer.step(11.0, rates, 1000.0, {}, FOUR, SHARDS)}
    again = balancer.step(11.0 + routes.PENDING_S, rates, 1000.0, {}, FOUR, SHARDS)
    assert "hot" in {change.creator for change in again}


def test_without_workers_nothing_is_decided() -> None:
    assert Balancer().step(1.0, rates_of(0.9), 1000.0, {}, {}, SHARDS) == []


def test_another_number_of_shards_is_another_order() -> None:
    gateway = Gateway()
    gateway.steps(5, rates_of(0.9))
    gateway.shards = 64
    gateway.steps(10, rates_of(0.9))
    assert len(set(gateway.owners("hot"))) == 4
