"""Several processes of pytest at a time, and what they say as one.

A line of progress is shown as it comes. What else a process says, failures above all, is shown when it has ended, in one piece.
"""

import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROGRESS: Final = re.compile(r"\[ *\d+%\]$")
_CLOSING: Final = re.compile(r"^=+ (?P<counts>.*) in (?P<seconds>[\d.]+)s\b.* ?=+$")
_COUNT: Final = re.compile(r"(\d+) (\w+)")
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (?P<name>tests/\S+?\.py(?:::[^\s\[]+(?:\[.*?\](?= - |$))?)?)(?: - |$)")


@dataclass(frozen=True)
class Group:
    """Tests for one process: its command, and the folders that it is told."""

    name: str
    command: tuple[str, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """How a process has ended: its exit status, its last line, and the tests that have failed."""

    group: Group
    status: int
    closing: str
    failed: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        """What its closing line counts, by outcome."""
        match = _CLOSING.match(self.closing)
        found = _COUNT.findall(match["counts"]) if match else []
        return Counter({_SINGULAR.get(outcome, outcome): int(number) for number, outcome in found})

    @property
    def ran(self) -> bool:
        """Whether all its tests were run to their end, and those that failed are known by name."""
        return self.status in (0, 1) and len(self.failed) == self.counts["failed"] + self.counts["error"]

    @property
    def seconds(self) -> float:
        """As its closing line says."""
        match = _CLOSING.match(self.closing)
        return float(match["seconds"]) if match else 0.0


_SINGULAR: Final = {"errors": "error", "warnings": "warning"}


def run_all(groups: Sequence[Group], root: Path, say: Callable[[str], None]) -> list[Result]:
    """Run all of them at once, in `root`."""
    results: dict[str, Result] = {}
    threads = [threading.Thread(target=_run, args=(group, root, say, results)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[group.name] for group in groups]


def added(results: Sequence[Result], *, forgiven: bool = False) -> str:
    """One closing line for all. `forgiven`: what failed has passed since."""
    counts = sum((result.counts for result in results), Counter[str]())
    if forgiven:
        counts["passed"] += counts.pop("failed", 0) + counts.pop("error", 0)
    unread = sum(not result.counts for result in results)
    told = [f"{number} {outcome}" for outcome, number in sorted(counts.items()) if number]
    if unread:
        told.append(f"{unread} without a result")
    return f"===== {', '.join(told)} in {sum(result.seconds for result in results):.2f}s ====="


def _run(group: Group, root: Path, say: Callable[[str], None], results: dict[str, Result]) -> None:
    lines: list[str] = []
    with subprocess.Popen(
        group.command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            if _PROGRESS.search(line.rstrip()):
                say(line)
            else:
                lines.append(line)
    said = [line.strip() for line in lines if line.strip()]
    failed = tuple(match["name"] for line in said if (match := _FAILED.match(line)))
    results[group.name] = Result(group, process.returncode, said[-1] if said else "", failed)
    say(f"\n━━ {group.name} ━━\n{''.join(lines)}")
