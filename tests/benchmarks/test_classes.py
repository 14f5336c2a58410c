"""The benchmark of classes measures both. Its times are no test; that nobody is lost is."""

import pytest

from tests.benchmarks.classes import KINDS, page, run

pytestmark = pytest.mark.timeout(240)


def test_both_classes_are_served_and_timed() -> None:
    told: list[str] = []
    report = run(1, 2.0, told=told.append)
    assert [one.beside for one in report.kinds] == [kind.name for kind in KINDS]
    assert told == [*(f"round 1 of 1: {kind.name}" for kind in KINDS), "too much"]
    alone, *beside = report.kinds
    assert alone.ttft_p99_ratio is None
    for one in report.kinds:
        assert one.requests > 0
        assert (one.failed, one.batch_failed) == (0, 0)
        assert (one.ttft_p50_ms or 0) <= (one.ttft_p99_ms or 0) <= (one.e2e_p99_ms or 0)
    assert all(one.ttft_p99_ratio and one.e2e_p99_ratio for one in beside)
    floor = report.floor
    assert floor.interactive_per_s > floor.batch_per_s
    assert min(floor.interactive_alone_per_s, floor.batch_alone_per_s) > 0
    assert "long prompts" in page(report)
