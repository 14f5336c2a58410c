"""What a client says so that it finds its request again: `x-request-id`, and W3C trace context."""

import re

import pytest

from gateway.intake import trace_of
from pipeline.errors import EngineFailed
from pipeline.limits import REQUEST_ID_BYTES_MAX, TRACE_STATE_BYTES_MAX
from tests.gateway.stack import Stack
from tests.gateway.test_bad_input import answered
from tests.gateway.worker_double import failing, saying

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def test_a_request_id_is_echoed_and_travels_and_names_no_message(served: Stack) -> None:
    job = await answered(served, headers={"x-request-id": "mine-1"})
    assert job.tree["request_id"] == "mine-1"
    assert job.id != "mine-1"
    assert job.headers["Nats-Msg-Id"] == job.id


async def test_the_same_request_id_twice_is_two_requests(served: Stack) -> None:
    first = await answered(served, headers={"x-request-id": "mine-1"})
    second = await answered(served, headers={"x-request-id": "mine-1"})
    assert first.id != second.id


@pytest.mark.parametrize(
    "theirs", [b"", b"a" * (REQUEST_ID_BYTES_MAX + 1), "é".encode(), b"a\tb"], ids=["empty", "long", "utf8", "control"]
)
async def test_an_id_that_is_not_fit_to_print_is_replaced_by_ours(served: Stack, theirs: bytes) -> None:
    served.double.script = saying("yes")
    response = await served.ask(headers={"x-request-id": theirs})  # type: ignore[dict-item]
    assert response.status_code == 200
    assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"


async def test_a_body_cannot_set_the_id(served: Stack) -> None:
    assert "request_id" not in (await answered(served, request_id="forged")).tree


async def test_every_log_line_of_a_request_names_it(served: Stack, capfd: pytest.CaptureFixture[str]) -> None:
    served.double.script = failing(EngineFailed("The engine failed.").body())
    response = await served.ask(headers={"x-request-id": "mine-2"})
    assert response.headers["x-request-id"] == "mine-2"
    out, err = capfd.readouterr()
    (line,) = (line for line in (out + err).splitlines() if "outcome=failed" in re.sub(r"\x1b\[[0-9;]*m", "", line))
    assert "mine-2" in line


async def test_a_trace_is_carried_to_the_stored_message(served: Stack) -> None:
    job = await answered(served, headers={"traceparent": PARENT, "tracestate": "vendor=1"})
    assert (job.headers["traceparent"], job.headers["tracestate"]) == (PARENT, "vendor=1")
    assert "traceparent" not in (await answered(served)).headers
    assert "traceparent" not in (await answered(served, headers={"traceparent": "no trace"})).headers


@pytest.mark.parametrize(
    ("said", "carried"),
    [
        (PARENT, PARENT),
        (PARENT.replace("00-", "cc-", 1), PARENT),
        (PARENT.replace("00-", "cc-", 1) + "-what-comes-later", PARENT),
        (PARENT + "-more", None),
        (PARENT.replace("00-", "ff-", 1), None),
        (PARENT.upper(), None),
        (PARENT.replace(TRACE, "0" * 32), None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (PARENT[:-1], None),
        (f" {PARENT}", None),
        (f"{PARENT}\n", None),
        ("", None),
    ],
)
async def test_a_trace_parent_is_w3cs_or_nothing(said: str, carried: str | None) -> None:
    assert trace_of({b"traceparent": said.encode()}).get("traceparent") == carried


async def test_a_trace_state_that_is_too_long_or_unprintable_is_left_out() -> None:
    for state in (b"a=" + b"1" * TRACE_STATE_BYTES_MAX, b"a=\xe9", b""):
        assert trace_of({b"traceparent": PARENT.encode(), b"tracestate": state}) == {"traceparent": PARENT}
    assert trace_of({b"tracestate": b"a=1"}) == {}
