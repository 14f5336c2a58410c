"""The terminal: keys without Enter, a screen of our own, and everything as it was when we leave, however we do."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.live import Live

from pipeline.errors import OperatorError
from pipeline.top.frames import frame, lines_of
from pipeline.top.gather import Watch
from pipeline.top.keys import State, keys, pressed, within
from pipeline.top.sheets import VIEWS
from pipeline.top.snapshot import Snapshot

READ_BYTES: Final = 256
LEAVE: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_terminal(console: Console) -> None:
    """Raises `OperatorError` where nothing can be drawn, or no key be heard."""
    if not (sys.stdin.isatty() and console.is_terminal) or console.is_dumb_terminal:
        raise OperatorError(
            "headrace top draws on a terminal, and this is none.", "Give --once for one page, or --json for programs."
        )


class Screen:
    """Shows snapshots until `q`."""

    def __init__(self, console: Console, watch: Watch, interval_s: float) -> None:
        self._console = console
        self._watch = watch
        self._state = State(interval_s=interval_s)
        self._now: Snapshot | None = None
        self._seen = -1
        """The view that was looked for last: another one is, even during a pause."""
        self._pending = b""
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._live = Live(console=console, screen=True, auto_refresh=False)

    async def run(self) -> None:
        """Draw, look, and draw again."""
        with _keys_without_enter(sys.stdin.fileno()), self._shown(), self._hearing(sys.stdin.fileno()):
            self._draw()
            looking = asyncio.ensure_future(self._look())
            over = asyncio.ensure_future(self._over.wait())
            await asyncio.wait({looking, over}, return_when=asyncio.FIRST_COMPLETED)
            looking.cancel()
            over.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking  # raises what has ended it

    async def _look(self) -> None:
        while True:
            self._wake.clear()
            if not self._state.paused or self._seen != self._state.view:
                self._seen = self._state.view
                self._now = await self._watch.look(VIEWS[self._state.view].parts)
                self._state = within(self._state, lines_of(self._now, self._state))
                self._draw()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._state.interval_s):
                    await self._wake.wait()

    def _draw(self) -> None:
        width, height = self._console.size
        try:
            self._live.update(frame(self._now, self._state, width, height), refresh=True)
        except OSError:  # the terminal has gone
            self._over.set()

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """On a screen of our own."""
        self._live.start()
        try:
            yield
        finally:
            try:
                self._live.stop()
            except OSError:  # the terminal has gone, and what is still to be written to it should go nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._console.file.fileno())

    def _typed(self, fd: int) -> None:
        try:
            read = os.read(fd, READ_BYTES)
        except OSError:
            read = b""
        if not read:  # hung up
            self._over.set()
            return
        found, self._pending = keys(self._pending + read)
        before = self._state
        for key in found:
            self._state = pressed(self._state, key, lines_of(self._now, self._state))
        if self._state.over:
            self._over.set()
        if (before.view, before.interval_s, before.paused) != (
            self._state.view,
            self._state.interval_s,
            self._state.paused,
        ):
            self._wake.set()
        self._draw()

    @contextlib.contextmanager
    def _hearing(self, fd: int) -> Iterator[None]:
        """Keys, signals and a window that changes its size."""
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], None]] = {signal.SIGWINCH: self._draw, **dict.fromkeys(LEAVE, self._over.set)}
        loop.add_reader(fd, self._typed, fd)
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            loop.remove_reader(fd)
            for number in handlers:
                loop.remove_signal_handler(number)


@contextlib.contextmanager
def _keys_without_enter(fd: int) -> Iterator[None]:
    """Unechoed, as they come. Not Ctrl-Z: a shell that came back on our screen would be unreadable."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    changed = termios.tcgetattr(fd)
    changed[6][termios.VSUSP] = b"\x00"
    termios.tcsetattr(fd, termios.TCSANOW, changed)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # it has gone, and nobody sees it
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
