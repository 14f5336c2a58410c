"""OpenTelemetry: one trace from the client to the last token, over real processes; and nothing at all where it is off."""

import subprocess
import sys
from pathlib import Path

import anyio
import httpx
import pytest

from pipeline.config import Telemetry
from pipeline.errors import OperatorError
from pipeline.protocol import subjects
from pipeline.protocol.messages import encode
from pipeline.protocol.records import Record
from pipeline.protocol.stages import STAGES
from pipeline.telemetry import spans
from pipeline.telemetry.otel import OtelSpans
from tests.chaos.stack import Settings, Stack
from tests.telemetry.collector import Collector, Span, collecting

TRACE = "0af7651916cd43dd8448eb211c80319c"
PRODUCERS_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENTS_SPAN = "b7ad6b7169203331"

SKEW_NS = 50_000_000
"""A span's children are placed by durations, within what processes of one machine read of the wall clock."""


def parent(trace: str, flags: str = "01") -> str:
    return f"00-{trace}-{CLIENTS_SPAN}-{flags}"


@pytest.mark.anyio
@pytest.mark.timeout(180)
async def test_a_request_is_one_connected_trace_over_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with collecting() as collector:
        settings = Settings(prefill=1, decode=1, gateways=1, otlp_endpoint=collector.url)
        async with Stack(tmp_path, settings).running() as stack:
            async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
                body = {"messages": [{"role": "user", "content": "Hello? " * 50}], "max_tokens": 8}
                headers = {"traceparent": parent(TRACE), "x-request-id": "mine", "x-creator-id": "ada"}
                url = f"{stack.gateways()[0].url}/v1/chat/completions"
                assert (await client.post(url, json=body, headers=headers)).status_code == 200
                headers["traceparent"] = parent("f" * 32, flags="00")
                assert (await client.post(url, json=body, headers=headers)).status_code == 200
            await _publish(stack)
            with anyio.fail_after(30):
                while not all(_complete(collector, trace) for trace in (TRACE, PRODUCERS_TRACE)):
                    await anyio.sleep(0.05)
    _check_requests_trace(collector)
    _check_producers_trace(collector)
    assert not collector.of("f" * 32), "who asks not to be sampled is not"
    assert "Hello" not in str(collector.spans)


async def _publish(stack: Stack) -> None:
    """A producer's request, with a trace of its own."""
    inbox = stack.bus.inbox()
    event = {"messages": [{"role": "user", "content": "Hello? " * 60}], "max_tokens": 4, "reply_to": inbox}
    subject = subjects.request_in("interactive", "bob", "bob")
    await stack.bus.store(subject, encode(event), "produced", 2.0, {"traceparent": parent(PRODUCERS_TRACE)})


def _complete(collector: Collector, trace: str) -> bool:
    return {"prefill", "decode"} <= {span.name for span in collector.of(trace) if span.service.startswith("headrace-")}


def _processes(found: list[Span]) -> dict[str, Span]:
    """The spans of whole processes, of which each has one. A stage may have the name of one."""
    return {span.service: span for span in found if span.service == f"headrace-{span.name}" and span.attributes}


def _check_requests_trace(collector: Collector) -> None:
    found = collector.of(TRACE)
    of = _processes(found)
    assert set(of) == {"headrace-gateway", "headrace-prefill", "headrace-decode"}
    gateway, prefill, decode = of["headrace-gateway"], of["headrace-prefill"], of["headrace-decode"]
    assert (gateway.parent, prefill.parent, decode.parent) == (CLIENTS_SPAN, gateway.id, prefill.id)
    assert (prefill.process, decode.process) == ("prefill-1", "decode-1")
    assert {span.attributes["headrace.request_id"] for span in of.values()} == {"mine"}
    assert not any(span.failed for span in found)
    stages = [span for span in found if span not in of.values()]
    names = [span.name for span in stages]
    assert len(names) == len(set(names)), "each stage is told by one process"
    assert {"accept", "render", "prefill", "decode"} <= set(names)
    assert set(names) <= set(STAGES)
    by_id = {span.id: span for span in of.values()}
    for stage in stages:
        within = by_id[stage.parent]
        assert within.start_ns - SKEW_NS <= stage.start_ns <= stage.end_ns <= within.end_ns + SKEW_NS


def _check_producers_trace(collector: Collector) -> None:
    of = _processes(collector.of(PRODUCERS_TRACE))
    prefill, decode = of["headrace-prefill"], of["headrace-decode"]
    assert (prefill.parent, decode.parent) == (CLIENTS_SPAN, prefill.id)


def record(outcome: str) -> Record:
    return Record(
        process="p", role="prefill", request="r", outcome=outcome, began_unix_s=1.0, took_s=0.5, stages={"render": 0.5}
    )


@pytest.mark.parametrize(("outcome", "failed"), [("handed_off", False), ("fenced", False), ("expired", True)])
def test_only_what_went_wrong_is_an_error(outcome: str, failed: bool) -> None:
    with collecting() as collector:
        made = OtelSpans(collector.url, "p", "prefill")
        span = made.begin({})
        span.end(record(outcome), STAGES)
        made.close()
    [stage, whole] = sorted(collector.spans, key=lambda one: one.name != "render")
    assert (whole.failed, whole.end_ns, stage.start_ns) == (failed, 1_500_000_000, 1_000_000_000)
    assert whole.trace == span.trace_id


def test_off_it_hands_on_what_came_and_imports_nothing() -> None:
    span = spans.spans_of(Telemetry(), "p", "prefill").begin({"traceparent": parent(TRACE)})
    assert (span.context, span.trace_id) == ({"traceparent": parent(TRACE)}, TRACE)
    span.end(record("whole"), STAGES)
    code = (
        "import sys; from pipeline.config import Telemetry; from pipeline.telemetry import spans;"
        "spans.spans_of(Telemetry(), 'p', 'prefill').close(); import gateway.app, workers.prefill;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_packages_the_setting_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_PACKAGES", ("opentelemetry_of_another_world.sdk",))
    with pytest.raises(OperatorError, match=r"headrace\[otel\]"):
        spans.spans_of(Telemetry(otlp_endpoint="http://127.0.0.1:1/v1/traces"), "p", "prefill")
    spans.check(Telemetry())
