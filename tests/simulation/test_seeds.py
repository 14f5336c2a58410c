"""Seeds by the thousand: whatever is drawn, nothing that must be true is broken, and every request ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import command
from tests.simulation.world import simulate

ROOT = Path(__file__).parents[2]

SEEDS = int(os.environ.get("HEADRACE_SIMULATION_SEEDS", "2000"))
PROCESSES = 2


@pytest.mark.timeout(900)
def test_no_seed_breaks_what_must_be_true() -> None:
    report, failed = command.run(SEEDS, 0, PROCESSES)
    problems = [f"seed {outcome.seed}: {outcome.broken[0]}" for outcome in failed]
    assert not problems
    assert report.seeds == SEEDS
    assert 20 * SEEDS <= report.requests <= 50 * SEEDS


def test_a_seed_is_the_same_run_to_the_last_event_also_in_another_process() -> None:
    seed = next(seed for seed in range(100) if len(simulate(seed).faults) >= 3)
    story = simulate(seed, story=True).story
    assert simulate(seed, story=True).story == story
    asked = f"from tests.simulation import command; command.trace({seed})"
    environ = {**os.environ, "PYTHONHASHSEED": "77"}
    other = subprocess.run(
        [sys.executable, "-c", asked], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert other.stdout.splitlines() == story


def test_telling_the_story_changes_nothing() -> None:
    told, untold = simulate(7, story=True), simulate(7)
    assert (told.virtual_s, told.whole, told.faults) == (untold.virtual_s, untold.whole, untold.faults)
    assert told.story
    assert not untold.story
