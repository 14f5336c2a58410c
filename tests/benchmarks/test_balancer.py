"""The benchmark of the balancer measures both parts of its load. Its figures are no test; that nothing is lost is."""

import pytest
from msgspec.structs import replace

from tests.benchmarks.balancer import PARTS, run

pytestmark = pytest.mark.timeout(240)


def test_it_measures_each_part_and_loses_nothing() -> None:
    found = run(tuple(replace(part, for_s=2.0) for part in PARTS), balancer=True)
    assert not found.report.failed, found.report
    assert [(part.part, part.requests) for part in found.parts] == [(part.name, 10) for part in PARTS]
    assert set(found.parts[-1].roles) == {f"both-{number}" for number in range(1, 5)}
