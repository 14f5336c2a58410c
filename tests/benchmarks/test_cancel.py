"""The benchmark of cancels says what it promises to say. Its figures are no test."""

import subprocess
import sys
from pathlib import Path

import msgspec

from tests.benchmarks.cancel import Report
from tests.workers.cancel_stages import STAGES

ROOT = Path(__file__).parents[2]


def test_it_measures_every_stage() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.cancel", "--rounds", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.rounds == 1
    assert [figures.stage for figures in report.stages] == list(STAGES)
    for figures in report.stages:
        assert 0 <= figures.told_p50_ms == figures.told_p99_ms == figures.told_max_ms <= figures.freed_max_ms
