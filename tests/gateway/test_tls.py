"""The door over TLS: the same door."""

import ssl
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest

from pipeline import tls
from pipeline.cli import client
from pipeline.config import Config, Up
from pipeline.config import Gateway as GatewayConfig
from pipeline.doctor import look
from pipeline.errors import OperatorError
from tests.certificates import self_made
from tests.gateway.stack import CHAT, HELLO, Stack, stack, text_of
from tests.gateway.worker_double import saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio


async def test_a_reply_streams_over_tls_and_plain_http_is_not_served(broker: NatsServer, tmp_path: Path) -> None:
    cert, key = self_made(tmp_path)
    async with stack(broker.url, tls_cert=str(cert), tls_key=str(key)) as served:
        served.double.script = saying("yes")
        assert served.url.startswith("https://")
        async with httpx.AsyncClient(base_url=served.url, verify=ssl.create_default_context(cafile=cert)) as known:
            response = await known.post(CHAT, json=HELLO | {"stream": True})
            assert (response.status_code, response.headers["content-type"][:17]) == (200, "text/event-stream")
            assert text_of(response.content)
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(served.url.replace("https", "http") + "/health")


async def test_what_is_no_http_is_told_so_over_tls_as_well(broker: NatsServer, tmp_path: Path) -> None:
    cert, key = self_made(tmp_path)
    async with stack(broker.url, tls_cert=str(cert), tls_key=str(key)) as served:
        port = int(served.url.rpartition(":")[2])
        trust = ssl.create_default_context(cafile=cert)
        async with await anyio.connect_tcp("127.0.0.1", port, ssl_context=trust, tls_standard_compatible=False) as door:
            await door.send(b"\x00\r\n\r\n")
            said = b""
            with anyio.fail_after(5):
                async for piece in door:
                    said += piece
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"This is not valid HTTP." in said


async def chat(served: Stack, ca: Path | None, config: Config, url: str | None = None) -> client.Reply:
    """As `headrace chat` does it."""
    at = client.gateway(url, ca, config)
    with anyio.fail_after(10):
        return await client.chat(at, HELLO | {"stream": True}, "ada", lambda _: None)


async def test_the_commands_know_their_own_gateway_and_believe_others_by_who_has_signed(
    broker: NatsServer, tmp_path: Path
) -> None:
    cert, key = self_made(tmp_path)
    other, _ = self_made(tmp_path, "other")
    async with stack(broker.url, tls_cert=str(cert), tls_key=str(key)) as served:
        served.double.script = saying("yes")
        port = int(served.url.rpartition(":")[2])
        gateway = GatewayConfig(port=port, tls_cert=str(cert), tls_key=str(key))
        ours, anybodys = (Config(gateway=one, up=Up(state_dir=str(tmp_path))) for one in (gateway, GatewayConfig()))
        assert client.gateway(None, None, ours).url == served.url
        assert (await chat(served, None, ours)).error is None
        assert await look._gateway_error(ours) == "", "nor does headrace doctor complain"
        strange = Config(gateway=msgspec.structs.replace(gateway, tls_cert=str(other)))
        assert "No gateway answers at https://" in await look._gateway_error(strange)
        unread = Config(gateway=msgspec.structs.replace(gateway, tls_cert=str(tmp_path / "none.pem")))
        assert "Correct gateway.tls_cert." in await look._gateway_error(unread)
        assert (await chat(served, cert, anybodys, served.url)).error is None
        for ca in (None, other):
            error = (await chat(served, ca, anybodys, served.url)).error
            assert error
            assert "is not trusted" in error
            assert "--ca" in error


def test_a_gateway_whose_certificate_cannot_be_read_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"gateway\.tls_cert"):
        tls.server_files(GatewayConfig(tls_cert=str(tmp_path / "none"), tls_key=str(tmp_path / "none")))
