"""An OpenTelemetry collector on loopback, that keeps what it is sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(msgspec.Struct, frozen=True):
    """One span as it was sent; ids are hex, times Unix nanoseconds. `service` and `process` are its sender's."""

    name: str
    trace: str
    id: str
    parent: str
    service: str
    process: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str]
    failed: bool


class Collector:
    """All spans that have come. `url` is where to send them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []

    def of(self, trace: str) -> list[Span]:
        """Those of a trace."""
        return [span for span in list(self.spans) if span.trace == trace]

    def take(self, body: bytes) -> None:
        """What an exporter has sent."""
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {one.key: one.value.string_value for one in sent.resource.attributes}
            for scope in sent.scope_spans:
                for span in scope.spans:
                    values = {one.key: one.value for one in span.attributes}
                    self.spans.append(
                        Span(
                            name=span.name,
                            trace=span.trace_id.hex(),
                            id=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            service=resource.get("service.name", ""),
                            process=resource.get("service.instance.id", ""),
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            attributes={
                                key: value.string_value or str(value.int_value) for key, value in values.items()
                            },
                            failed=span.status.code == span.status.STATUS_CODE_ERROR,
                        )
                    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
