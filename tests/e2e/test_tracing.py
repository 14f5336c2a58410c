"""One trace over the real stack: HTTP, both workers with their stages, and vLLM's own spans of both engines under them."""

import concurrent.futures
import json
import time
import urllib.request
from typing import Any

import pytest

from tests.e2e.conftest import Stacks
from tests.e2e.running import Running
from tests.telemetry.collector import Collector, Span, collecting

pytestmark = pytest.mark.timeout(600)

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENTS_SPAN = "b7ad6b7169203331"
CREATOR = "traced"
TOKENS = 8
HOG_TOKENS = 2600
"""Of the 3,400 that decode has room for."""
PREFILLED = "headrace_prefill_seconds_count"
SENT_WITHIN_S = 30.0
OURS = ("headrace-gateway", "headrace-prefill", "headrace-decode")
ENGINES = ("vllm-prefill", "vllm-decode")
SKEW_NS = 100_000_000
"""Clocks of one machine, read at different moments of a busy one."""


def opened(running: Running, tokens: int, more: dict[str, str], **fields: Any) -> Any:
    """A request to the gateway, whose response has begun."""
    body = {"messages": [{"role": "user", "content": "Hello? " * 100}], "max_tokens": tokens, "ignore_eos": True}
    headers = {"content-type": "application/json", "x-creator-id": CREATOR, **more}
    request = urllib.request.Request(
        f"{running.gateway}/v1/chat/completions", json.dumps(body | fields).encode(), headers
    )
    return urllib.request.urlopen(request, timeout=120)


def ask(running: Running) -> Any:
    """One request, under a span of its client's. Returns its usage."""
    with opened(running, TOKENS, {"traceparent": f"00-{TRACE}-{CLIENTS_SPAN}-01"}) as answer:
        return json.load(answer)["usage"]


def asked_while_there_is_no_room(running: Running) -> Any:
    """Its prompt is computed, and waits for credit, because another reply has all blocks; then that one is given up."""
    owner = running.owner(CREATOR)
    with opened(running, HOG_TOKENS, {}, stream=True) as hog, concurrent.futures.ThreadPoolExecutor(1) as pool:
        before = running.metric(owner, PREFILLED)
        asked = pool.submit(ask, running)
        running.await_metric("decode-1", "headrace_asks_waiting", lambda count: count == 1, within_s=60)
        running.await_metric(owner, PREFILLED, lambda count: count > before, within_s=60)
        hog.close()
        return asked.result()


def is_of_a_process(span: Span) -> bool:
    """Whether it is all that one of ours has done for the request, under which its stages are."""
    return span.service == f"headrace-{span.name}" and bool(span.attributes)


def await_spans(collector: Collector) -> list[Span]:
    """The trace, once each engine has told of it, and each of ours: the stages may come before."""
    deadline = time.monotonic() + SENT_WITHIN_S
    while True:
        found = collector.of(TRACE)
        missing = {*OURS, *ENGINES} - {
            span.service for span in found if span.service in ENGINES or is_of_a_process(span)
        }
        if not missing:
            return found
        assert time.monotonic() < deadline, f"nothing of {missing} within {SENT_WITHIN_S} s"
        time.sleep(0.1)  # between two looks; nothing tells us


def test_a_request_is_one_trace_from_http_to_both_engines(stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with collecting() as collector:
        running = stacks.up(f"[telemetry]\notlp_endpoint = '{collector.url}'\n")
        usage = asked_while_there_is_no_room(running)
        found = await_spans(collector)
        stacks.down()
    of = {span.service: span for span in found if is_of_a_process(span)}
    gateway, prefill, decode = (of[service] for service in OURS)
    assert [span.parent for span in (gateway, prefill, decode)] == [CLIENTS_SPAN, gateway.id, prefill.id]
    engines = {span.service: span for span in found if span.service in ENGINES}
    assert (engines["vllm-prefill"].parent, engines["vllm-decode"].parent) == (prefill.id, decode.id)
    for engine, worker in (("vllm-prefill", prefill), ("vllm-decode", decode)):
        span = engines[engine]
        assert worker.start_ns - SKEW_NS <= span.start_ns <= span.end_ns <= worker.end_ns + SKEW_NS
    made = [engines[engine].attributes["gen_ai.usage.completion_tokens"] for engine in ENGINES]
    assert made == ["1", str(TOKENS - 1)], "prefill begins the reply"
    assert usage["completion_tokens"] == TOKENS
    stages = {span.name for span in found if span not in of.values() and span.service in OURS}
    assert {"render", "prefill", "credit", "handoff", "decode"} <= stages
    assert not any(span.failed for span in found)
    assert "Hello" not in str(found)
