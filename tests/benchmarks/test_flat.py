"""What a request costs at several sizes: small, and whether the figures are of every size."""

import pytest

from tests.benchmarks import flat


@pytest.mark.timeout(120)
def test_every_size_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "STEP_S", 0.01)
    monkeypatch.setattr(flat, "IDLE_S", 0.5)
    report = flat.run(1.0, streams=(1, 4), workers=(2, 4))
    assert [cost.size for cost in report.streams] == [1, 4]
    assert [cost.size for cost in report.workers] == [2, 4]
    assert all(cost.pipeline_cpu_ms > cost.gateway_cpu_ms > 0 for cost in (*report.streams, *report.workers))
    assert flat.page(report).count("\n") == 4
