"""The parts of the fleet in virtual time: traffic, caches, engine, broker."""

import itertools
import math
import random
from collections import Counter, OrderedDict

import pytest

from pipeline.bus.puller import EXPIRES_S
from pipeline.planning import source
from pipeline.planning.broker import Broker
from pipeline.planning.caches import Cache
from pipeline.planning.engine import Engine, Machine, Served, Tier
from pipeline.planning.events import Events
from pipeline.planning.source import HOP_S, PERSONA_BLOCKS
from pipeline.planning.traffic import HOT, Request, Workload, requests, zipf
from pipeline.protocol.slots import Offer
from pipeline.protocol.subjects import Shard

SHARD = Shard("interactive", 0)


def request(creator: str = "a", history: int = 1, blocks: int = 130, at_s: float = 0.0) -> Request:
    return Request(at_s, creator, f"v{history}", history, blocks, blocks * source.BLOCK_TOKENS + 2)


# ---- traffic


def test_prompts_are_those_of_the_source() -> None:
    trace = list(itertools.islice(requests(Workload(seed=1, hot_share=0.3)), 20_000))
    tokens = sorted(one.tokens for one in trace)
    assert sum(tokens) / len(tokens) == pytest.approx(2210, abs=10)
    assert tokens[len(tokens) // 2] == pytest.approx(2210, abs=40)
    assert trace[-1].at_s == pytest.approx(20.0, rel=0.03)
    assert sum(one.creator == HOT for one in trace) / len(trace) == pytest.approx(0.3, abs=0.02)
    assert all(one.blocks == one.tokens // source.BLOCK_TOKENS for one in trace)


def test_conversations_append_turns_until_their_window_moves() -> None:
    seen: dict[str, Request] = {}
    moved = 0
    for one in itertools.islice(requests(Workload(seed=2, conversations=20)), 3000):
        before = seen.get(one.conversation)
        if before is not None and before.history == one.history:
            assert one.tokens == before.tokens + source.TURN_TOKENS
        elif before is not None:
            moved += 1
            assert before.tokens - one.tokens == (source.TURNS_STEP - 1) * source.TURN_TOKENS
        seen[one.conversation] = one
    assert moved == pytest.approx(3000 / source.TURNS_STEP, rel=0.2)


def test_the_same_seed_is_the_same_traffic_and_another_is_not() -> None:
    first, again, other = (list(itertools.islice(requests(Workload(seed=seed)), 500)) for seed in (1, 1, 2))
    assert first == again != other


def test_creators_are_zipf_distributed_without_a_table() -> None:
    chance = random.Random(1)
    drawn = Counter(zipf(chance.random(), 40_000_000) for _ in range(50_000))
    assert drawn[0] / 50_000 == pytest.approx(math.log(2) / math.log(40_000_001), rel=0.1)
    assert drawn[1] / drawn[9] == pytest.approx(math.log(1.5) / math.log(1.1), rel=0.2)
    assert max(drawn) < 40_000_000
    assert zipf(0.0, 5) == 0
    assert zipf(1.0 - 1e-16, 5) == 4


# ---- caches


class Blocks:
    """An LRU of single blocks, to hold against: the youngest last, and of one prompt the first block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[tuple[object, int], None] = OrderedDict()

    def names(self, one: Request) -> list[tuple[object, int]]:
        return [(one.creator if number < PERSONA_BLOCKS else one.history, number) for number in range(one.blocks)]

    def match(self, one: Request) -> int:
        names = self.names(one)
        found = next((at for at, name in enumerate(names) if name not in self.blocks), len(names))
        for name in reversed(names[:found]):
            self.blocks.move_to_end(name)
        return found

    def put(self, one: Request) -> None:
        for name in reversed(self.names(one)):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


def test_runs_of_blocks_behave_as_single_blocks_do() -> None:
    chance, runs, single = random.Random(3), Cache(900), Blocks(900)
    for number in range(4000):
        history = chance.randrange(40)
        one = request(f"c{history % 9}", history, PERSONA_BLOCKS + 5 + number // 200)
        assert runs.match(one) == single.match(one)
        runs.put(one)
        single.put(one)
        assert runs.used == len(single.blocks) <= 900


def test_an_infinite_cache_forgets_nothing() -> None:
    cache = Cache(math.inf)
    for number in range(100):
        cache.put(request(f"c{number}", number))
    assert all(cache.match(request(f"c{number}", number)) == 130 for number in range(100))


# ---- engine


class Bench:
    """One engine, and what it has served."""

    def __init__(self, slots: int = 4) -> None:
        self.events, self.tier = Events(), Tier(source.LMCACHE_BLOCKS, source.LMCACHE_BLOCKS_PER_S)
        self.served: list[Served] = []
        self.engine = Engine("p0", self.events, self.tier, self.served.append, Machine(slots=slots))

    def run(self) -> None:
        self.events.run(lambda: True)


COLD_S = source.PREFILL_OVERHEAD_S + 2082 / source.PREFILL_TOKENS_PER_S
STORE_S = 130 / source.LINK_BLOCKS_PER_S


def test_a_cold_prompt_is_computed_and_stored() -> None:
    bench = Bench()
    bench.engine.begin(request())
    bench.run()
    [served] = bench.served
    assert (served.hbm, served.lmcache) == (0, 0)
    assert served.done_s == pytest.approx(COLD_S + STORE_S)
    assert served.ttft_s == pytest.approx(COLD_S + STORE_S + source.FIRST_TOKEN_S)
    assert bench.engine.computed_s == pytest.approx(COLD_S)


def test_what_is_in_hbm_is_neither_loaded_nor_computed_and_what_lmcache_has_is_loaded() -> None:
    bench = Bench()
    bench.engine.begin(request())
    bench.run()
    bench.engine.begin(request(history=2))
    bench.run()
    assert bench.served[1].hbm == PERSONA_BLOCKS
    assert bench.engine.computed_s - COLD_S == pytest.approx(
        source.PREFILL_OVERHEAD_S + 290 / source.PREFILL_TOKENS_PER_S
    )
    other = Engine("p1", bench.events, bench.tier, bench.served.append)
    other.begin(request(history=2))
    bench.run()
    assert (bench.served[2].hbm, bench.served[2].lmcache) == (0, 130)
    assert other.computed_s == pytest.approx(source.PREFILL_OVERHEAD_S + 2 / source.PREFILL_TOKENS_PER_S)


def test_what_runs_shares_the_engine_evenly() -> None:
    bench = Bench()
    for number in range(4):
        bench.engine.begin(request(f"c{number}", number))
    bench.run()
    assert bench.engine.computed_s == pytest.approx(4 * COLD_S)
    assert bench.served[0].done_s == pytest.approx(4 * COLD_S + STORE_S)
    assert bench.served[3].done_s == pytest.approx(4 * COLD_S + 4 * STORE_S), "the link carries one after another"


def test_no_more_run_than_there_are_slots() -> None:
    bench = Bench(slots=1)
    bench.engine.begin(request())
    with pytest.raises(AssertionError):
        bench.engine.begin(request(history=2))


def test_a_worker_is_warmed_up_with_what_lmcache_has() -> None:
    bench, warmed = Bench(), list[float]()
    bench.tier.cache.put(request())
    bench.engine.warm("a", lambda: warmed.append(bench.events.now_s))
    bench.run()
    assert bench.engine.hbm.persona("a") == PERSONA_BLOCKS
    assert warmed == [pytest.approx(PERSONA_BLOCKS / source.LINK_BLOCKS_PER_S)]


# ---- broker


class Hands:
    """A worker that notes what comes."""

    def __init__(self) -> None:
        self.came: list[tuple[Request, int]] = []
        self.again: list[bool] = []
        self.over: list[tuple[Shard, int]] = []

    def delivered(self, shard: Shard, one: Request, backlog: int, again: bool) -> None:
        self.came.append((one, backlog))
        self.again.append(again)

    def ended(self, ended: list[tuple[Shard, int]]) -> None:
        self.over += ended


def test_the_lowest_priority_is_served_and_equal_ones_in_turn() -> None:
    events = Events()
    broker, near, also, far = Broker(events, [SHARD]), Hands(), Hands(), Hands()
    for worker, batch, priority in ((far, 3, 2), (near, 2, 0), (also, 2, 0)):
        broker.pull(worker, [Offer(SHARD, batch, priority)])
    for number in range(6):
        broker.publish(SHARD, request(history=number))
    events.run(lambda: events.now_s <= HOP_S)
    assert [one.history for one, _ in near.came] == [0, 2]
    assert [one.history for one, _ in also.came] == [1, 3]
    assert [one.history for one, _ in far.came] == [4, 5]


def test_what_waits_is_delivered_with_the_backlog_behind_it_and_what_came_back_goes_first() -> None:
    events = Events()
    broker, worker = Broker(events, [SHARD]), Hands()
    for number in range(3):
        broker.publish(SHARD, request(history=number))
    broker.give_back(SHARD, request(history=9))
    broker.pull(worker, [Offer(SHARD, 2, 0)])
    events.run(lambda: events.now_s <= HOP_S)
    assert [(one.history, backlog) for one, backlog in worker.came] == [(9, 3), (0, 2)]
    assert worker.again == [True, False]
    assert broker.returned == 1


def test_a_pull_lives_as_long_as_on_a_real_bus_and_its_end_is_told() -> None:
    events = Events()
    broker, worker = Broker(events, [SHARD]), Hands()
    broker.pull(worker, [Offer(SHARD, 3, 0)])
    broker.publish(SHARD, request())
    events.at(EXPIRES_S + 0.1, broker.publish, SHARD, request(history=2))
    events.at(EXPIRES_S + 0.2, broker.pull, worker, [Offer(SHARD, 1, 0)])
    events.run(lambda: events.now_s < EXPIRES_S + 1.0)
    assert worker.over == [(SHARD, 2)]
    assert [one.history for one, _ in worker.came] == [1, 2]
