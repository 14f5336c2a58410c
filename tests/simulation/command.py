"""Run seeds, on several processes, and say what came of them. What `headrace simulate` calls."""

import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec

from tests.simulation.world import Outcome, simulate

PROBLEMS_SHOWN: Final = 3
"""Of one seed: what else goes wrong follows from the first."""

CHUNK: Final = 10
"""Seeds that a process takes at a time: about a second."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `failures` are seeds in which something was found wrong."""

    seeds: int
    failures: int
    requests: int
    faults: int


def run(seeds: int, first: int, processes: int) -> tuple[Report, list[Outcome]]:
    """Run `seeds` seeds from `first` on. The second result are the outcomes in which something was wrong."""
    failed: list[Outcome] = []
    requests, faults = 0, Counter[str]()
    for outcome in _outcomes(range(first, first + seeds), processes):
        requests += outcome.requests
        faults.update(outcome.faults)
        if outcome.broken:
            failed.append(outcome)
            say(outcome)
    failed.sort(key=lambda outcome: outcome.seed)
    return Report(seeds=seeds, failures=len(failed), requests=requests, faults=faults.total()), failed


def trace(seed: int) -> Outcome:
    """Run one seed and tell its story on stdout."""
    outcome = simulate(seed, story=True)
    sys.stdout.write("\n".join(outcome.story) + "\n")
    say(outcome)
    return outcome


def say(outcome: Outcome) -> None:
    """What was found wrong in a seed, on stderr."""
    for problem in outcome.broken[:PROBLEMS_SHOWN]:
        sys.stderr.write(f"seed {outcome.seed}: {problem}\n")
    if outcome.broken:
        sys.stderr.write(f"seed {outcome.seed}: headrace simulate --trace {outcome.seed} tells its story\n")
    sys.stderr.flush()


def _outcomes(seeds: range, processes: int) -> Iterator[Outcome]:
    if processes == 1:
        yield from map(simulate, seeds)
        return
    # Started anew rather than forked: whatever traces or measures this process stays with it.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(partial(simulate, story=False), seeds, chunksize=CHUNK)


def main(seeds: int, first: int, processes: int, *, as_json: bool, traced: int | None) -> int:
    """The command; its exit status."""
    if traced is not None:
        outcome = trace(traced)
        report = Report(
            seeds=1, failures=int(bool(outcome.broken)), requests=outcome.requests, faults=sum(outcome.faults.values())
        )
    else:
        report, _ = run(seeds, first, processes)
    words = f"{report.seeds} seeds, {report.requests} requests, {report.faults} faults: {report.failures} seeds failed"
    sys.stdout.write((msgspec.json.encode(report).decode() if as_json else words) + "\n")
    return 1 if report.failures else 0
