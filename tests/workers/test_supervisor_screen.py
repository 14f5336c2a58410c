"""What the user sees."""

import io
import time

import pytest
from rich.console import Console

from workers.supervisor.screen import Row, Screen, waiting_line


def screen(*, terminal: bool) -> tuple[Screen, io.StringIO, io.StringIO]:
    err, out = io.StringIO(), io.StringIO()
    consoles = [Console(file=file, force_terminal=terminal, width=100, _environ={}) for file in (err, out)]
    return Screen(*consoles), err, out


def test_without_a_terminal_changes_are_lines() -> None:
    shown, err, out = screen(terminal=False)
    shown.expect(["nats", "gateway"])
    shown.show("nats", "starting")
    shown.show("nats", "ready")
    shown.show("gateway", "failed", "was ended by signal 9")
    shown.answer("Ready at http://127.0.0.1:8000")
    shown.piece("Pa")
    shown.piece("ris")
    assert [line.split("] ")[1] for line in err.getvalue().splitlines()] == [
        "nats ready",
        "gateway failed was ended by signal 9",
    ]
    assert out.getvalue() == "Ready at http://127.0.0.1:8000\nParis"


def test_without_a_terminal_long_waits_are_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, err, _ = screen(terminal=False)
    shown.expect(["prefill-1"])
    shown.show("prefill-1", "starting")
    shown.remark("prefill-1", "Loading weights")
    shown.tick()
    assert err.getvalue() == ""
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 12.0)
    shown.tick()
    shown.tick()
    assert err.getvalue().count("waiting for prefill-1 (12 s: Loading weights)") == 1


def test_in_a_terminal_a_table_changes_in_place() -> None:
    shown, err, _ = screen(terminal=True)
    shown.expect(["nats", "prefill-1"])
    shown.show("nats", "starting")
    shown.show("nats", "ready")
    shown.show("prefill-1", "starting")
    shown.remark("prefill-1", "Loading weights")
    shown.tick()
    shown.settle()
    text = err.getvalue()
    assert "✓" in text
    assert "Loading weights" in text


def test_a_reader_that_has_gone_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

        def flush(self) -> None:
            raise OSError("terminal closed")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", Closed())
    shown = Screen()
    shown.expect(["nats"])
    shown.show("nats", "failed", "was ended by signal 9")
    shown.tick()
    shown.quote(["a line"])
    shown.settle()
    shown.answer("Ready")
    shown.piece("Paris")


def test_nothing_to_wait_for_is_no_line() -> None:
    assert waiting_line([Row(name="nats", state="ready", since_s=0.0)], 1.0) == ""
