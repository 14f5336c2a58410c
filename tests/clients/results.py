"""What a run has shown: for people as a table, for programs as JSON, and to be kept in `results/`."""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from pipeline.cli.tables import table
from tests.clients.client import Check, Load
from tests.clients.compare import TOLERANCE, Row

RESULTS: Final = Path(__file__).parent / "results"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One client. `failed` says why there is nothing to compare. `made_by` is our command, `command` the client's own."""

    client: str
    version: str = ""
    made_by: str
    command: str = ""
    load: Load
    stack: str
    machine: dict[str, Any]
    date: str
    tolerance: float = TOLERANCE
    rows: list[Row] = []
    checks: list[Check] = []
    own: dict[str, Any] = {}
    """The client's own words."""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """It ran, and all that is judged agrees."""
        return not self.failed and all(row.ok for row in self.rows) and all(check.ok for check in self.checks)


def machine() -> dict[str, Any]:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "load_average_before": round(os.getloadavg()[0], 1),
    }


def today() -> str:
    """The date, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def keep(result: Result, folder: Path) -> None:
    """Write it, in place of the former one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.client}.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def text(results: Sequence[Result]) -> str:
    """All figures of all clients. A tilde marks what is told and not judged."""
    head = ("CLIENT", "WHAT", "CLIENT SAYS", "HEADRACE SAYS", "OFF", "")
    lines = [
        (result.client, row.what, f"{row.client:,.10g}", f"{row.headrace:,.10g}", f"{row.off:.2%}", _mark(row))
        for result in results
        for row in result.rows
    ]
    said = [table(head, lines)] if lines else []
    said += [
        f"{result.client}: {check.what}: {check.seen} {'ok' if check.ok else 'NO'}"
        for result in results
        for check in result.checks
    ]
    said += [f"{result.client} FAILED: {result.failed}" for result in results if result.failed]
    return "\n".join(said)


def _mark(row: Row) -> str:
    return "~" if not row.judged else "ok" if row.ok else "NO"
