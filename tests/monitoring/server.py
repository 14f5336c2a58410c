"""A real Prometheus on loopback. Debian has it: `apt-get install prometheus`, which `.ci/run` does."""

import contextlib
import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.monitoring.queries import PROMETHEUS, RULES
from tests.ports import free_port

READY_S: Final = 30.0

RATE_INTERVAL: Final = "1m"
"""What Grafana would put for `$__rate_interval`."""


def program(name: str) -> str:
    """Where it is."""
    found = shutil.which(name)
    assert found, f"this test needs {name}: apt-get install prometheus"
    return found


class Prometheus:
    """One server that scrapes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def answers(self, expr: str) -> bool:
        """Whether the query has an answer with a number in it."""
        found = self.get("query", query=expr.replace("$__rate_interval", RATE_INTERVAL))["result"]
        return any(not math.isnan(float(series["value"][1])) for series in found)

    def get(self, what: str, **asked: str) -> Any:
        """What its API says. Raises `OSError` for what it does not understand."""
        query = urllib.parse.urlencode(asked)
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{query}", timeout=20) as answer:
            return json.load(answer)["data"]


@contextlib.contextmanager
def scraping(folder: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """A server with the project's own configuration and rules, but for its targets: for each job some `host:port`."""
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(_configured(targets)), "utf-8")
    where = ("--config.file", str(config), "--storage.tsdb.path", str(folder / "data"))
    command = (program("prometheus"), *where, "--web.listen-address", f"127.0.0.1:{port}", "--log.level", "warn")
    log = folder / "prometheus.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            _await_ready(f"http://127.0.0.1:{port}", process, log)
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _configured(targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(PROMETHEUS.read_text("utf-8"))
    tree["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    tree["rule_files"] = [str(RULES)]
    for job in tree["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    return tree


def _await_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until_s = time.monotonic() + READY_S
    while True:
        assert process.poll() is None, f"prometheus ended:\n{log.read_text('utf-8')}"
        assert time.monotonic() < until_s, f"prometheus is not ready after {READY_S:g} s:\n{log.read_text('utf-8')}"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return
        time.sleep(0.05)
