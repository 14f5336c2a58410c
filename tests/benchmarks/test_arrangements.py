"""The benchmark of arrangements, small: every fleet serves, and says what it is."""

import pytest

from tests.benchmarks import arrangements


@pytest.mark.timeout(120)
def test_every_fleet_is_measured_at_every_rate() -> None:
    cells = arrangements.run([4.0], 4.0)
    assert [(cell.fleet, cell.rate) for cell in cells] == [(fleet, 4.0) for fleet in arrangements.FLEETS]
    assert all(cell.requests and cell.ttft_p50_ms for cell in cells)
    assert {cell.fleet: cell.roles for cell in cells} == {
        "split": ["decode", "prefill"],
        "both": ["both", "both"],
        "balanced": ["decode", "prefill"],
    }
    assert "decode + prefill" in arrangements.text(cells)
