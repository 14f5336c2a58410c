"""The benchmark of floods says what it promises to say. Its times are no test; whom it serves is."""

import subprocess
import sys
from pathlib import Path

import msgspec

from tests.benchmarks.flood import KINDS, Figures

ROOT = Path(__file__).parents[2]


def test_all_but_the_flood_are_served() -> None:
    options = ["--rounds", "1", "--seconds", "0.6", "--rate", "20", "--flood", "300", "--json"]
    command = [sys.executable, "-m", "tests.benchmarks.flood", *options]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=90)
    report = msgspec.json.decode(done.stdout, type=list[Figures])
    assert tuple(figures.kind for figures in report) == KINDS
    calm, key, creator, full = report
    assert (calm.others, key.others, creator.others) == (12, 12, 12)
    assert (calm.others_refused, key.others_refused, creator.others_refused) == (0, 0, 0)
    assert calm.refused == 0
    assert min(key.refused, creator.refused) > 0
    assert (full.others, full.refused) == (0, 180)
