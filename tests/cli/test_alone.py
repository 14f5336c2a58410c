"""Each process runs alone: a broker, and four commands in four terminals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.cli import OPERATOR_EXIT
from tests.nats_server import NatsServer
from tests.ports import free_port

READY_S = 30.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", *arguments]


def run(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def running(environment: dict[str, str], log: Path, *arguments: str) -> Iterator[None]:
    """A command that runs until the block ends, and then ends well by SIGTERM."""
    with (
        log.open("w") as out,
        subprocess.Popen(command(*arguments), env=environment, stdout=out, stderr=out) as process,
    ):
        try:
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, log.read_text()
        finally:
            process.kill()


def until_served(environment: dict[str, str], url: str) -> "subprocess.CompletedProcess[str]":
    """The first chat that is answered."""
    deadline_s = time.monotonic() + READY_S
    while True:
        done = run(environment, "chat", "Hello?", "--creator", "ada", "--max-tokens", "4", "--url", url)
        if done.returncode == 0 or time.monotonic() > deadline_s:
            return done


def test_a_fleet_is_four_commands(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()
    environment = {**os.environ, "HEADRACE__NATS__URL": server.url, "HEADRACE__ENGINE": "simulated"}
    port = str(free_port())
    try:
        refused = run(environment, "worker", "prefill", "--id", "prefill-1")
        assert (refused.returncode, "headrace streams apply" in refused.stderr) == (OPERATOR_EXIT, True)
        assert run(environment, "streams", "diff").returncode == 1
        assert "REQUESTS_interactive created" in run(environment, "streams", "apply").stdout
        assert run(environment, "streams", "diff").returncode == 0
        with (
            running(environment, tmp_path / "gateway.log", "gateway", "--port", port),
            running(environment, tmp_path / "decode.log", "worker", "decode"),
            running(environment, tmp_path / "prefill.log", "worker", "prefill", "--id", "prefill-1"),
        ):
            done = until_served(environment, f"http://127.0.0.1:{port}")
            assert done.returncode == 0, done.stderr
            assert "prefill-1 → decode-" in done.stderr
    finally:
        server.stop()
