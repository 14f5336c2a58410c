"""`headrace top` in a terminal of the test's own: what it draws, what is typed, and how the terminal is afterwards."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WITHIN_S = 20.0
COMMAND = (sys.executable, "-m", "pipeline.cli", "top")
CONTROLLED = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""The terminal is the process's own: so that Ctrl-C becomes a signal, and a hang-up another."""

SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07)")


class Terminal:
    """One that is as wide and high as it is told. `xterm` without colours of its own: what ssh gives."""

    def __init__(self, config: Path, columns: int, rows: int) -> None:
        self._ours, self._its = pty.openpty()
        self.resize(columns, rows)
        self._before = termios.tcgetattr(self._its)
        self._written = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *COMMAND, "--interval", "0.5", "--config", str(config)],
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "", "LINES": ""},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for fd in (self._ours, self._its):
            if fd >= 0:
                os.close(fd)

    def resize(self, columns: int, rows: int) -> None:
        """Make its window so large."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        """As if somebody did."""
        self._written = ""
        os.write(self._ours, keys.encode())

    def until(self, there: str, columns: int = 0, absent: str = "\0") -> None:
        """Return when a frame shows it, within `columns` where given, and does not show `absent`."""
        deadline_s = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline_s:
            self._read()
            frame = self.frame
            narrow = not columns or all(len(line) <= columns for line in frame.splitlines())
            if there in frame and absent not in frame and narrow:
                return
        raise AssertionError(f"{there!r} was not shown:\n{self.frame}")

    @property
    def frame(self) -> str:
        """The last one that was drawn whole."""
        frames = self._written.split("\x1b[H")
        whole = [frame for frame in frames if "q quit" in frame]
        return SEQUENCE.sub("", whole[-1] if whole else self._written).replace("\r", "")

    @property
    def raw(self) -> bool:
        """Whether keys come without Enter, and unechoed."""
        return not termios.tcgetattr(self._its)[3] & (termios.ICANON | termios.ECHO)

    @property
    def restored(self) -> bool:
        """Whether it is as it was: its settings, its screen, its cursor."""
        self._read()
        settings: list[Any] = termios.tcgetattr(self._its)
        last = {mode: self._written.rfind(f"\x1b[?{mode}") for mode in ("1049h", "1049l", "25l", "25h")}
        return settings == self._before and last["1049l"] > last["1049h"] and last["25h"] > last["25l"]

    def end(self, by: str) -> None:
        """Let it end in one of three ways that are not its own."""
        if by == "ctrl-c":
            os.write(self._ours, b"\x03")
        elif by == "sigterm":
            self._process.send_signal(signal.SIGTERM)
        else:
            os.close(self._its)
            os.close(self._ours)
            self._ours = self._its = -1

    def left(self) -> int:
        """Its exit status."""
        deadline_s = time.monotonic() + WITHIN_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            self._read()
        return self._process.wait(timeout=1)

    def _read(self) -> None:
        if self._ours < 0:
            time.sleep(0.05)
            return
        while select.select([self._ours], [], [], 0.05)[0]:
            self._written += os.read(self._ours, 65_536).decode("utf-8", "replace")


def ran(config: Path, *arguments: str, lines: int) -> list[str]:
    """Its first lines, without a terminal."""
    with subprocess.Popen(
        [*COMMAND, *arguments, "--config", str(config)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGINT)
    return found
