"""HTTP as careless and hostile clients speak it, on the real server: bytes in, bytes out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.abc
import msgspec
import pytest

from gateway import door
from pipeline.limits import HEAD_BYTES_MAX
from tests.gateway.stack import CHAT, HELLO, Connection, Stack, connection, stack
from tests.gateway.test_bad_input import refused
from tests.gateway.test_identity import KEYS
from tests.gateway.worker_double import saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

BODY = msgspec.json.encode(HELLO)
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Raw(Connection):
    """A connection that says what it wants."""

    _next = b""
    """What has come of the response after the last one."""

    async def send(self, data: bytes) -> None:
        """These bytes."""
        await self._stream.send(data)

    async def answer(self) -> tuple[int, bytes, bytes]:
        """Status, head and body of one response, which has a length."""
        read, self._next = self._next, b""
        if b"\r\n\r\n" not in read:
            read += await self.until(b"\r\n\r\n")
        head, _, body = read.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        while len(body) < length:
            body += await self._stream.receive()
        body, self._next = body[:length], body[length:]
        return int(head.split(b" ", 2)[1]), head.lower(), body

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        return self._next + await super().rest()


@asynccontextmanager
async def raw(served: Stack) -> AsyncIterator[Raw]:
    """A connection to the gateway."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        yield Raw(stream)


async def test_a_chunked_body_is_read(served: Stack) -> None:
    served.double.script = saying("yes")
    async with raw(served) as client:
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for piece in (BODY[:7], BODY[7:]):
            await client.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        await client.send(b"0\r\n\r\n")
        status, _, body = await client.answer()
    assert (status, msgspec.json.decode(body)["choices"][0]["message"]["content"]) == (200, "yes")


async def test_who_waits_for_100_continue_gets_it_and_then_the_reply(served: Stack) -> None:
    served.double.script = saying("yes")
    async with raw(served) as client:
        await client.send(HEAD + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(BODY))
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await client.send(BODY)
        assert (await client.answer())[0] == 200


async def test_who_waits_for_100_continue_with_too_large_a_body_never_sends_it(served: Stack) -> None:
    async with raw(served) as client:
        await client.send(HEAD + b"content-length: 2000000\r\nexpect: 100-continue\r\n\r\n")
        assert (await client.answer())[0] == 413


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (HEAD + b"content-length: 7\r\n\r\nno JSON", 400),
        (HEAD + b"content-length: 2\r\ncontent-encoding: gzip\r\n\r\n\x1f\x8b", 415),
        (HEAD + b"content-length: 9\r\nx-request-class: urgent\r\n\r\nnot read\n", 400),
        (b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"BREW /health HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"PROPFIND /health HTTP/1.1\r\nhost: x\r\n\r\n", 405),
    ],
)
async def test_a_connection_may_be_used_again_after_an_error(served: Stack, request_: bytes, status: int) -> None:
    async with raw(served) as client:
        await client.send(request_)
        answered, head, body = await client.answer()
        assert answered == status
        assert msgspec.json.decode(body)["error"]["message"]
        if b"connection: close" not in head:
            await client.send(HEALTH)
            assert (await client.answer())[0] == 200
        else:
            assert request_.startswith(b"BREW"), "only what cannot be parsed ends the connection"


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "gzip, identity"])
async def test_a_compressed_body_is_a_415_that_says_so(served: Stack, encoding: str) -> None:
    response = await served.client.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": encoding})
    assert encoding in refused(response, 415, "unsupported_content_encoding", "content-encoding")
    assert served.double.seen == 0


async def test_an_identity_encoding_is_none(served: Stack) -> None:
    served.double.script = saying("yes")
    assert (await served.ask(headers={"content-encoding": "identity"})).status_code == 200


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"bad header\r\n\r\n",
        HEAD + b"x-creator-id: a\0b\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=range(12),
)
async def test_what_is_no_http_is_refused_in_openais_shape_and_harms_nobody(served: Stack, rubbish: bytes) -> None:
    async with raw(served) as client:
        await client.send(rubbish)
        status, head, body = await client.answer()
        assert 400 <= status < 500
        assert msgspec.json.decode(body)["error"]["code"]
        assert b"x-content-type-options: nosniff" in head
        assert b"traceback" not in body.lower()
    assert (await served.client.get("/health")).status_code == 200


async def test_an_upgrade_that_is_not_served_is_ignored(served: Stack) -> None:
    async with raw(served) as client:
        await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert (await client.answer())[0] == 200


async def fill(client: Raw) -> None:
    """Send more header lines than are taken, or as many as get through."""
    with anyio.fail_after(5), suppress(anyio.BrokenResourceError):
        for _ in range(HEAD_BYTES_MAX // 1000 + 10):
            await client.send(b"x-filler: " + b"x" * 1000 + b"\r\n")


async def test_a_head_that_does_not_end_is_a_431(served: Stack) -> None:
    async with raw(served) as client:
        await client.send(HEAD)
        await fill(client)
        assert (await client.answer())[0] == 431


async def test_a_head_that_is_too_large_is_a_431_also_where_it_comes_at_once(served: Stack) -> None:
    async with raw(served) as client:
        await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nx-filler: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n")
        status, head, _ = await client.answer()
        assert (status, b"connection: close" in head) == (431, True)


async def test_trailers_that_do_not_end_are_a_431(served: Stack) -> None:
    async with raw(served) as client:
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        await fill(client)
        assert (await client.answer())[0] == 431


async def test_a_trailer_does_not_stand_for_a_header(broker: NatsServer) -> None:
    async with stack(broker.url, keys=KEYS) as served, raw(served) as client:
        chunked = b"%x\r\n%s\r\n0\r\nauthorization: Bearer free\r\n\r\n" % (len(BODY), BODY)
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked)
        assert (await client.answer())[0] == 401


async def test_who_is_refused_by_the_server_is_not_answered_by_the_gateway_as_well(
    broker: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(broker.url, keys=KEYS) as served, raw(served) as client:
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
        assert (await client.answer())[0] == 400
        assert await client.rest() == b""
    assert not [line for line in caplog.messages if "ASGI" in line], "the key that is missing was told to nobody"


async def test_what_is_no_http_behind_a_request_is_not_answered_in_its_reply(served: Stack) -> None:
    async with raw(served) as client:
        rubbish = HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"
        await client.send(HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY) + rubbish)
        assert await client.rest() == b""
        job = await served.double.next_job()
        assert await served.double.next_cancel() == job.id


async def test_a_client_that_leaves_with_a_request_behind_the_one_that_is_answered_stops_its_work(
    served: Stack,
) -> None:
    async with raw(served) as client:
        body = msgspec.json.encode(HELLO | {"stream": True})
        await client.send(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body) + HEALTH)
        job = await served.double.next_job()
        await job.claim()
        await job.say("Par")
        await client.until(b"Par")
        await client.leave()
        with anyio.fail_after(5):
            while len(served.gateway.replies):
                await job.say("is.")  # what is pipelined is not read, so only what cannot be written tells
                await anyio.sleep(0.02)
        assert await served.double.next_cancel() == job.id


async def test_a_head_that_does_not_come_is_a_408(served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HEAD_TIMEOUT_S", 0.2)
    async with raw(served) as client:
        await client.send(HEAD)
        status, head, _ = await client.answer()
        assert (status, b"connection: close" in head) == (408, True)
        assert await client.rest() == b""


async def test_a_second_head_that_does_not_come_is_a_408_too(served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HEAD_TIMEOUT_S", 0.2)
    async with raw(served) as client:
        await client.send(HEALTH)
        assert (await client.answer())[0] == 200
        await client.send(b"GET /heal")
        assert (await client.answer())[0] == 408


async def test_a_connection_that_says_nothing_is_closed(served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "KEEP_ALIVE_S", 0.2)
    async with raw(served) as client:
        assert await client.rest() == b""


async def test_half_a_head_behind_a_request_does_not_cut_its_reply_off(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HEAD_TIMEOUT_S", 0.1)
    async with raw(served) as client:
        await client.send(HEAD + b"content-length: %d\r\n\r\n%sGET /heal" % (len(BODY), BODY))
        job = await served.double.next_job()
        await anyio.sleep(0.3)
        await job.claim()
        await job.say("after all")
        await job.done()
        assert (await client.answer())[0] == 200
        assert (await client.answer())[0] == 408


@pytest.mark.parametrize("asked", ["a reply", "pages"])
async def test_a_client_that_reads_nothing_is_given_up(
    served: Stack, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(door, "UNREAD_MAX_S", 0.2)
    before = len(open_ := served.server.server_state.connections)
    async with connection(served, HELLO | {"stream": True}) if asked == "a reply" else raw(served) as client:
        if isinstance(client, Raw):
            await client.send(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400)
            await client.until(b"200 OK")
        else:
            job = await served.double.next_job()
            await job.claim()
            for _ in range(10):
                await job.say(*["0123456789abcdef" * 4096] * 10)
            await served.double.next_cancel()
        with anyio.fail_after(10):
            while len(open_) > before:
                await anyio.sleep(0.02)
    assert not len(served.gateway.replies)


async def test_a_refused_body_that_drips_on_is_not_read_for_ever(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HEAD_TIMEOUT_S", 0.2)
    async with raw(served) as client:
        await client.send(HEAD + b"content-length: 2000000\r\n\r\n")
        assert (await client.answer())[0] == 413
        with anyio.fail_after(5), suppress(anyio.BrokenResourceError):
            while True:
                await client.send(b"x")
                await anyio.sleep(0.02)


async def test_a_body_that_does_not_come_is_a_408_and_holds_nothing(broker: NatsServer) -> None:
    async with stack(broker.url, body_timeout_s=0.3) as served, raw(served) as client:
        await client.send(HEAD + b"content-length: 100\r\n\r\nhalf of it")
        status, head, body = await client.answer()
        assert (status, msgspec.json.decode(body)["error"]["code"]) == (408, "request_timeout")
        assert b"connection: close" in head
        assert await client.rest() == b""
        assert served.gateway.guests.shares.bytes == 0


async def test_slow_bodies_together_hold_no_more_than_the_bound(broker: NatsServer) -> None:
    async with stack(broker.url, in_flight_bytes_max=3000) as served, raw(served) as first, raw(served) as second:
        await first.send(HEAD + b"content-length: 2500\r\n\r\n" + b" " * 2000)
        await second.send(HEAD + b"content-length: 2500\r\n\r\n" + b" " * 2000)
        status, head, _ = await second.answer()
        assert (status, b"retry-after: 2" in head) == (503, True)
        await first.leave()
        with anyio.fail_after(5):
            while served.gateway.guests.shares.bytes:
                await anyio.sleep(0.01)
        served.double.script = saying("yes")
        assert (await served.ask()).status_code == 200
        response = await served.client.post(CHAT, content=b" " * 3001)
        assert refused(response, 413, "request_too_large", None)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
async def test_head_is_get_without_its_body(served: Stack, path: str) -> None:
    got, headed = await served.client.get(path), await served.client.head(path)
    assert headed.content == b""
    assert (headed.status_code, headed.headers.keys()) == (got.status_code, got.headers.keys())
    assert (await served.client.head("/nothing")).status_code == 404


@pytest.mark.parametrize("path", ["/health", CHAT, "/nothing"])
async def test_every_response_has_the_security_headers(served: Stack, path: str) -> None:
    served.double.script = saying("yes")
    for response in (await served.client.get(path), await served.client.post(path, json=HELLO)):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert "server" not in response.headers


PREFLIGHT = {"origin": "https://chat.example", "access-control-request-method": "POST"}


async def test_no_other_site_may_call_unless_it_is_named(served: Stack) -> None:
    served.double.script = saying("yes")
    options = await served.client.options(CHAT, headers=PREFLIGHT)
    response = await served.ask(headers={"origin": "https://chat.example"})
    for one in (options, response):
        assert not [name for name in one.headers if name.startswith("access-control")]


async def test_a_site_that_is_named_may_call_and_read_when_to_come_back(broker: NatsServer) -> None:
    async with stack(broker.url, cors_origins=("https://chat.example",)) as served:
        served.double.script = saying("yes")
        headers = PREFLIGHT | {"access-control-request-headers": "authorization,content-type,x-creator-id"}
        options = await served.client.options(CHAT, headers=headers)
        assert options.status_code == 200
        assert options.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-creator-id" in options.headers["access-control-allow-headers"]
        response = await served.ask(stream=True, headers={"origin": "https://chat.example"})
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert "retry-after-ms" in response.headers["access-control-expose-headers"]
        other = await served.ask(headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        refusal = await served.client.options(CHAT, headers=PREFLIGHT | {"origin": "https://evil.example"})
        assert refusal.status_code == 400
