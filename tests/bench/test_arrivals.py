"""When an open loop sends."""

import itertools

import pytest

from pipeline.bench.arrivals import Arrivals, times


def test_constant_arrivals_are_even_and_begin_at_once() -> None:
    assert list(itertools.islice(times("constant", 4.0, "any"), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_are_the_same_for_the_same_seed() -> None:
    one, again, other = (list(itertools.islice(times("poisson", 10.0, seed), 50)) for seed in ("a", "a", "b"))
    assert one == again != other
    assert one == sorted(one)


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_either_has_its_rate(arrivals: Arrivals) -> None:
    *_, last_s = itertools.islice(times(arrivals, 50.0, "a"), 20_000)
    assert 20_000 / last_s == pytest.approx(50, rel=0.03)


def test_poisson_gaps_vary_as_much_as_their_mean() -> None:
    at_s = list(itertools.islice(times("poisson", 1.0, "a"), 20_000))
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(at_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    variance = sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s)
    assert variance**0.5 == pytest.approx(mean_s, rel=0.05)
