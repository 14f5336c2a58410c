"""The benchmark of requests by reference says what it promises to say, and that it is worth something."""

import subprocess
import sys
from pathlib import Path

import msgspec

from tests.benchmarks.by_reference import Report

ROOT = Path(__file__).parents[2]


def test_it_measures_bytes_history_and_first_requests() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.by_reference", "--rounds", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    report = msgspec.json.decode(done.stdout, type=Report)
    everything, referring = report.bytes
    assert referring.prompt_tokens == everything.prompt_tokens, "the same prompts"
    assert referring.producer_bytes < everything.producer_bytes / 20
    by_one, in_steps = report.history
    assert in_steps.history_hit_ratio > by_one.history_hit_ratio + 0.3
    cold, warm = report.first
    assert cold.cached_ratio == 0.0 < warm.cached_ratio
