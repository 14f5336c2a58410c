"""Bugs on purpose: each is found, and as what it is, within 200 seeds."""

import pytest

from tests.simulation.plan import draw
from tests.simulation.planted import PLANTED, Planted, as_drawn
from tests.simulation.world import simulate_plan

SEEDS = 200


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Planted) -> None:
    with bug.plant():
        assert any(bug.found_as in found for seed in range(SEEDS) for found in broken(bug, seed))


def broken(bug: Planted, seed: int) -> list[str]:
    """What the checkers say of the seed's world, where it may show the bug."""
    plan = bug.world(draw(seed))
    return [] if plan is None else simulate_plan(plan).broken


@pytest.mark.timeout(300)
def test_nothing_is_found_in_worlds_made_for_a_bug_where_it_is_not_planted() -> None:
    made = [bug for bug in PLANTED if bug.world is not as_drawn]
    assert [bug.name for bug in made] == ["blocks promised twice"]
    assert not any(bug.found_as in found for bug in made for seed in range(SEEDS // 2) for found in broken(bug, seed))
