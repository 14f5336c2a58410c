"""Logs: who speaks, at which level, in which form."""

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from pipeline.errors import OperatorError
from pipeline.telemetry import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_line_is_an_object_that_names_its_process() -> None:
    out = io.StringIO()
    log = logs.get("prefill")  # before the set-up, as modules do
    logs.configure("prefill-1", out, {})
    log.info("handed_off", request="r1", cached_tokens=64)
    log.debug("unseen")
    line = json.loads(out.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "handed_off",
        "request": "r1",
        "cached_tokens": 64,
        "process": "prefill-1",
        "part": "prefill",
        "level": "info",
    }


def test_an_exception_is_text_inside_its_line() -> None:
    out = io.StringIO()
    logs.configure("gateway", out, {})
    try:
        raise ValueError("broken")
    except ValueError:
        logs.get("app").exception("failed")
    assert "ValueError: broken" in json.loads(out.getvalue())["exception"]


def test_in_a_terminal_lines_are_for_people() -> None:
    out = Terminal()
    logs.configure("gateway", out, {})
    logs.get("app").info("serving", port=8000)
    assert "serving" in out.getvalue()
    assert not out.getvalue().startswith("{")


def test_a_traceback_shows_no_variables_in_a_terminal_either() -> None:
    out = Terminal()
    logs.configure("gateway", out, {})
    prompt = "what nobody may read"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        logs.get("app").exception("failed")
    assert "ValueError: 20" in out.getvalue()
    assert prompt not in out.getvalue()


def test_the_level_comes_from_the_environment() -> None:
    out = io.StringIO()
    logs.configure("gateway", out, {"HEADRACE_LOG": "WARNING"})
    logs.get("app").info("unseen")
    assert out.getvalue() == ""
    with pytest.raises(OperatorError, match="HEADRACE_LOG=loud is no level"):
        logs.level({"HEADRACE_LOG": "loud"})
