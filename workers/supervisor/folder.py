"""The folder of a run, `<state_dir>/runs/<time>-<pid>`:

    logs/NAME.log     what each process writes
    nats/             the broker's files
    endpoints.json    URLs, process ids and log files; `<state_dir>/last.json` leads to the newest

The broker's files belong to a run. Requests that an earlier run left behind have nobody to answer to, and a fleet that started
with them would begin its life with work for the dead.
"""

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from pipeline.cli.client import LAST_RUN
from pipeline.errors import OperatorError

RUNS_KEPT: Final = 5
"""Newest run folders that stay: enough to compare, too few to fill a disk."""

TAIL_BYTES: Final = 16_384
"""Of a log, read for its last lines."""

NOTE_CHARACTERS_MAX: Final = 90
"""Of a log line on the screen."""

_PREFIX: Final = re.compile(
    r"^(\(\w+ pid=\d+\) ?)?((DEBUG|INFO|WARNING|ERROR)\b)?[\s\d:,.\-T]*(\[[^\]]*\])?\s*:?\s*(?=\S)"
)
"""What vLLM and LMCache put before a message."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def name_of(started: time.struct_time, pid: int) -> str:
    """A run's name: sorts by time, unique on this machine."""
    return f"{time.strftime('%Y%m%d-%H%M%S', started)}-{pid}"


def create(state: Path, run: str) -> Path:
    """The folder of a new run, older ones pruned. Raises `OperatorError` where it cannot be written."""
    folder = state / "runs" / run
    try:
        (folder / "logs").mkdir(parents=True)
        for old in prunable([entry.name for entry in (state / "runs").iterdir()], RUNS_KEPT):
            shutil.rmtree(state / "runs" / old, ignore_errors=True)
    except OSError as error:
        raise OperatorError(
            f"Cannot write {folder}: {error.strerror}.", "Set up.state_dir to a writable folder."
        ) from None
    return folder


def prunable(runs: Sequence[str], keep: int) -> list[str]:
    """Those of `runs` that are neither among the `keep` newest nor still running."""
    return [run for run in sorted(runs)[:-keep] if not runs_still(run)]


def runs_still(run: str) -> bool:
    """Whether the process lives that a run, or a file named after it, belongs to."""
    pid = run.rpartition("-")[2]
    return pid.isdigit() and psutil.pid_exists(int(pid))


def remove_stale(segment: Path) -> None:
    """Remove what runs that were killed have left of `segment`, a file that each run names `<segment>-<run>`."""
    for stale in segment.parent.glob(f"{segment.name}-*"):
        if not runs_still(stale.name):
            stale.unlink(missing_ok=True)


def write_endpoints(folder: Path, endpoints: Mapping[str, Any]) -> None:
    """Replace `endpoints.json`, and let `last.json` lead to it. Readers see the old or the new, never half."""
    target = folder / "endpoints.json"
    _replace(target, msgspec.json.format(msgspec.json.encode(endpoints), indent=2))
    link = folder.parent.parent / LAST_RUN
    fresh = link.with_name(f".{LAST_RUN}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.relative_to(link.parent))
    fresh.replace(link)


def _replace(target: Path, content: bytes) -> None:
    fresh = target.with_suffix(".tmp")
    fresh.write_bytes(content + b"\n")
    fresh.replace(target)


def tail(log: Path, offset: int, lines: int) -> list[str]:
    """The last lines of a log, of what was written from `offset` on."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def note(lines: Sequence[str]) -> str:
    """The last of some log lines as a remark on the screen: without time, level and place, and short."""
    line = _message(lines[-1]) if lines else ""
    return line if len(line) <= NOTE_CHARACTERS_MAX else line[: NOTE_CHARACTERS_MAX - 1] + "…"


def _message(line: str) -> str:
    if line.startswith("{"):
        try:
            return str(msgspec.json.decode(line)["event"]).replace("_", " ")
        except (msgspec.DecodeError, KeyError, TypeError):
            return line
    return _PREFIX.sub("", _COLOUR.sub("", line)).strip()
