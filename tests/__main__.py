"""All quality gates, in order: `python -m tests`. Arguments go to pytest, which then runs once, as it is told.

Every gate runs, also after one that has failed, so that one run shows all there is to mend. pytest's closing line comes last.

Most tests wait more than they compute, so three processes of pytest (pytest-xdist's) share the cores; those with real engines
need all of them, and come after. A few tests that fail are run once more, alone: the machine may be busy with others' work. One
that passes then is no failure, but the summary names it, because it may be a race in our own.

Tests marked `system` need a program that pip does not bring. Where it is missing they are left out, and the summary says so.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

PYTHON = (sys.executable, "-m")

PROGRAMS = {
    "chromium": "chromium",
    "prometheus": "prometheus",
    "redis-server": "redis-server",
    "systemd-analyze": "systemd",
}
"""What tests marked `system` need, and Debian's package that has it."""

MISSING = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]

CHOICE: tuple[str, ...] = ("-m", "not system") if MISSING else ()
"""The tests that this machine can run. pytest alone, and `.ci/run`, which installs what they need, leave none out."""

LEFT_OUT = f"""
LEFT OUT  the tests marked `system`: the page at / in a real browser, KV across hosts, systemd's units, dashboards.
          To have them: apt-get install -y {" ".join(MISSING)}, and run this again.
"""

CHECKS: dict[str, tuple[str, ...]] = {
    "ruff check": (*PYTHON, "ruff", "check"),
    "ruff format": (*PYTHON, "ruff", "format", "--check"),
    "mypy": (*PYTHON, "mypy"),
    "lint-imports": (str(Path(sys.executable).with_name("lint-imports")),),
}

COVERAGE = (*PYTHON, "coverage")
PYTEST = (*PYTHON, "pytest", *CHOICE, "--cov", "--cov-append", "--cov-report=", "--cov-fail-under=0")

ALONE = ("tests/e2e", "tests/benchmarks")
"""What needs all cores."""

TOGETHER = ("-n3", "--dist=loadfile", "--no-loadscope-reorder", "--max-worker-restart=0")
"""The tests of a file share brokers. What a process that crashes still had to run is not run."""

CRASHED = "crashed and worker restarting disabled"
"""What pytest-xdist says then, while it counts one test as failed."""

FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"

AGAIN_MAX = 5
"""More failures than this are no accident."""

_CLOSING = re.compile(r"^=+ (?P<counts>.*) in (?P<seconds>[\d.]+)s\b.* ?=+$")
_COUNT = re.compile(r"(\d+) (\w+)")


@dataclass(frozen=True)
class Ran:
    """One run of pytest: its exit status, its closing line, and whether a process of it crashed."""

    status: int
    closing: str
    crashed: bool

    @property
    def whole(self) -> bool:
        """Whether every test was run."""
        return self.status in (0, 1) and not self.crashed

    @property
    def counts(self) -> Counter[str]:
        """What its closing line counts, by outcome."""
        match = _CLOSING.match(self.closing)
        found = _COUNT.findall(match["counts"]) if match else []
        return Counter({outcome.replace("errors", "error"): int(number) for number, outcome in found})

    @property
    def seconds(self) -> float:
        """As its closing line says."""
        match = _CLOSING.match(self.closing)
        return float(match["seconds"]) if match else 0.0


def say(text: str) -> None:
    """Show it at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def pytest(*arguments: str) -> Ran:
    """Run it, and show what it says."""
    closing, crashed = "", False
    with subprocess.Popen(
        (*PYTEST, *arguments),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            say(line)
            closing = line.strip() or closing
            crashed = crashed or CRASHED in line
    return Ran(process.returncode, closing, crashed)


def added(ran: list[Ran], *, forgiven: bool = False) -> str:
    """One closing line for all. `forgiven`: what failed has passed since."""
    counts = sum((run.counts for run in ran), Counter[str]())
    if forgiven:
        counts["passed"] += counts.pop("failed", 0) + counts.pop("error", 0)
    unread = sum(not run.counts for run in ran)
    told = [f"{number} {outcome}" for outcome, number in sorted(counts.items()) if number]
    if unread:
        told.append(f"{unread} without a result")
    return f"===== {', '.join(told)} in {sum(run.seconds for run in ran):.2f}s ====="


def tested(arguments: list[str]) -> tuple[bool, str, list[str]]:
    """Whether all tests pass, pytest's closing line, and those that passed only when they were run again."""
    if arguments:
        once = pytest(*arguments)
        return once.status == 0, once.closing, []
    apart = tuple(f"--ignore={folder}" for folder in ALONE)
    ran = [pytest("--cache-clear", *TOGETHER, *apart), pytest(*ALONE)]
    names = failed()
    if not 0 < len(names) <= AGAIN_MAX or not all(run.whole for run in ran) or not all("::" in name for name in names):
        return all(run.status == 0 for run in ran), added(ran), []
    say(f"\n━━ {len(names)} failed, and are run again ━━\n")
    if pytest("--last-failed").status != 0:
        return False, added(ran), []
    return True, added(ran, forgiven=True), names


def failed() -> list[str]:
    """What has failed, as pytest remembers it: tests, and files that could not be read."""
    return sorted(json.loads(FAILED.read_text("utf-8"))) if FAILED.exists() else []


def main() -> int:
    """The exit status: 0 where every gate has passed."""
    passed: dict[str, tuple[bool, float]] = {}

    def gate(name: str, command: tuple[str, ...]) -> None:
        say(f"\n━━ {name} ━━\n")
        began_s = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
        passed[name] = status == 0, time.monotonic() - began_s

    for name, command in CHECKS.items():
        gate(name, command)
    subprocess.run((*COVERAGE, "erase"), cwd=ROOT, check=True)
    say("\n━━ pytest ━━\n")
    began_s = time.monotonic()
    good, closing, unsteady = tested(sys.argv[1:])
    passed["pytest"] = good, time.monotonic() - began_s
    gate("coverage", (*COVERAGE, "report"))
    say("\n━━ summary ━━\n")
    for name, (well, took_s) in passed.items():
        say(f"{'passed' if well else 'FAILED':7} {name:13} {took_s:6.1f} s\n")
    for name in unsteady:
        say(f"UNSTEADY {name}: failed, and passed when it was run again alone\n")
    if CHOICE:
        say(LEFT_OUT + "\n")
    say(closing + "\n")
    return 0 if all(well for well, _ in passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
