"""`headrace record`: a trace of live traffic, for `headrace bench --trace` and whatever else reads Mooncake's format.

It holds times, lengths and which prefixes were shared, and no text: see `pipeline/protocol/traces.py`.
"""

import asyncio
import contextlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from pipeline.cli.listening import listening
from pipeline.cli.options import ConfigOption, configuration
from pipeline.errors import OperatorError

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus, Message
    from pipeline.config import Config
    from pipeline.protocol.presence import Presences
    from pipeline.protocol.traces import Line

LAST_S: Final = 0.3
"""A reply that its client has seen end is told within this time."""

SHOW_PERIOD_S: Final = 0.5
"""On a terminal the count is shown this often."""


def record(
    *,
    to: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="End after so many requests.", show_default=False)
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", min=1.0, help="End after so many seconds.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file, if there is one.")] = False,
    config: ConfigOption = None,
) -> None:
    """Record a trace of live traffic: times, lengths and shared prefixes, but no text.

    One line per reply that a decode worker has ended, whole or given up by its client, in Mooncake's format (JSON lines).
    Requests that were refused, or are still running at the end, are not in it. Ends with Ctrl-C.

    Example: headrace record traffic.jsonl --duration 600

    Example: headrace bench --trace traffic.jsonl --speed 2
    """
    if to.exists() and not force:
        raise OperatorError(f"{to} is there already.", "Give another name, or --force.")
    sink = asyncio.run(_record(configuration(config), lambda: Sink(_opened(to), count), duration))
    begin = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{begin}{sink.written} requests in {to}", file=sys.stderr)


def _opened(to: Path) -> IO[bytes]:
    try:
        return to.open("wb")
    except OSError as error:
        raise OperatorError(f"Cannot write {to}: {error.strerror}.", "Give another name.") from None


class Sink:
    """Writes lines as they come, up to `count` of them."""

    def __init__(self, file: IO[bytes], count: int | None) -> None:
        from pipeline.protocol.traces import Recording

        self.over = asyncio.Event()
        self.heard = 0
        self.written = 0
        self._file, self._count = file, count
        self._recording = Recording()
        self._encode = msgspec.json.Encoder().encode

    def take(self, message: "Message") -> None:
        """A worker says what it has served."""
        from pipeline.protocol.traces import traced_decoder

        if self.heard == self._count:
            return
        self.heard += 1
        self._write(self._recording.add(traced_decoder.decode(message.data)))
        if self.heard == self._count:
            self.over.set()

    def finish(self) -> None:
        """Write what was held for its turn."""
        self._write(self._recording.rest())
        self._file.close()

    def _write(self, lines: "list[Line]") -> None:
        for line in lines:
            self._file.write(self._encode(line) + b"\n")
        self.written += len(lines)


async def _record(config: "Config", make_sink: Callable[[], Sink], duration_s: float | None) -> Sink:
    """Ask, write, until it is enough. The file is made once there is a broker."""
    from pipeline.bus.background import Background
    from pipeline.protocol import subjects

    async with listening(config, "headrace-record") as (bus, presences):
        sink, recorder = make_sink(), secrets.token_hex(8)
        await bus.subscribe(subjects.trace_record(recorder), sink.take)
        await bus.barrier()
        beside = [
            Background(_keep_asking(bus, recorder), "asking workers for records"),
            Background(_show(sink, presences), "showing how many came"),
        ]
        try:
            with _signals(sink.over):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(duration_s):
                        await sink.over.wait()
                await asyncio.sleep(LAST_S)
        finally:
            for task in beside:
                await task.stop()
            sink.finish()
    return sink


async def _keep_asking(bus: "Bus", recorder: str) -> None:
    """Workers that come later hear it, too, and all of them forget us soon after we have gone."""
    from pipeline.bus.errors import BusError
    from pipeline.limits import RECORDER_PERIOD_S
    from pipeline.protocol import subjects
    from pipeline.protocol.messages import encode
    from pipeline.protocol.traces import SECRET_BYTES, TraceWanted

    wanted = encode(TraceWanted(recorder=recorder, secret=secrets.token_bytes(SECRET_BYTES)))
    while True:
        with contextlib.suppress(BusError):
            await bus.publish(subjects.trace_ask(), wanted)
        await asyncio.sleep(RECORDER_PERIOD_S)


async def _show(sink: Sink, presences: "Presences") -> None:
    """Say that it records, and whom; on a terminal, how much."""
    from pipeline import outside

    workers = [peer.id for peer in presences.live("decode", outside.monotonic_s())]
    said = f"recording {', '.join(workers)}" if workers else "no decode worker lives; recording whoever comes"
    print(f"{said}; Ctrl-C ends it", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    while sys.stderr.isatty():
        print(
            f"\r\033[K{time.monotonic() - began_s:.0f} s · {sink.heard} requests ", end="", file=sys.stderr, flush=True
        )
        await asyncio.sleep(SHOW_PERIOD_S)


@contextlib.contextmanager
def _signals(over: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM end the recording, where they can be heard."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, over.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
