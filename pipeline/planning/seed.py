"""`headrace bench --scenario seed`: the source's workload on 4 prefill workers and 1 for decode, by our policy and by others.

Each policy gets the same requests, engines and caches, twice: at the source's 1,000 requests/s, which is 70 % of what the fleet
can compute, and at a tenth of that, which is what its first tokens take without load. One creator has 30 % of the traffic, and in
a second round 90 %. All time is virtual; `source.py` says what is assumed.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from pipeline.planning import source
from pipeline.planning.baselines import LeastLoaded, PureHash, Random, RoundRobin
from pipeline.planning.caches import Cache
from pipeline.planning.engine import Served
from pipeline.planning.fleet import Fleet, Outcome
from pipeline.planning.pulled import Headrace
from pipeline.planning.traffic import HOT, Request, Workload, requests

OURS: Final = "headrace"

POLICIES: Final[dict[str, Callable[[], Fleet]]] = {
    OURS: Headrace,
    "random": Random,
    "round_robin": RoundRobin,
    "pure_hash": PureHash,
    "least_loaded": LeastLoaded,
}

HOT_SHARES: Final = (0.3, 0.9)

BALANCE_MAX: Final = {0.3: 1.15, 0.9: 1.3}
"""Goals for the most loaded worker, against the mean."""

WARM_UP_S: Final = 40.0
"""Served before anything is measured: four turns of every conversation."""

SLOWER: Final = 10.0
"""How much slower the same requests come where there is to be no load."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One policy under one load. Hit rates are of full blocks of prompts: those that prefill did not compute.

    `block_hit_rate_ideal` is what an infinite cache has on the same requests. `load_mean` is the share of time that engines
    compute; `load_max_over_mean_5s` is the worst window of 5 s. `cold_…` is of all creators but the hot one.
    `spill_ratio` are requests that another worker than the owner has served, `given_back` messages that bounced for it.
    """

    policy: str
    hot_share: float
    requests: int
    blocks: int
    block_hit_rate: float
    block_hit_rate_ideal: float
    hbm_hit_rate: float
    cold_hbm_hit_rate: float
    hits_hbm: int
    hits_lmcache: int
    load_mean: float
    load_max_over_mean: float
    load_max_over_mean_5s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_p99_unloaded_ms: float
    cold_ttft_p99_ms: float
    spill_ratio: float
    given_back: int
    routes: int


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What was wanted of our policy, and what came out."""

    goal: str
    hot_share: float
    wanted: float
    measured: float
    met: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    scenario: str = "seed"
    engine: str = "simulated"
    time: str = "virtual"
    seed: int
    requests_per_s: float = source.REQUESTS_PER_S
    prefill_workers: int = source.PREFILL_WORKERS
    decode_workers: int = 1
    duration_s: float
    runs: list[Run]
    goals: list[Goal]


def run(seed: int, duration_s: float, told: Callable[[str], None] = lambda _: None) -> Report:
    """All policies. `duration_s` of traffic are measured; `told` hears what is being done."""
    runs: list[Run] = []
    for hot_share in HOT_SHARES:
        load = Workload(seed=seed, hot_share=hot_share)
        trace = list(itertools.islice(requests(load), int((WARM_UP_S + duration_s) * load.per_s)))
        runs += compare(trace, int(WARM_UP_S * load.per_s), hot_share, POLICIES, told)
    return Report(seed=seed, duration_s=duration_s, runs=runs, goals=goals(runs))


def compare(
    trace: Sequence[Request],
    warm_up: int,
    hot_share: float,
    policies: dict[str, Callable[[], Fleet]],
    told: Callable[[str], None] = lambda _: None,
) -> list[Run]:
    """The same requests by each policy."""
    ideal = ideal_hit_rate(trace, warm_up)
    slowly = [request._replace(at_s=request.at_s * SLOWER) for request in trace]
    runs: list[Run] = []
    for policy, make in policies.items():
        told(f"{policy}, hot creator {hot_share:.0%}")
        loaded, unloaded = make().run(trace, warm_up), make().run(slowly, warm_up)
        runs.append(_run(policy, hot_share, ideal, loaded, _p99_ms(unloaded.served)))
    return runs


def ideal_hit_rate(trace: Sequence[Request], warm_up: int) -> float:
    """What an infinite cache has, of the requests after the warm-up."""
    cache, hits, blocks = Cache(math.inf), 0, 0
    for number, request in enumerate(trace):
        if number >= warm_up:
            hits += cache.match(request)
            blocks += request.blocks
        cache.put(request)
    return hits / blocks


def percentile_ms(times_s: Iterable[float], percent: float) -> float:
    """The nearest-rank percentile, in milliseconds."""
    ordered = sorted(times_s)
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1] * 1000


def over_mean(loads: Sequence[float]) -> float:
    """The highest against the mean."""
    return max(loads) * len(loads) / sum(loads)


def _run(policy: str, hot_share: float, ideal: float, outcome: Outcome, unloaded_p99_ms: float) -> Run:
    served = outcome.served
    cold = [one for one in served if one.request.creator != HOT]
    blocks, hbm = sum(one.request.blocks for one in served), sum(one.hbm for one in served)
    lmcache = sum(one.lmcache for one in served)
    return Run(
        policy=policy,
        hot_share=hot_share,
        requests=len(served),
        blocks=blocks,
        block_hit_rate=round((hbm + lmcache) / blocks, 4),
        block_hit_rate_ideal=round(ideal, 4),
        hbm_hit_rate=round(hbm / blocks, 4),
        cold_hbm_hit_rate=round(sum(one.hbm for one in cold) / sum(one.request.blocks for one in cold), 4),
        hits_hbm=hbm,
        hits_lmcache=lmcache,
        load_mean=round(sum(outcome.loads) / len(outcome.loads), 3),
        load_max_over_mean=round(over_mean(outcome.loads), 3),
        load_max_over_mean_5s=round(max(map(over_mean, outcome.loads_by_window)), 3),
        ttft_p50_ms=round(percentile_ms((one.ttft_s for one in served), 50), 2),
        ttft_p99_ms=round(_p99_ms(served), 2),
        ttft_p99_unloaded_ms=round(unloaded_p99_ms, 2),
        cold_ttft_p99_ms=round(_p99_ms(cold), 2),
        spill_ratio=round(outcome.foreign / len(served), 4),
        given_back=outcome.returned,
        routes=outcome.routes,
    )


def _p99_ms(served: Iterable[Served]) -> float:
    return percentile_ms((one.ttft_s for one in served), 99)


def goals(runs: Iterable[Run]) -> list[Goal]:
    """What we want of our own policy, one by one."""
    found: list[Goal] = []
    by_share = {share: {run.policy: run for run in runs if run.hot_share == share} for share in HOT_SHARES}
    for share, policies in by_share.items():
        ours, others = policies[OURS], [run for policy, run in policies.items() if policy != OURS]
        best_p99_ms = min(other.ttft_p99_ms for other in others)
        behind = 100 * (policies["pure_hash"].hbm_hit_rate - ours.hbm_hit_rate)

        def at_most(what: str, wanted: float, measured: float, share: float = share) -> None:
            met = measured <= wanted
            found.append(Goal(goal=what, hot_share=share, wanted=wanted, measured=round(measured, 4), met=met))

        at_most("blocks missed, of those that an infinite cache hits", 0.03, _missed(ours))
        at_most("load, max over mean", BALANCE_MAX[share], ours.load_max_over_mean)
        at_most("ttft p99, over its unloaded p99", 1.5, ours.ttft_p99_ms / ours.ttft_p99_unloaded_ms)
        at_most("ttft p99, ms", source.BUDGET_TTFT_MS, ours.ttft_p99_ms)
        at_most("ttft p99 over the best baseline's", 1.0, ours.ttft_p99_ms / best_p99_ms)
        at_most("points of HBM hit rate behind pure hash", 2.0, behind)
    return found


def _missed(run: Run) -> float:
    return 1.0 - run.block_hit_rate / run.block_hit_rate_ideal


def table(report: Report) -> str:
    """The report for people."""
    lines = [
        f"virtual time, seed {report.seed}, {report.requests_per_s:.0f} requests/s, {report.duration_s:.0f} s",
        "",
        "policy        hot   hits (ideal)     HBM   cold   load  max/mean    5 s   p50 ms   p99 ms  unloaded   cold p99  spill",
    ]
    lines += [
        f"{run.policy:12} {run.hot_share:4.0%} {run.block_hit_rate:6.1%} ({run.block_hit_rate_ideal:.1%}) "
        f"{run.hbm_hit_rate:6.1%} {run.cold_hbm_hit_rate:6.1%} {run.load_mean:6.1%} {run.load_max_over_mean:9.3f} "
        f"{run.load_max_over_mean_5s:6.2f} {run.ttft_p50_ms:8.1f} {run.ttft_p99_ms:8.1f} {run.ttft_p99_unloaded_ms:9.1f} "
        f"{run.cold_ttft_p99_ms:10.1f} {run.spill_ratio:6.1%}"
        for run in report.runs
    ]
    lines.append("")
    lines += [
        f"{'met   ' if goal.met else 'MISSED'} {goal.hot_share:4.0%} hot: {goal.goal}: "
        f"{goal.measured:g}, wanted at most {goal.wanted:g}"
        for goal in report.goals
    ]
    return "\n".join(lines)
