"""Requests that are wrong, and what their sender is told. None of them reaches the queue."""

from typing import Any

import anyio
import httpx
import pytest

from tests.gateway.stack import CHAT, HELLO, Stack
from tests.gateway.worker_double import Job, saying

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def refused(response: httpx.Response, status: int, code: str, param: str | None) -> str:
    """The message of a refusal in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert response.headers["x-should-retry"] == "false"
    return str(error["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no JSON",
        b'{"messages": [',
        b'{"messages": []} x',
        b"[1, 2]",
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'\xef\xbb\xbf{"messages": []}',
        b"\x81\xa8messages\x90",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
        b'{"seed": 100000000000000000000, "messages": [{"role": "user", "content": "x"}]}',
        b"[" * 50_000,
        b'{"messages": [{"role": "user", "content": "x"}], "extra": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
    ],
    ids=range(15),
)
async def test_a_body_that_is_no_json_object_in_utf8_is_a_400(served: Stack, body: bytes) -> None:
    response = await served.client.post(CHAT, content=body)
    assert refused(response, 400, "invalid_value", None)
    assert served.double.seen == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [USER, {"role": 7, "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"tools": "hammer"}, "tools"),
        ({"response_format": "json"}, "response_format"),
        ({"logprobs": 3}, "logprobs"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"user": 7}, "user"),
    ],
)
async def test_a_wrong_field_is_a_400_that_names_it(served: Stack, fields: dict[str, Any], param: str) -> None:
    response = await served.ask(HELLO | fields)
    assert refused(response, 400, "invalid_value", param)
    assert served.double.seen == 0


async def test_messages_may_not_be_missing(served: Stack) -> None:
    response = await served.client.post(CHAT, json={"model": "x"})
    assert "messages" in refused(response, 400, "invalid_value", "messages")


async def test_a_refused_image_is_said_to_be_one(served: Stack) -> None:
    response = await served.ask(messages=[{"role": "user", "content": [IMAGE]}])
    assert "only text parts are served" in refused(response, 400, "invalid_value", "messages[0].content[0].type")


async def test_text_parts_and_unknown_fields_reach_the_worker(served: Stack) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    job = await answered(served, messages=[{"role": "user", "content": parts}], ignore_eos=True, top_k=40, x={"y": [1]})
    assert job.tree["messages"] == [{"role": "user", "content": parts}]
    assert (job.tree["ignore_eos"], job.tree["top_k"], job.tree["x"]) == (True, 40, {"y": [1]})


async def test_what_is_ours_cannot_be_set_from_outside(served: Stack) -> None:
    job = await answered(served, type="x", v=9, timeout_ms=1, kv_transfer_params={"a": 1}, claim_at="$JS")
    assert (job.tree["type"], job.tree["v"], job.tree["timeout_ms"]) == ("chat", 1, 60_000)
    assert job.tree["claim_at"].startswith("_INBOX.")
    assert "kv_transfer_params" not in job.tree


async def test_an_unknown_model_is_a_404_and_the_served_one_may_be_named(served: Stack) -> None:
    message = refused(await served.ask(model="gpt-9"), 404, "model_not_found", "model")
    assert "double-1" in message
    assert (await answered(served, model="double-1")).tree["model"] == "double-1"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413_and_never_reaches_nats(served: Stack, chunked: bool) -> None:
    body = b'{"messages": [{"role": "user", "content": "' + b"x" * 2_000_000 + b'"}]}'

    async def pieces() -> Any:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    response = await served.client.post(CHAT, content=pieces() if chunked else body)
    assert "500000" in refused(response, 413, "request_too_large", None)
    assert served.double.seen == 0
    assert served.gateway.bus.connected
    assert (await served.client.get("/health")).status_code == 200, "the connection may be used again"


async def test_a_body_that_grows_past_natss_limit_is_a_413_and_the_connection_lives(served: Stack) -> None:
    floats = b"[" + b",".join([b"1.5"] * 120_000) + b"]"  # 4 bytes each as JSON, 9 as msgpack
    response = await served.client.post(
        CHAT, content=b'{"messages": [{"role": "user", "content": "x"}], "y": ' + floats + b"}"
    )
    assert refused(response, 413, "request_too_large", None)
    assert served.double.seen == 0
    assert served.gateway.bus.connected


async def test_a_declared_length_over_the_limit_is_refused_before_the_body_comes(served: Stack) -> None:
    host, _, port = served.url.removeprefix("http://").partition(":")
    async with await anyio.connect_tcp(host, int(port)) as client:
        await client.send(f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 2000000\r\n\r\n".encode())
        with anyio.fail_after(5):
            assert (await client.receive()).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("klass", ["urgent", "Interactive", "a.b", ">", "ünïcode"])
async def test_an_unknown_class_is_a_400(served: Stack, klass: str) -> None:
    response = await served.client.post(CHAT, json=HELLO, headers=[(b"x-request-class", klass.encode())])
    assert "interactive or batch" in refused(response, 400, "invalid_value", "x-request-class")


@pytest.mark.parametrize("timeout", ["", "0", "-1", "1.5", "soon", "9" * 40, "²"])
async def test_a_timeout_that_is_none_is_a_400(served: Stack, timeout: str) -> None:
    response = await served.client.post(CHAT, json=HELLO, headers=[(b"x-request-timeout-ms", timeout.encode())])
    assert refused(response, 400, "invalid_value", "x-request-timeout-ms")


@pytest.mark.parametrize(
    ("klass", "asked", "granted"),
    [("interactive", "1500", 1500), ("interactive", "999999", 60_000), ("batch", "999999", 600_000)],
)
async def test_a_timeout_is_granted_up_to_the_bound_of_its_class(
    served: Stack, klass: str, asked: str, granted: int
) -> None:
    job = await answered(served, headers={"x-request-class": klass, "x-request-timeout-ms": asked})
    assert job.tree["timeout_ms"] == granted


async def test_a_batch_request_goes_into_the_batch_queue(served: Stack) -> None:
    job = await answered(served, headers={"x-request-class": "batch"})
    assert job.subject == "requests.in.batch.default.default"


@pytest.mark.parametrize(
    ("header", "user", "token"),
    [
        (None, None, "default"),
        (b"", "", "default"),
        (None, "ada", "ada"),
        (b"grace", "ada", "grace"),
        (b"a.b", None, "a=2Eb"),
        (b"*", None, "=2A"),
        (b">", None, "=3E"),
        (b"two words", None, "two=20words"),
        (b"$JS.API.STREAM.DELETE", None, "=24JS=2EAPI=2ESTREAM=2EDELETE"),
        ("🦜".encode(), None, "=F0=9F=A6=9C"),
        ("é".encode(), None, "=C3=A9"),
        (b"\xe9", None, "=C3=A9"),
        (None, "a\r\nPUB x 0\r\n\r\n", "a=0D=0APUB=20x=200=0D=0A=0D=0A"),
        (None, "a\0b", "a=00b"),
    ],
)
async def test_a_creator_becomes_one_token_whatever_it_is(
    served: Stack, header: bytes | None, user: str | None, token: str
) -> None:
    fields = {} if user is None else {"user": user}
    job = await answered(served, headers={} if header is None else {"x-creator-id": header}, **fields)
    assert job.subject == f"requests.in.interactive.{token}.{token}"


@pytest.mark.parametrize("creator", ["c" * 500, "🦜" * 500, "." * 65])
async def test_a_long_creator_becomes_a_hash(served: Stack, creator: str) -> None:
    job = await answered(served, user=creator)
    token = job.subject.rpartition(".")[2]
    assert token.startswith("=h")
    assert len(token) == 54
    assert job.tree["user"] == creator


async def answered(served: Stack, headers: Any = None, **fields: Any) -> Job:
    """The job that a good request becomes."""
    jobs: list[Job] = []

    async def script(job: Job) -> None:
        jobs.append(job)
        await saying("yes")(job)

    served.double.script = script
    response = await served.client.post(CHAT, json=HELLO | fields, headers=headers)
    assert response.status_code == 200, response.text
    (job,) = jobs
    return job


async def test_a_tenant_is_named_by_a_header_and_never_by_the_body(served: Stack) -> None:
    job = await answered(served, headers={"x-tenant-id": "acme"}, tenant="another")
    assert job.tree["tenant"] == "acme"
    job = await answered(served, tenant="another")
    assert "tenant" not in job.tree
