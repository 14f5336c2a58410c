"""The seed scenario, small: determinism, conservation, balance, and what the fleet's policy owes to cold creators."""

import itertools
from functools import cache

import msgspec
import pytest

from pipeline.cli import bench
from pipeline.errors import OperatorError
from pipeline.planning import seed
from pipeline.planning.baselines import LeastLoaded, PureHash
from pipeline.planning.fleet import Fleet
from pipeline.planning.pulled import Headrace
from pipeline.planning.seed import Goal, Report, Run
from pipeline.planning.traffic import HOT, Request, Workload, requests

WARM_UP = 8000
POLICIES = {seed.OURS: Headrace, "pure_hash": PureHash, "least_loaded": LeastLoaded}


@cache
def trace(hot_share: float) -> tuple[Request, ...]:
    load = Workload(seed=5, hot_share=hot_share, conversations=2000, creators=500)
    return tuple(itertools.islice(requests(load), 16_000))


@cache
def runs(hot_share: float) -> dict[str, Run]:
    made = seed.compare(trace(hot_share), WARM_UP, hot_share, dict(POLICIES))
    return {run.policy: run for run in made}


@pytest.mark.parametrize("make", [Headrace, LeastLoaded])
def test_the_same_seed_is_the_same_run_to_the_last_figure(make: type[Fleet]) -> None:
    requested = trace(0.3)[:6000]
    assert make().run(requested, 1000) == make().run(requested, 1000)


@pytest.mark.parametrize("make", list(seed.POLICIES.values()), ids=list(seed.POLICIES))
def test_every_request_is_served_once(make: type[Fleet]) -> None:
    requested = trace(0.3)[:3000]
    outcome = make().run(requested, 500)
    assert sorted(served.request.at_s for served in outcome.served) == [one.at_s for one in requested[500:]]
    assert all(served.hbm + served.lmcache <= served.request.blocks for served in outcome.served)
    assert all(served.ttft_s > 0 for served in outcome.served)


@pytest.mark.parametrize("hot_share", seed.HOT_SHARES)
def test_the_load_lies_evenly(hot_share: float) -> None:
    ours = runs(hot_share)[seed.OURS]
    assert ours.load_mean > 0.6
    assert ours.load_max_over_mean <= seed.BALANCE_MAX[hot_share]
    assert runs(hot_share)["pure_hash"].load_max_over_mean > 1.4


@pytest.mark.parametrize("hot_share", seed.HOT_SHARES)
def test_first_tokens_come_nearly_as_soon_as_without_load(hot_share: float) -> None:
    ours = runs(hot_share)[seed.OURS]
    assert ours.ttft_p99_ms <= 1.5 * ours.ttft_p99_unloaded_ms
    assert ours.block_hit_rate >= 0.97 * ours.block_hit_rate_ideal


def test_24_one_hot_creator_neither_fills_one_worker_nor_costs_the_others_their_affinity() -> None:
    """A shared prompt sends everything to one worker; one hot worker disables affinity fleet-wide."""
    by_policy = runs(0.9)
    ours = by_policy[seed.OURS]
    assert ours.load_max_over_mean <= 1.3
    assert ours.cold_hbm_hit_rate >= by_policy["pure_hash"].cold_hbm_hit_rate - 0.05, "as with affinity alone"
    assert ours.cold_hbm_hit_rate >= by_policy["least_loaded"].cold_hbm_hit_rate + 0.05, "and not as without it"


def test_a_hot_creator_gets_a_route_whose_owners_were_warmed_up_first() -> None:
    fleet = Headrace()
    fleet.run(trace(0.9)[:4000], 100)
    assert len(fleet.routes[HOT].variants) == len(fleet.engines)
    assert all(engine.hbm.persona(HOT) for engine in fleet.engines.values())
    assert fleet.changes >= 1


def test_goals_are_told_as_met_or_missed() -> None:
    made = [
        msgspec.structs.replace(run, hot_share=share)
        for share in seed.HOT_SHARES
        for run in runs(0.9).values()
        if run.policy != "least_loaded"
    ]
    bad = [msgspec.structs.replace(run, load_max_over_mean=1.31) if run.policy == seed.OURS else run for run in made]
    missed = {(goal.goal, goal.hot_share) for goal in seed.goals(bad) if not goal.met}
    assert missed - {(goal.goal, goal.hot_share) for goal in seed.goals(made) if not goal.met} == {
        ("load, max over mean", share) for share in seed.HOT_SHARES
    }
    report = Report(seed=1, duration_s=8.0, runs=made, goals=seed.goals(bad))
    assert "MISSED" in seed.table(report)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_percentiles_and_means() -> None:
    assert seed.percentile_ms([0.1], 99) == pytest.approx(100.0)
    assert seed.percentile_ms([number / 1000 for number in range(1, 101)], 99) == pytest.approx(99.0)
    assert seed.over_mean([1.0, 3.0]) == pytest.approx(1.5)


def test_the_command_runs_a_scenario_and_refuses_what_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []

    def run(number: int, duration_s: float, told: object) -> Report:
        seen.append((number, duration_s))
        goal = Goal(goal="g", hot_share=0.3, wanted=1.0, measured=0.5, met=True)
        return Report(seed=number, duration_s=duration_s, runs=[], goals=[goal])

    monkeypatch.setattr(seed, "run", run)
    printed = msgspec.json.decode(bench.plan("seed", "simulated", 3.0, 7, as_json=True))
    assert (printed["scenario"], printed["time"], printed["seed"]) == ("seed", "virtual", 7)
    assert "met" in bench.plan("seed", "simulated", 3.0, 7, as_json=False)
    assert seen == [(7, 3.0)] * 2
    with pytest.raises(OperatorError, match="vllm"):
        bench.plan("seed", "vllm", 3.0, 7, as_json=True)
    with pytest.raises(OperatorError, match="other"):
        bench.plan("other", "simulated", 3.0, 7, as_json=True)


def test_a_whole_report_has_every_policy_at_both_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "WARM_UP_S", 1.0)
    told: list[str] = []
    report = seed.run(1, 1.0, told.append)
    assert [(run.policy, run.hot_share) for run in report.runs] == [
        (policy, share) for share in seed.HOT_SHARES for policy in seed.POLICIES
    ]
    assert len(told) == len(report.runs)
