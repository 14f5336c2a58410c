"""OpenTelemetry, for who wants it: a span for each request at each process, and under it one for each of its stages.

Off, as it is without `telemetry.otlp_endpoint`, nothing is imported and nothing made: the trace context that came with a request
is handed on as it came. On, each process hangs its span under the one before, and hands on its own: HTTP client or producer,
gateway, prefill, decode, and vLLM's own spans under those of its worker.
"""

import importlib.util
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from pipeline.config import Telemetry
from pipeline.errors import OperatorError
from pipeline.protocol import tracing
from pipeline.protocol.records import Record

if TYPE_CHECKING:
    from pipeline.telemetry.otel import OtelSpans


class Span(Protocol):
    """One request at this process. `context` are the headers for whoever works on it next."""

    @property
    def context(self) -> dict[str, str]:
        """`traceparent` and the like; empty where there is no trace."""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or empty."""

    def end(self, record: Record, mine: Collection[str]) -> None:
        """It is over. `mine` are the stages that passed here, and not at other processes."""


class Spans(Protocol):
    """Makes the spans of one process."""

    def begin(self, context: Mapping[str, str], ago_s: float = 0.0) -> Span:
        """A request has come `ago_s` ago, with this trace context."""

    def close(self) -> None:
        """Send what waits, within seconds. It may block."""


class Passed:
    """No span: the context as it came."""

    __slots__ = ("context", "trace_id")

    def __init__(self, context: dict[str, str]) -> None:
        self.context = context
        self.trace_id = tracing.trace_id(context)

    def end(self, record: Record, mine: Collection[str]) -> None:
        """Nothing to say."""


class NoSpans:
    """Tracing is off."""

    def begin(self, context: Mapping[str, str], ago_s: float = 0.0) -> Span:
        """Hand on what came."""
        return Passed(dict(context))

    def close(self) -> None:
        """Nothing waits."""


def spans_of(settings: Telemetry, process: str, role: str) -> "NoSpans | OtelSpans":
    """As the configuration says. Raises `OperatorError` where the packages are missing."""
    check(settings)
    if not settings.otlp_endpoint:
        return NoSpans()
    from pipeline.telemetry.otel import OtelSpans  # noqa: PLC0415  # optional, and a third of a second

    return OtelSpans(settings.otlp_endpoint, process, role)


def check(settings: Telemetry) -> None:
    """Raises `OperatorError` where spans are wanted, and cannot be made."""
    missing = [name for name in _PACKAGES if settings.otlp_endpoint and not _found(name)]
    if missing:
        raise OperatorError(
            f"telemetry.otlp_endpoint is set, but {missing[0]} is not installed.",
            "pip install 'headrace[otel]', or leave the setting empty.",
        )


_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
