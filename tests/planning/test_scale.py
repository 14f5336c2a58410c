"""The scale scenario, small: churn moves its share, the spill finds room, decisions are cheap, memory is bounded."""

import itertools

import msgspec
import pytest

from pipeline.cli import bench
from pipeline.planning import scale
from pipeline.planning.scale import Report, Scale
from pipeline.planning.traffic import Request, Workload, requests
from pipeline.protocol.routes import Rates


def trace(count: int, per_s: float) -> list[Request]:
    return list(itertools.islice(requests(Workload(seed=1, per_s=per_s, creators=100_000, conversations=500)), count))


@pytest.fixture(scope="module")
def report() -> Report:
    return scale.run(1, 10.0, workers=40, shards=64)


def test_the_same_seed_is_the_same_run(report: Report) -> None:
    again = scale.run(1, 10.0, workers=40, shards=64)
    measured = {"decision_p50_us": 0.0, "decision_p99_us": 0.0, "gateway_memory_bytes": 0}
    assert msgspec.structs.replace(again, **measured) == msgspec.structs.replace(report, **measured)


def test_figures_are_sound(report: Report) -> None:
    assert report.hbm_hit_rate < report.block_hit_rate < report.block_hit_rate_ideal < 1
    assert 1 <= report.load_max_over_mean < 1.5
    assert 0 < report.spill_ratio < 1
    assert "40,000,000 creators" in scale.table(report)


def test_a_routing_decision_takes_microseconds(report: Report) -> None:
    """How many is a benchmark's: the slowest of them here are those that others' work has interrupted."""
    assert 0 < report.decision_p50_us < 1000
    assert report.decision_p50_us <= report.decision_p99_us


def test_a_gateway_remembers_little(report: Report) -> None:
    assert 100_000 < report.gateway_memory_bytes < 5_000_000


def test_who_comes_or_goes_moves_its_own_share_of_the_shards() -> None:
    fleet = Scale(workers=30, shards=512)
    for _ in range(60):
        before = set(fleet.workers)
        fleet._change(measured=True)
        assert len(before ^ fleet.workers.keys()) == 1
        assert all(ranked[0][1] == fleet.owners[number] for number, ranked in enumerate(fleet.order))
        assert all(len(ranked) == len(fleet.workers) for ranked in fleet.order)
    assert len(fleet.workers) == 30
    assert fleet.moved == pytest.approx(fleet.moved_ideal, rel=0.3)


def test_what_an_owner_has_no_room_for_goes_to_the_least_loaded_of_the_next_ranks() -> None:
    fleet = Scale(workers=8, shards=4)
    ranked = fleet.order[0]
    assert fleet._taker(ranked, 0.0) == ranked[0][1]
    fleet.workers[ranked[0][1]].free_s = 1e6
    fleet.workers[ranked[1][1]].free_s = 0.2
    assert fleet._taker(ranked, 0.0) == ranked[2][1]
    for worker in fleet.workers.values():
        worker.free_s = 1e6
    fleet.workers[ranked[7][1]].free_s = 1e5
    assert fleet._taker(ranked, 0.0) == ranked[7][1]


def test_routes_of_creators_that_have_cooled_down_are_dropped() -> None:
    fleet = Scale(workers=4, shards=64)
    fleet.run(trace(3000, per_s=20.0), 100)
    assert fleet.routes
    fleet._rates = Rates()
    for second in range(200, 300):
        fleet._balance(float(second))
    assert not fleet.routes


def test_the_command_prints_the_report(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "run", lambda *_: report)
    assert msgspec.json.decode(bench.plan("scale", "simulated", 1.0, 1, as_json=True), type=Report) == report
    assert "decision" in bench.plan("scale", "simulated", 1.0, 1, as_json=False)
