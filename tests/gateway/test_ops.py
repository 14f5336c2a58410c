"""What operators ask, and what is not there."""

import anyio
import pytest

from gateway.fleet import Fleet
from gateway.ops import readiness
from pipeline.limits import PRESENCE_SILENT_MAX_S
from pipeline.protocol.openai import Readiness
from pipeline.telemetry import metrics
from tests.gateway.stack import CHAT, Stack, config_for, serving, stack
from tests.gateway.test_bad_input import refused
from tests.gateway.worker_double import MAX_MODEL_LEN, MODEL, saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio


async def test_health_is_200_and_empty(served: Stack) -> None:
    response = await served.client.get("/health")
    assert (response.status_code, response.content) == (200, b"")


async def test_ready_is_200_where_both_kinds_of_workers_are(served: Stack) -> None:
    response = await served.client.get("/ready")
    assert response.status_code == 200
    assert response.json() == {"ready": True, "reasons": [], "prefill": 1, "decode": 1}


async def test_ready_is_503_and_says_what_is_missing(broker: NatsServer) -> None:
    async with stack(broker.url) as served:
        served.double.silent = True
        with anyio.fail_after(PRESENCE_SILENT_MAX_S + 2):
            while (response := await served.client.get("/ready")).status_code == 200:
                await anyio.sleep(0.02)
        await served.double.announce("prefill")
        await served.double.announce("decode", ready=False)
        with anyio.fail_after(2):
            while (response := await served.client.get("/ready")).json()["prefill"] == 0:
                await anyio.sleep(0.02)
        assert response.status_code == 503
        assert response.json() == {
            "ready": False,
            "reasons": ["no decode worker is ready"],
            "prefill": 1,
            "decode": 0,
        }
        refused = await served.ask()
        assert refused.json()["error"]["message"] == "No decode worker is ready."
        broker.kill9()
        with anyio.fail_after(5):
            while "NATS is not connected" not in (await served.client.get("/ready")).json()["reasons"]:
                await anyio.sleep(0.02)
        assert (await served.client.get("/health")).status_code == 200
        broker.start()


async def test_a_stopping_gateway_is_not_ready() -> None:
    fleet = Fleet(prefill=1, decode=2, models={MODEL: MAX_MODEL_LEN})
    assert readiness(fleet, connected=True, draining=False) == Readiness(ready=True, reasons=[], prefill=1, decode=2)
    assert readiness(fleet, connected=False, draining=True).reasons == [
        "NATS is not connected",
        "the gateway is stopping",
    ]


async def test_a_defect_is_a_500_in_openais_shape(served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[bytes, str]:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(metrics, "render", broken)
    response = await served.client.get("/metrics")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_a_gateway_that_lost_its_broker_serves_again_when_it_is_back(broker: NatsServer) -> None:
    async with stack(broker.url) as served:
        broker.restart()
        served.double.script = saying("yes")
        with anyio.fail_after(10):
            while (await served.ask()).status_code != 200:
                await anyio.sleep(0.02)


async def test_models_are_what_ready_workers_serve(served: Stack) -> None:
    body = (await served.client.get("/v1/models")).json()
    (card,) = body["data"]
    assert body["object"] == "list"
    assert card["created"] > 1_700_000_000
    assert card | {"created": 0} == {
        "id": MODEL,
        "object": "model",
        "created": 0,
        "owned_by": "headrace",
        "max_model_len": MAX_MODEL_LEN,
    }
    assert (await served.client.get(f"/v1/models/{MODEL}")).json() == card
    assert (await served.client.get("/v1/models/a/b")).status_code == 404


async def test_no_workers_no_models(broker: NatsServer) -> None:
    async with serving(config_for(broker.url)) as lonely:
        assert (await lonely.client.get("/v1/models")).json() == {"object": "list", "data": []}


async def test_metrics_tell_what_was_served(served: Stack) -> None:
    served.double.script = saying("a", "b")
    await served.ask(stream=True)
    response = await served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'headrace_requests_total{klass="interactive",outcome="whole"}' in response.text
    for name in (
        "ttft_seconds_count",
        "e2e_seconds_count",
        "prompt_tokens_total",
        "output_tokens_total",
        "in_flight 0.0",
    ):
        assert f"headrace_{name}" in response.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/v1/embeddings", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405)],
)
async def test_what_is_not_there_is_refused_in_openais_shape(
    served: Stack, method: str, path: str, status: int
) -> None:
    response = await served.client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    known = {404: ("NotFoundError", "not_found"), 405: ("MethodNotAllowedError", "method_not_allowed")}
    assert (error["type"], error["code"], error["param"]) == (*known[status], None)
    assert path in error["message"]
    assert response.headers["x-should-retry"] == "false"


async def test_head_and_options_are_answered(served: Stack) -> None:
    head = await served.client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert (await served.client.head("/nothing")).content == b""
    options = await served.client.options(CHAT)
    assert (options.status_code, options.headers["allow"], options.content) == (204, "POST", b"")


async def test_the_route_of_nobody_is_a_400(served: Stack) -> None:
    refused(await served.client.get("/v1/routes/"), 400, "invalid_value", None)
