"""A real redis-server for tests, in memory only. Debian has it: `apt-get install redis-server`, which `.ci/run` does."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.ports import free_port

READY_S: Final = 10.0


class RedisServer:
    """One server on loopback."""

    def __init__(self, port: int) -> None:
        self.port = port

    def keys(self) -> int:
        """How many it holds. Raises `OSError` where it does not answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=2) as line:
            line.sendall(b"DBSIZE\r\n")
            return int(line.makefile("rb").readline().removeprefix(b":"))


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """It runs, and answers. Nothing of it is left afterwards."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    assert binary, "this test needs redis-server: apt-get install redis-server"
    server = RedisServer(free_port())
    command = [binary, "--port", str(server.port), "--bind", "127.0.0.1", "--dir", str(folder)]
    with (folder / "redis.log").open("w") as log:
        process = subprocess.Popen([*command, "--save", "", "--appendonly", "no"], stdout=log, stderr=log)
        try:
            _await_answer(server, process, folder / "redis.log")
            yield server
        finally:
            process.terminate()
            process.wait(10)


def _await_answer(server: RedisServer, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + READY_S
    while True:
        assert process.poll() is None, f"redis-server ended:\n{log.read_text('utf-8')}"
        assert time.monotonic() < until_s, f"redis-server does not answer after {READY_S:g} s"
        with contextlib.suppress(OSError, ValueError):
            server.keys()
            return
        time.sleep(0.02)
