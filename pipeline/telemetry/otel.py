"""Spans by OpenTelemetry's SDK, sent to a collector over OTLP/HTTP. Only `spans.py` imports this, where it is wanted."""

from collections.abc import Collection, Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as Made
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipeline import outside
from pipeline.protocol.records import Record

EXPORT_TIMEOUT_S: Final = 5.0
"""A collector that does not answer keeps no process from ending for longer. What is not sent by then is lost."""

_propagator: Final = TraceContextTextMapPropagator()

_ERRORS: Final = frozenset(("failed", "expired", "malformed", "invalid", "rejected", "unheard"))
"""Endings that are an error of this request, and not one of those after which it comes again, or is not wanted any more."""


class OtelSpans:
    """The spans of one process. A provider of our own: vLLM sets the global one."""

    def __init__(self, endpoint: str, process: str, role: str) -> None:
        resource = Resource.create({"service.name": f"headrace-{role}", "service.instance.id": process})
        self._role = role
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headrace")

    def begin(self, context: Mapping[str, str], ago_s: float = 0.0) -> "OtelSpan":
        """A span under the one that `context` names, or a trace of its own."""
        kind = SpanKind.SERVER if self._role == "gateway" else SpanKind.CONSUMER
        began_ns = _ns(outside.unix_s() - ago_s)
        made = self._tracer.start_span(self._role, _propagator.extract(context), kind, start_time=began_ns)
        return OtelSpan(self._tracer, made)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


class OtelSpan:
    """One request at this process. Its stages become spans when it ends: until then nothing is spent on them."""

    def __init__(self, tracer: Tracer, made: Made) -> None:
        self._tracer = tracer
        self._made = made
        self._within: Context = set_span_in_context(made)
        self.context: dict[str, str] = {}
        _propagator.inject(self.context, self._within)

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return f"{self._made.get_span_context().trace_id:032x}"

    def end(self, record: Record, mine: Collection[str]) -> None:
        """It is over. The stages follow each other from its beginning on."""
        if not self._made.is_recording():
            return
        named = {"request": record.request, "request_id": record.request_id, "outcome": record.outcome, **record.facts}
        self._made.set_attributes({f"headrace.{name}": value for name, value in named.items() if value != ""})
        if record.outcome in _ERRORS:
            self._made.set_status(Status(StatusCode.ERROR, record.outcome))
        at_s = record.began_unix_s
        for stage, took_s in record.stages.items():
            if stage in mine and took_s > 0:
                child = self._tracer.start_span(stage, self._within, start_time=_ns(at_s))
                child.end(_ns(at_s + took_s))
            at_s += took_s
        self._made.end(_ns(record.began_unix_s + record.took_s))


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
