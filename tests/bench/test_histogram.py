"""Times, counted to a thousandth."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pipeline.bench.histogram import Histogram, Times


def counted(times_s: list[float]) -> Histogram:
    histogram = Histogram()
    for time_s in times_s:
        histogram.add(time_s)
    return histogram


def test_nothing_has_no_times() -> None:
    assert Histogram().percentile_ms(50) is None
    assert Histogram().times() == Times(count=0)


def test_one_time_is_all_its_percentiles() -> None:
    times = counted([0.1]).times()
    assert times == Times(count=1, mean_ms=100, p50_ms=100, p90_ms=100, p99_ms=100, p999_ms=100, max_ms=100)


def test_small_times_are_exact() -> None:
    histogram = counted([number / 1e6 for number in range(1, 1001)])
    assert [histogram.percentile_ms(percent) for percent in (0, 50, 99, 99.9, 100)] == [0.001, 0.5, 0.99, 0.999, 1.0]


def test_a_clock_that_goes_back_counts_as_no_time() -> None:
    assert counted([-0.5]).times().max_ms == 0


@given(
    st.lists(st.integers(0, 10**10), min_size=1, max_size=200),
    st.sampled_from([1, 50, 90, 99, 99.9, 100]),
)
def test_a_percentile_is_the_nearest_rank_to_a_thousandth(times_us: list[int], percent: float) -> None:
    exact_ms = sorted(times_us)[max(1, math.ceil(len(times_us) * percent / 100)) - 1] / 1000
    found_ms = counted([time_us / 1e6 for time_us in times_us]).percentile_ms(percent)
    assert found_ms is not None
    assert exact_ms <= found_ms <= exact_ms * 1.001
