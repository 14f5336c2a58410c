"""All quality gates, in order: `python -m tests`. Arguments go to pytest, which then runs once, as it is told.

Every gate runs, also after one that has failed, so that one run shows all there is to mend. pytest's closing line comes last.

Most tests wait more than they compute, so three processes of pytest share the cores; those with real engines need all of them,
and come after. A few tests that fail are run once more, alone: the machine may be busy with others' work. One that passes then
is no failure, but the summary names it, because it may be a race in our own.

Tests marked `system` need a program that pip does not bring. Where it is missing they are left out, and the summary says so.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.side_by_side import Group, Result, added, run_all

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
PYTEST = (*COVERAGE, "run", "-m", "pytest", *CHOICE)

ALONE = ("e2e", "benchmarks")
"""What needs all cores."""

TOGETHER = {
    "workers": ("workers", "simulation"),
    "gateway": ("gateway", "top", "telemetry", "monitoring", "clients", "browser", "chaos", "bus"),
}
"""The folders of two processes, of about as many minutes. A third has all others."""

AGAIN_MAX = 5
"""More failures than this are no accident."""


def say(text: str) -> None:
    """Show it at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def groups() -> tuple[list[Group], list[Group]]:
    """All tests: those that go side by side, and those that follow alone."""
    named = {*ALONE, *(folder for folders in TOGETHER.values() for folder in folders)}
    folders = sorted({test.relative_to(ROOT / "tests").parts[0] for test in (ROOT / "tests").rglob("test_*.py")})
    others = [name for name in folders if name not in named]
    together = {**TOGETHER, "others": tuple(others)}
    return [group(name, paths) for name, paths in together.items()], [group("engines", ALONE)]


def group(name: str, paths: tuple[str, ...], *more: str) -> Group:
    """One process of pytest. What failed in it is remembered apart from others'."""
    cache = f"cache_dir=.pytest_cache/{name}"
    return Group(name, (*PYTEST, "-o", cache, *more, *(f"tests/{path}" for path in paths)), paths)


def tested(arguments: list[str]) -> tuple[bool, str, list[str]]:
    """Whether all tests pass, pytest's closing line, and those that passed only when they were run again."""
    if arguments:
        result = run_all([Group("pytest", (*PYTEST, *arguments), ())], ROOT, say)[0]
        return result.status == 0, result.closing, []
    together, alone = groups()
    results = run_all(together, ROOT, say) + run_all(alone, ROOT, say)
    failed = [result for result in results if result.status != 0]
    names = [name for result in failed for name in result.failed]
    if not names or len(names) > AGAIN_MAX or not all(result.ran for result in failed):
        return not failed, added(results), []
    say(f"\n━━ {len(names)} failed, and are run again ━━\n")
    repeated = [run_all([again(result)], ROOT, say)[0] for result in failed]
    if any(result.status for result in repeated):
        return False, added(results), []
    return True, added(results, forgiven=True), names


def again(result: Result) -> Group:
    """Only what has failed."""
    return group(result.group.name, result.group.paths, "--last-failed", "--last-failed-no-failures", "none")


def main() -> int:
    """The exit status: 0 where every gate has passed."""
    passed: dict[str, tuple[bool, float]] = {}

    def gate(name: str, *commands: tuple[str, ...]) -> None:
        say(f"\n━━ {name} ━━\n")
        began_s = time.monotonic()
        failed = [subprocess.run(one, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode for one in commands]
        passed[name] = not any(failed), time.monotonic() - began_s

    for name, command in CHECKS.items():
        gate(name, command)
    subprocess.run((*COVERAGE, "erase"), cwd=ROOT, check=True)
    say("\n━━ pytest ━━\n")
    began_s = time.monotonic()
    good, closing, unsteady = tested(sys.argv[1:])
    passed["pytest"] = good, time.monotonic() - began_s
    gate("coverage", (*COVERAGE, "combine", "-q"), (*COVERAGE, "report"))
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
