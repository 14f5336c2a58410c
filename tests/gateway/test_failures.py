"""What goes wrong, and what the client and the workers are told."""

import anyio
import httpx
import msgspec
import pytest

from gateway import chat
from gateway.app import STOPPING
from pipeline.errors import DeadlineExceeded, EngineFailed, ErrorBody, PromptTooLong, ServiceError
from pipeline.protocol.messages import Go, Gone, Whole
from pipeline.telemetry.metrics import REGISTRY
from tests.gateway.stack import CHAT, HELLO, Connection, Stack, config_for, connection, serving, stack, text_of
from tests.gateway.worker_double import PER_CREATOR_MAX, failing, saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

STREAMED = HELLO | {"stream": True}


def counted(outcome: str) -> float:
    """How many interactive requests have ended so."""
    return REGISTRY.get_sample_value("headrace_requests_total", {"outcome": outcome, "klass": "interactive"}) or 0.0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (PromptTooLong("5000 tokens do not fit 4096.", param="messages").body(), 400, "false"),
        (EngineFailed("The engine failed.").body(), 500, "true"),
        (DeadlineExceeded("Too late.").body(), 504, "true"),
        (ErrorBody(message="Odd.", type="Odd", code="odd", status=200), 500, "false"),
    ],
)
async def test_an_error_before_the_first_text_has_its_own_status(
    served: Stack, error: ErrorBody, status: int, retry: str, stream: bool
) -> None:
    served.double.script = failing(error)
    response = await served.ask(stream=stream)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-should-retry"] == retry
    assert response.headers["x-request-id"]
    assert response.json() == {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    }


async def test_an_error_under_way_ends_the_stream_without_done(served: Stack) -> None:
    before = counted("failed")

    async with connection(served, STREAMED) as client:
        job = await served.double.next_job()
        await job.claim()
        await job.say("Par")
        await client.until(b"Par")
        assert await job.fail(EngineFailed("The engine failed.").body()) == Whole()
        rest = await client.rest()
    assert (
        b'data: {"error":{"message":"The engine failed.","type":"InternalServerError","param":null,"code":"engine_failed"}}\n\n'
        in rest
    )
    assert b"[DONE]" not in rest
    assert counted("failed") == before + 1


async def test_a_client_that_leaves_while_it_is_queued_is_gone_for_every_claim(served: Stack) -> None:
    before = counted("cancelled")
    async with connection(served, STREAMED) as client:
        job = await served.double.next_job()
        await client.leave()
        assert await served.double.next_cancel() == job.id
    assert await job.claim() == Gone()
    await job.ack()
    assert counted("cancelled") == before + 1


@pytest.mark.parametrize("body", [STREAMED, HELLO])
async def test_a_client_that_leaves_under_way_stops_its_worker(served: Stack, body: dict[str, object]) -> None:
    async with connection(served, body) as client:
        job = await served.double.next_job()
        assert await job.claim() == Go()
        await job.say("Par")
        if body is STREAMED:
            await client.until(b"Par")
        await client.leave()
        assert await served.double.next_cancel() == job.id
    notice = await served.double.next_notice()
    assert (notice.request, notice.claim, notice.answer) == (job.id, job.claim_id, Gone())
    assert await job.claim("another") == Gone()
    assert await job.done() == Gone()


async def test_a_client_that_leaves_before_its_body_is_whole_is_forgotten(served: Stack) -> None:
    before = counted("cancelled")
    host, _, port = served.url.removeprefix("http://").partition(":")
    async with await anyio.connect_tcp(host, int(port)) as client:
        await client.send(f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 100\r\n\r\nhalf".encode())
    with anyio.fail_after(5):
        while counted("cancelled") == before:
            await anyio.sleep(0.01)
    assert served.double.seen == 0


async def test_a_slow_reader_delays_nobody_and_loses_nothing(served: Stack) -> None:
    piece = "0123456789abcdef" * 4096  # 100 of them are more than the kernel's largest buffers
    async with connection(served, STREAMED) as slow:
        job = await served.double.next_job()
        await job.claim()
        for _ in range(10):
            await job.say(*[piece] * 10)
        assert await job.fail(EngineFailed("The engine failed.").body()) == Whole()
        served.double.script = saying("quick")
        assert text_of((await served.ask(stream=True)).content) == "quick"
        assert (await served.client.get("/health")).status_code == 200
        assert served.gateway.admission.in_flight == 1, "the slow one is still being written"
        reply = await slow.rest()
    assert reply.count(b"0123456789abcdef") == 100 * 4096
    assert reply.count(b"data: ") < 90, "what waits is joined"
    assert b'"code":"engine_failed"' in reply


async def test_a_client_that_stops_reading_for_good_is_given_up(served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "STALLED_MAX_S", 0.1)
    piece = "0123456789abcdef" * 4096
    async with connection(served, STREAMED, "x-request-timeout-ms: 300\r\n"):
        job = await served.double.next_job()
        await job.claim()
        for _ in range(10):
            await job.say(*[piece] * 10)
        with anyio.fail_after(5):
            while served.gateway.admission.in_flight:
                await anyio.sleep(0.01)
        assert await served.double.next_cancel() == job.id
        assert await job.fail(EngineFailed("Never mind.").body()) == Gone()


async def test_a_full_queue_of_one_creator_is_a_429_and_others_are_served(served: Stack) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(PER_CREATOR_MAX):
            tasks.start_soon(served.ask, None, {"x-creator-id": "hot"})
        jobs = [await served.double.next_job() for _ in range(PER_CREATOR_MAX)]
        refused = await served.ask(headers={"x-creator-id": "hot"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "creator_queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1000
        assert refused.headers["x-should-retry"] == "true"
        served.double.script = saying("yes")
        assert (await served.ask(headers={"x-creator-id": "cool"})).status_code == 200
        for job in jobs:
            await job.claim()
            await job.done()


async def test_one_request_more_than_the_bound_is_a_503(broker: NatsServer) -> None:
    async with stack(broker.url, in_flight_max=1) as served, connection(served, HELLO) as inside:
        job = await served.double.next_job()
        refused = await served.ask()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert served.double.seen == 1
        await job.claim()
        await job.done()
        await inside.rest()
        served.double.script = saying("yes")
        assert (await served.ask()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_before_the_first_text_is_a_504_and_stops_the_worker(served: Stack, stream: bool) -> None:
    before = counted("expired")
    response = await served.ask(stream=stream, headers={"x-request-timeout-ms": "100"})
    job = await served.double.next_job()
    assert job.tree["timeout_ms"] == 100
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline"
    assert await served.double.next_cancel() == job.id
    assert await job.claim() == Gone()
    assert counted("expired") == before + 1


async def test_a_deadline_under_way_ends_the_stream_with_an_error(served: Stack) -> None:
    async with connection(served, STREAMED, "x-request-timeout-ms: 300\r\n") as client:
        job = await served.double.next_job()
        await job.claim()
        await job.say("Par")
        await client.until(b"Par")
        rest = await client.rest()
        assert b'"code":"deadline"' in rest
        assert b"[DONE]" not in rest
        assert await job.done() == Gone()


async def test_the_configured_timeout_is_of_requests_that_set_none(broker: NatsServer) -> None:
    async with stack(broker.url, timeout_s=0.2) as served:
        assert (await served.ask()).status_code == 504


async def test_without_a_queue_the_request_is_refused_in_time(broker: NatsServer) -> None:
    async with stack(broker.url, timeout_s=2.0) as served:
        await served.double.undeclare()
        response = await served.ask()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "broker_unavailable"
        assert int(response.headers["retry-after"]) >= 1


async def test_a_stream_goes_on_over_a_restart_of_the_broker(broker: NatsServer) -> None:
    async with stack(broker.url) as served, connection(served, STREAMED) as client:
        job = await served.double.next_job()
        await job.claim()
        await job.say("Par")
        await client.until(b"Par")
        broker.restart()
        job.tokens("is.")
        assert await job.done_at_last() == Whole()
        rest = await client.rest()
        assert b"is." in rest
        assert b"[DONE]" in rest


async def test_a_stopping_gateway_lets_open_streams_end(broker: NatsServer) -> None:
    async with stack(broker.url) as served, connection(served, STREAMED) as client:
        job = await served.double.next_job()
        await job.claim()
        await job.say("Par")
        await client.until(b"Par")
        served.server.should_exit = True
        await until_refused(served.url)
        await job.done()
        assert b"[DONE]" in await client.rest()


async def test_a_stream_that_outlives_the_drain_ends_with_a_retryable_error(broker: NatsServer) -> None:
    async with stack(broker.url, drain_s=0.75) as served, connection(served, STREAMED) as client:
        job = await served.double.next_job()
        await job.claim()
        await job.say("Par")
        await client.until(b"Par")
        served.server.should_exit = True
        assert STOPPING.message.encode() in await client.rest()
        assert await served.double.next_cancel() == job.id
        assert await job.done() == Gone()


async def test_a_request_that_comes_whole_after_the_drain_gets_the_same_error_and_is_not_queued(
    broker: NatsServer,
) -> None:
    payload = msgspec.json.encode(STREAMED)
    async with stack(broker.url, drain_s=0.75) as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(payload)}\r\n\r\n"
            await stream.send(head.encode() + payload[:5])
            with anyio.fail_after(5):
                while not served.gateway.guests.shares.bytes:
                    await anyio.sleep(0.01)
            served.server.should_exit = True
            await anyio.sleep(0.75)
            await stream.send(payload[5:])
            answer = await Connection(stream).rest()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert STOPPING.message.encode() in answer
        assert served.double.seen == 0


async def until_refused(url: str) -> None:
    """Return when the gateway takes no more connections."""
    with anyio.fail_after(5):
        while True:
            try:
                async with httpx.AsyncClient(trust_env=False) as client:
                    await client.get(f"{url}/health")
            except httpx.ConnectError:
                return
            except httpx.TransportError:
                pass  # accepted, and closed again: it is about to
            await anyio.sleep(0.01)


async def test_a_defect_of_the_gateway_is_a_500_that_says_no_more(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: object, **named: object) -> int:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(served.gateway.bus, "store", broken)
    response = await served.ask()
    assert response.status_code == ServiceError.status
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_no_worker_of_a_kind_is_a_503_that_names_it(broker: NatsServer) -> None:
    async with serving(config_for(broker.url)) as lonely:
        response = await lonely.ask(model="any")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_workers"
        assert response.json()["error"]["message"] == "No prefill and no decode worker is ready."
        assert response.headers["retry-after"] == "2"


async def test_an_id_that_is_not_fresh_is_a_409_that_no_retry_mends(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Same:
        hex = "0123456789abcdef0123456789abcdef"

    monkeypatch.setattr(chat, "uuid4", Same)
    served.double.script = saying("mine")
    assert (await served.ask()).status_code == 200
    refused = await served.ask()
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "duplicate_id"
    assert refused.headers["x-should-retry"] == "false"
    assert served.double.seen == 1
