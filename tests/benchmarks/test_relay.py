"""The benchmark of relays serves all that it asks for. Its times are no test."""

import subprocess
import sys
from pathlib import Path

import msgspec

from tests.benchmarks.relay import RELAYS, Cell

ROOT = Path(__file__).parents[2]


def test_both_relays_serve_all_that_they_are_asked_for() -> None:
    options = ["--rates", "20", "--rounds", "1", "--seconds", "1", "--json"]
    command = [sys.executable, "-m", "tests.benchmarks.relay", *options]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=90)
    cells = msgspec.json.decode(done.stdout, type=list[Cell])
    assert [cell.relay for cell in cells] == list(RELAYS)
    assert all(cell.served == cell.asked > 0 for cell in cells)
    assert all(cell.ttft_p50_ms > 20 for cell in cells), "the worker's part"
