"""All quality gates, in order: `python -m tests`. Arguments go to pytest.

Every gate runs, also after one that has failed, so that one run shows all there is to mend. pytest's closing line comes last.

Tests marked `system` need a program that pip does not bring. Where it is missing they are left out, and the summary says so.
"""

import shutil
import subprocess
import sys
import time
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

GATES: dict[str, tuple[str, ...]] = {
    "ruff check": (*PYTHON, "ruff", "check"),
    "ruff format": (*PYTHON, "ruff", "format", "--check"),
    "mypy": (*PYTHON, "mypy"),
    "lint-imports": (str(Path(sys.executable).with_name("lint-imports")),),
    "pytest": (*PYTHON, "coverage", "run", "-m", "pytest", *CHOICE, *sys.argv[1:]),
    "coverage": (*PYTHON, "coverage", "report"),
}


def say(text: str) -> None:
    """Show it at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def run(command: tuple[str, ...]) -> tuple[int, str]:
    """Run one gate, its output shown as it comes; exit status and last line."""
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as gate:
        assert gate.stdout
        for line in gate.stdout:
            say(line)
            last = line.strip() or last
    return gate.returncode, last


def main() -> int:
    """The exit status: 0 where every gate has passed."""
    results: dict[str, tuple[int, str, float]] = {}
    for name, command in GATES.items():
        say(f"\n━━ {name} ━━\n")
        began_s = time.monotonic()
        status, last = run(command)
        results[name] = (status, last, time.monotonic() - began_s)
    say("\n━━ summary ━━\n")
    for name, (status, _, took_s) in results.items():
        say(f"{'passed' if status == 0 else 'FAILED':7} {name:13} {took_s:6.1f} s\n")
    if CHOICE:
        say(LEFT_OUT + "\n")
    say(results["pytest"][1] + "\n")
    return 0 if all(status == 0 for status, _, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
