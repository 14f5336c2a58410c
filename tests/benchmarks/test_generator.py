"""The generator's own benchmark. Its figures are no test."""

from tests.benchmarks import generator


def test_all_that_is_sent_is_answered_and_costs_something() -> None:
    [met] = generator.run([50.0], 1.0)
    assert met.errors == 0
    assert 30 <= met.completed <= 80
    assert met.cpu_ms_per_request > 0
    assert met.ttft_p99_ms >= met.ttft_p50_ms > 0
