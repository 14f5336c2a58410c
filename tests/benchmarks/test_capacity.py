"""Plan against the fleet in virtual time: within 15 % of first tokens and of the highest rate, on five workloads."""

import pytest

from tests.benchmarks import capacity
from tests.benchmarks.capacity import CASES, Case, Figures, Row


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_plan_says_what_the_fleet_does(case: Case) -> None:
    (row,) = capacity.run([case], seed=1)
    assert row.off <= capacity.WITHIN, capacity.text([row])


def test_what_is_too_far_off_is_marked() -> None:
    plan, fleet = (Figures(ttft_p50_ms=p50, ttft_p99_ms=100, throughput_per_s=10) for p50 in (50.0, 40.0))
    row = Row(workload="w", busy=0.5, plan=plan, fleet=fleet)
    assert row.off == pytest.approx(0.25)
    assert "25.0%  MISSED" in capacity.text([row])
