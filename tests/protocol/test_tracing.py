"""Trace contexts: taken where they are valid, handed on as they are."""

import pytest

from pipeline.limits import TRACE_STATE_BYTES_MAX
from pipeline.protocol import tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def test_a_valid_context_is_carried_and_names_its_trace() -> None:
    context = tracing.context_of({"traceparent": PARENT, "tracestate": "vendor=1", "Nats-Msg-Id": "x"})
    assert context == {"traceparent": PARENT, "tracestate": "vendor=1"}
    assert tracing.trace_id(context) == TRACE


def test_header_names_have_no_case() -> None:
    assert tracing.context_of({"Traceparent": PARENT}) == {"traceparent": PARENT}


@pytest.mark.parametrize(
    "said", ["", "x", f"{PARENT}\n", f"{PARENT}-more", PARENT.replace("00-", "ff-", 1), f"00-{TRACE}-{'0' * 16}-01"]
)
def test_what_is_not_valid_starts_nothing(said: str) -> None:
    assert tracing.context_of({"traceparent": said, "tracestate": "a=1"}) == {}


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "a=1"}])
def test_no_parent_is_no_trace(headers: dict[str, str] | None) -> None:
    assert tracing.context_of(headers) == {}
    assert tracing.trace_id({}) == ""


def test_what_a_later_version_adds_is_left_out() -> None:
    assert tracing.context_of({"traceparent": f"cc{PARENT[2:]}-later"}) == {"traceparent": PARENT}


@pytest.mark.parametrize("state", ["", "a=é", "a=" + "1" * TRACE_STATE_BYTES_MAX])
def test_a_state_that_is_not_fit_is_left_out(state: str) -> None:
    assert tracing.context_of({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}
