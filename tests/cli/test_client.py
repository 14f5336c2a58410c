"""The commands' client: streams as they come, and every way in which they end."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from pipeline.cli import client, http
from pipeline.cli.client import Reply, chat_body, events, summary
from pipeline.config import Config, Up
from pipeline.errors import OperatorError
from tests.cli import double
from workers.supervisor.checks import free_ports

BODY = chat_body("hi", system=None, max_tokens=None)


def asked(*pieces: bytes, creator: str | None = None) -> tuple[Reply, str, list[bytes]]:
    """The reply to one chat, the text as it was shown, and what the gateway got."""
    shown: list[str] = []

    async def main() -> tuple[Reply, list[bytes]]:
        async with double.gateway(*pieces) as (url, requests):
            return await client.chat(client.Gateway(url), BODY, creator, shown.append), requests

    reply, requests = asyncio.run(main())
    return reply, "".join(shown), requests


def test_a_whole_reply_is_text_times_and_usage() -> None:
    reply, shown, _ = asked(double.WHOLE)
    assert (shown, reply.text, reply.finish_reason, reply.error) == ("Paris", "Paris", "stop", None)
    assert reply.usage.cached_tokens == 64
    assert reply.ttft_s is not None
    assert 0 < reply.ttft_s <= reply.e2e_s
    assert summary(reply).endswith(
        "prompt 70 tokens, 64 cached · reply 2 tokens · prefill-1 → decode-1, 64 handed over"
    )


def test_a_reply_is_the_same_however_the_network_cuts_it() -> None:
    reply, _, _ = asked(*(bytes([byte]) for byte in double.WHOLE))
    assert (reply.text, reply.error) == ("Paris", None)


def test_the_creator_travels_in_a_header_as_utf_8() -> None:
    _, _, requests = asked(double.WHOLE, creator="Zoë 🌊")
    assert "x-creator-id: Zoë 🌊\r\n".encode() in requests[0]
    assert msgspec.json.decode(requests[0].split(b"\r\n\r\n", 1)[1]) == BODY


def test_a_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"authorization" not in asked(double.WHOLE)[2][0]
    monkeypatch.setenv("HEADRACE_KEY", "hr-1")
    assert b"authorization: Bearer hr-1\r\n" in asked(double.WHOLE)[2][0]


def test_a_creator_cannot_inject_a_header() -> None:
    with pytest.raises(OperatorError, match="may not hold a line break"):
        asked(double.WHOLE, creator="ada\r\nx-evil: 1")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            b'HTTP/1.1 429 Too Many\r\ncontent-length: 33\r\n\r\n{"error":{"message":"Come back"}}',
            "HTTP 429: Come back",
        ),
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\nOops", "HTTP 502: Oops"),
        (double.HEAD + double.chunked(double.text("Pa")) + double.END, "The stream stopped before its end."),
        (
            double.HEAD + double.chunked(double.event('{"error":{"message":"lost","code":"reply_lost"}}')) + double.END,
            "lost",
        ),
    ],
)
def test_a_reply_that_is_not_whole_says_why(answer: bytes, error: str) -> None:
    assert asked(answer)[0].error == error


@pytest.mark.parametrize("answer", [b"", double.HEAD + double.chunked(double.text("Pa")), b"nonsense\r\n\r\n"])
def test_a_connection_that_breaks_is_an_error(answer: bytes) -> None:
    reply, _, _ = asked(answer)
    assert reply.error is not None
    assert "broke off" in reply.error


def test_no_gateway_is_said_with_a_remedy() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    reply = asyncio.run(client.chat(client.Gateway(url), BODY, None, lambda _: None))
    assert reply.error == f"No gateway answers at {url}. Start one with `headrace up`, or give --url."


def test_events_are_taken_only_when_whole() -> None:
    buffer = bytearray()
    assert events(buffer, b"data: 1\n\nda") == [b"1"]
    assert events(buffer, b"ta: 2\n") == []
    assert events(buffer, b"\ndata: 3\n\n") == [b"2", b"3"]
    assert not buffer


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://host:0"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(OperatorError, match="is no URL of a gateway"):
        http.split(url)


def test_a_get_reads_status_and_body() -> None:
    async def main() -> tuple[int, bytes]:
        async with double.gateway(b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno") as (url, _):
            return await http.get(f"{url}/ready?x=1", 5.0)

    assert asyncio.run(main()) == (503, b"no")


def test_the_gateway_is_the_one_asked_for_else_the_running_one_else_the_configured(tmp_path: Path) -> None:
    config = Config(up=Up(state_dir=str(tmp_path)))
    assert client.gateway("http://elsewhere:1/", None, config).url == "http://elsewhere:1"
    assert client.gateway(None, None, config).url == "http://127.0.0.1:8000"
    last = tmp_path / client.LAST_RUN
    last.write_bytes(msgspec.json.encode({"pid": os.getpid(), "gateway": "http://127.0.0.1:7"}))
    assert client.gateway(None, None, config).url == "http://127.0.0.1:7"
    last.write_text("half a")
    assert client.gateway(None, None, config).url == "http://127.0.0.1:8000"
