"""Logs: lines for people in a terminal, JSON objects otherwise. Every line says which process speaks.

The level is the variable HEADRACE_LOG (debug, info, warning, error); info without it. What a prompt or a reply says is never
logged: ids, counts and times are.

    log = logs.get("prefill")
    log.info("handed_off", request=request, cached_tokens=cached)
"""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO, cast

from pipeline.errors import OperatorError
from pipeline.imports import without

with without("rich"):  # it would draw tracebacks, with the variables of every frame
    import structlog
    from structlog.typing import FilteringBoundLogger, Processor

LEVEL_VARIABLE: Final = "HEADRACE_LOG"

LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def level(environ: Mapping[str, str]) -> int:
    """The level that HEADRACE_LOG asks for. Raises `OperatorError` for a word that is none."""
    word = environ.get(LEVEL_VARIABLE, "info").lower()
    if word not in LEVELS:
        raise OperatorError(f"{LEVEL_VARIABLE}={word} is no level.", f"Set it to one of {', '.join(LEVELS)}.")
    return LEVELS[word]


def configure(process: str, stream: TextIO | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Set this process's logs up, once. `process` is its name in the fleet, as `prefill-1`."""
    out = sys.stderr if stream is None else stream
    structlog.configure(
        processors=[*_SHARED, _renderer(out.isatty())],
        wrapper_class=structlog.make_filtering_bound_logger(level(os.environ if environ is None else environ)),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    bind(process=process)


def get(part: str) -> FilteringBoundLogger:
    """The logger of one part of a process. May be called before `configure`."""
    logger: FilteringBoundLogger = structlog.get_logger(part=part)
    return logger


def bind(**names: str) -> None:
    """Say this in every line of the present task and of those that it begins."""
    structlog.contextvars.bind_contextvars(**names)


class _Stderr:
    """Whatever is the standard error when something is written."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


structlog.configure(logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Stderr())))
"""Commands configure nothing, and what they print is for whoever reads their standard output: logs do not go there."""

_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
)


def _renderer(terminal: bool) -> Processor:
    if terminal:
        # The default shows variables, where prompts are, wherever somebody else has imported rich.
        return structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    return _json


def _json(logger: Any, method: str, event: Any) -> str:
    """One JSON object a line, a traceback inside it as text."""
    event = structlog.processors.format_exc_info(logger, method, event)
    rendered = structlog.processors.JSONRenderer(ensure_ascii=False)(logger, method, event)
    return rendered if isinstance(rendered, str) else rendered.decode()
