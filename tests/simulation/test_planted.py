"""Bugs on purpose: each is found, and as what it is, within 200 seeds."""

import pytest

from tests.simulation.planted import PLANTED, Planted
from tests.simulation.world import simulate

SEEDS = 200


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Planted) -> None:
    with bug.plant():
        assert any(bug.found_as in found for seed in range(SEEDS) for found in simulate(seed).broken)
