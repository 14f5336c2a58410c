"""What the user sees of a stack that starts, lives and ends.

In a terminal: a table that changes in place until the stack is ready. Elsewhere: one line when something changes, and now and
then what is still waited for. Either on stderr; what the user asked for (URL, reply) goes to stdout.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, Literal

import msgspec
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

State = Literal["waiting", "starting", "ready", "failed", "stopping", "ended"]

MARKS: Final[dict[State, str]] = {"waiting": "·", "ready": "✓", "failed": "✗", "ended": "·"}

PLAIN_PERIOD_S: Final = 5.0
"""Between two lines about what is waited for, where lines cannot change in place."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One unit: its state, since when (monotonic), how long its start took, and a remark."""

    name: str
    state: State
    since_s: float
    start_s: float | None = None
    remark: str = ""


class _Console(Console):
    """A reader that has gone (`| head`, a closed terminal) is no reason to end, least of all in the middle of a drain."""

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)


class Screen:
    """The rows of all units, drawn on every `tick` while the stack starts."""

    def __init__(self, err: Console | None = None, out: Console | None = None) -> None:
        self._err = err or _Console(stderr=True, highlight=False)
        self._out = out or _Console(highlight=False)
        self._rows: dict[str, Row] = {}
        self._started_s = time.monotonic()
        self._told_s = self._started_s
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def expect(self, names: Iterable[str]) -> None:
        """These units will start."""
        self._rows = {name: Row(name=name, state="waiting", since_s=self._started_s) for name in names}
        if self._err.is_terminal:
            self._live = Live(console=self._err, auto_refresh=False, transient=False)  # its thread would break forks
            self._live.start()

    def show(self, name: str, state: State, remark: str = "") -> None:
        """A unit has changed."""
        now_s, row = time.monotonic(), self._rows[name]
        start_s = now_s - row.since_s if row.state == "starting" and state == "ready" else None
        self._rows[name] = Row(name=name, state=state, since_s=now_s, start_s=start_s, remark=remark)
        if self._live is None and (state != "starting" or remark):
            self.tell(" ".join(filter(None, (name, state, remark))))

    def remark(self, name: str, remark: str) -> None:
        """What a starting unit does at the moment."""
        if remark:
            self._rows[name] = msgspec.structs.replace(self._rows[name], remark=remark)

    def tick(self) -> None:
        """Draw, or say now and then what is waited for."""
        now_s = time.monotonic()
        if self._live:
            self._live.update(self._table(now_s), refresh=True)
        elif now_s - self._told_s >= PLAIN_PERIOD_S and (line := waiting_line(self._rows.values(), now_s)):
            self.tell(line)

    def settle(self) -> None:
        """The start is over, well or not: what is drawn stays, and lines follow."""
        if self._live:
            live, self._live = self._live, None
            with suppress(OSError):
                live.update(self._table(time.monotonic()), refresh=True)
                live.stop()

    def tell(self, line: str) -> None:
        """One line, with the seconds since the beginning."""
        self._told_s = time.monotonic()
        self._err.print(Text(f"[{self._told_s - self._started_s:6.1f} s] {line}"), soft_wrap=True)

    def quote(self, lines: Iterable[str]) -> None:
        """Lines of a log."""
        for line in lines:
            self._err.print(Text(f"    {line}", style="dim"), soft_wrap=True)

    def answer(self, text: str) -> None:
        """What the user asked for, on stdout."""
        self._out.print(Text(text), soft_wrap=True)

    def piece(self, text: str) -> None:
        """A piece of a reply, on stdout, at once."""
        with suppress(OSError):
            self._out.file.write(text)
            self._out.file.flush()

    def _table(self, now_s: float) -> Table:
        table = Table.grid(padding=(0, 1))
        for row in self._rows.values():
            mark = MARKS.get(row.state)
            table.add_row(
                Text(mark, style=_style(row.state)) if mark else self._spinner.render(now_s),
                row.name,
                Text(_time(row, now_s), justify="right", style="dim"),
                Text(
                    "" if row.state == "ready" else row.remark or row.state,
                    style="dim",
                    overflow="ellipsis",
                    no_wrap=True,
                ),
            )
        return table


def _style(state: State) -> str:
    return {"ready": "green", "failed": "red"}.get(state, "dim")


def _time(row: Row, now_s: float) -> str:
    if row.state == "starting":
        return f"{now_s - row.since_s:.0f} s"
    return f"{row.start_s:.1f} s" if row.start_s is not None else ""


def waiting_line(rows: Iterable[Row], now_s: float) -> str:
    """What is waited for, in one line; empty where all is ready."""
    parts = [
        f"{row.name} ({now_s - row.since_s:.0f} s{': ' + row.remark if row.remark else ''})"
        for row in rows
        if row.state == "starting"
    ]
    return f"waiting for {', '.join(parts)}" if parts else ""
