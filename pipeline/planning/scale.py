"""`headrace bench --scenario scale`: 40 million creators, 256 shards, 1,000 prefill workers of whom 1 % a minute come and go.

Routing is real: `token`, `Rates`, `affinity`, `Balancer`, ranks. Engines are coarser than in `seed.py`: a worker is one server
with a queue, and takes a request while its queue is under the spill load; loads from LMCache take no time, and nobody loses what
he runs when he leaves. The caches are as exact as there.

Such a fleet has 250,000 requests/s. The hit rate is that of a miniature, as is usual for caches (Waldspurger and others, 2015):
one of `SCALED_BY` creators, with all its requests, on engines and caches that are smaller by as much, so that what is in a cache
stays there for as long as it would. Zipf keeps its shape in it. Workers, shards and their changes are not scaled, so between two
changes come that many fewer requests.

Decision cost is measured over real calls, and memory is what Python allocates for a gateway's whole routing state: both with a
stream of requests to all 40 million.
"""

import bisect
import itertools
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pipeline.limits import SPILL_LOAD
from pipeline.planning import source
from pipeline.planning.caches import Cache
from pipeline.planning.seed import ideal_hit_rate, percentile_ms
from pipeline.planning.traffic import Request, Workload, requests
from pipeline.protocol import placement, routes, subjects
from pipeline.protocol.placement import Owners
from pipeline.protocol.routes import Balancer, Rates, Route
from pipeline.protocol.slots import RANKS_ALIKE
from pipeline.protocol.subjects import Shard, partition

CREATORS: Final = 40_000_000
WORKERS: Final = 1000
SHARDS: Final = 256
CHURN_PER_MIN: Final = 0.01
"""Share of the workers that leave in a minute; as many others join."""

SCALED_BY: Final = 50
PER_S: Final = source.REQUESTS_PER_S / source.PREFILL_WORKERS * WORKERS / SCALED_BY
WARM_UP_S: Final = 30.0

RANKS_TRIED: Final = 9 * RANKS_ALIKE
"""Ranks that the broker tells apart: 9 groups."""

CALLS: Final = 100_000
"""Routing decisions timed, and requests counted before memory is looked at."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Rates of hits are of full blocks of prompts; moved shards are shares of all per minute."""

    scenario: str = "scale"
    engine: str = "simulated, coarse"
    time: str = "virtual"
    seed: int
    creators: int = CREATORS
    shards: int
    workers: int
    scaled_by: int = SCALED_BY
    requests: int
    duration_s: float
    block_hit_rate: float
    block_hit_rate_ideal: float
    hbm_hit_rate: float
    spill_ratio: float
    load_max_over_mean: float
    workers_changed_per_min: float
    shards_moved_per_min: float
    shards_moved_per_min_ideal: float
    routes: int
    gateway_memory_bytes: int
    decision_p50_us: float
    decision_p99_us: float


class _Worker:
    """One server: `free_s` is when it would be through with all it has."""

    __slots__ = ("busy_s", "free_s", "hbm")

    def __init__(self) -> None:
        self.hbm = Cache(source.HBM_BLOCKS / SCALED_BY)
        self.free_s = self.busy_s = 0.0

    def load(self, now_s: float) -> float:
        """Its queue, in slots that it fills."""
        a_slot_s = source.PREFILL_OVERHEAD_S * SCALED_BY
        return max(0.0, self.free_s - now_s) / (a_slot_s * source.PREFILL_SLOTS)


class Scale:
    """The fleet, its shards, and one gateway."""

    def __init__(self, workers: int = WORKERS, shards: int = SHARDS) -> None:
        self.workers: dict[str, _Worker] = {}
        self.order: list[list[tuple[float, str]]] = [[] for _ in range(shards)]
        self.owners = Owners(shards)
        self.routes: dict[str, Route] = {}
        self.hbm = self.lmcache = self.blocks = self.foreign = self.served = 0
        self.moved = self.moved_ideal = 0.0
        self.changed = 0
        self._joined = self._changes = 0
        self._tier = Cache(source.LMCACHE_BLOCKS * workers / source.PREFILL_WORKERS / SCALED_BY)
        self._rates, self._balancer = Rates(), Balancer()
        for _ in range(workers):
            self._join()
        self.owners.update(dict.fromkeys(self.workers, 1.0))

    def run(self, trace: Sequence[Request], warm_up: int) -> None:
        """Serve a trace. The first `warm_up` requests are not measured."""
        every_s = 60.0 / (2 * CHURN_PER_MIN * len(self.workers))
        change_s, step_s = every_s, 1.0
        for number, request in enumerate(trace):
            while request.at_s > change_s:
                self._change(measured=number >= warm_up)
                change_s += every_s
            if request.at_s > step_s:
                self._balance(step_s)
                step_s += 1.0
            if number == warm_up:
                self._forget()
            self._serve(request)

    def _forget(self) -> None:
        self.hbm = self.lmcache = self.blocks = self.foreign = self.served = 0
        for worker in self.workers.values():
            worker.busy_s = 0.0

    def _serve(self, request: Request) -> None:
        creator = subjects.token(request.creator)
        self._rates.count(creator, request.at_s)
        affinity = routes.affinity(creator, request.conversation, self.routes.get(creator))
        ranked = self.order[partition(affinity, len(self.order))]
        name = self._taker(ranked, request.at_s)
        worker = self.workers[name]
        here = worker.hbm.match(request)
        there = self._tier.match(request) if here < request.blocks else here
        found = max(here, there)
        worker.hbm.put(request)
        self._tier.put(request)
        computed_s = (request.tokens - found * source.BLOCK_TOKENS) / source.PREFILL_TOKENS_PER_S
        work_s = (source.PREFILL_OVERHEAD_S + computed_s) * SCALED_BY
        worker.free_s = max(worker.free_s, request.at_s) + work_s
        worker.busy_s += work_s
        self.served += 1
        self.blocks += request.blocks
        self.hbm += here
        self.lmcache += found - here
        self.foreign += name != ranked[0][1]

    def _taker(self, ranked: Sequence[tuple[float, str]], now_s: float) -> str:
        """The owner while it does not spill, else the least loaded of the first group of ranks with room."""
        owner = ranked[0][1]
        if self.workers[owner].load(now_s) < SPILL_LOAD:
            return owner
        least, least_load = owner, self.workers[owner].load(now_s)
        for begin in range(1, RANKS_TRIED, RANKS_ALIKE):
            for _, name in ranked[begin : begin + RANKS_ALIKE]:
                load = self.workers[name].load(now_s)
                if load < least_load:
                    least, least_load = name, load
            if least_load < SPILL_LOAD:
                break
        return least

    def _balance(self, now_s: float) -> None:
        said = {name: routes.Worker(1.0, min(1.0, worker.load(now_s))) for name, worker in self.workers.items()}
        rates, total = self._rates.top(now_s), self._rates.total(now_s)
        for change in self._balancer.step(now_s, rates, total, self.routes, said, len(self.order)):
            if change.route is None:
                self.routes.pop(change.creator, None)
            else:
                self.routes[change.creator] = change.route

    # ---- who comes and goes

    def _change(self, *, measured: bool) -> None:
        """By turns the oldest leaves and a new one joins. A change of one worker should move its own share of shards."""
        before = [self.owners[number] for number in range(len(self.owners))]
        share = 1.0 / len(self.workers)
        self._changes += 1
        if self._changes % 2:
            self._leave(next(iter(self.workers)))
        else:
            self._join()
        self.owners.update(dict.fromkeys(self.workers, 1.0))
        if measured:
            self.changed += 1
            self.moved += sum(owner != self.owners[number] for number, owner in enumerate(before)) / len(before)
            self.moved_ideal += share

    def _join(self) -> None:
        name = f"w{self._joined}"
        self._joined += 1
        self.workers[name] = _Worker()
        for number, ranked in enumerate(self.order):
            bisect.insort(ranked, (-placement.score(Shard("interactive", number), name, 1.0), name))

    def _leave(self, name: str) -> None:
        del self.workers[name]
        for number, ranked in enumerate(self.order):
            place = bisect.bisect_left(ranked, (-placement.score(Shard("interactive", number), name, 1.0), name))
            del ranked[place]


def run(
    seed: int,
    duration_s: float,
    told: Callable[[str], None] = lambda _: None,
    *,
    workers: int = WORKERS,
    shards: int = SHARDS,
) -> Report:
    """The whole scenario. `duration_s` are measured, after `WARM_UP_S`; `told` hears what is being done."""
    per_s = PER_S * workers / WORKERS
    load = Workload(seed=seed, per_s=per_s, creators=CREATORS, conversations=int(per_s * source.TURN_GAP_S))
    everybody = list(itertools.islice(requests(load), CALLS))
    told("memory")
    memory = gateway_memory(everybody, workers, shards)
    load = msgspec.structs.replace(load, creators=CREATORS // SCALED_BY)
    trace = list(itertools.islice(requests(load), int((WARM_UP_S + duration_s) * per_s)))
    told(f"{len(trace)} requests")
    fleet = Scale(workers, shards)
    fleet.run(trace, int(WARM_UP_S * per_s))
    told("decisions")
    costs_s = decision_costs(everybody, fleet.routes, shards)
    busy = [worker.busy_s for worker in fleet.workers.values() if worker.busy_s]
    minutes = duration_s / 60.0
    return Report(
        seed=seed,
        shards=shards,
        workers=workers,
        requests=fleet.served,
        duration_s=duration_s,
        block_hit_rate=round((fleet.hbm + fleet.lmcache) / fleet.blocks, 4),
        block_hit_rate_ideal=round(ideal_hit_rate(trace, int(WARM_UP_S * per_s)), 4),
        hbm_hit_rate=round(fleet.hbm / fleet.blocks, 4),
        spill_ratio=round(fleet.foreign / fleet.served, 4),
        load_max_over_mean=round(max(busy) * len(busy) / sum(busy), 3),
        workers_changed_per_min=round(fleet.changed / minutes / workers, 4),
        shards_moved_per_min=round(fleet.moved / minutes, 4),
        shards_moved_per_min_ideal=round(fleet.moved_ideal / minutes, 4),
        routes=len(fleet.routes),
        gateway_memory_bytes=memory,
        decision_p50_us=round(percentile_ms(costs_s, 50) * 1000, 2),
        decision_p99_us=round(percentile_ms(costs_s, 99) * 1000, 2),
    )


def decision_costs(trace: Sequence[Request], known: dict[str, Route], shards: int) -> list[float]:
    """Seconds that each routing decision takes: count the creator, choose its affinity, and the shard that follows from it."""
    rates, costs_s, clock = Rates(), list[float](), time.perf_counter
    for request in trace:
        began_s = clock()
        creator = subjects.token(request.creator)
        rates.count(creator, request.at_s)
        partition(routes.affinity(creator, request.conversation, known.get(creator)), shards)
        costs_s.append(clock() - began_s)
    return costs_s


def gateway_memory(trace: Sequence[Request], workers: int, shards: int) -> int:
    """Bytes of what a gateway keeps to route by: rates, routes, and the balancer with the scores of all workers."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        rates, balancer, known = Rates(), Balancer(), dict[str, Route]()
        # Names of their own: scores that are remembered from elsewhere would not be seen.
        said = {f"memory-{number}": routes.Worker(1.0, 0.7) for number in range(workers)}
        for request in trace:
            rates.count(subjects.token(request.creator), request.at_s)
        now_s = trace[-1].at_s
        for step in range(100):
            top, total = rates.top(now_s), rates.total(now_s)
            for change in balancer.step(now_s + step, top, total, known, said, shards):
                if change.route is not None:
                    known[change.creator] = change.route
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def table(report: Report) -> str:
    """The report for people."""
    return "\n".join(
        [
            f"virtual time, seed {report.seed}: {report.creators:,} creators, {report.workers:,} workers, "
            f"{report.shards} shards, all else 1/{report.scaled_by}",
            f"hits          {report.block_hit_rate:.1%} of blocks (ideal {report.block_hit_rate_ideal:.1%}), "
            f"HBM {report.hbm_hit_rate:.1%}",
            f"load          max/mean {report.load_max_over_mean}, {report.spill_ratio:.1%} spilled, {report.routes} routes",
            f"churn         {report.workers_changed_per_min:.1%} of workers/min moved {report.shards_moved_per_min:.2%} "
            f"of shards/min, ideal {report.shards_moved_per_min_ideal:.2%}",
            f"gateway       {report.gateway_memory_bytes / 1e6:.1f} MB",
            f"decision      p50 {report.decision_p50_us} µs, p99 {report.decision_p99_us} µs",
        ]
    )
