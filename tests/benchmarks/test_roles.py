"""The benchmark of role changes sums up what a run has seen. Its figures are no test."""

from tests.benchmarks.roles import Latencies, Way, figures
from tests.chaos.rest import Rest
from tests.chaos.roles import Roles, Turn
from tests.chaos.verdict import judge


def test_changes_are_summed_up_by_their_way() -> None:
    turns = [
        Turn(worker="w", before="both", after="prefill", began_s=0.0, serves_s=None, done_s=0.5),
        Turn(worker="w", before="prefill", after="both", began_s=1.0, serves_s=0.1, done_s=0.2),
        Turn(worker="v", before="prefill", after="both", began_s=2.0, serves_s=0.3, done_s=0.4),
    ]
    report = judge([], rest=Rest(), kills=[], gateway_deaths=[], unasked=[], duration_s=1.0)
    found = figures(Roles(report=report, turns=turns, during_s=[0.1, 0.2], others_s=[]))
    assert found.ways[0].serves_p50_ms is None
    assert found.ways[1] == Way(
        way="prefill → both", changes=2, serves_p50_ms=100.0, serves_max_ms=300.0, done_p50_ms=200.0, done_max_ms=400.0
    )
    assert found.during == Latencies(requests=2, p50_ms=100.0, p99_ms=200.0, max_ms=200.0)
    assert found.others.p50_ms is None
