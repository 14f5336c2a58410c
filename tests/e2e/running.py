"""The whole stack as `headrace up` runs it, and what a test may do to it."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.bus.puller import EXPIRES_S
from pipeline.limits import PRESENCE_SILENT_MAX_S

ROOT = Path(__file__).parents[2]
READY_S = 240.0
PREFILL_WORKERS = 2
FORGOTTEN_S = PRESENCE_SILENT_MAX_S + 2 * EXPIRES_S
"""What is left of a killed worker: its presence, and pulls of the ranks in which it lived."""


class Running(msgspec.Struct):
    """The running stack, by its `endpoints.json`."""

    process: subprocess.Popen[bytes]
    endpoints: Path
    gateway: str
    nats: str
    metrics: dict[str, str]
    pids_when_whole: list[int] = []

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [part["pid"] for part in json.loads(self.endpoints.read_text())["processes"]]

    def run(self, *arguments: str) -> str:
        """A command of `headrace` against this stack; what it prints."""
        command = [sys.executable, "-m", "pipeline.cli", *arguments, "--url", self.gateway]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=240).stdout

    def metric(self, process: str, name: str) -> float:
        """One metric of a worker, named with its labels as the worker prints them."""
        with urllib.request.urlopen(self.metrics[process], timeout=5) as answer:
            found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, f"{process} does not say {name}"
        return float(found[1])

    def await_metric(self, process: str, name: str, holds: Callable[[float], bool], within_s: float) -> None:
        """Return when this holds of a metric."""
        deadline = time.monotonic() + within_s
        while not holds(value := self.metric(process, name)):
            assert time.monotonic() < deadline, f"{process} still says {name} {value:g} after {within_s} s"
            time.sleep(0.05)  # between two looks; nothing tells us

    def owner(self, creator: str) -> str:
        """The prefill worker that a creator's requests go to."""
        with urllib.request.urlopen(f"{self.gateway}/v1/routes/{creator}", timeout=5) as answer:
            return str(json.load(answer)["ways"][0]["workers"][0]["worker"])

    def kill(self, name: str) -> None:
        """SIGKILL to a process of the stack and to all that it has started."""
        os.killpg(self.pid(name), signal.SIGKILL)

    def await_another(self, name: str, than: int) -> None:
        """Return when the supervisor has started another one in its place."""
        deadline = time.monotonic() + READY_S
        while self.pid(name) == than:
            assert time.monotonic() < deadline, f"no new {name} within {READY_S} s"
            time.sleep(0.1)  # between two looks; nothing tells us

    def await_whole(self) -> None:
        """Return when all workers serve, and those that earlier tests have killed are forgotten."""
        if self.pids == self.pids_when_whole:
            return
        deadline = time.monotonic() + READY_S
        whole_since = math.inf
        while time.monotonic() < whole_since + FORGOTTEN_S:
            whole_since = min(whole_since, time.monotonic()) if self._all_serve() else math.inf
            assert time.monotonic() < deadline, f"not all workers serve within {READY_S} s"
            time.sleep(0.1)  # between two looks; nothing tells us
        self.pids_when_whole = self.pids

    def _all_serve(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.gateway}/ready", timeout=5) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError:
            return False
        return (said["prefill"], said["decode"]) == (PREFILL_WORKERS, 1)

    def pid(self, name: str) -> int:
        """Of a process of the stack."""
        said: dict[str, Any] = json.loads(self.endpoints.read_text())
        return int(next(part["pid"] for part in said["processes"] if part["name"] == name))


def await_ready(process: subprocess.Popen[bytes], endpoints: Path, log: Path) -> Running:
    """The stack, once it says that it is ready."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"headrace up ended: {log.read_text()[-3000:]}"
        if "Ready at" in log.read_text():
            said = json.loads(endpoints.read_text())
            parts = said["processes"]
            return Running(
                process=process,
                endpoints=endpoints,
                gateway=said["gateway"],
                nats=said["nats"],
                metrics={part["name"]: part["metrics"] for part in parts if part["metrics"]},
            )
        time.sleep(0.2)  # between two looks; nothing tells us
    raise AssertionError(f"not ready within {READY_S} s: {log.read_text()[-3000:]}")
